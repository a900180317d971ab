//! Disconnect messages: DREQ, DREP.

use super::codes::{CommunicationId, PrivateData};
use crate::Qpn;
use crate::layout::layout;
use core::fmt;

layout! {
    /// Disconnect request.
    pub struct Dreq: 232 bytes {
        /// The sender's communication ID.
        local_id: CommunicationId = 0,
        /// The receiver's communication ID.
        remote_id: CommunicationId = 4,
        /// The receiver's queue pair.
        remote_qpn: Qpn = 8,
        /// Private data for the receiver.
        private_data: PrivateData<220> = 12,
    }
}

impl fmt::Display for Dreq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id={} peer={} qp={}", self.local_id, self.remote_id, self.remote_qpn)
    }
}

layout! {
    /// Disconnect reply.
    pub struct Drep: 232 bytes {
        /// The sender's communication ID.
        local_id: CommunicationId = 0,
        /// The receiver's communication ID.
        remote_id: CommunicationId = 4,
        /// Private data for the receiver.
        private_data: PrivateData<224> = 8,
    }
}

impl fmt::Display for Drep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id={} peer={}", self.local_id, self.remote_id)
    }
}
