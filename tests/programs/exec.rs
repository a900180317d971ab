//! Unmodified Debian programs on emulated hosts: both ends on this machine, under `softhca exec`.

use crate::rig::{self, Rig, run_pair};
use libtest_mimic::Trial;
use softhca_tests::{needs, tools};
use std::process::Command;
use std::time::Duration;

pub fn trials() -> Vec<Trial> {
    let mut tests = vec![
        needs!("ibv_devices", the_device_is_listed),
        needs!("ibv_devinfo", the_device_is_described),
        needs!("ibv_devinfo", a_profile_describes_its_card),
        needs!("ib_write_bw", perftest_runs_with_the_profile_of_a_card),
        needs!("sh", exit_codes_are_those_of_env),
        needs!("sh", settings_of_a_running_daemon_do_not_change),
        needs!("ibv_rc_pingpong", the_data_path_can_be_chosen),
        needs!("ibv_devinfo", address_variable_is_the_address_of_the_programs_host),
        needs!("ibv_rc_pingpong", a_killed_peer_is_an_error),
        needs!("ibv_rc_pingpong", a_killed_peer_on_the_same_device_is_an_error),
        needs!("ibv_rc_pingpong", a_killed_daemon_is_an_error),
        needs!("ib_write_bw", eight_pairs_run_at_once),
        needs!("ibv_devices", packets_are_captured),
        needs!("true", an_unwritable_file_exits_with_125),
        needs!("mckey", multicast_reaches_the_members_of_a_group),
        needs!("cmtime", cmtime_measures_connections),
        needs!("sh", a_program_ends_with_exec),
        needs!("ib_write_bw", a_stopped_explorer_does_not_stop_the_daemon),
        needs!(compiler(), a_program_forks_while_writes_are_outstanding),
        needs!(compiler(), windows_bind_as_the_manual_says),
        needs!(compiler(), threads_that_wait_for_events_wake_each_other),
        needs!(compiler(), verbs_in_any_order_are_rejected_or_executed),
        needs!(compiler(), every_rejected_call_sets_errno_and_is_explained),
        needs!(compiler(), polling_never_sleeps),
        needs!(compiler(), the_calls_of_a_collective_library_work),
        needs!(compiler(), the_calls_of_a_collective_library_work_on_secret_memory),
        needs!(compiler(), why_reports_a_requester_that_waits_for_ever),
        needs!(compiler(), why_names_the_line_that_posted_a_failed_request),
        needs!(compiler(), what_is_released_before_its_request_completes_is_an_error),
        needs!("ib_write_bw", a_program_that_ends_at_once_has_loaded_the_library),
        needs!(compiler(), why_explains_a_queue_pair_that_refuses_its_own_request),
    ];
    for words in PAIRS {
        let program = words.split(' ').next().expect("a program");
        let name = words.replace(' ', "_");
        // Each side sends as soon as it is ready itself. Without retransmission the other side must be ready too.
        let is_hasty = program == "ibv_xsrq_pingpong";
        let rig = move || if is_hasty { Rig::with_go_back_n() } else { Rig::new() };
        tests.push(tools::needs_with(program, &name, move || run_pair(&mut rig(), words)));
    }
    for words in DEVICE_LOOPBACK_PAIRS {
        let program = words.split(' ').next().expect("a program");
        let name = format!("within_a_card_{}", words.replace(' ', "_"));
        tests.push(tools::needs_with(program, &name, move || {
            run_pair(&mut Rig::with_internal_loopback(), words)
        }));
    }
    tests
}

/// Programs that run as server and client. Those of librdmacm-utils take the address with `-s`.
const PAIRS: &[&str] = &[
    "ibv_rc_pingpong -g 0 -n 200",
    "ibv_rc_pingpong -g 0 -n 200 -e",
    "ibv_rc_pingpong -g 0 -n 200 -N",
    "ibv_rc_pingpong -g 0 -n 200 -c",
    "ibv_rc_pingpong -g 0 -s 1048576 -n 1000",
    "ibv_uc_pingpong -g 0 -n 200",
    "ibv_ud_pingpong -g 0 -n 200",
    "ibv_rc_pingpong -g 1 -n 200",
    "ibv_ud_pingpong -g 1 -n 200",
    "ib_write_bw -n 100 -x 1",
    "ibv_srq_pingpong -g 0 -n 200",
    "ibv_xsrq_pingpong -g 0 -n 200",
    "ib_send_bw -n 100",
    "ib_send_bw -n 100 -c UC",
    "ib_send_bw -n 100 -c UD",
    "ib_send_bw -n 100 -c UD -g -x 1",
    "ib_send_bw -n 100 -c UD -g -M 0:0:0:0:0:0:0:0:0:0:255:255:239:1:2:3",
    "ib_send_bw -n 100 -e",
    "ib_send_bw -n 100 -b",
    "ib_send_bw -n 100 --use-srq -q 2",
    "ib_send_bw -n 50 -q 8",
    "ib_send_bw -n 100 -R",
    "ib_send_bw -n 100 -c XRC",
    "ib_send_lat -n 100 -c XRC",
    "ib_write_bw -n 100 -c XRC",
    "ib_write_lat -n 50 -c XRC",
    "ib_read_bw -n 100 -c XRC",
    "ib_atomic_bw -n 100 -c XRC",
    "ib_send_bw -n 100 -R -c UD",
    "ib_send_lat -n 100",
    "ib_send_lat -n 100 -c UC",
    "ib_send_lat -n 100 -c UD",
    "ib_send_lat -n 100 -s 64 -I 64",
    "ib_send_lat -n 10 -a",
    "ib_send_lat -n 100 -e",
    "ib_send_lat -n 100 --use-srq",
    "ib_send_lat -n 100 -R",
    "ib_write_bw -n 100",
    "ib_write_bw -n 100 -b",
    "ib_write_bw -n 100 -s 64 -I 64",
    "ib_write_bw -n 100 -c UC",
    "ib_write_bw -n 50 -q 8",
    "ib_write_bw -n 10 -a",
    "ib_write_bw -n 100 -R",
    "ib_write_lat -n 50",
    "ib_write_lat -n 50 -c UC",
    "ib_write_lat -n 50 -s 64 -I 64",
    "ib_write_lat -n 50 -R",
    "ib_read_bw -n 100",
    "ib_read_bw -n 100 -b",
    "ib_read_bw -n 100 -e",
    "ib_read_bw -n 50 -q 8",
    "ib_read_bw -n 10 -a",
    "ib_read_bw -n 100 -R",
    "ib_read_lat -n 100",
    "ib_read_lat -n 100 -R",
    "ib_atomic_bw -n 100",
    "ib_atomic_bw -n 50 -q 8",
    "ib_atomic_bw -n 100 -R",
    "ib_atomic_lat -n 100",
    "ib_atomic_lat -n 100 -R",
    "rstream -T v -S all -I 10 -C 10",
    "rstream -T b -T v -S 65536 -I 100 -C 10",
    "rstream -T a -T v -S 4096 -I 100 -C 10",
    "rstream -T n -S 1048576 -I 10 -C 10",
    "riostream -T v -S all -I 10 -C 10",
    "riostream -T b -S 65536 -I 100 -C 10",
    "rping -C 100 -v -V",
    "ucmatose",
    "udaddy",
    "rdma_server",
    "rdma_xserver",
];

/// Pairs that run with `--loopback internal`: both ends are on one host.
const DEVICE_LOOPBACK_PAIRS: &[&str] = &[
    "ibv_rc_pingpong -g 0 -n 200 -e",
    "ibv_rc_pingpong -g 0 -s 1048576 -n 1000",
    "ibv_uc_pingpong -g 0 -n 200",
    "ibv_ud_pingpong -g 0 -n 200",
    "ibv_srq_pingpong -g 0 -n 200",
    "ib_send_bw -n 100 -b",
    "ib_send_bw -n 100 -R -c UD",
    "ib_send_lat -n 100 -s 64 -I 64",
    "ib_write_bw -n 10 -a",
    "ib_write_bw -n 50 -q 8",
    "ib_write_lat -n 50",
    "ib_read_bw -n 100 -b",
    "ib_atomic_bw -n 50 -q 8",
    "rping -C 100 -v -V",
    "udaddy",
];

fn the_device_is_listed() {
    let mut rig = Rig::new();
    let seen = rig.run(&["ibv_devices"]);
    assert!(seen.success && seen.text.contains("softhca0"), "{seen:?}");
    let other = rig.run_on("bob", &["ibv_devices"]);
    assert!(other.text.contains("softhca1") && !other.text.contains("softhca0"), "{other:?}");
}

/// It ends before `exec` can look at what it has mapped.
fn a_program_that_ends_at_once_has_loaded_the_library() {
    let mut rig = Rig::new();
    for words in [&["ib_write_bw", "--bogus"][..], &["sh", "-c", "ib_write_bw --bogus"]] {
        let seen = rig.run(words);
        let told = "loaded the emulated libibverbs and ended before it asked for a device";
        assert!(!seen.success && seen.text.contains(told), "{seen:?}");
    }
    let seen = rig.run(&["true"]);
    assert!(seen.text.contains("exec saw it load no libibverbs"), "{seen:?}");
}

fn the_device_is_described() {
    let seen = Rig::new().run(&["ibv_devinfo", "-v"]);
    for line in [
        "board_id:\t\t\tSoftHCA",
        "state:\t\t\tPORT_ACTIVE (4)",
        "RoCE v2",
        "MEM_WINDOW_TYPE_2B",
        "GID[  1]:\t\tfe80::5efe:7f",
    ] {
        assert!(seen.text.contains(line), "{line:?} is not in {seen:?}");
    }
}

fn a_profile_describes_its_card() {
    let mut rig = Rig::with(&["--profile", "mlx5"]);
    let seen = rig.run(&["ibv_devinfo", "-v"]);
    for line in
        ["vendor_id:\t\t\t0x02c9", "vendor_part_id:\t\t\t4119", "max_sge:\t\t\t30", "max_qp_rd_atom:\t\t\t16"]
    {
        assert!(seen.text.contains(line), "{line:?} is not in {seen:?}");
    }
    let seen = rig.exec(&["--profile", "rxe"], &["true"]);
    assert_eq!(seen.code, Some(125), "{seen:?}");
    let seen = Rig::new().exec(&["--profile", "mlx6"], &["true"]);
    assert!(seen.text.contains("expected one of softhca, rxe, mlx5"), "{seen:?}");
}

fn perftest_runs_with_the_profile_of_a_card() {
    for profile in ["mlx5", "rxe"] {
        let mut rig =
            Rig::with(if profile == "mlx5" { &["--profile", "mlx5"] } else { &["--profile", "rxe"] });
        run_pair(&mut rig, "ib_write_bw -n 100");
        run_pair(&mut rig, "ib_send_bw -n 100");
    }
}

fn exit_codes_are_those_of_env() {
    let mut rig = Rig::new();
    for (words, code) in [
        (&["sh", "-c", "exit 7"][..], 7),
        (&["sh", "-c", "kill -9 $$"], 137),
        (&["/nowhere/at/all"], 127),
        (&["no-such-program-anywhere"], 127),
        (&["/etc/passwd"], 126),
        (&["/"], 126),
        (&["--no-such-option", "true"], 125),
    ] {
        let seen = rig.run(words);
        assert_eq!(seen.code, Some(code), "{words:?}: {seen:?}");
    }
}

fn settings_of_a_running_daemon_do_not_change() {
    let mut rig = Rig::new();
    let here = rig.file("here");
    let _holder = rig.start(&["sh", "-c", &format!("touch {here}; exec sleep 100")]);
    while !std::path::Path::new(&here).exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let seen = rig.exec(&["--recovery", "go-back-n"], &["true"]);
    assert_eq!(seen.code, Some(125), "{seen:?}");
    assert!(seen.text.contains("has recovery fatal, not go-back-n"), "{seen:?}");
    assert_eq!(rig.exec(&["--recovery", "fatal"], &["true"]).code, Some(0));
    let seen = rig.exec(&["--loopback", "socket"], &["true"]);
    assert_eq!(seen.code, Some(125), "{seen:?}");
    assert!(seen.text.contains("has loopback internal, not socket"), "{seen:?}");
    assert_eq!(rig.exec(&["--loopback", "internal"], &["true"]).code, Some(0));
    let status = rig.softhca(&["status"]);
    assert!(status.text.contains("loopback internal"), "{status:?}");
    let seen = rig.exec(&["--host", "nobody"], &["true"]);
    assert_eq!(seen.code, Some(125), "{seen:?}");
}

fn the_data_path_can_be_chosen() {
    let mut rig = Rig::new();
    for (options, expected) in
        [(&[][..], "direct"), (&["--path", "daemon"], "daemon"), (&["--path", "direct"], "direct")]
    {
        let port = rig::free_port().to_string();
        let server = rig.start_with(options, &["ibv_rc_pingpong", "-g", "0", "-p", &port]);
        rig::await_listener(port.parse().expect("a port"));
        let status = rig.softhca(&["status", "--json"]);
        assert!(status.text.contains(&format!(r#""data_path":"{expected}""#)), "{options:?}: {status:?}");
        server.kill();
    }
    let seen = rig.exec(&["--path", "kernel"], &["true"]);
    assert_eq!(seen.code, Some(125), "{seen:?}");
    assert!(seen.text.contains("expected direct or daemon"), "{seen:?}");
    let scenario = rig.write("lost.toml", "title = \"x\"\n[hosts]\nalice = {}\nbob = {}\n");
    let seen = rig.exec(&["--path", "direct", "--scenario", &scenario], &["true"]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
    rig.softhca(&["stop"]);
    let (output, errors) = (rig.file("output"), rig.file("errors"));
    let mut daemon = rig.spawn_softhca(
        &["daemon", "--host", "alice", "--data-path", "daemon", "--idle-timeout", "60"],
        &output,
        &errors,
    );
    while !rig.softhca(&["status"]).success {
        assert!(
            daemon.try_wait().is_ok_and(|ended| ended.is_none()),
            "{:?}",
            std::fs::read_to_string(&errors)
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    let seen = rig.exec(&["--path", "direct"], &["true"]);
    assert_eq!(seen.code, Some(125), "{seen:?}");
    assert!(seen.text.contains("the daemon executes the transport of all programs on alice"), "{seen:?}");
    assert_eq!(rig.exec(&["--data-path", "daemon"], &["true"]).code, Some(0));
    rig.softhca(&["stop"]);
    let _ = daemon.wait();
}

fn address_variable_is_the_address_of_the_programs_host() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = |last: u8| format!("127.{}.{low}.{last}", 96 | high & 15);
    let mut rig = Rig::new();
    let here = rig.file("here");
    // The daemon has two hosts: only that of the program has the address.
    let script = format!("ibv_devinfo -v && touch {here} && exec sleep 100");
    let holder = rig.start_at(&address(1), &["--host", "bob"], &["sh", "-c", &script]);
    while !std::path::Path::new(&here).exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let seen = rig.exec(&["--host", "bob"], &["ibv_devinfo", "-v"]);
    assert!(seen.success && seen.text.contains(&format!("::ffff:{}", address(1))), "{seen:?}");
    let seen = rig.exec(&["--host", "alice"], &["ibv_devinfo", "-v"]);
    assert!(seen.success && !seen.text.contains(&address(1)), "{seen:?}");
    let seen = rig.start_at(&address(1), &["--host", "bob"], &["true"]).wait();
    assert_eq!(seen.code, Some(0), "{seen:?}");
    let seen = rig.start_at(&address(2), &["--host", "bob"], &["true"]).wait();
    assert_eq!(seen.code, Some(125), "{seen:?}");
    let message = format!("SOFTHCA_ADDRESS is {}, but host \"bob\"", address(2));
    assert!(seen.text.contains(&message), "{seen:?}");
    drop(holder);
}

/// The remaining program exits by itself with an error. WRITEs are always outstanding here: a program that only waits for
/// a message does not fail when its peer dies, on any device.
fn a_killed_peer_is_an_error() {
    check_killed_peer(Rig::new());
}

fn a_killed_peer_on_the_same_device_is_an_error() {
    check_killed_peer(Rig::with_internal_loopback());
}

fn check_killed_peer(mut rig: Rig) {
    let words = ["ib_write_bw", "-n", "100000000"];
    let (server, mut client) = rig.start_pair(&words);
    rig.await_packets(10_000);
    server.kill();
    let left = client.wait();
    assert!(!left.success, "{left:?}");
}

fn a_killed_daemon_is_an_error() {
    let mut rig = Rig::new();
    let words = ["ibv_rc_pingpong", "-g", "0", "-n", "100000000"];
    let (mut server, mut client) = rig.start_pair(&words);
    rig.await_packets(1000);
    rig.kill_daemon();
    for left in [server.wait(), client.wait()] {
        assert!(!left.success, "{left:?}");
    }
}

fn packets_are_captured() {
    let mut rig = Rig::new();
    let file = rig.file("capture.pcapng");
    let port = rig::free_port();
    let both = format!(
        "ibv_rc_pingpong -g 0 -n 10 -p {port} > /dev/null & \
         until grep -q ':{port:04X} [0-9A-F:]* 0A' /proc/net/tcp /proc/net/tcp6; do sleep 0.02; done; \
         ibv_rc_pingpong -g 0 -n 10 -p {port} localhost; code=$?; wait; exit $code"
    );
    let seen = rig.exec(&["--capture", &file], &["sh", "-c", &both]);
    assert!(seen.success, "{seen:?}");
    let packets = std::fs::metadata(&file).expect("the capture").len();
    // Ten messages of 4096 bytes in each direction, and their ACKs.
    assert!(packets > 20 * 4096, "{packets} bytes");
    let seen = rig.exec(&["--capture", &file, "--filter", "ack"], &["sh", "-c", &both]);
    assert!(seen.success, "{seen:?}");
    let capture =
        softhca_trace::CaptureReader::open(std::path::Path::new(&file)).expect("the filtered capture");
    let lines: Vec<String> =
        capture.map(|record| softhca_trace::Packet::new(&record.expect("a record"), 0).to_string()).collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.contains("ACKNOWLEDGE")), "{lines:?}");
    for (filter, message) in [("psm == 7", "did you mean psn?"), ("lost", "join two captures")] {
        let seen = rig.exec(&["--capture", &file, "--filter", filter], &["true"]);
        assert!(!seen.success && seen.text.contains(message), "{seen:?}");
    }
}

fn an_unwritable_file_exits_with_125() {
    let mut rig = Rig::new();
    let file = rig.file("none/file");
    for option in ["--capture", "--log"] {
        let seen = rig.exec(&[option, &file], &["true"]);
        assert_eq!(seen.code, Some(125), "{seen:?}");
        assert!(seen.text.contains(&format!("cannot write {file} ({option}): No such file")), "{seen:?}");
        assert!(seen.text.contains("create the folder first"), "{seen:?}");
    }
}

/// Datagrams before the receiver joins are lost, so send until it has received enough.
fn multicast_reaches_the_members_of_a_group() {
    let mut rig = Rig::new();
    let mut receiver = rig.start(&["mckey", "-m", "239.7.7.7", "-C", "10"]);
    while !receiver.has_ended() {
        let sender = rig.run(&["mckey", "-m", "239.7.7.7", "-C", "10", "-s"]);
        assert!(sender.success, "{sender:?}");
    }
    let seen = receiver.wait();
    assert!(seen.success, "{seen:?}");
}

/// The server of cmtime does not exit.
fn cmtime_measures_connections() {
    let mut rig = Rig::new();
    let mut server = rig.start(&["cmtime"]);
    rig.await_cm_listener(&mut server).expect("cmtime listens");
    let client = rig.run(&["cmtime", "-s", "127.0.0.1", "-c", "10"]);
    assert!(client.success && client.text.contains("disconnect"), "{client:?}");
}

/// The program does not outlive `softhca exec`, not even when SIGKILL ends that.
fn a_program_ends_with_exec() {
    let mut rig = Rig::new();
    let file = rig.file("process");
    let mut exec =
        rig.start(&["sh", "-c", &format!("echo $$ > {file}.new && mv {file}.new {file} && exec sleep 1000")]);
    while !std::path::Path::new(&file).exists() {
        assert!(!exec.has_ended(), "{:?}", exec.wait());
        std::thread::sleep(Duration::from_millis(10));
    }
    let process = std::fs::read_to_string(&file).expect("it exists");
    let stat = format!("/proc/{}/stat", process.trim());
    // Gone, or a zombie that its parent has not waited for.
    let is_running = || std::fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z "));
    assert!(is_running());
    exec.kill_only_exec();
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while is_running() {
        assert!(std::time::Instant::now() < until, "the program still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// `softhca explore` is stopped, as with Ctrl+Z: programs continue, and it learns why its recording ended.
fn a_stopped_explorer_does_not_stop_the_daemon() {
    use rustix::process::{Pid, Signal, kill_process};
    let mut rig = Rig::new();
    let here = rig.file("here");
    let _holder = rig.start(&["sh", "-c", &format!("touch {here}; exec sleep 1000")]);
    let await_that = |what: &str, held: &dyn Fn() -> bool| {
        let until = std::time::Instant::now() + Duration::from_secs(120);
        while !held() {
            assert!(std::time::Instant::now() < until, "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    await_that("the daemon does not start", &|| std::path::Path::new(&here).exists());
    let [output, errors] = ["output", "errors"].map(|name| rig.file(name));
    let mut explorer = rig.spawn_softhca(&["explore"], &output, &errors);
    let contains =
        |path: &str, text: &str| std::fs::read_to_string(path).is_ok_and(|found| found.contains(text));
    await_that("no page", &|| contains(&output, "http://127.0.0.1"));
    kill_process(Pid::from_child(&explorer), Signal::STOP).expect("it runs");
    // More events than the daemon keeps for a reader.
    let (mut server, mut client) = rig.start_pair(&["ib_write_bw", "-n", "5000"]);
    for seen in [client.wait(), server.wait()] {
        assert!(seen.success, "{seen:?}");
    }
    kill_process(Pid::from_child(&explorer), Signal::CONT).expect("it runs");
    await_that("the explorer says nothing", &|| contains(&errors, "does not keep up"));
    explorer.kill().expect("it runs");
    explorer.wait().expect("it ends");
}

fn the_calls_of_a_collective_library_work() {
    collective("heap");
}

/// On memory that `process_vm_readv` cannot reach, like the host memory of a GPU driver.
fn the_calls_of_a_collective_library_work_on_secret_memory() {
    collective("secret");
}

fn collective(memory: &str) {
    let mut rig = Rig::new();
    let program = compile(&rig, "collective");
    let seen = rig.run(&[&program, memory]);
    // Not every kernel has memfd_secret.
    if seen.code == Some(77) && memory == "secret" {
        return eprintln!("skipped: {}", seen.text);
    }
    assert!(seen.success && seen.text.contains("all rounds were right"), "{seen:?}");
}

/// The requirements to compile a verbs program: a compiler and the headers of libibverbs.
pub fn compiler() -> &'static str {
    match std::path::Path::new("/usr/include/infiniband/verbs.h").exists() {
        true => "cc",
        false => "libibverbs-dev",
    }
}

/// Compiles a program of this folder, with further arguments.
pub fn compile_with(rig: &Rig, name: &str, arguments: &[&str]) -> String {
    let program = rig.file(name);
    let source = format!("{}/programs/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-o", &program, &source]).args(arguments);
    assert!(compiler.status().expect("cc runs").success(), "{source} cannot be compiled");
    program
}

/// Compiles a program of this folder against libibverbs.
pub fn compile(rig: &Rig, name: &str) -> String {
    compile_with(rig, name, &["-libverbs"])
}

fn every_rejected_call_sets_errno_and_is_explained() {
    let mut rig = Rig::new();
    let program = compile_with(&rig, "rejected", &["-libverbs", "-lrdmacm"]);
    let seen = rig.run(&["env", "SOFTHCA_EXPLAIN=1", &program]);
    assert!(seen.success, "{seen:?}");
    let count = seen.text.split(" calls rejected").next().and_then(|text| text.split_whitespace().last());
    let count: usize = count.and_then(|count| count.parse().ok()).expect("the number of calls");
    let is_explanation =
        |line: &&str| line.starts_with("softhca: ibv_") || line.starts_with("softhca: rdma_");
    let explained: Vec<&str> = seen.text.lines().filter(is_explanation).collect();
    assert!(count > 50 && explained.len() == count, "{count} calls rejected: {explained:#?}");
    for reason in [
        "ibv_dealloc_pd: 1 objects use the protection domain",
        "ibv_dereg_mr: no memory region has handle",
        "ibv_dereg_mr: the memory region was destroyed",
        "ibv_modify_qp: ah_attr.is_global is 0: RoCE needs a GRH",
        "ibv_post_send: the queue pair is in RESET: the send queue takes work requests from RTS on",
        "ibv_post_recv: the queue pair is in RESET: the receive queue takes work requests from INIT on",
        "ibv_query_port: port 2 does not exist",
        "ibv_create_cq: cqe is 4194304, the limit is 4194303",
    ] {
        assert!(seen.text.contains(reason), "{reason:?} is not in {explained:#?}");
    }
    let quiet = rig.run(&[&program]);
    assert!(quiet.success && !quiet.text.contains("softhca: ibv_"), "{quiet:?}");
    let misspelt = rig.run(&["env", "SOFTHCA_EXPLAIN=1", "SOFTHCA_DATA_PATH=deamon", &program]);
    let reason = "SOFTHCA_DATA_PATH: it must be direct or daemon";
    assert!(!misspelt.success && misspelt.text.contains(reason), "{misspelt:?}");
}

fn polling_never_sleeps() {
    let mut rig = Rig::new();
    let program = compile_with(&rig, "rejected", &["-libverbs", "-lrdmacm"]);
    let seen = rig.run(&[&program, "polls"]);
    assert!(seen.success && seen.text.contains("slept 0 times"), "{seen:?}");
}

fn why_reports_a_requester_that_waits_for_ever() {
    let mut rig = Rig::new();
    let program = compile_with(&rig, "rejected", &["-libverbs", "-lrdmacm"]);
    let cases = [
        ("silent-peer", "work:fetched", "A timeout of 0 means to wait for ever"),
        (
            "no-receive",
            "rnr_wait_started",
            "alice.2 never posts a receive, and rnr_retry 7 means to try for ever",
        ),
    ];
    for (mode, event, cause) in cases {
        let log = rig.file(&format!("{mode}.jsonl"));
        let mut running = rig.start_with(&["--strict", "--log", &log], &[&program, mode]);
        while !std::fs::read_to_string(&log).is_ok_and(|text| text.contains(event)) {
            assert!(!running.has_ended(), "{:?}", running.wait());
            std::thread::sleep(Duration::from_millis(20));
        }
        let other = rig.start_with(&["--log", &log], &["true"]).wait();
        let refusal = format!("another command writes {log} (--log)");
        assert!(other.code == Some(125) && other.text.contains(&refusal), "{other:?}");
        running.terminate();
        let seen = running.wait();
        // A requester that waits for a peer in ERR is an error of the linter, a missing receive a warning.
        assert_eq!(seen.code == Some(123), mode == "silent-peer", "{seen:?}");
        assert!(seen.text.contains("SEND 7 of alice.1 has not ended"), "{seen:?}");
        let words = seen.text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(cause), "{seen:?}");
        let rejected = "softhca: ibv_post_send: the queue pair is in RTR";
        assert_eq!(seen.text.matches(rejected).count(), 1, "each reason is printed once: {seen:?}");
    }
}

/// `mistakes.c`, compiled with these arguments.
fn mistakes(rig: &Rig, arguments: &[&str]) -> String {
    compile_with(rig, "mistakes", &[arguments, &["-libverbs"]].concat())
}

/// The line of `mistakes.c` that ends with this mark.
fn line_with(mark: &str) -> usize {
    let mut lines = include_str!("mistakes.c").lines();
    lines.position(|line| line.ends_with(mark)).expect("it is marked") + 1
}

fn why_names_the_line_that_posted_a_failed_request() {
    let mut rig = Rig::new();
    for (arguments, path) in [(&["-g", "-O0"], "direct"), (&["-g", "-O2"], "daemon")] {
        let program = mistakes(&rig, arguments);
        for (mode, mark) in [("rkey", "/* posts here */"), ("builder", "/* the builder posts here */")] {
            let log = rig.file("run.jsonl");
            let seen = rig.exec(&["--why", "--path", path, "--log", &log], &[&program, mode]);
            let place = format!("mistakes.c:{}", line_with(mark));
            assert!(seen.text.contains("status 10"), "{seen:?}");
            assert!(seen.text.contains(&format!("Posted at {place}")), "{path} {place}: {seen:?}");
            let later = rig.softhca(&["why", "--json", &log]);
            assert!(later.text.contains(&format!("\"posted_at\":\"{place}\"")), "{later:?}");
        }
    }
    let program = mistakes(&rig, &["-O1", "-s"]);
    let seen = rig.exec(&["--why"], &[&program, "rkey"]);
    assert!(seen.text.contains("Posted at mistakes+0x"), "{seen:?}");
}

/// The queue pair is connected to itself, and in the error state when the second request is posted.
fn why_explains_a_queue_pair_that_refuses_its_own_request() {
    let mut rig = Rig::new();
    let program = mistakes(&rig, &["-g"]);
    for path in ["direct", "daemon"] {
        let log = rig.file("run.jsonl");
        let seen = rig.exec(&["--why", "--path", path, "--log", &log], &[&program, "alone"]);
        assert_eq!(seen.text.matches("status 5").count(), 2, "{path}: {seen:?}");
        let words = seen.text.split_whitespace().collect::<Vec<_>>().join(" ");
        let cause = "alice.1 refused its own request and stopped: no memory region has key 0x1.";
        assert!(words.contains(cause), "{path}: {seen:?}");
        let later = rig.softhca(&["why", "--json", "--wr", "7", &log]);
        for mark in ["/* posts here */", "/* the builder posts here */"] {
            let place = format!("\"posted_at\":\"mistakes.c:{}\"", line_with(mark));
            assert!(later.text.contains(&place), "{path} {place}: {later:?}");
        }
    }
}

/// Whatever the outcome is: it depends on the moment.
fn what_is_released_before_its_request_completes_is_an_error() {
    let mut rig = Rig::new();
    let program = mistakes(&rig, &[]);
    for path in ["direct", "daemon"] {
        let seen = rig.exec(&["--strict", "--path", path], &[&program, "dereg"]);
        assert_eq!(seen.code, Some(123), "{path}: {seen:?}");
        assert!(seen.text.contains("error[deregistered-in-use]: key 0x"), "{path}: {seen:?}");
    }
}

fn a_program_forks_while_writes_are_outstanding() {
    let seen = run_source("forking");
    assert!(seen.success && seen.text.contains("4000 writes, 20 forks"), "{seen:?}");
}

/// Compiles a C program of this folder and runs it.
fn run_source(name: &str) -> rig::ProgramOutput {
    let mut rig = Rig::new();
    let program = compile(&rig, name);
    rig.run(&[&program])
}

fn threads_that_wait_for_events_wake_each_other() {
    let seen = run_source("event_threads");
    assert!(seen.success && seen.text.contains("done"), "{seen:?}");
}

fn windows_bind_as_the_manual_says() {
    let seen = run_source("windows");
    assert!(seen.success && seen.text.contains("windows and datagrams work"), "{seen:?}");
}

/// The calls are in random order, but memory-safe: a failure is an error of the library. `SOFTHCA_SEQUENCES` sets the
/// number of seeds.
fn verbs_in_any_order_are_rejected_or_executed() {
    let mut rig = Rig::new();
    let program = compile(&rig, "sequences");
    let seeds = std::env::var("SOFTHCA_SEQUENCES").ok().and_then(|text| text.parse().ok()).unwrap_or(8u32);
    for seed in 1..=seeds {
        let seen = rig.run(&[&program, &seed.to_string(), "3000"]);
        assert!(seen.success && seen.text.contains("3000 steps"), "seed {seed}: {seen:?}");
    }
}

fn eight_pairs_run_at_once() {
    let mut rig = Rig::new();
    let pairs: Vec<_> = (0..8).map(|_| rig.start_pair(&["ib_write_bw", "-n", "50", "-s", "4096"])).collect();
    for (mut server, mut client) in pairs {
        for seen in [client.wait(), server.wait()] {
            assert!(seen.success, "{seen:?}");
        }
    }
}
