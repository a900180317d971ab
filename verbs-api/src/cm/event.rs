//! Events of connection management.

use super::{EventParameters, EventType, Id, PeerParameters, UdParameters};
use crate::Error;

/// Something happened to an identifier. There is nothing to acknowledge: what an event tells is in it.
#[derive(Clone, Debug)]
pub struct Event {
    /// The identifier; with a connect request a new one, which is refused when it is dropped unanswered.
    pub id: Id,
    /// The listener that a connect request came to.
    pub listener: Option<Id>,
    /// What happened.
    pub kind: EventType,
    /// Zero; a negative errno; or, of a refusal, its reason.
    pub status: i32,
    /// What the peer's application sent, filled up with zeros: messages have a fixed size.
    pub private_data: Vec<u8>,
    /// What else there is.
    pub detail: EventParameters,
}

impl Event {
    /// What the peer of a connection offers and asks for.
    pub fn offer(&self) -> Option<PeerParameters> {
        match self.detail {
            EventParameters::Connection(offer) => Some(offer),
            _ => None,
        }
    }

    /// Where datagrams go.
    pub fn target(&self) -> Option<UdParameters> {
        match self.detail {
            EventParameters::Ud(target) => Some(target),
            _ => None,
        }
    }

    /// The event, if it is of this kind; else the error that it stands for. A connection that is over is over,
    /// whether or not the peer had a word to say.
    pub fn expect(self, kind: EventType) -> Result<Event, Error> {
        if self.kind == kind && (self.status == 0 || kind == EventType::Disconnected) {
            return Ok(self);
        }
        Err(Error::Connection { kind: self.kind, status: self.status })
    }
}
