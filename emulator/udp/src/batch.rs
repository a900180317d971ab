//! Room for what one receive call brings.

use crate::charge;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// How many chunks one receive call can bring.
pub(crate) const BATCH_SLOTS: usize = 8;
/// The most that the kernel puts into one chunk.
pub(crate) const SLOT_BYTES: usize = 65_536;

/// What one slot of a batch holds.
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

/// Received chunks. Made once and filled again by every [`RoceSocket::receive`](crate::RoceSocket::receive).
pub struct ReceiveBatch {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) slots: [Slot; BATCH_SLOTS],
    /// How many slots the next receive call may fill.
    pub(crate) offered: usize,
    pub(crate) filled: usize,
}

impl ReceiveBatch {
    /// An empty batch with all the memory that it will ever use.
    pub fn new() -> ReceiveBatch {
        ReceiveBatch {
            bytes: vec![0; BATCH_SLOTS * SLOT_BYTES].into_boxed_slice(),
            slots: [Slot::EMPTY; BATCH_SLOTS],
            offered: BATCH_SLOTS,
            filled: 0,
        }
    }

    /// Makes room for the next receive call. After an empty one a single slot is offered: who answers a
    /// lone datagram should not pay for a second look into the socket.
    pub(crate) fn clear(&mut self) {
        self.offered = if self.filled == 0 { 1 } else { BATCH_SLOTS };
        self.filled = 0;
    }

    /// Whether nothing was received.
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// Whether every slot that was offered is in use, so that more may be waiting in the socket.
    pub fn is_full(&self) -> bool {
        self.filled == self.offered
    }

    /// What was received, as the kernel kept it.
    pub fn chunks(&self) -> impl Iterator<Item = Chunk<'_>> {
        self.slots[..self.filled].iter().zip(self.bytes.chunks_exact(SLOT_BYTES)).map(|(slot, bytes)| Chunk {
            source: slot.source,
            traffic_class: slot.traffic_class,
            segment_size: slot.segment_size,
            bytes: &bytes[..slot.len],
        })
    }

    /// What was received, datagram by datagram.
    pub fn datagrams(&self) -> impl Iterator<Item = Datagram<'_>> {
        self.chunks().flat_map(|chunk| chunk.datagrams())
    }
}

impl Default for ReceiveBatch {
    fn default() -> ReceiveBatch {
        ReceiveBatch::new()
    }
}

/// Datagrams of one flow that the kernel kept together: all of one size, the last may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// Who sent them.
    pub source: SocketAddr,
    /// DSCP and ECN of all of them.
    pub traffic_class: u8,
    /// Bytes of each but the last.
    pub segment_size: usize,
    /// The datagrams, one after the other.
    pub bytes: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// How many datagrams these are.
    pub fn segments(&self) -> usize {
        self.bytes.len().div_ceil(self.segment_size.max(1)).max(1)
    }

    /// The charge that the sender counted for them; see [`RoceSocket::batch_charge`](crate::RoceSocket::batch_charge).
    pub fn charge(&self) -> u64 {
        if self.source.ip().is_loopback() {
            charge(self.segment_size, self.segments())
        } else {
            charge(self.segment_size, 1) * self.segments() as u64
        }
    }

    /// The datagrams from the one at `index` on.
    pub(crate) fn skip_to(self, index: usize) -> Chunk<'a> {
        Chunk { bytes: self.bytes.get(index * self.segment_size..).unwrap_or_default(), ..self }
    }

    /// One by one. An empty datagram is one datagram.
    pub fn datagrams(self) -> impl Iterator<Item = Datagram<'a>> {
        let empty = self.bytes.is_empty().then_some(self.bytes);
        self.bytes.chunks(self.segment_size.max(1)).chain(empty).map(move |bytes| Datagram {
            source: self.source,
            traffic_class: self.traffic_class,
            bytes,
        })
    }
}

/// One datagram with what the kernel says about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Who sent it.
    pub source: SocketAddr,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// The UDP payload.
    pub bytes: &'a [u8],
}
