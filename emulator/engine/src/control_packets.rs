//! Packets without payload that the HCA sends on its own behalf: CNPs, and ACKs that outlive their queue pair.
//!
//! The HCA sends them before all other packets. Their queue pair may no longer exist.

use crate::{Context, DropReason, Event, PacketSummary};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use softhca_wire::{AddressHeaders, Qpn, TransportHeader};

/// Bounds the memory that a port which never sends can consume.
const MAX_CONTROL_PACKETS: usize = 4096;

/// A control packet that waits for transmission.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControlPacket {
    pub qpn: Qpn,
    pub addressing: AddressHeaders,
    pub service_level: u8,
    pub header: TransportHeader,
    /// Zero bytes after the headers.
    pub body_length: usize,
    /// The packet answers a duplicate request.
    pub retransmission: bool,
}

/// The queue of control packets.
#[derive(Default)]
pub(crate) struct ControlPackets {
    ready: VecDeque<ControlPacket>,
    /// Packets that the port may not send now: paused priority, or closed transmit gate.
    blocked: Vec<ControlPacket>,
}

impl ControlPackets {
    /// Whether a packet can be tried.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.blocked.is_empty()
    }

    /// Queues a packet. A full queue drops it.
    pub fn push(&mut self, ctx: &mut Context<'_>, packet: ControlPacket) {
        if self.ready.len() + self.blocked.len() < MAX_CONTROL_PACKETS {
            return self.ready.push_back(packet);
        }
        let summary = PacketSummary::new(&packet.header, 0, packet.addressing.destination);
        let (qp, reason) = (packet.qpn, DropReason::TooManyPendingResponses);
        ctx.emit(Event::PacketDropped { qp, packet: Some(summary), reason });
    }

    pub fn pop(&mut self) -> Option<ControlPacket> {
        self.ready.pop_front()
    }

    /// Sets a popped packet aside until [`ControlPackets::unblock`].
    pub fn block(&mut self, packet: ControlPacket) {
        self.blocked.push(packet);
    }

    /// Makes all blocked packets ready again.
    pub fn unblock(&mut self) {
        self.ready.extend(self.blocked.drain(..));
    }

    pub fn discard(&mut self, is_obsolete: impl Fn(&ControlPacket) -> bool) {
        self.ready.retain(|packet| !is_obsolete(packet));
        self.blocked.retain(|packet| !is_obsolete(packet));
    }
}
