//! The daemon's control protocol: arbitrary bytes must not crash the parser, and a decoded message must encode to
//! an equal one.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_control::{Hello, Message, MessageReader, Request, decode, encode};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

fuzz_target!(|bytes: &[u8]| {
    let _ = decode::<Hello>(bytes);
    if let Ok(request) = decode::<Request>(bytes) {
        assert_eq!(decode::<Request>(&encode(&request)), Ok(request));
    }
    if let Ok(message) = decode::<Message>(bytes) {
        assert_eq!(decode::<Message>(&encode(&message)), Ok(message));
    }
    let (mut here, there) = UnixStream::pair().expect("a socket pair");
    here.set_nonblocking(true).expect("a socket");
    let _ = here.write(bytes);
    drop(here);
    let mut reader = MessageReader::default();
    while let Ok(Some(frame)) = reader.read(there.as_fd()) {
        let _ = decode::<Request>(&frame.bytes);
    }
});
