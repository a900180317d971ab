//! Packets to QP1: checks, parses and dispatches them.

use super::connect::{emit_cm_dropped, reply_addressing};
use super::{CmDropReason, CmMessageKind as Kind, ConnectionManager};
use crate::hca_state::HcaState;
use crate::{Context, DropReason, Event, PacketSummary, QpType};
use softhca_wire::cm::{AlternatePathStatus, Apr, Datagram, Message};
use softhca_wire::{AddressHeaders, PartitionKey, Qpn, QueueKey, Service, TransportPacket};

impl ConnectionManager {
    /// Handles a packet to QP1.
    pub fn receive(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        addressing: &AddressHeaders,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        let deth = transport.header.deth;
        let reason = if packet.opcode.service() != Service::Ud {
            Some(DropReason::WrongService { expected: QpType::Gsi })
        } else if !PartitionKey::DEFAULT.matches(transport.header.bth.pkey) {
            Some(DropReason::PkeyMismatch)
        } else if deth.is_none_or(|deth| deth.qkey != QueueKey::GSI) {
            Some(DropReason::QkeyMismatch)
        } else {
            None
        };
        let read = match reason {
            Some(reason) => Err(reason),
            None => Datagram::parse(transport.payload).map_err(DropReason::Malformed),
        };
        let datagram = match read {
            Ok(datagram) => datagram,
            Err(reason) => {
                hca.counters.rx_dropped += 1;
                let packet = Some(packet);
                return ctx.emit(Event::PacketDropped { qp: Qpn::GSI, packet, reason });
            }
        };
        hca.counters.rcvd_pkts += 1;
        hca.counters.rcvd_bytes += u64::from(packet.payload_length);
        ctx.emit(Event::PacketReceived { qp: Qpn::GSI, packet });
        let (message, peer) = (datagram.message.kind(), addressing.source);
        ctx.emit(Event::CmReceived { message, peer });
        let transaction = datagram.header.transaction_id;
        match &datagram.message {
            Message::Req(req) => self.on_req(hca, ctx, addressing, transaction, req),
            Message::Mra(mra) => self.on_mra(hca, ctx, peer, mra),
            Message::Rej(rej) => self.on_rej(hca, ctx, peer, rej),
            Message::Rep(rep) => self.on_rep(hca, ctx, addressing, transaction, rep),
            Message::Rtu(rtu) => self.on_rtu(hca, ctx, peer, rtu),
            Message::Dreq(dreq) => self.on_dreq(hca, ctx, addressing, transaction, dreq),
            Message::Drep(drep) => self.on_drep(hca, ctx, peer, drep),
            Message::SidrReq(req) => self.on_sidr_req(hca, ctx, addressing, transaction, req),
            Message::SidrRep(rep) => self.on_sidr_rep(hca, ctx, peer, rep),
            // Path migration is not supported.
            Message::Lap(lap) => {
                let known = self.find_by_comm_id(lap.remote_id, peer).is_some();
                let status = match known {
                    true => AlternatePathStatus::UNSUPPORTED,
                    false => AlternatePathStatus::INVALID_COMMUNICATION_ID,
                };
                let (local_id, remote_id) = (lap.remote_id, lap.local_id);
                let apr = Apr { local_id, remote_id, status, ..Apr::default() };
                let datagram = Datagram::new(transaction, apr);
                self.mad_queue.push(hca, ctx, None, reply_addressing(addressing), datagram, false);
            }
            Message::Apr(_) => emit_cm_dropped(ctx, None, Kind::Apr, peer, CmDropReason::NoSuchConnection),
        }
    }
}
