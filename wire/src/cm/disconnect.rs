//! Disconnect messages: DREQ, DREP.

use super::codes::{CommunicationId, PrivateData};
use crate::Qpn;
use crate::layout::layout;

layout! {
    /// Disconnect request.
    pub struct Dreq: 232 bytes, "id={local_id} peer={remote_id} qp={remote_qpn}" {
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

layout! {
    /// Disconnect reply.
    pub struct Drep: 232 bytes, "id={local_id} peer={remote_id}" {
        /// The sender's communication ID.
        local_id: CommunicationId = 0,
        /// The receiver's communication ID.
        remote_id: CommunicationId = 4,
        /// Private data for the receiver.
        private_data: PrivateData<224> = 8,
    }
}
