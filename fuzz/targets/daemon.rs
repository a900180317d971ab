//! Requests to a running daemon: arbitrary control messages of a client, with and without descriptors. The daemon must
//! answer each or close that connection, and must free everything when it ends.

#![no_main]

mod running_daemon;

use libfuzzer_sys::fuzz_target;
use running_daemon::SOCKET;
use softhca_control::{
    FramedMessage, Hello, Message, MessageReader, Request, Response, decode, encode, send_message,
};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

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
