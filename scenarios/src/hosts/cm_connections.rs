//! The event channels and identifiers of all hosts.

use softhca::cm::{EventChannel, EventType, Id, UdParameters};
use std::collections::BTreeMap;

/// An event of the connection manager of a host.
#[derive(Clone, Debug)]
pub struct CmEvent {
    pub host: usize,
    /// Id; a new one for a request.
    pub id: u32,
    /// Listener of a request.
    pub listener: Option<u32>,
    /// Queue pair of the active side, if known.
    pub active_qp: Option<usize>,
    pub kind: EventType,
    /// Zero, a negative errno, or the reason of a REJ.
    pub status: i32,
    /// Private data of the peer.
    pub private_data: Vec<u8>,
    /// Destination of datagrams.
    pub target: Option<UdParameters>,
}

/// The event channels and identifiers of all hosts.
#[derive(Default)]
pub struct CmConnections {
    pub(super) channels: BTreeMap<usize, EventChannel>,
    /// With their hosts, in the order of creation.
    pub(super) identifiers: Vec<(usize, Id)>,
}

impl CmConnections {
    /// The hosts that have an event channel.
    pub fn hosts(&self) -> Vec<usize> {
        self.channels.keys().copied().collect()
    }

    /// Whether a connection waits for a message, or for the end of its timewait.
    #[cfg(feature = "udp")]
    pub fn is_outstanding(&self) -> bool {
        use softhca::cm::CmState;
        self.identifiers.iter().any(|(_, id)| {
            id.query().is_ok_and(|id| {
                matches!(
                    id.state,
                    CmState::ReqSent
                        | CmState::RepSent
                        | CmState::RepReceived
                        | CmState::DreqSent
                        | CmState::SidrReqSent
                        | CmState::TimeWait
                )
            })
        })
    }
}
