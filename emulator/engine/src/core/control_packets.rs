//! Packets that the HCA sends on its own behalf: CNPs, and what outlives its queue pair: ACKs, datagrams, UC messages.
//!
//! The HCA sends them before all other packets. Their queue pair may no longer exist.

use crate::{Context, DropReason, Event, PacketSummary};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use softhca_wire::{AddressHeaders, ICRC_LEN, Qpn, TransportHeader};

/// Bounds the memory that a port which never sends can consume.
const MAX_CONTROL_PACKETS: usize = 4096;

/// A control packet that waits for transmission.
#[derive(Debug)]
pub(crate) struct ControlPacket {
    pub qpn: Qpn,
    pub addressing: AddressHeaders,
    pub service_level: u8,
    pub header: TransportHeader,
    pub body: Body,
    /// The packet answers a duplicate request.
    pub retransmission: bool,
}

/// The bytes between the headers and the ICRC.
#[derive(Debug)]
pub(crate) enum Body {
    /// Zero bytes.
    Reserved(usize),
    /// The payload and pad of a request whose queue pair no longer exists. The event of its transmission was emitted
    /// when the queue pair was destroyed.
    Payload(Vec<u8>),
    /// A payload of this length whose bytes are left out.
    ElidedPayload(usize),
}

impl ControlPacket {
    /// The length from the BTH to the ICRC.
    pub fn len(&self) -> usize {
        let body = match &self.body {
            Body::Reserved(length) => *length,
            Body::Payload(bytes) => bytes.len(),
            Body::ElidedPayload(_) => 0,
        };
        self.header.bth.opcode.header_length() + body + ICRC_LEN
    }
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

    pub fn has_room(&self) -> bool {
        self.ready.len() + self.blocked.len() < MAX_CONTROL_PACKETS
    }

    /// Queues a packet. A full queue drops it.
    pub fn push(&mut self, ctx: &mut Context<'_>, packet: ControlPacket) {
        if self.has_room() {
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
