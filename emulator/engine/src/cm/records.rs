//! Connections whose peers wait for a message, for the case that the process ends.

use super::identifier::CmIdentifier;
use super::{CmCall, CmState};
use crate::{ClientId, CmChannelId, CmId, QpType};
use core::net::SocketAddr;
use softhca_queue::RecordedConnection;
use softhca_wire::Gid;
use softhca_wire::cm::PortSpace;

impl CmIdentifier {
    /// The connection, if its peer must be informed of its end as [`CmCall::destroy`] does.
    pub fn to_record(&self, id: CmId) -> Option<RecordedConnection> {
        let transaction_id = match self.state {
            CmState::DreqReceived => self.dreq_transaction_id,
            _ => self.transaction_id,
        };
        notifies_peer(self.state).then(|| RecordedConnection {
            id,
            state: self.state,
            local_id: self.local_comm_id,
            remote_id: self.remote_comm_id,
            transaction_id,
            service: self.service,
            remote_qpn: self.remote_qpn,
            traffic_class: self.traffic_class,
            source: self.local_address(),
            destination: self.peer_address(),
        })
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
