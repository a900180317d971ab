//! Packets to QP1: checks, parses and dispatches them.

use super::{CmCall, CmDropReason, CmMessageKind as Kind};
use crate::{DropReason, Event, PacketSummary, QpType};
use softhca_wire::cm::{AlternatePathStatus, Apr, Datagram, Message};
use softhca_wire::{AddressHeaders, PartitionKey, Qpn, QueueKey, Service, TransportPacket};

impl CmCall<'_, '_> {
    /// Handles a packet to QP1.
    pub fn receive(
        &mut self,
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
                self.hca.counters.rx_dropped += 1;
                let packet = Some(packet);
                return self.ctx.emit(Event::PacketDropped { qp: Qpn::GSI, packet, reason });
            }
        };
        self.hca.counters.rcvd_pkts += 1;
        self.hca.counters.rcvd_bytes += u64::from(packet.payload_length);
        self.ctx.emit(Event::PacketReceived { qp: Qpn::GSI, packet });
        let (message, peer) = (datagram.message.kind(), addressing.source);
        self.ctx.emit(Event::CmReceived { message, peer });
        if !self.hold_early_request(addressing, &datagram) {
            self.dispatch(addressing, &datagram);
        }
    }

    /// Handles a message.
    pub(super) fn dispatch(&mut self, addressing: &AddressHeaders, datagram: &Datagram) {
        let (transaction, peer) = (datagram.header.transaction_id, addressing.source);
        match &datagram.message {
            Message::Req(req) => self.on_req(addressing, transaction, req),
            Message::Mra(mra) => self.on_mra(peer, mra),
            Message::Rej(rej) => self.on_rej(peer, rej),
            Message::Rep(rep) => self.on_rep(addressing, transaction, rep),
            Message::Rtu(rtu) => self.on_rtu(peer, rtu),
            Message::Dreq(dreq) => self.on_dreq(addressing, transaction, dreq),
            Message::Drep(drep) => self.on_drep(peer, drep),
            Message::SidrReq(req) => self.on_sidr_req(addressing, transaction, req),
            Message::SidrRep(rep) => self.on_sidr_rep(peer, rep),
            // Path migration is not supported.
            Message::Lap(lap) => {
                let known = self.cm.find_by_comm_id(lap.remote_id, peer).is_some();
                let status = match known {
                    true => AlternatePathStatus::UNSUPPORTED,
                    false => AlternatePathStatus::INVALID_COMMUNICATION_ID,
                };
                let (local_id, remote_id) = (lap.remote_id, lap.local_id);
                let apr = Apr { local_id, remote_id, status, ..Apr::default() };
                self.reply(addressing, transaction, apr);
            }
            Message::Apr(_) => self.emit_dropped(None, Kind::Apr, peer, CmDropReason::NoSuchConnection),
        }
    }
}
