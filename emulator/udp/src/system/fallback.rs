//! Systems other than Linux: one datagram per call, one traffic class per socket at a time, no error queue.

use crate::batch::{ReceiveBatch, SLOT_BYTES, Slot};
use crate::slot_field::{SlotField, SlotSet};
use crate::socket_report::{NetworkError, ReceiveMemory};
use socket2::Socket;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

pub(crate) fn configure(socket: &Socket, _ipv6: bool, receive_buffer: usize) -> io::Result<bool> {
    // Some systems refuse a size beyond their limit instead of reducing it.
    let mut size = receive_buffer;
    while socket.set_recv_buffer_size(size).is_err() && size > 65_536 {
        size /= 2;
    }
    Ok(false)
}

pub(crate) fn supports_gso(_: &Socket) -> bool {
    false
}

pub(crate) fn disable_gro(_: &Socket) {}

/// Only Linux gives datagrams of one port to several sockets by their content.
pub(crate) fn steer_by_slot(_: BorrowedFd<'_>, _: SlotField, _: &SlotSet) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// No socket has a filter.
pub(crate) fn lock_filter(_: &Socket) -> io::Result<()> {
    Ok(())
}

/// The bound address has this effect on other systems.
pub(crate) fn disable_multicast_all(_: &Socket, _: bool) {}

pub(crate) fn send_batch(
    socket: &Socket,
    destination: SocketAddr,
    traffic_class: u8,
    segment_size: usize,
    bytes: &[u8],
) -> io::Result<()> {
    send_datagrams(socket, destination, traffic_class, segment_size, bytes).map(drop)
}

pub(crate) fn send_datagrams(
    socket: &Socket,
    destination: SocketAddr,
    traffic_class: u8,
    segment_size: usize,
    bytes: &[u8],
) -> io::Result<usize> {
    if destination.is_ipv4() {
        socket.set_tos_v4(traffic_class.into())?;
    }
    let mut sent = 0;
    for segment in bytes.chunks(segment_size) {
        match socket.send_to(segment, &destination.into()) {
            Ok(_) => sent += 1,
            Err(_) if sent > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(sent)
}

pub(crate) fn receive(socket: &Socket, batch: &mut ReceiveBatch) -> io::Result<()> {
    let slots = batch.slots.iter_mut().zip(batch.bytes.chunks_exact_mut(SLOT_BYTES));
    for (slot, bytes) in slots.take(batch.offered) {
        let mut parts = [io::IoSliceMut::new(bytes)];
        match recv_from(socket, &mut parts) {
            Ok((len, source)) => *slot = Slot { source, traffic_class: 0, segment_size: len, len },
            Err(_) if batch.filled > 0 => break,
            Err(error) => return Err(error),
        }
        batch.filled += 1;
    }
    Ok(())
}

fn recv_from(socket: &Socket, parts: &mut [io::IoSliceMut<'_>]) -> io::Result<(usize, SocketAddr)> {
    // `Read` alone would lose the source; the vectored call keeps to initialised memory.
    let mut source = None;
    let len = loop {
        let mut peeked = [std::mem::MaybeUninit::uninit(); 1];
        let (_, name) = socket.peek_from(&mut peeked)?;
        source = name.as_socket().or(source);
        match (&*socket).read_vectored(parts) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    source.map(|source| (len, source)).ok_or_else(|| io::Error::other("a datagram without a source"))
}

pub(crate) fn poll_error(_socket: &Socket) -> io::Result<Option<NetworkError>> {
    Ok(None)
}

pub(crate) fn receive_memory(_socket: &Socket) -> io::Result<ReceiveMemory> {
    Ok(ReceiveMemory::default())
}

/// Only daemons add descriptors, and daemons run on Linux: this set is never readable.
#[derive(Debug)]
pub(crate) struct WakeSet(super::Waker);

impl WakeSet {
    pub fn new() -> std::io::Result<WakeSet> {
        super::Waker::new().map(WakeSet)
    }

    pub fn add(&self, _: std::os::fd::BorrowedFd<'_>) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    pub fn clear(&self) {}
}

impl std::os::fd::AsFd for WakeSet {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Only Linux has time slices per thread.
pub(crate) fn request_short_time_slices() {}
