//! What people build on the verbs: rdma-core's own suite, UCX and libfabric, through `softhca exec`; and the view
//! of `/sys` and `/dev` that they need.

// Another target uses the rest of it.
mod pyverbs;
#[allow(dead_code)]
#[path = "../programs/rig.rs"]
mod rig;
mod sysfs;

use libtest_mimic::Trial;
use rig::{Rig, Running, free_port};
use softhca_tests::{namespace, tools};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    if !cfg!(target_os = "linux") {
        return ExitCode::SUCCESS;
    }
    let mut tests = vec![
        needs_sysfs_view("sh", "the_card_is_shown_in_sys_and_dev", sysfs::the_card_is_shown_in_sys_and_dev),
        needs_sysfs_view("sh", "everything_else_is_as_it_was", sysfs::everything_else_is_as_it_was),
        needs_sysfs_view(
            "sh",
            "nothing_is_shown_if_nobody_wants_it",
            sysfs::nothing_is_shown_if_nobody_wants_it,
        ),
        needs_sysfs_view("setpriv", "it_takes_no_rights", sysfs::it_takes_no_rights),
        needs_sysfs_view("/usr/bin/python3", "rdma_core_tests_itself", pyverbs::rdma_core_tests_itself),
    ];
    for (transports, test) in UCX {
        let name = format!("ucx_perftest_{transports}_{test}").replace([',', ':'], "_");
        tests.push(needs_sysfs_view("ucx_perftest", &name, move || ucx(transports, test)));
    }
    for kind in ["dgram", "rdm"] {
        tests.push(tools::needs_with("fi_pingpong", &format!("fi_pingpong_{kind}"), move || libfabric(kind)));
    }
    for (provider, kind) in [("verbs", "msg"), ("verbs;ofi_rxm", "rdm")] {
        let name = format!("fi_pingpong_{kind}_on_a_network");
        tests.push(needs_network("fi_pingpong", &name, move || connected(provider, kind)));
    }
    tools::run(tests)
}

/// A test that needs a program, and the view.
fn needs_sysfs_view(program: &'static str, name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    needs_permission(
        sysfs::is_allowed(),
        "no mount namespace: `softhca doctor` says why",
        program,
        name,
        test,
    )
}

/// A test that needs a program, and a network of its own.
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
    if is_allowed {
        return tools::needs_with(program, name, test);
    }
    if namespace::is_required() {
        return Trial::test(name, move || Err(reason.into()));
    }
    eprintln!("skipped: {reason}");
    Trial::test(name, || Ok(())).with_ignored_flag(true)
}

/// UCX's RC needs UD beside it, to connect: what it calls `rc_v`.
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

/// Runs both ends of a program, the client with more words.
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

fn ucx(transports: &str, test: &str) {
    let mut rig = Rig::new();
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

/// Datagrams, and reliable datagrams that libfabric makes of them (ofi_rxd).
fn libfabric(kind: &str) {
    let mut rig = Rig::new();
    let port = free_port();
    let number = port.to_string();
    let shared = ["fi_pingpong", "-p", "verbs", "-e", kind, "-I", "20", "-S", "1024"];
    let mut server = rig.start(&[&shared[..], &["-B", &number]].concat());
    rig::await_listener(port);
    let mut client = rig.start(&[&shared[..], &["-P", &number, "localhost"]].concat());
    for seen in [client.wait(), server.wait()] {
        assert!(seen.success && seen.text.contains("1k      20      =20"), "{seen:?}");
    }
}

/// Connections by the RDMA CM: libfabric looks for cards on interfaces other than loopback.
fn connected(provider: &str, kind: &str) {
    let wrapper = namespace::wrapper().expect("it was looked for");
    let rig = Rig::new();
    let output = Command::new(wrapper[0])
        .args(&wrapper[1..])
        .args(["sh", "-c", CONNECTED])
        .env("SOFTHCA", rig::softhca())
        .env("XDG_RUNTIME_DIR", rig.file("."))
        .env("PAIR", format!("fi_pingpong -p {provider} -e {kind} -I 20 -S 4096"))
        // The completion queue that libfabric asks for grows with it, and a card's is smaller than 256 need.
        .env("FI_UNIVERSE_SIZE", "64")
        .output()
        .expect("a shell");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.matches("4k      20      =20").count() == 2, "{output:?}");
}

/// An interface with an address, a card on it, and both ends of a program.
const CONNECTED: &str = r#"
ip link add cable0 type veth peer name cable1 && ip link set cable1 up || ip link add cable0 type dummy
ip addr add 10.9.0.1/24 dev cable0 && ip link set cable0 up || exit 1
"$SOFTHCA" daemon --host alice=10.9.0.1 > "$XDG_RUNTIME_DIR/ready" &
daemon=$!
until grep -q ^ready "$XDG_RUNTIME_DIR/ready"; do sleep 0.1; kill -0 $daemon || exit 1; done
set -f; IFS=' '; set -- $PAIR
"$SOFTHCA" exec -- timeout 60 "$@" -B 18000 &
server=$!
until grep -q ' 00000000:4650 ' /proc/net/tcp; do sleep 0.1; kill -0 $server || exit 1; done
"$SOFTHCA" exec -- timeout 60 "$@" -P 18000 10.9.0.1
client=$?
wait $server
server=$?
"$SOFTHCA" stop > /dev/null
exit $((client + server))
"#;
