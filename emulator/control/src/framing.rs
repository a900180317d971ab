//! Message framing on a Unix stream: four bytes of length, one byte with the number of descriptors, and the message.

use crate::HandedOverPacket;
use alloc::collections::VecDeque;
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
/// The most descriptors that accompany a message.
pub const MAX_DESCRIPTORS: usize = 16;
/// The most descriptors that the kernel delivers at once. With room for fewer it closes the others itself, and to close
/// the descriptor of another process may take long.
const MAX_RECEIVED_DESCRIPTORS: usize = 253;
const HEADER: usize = 5;

/// The slot, the addresses and the lengths of a packet take less than this.
const PACKET_OVERHEAD: usize = 64;
const _: () =
    assert!(HandedOverPacket::MAX_IN_MESSAGE * (HandedOverPacket::MAX_BYTES + PACKET_OVERHEAD) < MAX_MESSAGE);

/// The received bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ProtocolError {
    /// The message is too long.
    #[error("the message has {length} bytes, the limit is {MAX_MESSAGE}")]
    TooLong {
        /// The length in the header.
        length: usize,
    },
    /// The number of descriptors is wrong.
    #[error("the message has more than {MAX_DESCRIPTORS} descriptors, or fewer than its header says")]
    DescriptorCount,
    /// The message cannot be decoded.
    #[error("the bytes are not a message of protocol version {}", super::PROTOCOL_VERSION)]
    Undecodable,
}

impl From<ProtocolError> for io::Error {
    fn from(error: ProtocolError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}

/// A message and its descriptors.
#[derive(Debug)]
pub struct FramedMessage {
    /// The encoded message.
    pub bytes: Vec<u8>,
    /// The descriptors.
    pub descriptors: Vec<OwnedFd>,
}

/// Sends `frame`, which [`FramedMessage::frame`] returned, from offset `sent` on. The descriptors accompany the first
/// byte. Returns the number of bytes sent; a full non-blocking socket is an error.
pub fn send_message(
    socket: BorrowedFd<'_>,
    frame: &[u8],
    sent: usize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if sent == 0 && !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "at most {MAX_DESCRIPTORS}");
    }
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(&frame[sent..])], &mut control, SendFlags::NOSIGNAL)?)
}

impl FramedMessage {
    /// Adds the header to a message.
    pub fn frame(message: &[u8], descriptors: usize) -> Vec<u8> {
        let mut frame = Vec::with_capacity(HEADER + message.len());
        frame.extend((message.len() as u32).to_le_bytes());
        frame.push(descriptors as u8);
        frame.extend(message);
        frame
    }
}

/// Splits received bytes into messages.
#[derive(Default)]
pub struct MessageReader {
    bytes: VecDeque<u8>,
    descriptors: VecDeque<OwnedFd>,
}

impl MessageReader {
    /// Reads once from the socket. Returns false at the end of the stream; an empty non-blocking socket is an error.
    pub fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RECEIVED_DESCRIPTORS))];
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

    /// Removes the next message, if it is complete.
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

    /// Reads until a message is complete. Returns `None` at the end of the stream.
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
    use alloc::vec;
    use std::os::unix::net::UnixStream;

    #[test]
    fn messages_arrive_with_their_descriptors() {
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
    fn a_message_that_is_too_long_is_an_error() {
        let mut reader = MessageReader::default();
        reader.bytes.extend([0xff; 8]);
        assert!(matches!(reader.pop(), Err(ProtocolError::TooLong { .. })));
    }
}
