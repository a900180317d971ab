//! rsockets: programs that call them, and programs that use sockets under librdmacm's preload library.

use crate::exec::{compile_with, compiler};
use crate::rig::{Rig, Running, free_port};
use libtest_mimic::Trial;
use softhca_tests::{needs, tools};
use std::path::Path;

const PRELOAD: &str = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so";

/// The tests of this file. `rstream` and `riostream` are in the list of pairs.
pub fn trials() -> Vec<Trial> {
    let mut tests = vec![
        needs!(compiler(), calls_of_rsockets_behave_like_those_of_sockets),
        needs!("rcopy", rcopy_copies_a_file),
        needs!(preload("curl"), curl_reads_from_a_server_under_the_preload_library),
        needs!(preload("python3"), a_program_without_a_peer_uses_tcp_under_the_preload_library),
    ];
    for options in ["-n 64M", "-n 64M -R", "-n 16M -P 4", "-n 16M --bidir"] {
        let name = format!("iperf3_under_the_preload_library_{}", options.replace(' ', "_"));
        tests.push(tools::needs_with(preload("iperf3"), &name, move || iperf3(options)));
    }
    tests
}

/// The program, or the package that is missing.
fn preload(program: &'static str) -> &'static str {
    if Path::new(PRELOAD).exists() { program } else { "librdmacm1" }
}

fn under_preload<'a>(variable: &'a str, words: &[&'a str]) -> Vec<&'a str> {
    [&["env", variable][..], words].concat()
}

/// Starts a server and waits until it listens on the emulated host.
fn start_server(rig: &mut Rig, words: &[&str]) -> Running {
    let mut server = rig.start(words);
    rig.await_cm_listener(&mut server).unwrap_or_else(|why| panic!("{words:?}: {why}"));
    server
}

fn calls_of_rsockets_behave_like_those_of_sockets() {
    let mut rig = Rig::new();
    let program = compile_with(&rig, "rsockets", &["-lrdmacm", "-lpthread"]);
    let seen = rig.run(&[&program, &free_port().to_string()]);
    assert!(seen.success && seen.text.contains("all calls behave"), "{seen:?}");
}

fn rcopy_copies_a_file() {
    let mut rig = Rig::new();
    let data: Vec<u8> = (0..3_000_017_u32).map(|index| (index % 251) as u8).collect();
    let (source, copy) = (rig.file("source"), rig.file("copy"));
    std::fs::write(&source, &data).expect("the temporary folder can be written");
    let port = free_port().to_string();
    let server = start_server(&mut rig, &["rcopy", "-p", &port]);
    let seen = rig.run(&["rcopy", &source, &format!("127.0.0.1:{copy}"), "-p", &port]);
    assert!(seen.success, "{seen:?}");
    server.kill();
    assert!(std::fs::read(&copy).expect("a copy") == data, "{seen:?}");
}

fn iperf3(options: &str) {
    let mut rig = Rig::new();
    let port = free_port().to_string();
    let variable = format!("LD_PRELOAD={PRELOAD}");
    let mut server = start_server(&mut rig, &under_preload(&variable, &["iperf3", "-s", "-1", "-p", &port]));
    let mut words = vec!["iperf3", "-c", "127.0.0.1", "-p", &port];
    words.extend(options.split(' '));
    let seen = [rig.run(&under_preload(&variable, &words)), server.wait()];
    assert!(seen.iter().all(|seen| seen.success && !seen.text.contains("error")), "{seen:?}");
    // The data did not take the way of TCP.
    rig.await_packets(4_000);
}

fn curl_reads_from_a_server_under_the_preload_library() {
    let mut rig = Rig::new();
    let program = compile_with(&rig, "rsockets", &["-lrdmacm", "-lpthread"]);
    let (port, variable) = (free_port().to_string(), format!("LD_PRELOAD={PRELOAD}"));
    let mut server = start_server(&mut rig, &under_preload(&variable, &[&program, &port, "http"]));
    let (url, file) = (format!("http://127.0.0.1:{port}/"), rig.file("page"));
    let seen = [
        rig.run(&under_preload(&variable, &["curl", "--silent", "--show-error", "-o", &file, &url])),
        server.wait(),
    ];
    assert!(seen.iter().all(|seen| seen.success), "{seen:?}");
    let page = std::fs::read(&file).expect("a page");
    assert!(page.len() == 3 << 20 && page.iter().all(|byte| *byte == b'z'), "{} bytes", page.len());
}

/// Python's sockets have flags in their type, which rsockets do not: it uses TCP, as without a card.
fn a_program_without_a_peer_uses_tcp_under_the_preload_library() {
    let script = "import socket, sys, threading\n\
        listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n\
        def serve():\n\
        \x20   peer, _ = listener.accept()\n\
        \x20   peer.sendall(peer.recv(100).upper())\n\
        threading.Thread(target=serve).start()\n\
        with socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as client:\n\
        \x20   client.sendall(b'over tcp')\n\
        \x20   print(client.recv(100).decode())\n";
    let (variable, port) = (format!("LD_PRELOAD={PRELOAD}"), free_port().to_string());
    let seen = Rig::new().run(&under_preload(&variable, &["python3", "-c", script, &port]));
    assert!(seen.success && seen.text.contains("OVER TCP"), "{seen:?}");
}
