//! Every example runs to its end.

use crate::free_address;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The example's program, which Cargo builds beside the tests.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let directory = test.ancestors().nth(2).expect("target/<profile>");
    let program = directory.join("examples").join(name);
    assert!(program.exists(), "{} is not there: cargo build -p softhca --examples", program.display());
    program
}

fn output(name: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program(name));
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the example starts");
    // What they print fits a pipe, so that waiting first is fine; one that hangs is ended and shown.
    let deadline = Instant::now() + Duration::from_secs(60);
    while child.try_wait().expect("the example's state").is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let output = child.wait_with_output().expect("the example's output");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {arguments:?}: {}\n{text}{errors}", output.status);
    text
}

#[test]
fn pingpongs_print_their_figures() {
    for kind in ["rc", "uc", "ud", "srq"] {
        for (size, more) in [("512", &[][..]), ("1000", &["-e"])] {
            let text = output("pingpong", &[&["--type", kind, "-n", "50", "-s", size], more].concat());
            let bytes = 50 * 2 * size.parse::<u32>().unwrap();
            assert!(text.contains(&format!("{bytes} bytes in ")), "{kind}: {text}");
            assert!(text.contains("50 iters in "), "{kind}: {text}");
        }
    }
}

#[test]
fn a_pingpong_runs_as_two_processes() {
    // Below the ephemeral ports of the kernel.
    let mut ports = (0..1000).map(|index| 20_000 + (std::process::id() as u16).wrapping_add(index) % 10_000);
    let is_free = |port: &u16| TcpListener::bind(("0.0.0.0", *port)).is_ok();
    let mut start = || {
        let port = ports.find(is_free).expect("a free port").to_string();
        let arguments = ["--server", "-n", "20", "-p", &port];
        let server = Command::new(program("pingpong")).args(arguments).spawn().expect("the server starts");
        (server, port)
    };
    let (mut server, mut port) = start();
    // The server needs a moment until it listens.
    let mut last = None;
    let done = (0..50).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        let client = ["127.0.0.1", "-n", "20", "-p", &port];
        let output = Command::new(program("pingpong")).args(client).output().expect("the client starts");
        let done = last.insert(output).status.success();
        // Another process may have bound the port first.
        if !done && server.try_wait().expect("the server's state").is_some_and(|status| !status.success()) {
            (server, port) = start();
        }
        done
    });
    if !done {
        let _ = server.kill();
    }
    let status = server.wait().expect("the server's state");
    assert!(done && status.success(), "the server: {status}, the client: {last:?}");
}

#[test]
fn tables_have_the_columns_of_the_originals() {
    assert!(output("devices", &[]).contains("softhca0"));
    let text = output("devices", &["-v"]);
    for part in ["hca_id:\tsofthca0", "node_guid:", "max_qp:", "active_mtu:", "link_layer:", "RoCE v2"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn events_are_watched() {
    let text = output("asyncwatch", &[]);
    assert!(text.contains("SharedReceiveQueueLimit") && text.contains("QueuePairAccessError"), "{text}");
}

#[test]
fn one_sided_examples_tell_what_they_did() {
    let text = output("write_read_atomic", &[]);
    assert!(text.contains("the counter was 20 and is 30"), "{text}");
    assert!(text.contains("8 found the lock taken by 7"), "{text}");
    assert!(output("key_value_store", &[]).contains("2000 reads, every value whole"));
}

#[test]
fn the_deterministic_test_prints_the_same_in_every_run() {
    let text = output("deterministic_test", &[]);
    assert!(text.contains("packet +1 dropped"), "{text}");
    assert_eq!(text, output("deterministic_test", &[]));
}

#[test]
fn rping_prints_what_came_back() {
    for arguments in [&["-C", "3", "-v", "-V"][..], &["-C3", "-v", "-V", "-q", "-S", "100"]] {
        let text = output("cm", &[&["rping"], arguments].concat());
        for round in 0..3 {
            assert!(text.contains(&format!("server ping data: rdma-ping-{round}: ")), "{text}");
            assert!(text.contains(&format!("\nping data: rdma-ping-{round}: ")), "{text}");
        }
        assert!(text.contains("ping data: rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefgh"), "{text}");
        assert!(text.contains("server DISCONNECT EVENT...") && text.contains("client DISCONNECT EVENT..."));
    }
}

#[test]
fn connections_are_made_by_their_examples() {
    let text = output("cm", &["ucmatose", "-c", "3", "-C", "4", "-m"]);
    for part in
        ["cmatose: starting server", "cmatose: connecting", "migrating", "test complete", "return status 0"]
    {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(text.matches("data transfers complete").count(), 2, "{text}");
    let text = output("cm", &["udaddy", "-c", "2", "-C", "4"]);
    for part in ["udaddy: starting client", "sending replies", "test complete", "return status 0"] {
        assert!(text.contains(part), "{text}");
    }
    let text = output("cm", &["mckey", "-m", "239.3.2.1", "-C", "4"]);
    for part in ["mckey: joined dgid: ::ffff:239.3.2.1", "receiving data transfers", "return status 0"] {
        assert!(text.contains(part), "{text}");
    }
    let text = output("cm", &["cmtime", "-c", "20"]);
    for part in
        ["step              total ms     max ms     min us  us / conn", "connect      :", "destroy      :"]
    {
        assert!(text.contains(part), "{text}");
    }
}

/// A program on a host of its own, ended when the test is.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server at this address, and runs its client until that finds it.
fn two_processes(address: &str, server: &[&str], client: &[&str]) -> [String; 2] {
    let mut command = Command::new(program("cm"));
    let started = command.args(server).env("SOFTHCA_ADDRESS", address).stdout(Stdio::piped()).spawn();
    let mut server = Server(started.expect("the server starts"));
    // Each client is a host of its own, not one that another card was a moment ago.
    let run = || {
        let mut command = Command::new(program("cm"));
        command.args(client).env("SOFTHCA_ADDRESS", free_address()).output().expect("the client starts")
    };
    // The server needs a moment until it listens.
    let done = (0..100).find_map(|_| {
        let output = run();
        if !output.status.success() {
            std::thread::sleep(Duration::from_millis(100));
        }
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    });
    let done = done.expect("the client finds the server");
    assert!(server.0.wait().expect("the server ends").success());
    let mut text = String::new();
    std::io::Read::read_to_string(&mut server.0.stdout.take().expect("a pipe"), &mut text).unwrap();
    [text, done]
}

#[test]
fn servers_and_clients_find_each_other_by_their_addresses() {
    let address = &free_address();
    let client = ["rping", "-c", "-a", address, "-v", "-C2"];
    let [there, here] = two_processes(address, &["rping", "-s", "-v"], &client);
    assert!(there.contains("server ping data: rdma-ping-1: "), "{there}");
    assert!(here.contains("ping data: rdma-ping-1: "), "{here}");
    let address = &free_address();
    let [there, here] = two_processes(address, &["rdma_server"], &["rdma_client", "-s", address]);
    assert!(there.contains("rdma_server: end 0") && here.contains("rdma_client: end 0"), "{there}{here}");
}
