//! Disconnection: DREQ, DREP.

use super::call::transaction_id;
use super::connect::{emit_cm_dropped, reply_addressing};
use super::{CmDropReason, CmMessageKind as Kind, CmState, ConnectionManager, EventType};
use crate::hca_state::HcaState;
use crate::{CmId, Context};
use core::net::IpAddr;
use softhca_wire::AddressHeaders;
use softhca_wire::cm::{Datagram, Drep, Dreq};

impl ConnectionManager {
    /// Sends a DREQ.
    pub(super) fn send_dreq(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let dreq = Dreq {
            local_id: identifier.local_comm_id,
            remote_id: identifier.remote_comm_id,
            remote_qpn: identifier.remote_qpn,
            ..Dreq::default()
        };
        let transaction = transaction_id(identifier.local_comm_id);
        self.set_state(ctx, id, CmState::DreqSent);
        self.send_with_retries(hca, ctx, id, dreq, transaction);
    }

    /// Handles a DREQ.
    pub(super) fn on_dreq(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        addressing: &AddressHeaders,
        transaction: u64,
        dreq: &Dreq,
    ) {
        let peer = addressing.source;
        let Some(id) = self.find_by_comm_id(dreq.remote_id, peer) else {
            // The connection is unknown here: a DREP lets the peer discard it (IBA 12.9.8.3.3).
            let known = self.time_waits.get(&dreq.remote_id);
            if !known.is_some_and(|ghost| ghost.peer == peer && ghost.remote_comm_id == dreq.local_id) {
                emit_cm_dropped(ctx, None, Kind::Dreq, peer, CmDropReason::NoSuchConnection);
            }
            let drep = Drep { local_id: dreq.remote_id, remote_id: dreq.local_id, ..Drep::default() };
            let datagram = Datagram::new(transaction, drep);
            return self.mad_queue.push(hca, ctx, None, reply_addressing(addressing), datagram, false);
        };
        let identifier = self.identifiers.get_mut(&id).expect("find_by_comm_id has returned it");
        if identifier.remote_comm_id != dreq.local_id {
            return emit_cm_dropped(ctx, Some(id), Kind::Dreq, peer, CmDropReason::NoSuchConnection);
        }
        identifier.dreq_transaction_id = transaction;
        match identifier.state {
            CmState::Established | CmState::RepSent | CmState::RepReceived => {
                self.stop_retries(hca, id);
                self.set_state(ctx, id, CmState::DreqReceived);
                self.raise_simple_event(ctx, id, EventType::Disconnected, 0);
            }
            // Both sides disconnect at the same time.
            CmState::DreqSent => {
                self.send_drep(hca, ctx, id);
                self.enter_time_wait(hca, ctx, id);
                self.raise_simple_event(ctx, id, EventType::Disconnected, 0);
            }
            CmState::TimeWait => self.send_drep(hca, ctx, id),
            CmState::DreqReceived => {
                emit_cm_dropped(ctx, Some(id), Kind::Dreq, peer, CmDropReason::Duplicate)
            }
            state => emit_cm_dropped(ctx, Some(id), Kind::Dreq, peer, CmDropReason::UnexpectedInState(state)),
        }
    }

    /// Sends a DREP.
    pub(super) fn send_drep(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let drep = Drep {
            local_id: identifier.local_comm_id,
            remote_id: identifier.remote_comm_id,
            ..Drep::default()
        };
        let transaction = identifier.dreq_transaction_id;
        self.send(hca, ctx, id, drep, transaction);
    }

    /// Handles a DREP.
    pub(super) fn on_drep(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>, peer: IpAddr, drep: &Drep) {
        let Some(id) = self.find_by_comm_id(drep.remote_id, peer) else {
            // The DREP of an identifier that no longer exists.
            let known = self.time_waits.get(&drep.remote_id).is_some_and(|ghost| ghost.peer == peer);
            let reason = if known { CmDropReason::Duplicate } else { CmDropReason::NoSuchConnection };
            return emit_cm_dropped(ctx, None, Kind::Drep, peer, reason);
        };
        match self.identifiers[&id].state {
            CmState::DreqSent => {
                self.stop_retries(hca, id);
                self.enter_time_wait(hca, ctx, id);
                self.raise_simple_event(ctx, id, EventType::Disconnected, 0);
            }
            CmState::TimeWait => emit_cm_dropped(ctx, Some(id), Kind::Drep, peer, CmDropReason::Duplicate),
            state => emit_cm_dropped(ctx, Some(id), Kind::Drep, peer, CmDropReason::UnexpectedInState(state)),
        }
    }
}
