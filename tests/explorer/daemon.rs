//! `softhca explore` shows the events of a daemon live, protected by the token in the link.

use super::browser::Browser;
use crate::rig::softhca;
use softhca::{AccessFlags, ConnectOptions, Device, QpType, SendRequest};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

/// A process that is killed when the test ends.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the command and returns the rest of the line that begins with `prefix`.
fn start(arguments: &[&str], prefix: &str) -> (KillOnDrop, String) {
    // A shell starts background jobs with SIGINT ignored, which children inherit.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(softhca()).args(arguments).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    let child = KillOnDrop(child);
    let line = lines
        .find(|line| line.starts_with(prefix))
        .unwrap_or_else(|| panic!("{arguments:?} says no {prefix:?}"));
    (child, line[prefix.len()..].trim().to_owned())
}

/// The response of the server to a plain HTTP request.
fn http_response(address: &str, method: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").expect("it reads");
    let mut line = String::new();
    BufReader::new(stream.take(4096)).read_line(&mut line).expect("it answers");
    line
}

pub fn followed() {
    let name = format!("explorer-{}", std::process::id());
    let (_daemon, _) = start(&["daemon", "--name", &name, "--host", "alice", "--host", "bob"], "ready: ");
    let (mut server, link) = start(&["explore", "--name", &name], "explore: ");
    let mut browser = Browser::start(1440, 900);
    browser.visit(&link);
    browser
        .wait("typeof app === 'object' && document.querySelector('.status')?.textContent.startsWith('live')");
    let [alice, bob] =
        ["alice", "bob"].map(|host| Device::daemon_host(Some(&name), Some(host)).expect("a device").open());
    let [mine, theirs] =
        [&alice, &bob].map(|context| context.allocate_protection_domain().expect("a domain"));
    let queues = [&alice, &bob].map(|context| context.create_completion_queue(16).expect("a queue"));
    let from = mine.create_queue_pair(QpType::Rc, &queues[0]).build().expect("a queue pair");
    let to = theirs.create_queue_pair(QpType::Rc, &queues[1]).build().expect("a queue pair");
    from.connect_both(&to, &ConnectOptions::default()).expect("a connection");
    let source = mine.allocate_region(8192, AccessFlags::LOCAL_WRITE).expect("a region");
    let target =
        theirs.allocate_region(8192, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE).expect("a region");
    for id in 1..=3 {
        from.post_send(&SendRequest::rdma_write(id, &[source.sge(0, 8192)], target.remote_address(0)))
            .expect("room");
        assert!(queues[0].wait().expect("a completion").status.is_success());
        browser
            .wait(&format!("currentRun().works.filter((work) => work.status === 'SUCCESS').length >= {id}"));
    }
    browser.press("Home");
    let ladder = browser.text("document.querySelector('.ladder-sheet').textContent");
    assert!(ladder.contains("WRITE_FIRST +0") && ladder.contains("WRITE #1, 8192 B"), "{ladder}");
    browser.screenshot("daemon");
    browser.assert_no_errors();

    let (address, path) = link.strip_prefix("http://").and_then(|link| link.split_once('/')).expect("a link");
    assert!(address.starts_with("127.0.0.1:"), "{link}");
    assert!(http_response(address, "GET", &format!("/{path}")).contains("200"));
    for (method, path) in
        [("GET", "/".to_owned()), ("GET", "/0123456789abcdef/".into()), ("POST", format!("/{path}"))]
    {
        let response = http_response(address, method, &path);
        assert!(response.contains(" 40"), "{method} {path}: {response}");
    }
    // Ctrl+C ends the server while a browser is connected.
    rustix::process::kill_process(rustix::process::Pid::from_child(&server.0), rustix::process::Signal::INT)
        .expect("it runs");
    assert_eq!(server.0.wait().expect("it ends").signal(), Some(libc::SIGINT));
    browser.wait("document.querySelector('.status').textContent.startsWith('not connected')");
}
