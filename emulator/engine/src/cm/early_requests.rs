//! Requests to a port that is bound, but not listened on yet.
//!
//! A server may send the number of its port to a client before it listens, as `qperf` does. The request can arrive first.

use super::slots::requested_service;
use super::{CmCall, CmDropReason, CmState};
use crate::CmId;
use core::time::Duration;
use softhca_wire::AddressHeaders;
use softhca_wire::cm::Datagram;

/// How long a request waits until somebody listens.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum number of requests that wait for a listener.
const MAX_EARLY_REQUESTS: usize = 64;

impl CmCall<'_, '_> {
    /// Keeps a request to a port that is bound, but not listened on. Returns whether it waits.
    pub(super) fn hold_early_request(&mut self, addressing: &AddressHeaders, datagram: &Datagram) -> bool {
        let Some((service, address)) = requested_service(&datagram.message) else { return false };
        let sender = (addressing.source, datagram.message.sender_id());
        let space = service.port_space().filter(|_| !self.cm.by_remote_comm_id.contains_key(&sender));
        let id = space.and_then(|space| self.cm.ports.binding(space, service.port(), address));
        let Some((id, bound)) = id.and_then(|id| Some((id, self.cm.identifiers.get_mut(&id)?))) else {
            return false;
        };
        // The process that reserves a port has its requests.
        if bound.state != CmState::Bound || self.hca.processes.slot(bound.client).is_some() {
            return false;
        }
        let is_repetition =
            |(from, early): &(AddressHeaders, Datagram)| (from.source, early.message.sender_id()) == sender;
        if bound.early_requests.iter().any(is_repetition) {
            self.emit_dropped(Some(id), datagram.message.kind(), sender.0, CmDropReason::Duplicate);
            return true;
        }
        if bound.early_requests.len() >= MAX_EARLY_REQUESTS {
            return false;
        }
        bound.early_requests.push((*addressing, *datagram));
        if bound.early_requests.len() == 1 {
            self.set_deadline(id, Some(self.ctx.now.plus(LISTEN_TIMEOUT)));
        }
        true
    }

    /// Handles the requests that waited for a listener: those without one are rejected.
    pub(super) fn serve_early_requests(&mut self, id: CmId) {
        let Some(identifier) = self.cm.identifiers.get_mut(&id) else { return };
        let requests = core::mem::take(&mut identifier.early_requests);
        if !requests.is_empty() {
            self.set_deadline(id, None);
        }
        for (addressing, datagram) in requests {
            self.dispatch(&addressing, &datagram);
        }
    }
}
