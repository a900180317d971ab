//! The stream of a program that has a port open: MADs with the header of the user MAD interface, in both directions.

use super::SubnetServer;
use crate::command_error::CommandError;
use softhca_subnet::{ClientId, MAX_MAD, PortId, UserMadHeader};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// Bytes that are read or written at once.
const CHUNK: usize = 64 << 10;

/// An open port. It closes when it is dropped.
pub(crate) struct UmadPort {
    server: Arc<SubnetServer>,
    id: ClientId,
    task: JoinHandle<()>,
}

impl UmadPort {
    /// Opens a port, and returns the program's end of the stream.
    pub fn open(server: &Arc<SubnetServer>, port: PortId) -> Result<(UmadPort, OwnedFd), CommandError> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let runtime = server.runtime();
        let stream = {
            let _registers = runtime.enter();
            tokio::net::UnixStream::from_std(ours)?
        };
        let wake = Arc::<Notify>::default();
        let id = {
            let mut state = server.state.lock();
            let id = state.clients.open(port)?;
            state.streams.insert(id, wake.clone());
            id
        };
        let serving = server.clone();
        let task = runtime.spawn(async move {
            // An error is a message that is none, or the end of the program.
            let _ = serve(&serving, id, &stream, &wake).await;
            serving.close(id);
        });
        Ok((UmadPort { server: server.clone(), id, task }, theirs.into()))
    }

    /// Identifies the program.
    pub fn id(&self) -> ClientId {
        self.id
    }
}

impl Drop for UmadPort {
    fn drop(&mut self) {
        self.task.abort();
        self.server.close(self.id);
    }
}

impl SubnetServer {
    fn close(&self, id: ClientId) {
        let mut state = self.state.lock();
        state.clients.close(id);
        state.streams.remove(&id);
    }

    /// Sends a MAD of a program.
    fn send(&self, id: ClientId, message: &[u8]) {
        self.with_clients(|clients| clients.send_or_fail(id, message));
    }
}

/// Carries MADs until the program closes the stream. What the program does not read stays queued, up to the limit of the
/// queue, and does not keep its own MADs from being sent.
async fn serve(
    server: &SubnetServer,
    id: ClientId,
    stream: &tokio::net::UnixStream,
    wake: &Notify,
) -> io::Result<()> {
    let mut inbound = Vec::new();
    let mut outbound = Vec::new();
    let mut chunk = vec![0; CHUNK];
    loop {
        let is_full = !outbound.is_empty();
        tokio::select! {
            ready = stream.readable() => {
                ready?;
                match stream.try_read(&mut chunk) {
                    Ok(0) => return Ok(()),
                    Ok(count) => {
                        inbound.extend_from_slice(&chunk[..count]);
                        let used = send_complete(server, id, &inbound)?;
                        inbound.drain(..used);
                        // Others have a turn, however much this program sends.
                        tokio::task::yield_now().await;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
            ready = stream.writable(), if is_full => ready?,
            () = wake.notified(), if !is_full => {}
        }
        write_received(server, id, stream, &mut outbound)?;
    }
}

/// Sends the complete messages at the start of `bytes`, and returns their length.
fn send_complete(server: &SubnetServer, id: ClientId, bytes: &[u8]) -> io::Result<usize> {
    let mut used = 0;
    loop {
        let rest = &bytes[used..];
        let Some(header) = rest.first_chunk::<{ UserMadHeader::LEN }>() else { return Ok(used) };
        let length = UserMadHeader::message_length(header);
        if !(UserMadHeader::LEN..=UserMadHeader::LEN + MAX_MAD).contains(&length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let Some(message) = rest.get(..length) else { return Ok(used) };
        server.send(id, message);
        used += length;
    }
}

/// Writes received MADs until there are none, or the stream is full.
fn write_received(
    server: &SubnetServer,
    id: ClientId,
    stream: &tokio::net::UnixStream,
    outbound: &mut Vec<u8>,
) -> io::Result<()> {
    loop {
        if outbound.is_empty() {
            let mut state = server.state.lock();
            while outbound.len() < CHUNK
                && let Some(mad) = state.clients.next_received(id)
            {
                outbound.extend_from_slice(&mad);
            }
        }
        if outbound.is_empty() {
            return Ok(());
        }
        match stream.try_write(outbound) {
            Ok(count) => drop(outbound.drain(..count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}
