//! Received packets: finds the queue pair and passes the packet to its requester or responder.

use super::responder_state::PEER_WINDOW;
use crate::{Context, DropReason, Event, Hca, PacketSummary, PortState, QpType};
use softhca_wire::{
    AddressHeaders, Bth, Ecn, Gid, Malformed, Opcode, PartitionKey, Qpn, TransportHeader, TransportPacket,
};

impl Hca {
    /// Receives a packet, from the BTH to the pad bytes. The caller has verified its ICRC.
    pub fn receive(&mut self, ctx: &mut Context<'_>, addressing: &AddressHeaders, bytes: &[u8]) {
        if self.receive_straight(ctx, addressing, bytes) {
            return;
        }
        match TransportPacket::parse(bytes) {
            Ok(transport) => self.receive_transport(ctx, addressing, &transport),
            Err(why) => self.drop_malformed(ctx, why),
        }
    }

    /// Receives the headers of a packet without its payload; `elided` is the length of payload and pad.
    pub fn receive_elided(
        &mut self,
        ctx: &mut Context<'_>,
        addressing: &AddressHeaders,
        bytes: &[u8],
        elided: usize,
    ) {
        static ZEROES: [u8; 4096] = [0; 4096];
        match TransportHeader::parse(bytes) {
            Ok((header, _)) => {
                let payload = elided.saturating_sub(header.bth.pad.into()).min(ZEROES.len());
                let transport = TransportPacket { header, payload: &ZEROES[..payload], padding: &[] };
                self.receive_transport(ctx, addressing, &transport);
            }
            Err(why) => self.drop_malformed(ctx, why),
        }
    }

    fn drop_malformed(&mut self, ctx: &mut Context<'_>, why: Malformed) {
        self.state.counters.rx_malformed += 1;
        let reason = DropReason::Malformed(why);
        ctx.emit(Event::PacketDropped { qp: Qpn::default(), packet: None, reason });
    }

    fn receive_transport(
        &mut self,
        ctx: &mut Context<'_>,
        addressing: &AddressHeaders,
        transport: &TransportPacket<'_>,
    ) {
        let packet = PacketSummary::new(&transport.header, transport.payload.len(), addressing.source);
        if self.state.health.port_state == PortState::Down {
            self.state.counters.rx_dropped += 1;
            let (qp, reason) = (packet.dest_qp, DropReason::PortDown);
            return ctx.emit(Event::PacketDropped { qp, packet: Some(packet), reason });
        }
        if packet.dest_qp == Qpn::MULTICAST {
            self.receive_multicast(ctx, addressing, transport, packet);
        } else if packet.dest_qp == Qpn::GSI {
            self.cm_call(ctx).receive(addressing, transport, packet);
        } else {
            self.receive_for_qp(ctx, addressing, transport, packet, packet.dest_qp);
        }
        self.handle_cq_overflows(ctx);
    }

    /// Whether the receiver of a packet with this header would detect a missing packet. Datagrams have no sequence.
    pub fn is_out_of_sequence(&self, bth: &Bth) -> bool {
        let Some(qp) = self.queue_pairs.get(bth.destination_qp.value()) else { return false };
        if bth.opcode.service() != qp.kind.service() {
            return false;
        }
        match (qp.kind, bth.opcode.operation().is_request()) {
            (QpType::Rc | QpType::XrcTarget, true) => {
                qp.state.accepts_requests()
                    && !qp.responder.nak_sent
                    && (1..=PEER_WINDOW).contains(&bth.psn.distance(qp.responder.expected_psn))
            }
            (QpType::Uc, true) => {
                qp.state.accepts_requests() && bth.psn.distance(qp.responder.expected_psn) > 0
            }
            (QpType::Rc | QpType::XrcInitiator, false) => {
                qp.state.accepts_responses() && qp.requester.skips_rd_atomic_response(bth.psn)
            }
            _ => false,
        }
    }

    /// Drops a packet whose ICRC is wrong.
    pub fn drop_bad_icrc(&mut self, ctx: &mut Context<'_>) {
        self.state.counters.rx_icrc_encapsulated += 1;
        let reason = DropReason::BadIcrc;
        ctx.emit(Event::PacketDropped { qp: Qpn::default(), packet: None, reason });
    }

    /// Drops a packet of this length, which exceeds the largest path MTU.
    pub fn drop_oversized(&mut self, ctx: &mut Context<'_>, length: usize) {
        self.drop_malformed(ctx, Malformed::Field { what: "packet length", value: length as u64 });
    }

    fn receive_multicast(
        &mut self,
        ctx: &mut Context<'_>,
        addressing: &AddressHeaders,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        let group = Gid::from(addressing.destination);
        let sender = transport.header.deth.map(|deth| deth.source_qp);
        let from_here = self.state.gids.contains(&Gid::from(addressing.source));
        let mut delivered = false;
        let mut index = 0;
        while let Some(qpn) =
            self.state.objects.multicast_groups.get(&group).and_then(|members| members.get(index).copied())
        {
            index += 1;
            // The sender does not receive its own datagram (IBA 10.5.2.2).
            if from_here && Some(qpn) == sender {
                continue;
            }
            delivered = true;
            self.receive_for_qp(ctx, addressing, transport, packet, qpn);
        }
        if !delivered {
            self.state.counters.rx_dropped += 1;
            let reason = DropReason::NotMulticastMember;
            ctx.emit(Event::PacketDropped { qp: packet.dest_qp, packet: Some(packet), reason });
        }
    }

    fn receive_for_qp(
        &mut self,
        ctx: &mut Context<'_>,
        addressing: &AddressHeaders,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
        qpn: Qpn,
    ) {
        let state = &mut self.state;
        let Some(qp) = self.queue_pairs.get_mut(qpn.value()) else {
            state.counters.rx_dropped += 1;
            let reason = DropReason::NoQueuePair;
            return ctx.emit(Event::PacketDropped { qp: qpn, packet: Some(packet), reason });
        };
        let opcode = packet.opcode;
        let is_request = opcode.operation().is_request();
        let reason = if opcode == Opcode::CNP {
            None
        } else if opcode.service() != qp.kind.service() {
            Some(DropReason::WrongService { expected: qp.kind })
        } else if !PartitionKey::DEFAULT.matches(transport.header.bth.pkey) {
            Some(DropReason::PkeyMismatch)
        } else if is_request && !qp.state.accepts_requests() {
            Some(DropReason::InvalidQpState(qp.state))
        } else if !qp.kind.is_datagram()
            && (addressing.source != qp.addressing.destination
                || addressing.destination != qp.addressing.source)
        {
            Some(DropReason::AddressMismatch)
        } else {
            None
        };
        if let Some(reason) = reason {
            return qp.emit_dropped(state, ctx, packet, reason);
        }
        state.counters.rcvd_pkts += 1;
        state.counters.rcvd_bytes += u64::from(packet.payload_length);
        if state.is_observed {
            ctx.emit(Event::PacketReceived { qp: qpn, packet });
        }
        if addressing.ecn() == Ecn::CongestionExperienced && opcode != Opcode::CNP {
            qp.on_ecn_mark(state, ctx, &packet);
        }
        match qp.kind {
            _ if opcode == Opcode::CNP => qp.on_cnp(state, ctx),
            QpType::Ud | QpType::Gsi => qp.on_datagram(state, ctx, transport, addressing, packet),
            QpType::Uc => qp.on_uc_request(state, ctx, transport, packet),
            QpType::Rc | QpType::XrcInitiator | QpType::XrcTarget if !is_request => {
                qp.on_response(state, ctx, transport, packet);
            }
            QpType::Rc | QpType::XrcTarget => qp.on_request(state, ctx, transport, packet),
            QpType::XrcInitiator => {
                qp.emit_dropped(state, ctx, packet, DropReason::WrongService { expected: qp.kind });
            }
        }
    }
}
