//! Ending connections: DREQ, DREP.

use super::call::transaction;
use super::connect::{answer_to, ignore};
use super::{CmIgnored, CmState, EventKind, Manager};
use crate::card::Card;
use crate::{CmId, Context};
use core::net::IpAddr;
use softhca_wire::Envelope;
use softhca_wire::cm::{Datagram, Drep, Dreq};

impl Manager {
    /// Asks the peer to end the connection.
    pub(super) fn send_disconnect(&mut self, card: &mut Card, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let dreq = Dreq {
            local_id: identifier.name,
            remote_id: identifier.remote_name,
            remote_qp: identifier.peer_queue_pair,
            ..Dreq::default()
        };
        let transaction = transaction(identifier.name);
        self.enter(ctx, id, CmState::DisconnectSent);
        self.send_until_answered(card, ctx, id, dreq, transaction);
    }

    /// Takes a DREQ.
    pub(super) fn on_disconnect(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        transaction: u64,
        dreq: &Dreq,
    ) {
        let peer = envelope.source;
        let Some(id) = self.named(dreq.remote_id, peer) else {
            // Whether it was forgotten or never was: the peer may forget it too (IBA 12.9.8.3.3).
            let known = self.ghosts.get(&dreq.remote_id);
            if !known.is_some_and(|ghost| ghost.peer == peer && ghost.remote == dreq.local_id) {
                ignore(ctx, None, "DREQ", peer, CmIgnored::NoSuchConnection);
            }
            let drep = Drep { local_id: dreq.remote_id, remote_id: dreq.local_id, ..Drep::default() };
            let datagram = Datagram::new(transaction, drep);
            return self.outbox.push(card, ctx, None, answer_to(envelope), datagram, false);
        };
        let identifier = self.identifiers.get_mut(&id).expect("it was just found");
        if identifier.remote_name != dreq.local_id {
            return ignore(ctx, Some(id), "DREQ", peer, CmIgnored::NoSuchConnection);
        }
        identifier.release_transaction = transaction;
        match identifier.state {
            CmState::Established | CmState::ReplySent | CmState::ReplyReceived => {
                self.answered(card, id);
                self.enter(ctx, id, CmState::DisconnectReceived);
                self.raise_plain(ctx, id, EventKind::Disconnected, 0);
            }
            // Both sides end it: each is told by the other.
            CmState::DisconnectSent => {
                self.send_disconnect_reply(card, ctx, id);
                self.enter_time_wait(card, ctx, id);
                self.raise_plain(ctx, id, EventKind::Disconnected, 0);
            }
            CmState::TimeWait => self.send_disconnect_reply(card, ctx, id),
            CmState::DisconnectReceived => ignore(ctx, Some(id), "DREQ", peer, CmIgnored::Duplicate),
            state => ignore(ctx, Some(id), "DREQ", peer, CmIgnored::OutOfPlace(state)),
        }
    }

    /// Answers a DREQ.
    pub(super) fn send_disconnect_reply(&mut self, card: &mut Card, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let drep = Drep { local_id: identifier.name, remote_id: identifier.remote_name, ..Drep::default() };
        let transaction = identifier.release_transaction;
        self.send(card, ctx, id, drep, transaction);
    }

    /// Takes a DREP.
    pub(super) fn on_disconnected(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        peer: IpAddr,
        drep: &Drep,
    ) {
        let Some(id) = self.named(drep.remote_id, peer) else {
            // The answer to the DREQ of an identifier that is gone.
            let known = self.ghosts.get(&drep.remote_id).is_some_and(|ghost| ghost.peer == peer);
            let reason = if known { CmIgnored::Duplicate } else { CmIgnored::NoSuchConnection };
            return ignore(ctx, None, "DREP", peer, reason);
        };
        match self.identifiers[&id].state {
            CmState::DisconnectSent => {
                self.answered(card, id);
                self.enter_time_wait(card, ctx, id);
                self.raise_plain(ctx, id, EventKind::Disconnected, 0);
            }
            CmState::TimeWait => ignore(ctx, Some(id), "DREP", peer, CmIgnored::Duplicate),
            state => ignore(ctx, Some(id), "DREP", peer, CmIgnored::OutOfPlace(state)),
        }
    }
}
