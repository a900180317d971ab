//! A Unix stream socket and the messages that wait to be sent over it.

use crate::readable_fd::register;
use softhca_control::{FramedMessage, MessageReader, encode, send_message};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The most messages that wait for a client that does not read, before the session stops reading its requests.
const MAX_PENDING_MESSAGES: usize = 64;

struct PendingMessage {
    frame: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    sent: usize,
}

/// A socket and its send queue.
pub(crate) struct ControlSocket {
    /// Registered for reading only: a client that reads must not wake the daemon.
    stream: AsyncFd<OwnedFd>,
    /// A copy of the socket that is registered for writing, while it is full.
    full: Option<AsyncFd<OwnedFd>>,
    pending: VecDeque<PendingMessage>,
}

impl ControlSocket {
    pub fn new(stream: UnixStream) -> io::Result<ControlSocket> {
        stream.set_nonblocking(true)?;
        let stream = register(stream.into(), Interest::READABLE)?;
        Ok(ControlSocket { stream, full: None, pending: VecDeque::new() })
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
        self.full = None;
        while let Some(message) = self.pending.front_mut() {
            let descriptors: Vec<_> = message.descriptors.iter().map(AsFd::as_fd).collect();
            match send_message(self.stream.as_fd(), &message.frame, message.sent, &descriptors) {
                Ok(count) => message.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let copy = self.stream.as_fd().try_clone_to_owned()?;
                    self.full = Some(register(copy, Interest::WRITABLE)?);
                    return Ok(());
                }
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
        if let Some(socket) = &self.full {
            // An error shows at the next send.
            let _ = socket.writable().await;
        }
    }

    pub async fn readable(&self) {
        // An error shows at the next read.
        let _ = self.stream.readable().await;
    }

    /// Reads once into `reader`. False at the end of the stream.
    pub fn fill(&self, reader: &mut MessageReader) -> io::Result<bool> {
        match self.stream.try_io(Interest::READABLE, |stream| reader.fill(stream.as_fd())) {
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(true),
                io::ErrorKind::ConnectionReset => Ok(false),
                _ => Err(error),
            },
            result => result,
        }
    }
}
