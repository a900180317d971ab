//! Alternate path messages: LAP, APR. RoCE peers do not migrate paths; SoftHCA only decodes these in
//! captures.

use super::codes::{AdditionalInfo, AlternatePathStatus, CommunicationId, PrivateData};
use crate::layout::layout;
use crate::{Gid, Qpn};

layout! {
    /// Load alternate path. The fields are those of a path in a REQ, in another order.
    pub struct Lap: 232 bytes,
        "id={local_id} peer={remote_id} qp={remote_qpn} {local_gid} > {remote_gid}"
    {
        /// The sender's communication ID.
        local_id: CommunicationId = 0,
        /// The receiver's communication ID.
        remote_id: CommunicationId = 4,
        /// The receiver's queue pair.
        remote_qpn: Qpn = 12,
        /// The receiver's response timeout as an exponent of 4.096 µs.
        remote_response_timeout: u8 = 15 [0..5],
        /// The local port's LID: ffff at RoCE.
        local_lid: u16 = 20,
        /// The remote port's value.
        remote_lid: u16 = 22,
        /// The local port's GID.
        local_gid: Gid = 24,
        /// The remote port's value.
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
        /// The path stays within one subnet.
        subnet_local: bool = 62 [4..5],
        /// The ACK timeout as an exponent of 4.096 µs.
        local_ack_timeout: u8 = 63 [0..5],
        /// Private data for the receiver.
        private_data: PrivateData<168> = 64,
    }
}

layout! {
    /// Alternate path response.
    pub struct Apr: 232 bytes, "id={local_id} peer={remote_id} status={status}" {
        /// The sender's communication ID.
        local_id: CommunicationId = 0,
        /// The receiver's communication ID.
        remote_id: CommunicationId = 4,
        /// Valid bytes of `additional_info`.
        additional_info_length: u8 = 8,
        /// The result.
        status: AlternatePathStatus = 9,
        /// Acceptable values or a redirection.
        additional_info: AdditionalInfo = 12,
        /// Private data for the receiver.
        private_data: PrivateData<148> = 84,
    }
}
