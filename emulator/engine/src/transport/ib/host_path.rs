//! Packets between the processes of one host, on the straight path: built for the memory that carries them, without a
//! batch and its way out of the port.
//!
//! A queue pair sends here while its peer is on the same host and everything that it has to send is the common case. All
//! else is left to `Hca::transmit`, which sends the same packets.

use super::QueuePair;
use super::straight::{Extent, PacketSpace};
use super::transmit::Admission;
use crate::core::hca_state::HcaState;
use crate::{Context, Hca, HostWire, QpState, QpType};
use core::net::IpAddr;
use softhca_wire::{AddressHeaders, Bth, Ecn, ICRC_LEN, Qpn, QpnSlot, TransportHeader};

/// The most runs that one call sends. A message and its ACK are two.
const MAX_RUNS: usize = 16;
/// The most packets of a run.
const MAX_PACKETS: usize = 64;

/// Packets of one size for one process; the last may be shorter.
struct Run<'a> {
    buffer: &'a mut [u8],
    segment_size: usize,
    bytes: usize,
    packets: usize,
    /// A packet did not fit, even alone.
    has_no_room: bool,
    has_response: bool,
}

impl PacketSpace for Run<'_> {
    #[inline]
    fn admit(&mut self, qp: &mut QueuePair, hca: &mut HcaState, packet: Extent) -> Admission {
        let largest = TransportHeader::MAX_LEN + packet.payload + 3 + ICRC_LEN;
        let has_room = self.bytes + largest <= self.buffer.len();
        if !has_room || self.packets > 0 && packet.size > self.segment_size {
            self.has_no_room = self.packets == 0;
            qp.schedule_transmit(hca);
            return Admission::Waits;
        }
        Admission::Joins
    }

    #[inline]
    fn bytes(&mut self, size: usize) -> &mut [u8] {
        &mut self.buffer[self.bytes..][..size]
    }

    #[inline]
    fn add(&mut self, size: usize, is_response: bool) -> bool {
        if self.packets == 0 {
            self.segment_size = size;
        }
        self.packets += 1;
        self.bytes += size;
        self.has_response |= is_response;
        size < self.segment_size || self.packets == MAX_PACKETS
    }
}

impl QueuePair {
    /// The slot of the process that the queue pair is connected to, if packets to it may stay in memory.
    pub(super) fn find_host_slot(&self, hca: &HcaState) -> Option<u16> {
        let (own, qpn) = (hca.settings.qpn_slot, self.attributes.dest_qpn);
        let slot = QpnSlot::of(qpn, own.bits).number;
        let AddressHeaders { source, destination, .. } = self.addressing;
        let is_in_memory = source == destination
            && self.kind == QpType::Rc
            && self.addressing.ecn() != Ecn::CongestionExperienced
            && qpn.value() > Qpn::GSI.value()
            // Slot 0 has sockets only.
            && (slot == own.number || slot != 0 && own.number != 0);
        is_in_memory.then_some(slot)
    }
}

impl Hca {
    /// Sends what the first queue pairs in the transmit queue have for processes of this host, as far as it is the common
    /// case. Returns whether there was any. The driver has the host's traffic in memory and looks at no packet.
    pub fn transmit_in_host(
        &mut self,
        ctx: &mut Context<'_>,
        wire: &mut dyn HostWire,
        buffer: &mut [u8],
    ) -> bool {
        let egress = &self.state.egress;
        let is_free = !egress.control_packets.has_ready() && egress.paused_priorities == 0;
        if !is_free || self.state.health.port_fault {
            return false;
        }
        let own = self.state.settings.qpn_slot.number;
        let mut has_sent = false;
        for _ in 0..MAX_RUNS {
            let Hca { queue_pairs, state, .. } = self;
            let Some(qpn) = state.egress.queue.front().copied() else { break };
            let Some(qp) = queue_pairs.get_mut(qpn.value()) else { break };
            let Some(slot) = qp.host_slot else { break };
            if qp.state != QpState::ReadyToSend || !state.has_straight_path() {
                break;
            }
            state.egress.queue.pop_front();
            qp.is_scheduled = false;
            let room = if slot == own { buffer.len() } else { wire.room(slot).min(buffer.len()) };
            let mut run = Run {
                buffer: &mut buffer[..room],
                segment_size: 0,
                bytes: 0,
                packets: 0,
                has_no_room: false,
                has_response: false,
            };
            let is_straight = qp.fill_straight(state, ctx, &mut run).is_some();
            let Run { segment_size, bytes, packets, has_no_room, has_response, .. } = run;
            qp.responses_last = has_response || qp.responder.pending_responses.is_empty();
            // Without room, the queue pair waits in the general path.
            let is_rest_general = !is_straight || has_no_room;
            if is_rest_general && !qp.is_scheduled {
                qp.is_scheduled = true;
                state.egress.queue.push_front(qpn);
            }
            if packets > 0 {
                has_sent = true;
                if slot == own {
                    let (address, class) = (qp.addressing.destination, qp.addressing.traffic_class);
                    let received = self.receive_in_host(ctx, address, class, segment_size, &buffer[..bytes]);
                    if received < bytes {
                        self.receive_rest(ctx, qpn, segment_size, &buffer[received..bytes]);
                    }
                } else {
                    wire.send(slot, &qp.addressing, segment_size, &buffer[..bytes]);
                }
            }
            self.handle_cq_overflows(ctx);
            if is_rest_general {
                break;
            }
        }
        has_sent
    }

    /// Receives packets of a process of this host, from the first on, as far as they are the common case. `address` is
    /// their source and destination. Returns their bytes: the others are for [`Hca::receive`].
    pub fn receive_in_host(
        &mut self,
        ctx: &mut Context<'_>,
        address: IpAddr,
        traffic_class: u8,
        segment_size: usize,
        packets: &[u8],
    ) -> usize {
        if Ecn::of(traffic_class) == Ecn::CongestionExperienced || !self.state.has_straight_path() {
            return 0;
        }
        let mut received = 0;
        for packet in packets.chunks(segment_size) {
            let Some((transport, _)) = packet.split_last_chunk::<ICRC_LEN>() else { break };
            let Ok(bth) = Bth::parse(transport) else { break };
            let Some(qp) = self.queue_pairs.get_mut(bth.destination_qp.value()) else { break };
            let is_straight = qp.host_slot.is_some()
                && qp.addressing.source == address
                && qp.state == QpState::ReadyToSend
                && qp.receive_straight(&mut self.state, ctx, &bth, &transport[Bth::LEN..]);
            if !is_straight {
                break;
            }
            received += packet.len();
            self.handle_cq_overflows(ctx);
        }
        received
    }

    /// Receives packets of a queue pair of this HCA.
    #[cold]
    fn receive_rest(&mut self, ctx: &mut Context<'_>, sender: Qpn, segment_size: usize, packets: &[u8]) {
        let Some(path) = self.queue_pairs.get(sender.value()).map(|qp| qp.addressing) else { return };
        let path = &path;
        for packet in packets.chunks(segment_size) {
            let transport = packet.split_last_chunk::<ICRC_LEN>().map_or(packet, |(transport, _)| transport);
            self.receive(ctx, path, transport);
        }
    }
}
