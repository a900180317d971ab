//! A Unix stream socket and the messages that wait to be sent over it.

use softhca_queue::control::{FramedMessage, MessageReader, encode, send_message};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use tokio::io::Interest;

/// The most messages that wait for a client that does not read, before the session stops reading its requests.
const MAX_PENDING_MESSAGES: usize = 64;

struct PendingMessage {
    frame: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    sent: usize,
}

/// A socket and its send queue.
pub(crate) struct ControlSocket {
    stream: tokio::net::UnixStream,
    pending: VecDeque<PendingMessage>,
}

impl ControlSocket {
    pub fn new(stream: UnixStream) -> io::Result<ControlSocket> {
        stream.set_nonblocking(true)?;
        Ok(ControlSocket { stream: tokio::net::UnixStream::from_std(stream)?, pending: VecDeque::new() })
    }

    pub fn has_room(&self) -> bool {
        self.pending.len() < MAX_PENDING_MESSAGES
    }

    pub fn is_drained(&self) -> bool {
        self.pending.is_empty()
    }

    /// Queues a message.
    pub fn send<T: serde::Serialize>(&mut self, message: &T, descriptors: Vec<OwnedFd>) {
        let frame = FramedMessage::frame(&encode(message), descriptors.len());
        self.pending.push_back(PendingMessage { frame, descriptors, sent: 0 });
    }

    /// Sends queued messages until the socket is full.
    pub fn flush(&mut self) -> io::Result<()> {
        while let Some(message) = self.pending.front_mut() {
            let descriptors: Vec<_> = message.descriptors.iter().map(AsFd::as_fd).collect();
            let send = || send_message(self.stream.as_fd(), &message.frame, message.sent, &descriptors);
            match self.stream.try_io(Interest::WRITABLE, send) {
                Ok(count) => message.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The client closed its end; the next read reports that.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    self.pending.clear();
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
            if message.sent == message.frame.len() {
                self.pending.pop_front();
            }
        }
        Ok(())
    }

    pub async fn writable(&self) {
        // An error shows at the next send.
        let _ = self.stream.writable().await;
    }

    pub async fn readable(&self) {
        // An error shows at the next read.
        let _ = self.stream.readable().await;
    }

    /// Reads once into `reader`. False at the end of the stream.
    pub fn fill(&self, reader: &mut MessageReader) -> io::Result<bool> {
        match self.stream.try_io(Interest::READABLE, || reader.fill(self.stream.as_fd())) {
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(true),
                io::ErrorKind::ConnectionReset => Ok(false),
                _ => Err(error),
            },
            result => result,
        }
    }
}
