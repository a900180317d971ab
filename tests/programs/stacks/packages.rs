//! Programs from PyPI and crates.io, which `.ci/packages` installs in `target/tools`. Without them, their tests count as ignored.

use super::cards::await_packets;
use super::workloads::{report, run_over_tcp};
use crate::rig::{Rig, await_listener, free_port};
use libtest_mimic::Trial;
use std::path::Path;

pub fn trials() -> Vec<Trial> {
    let python = "venv/bin/python";
    vec![
        installed(python, "mooncake", || mooncake("softhca0")),
        installed(python, "mooncake_two_cards", || mooncake("softhca0,softhca1")),
        installed(python, "mooncake_survives_a_flapping_rail", mooncake_survives_a_flapping_rail),
        installed(python, "nixl", nixl),
        installed("bin/loopback", "crate_ibverbs", crate_ibverbs),
        installed("bin/rc_pingpong", "crate_sideway", crate_sideway),
    ]
}

/// The path of an installed file.
fn tool(file: &str) -> String {
    format!("{}/../target/tools/{file}", env!("CARGO_MANIFEST_DIR"))
}

/// A test that needs an installed file.
fn installed(file: &'static str, name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    let is_installed = Path::new(&tool(file)).exists();
    if !is_installed {
        eprintln!("skipped: {name} needs target/tools/{file}: .ci/packages");
    }
    let run = move || {
        test();
        Ok(())
    };
    Trial::test(name, run).with_ignored_flag(!is_installed)
}

fn script(name: &str) -> String {
    format!("{}/programs/stacks/{name}.py", env!("CARGO_MANIFEST_DIR"))
}

/// Mooncake's transfer engine.
fn mooncake(devices: &str) {
    let mut rig = Rig::with_two_cards();
    let [python, script] = [tool("venv/bin/python"), script("transfer_engine")];
    let seen = rig.run(&[&python, &script, "rdma", devices]);
    let tcp = run_over_tcp(&[&python, &script, "tcp"]);
    report(&format!("Mooncake on {devices}"), &seen, "checked", &tcp);
}

/// Mooncake moves to the other card when one is down, and no transfer fails.
fn mooncake_survives_a_flapping_rail() {
    let mut rig = Rig::with_two_cards();
    let [python, script, end] = [tool("venv/bin/python"), script("transfer_engine"), rig.file("end")];
    let mut program = rig.start(&[&python, &script, "rdma", "softhca0,softhca1", &end]);
    while !rig.softhca(&["resource", "softhca1"]).success {
        assert!(!program.has_ended(), "{:?}", program.wait());
    }
    await_packets(&rig, "softhca1", 1000, &mut program);
    assert!(rig.softhca(&["link", "softhca1", "down"]).success);
    await_packets(&rig, "softhca0", 20_000, &mut program);
    assert!(rig.softhca(&["link", "softhca1", "up"]).success);
    await_packets(&rig, "softhca0", 5000, &mut program);
    rig.write("end", "");
    let seen = program.wait();
    assert!(seen.success && seen.text.contains(", 0 transfers failed before"), "{seen:?}");
}

/// NIXL's wheel brings its own libibverbs, so it needs `--preload`.
fn nixl() {
    let mut rig = Rig::new();
    let [python, script] = [tool("venv/bin/python"), script("nixl_agents")];
    let program =
        ["env", "UCX_TLS=rc_verbs,ud_verbs", "UCX_NET_DEVICES=softhca0:1", python.as_str(), script.as_str()];
    let seen = rig.run(&program);
    assert!(!seen.success && seen.text.contains("'softhca0:1' is not available"), "{seen:?}");
    let seen = rig.exec(&["--preload"], &program);
    let tcp = run_over_tcp(&["env", "UCX_TLS=tcp", &python, &script]);
    report("NIXL", &seen, "checked", &tcp);
}

/// The crate's example: a message to itself, with GID index 1.
fn crate_ibverbs() {
    let seen = Rig::new().run(&[&tool("bin/loopback")]);
    assert!(seen.success && seen.text.contains("sent") && seen.text.contains("received"), "{seen:?}");
}

/// The crate's example, between two processes.
fn crate_sideway() {
    // Either end sends as soon as its own queue pair is in RTS, when the peer may be in INIT.
    let mut rig = Rig::with_go_back_n();
    let [program, port] = [tool("bin/rc_pingpong"), free_port().to_string()];
    let mut server = rig.start(&[&program, "-p", &port]);
    await_listener(port.parse().expect("a port"));
    let seen = [rig.run(&[&program, "-p", &port, "127.0.0.1"]), server.wait()];
    assert!(seen.iter().all(|seen| seen.success && seen.text.contains("1000 iters")), "{seen:?}");
}
