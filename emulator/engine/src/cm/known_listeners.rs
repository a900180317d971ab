//! The processes that have answered requests. Further requests to their services go to them at once, and not through
//! the process that knows all listeners of their host.

use crate::Peer;
use alloc::collections::BTreeMap;
use core::net::IpAddr;
use softhca_wire::cm::{CommunicationId, ServiceId};

/// The most services of a host or of all hosts that are remembered.
const MAX_LISTENERS: usize = 1024;

/// The communication ID of the last REP of each service: its high bits are the slot of the process, if the host has slots.
#[derive(Default)]
pub(crate) struct KnownListeners {
    ids: BTreeMap<(IpAddr, ServiceId), CommunicationId>,
}

impl KnownListeners {
    /// A service has answered with a communication ID of its process.
    pub fn insert(&mut self, address: IpAddr, service: ServiceId, id: CommunicationId) {
        if self.ids.len() >= MAX_LISTENERS && !self.ids.contains_key(&(address, service)) {
            self.ids.pop_first();
        }
        self.ids.insert((address, service), id);
    }

    /// The last communication ID of a service.
    pub fn get(&self, address: IpAddr, service: ServiceId) -> Option<CommunicationId> {
        self.ids.get(&(address, service)).copied()
    }

    /// A process is gone.
    pub fn remove(&mut self, peer: Peer) {
        self.ids.retain(|(address, _), id| !peer.contains(*address, id.qpn()));
    }
}
