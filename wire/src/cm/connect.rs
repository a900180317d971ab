//! Connection establishment messages: REQ, MRA, REJ, REP, RTU.

use super::address::{RdmaCmHeader, ServiceId};
use super::codes::{AdditionalInfo, CommunicationId, MessageType, PrivateData, RejectReason};
use crate::layout::layout;
use crate::{Gid, Malformed, Mtu, PartitionKey, Psn, Qpn, QueueKey};
use core::fmt;

layout! {
    /// A path in a REQ, from the perspective of the REQ's sender.
    pub struct Path: 44 bytes {
        /// The local port's LID: 0xffff in RoCE.
        local_lid: u16 = 0,
        /// The remote port's value.
        remote_lid: u16 = 2,
        /// The local port's GID.
        local_gid: Gid = 4,
        /// The remote port's value.
        remote_gid: Gid = 20,
        /// The flow label, 20 bits; in RoCEv2 it also selects the UDP source port.
        flow_label: u32 = 36 [0..20],
        /// The static rate's code.
        packet_rate: u8 = 36 [26..32],
        /// DSCP and ECN.
        traffic_class: u8 = 40,
        /// Time to live.
        hop_limit: u8 = 41,
        /// The service level.
        service_level: u8 = 42 [0..4],
        /// The path stays within one subnet.
        subnet_local: bool = 42 [4..5],
        /// The ACK timeout as an exponent of 4.096 µs.
        local_ack_timeout: u8 = 43 [0..5],
    }
}

layout! {
    /// Connection request.
    pub struct Req: 232 bytes {
        /// The sender's communication ID.
        local_id: CommunicationId = 0,
        /// The vendor whose options the attribute modifier carries.
        vendor_id: u32 = 5 [0..24],
        /// The requested service.
        service_id: ServiceId = 8,
        /// The GUID of the sending channel adapter.
        local_ca_guid: u64 = 16,
        /// The sender's Q_Key (reliable datagram only).
        local_qkey: QueueKey = 28,
        /// The sender's queue pair.
        local_qpn: Qpn = 32,
        /// Incoming READs and atomics that the sender can serve at a time.
        responder_resources: u8 = 35,
        /// The sender's end-to-end context (reliable datagram only).
        local_eec: u32 = 36 [0..24],
        /// Outstanding READs and atomics that the sender wants.
        initiator_depth: u8 = 39,
        /// The receiver's end-to-end context (reliable datagram only).
        remote_eec: u32 = 40 [0..24],
        /// The receiver's response timeout as an exponent of 4.096 µs.
        remote_response_timeout: u8 = 43 [0..5],
        /// 0 for RC, 1 for UC, 2 for RD, 3 for `extended_transport_type`.
        transport_service_type: u8 = 43 [5..7],
        /// Whether the sender honours AETH credits.
        end_to_end_flow_control: bool = 43 [7..8],
        /// The first PSN that the receiver sends.
        starting_psn: Psn = 44,
        /// The sender's response timeout as an exponent of 4.096 µs.
        local_response_timeout: u8 = 47 [0..5],
        /// The transport retry count.
        retry_count: u8 = 47 [5..8],
        /// The P_Key.
        pkey: PartitionKey = 48,
        /// The path MTU's code.
        path_mtu_code: u8 = 50 [0..4],
        /// Whether the reliable datagram channel exists.
        rdc_exists: bool = 50 [4..5],
        /// RNR retry count; 7 retries without limit.
        rnr_retry_count: u8 = 50 [5..8],
        /// The limit of CM message retransmissions.
        max_cm_retries: u8 = 51 [0..4],
        /// Whether the sender's queue pair uses an SRQ.
        srq: bool = 51 [4..5],
        /// 1 for XRC.
        extended_transport_type: u8 = 51 [5..8],
        /// The primary path.
        primary_path: Path = 52,
        /// The alternate path; zeros if absent.
        alternate_path: Path = 96,
        /// Private data for the receiver, starting with the RDMA CM header.
        private_data: PrivateData<92> = 140,
    }
}

impl Req {
    /// The path MTU, if its code is valid.
    pub fn path_mtu(&self) -> Option<Mtu> {
        Mtu::from_code(self.path_mtu_code)
    }

    /// The RDMA CM header at the start of the private data, if the service ID belongs to the RDMA CM.
    pub fn rdma_cm_header(&self) -> Option<Result<RdmaCmHeader, Malformed>> {
        self.service_id.port_space().map(|_| RdmaCmHeader::parse(&self.private_data.0))
    }
}

impl fmt::Display for Req {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "id={} service={} qp={} psn={}",
            self.local_id, self.service_id, self.local_qpn, self.starting_psn
        )?;
        match self.path_mtu() {
            Some(mtu) => write!(f, " mtu={}", mtu.bytes())?,
            None => write!(f, " mtu=code {}", self.path_mtu_code)?,
        }
        write!(f, " reads={}/{}", self.responder_resources, self.initiator_depth)?;
        match self.rdma_cm_header() {
            Some(Ok(header)) => write!(f, " {header}"),
            _ => Ok(()),
        }
    }
}

layout! {
    /// Message receipt acknowledgement: requests more time.
    pub struct Mra: 232 bytes,
        "id={local_id} peer={remote_id} of={message_mraed} timeout={service_timeout}"
    {
        /// The sender's communication ID.
        local_id: CommunicationId = 0,
        /// The receiver's communication ID.
        remote_id: CommunicationId = 4,
        /// The message that the sender will answer later.
        message_mraed: MessageType = 8,
        /// The expected delay as an exponent of 4.096 µs.
        service_timeout: u8 = 9 [0..5],
        /// Private data for the receiver.
        private_data: PrivateData<222> = 10,
    }
}

layout! {
    /// Rejects or abandons a connection.
    pub struct Rej: 232 bytes, "id={local_id} peer={remote_id} of={message_rejected} reason={reason}" {
        /// The sender's communication ID; zero if it has none.
        local_id: CommunicationId = 0,
        /// The receiver's communication ID.
        remote_id: CommunicationId = 4,
        /// The rejected message.
        message_rejected: MessageType = 8,
        /// Valid bytes of `additional_info`.
        additional_info_length: u8 = 9 [0..7],
        /// The reason.
        reason: RejectReason = 10,
        /// Acceptable values or a redirection.
        additional_info: AdditionalInfo = 12,
        /// Private data for the receiver.
        private_data: PrivateData<148> = 84,
    }
}

layout! {
    /// Connection reply: accepts a connection.
    pub struct Rep: 232 bytes,
        "id={local_id} peer={remote_id} qp={local_qpn} psn={starting_psn} reads={responder_resources}/{initiator_depth}"
    {
        /// The sender's communication ID.
        local_id: CommunicationId = 0,
        /// The receiver's communication ID, from the REQ.
        remote_id: CommunicationId = 4,
        /// The sender's Q_Key (reliable datagram only).
        local_qkey: QueueKey = 8,
        /// The sender's queue pair.
        local_qpn: Qpn = 12,
        /// The sender's end-to-end context (reliable datagram only).
        local_eec: u32 = 16 [0..24],
        /// The first PSN that the receiver sends.
        starting_psn: Psn = 20,
        /// Incoming READs and atomics that the sender can serve at a time.
        responder_resources: u8 = 24,
        /// Outstanding READs and atomics that the sender will use.
        initiator_depth: u8 = 25,
        /// The target ACK delay of the sender's channel adapter as an exponent of 4.096 µs.
        target_ack_delay: u8 = 26 [0..5],
        /// The state of the alternate path: 0 accepted, 1 not supported, 2 rejected.
        failover_accepted: u8 = 26 [5..7],
        /// Whether the sender honours AETH credits.
        end_to_end_flow_control: bool = 26 [7..8],
        /// RNR retry count; 7 retries without limit.
        rnr_retry_count: u8 = 27 [0..3],
        /// Whether the sender's queue pair uses an SRQ.
        srq: bool = 27 [3..4],
        /// The GUID of the sending channel adapter.
        local_ca_guid: u64 = 28,
        /// Private data for the receiver.
        private_data: PrivateData<196> = 36,
    }
}

layout! {
    /// Ready to use: confirms the connection.
    pub struct Rtu: 232 bytes, "id={local_id} peer={remote_id}" {
        /// The sender's communication ID.
        local_id: CommunicationId = 0,
        /// The receiver's communication ID.
        remote_id: CommunicationId = 4,
        /// Private data for the receiver.
        private_data: PrivateData<224> = 8,
    }
}
