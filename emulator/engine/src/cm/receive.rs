//! Packets to QP1: checked, read, and handed to whom they are for.

use super::connect::{answer_to, ignore};
use super::{CmIgnored, CmKind, Manager};
use crate::card::Card;
use crate::{Context, DropReason, Event, Packet};
use softhca_wire::cm::{AlternatePathStatus, Apr, Datagram, Message};
use softhca_wire::{Envelope, PartitionKey, Qpn, QueueKey, Service, Transport};

impl Manager {
    /// Takes a packet to QP1.
    pub fn receive(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        transport: &Transport<'_>,
        packet: Packet,
    ) {
        let deth = transport.header.deth;
        let reason = if packet.opcode.service() != Service::Ud {
            Some(DropReason::WrongService { expected: Service::Ud.name() })
        } else if !PartitionKey::DEFAULT.matches(transport.header.bth.partition) {
            Some(DropReason::WrongPartition)
        } else if deth.is_none_or(|deth| deth.queue_key != QueueKey::GSI) {
            Some(DropReason::WrongQueueKey)
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
                card.counters.rx_dropped += 1;
                let packet = Some(packet);
                return ctx.tell(Event::PacketDropped { qp: Qpn::GSI, packet, reason });
            }
        };
        card.counters.rcvd_pkts += 1;
        card.counters.rcvd_bytes += u64::from(packet.payload);
        ctx.tell(Event::PacketReceived { qp: Qpn::GSI, packet });
        let (message, peer) = (CmKind::of(&datagram.message), envelope.source);
        ctx.tell(Event::CmReceived { message, peer });
        let transaction = datagram.header.transaction;
        match &datagram.message {
            Message::Req(req) => self.on_request(card, ctx, envelope, transaction, req),
            Message::Mra(mra) => self.on_patience(card, ctx, peer, mra),
            Message::Rej(rej) => self.on_reject(card, ctx, peer, rej),
            Message::Rep(rep) => self.on_reply(card, ctx, envelope, transaction, rep),
            Message::Rtu(rtu) => self.on_ready(card, ctx, peer, rtu),
            Message::Dreq(dreq) => self.on_disconnect(card, ctx, envelope, transaction, dreq),
            Message::Drep(drep) => self.on_disconnected(card, ctx, peer, drep),
            Message::SidrReq(req) => self.on_service_request(card, ctx, envelope, transaction, req),
            Message::SidrRep(rep) => self.on_service_reply(card, ctx, peer, rep),
            // There is no path migration here: whoever proposes another path is told so.
            Message::Lap(lap) => {
                let known = self.named(lap.remote_id, peer).is_some();
                let status = match known {
                    true => AlternatePathStatus::UNSUPPORTED,
                    false => AlternatePathStatus::INVALID_COMMUNICATION_ID,
                };
                let (local_id, remote_id) = (lap.remote_id, lap.local_id);
                let apr = Apr { local_id, remote_id, status, ..Apr::default() };
                let datagram = Datagram::new(transaction, apr);
                self.outbox.push(card, ctx, None, answer_to(envelope), datagram, false);
            }
            Message::Apr(_) => ignore(ctx, None, "APR", peer, CmIgnored::NoSuchConnection),
        }
    }
}
