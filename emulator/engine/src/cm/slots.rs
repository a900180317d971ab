//! The processes of a host that have connection managers of their own. One connection manager keeps the ports of all.

use super::{CmCall, ConnectionManager};
use crate::{ClientId, CmChannelId, CmId, Processes, QpType, VerbsError, VerbsResult};
use core::net::{IpAddr, SocketAddr};
use softhca_types::cm::Reply;
use softhca_wire::cm::{Datagram, Message, PortSpace, ServiceId};
use softhca_wire::{AddressHeaders, Bth, Qpn, TransportPacket};

/// The receiver of a CM message within a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MadOwner {
    /// This connection manager.
    Own,
    /// The process in a slot, which listens to the service or has bound its port.
    Slot(u16),
    /// The process that has received the request which the message repeats or withdraws, if there is one.
    Requested,
}

impl ConnectionManager {
    /// The slot of the process that has bound the port of a service; `None` if nobody or a client of this connection
    /// manager has.
    fn service_slot(&self, processes: &dyn Processes, service: ServiceId, address: IpAddr) -> Option<u16> {
        let bound = self.ports.binding(service.port_space()?, service.port(), address)?;
        processes.slot(self.identifiers.get(&bound)?.client)
    }

    /// Whether an identifier listens to the service of a REQ or SIDR_REQ.
    pub fn listens_to(&self, transport: &[u8]) -> bool {
        let requested = parse(transport).as_ref().and_then(requested_service);
        requested.is_some_and(|(service, address)| {
            let space = service.port_space();
            space.is_some_and(|space| self.ports.listener(space, service.port(), address).is_some())
        })
    }

    /// The receiver of a CM message that does not name its process: a request, or a REJ from a peer that received no
    /// reply.
    pub fn mad_owner(
        &self,
        processes: &dyn Processes,
        addressing: &AddressHeaders,
        transport: &[u8],
    ) -> MadOwner {
        if Bth::parse(transport).is_ok_and(|bth| bth.destination_qp != Qpn::GSI) {
            return MadOwner::Own;
        }
        let Some(message) = parse(transport) else { return MadOwner::Own };
        // A request may be one that a process has received before it stopped listening.
        let is_of_request = match (requested_service(&message), &message) {
            (Some((service, address)), _) => match self.service_slot(processes, service, address) {
                Some(slot) => return MadOwner::Slot(slot),
                None => !self.listens_to(transport),
            },
            (None, Message::Rej(rej)) => rej.remote_id.0 == 0,
            _ => false,
        };
        let is_known = || self.by_remote_comm_id.contains_key(&(addressing.source, message.sender_id()));
        if is_of_request && !is_known() { MadOwner::Requested } else { MadOwner::Own }
    }
}

impl CmCall<'_, '_> {
    /// Creates an identifier that reserves a port for a process with a connection manager of its own.
    pub(super) fn create_reservation(
        &mut self,
        client: ClientId,
        space: PortSpace,
        kind: QpType,
    ) -> VerbsResult<CmId> {
        if self.hca.processes.slot(client).is_none() {
            let what = "a reserved port for a client without a slot";
            return Err(VerbsError::Unsupported { what });
        }
        self.cm.create(client, CmChannelId(0), space, kind)
    }

    /// Reserves the port of an address, or removes the identifier.
    pub(super) fn reserve_port(
        &mut self,
        client: ClientId,
        id: CmId,
        address: SocketAddr,
    ) -> VerbsResult<Reply> {
        if let Err(error) = self.bind(client, id, address) {
            self.destroy(id);
            return Err(error);
        }
        let port = self.cm.identifier(client, id)?.local.map_or(0, |local| local.port());
        Ok(Reply::Reserved(id, port))
    }
}

/// The service of a request, and the address that it asks for.
pub(super) fn requested_service(message: &Message) -> Option<(ServiceId, IpAddr)> {
    let (service, header) = match message {
        Message::Req(req) => (req.service_id, req.rdma_cm_header()),
        Message::SidrReq(req) => (req.service_id, req.rdma_cm_header()),
        _ => return None,
    };
    Some((service, header?.ok()?.destination))
}

fn parse(transport: &[u8]) -> Option<Message> {
    let packet = TransportPacket::parse(transport).ok()?;
    Datagram::parse(packet.payload).ok().map(|datagram| datagram.message)
}
