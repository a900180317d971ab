//! The messages that end a connection: DREQ, DREP.

use super::codes::{CommunicationId, PrivateData};
use crate::Qpn;
use crate::layout::layout;
use core::fmt;

layout! {
    /// Asks to end a connection.
    pub struct Dreq: 232 bytes {
        /// The sender's name for the connection.
        local_id: CommunicationId = 0,
        /// The receiver's.
        remote_id: CommunicationId = 4,
        /// The receiver's queue pair.
        remote_qpn: Qpn = 8,
        /// For the receiver.
        private_data: PrivateData<220> = 12,
    }
}

impl fmt::Display for Dreq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id={} peer={} qp={}", self.local_id, self.remote_id, self.remote_qpn)
    }
}

layout! {
    /// Confirms the end of a connection.
    pub struct Drep: 232 bytes {
        /// The sender's name for the connection.
        local_id: CommunicationId = 0,
        /// The receiver's.
        remote_id: CommunicationId = 4,
        /// For the receiver.
        private_data: PrivateData<224> = 8,
    }
}

impl fmt::Display for Drep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id={} peer={}", self.local_id, self.remote_id)
    }
}
