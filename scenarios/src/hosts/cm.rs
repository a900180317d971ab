//! Connections through the connection manager, as a program with librdmacm creates them.

use super::Hosts;
use super::cm_connections::CmEvent;
use crate::spec::Errno;
use crate::verbs::{conn_params, port_space};
use softhca::cm::{CmOption, Event, EventChannel, Id, RejectReason, UdParameters};
use softhca::{Error, ModifyQp, QpState, QpType, VerbsError};
use softhca_engine::Resource;
use softhca_fabric::Endpoint;
use std::net::SocketAddr;

fn to_errno(error: Error) -> Errno {
    Errno(error.errno())
}

impl Hosts<'_> {
    fn create_cm_id(&mut self, host: usize, kind: QpType) -> Result<Id, Error> {
        let channel = match self.connections.channels.get(&host) {
            Some(channel) => channel.clone(),
            None => {
                let channel = EventChannel::new(&self.contexts[host])?;
                self.connections.channels.insert(host, channel.clone());
                channel
            }
        };
        let id = channel.create_id_with_kind(port_space(kind), kind)?;
        self.connections.identifiers.push((host, id.clone()));
        Ok(id)
    }

    /// The identifier with this number on the host of a queue pair.
    fn cm_id(&self, qp: usize, number: u32) -> Result<Id, Error> {
        let host = self.plan.qps[qp].host;
        let mut identifiers = self.connections.identifiers.iter();
        let found = identifiers.find(|(at, id)| *at == host && id.handle() == number);
        found
            .map(|(_, id)| id.clone())
            .ok_or(VerbsError::NotFound { resource: Resource::CmIdentifier, number }.into())
    }

    /// Listens at a port of a host for queue pairs of a type; returns the id of the listener.
    pub fn listen(&mut self, host: usize, kind: QpType, port: u16) -> Result<u32, Errno> {
        let address = SocketAddr::new(self.address(host), port);
        let listen = |id: Id| id.bind(address).and_then(|()| id.listen(0)).map(|()| id.handle());
        self.create_cm_id(host, kind).and_then(listen).map_err(to_errno)
    }

    /// Requests a connection to the host of the peer; returns the id.
    pub fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno> {
        let (plan, pair) = (&self.plan.qps[qp], self.plan.pair_of(qp));
        let destination = SocketAddr::new(self.endpoint(plan.peer).address, port);
        let parameters = conn_params(pair, self.qps[qp].qpn, private_data);
        let connect = |id: Id| -> Result<u32, Error> {
            id.set_option(CmOption::AckTimeout(pair.timeout))?;
            id.set_option(CmOption::TypeOfService(pair.traffic_class))?;
            id.resolve_address(None, destination)?;
            id.resolve_route_with_path_mtu(pair.mtu)?;
            id.connect(&parameters)?;
            Ok(id.handle())
        };
        self.create_cm_id(plan.host, pair.kind).and_then(connect).map_err(to_errno)
    }

    /// Moves a queue pair to RTS and accepts the request of an id.
    pub fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno> {
        let (id, pair) = (self.cm_id(qp, id).map_err(to_errno)?, self.plan.pair_of(qp));
        // The peer may send as soon as it has the REP, so the queue pair is ready before.
        if !pair.kind.is_datagram() {
            self.make_ready(qp, &id).map_err(to_errno)?;
        }
        id.accept(&conn_params(pair, self.qps[qp].qpn, private_data)).map_err(to_errno)
    }

    /// Rejects a request.
    pub fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno> {
        let reject = |id: Id| id.reject_with_reason(RejectReason(reason), private_data);
        self.cm_id(qp, id).and_then(reject).map_err(to_errno)
    }

    /// Moves a queue pair to RTS after its request was accepted, and sends the RTU.
    pub fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        let id = self.cm_id(qp, id).map_err(to_errno)?;
        self.make_ready(qp, &id).and_then(|()| id.establish()).map_err(to_errno)
    }

    /// Moves a queue pair to RTS with the attributes of its connection.
    fn make_ready(&mut self, qp: usize, id: &Id) -> Result<(), Error> {
        let pair = self.pair(qp)?;
        for state in [QpState::ReadyToReceive, QpState::ReadyToSend] {
            pair.modify(&id.qp_attributes(state)?)?;
        }
        let attributes = pair.query()?.attributes;
        self.qps[qp].sq_psn = attributes.sq_psn;
        let responder = Endpoint { address: attributes.address_vector.dgid.ip(), qpn: attributes.dest_qpn };
        self.register_flow(qp, Some(responder));
        Ok(())
    }

    /// Sets the destination of a UD queue pair.
    pub fn set_datagram_target(&mut self, qp: usize, target: UdParameters) -> Result<(), Errno> {
        let handle = self.qps[qp].domain.create_address_handle(target.address_vector).map_err(to_errno)?;
        self.qps[qp].target = Some((handle, target.qpn, target.qkey));
        self.register_flow(qp, None);
        Ok(())
    }

    /// Stops a queue pair and closes its connection, or confirms a close.
    pub fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        if let Some(pair) = &self.qps[qp].pair {
            // It may be in the error state already.
            let _ = pair.modify(&ModifyQp::default().state(QpState::Error));
        }
        self.cm_id(qp, id).and_then(|id| id.disconnect()).map_err(to_errno)
    }

    /// Destroys the ids of the program of a host.
    pub fn destroy_cm_ids(&mut self, host: usize) {
        self.connections.identifiers.retain(|(at, _)| *at != host);
    }

    /// The oldest event of the connection manager of a host.
    pub fn poll_cm(&mut self, host: usize) -> Option<CmEvent> {
        let event = self.connections.channels.get(&host)?.poll().ok()??;
        let (active_qpn, target) = (event.offer().map(|offer| offer.qpn), event.target());
        let active_host = event.id.peer_address().map(|peer| peer.ip());
        let active_qp = (0..self.qps.len()).find(|qp| {
            let Endpoint { address, qpn } = self.endpoint(*qp);
            Some(qpn) == active_qpn && Some(address) == active_host
        });
        let Event { id, listener, kind, status, private_data, .. } = event;
        let (number, listener) = (id.handle(), listener.map(|listener| listener.handle()));
        if listener.is_some() {
            self.connections.identifiers.push((host, id));
        }
        Some(CmEvent { host, id: number, listener, active_qp, kind, status, private_data, target })
    }
}
