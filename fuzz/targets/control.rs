//! The daemon's control protocol: whatever bytes come, frames are cut and calls are read without a crash, and
//! what was read says the same when it is written down again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_queue::control::{Call, FrameReader, Hello, Message, decode, encode};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

fuzz_target!(|bytes: &[u8]| {
    let _ = decode::<Hello>(bytes);
    if let Ok(call) = decode::<Call>(bytes) {
        assert_eq!(decode::<Call>(&encode(&call)), Ok(call));
    }
    if let Ok(message) = decode::<Message>(bytes) {
        assert_eq!(decode::<Message>(&encode(&message)), Ok(message));
    }
    let (mut here, there) = UnixStream::pair().expect("a pair of sockets");
    here.set_nonblocking(true).expect("a socket");
    let _ = here.write(bytes);
    drop(here);
    let mut reader = FrameReader::default();
    while let Ok(Some(frame)) = reader.next(there.as_fd()) {
        let _ = decode::<Call>(&frame.bytes);
    }
});
