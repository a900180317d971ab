//! Disconnection: DREQ, DREP.

use super::call::transaction_id;
use super::{CmCall, CmDropReason, CmMessageKind as Kind, CmState, EventType};
use crate::CmId;
use core::net::IpAddr;
use softhca_wire::AddressHeaders;
use softhca_wire::cm::{Drep, Dreq};

impl CmCall<'_, '_> {
    /// Sends a DREQ.
    pub(super) fn send_dreq(&mut self, id: CmId) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let dreq = Dreq {
            local_id: identifier.local_comm_id,
            remote_id: identifier.remote_comm_id,
            remote_qpn: identifier.remote_qpn,
            ..Dreq::default()
        };
        let transaction = transaction_id(identifier.local_comm_id);
        self.set_state(id, CmState::DreqSent);
        self.send_with_retries(id, dreq, transaction);
    }

    /// Handles a DREQ.
    pub(super) fn on_dreq(&mut self, addressing: &AddressHeaders, transaction: u64, dreq: &Dreq) {
        let peer = addressing.source;
        let Some(id) = self.cm.find_by_comm_id(dreq.remote_id, peer) else {
            // The connection is unknown here: a DREP lets the peer discard it (IBA 12.9.8.3.3).
            let known = self.cm.time_waits.get(&dreq.remote_id);
            if !known.is_some_and(|wait| wait.peer == peer && wait.remote_comm_id == dreq.local_id) {
                self.emit_dropped(None, Kind::Dreq, peer, CmDropReason::NoSuchConnection);
            }
            let drep = Drep { local_id: dreq.remote_id, remote_id: dreq.local_id, ..Drep::default() };
            return self.reply(addressing, transaction, drep);
        };
        let identifier = self.cm.identifiers.get_mut(&id).expect("find_by_comm_id has returned it");
        if identifier.remote_comm_id != dreq.local_id {
            return self.emit_dropped(Some(id), Kind::Dreq, peer, CmDropReason::NoSuchConnection);
        }
        identifier.dreq_transaction_id = transaction;
        match identifier.state {
            CmState::Established | CmState::RepSent | CmState::RepReceived => {
                self.stop_retries(id);
                self.set_state(id, CmState::DreqReceived);
                self.raise_simple_event(id, EventType::Disconnected, 0);
            }
            // Both sides disconnect at the same time.
            CmState::DreqSent => {
                self.send_drep(id);
                self.enter_time_wait(id);
                self.raise_simple_event(id, EventType::Disconnected, 0);
            }
            CmState::TimeWait => self.send_drep(id),
            CmState::DreqReceived => self.emit_dropped(Some(id), Kind::Dreq, peer, CmDropReason::Duplicate),
            state => self.emit_dropped(Some(id), Kind::Dreq, peer, CmDropReason::UnexpectedInState(state)),
        }
    }

    /// Sends a DREP.
    pub(super) fn send_drep(&mut self, id: CmId) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let drep = Drep {
            local_id: identifier.local_comm_id,
            remote_id: identifier.remote_comm_id,
            ..Drep::default()
        };
        let transaction = identifier.dreq_transaction_id;
        self.send(id, drep, transaction);
    }

    /// Handles a DREP.
    pub(super) fn on_drep(&mut self, peer: IpAddr, drep: &Drep) {
        let Some(id) = self.cm.find_by_comm_id(drep.remote_id, peer) else {
            // The DREP of an identifier that no longer exists.
            let known = self.cm.time_waits.get(&drep.remote_id).is_some_and(|wait| wait.peer == peer);
            let reason = if known { CmDropReason::Duplicate } else { CmDropReason::NoSuchConnection };
            return self.emit_dropped(None, Kind::Drep, peer, reason);
        };
        match self.cm.identifiers[&id].state {
            CmState::DreqSent => {
                self.stop_retries(id);
                self.enter_time_wait(id);
                self.raise_simple_event(id, EventType::Disconnected, 0);
            }
            CmState::TimeWait => self.emit_dropped(Some(id), Kind::Drep, peer, CmDropReason::Duplicate),
            state => self.emit_dropped(Some(id), Kind::Drep, peer, CmDropReason::UnexpectedInState(state)),
        }
    }
}
