//! Frames over a Unix stream: four bytes of length, one of descriptors, and the message.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::mem::MaybeUninit;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use thiserror::Error;

/// The most bytes of a message.
pub const MAX_MESSAGE: usize = 256 * 1024;
/// The most descriptors beside a message.
pub const MAX_DESCRIPTORS: usize = 4;
const HEADER: usize = 5;

/// What comes over the socket cannot be a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ProtocolError {
    /// It is longer than any message.
    #[error("a frame of {length} bytes, no message has more than {MAX_MESSAGE}")]
    TooLong {
        /// What its header says.
        length: usize,
    },
    /// More descriptors than a message has.
    #[error("more than {MAX_DESCRIPTORS} descriptors, or fewer than the frame says")]
    DescriptorCount,
    /// The bytes make no sense.
    #[error("the bytes of the frame are no message of protocol {}", super::PROTOCOL_VERSION)]
    Undecodable,
}

impl From<ProtocolError> for io::Error {
    fn from(error: ProtocolError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}

/// A message and what came with it.
#[derive(Debug)]
pub struct FramedMessage {
    /// The message, written down.
    pub bytes: Vec<u8>,
    /// The descriptors beside it.
    pub descriptors: Vec<OwnedFd>,
}

/// Sends as much of `frame` (made by [`Frame::lay_out`]) from `done` on as the socket takes. The descriptors
/// go with its first byte. Returns how many bytes went; a full non-blocking socket is an error.
pub fn send_message(
    socket: BorrowedFd<'_>,
    frame: &[u8],
    done: usize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if done == 0 && !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "at most {MAX_DESCRIPTORS}");
    }
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(&frame[done..])], &mut control, SendFlags::NOSIGNAL)?)
}

impl FramedMessage {
    /// The bytes of a frame with this message.
    pub fn frame(message: &[u8], descriptors: usize) -> Vec<u8> {
        let mut frame = Vec::with_capacity(HEADER + message.len());
        frame.extend((message.len() as u32).to_le_bytes());
        frame.push(descriptors as u8);
        frame.extend(message);
        frame
    }
}

/// Cuts what arrives into frames.
#[derive(Default)]
pub struct MessageReader {
    bytes: VecDeque<u8>,
    descriptors: VecDeque<OwnedFd>,
}

impl MessageReader {
    /// Reads once from the socket. False at its end; an error if it has nothing and does not block.
    pub fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let mut buffer = vec![0; 16 * 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::net::recvmsg(
            socket.as_fd(),
            &mut [IoSliceMut::new(&mut buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        let truncated = received.flags.contains(ReturnFlags::CTRUNC);
        if truncated || self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(ProtocolError::DescriptorCount.into());
        }
        self.bytes.extend(&buffer[..received.bytes]);
        Ok(received.bytes > 0)
    }

    /// The next frame, if all of it is there.
    pub fn pop(&mut self) -> Result<Option<FramedMessage>, ProtocolError> {
        if self.bytes.len() < HEADER {
            return Ok(None);
        }
        let header: [u8; HEADER] = core::array::from_fn(|index| self.bytes[index]);
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let count = usize::from(header[4]);
        if length > MAX_MESSAGE {
            return Err(ProtocolError::TooLong { length });
        }
        if self.bytes.len() < HEADER + length {
            return Ok(None);
        }
        if count > self.descriptors.len() {
            return Err(ProtocolError::DescriptorCount);
        }
        self.bytes.drain(..HEADER);
        let bytes = self.bytes.drain(..length).collect();
        Ok(Some(FramedMessage { bytes, descriptors: self.descriptors.drain(..count).collect() }))
    }

    /// Reads until a frame is there; `None` at the end of the stream.
    pub fn read(&mut self, socket: BorrowedFd<'_>) -> io::Result<Option<FramedMessage>> {
        loop {
            if let Some(frame) = self.pop()? {
                return Ok(Some(frame));
            }
            match self.fill(socket) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn frames_and_descriptors_arrive_together() {
        let (here, there) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for (message, descriptors) in
            [(&b"one"[..], vec![]), (b"two", vec![file.as_fd(), file.as_fd()]), (b"", vec![])]
        {
            let frame = FramedMessage::frame(message, descriptors.len());
            assert_eq!(send_message(here.as_fd(), &frame, 0, &descriptors).unwrap(), frame.len());
        }
        drop(here);
        let mut reader = MessageReader::default();
        let mut seen = Vec::new();
        while let Some(frame) = reader.read(there.as_fd()).unwrap() {
            seen.push((frame.bytes, frame.descriptors.len()));
        }
        assert_eq!(seen, [(b"one".to_vec(), 0), (b"two".to_vec(), 2), (b"".to_vec(), 0)]);
    }

    #[test]
    fn a_length_that_no_message_has_is_refused() {
        let mut reader = MessageReader::default();
        reader.bytes.extend([0xff; 8]);
        assert!(matches!(reader.pop(), Err(ProtocolError::TooLong { .. })));
    }
}
