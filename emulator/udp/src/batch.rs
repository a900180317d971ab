//! The memory that one receive call fills.

use crate::charge;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The most datagrams in one batch; older kernels refuse more.
pub const MAX_BATCH_SEGMENTS: usize = 64;
/// The most bytes in one batch: the largest UDP payload over IPv4.
pub const MAX_BATCH_BYTES: usize = 65_507;

/// The most chunks that one receive call returns.
pub(crate) const BATCH_SLOTS: usize = 8;
/// The most bytes that the kernel puts into one chunk.
pub(crate) const SLOT_BYTES: usize = 65_536;

/// The metadata of one chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub source: SocketAddr,
    pub traffic_class: u8,
    pub segment_size: usize,
    pub len: usize,
}

impl Slot {
    pub(crate) const EMPTY: Slot = Slot {
        source: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        traffic_class: 0,
        segment_size: 0,
        len: 0,
    };
}

/// Received chunks. Allocated once; every [`RoceSocket::receive`](crate::RoceSocket::receive) fills it again.
pub struct ReceiveBatch {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) slots: [Slot; BATCH_SLOTS],
    /// How many slots the next receive call may fill.
    pub(crate) offered: usize,
    pub(crate) filled: usize,
}

impl ReceiveBatch {
    /// An empty batch with all the memory that it will use.
    pub fn new() -> ReceiveBatch {
        ReceiveBatch {
            bytes: vec![0; BATCH_SLOTS * SLOT_BYTES].into_boxed_slice(),
            slots: [Slot::EMPTY; BATCH_SLOTS],
            offered: BATCH_SLOTS,
            filled: 0,
        }
    }

    /// Empties the batch for the next receive call. After an empty one it offers a single slot: the receiver of a
    /// single datagram does not pay for a second look into the socket.
    pub(crate) fn clear(&mut self) {
        self.offered = if self.filled == 0 { 1 } else { BATCH_SLOTS };
        self.filled = 0;
    }

    /// Whether nothing was received.
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// Whether every offered slot is in use, so that the socket may hold more.
    pub fn is_full(&self) -> bool {
        self.filled == self.offered
    }

    /// The received chunks, as GRO coalesced them.
    pub fn chunks(&self) -> impl Iterator<Item = Chunk<'_>> {
        self.slots[..self.filled].iter().zip(self.bytes.chunks_exact(SLOT_BYTES)).map(|(slot, bytes)| Chunk {
            source: slot.source,
            traffic_class: slot.traffic_class,
            segment_size: slot.segment_size,
            bytes: &bytes[..slot.len],
        })
    }

    /// The received datagrams.
    pub fn datagrams(&self) -> impl Iterator<Item = Datagram<'_>> {
        self.chunks().flat_map(|chunk| chunk.datagrams())
    }
}

impl Default for ReceiveBatch {
    fn default() -> ReceiveBatch {
        ReceiveBatch::new()
    }
}

/// Datagrams of one flow that GRO coalesced: all of one size, except that the last may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// The sender.
    pub source: SocketAddr,
    /// DSCP and ECN of all datagrams.
    pub traffic_class: u8,
    /// Bytes of each datagram but the last.
    pub segment_size: usize,
    /// The datagrams, one after the other.
    pub bytes: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// The number of datagrams.
    pub fn segments(&self) -> usize {
        self.bytes.len().div_ceil(self.segment_size.max(1)).max(1)
    }

    /// The charge that the sender counted for the chunk; see
    /// [`RoceSocket::batch_charge`](crate::RoceSocket::batch_charge).
    pub fn charge(&self) -> u64 {
        if self.source.ip().is_loopback() {
            charge(self.segment_size, self.segments())
        } else {
            charge(self.segment_size, 1) * self.segments() as u64
        }
    }

    /// The datagrams of the chunk. An empty payload is one datagram.
    pub fn datagrams(self) -> impl Iterator<Item = Datagram<'a>> {
        let empty = self.bytes.is_empty().then_some(self.bytes);
        self.bytes.chunks(self.segment_size.max(1)).chain(empty).map(move |bytes| Datagram {
            source: self.source,
            traffic_class: self.traffic_class,
            bytes,
        })
    }
}

/// One datagram with its metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// The sender.
    pub source: SocketAddr,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// The UDP payload.
    pub bytes: &'a [u8],
}
