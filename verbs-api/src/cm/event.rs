//! Events of connection management.

use super::{EventParameters, EventType, Id, PeerParameters, UdParameters};
use crate::Error;

/// An event of an identifier: `struct rdma_cm_event`. It needs no acknowledgement.
#[derive(Clone, Debug)]
pub struct Event {
    /// The identifier. A connect request comes with a new one; dropping that without an answer rejects the connection.
    pub id: Id,
    /// The listener that received a connect request.
    pub listener: Option<Id>,
    /// The event.
    pub kind: EventType,
    /// Zero, a negative errno, or the reason of a rejection.
    pub status: i32,
    /// The private data of the peer's message, filled up with zeros: messages have a fixed size.
    pub private_data: Vec<u8>,
    /// The parameters of a connection or the address of a datagram service.
    pub detail: EventParameters,
}

impl Event {
    /// The parameters that the peer of a connection offers and asks for.
    pub fn offer(&self) -> Option<PeerParameters> {
        match self.detail {
            EventParameters::Connection(offer) => Some(offer),
            _ => None,
        }
    }

    /// The destination of datagrams, of a resolved datagram service or a joined multicast group.
    pub fn target(&self) -> Option<UdParameters> {
        match self.detail {
            EventParameters::Ud(target) => Some(target),
            _ => None,
        }
    }

    /// Returns the event if it is of this kind, and [`Error::Connection`] otherwise. A disconnect counts as such whatever its
    /// status is.
    pub fn expect(self, kind: EventType) -> Result<Event, Error> {
        if self.kind == kind && (self.status == 0 || kind == EventType::Disconnected) {
            return Ok(self);
        }
        Err(Error::Connection { kind: self.kind, status: self.status })
    }
}
