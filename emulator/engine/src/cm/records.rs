//! Records of the connections whose peers wait for a message, for the case that the process ends.

use super::identifier::CmIdentifier;
use super::{CmCall, CmState};
use crate::{ClientId, CmChannelId, CmId, QpType};
use alloc::vec::Vec;
use core::net::SocketAddr;
use softhca_queue::{CmRecords, RecordedConnection};
use softhca_wire::Gid;
use softhca_wire::cm::PortSpace;

/// The records of a process.
pub(super) struct ConnectionRecords {
    records: CmRecords,
    /// Entries that were used and are free.
    free: Vec<u16>,
    /// The first entry that was never used.
    unused: usize,
}

impl ConnectionRecords {
    pub fn new(records: CmRecords) -> ConnectionRecords {
        ConnectionRecords { records, free: Vec::new(), unused: 0 }
    }

    /// Records an identifier whose end its peer must be informed of, as [`CmCall::destroy`] does.
    pub fn update(&mut self, id: CmId, identifier: &mut CmIdentifier) {
        if !notifies_peer(identifier.state) {
            return self.remove(identifier);
        }
        let entry = identifier.record.or_else(|| self.free.pop()).or_else(|| {
            let entry = self.unused;
            self.unused += 1;
            (entry < CmRecords::ENTRIES).then_some(entry as u16)
        });
        let Some(entry) = entry else { return };
        identifier.record = Some(entry);
        let transaction_id = match identifier.state {
            CmState::DreqReceived => identifier.dreq_transaction_id,
            _ => identifier.transaction_id,
        };
        let connection = RecordedConnection {
            id,
            state: identifier.state,
            local_id: identifier.local_comm_id,
            remote_id: identifier.remote_comm_id,
            transaction_id,
            service: identifier.service,
            remote_qpn: identifier.remote_qpn,
            traffic_class: identifier.traffic_class,
            source: identifier.local_address(),
            destination: identifier.peer_address(),
        };
        self.records.record(entry.into(), &connection);
    }

    /// The peer of an identifier waits for nothing any more.
    pub fn remove(&mut self, identifier: &mut CmIdentifier) {
        if let Some(entry) = identifier.record.take() {
            self.records.clear(entry.into());
            self.free.push(entry);
        }
    }
}

/// Whether the end of an identifier in this state sends a message.
fn notifies_peer(state: CmState) -> bool {
    matches!(
        state,
        CmState::ReqSent
            | CmState::ReqReceived
            | CmState::RepSent
            | CmState::RepReceived
            | CmState::Established
            | CmState::DreqReceived
            | CmState::SidrReqReceived
    )
}

impl CmCall<'_, '_> {
    /// Ends a connection of a process that is gone: its peer gets the message that it would have got from the process.
    pub fn end_recorded(&mut self, connection: &RecordedConnection) {
        let RecordedConnection { id, state, source, destination, .. } = *connection;
        let is_own = self.hca.gids.contains(&Gid::from(source)) && source.is_ipv4() == destination.is_ipv4();
        // A process can write anything into its records.
        if !is_own || !notifies_peer(state) || self.cm.identifiers.contains_key(&id) {
            return;
        }
        let kind = if state == CmState::SidrReqReceived { QpType::Ud } else { QpType::Rc };
        let space = connection.service.port_space().unwrap_or(PortSpace::Ib);
        let mut identifier = CmIdentifier::new(ClientId(0), CmChannelId(0), space, kind);
        identifier.state = state;
        identifier.local = Some(SocketAddr::new(source, 0));
        identifier.peer = Some(SocketAddr::new(destination, 0));
        identifier.local_comm_id = connection.local_id;
        identifier.remote_comm_id = connection.remote_id;
        identifier.transaction_id = connection.transaction_id;
        identifier.dreq_transaction_id = connection.transaction_id;
        identifier.service = connection.service;
        identifier.remote_qpn = connection.remote_qpn;
        identifier.traffic_class = connection.traffic_class;
        self.cm.identifiers.insert(id, identifier);
        self.destroy(id);
    }
}
