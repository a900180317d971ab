//! Packets to QP1: checks, parses and dispatches them.

use super::connect::emit_cm_dropped;
use super::{CmContext, CmDropReason, CmMessageKind as Kind, ConnectionManager};
use crate::{DropReason, Event, PacketSummary, QpType};
use softhca_wire::cm::{AlternatePathStatus, Apr, Datagram, Message};
use softhca_wire::{AddressHeaders, PartitionKey, Qpn, QueueKey, Service, TransportPacket};

impl ConnectionManager {
    /// Handles a packet to QP1.
    pub fn receive(
        &mut self,
        cx: &mut CmContext<'_, '_>,
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
                cx.hca.counters.rx_dropped += 1;
                let packet = Some(packet);
                return cx.ctx.emit(Event::PacketDropped { qp: Qpn::GSI, packet, reason });
            }
        };
        cx.hca.counters.rcvd_pkts += 1;
        cx.hca.counters.rcvd_bytes += u64::from(packet.payload_length);
        cx.ctx.emit(Event::PacketReceived { qp: Qpn::GSI, packet });
        let (message, peer) = (datagram.message.kind(), addressing.source);
        cx.ctx.emit(Event::CmReceived { message, peer });
        let transaction = datagram.header.transaction_id;
        match &datagram.message {
            Message::Req(req) => self.on_req(cx, addressing, transaction, req),
            Message::Mra(mra) => self.on_mra(cx, peer, mra),
            Message::Rej(rej) => self.on_rej(cx, peer, rej),
            Message::Rep(rep) => self.on_rep(cx, addressing, transaction, rep),
            Message::Rtu(rtu) => self.on_rtu(cx, peer, rtu),
            Message::Dreq(dreq) => self.on_dreq(cx, addressing, transaction, dreq),
            Message::Drep(drep) => self.on_drep(cx, peer, drep),
            Message::SidrReq(req) => self.on_sidr_req(cx, addressing, transaction, req),
            Message::SidrRep(rep) => self.on_sidr_rep(cx, peer, rep),
            // Path migration is not supported.
            Message::Lap(lap) => {
                let known = self.find_by_comm_id(lap.remote_id, peer).is_some();
                let status = match known {
                    true => AlternatePathStatus::UNSUPPORTED,
                    false => AlternatePathStatus::INVALID_COMMUNICATION_ID,
                };
                let (local_id, remote_id) = (lap.remote_id, lap.local_id);
                let apr = Apr { local_id, remote_id, status, ..Apr::default() };
                self.reply(cx, addressing, transaction, apr);
            }
            Message::Apr(_) => emit_cm_dropped(cx.ctx, None, Kind::Apr, peer, CmDropReason::NoSuchConnection),
        }
    }
}
