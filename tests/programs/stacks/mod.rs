//! Software on top of verbs under `softhca exec`: rdma-core's test suite, UCX, libfabric, MPI, storage, and programs from PyPI and
//! crates.io; and the view of `/sys` and `/dev` that they need.

mod cards;
mod packages;
mod pyverbs;
mod sysfs;
mod workloads;

use crate::rig::{self, Rig, Running, free_port};
use libtest_mimic::Trial;
use softhca_tests::{namespace, tools};
use std::process::{Command, Output};
use sysfs::Method;

pub fn trials() -> Vec<Trial> {
    let mut tests = vec![
        // It takes longest.
        pyverbs::trial(),
        needs_sysfs_view("sh", "no_view_hides_the_device", sysfs::no_view_hides_the_device),
        needs_sysfs_view(
            "ibv_rc_pingpong",
            "the_view_needs_no_privileges",
            sysfs::the_view_needs_no_privileges,
        ),
        tools::needs_with("ibv_rc_pingpong", "counters_are_live_files", sysfs::counters_are_live_files),
        tools::needs_with(
            "prometheus-node-exporter",
            "node_exporter_exports_the_counters",
            sysfs::node_exporter_exports_the_counters,
        ),
        tools::needs_with(
            "sh",
            "a_shell_with_the_environment_sees_the_device",
            sysfs::a_shell_with_the_environment_sees_the_device,
        ),
    ];
    let glob = || sysfs::glob_finds_the_device(Method::Preload);
    tests.push(tools::needs_with("python3", "glob_finds_the_device_preload", glob));
    let nftw = || sysfs::nftw_visits_the_device(Method::Preload);
    tests.push(tools::needs_with("python3", "nftw_visits_the_device_preload", nftw));
    for method in [Method::Mount, Method::Preload, Method::Refused] {
        let label = format!("{method:?}").to_lowercase();
        let visible = move || sysfs::the_device_is_visible_in_sys_and_dev(method);
        let unchanged = move || sysfs::the_rest_of_sys_and_dev_is_unchanged(method);
        let names = [format!("the_device_is_visible_{label}"), format!("the_rest_is_unchanged_{label}")];
        match method {
            Method::Preload => tests.extend([
                tools::needs_with("sh", &names[0], visible),
                tools::needs_with("sh", &names[1], unchanged),
            ]),
            // A machine that refuses namespaces cannot create the one in which they are refused.
            _ => tests.extend([
                needs_sysfs_view("unshare", &names[0], visible),
                needs_sysfs_view("unshare", &names[1], unchanged),
            ]),
        }
    }
    let cards: [(&'static str, &str, fn()); 6] = [
        ("ibv_devices", "programs_see_all_cards_of_their_host", cards::programs_see_all_cards_of_their_host),
        ("ibv_devinfo", "a_scenario_takes_one_card_down", cards::a_scenario_takes_one_card_down),
        (
            "ibv_rc_pingpong",
            "a_card_that_is_down_affects_itself_alone",
            cards::a_card_that_is_down_affects_itself_alone,
        ),
        (
            "rping",
            "connections_use_the_card_of_their_address",
            cards::connections_use_the_card_of_their_address,
        ),
        ("ucx_perftest", "ucx_uses_two_rails", cards::ucx_uses_two_rails),
        ("ucx_perftest", "ucx_survives_a_flapping_rail", cards::ucx_survives_a_flapping_rail),
    ];
    tests.extend(cards.map(|(program, name, test)| tools::needs(program, name, test)));
    tests.extend(workloads::trials());
    tests.extend(packages::trials());
    for test in ["tag_lat", "ucp_put_bw"] {
        let name = format!("ucx_perftest_without_namespaces_{test}");
        let run = move || ucx(Rig::with_preloaded_view(), "rc_verbs,ud_verbs:aux", test);
        tests.push(tools::needs_with("ucx_perftest", &name, run));
    }
    for (transports, test) in UCX {
        let name = format!("ucx_perftest_{transports}_{test}").replace([',', ':'], "_");
        tests.push(needs_sysfs_view("ucx_perftest", &name, move || ucx(Rig::new(), transports, test)));
    }
    for kind in ["dgram", "rdm"] {
        tests.push(tools::needs_with("fi_pingpong", &format!("fi_pingpong_{kind}"), move || libfabric(kind)));
    }
    for (provider, kind) in [("verbs", "msg"), ("verbs;ofi_rxm", "rdm")] {
        let name = format!("fi_pingpong_{kind}_on_a_network");
        tests.push(needs_network("fi_pingpong", &name, move || connected(provider, kind)));
    }
    let labs: [(&'static str, &str, fn()); 2] = [
        ("ib_write_bw", "the_hosts_of_a_lab_have_interfaces", the_hosts_of_a_lab_have_interfaces),
        ("unshare", "a_lab_that_is_forbidden_says_why", a_lab_that_is_forbidden_says_why),
    ];
    tests.extend(labs.map(|(program, name, test)| needs_network(program, name, test)));
    tests
}

/// A test that needs a program and the view.
fn needs_sysfs_view(program: &'static str, name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    needs_permission(
        sysfs::is_allowed(),
        "no mount namespace: `softhca doctor` says why",
        program,
        name,
        test,
    )
}

/// A test that needs a program and a network namespace.
fn needs_network(program: &'static str, name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    needs_permission(namespace::wrapper().is_some(), namespace::NOT_ALLOWED, program, name, test)
}

fn needs_permission(
    is_allowed: bool,
    reason: &'static str,
    program: &'static str,
    name: &str,
    test: impl FnOnce() + Send + 'static,
) -> Trial {
    match is_allowed {
        true => tools::needs_with(program, name, test),
        false => tools::needs_condition(false, reason.into(), name, test),
    }
}

/// UCX's RC (`rc_v`) needs UD too, to connect.
const UCX: [(&str, &str); 8] = [
    ("rc_verbs,ud_verbs:aux", "tag_lat"),
    ("rc_verbs,ud_verbs:aux", "tag_bw"),
    ("rc_verbs,ud_verbs:aux", "ucp_put_lat"),
    ("rc_verbs,ud_verbs:aux", "ucp_put_bw"),
    ("ud_verbs", "tag_lat"),
    ("ud_verbs", "tag_bw"),
    ("ud_verbs", "ucp_put_lat"),
    ("ud_verbs", "ucp_put_bw"),
];

/// Runs both ends of a program, the client with additional arguments.
fn run_both(rig: &mut Rig, variables: &[String], shared: &[&str], client: &[&str], port: u16) {
    let with = |words: &[&str]| {
        let mut all = vec!["env".to_string()];
        all.extend(variables.iter().cloned());
        all.extend(words.iter().map(|word| word.to_string()));
        all
    };
    let start = |rig: &mut Rig, words: Vec<String>| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        rig.start(&words)
    };
    let mut server: Running = start(rig, with(shared));
    rig::await_listener(port);
    let mut client = start(rig, with(&[shared, client].concat()));
    let seen = [client.wait(), server.wait()];
    assert!(seen.iter().all(|seen| seen.success && !seen.text.contains("ERROR")), "{shared:?}: {seen:?}");
}

fn ucx(mut rig: Rig, transports: &str, test: &str) {
    let port = free_port();
    let variables = [format!("UCX_TLS={transports}"), "UCX_NET_DEVICES=softhca0:1".into()];
    let number = port.to_string();
    let shared = ["ucx_perftest", "-p", &number];
    run_both(
        &mut rig,
        &variables,
        &shared,
        &["localhost", "-t", test, "-n", "200", "-w", "10", "-s", "4096"],
        port,
    );
}

/// Datagrams, and libfabric's reliable datagrams on top of them (ofi_rxd).
fn libfabric(kind: &str) {
    let mut rig = Rig::new();
    let shared = ["fi_pingpong", "-p", "verbs", "-e", kind, "-I", "20", "-S", "1024"];
    // After all messages and their completions, one end sometimes crashes in libfabric 1.17, which calls through the
    // endpoint of a connection that it has closed: about once in 200 runs.
    for attempt in 1.. {
        let port = free_port();
        let number = port.to_string();
        let mut server = rig.start(&[&shared[..], &["-B", &number]].concat());
        rig::await_listener(port);
        let mut client = rig.start(&[&shared[..], &["-P", &number, "localhost"]].concat());
        let seen = [client.wait(), server.wait()];
        assert!(seen.iter().all(|end| end.text.contains("1k      20      =20")), "{seen:?}");
        if seen.iter().all(|end| end.success) {
            break;
        }
        assert!(attempt < 3, "{seen:?}");
    }
}

/// Runs both ends of a program on two hosts of a lab and returns the output. `port` is the TCP port of the server.
fn run_in_a_lab(server: &str, client: &str, port: u16) -> String {
    let output = lab(server, client, port);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn lab(server: &str, client: &str, port: u16) -> Output {
    let rig = Rig::new();
    let listens = format!(":{port:04X} .* 0A ");
    Command::new(rig::softhca())
        .args(["lab", "--", "sh", "-c", LAB])
        .env("SOFTHCA", rig::softhca())
        .env("XDG_RUNTIME_DIR", rig.file("."))
        .current_dir(rig.file("."))
        .envs([("SERVER", server), ("CLIENT", client), ("LISTENS", listens.as_str())])
        .output()
        .expect("the command runs")
}

/// The server runs on bob, the client on alice.
const LAB: &str = r#"
set -f; IFS=' '
"$SOFTHCA" lab --on bob -- timeout 60 $SERVER &
server=$!
"$SOFTHCA" lab --on bob -- timeout 60 sh -c 'until cat /proc/net/tcp /proc/net/tcp6 | grep -q "$LISTENS"; do sleep 0.1; done' || exit 1
timeout 60 $CLIENT || exit 1
wait $server
"#;

/// Connections with the RDMA CM: libfabric ignores devices on loopback interfaces.
fn connected(provider: &str, kind: &str) {
    let pair = format!("fi_pingpong -p {provider} -e {kind} -I 20 -S 4096");
    // An end can crash after all messages, as in `libfabric`.
    for attempt in 1.. {
        let output = lab(&format!("{pair} -B 18000"), &format!("{pair} -P 18000 10.77.0.2"), 18000);
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(text.matches("4k      20      =20").count(), 2, "{output:?}");
        if output.status.success() {
            break;
        }
        assert!(attempt < 3, "{output:?}");
    }
}

fn the_hosts_of_a_lab_have_interfaces() {
    let text = run_in_a_lab("ib_write_bw -n 200", "ib_write_bw -n 200 10.77.0.2", 18515);
    assert!(text.contains("GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:77:00:01"), "{text}");
    let rig = Rig::new();
    let script = "cat /sys/class/infiniband/*/ports/1/gid_attrs/ndevs/0; ip -o -4 addr show eth0; exit 7";
    let seen =
        rig.softhca(&["lab", "--host", "carol", "--host", "dave", "--on", "dave", "--", "sh", "-c", script]);
    assert!(seen.code == Some(7) && seen.text.contains("eth0\n"), "{seen:?}");
    assert!(seen.text.contains("10.77.0.2/24"), "{seen:?}");
    let seen = rig.softhca(&["lab", "--on", "nobody", "--", "true"]);
    assert!(seen.code == Some(125) && seen.text.contains("the lab has no host \"nobody\""), "{seen:?}");
}

/// Where the kernel forbids namespaces, the message says so.
fn a_lab_that_is_forbidden_says_why() {
    let softhca = rig::softhca();
    let script = "echo 0 > /proc/sys/user/max_net_namespaces; exec \"$0\" lab -- true";
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "sh", "-c", script])
        .arg(softhca)
        .output()
        .expect("unshare runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(125) && text.contains("which the kernel forbids here"),
        "{output:?}"
    );
}
