//! The messages about an alternate path: LAP, APR. RoCE peers do not migrate paths; these are for captures.

use super::codes::{AdditionalInfo, AlternatePathStatus, CommunicationId, PrivateData};
use crate::layout::layout;
use crate::{Gid, Qpn};
use core::fmt;

layout! {
    /// Proposes an alternate path. Its fields are a path's, in another order than in a REQ.
    pub struct Lap: 232 bytes {
        /// The sender's name for the connection.
        local_id: CommunicationId = 0,
        /// The receiver's.
        remote_id: CommunicationId = 4,
        /// The receiver's queue pair.
        remote_qpn: Qpn = 12,
        /// How long the receiver may take to answer, as an exponent of 4.096 µs.
        remote_response_timeout: u8 = 15 [0..5],
        /// The local port's LID: ffff at RoCE.
        local_lid: u16 = 20,
        /// The remote port's.
        remote_lid: u16 = 22,
        /// The local port's GID.
        local_gid: Gid = 24,
        /// The remote port's.
        remote_gid: Gid = 40,
        /// 20 bits.
        flow_label: u32 = 56 [0..20],
        /// DSCP and ECN.
        traffic_class: u8 = 59,
        /// Time to live.
        hop_limit: u8 = 60,
        /// The static rate's code.
        packet_rate: u8 = 61 [2..8],
        /// The service level.
        service_level: u8 = 62 [0..4],
        /// Whether no router is on the way.
        subnet_local: bool = 62 [4..5],
        /// The exponent of the time to wait for an acknowledgement.
        local_ack_timeout: u8 = 63 [0..5],
        /// For the receiver.
        private_data: PrivateData<168> = 64,
    }
}

impl fmt::Display for Lap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lap { local_id, remote_id, remote_qpn, local_gid, remote_gid, .. } = self;
        write!(f, "id={local_id} peer={remote_id} qp={remote_qpn} {local_gid} > {remote_gid}")
    }
}

layout! {
    /// Answers a proposed alternate path.
    pub struct Apr: 232 bytes {
        /// The sender's name for the connection.
        local_id: CommunicationId = 0,
        /// The receiver's.
        remote_id: CommunicationId = 4,
        /// How many bytes of `information` count.
        additional_info_length: u8 = 8,
        /// Whether the path is loaded.
        status: AlternatePathStatus = 9,
        /// What would have been acceptable.
        additional_info: AdditionalInfo = 12,
        /// For the receiver.
        private_data: PrivateData<148> = 84,
    }
}

impl fmt::Display for Apr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id={} peer={} status={}", self.local_id, self.remote_id, self.status)
    }
}
