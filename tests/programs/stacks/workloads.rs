//! MPI, storage and virtualization: each program on the emulated card, and the same program over TCP in the same run.
//! `--nocapture` prints both figures.

use crate::rig::{ProgramOutput, Rig, await_listener, free_port};
use libtest_mimic::Trial;
use softhca_tests::tools;
use std::process::{Command, Stdio};

pub fn trials() -> Vec<Trial> {
    let mut tests = vec![
        tools::needs("qperf", "qperf", qperf),
        tools::needs("tgtd", "tgt", tgt),
        tools::needs("qemu-system-x86_64", "qemu_migration", qemu_migration),
        tools::needs_with("mpicc.mpich", "mpich", || mpich("rc_v,ud_v,self")),
    ];
    for transports in ["rc_v,ud_v,self", "ud_v,self"] {
        let name = format!("open_mpi_{}", &transports[..2]);
        tests.push(tools::needs_with("mpicc.openmpi", &name, || open_mpi(transports)));
    }
    for verb in ["write", "read", "send"] {
        tests.push(tools::needs_with("fio", &format!("fio_{verb}"), || fio(verb)));
    }
    tests
}

/// The output of a program over TCP, for the comparison: a failure says nothing of the device, so it is only printed.
/// (MPICH over TCP sometimes prints its figure and then does not end.)
pub fn run_over_tcp(words: &[&str]) -> String {
    let mut command = Command::new("timeout");
    command.arg("60").args(words).stdin(Stdio::null());
    let output = command.output().expect("timeout runs");
    if !output.status.success() {
        eprintln!("over TCP, without the device, {words:?} failed: {output:?}");
    }
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The lines of a program that contain a mark; a carriage return ends a line too.
fn figures(text: &str, mark: &str) -> String {
    let lines: Vec<&str> =
        text.split(['\n', '\r']).map(str::trim).filter(|line| line.contains(mark)).collect();
    lines.join("; ")
}

/// Requires success and a figure, and prints it beside that of TCP, if there is one.
pub fn report(program: &str, seen: &ProgramOutput, mark: &str, tcp: &str) {
    let figure = figures(&seen.text, mark);
    assert!(seen.success && !figure.is_empty(), "{program}: {seen:?}");
    eprintln!("{program}: {figure}, over TCP: {}", figures(tcp, mark));
}

/// Builds the MPI program.
fn mpi_program(rig: &Rig, compiler: &str) -> String {
    let program = rig.file("mpi");
    let source = format!("{}/programs/stacks/mpi.c", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(compiler).args(["-O2", "-o", &program, &source]).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    program
}

fn open_mpi(transports: &str) {
    let mut rig = Rig::new();
    let program = mpi_program(&rig, "mpicc.openmpi");
    let start = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"];
    let transport = format!("UCX_TLS={transports}");
    let ucx = [
        "--mca",
        "pml",
        "ucx",
        "-x",
        transport.as_str(),
        "-x",
        "UCX_NET_DEVICES=softhca0:1",
        program.as_str(),
    ];
    let seen = rig.run(&[&start[..], &ucx].concat());
    let tcp =
        run_over_tcp(&[&start[..], &["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", &program]].concat());
    report(&format!("Open MPI {transports}"), &seen, "checked", &tcp);
}

fn mpich(transports: &str) {
    let mut rig = Rig::new();
    let program = mpi_program(&rig, "mpicc.mpich");
    let start = ["mpirun.mpich", "-np", "2", "-genv", "UCX_TLS"];
    let seen =
        rig.run(&[&start[..], &[transports, "-genv", "UCX_NET_DEVICES", "softhca0:1", &program]].concat());
    let tcp = run_over_tcp(&[&start[..], &["tcp,self", &program]].concat());
    report("MPICH", &seen, "checked", &tcp);
}

fn qperf() {
    let mut rig = Rig::new();
    let tests =
        ["-t", "1", "-cm1", "rc_bw", "rc_lat", "rc_rdma_write_bw", "rc_rdma_read_bw", "tcp_bw", "tcp_lat"];
    let port = free_port().to_string();
    let server = rig.start(&["qperf", "-lp", &port]);
    await_listener(port.parse().expect("a port"));
    let seen = rig.run(&[&["qperf", "localhost", "-lp", &port][..], &tests].concat());
    server.kill();
    assert!(seen.success && seen.text.matches("bw  =").count() == 4, "{seen:?}");
    eprintln!("qperf: {}", seen.text.split_whitespace().collect::<Vec<_>>().join(" "));
}

fn fio(verb: &'static str) {
    let mut rig = Rig::new();
    let port = free_port().to_string();
    // fio asks for no RNR retries, so every message of a send finds a receive that was posted before: 16 of them.
    let size = if verb == "send" { "--size=1m" } else { "--size=16m" };
    let common = ["--bs=64k", size];
    let port_option = format!("--port={port}");
    let receiver = ["fio", "--name=receiver", "--ioengine=rdma", "--rw=read", "--iodepth=16", &port_option];
    let mut server = rig.start(&[&receiver[..], &common].concat());
    rig.await_cm_listener(&mut server).unwrap_or_else(|why| panic!("{why}"));
    let verb_option = format!("--verb={verb}");
    let sender =
        ["fio", "--name=sender", "--ioengine=rdma", "--rw=write", "--hostname=127.0.0.1", "--iodepth=1"];
    let seen = rig.run(&[&sender[..], &[&port_option, &verb_option], &common].concat());
    let received = server.wait();
    assert!(received.success, "{received:?}");
    let tcp_port = format!("--port={}", free_port());
    let tcp = ["--ioengine=net", "--protocol=tcp", &tcp_port, "--bs=64k"];
    // The receiver waits for more than is sent: if it closed first, the sender would fail.
    let listener = Command::new("fio")
        .args(tcp)
        .args(["--name=receiver", "--rw=read", "--listen", "--size=32m"])
        .stdout(Stdio::null())
        .spawn();
    let mut listener = listener.expect("fio runs");
    await_listener(tcp_port.trim_start_matches("--port=").parse().expect("a port"));
    let own = ["--name=sender", "--rw=write", "--hostname=127.0.0.1", "--size=16m"];
    let sender = [&["fio"][..], &tcp, &own].concat();
    let over_tcp = run_over_tcp(&sender);
    let _ = listener.wait();
    report(&format!("fio {verb}"), &seen, "WRITE: bw", &over_tcp);
}

/// The whole memory of a machine of 256 MiB, of which 192 MiB have contents.
fn qemu_migration() {
    let mut rig = Rig::new();
    let script = format!("{}/programs/stacks/migrate.py", env!("CARGO_MANIFEST_DIR"));
    let uri = |kind: &str| format!("{kind}:127.0.0.1:{}", free_port());
    let seen = rig.run(&["python3", &script, &uri("rdma")]);
    let tcp = run_over_tcp(&["python3", &script, &uri("tcp")]);
    report("QEMU migration", &seen, "completed", &tcp);
}

const INITIATOR: &str = "iqn.2026-01.test:initiator";

/// tgt's target over iSER and over iSCSI, and libiscsi's programs: three suites of its conformance test, and a measurement.
fn tgt() {
    let mut rig = Rig::new();
    let socket = rig.file("ipc");
    let variable = format!("TGT_IPC_SOCKET={socket}");
    let iscsi = free_port();
    let portal = format!("portal=127.0.0.1:{iscsi}");
    let mut target = rig.start(&["env", &variable, "tgtd", "-f", "--iscsi", &portal]);
    rig.await_cm_listener(&mut target).unwrap_or_else(|why| panic!("{why}"));
    await_listener(iscsi);
    let administer = |words: &str| {
        let mut command = Command::new("tgtadm");
        command.env("TGT_IPC_SOCKET", &socket).args(words.split(' ')).output().expect("tgtadm runs")
    };
    while !administer("--mode sys --op show").status.success() {
        assert!(!target.has_ended(), "{:?}", target.wait());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let disks = ["iser", "iscsi"].map(|driver| rig.write(driver, &"\0".repeat(16 << 20)));
    for (tid, driver, disk) in [(1, "iser", &disks[0]), (2, "iscsi", &disks[1])] {
        for words in [
            format!("--mode target --op new --tid {tid} --targetname iqn.2026-01.test:{driver}"),
            format!("--mode logicalunit --op new --tid {tid} --lun 1 --backing-store {disk}"),
            format!("--mode target --op bind --tid {tid} --initiator-address ALL"),
            // Over iSER, tgt before 1.0.95 compares both the address and the name.
            format!("--mode target --op bind --tid {tid} --initiator-name {INITIATOR}"),
        ] {
            let output = administer(&format!("--lld {driver} {words}"));
            assert!(output.status.success(), "{words}: {output:?}");
        }
    }
    let url = "iser://127.0.0.1:3260/iqn.2026-01.test:iser/1".to_string();
    // libiscsi 1.19 crashes when one process connects again over iSER, as the test does for a second suite.
    for suite in ["SCSI.Read10.Simple", "SCSI.Write10.Simple", "SCSI.Verify10.Simple"] {
        let seen = rig.run(&["iscsi-test-cu", "-i", INITIATOR, "--dataloss", "-t", suite, &url]);
        assert!(seen.success && seen.text.contains("...passed"), "{suite}: {seen:?}");
    }
    let disk = std::fs::read(&disks[0]).expect("the disk");
    assert!(disk[..512].iter().all(|byte| *byte == 0xa6), "what the test wrote: {:x?}", &disk[..16]);
    let measure = ["iscsi-perf", "-i", INITIATOR, "-b", "128", "-m", "16", "-t", "2"];
    let seen = rig.run(&[&measure[..], &[&url]].concat());
    let url = format!("iscsi://127.0.0.1:{iscsi}/iqn.2026-01.test:iscsi/1");
    let tcp = run_over_tcp(&[&measure[..], &[&url]].concat());
    report("tgt", &seen, "iops average", &tcp);
}
