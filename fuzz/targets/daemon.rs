//! Requests to a running daemon: arbitrary control messages of a client, with and without descriptors. The daemon must
//! answer each or close that connection, and must free everything when it ends.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_daemon::{Config, Daemon, HostConfig};
use softhca_queue::control::{
    FramedMessage, Hello, Message, MessageReader, Request, Response, decode, encode, send_message,
};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

/// The socket of a daemon that runs as long as the fuzzer.
static SOCKET: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("softhca-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    // SAFETY: no other thread runs yet that reads variables.
    unsafe { std::env::set_var("XDG_RUNTIME_DIR", &folder) };
    let hosts = ["alice", "bob"].map(|name| HostConfig { name: name.into(), address: None }).into();
    let mut daemon = Daemon::start(Config { hosts, ..Config::default() }).expect("a daemon");
    let socket = daemon.socket().to_path_buf();
    std::thread::spawn(move || daemon.run(None));
    socket
});

struct Client {
    stream: UnixStream,
    reader: MessageReader,
}

impl Client {
    fn connect() -> Client {
        let stream = UnixStream::connect(&*SOCKET).expect("the daemon listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout above zero");
        let mut client = Client { stream, reader: MessageReader::default() };
        client.send(&encode(&Hello::current()), &[]);
        client.reader.read(client.stream.as_fd()).expect("an answer in time").expect("a welcome");
        client
    }

    fn send(&mut self, message: &[u8], passed: &[BorrowedFd<'_>]) {
        let frame = FramedMessage::frame(message, passed.len());
        let _ = send_message(self.stream.as_fd(), &frame, 0, passed);
    }

    /// The next response; `None` if the daemon closed the connection.
    fn response(&mut self) -> Option<Response> {
        loop {
            match self.reader.read(self.stream.as_fd()) {
                Ok(Some(frame)) => match decode(&frame.bytes).expect("a message of the daemon") {
                    Message::Response(response) => return Some(response),
                    Message::Notification(_) => {}
                },
                Ok(None) => return None,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("no answer: {error}"),
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut client = Client::connect();
    let null = std::fs::File::options().write(true).open("/dev/null").expect("a device");
    let memory = softhca_queue::SharedMemory::create("fuzz", 8192, softhca_queue::MapMode::ReadWrite);
    let memory = memory.expect("memory").take_descriptor().expect("its descriptor");
    // Messages, each after its length and the descriptors to pass.
    let mut rest = data;
    while let [length, choice, tail @ ..] = rest {
        let (message, after) = tail.split_at(usize::from(*length).min(tail.len()));
        rest = after;
        // This would end the daemon.
        if matches!(decode::<Request>(message), Ok(Request::Stop)) {
            continue;
        }
        let passed: &[BorrowedFd<'_>] = match choice % 4 {
            0 => &[],
            1 => &[null.as_fd()],
            2 => &[memory.as_fd()],
            _ => &[null.as_fd(), memory.as_fd()],
        };
        client.send(message, passed);
        if client.response().is_none() {
            break;
        }
    }
    drop(client);
    // Others are served.
    let mut other = Client::connect();
    other.send(&encode(&Request::Status), &[]);
    let Some(Response::Status(status)) = other.response() else { panic!("no status") };
    assert_eq!(status.hosts.len(), 2);
});
