//! The messages that make a connection: REQ, MRA, REJ, REP, RTU.

use super::address::{RdmaCmHeader, ServiceId};
use super::codes::{AdditionalInfo, CommunicationId, MessageType, PrivateData, RejectReason};
use crate::layout::layout;
use crate::{Gid, Malformed, Mtu, PartitionKey, Psn, Qpn, QueueKey};
use core::fmt;

layout! {
    /// A path as a REQ describes it, seen from the side that sends the REQ.
    pub struct Path: 44 bytes {
        /// The local port's LID: ffff at RoCE.
        local_lid: u16 = 0,
        /// The remote port's.
        remote_lid: u16 = 2,
        /// The local port's GID.
        local_gid: Gid = 4,
        /// The remote port's.
        remote_gid: Gid = 20,
        /// 20 bits; at RoCEv2 it also chooses the source port.
        flow_label: u32 = 36 [0..20],
        /// The static rate's code.
        packet_rate: u8 = 36 [26..32],
        /// DSCP and ECN.
        traffic_class: u8 = 40,
        /// Time to live.
        hop_limit: u8 = 41,
        /// The service level.
        service_level: u8 = 42 [0..4],
        /// Whether no router is on the way.
        subnet_local: bool = 42 [4..5],
        /// The exponent of the time to wait for an acknowledgement.
        local_ack_timeout: u8 = 43 [0..5],
    }
}

layout! {
    /// Asks for a connection.
    pub struct Req: 232 bytes {
        /// The sender's name for the connection.
        local_id: CommunicationId = 0,
        /// The vendor whose options the attribute modifier carries.
        vendor_id: u32 = 5 [0..24],
        /// What it wants to be connected to.
        service_id: ServiceId = 8,
        /// The sending card.
        local_ca_guid: u64 = 16,
        /// The sender's Q_Key, of reliable datagrams only.
        local_qkey: QueueKey = 28,
        /// The sender's queue pair.
        local_qpn: Qpn = 32,
        /// How many reads and atomics the sender serves at a time.
        responder_resources: u8 = 35,
        /// The sender's end-to-end context, of reliable datagrams only.
        local_eec: u32 = 36 [0..24],
        /// How many reads and atomics the sender wants to have outstanding.
        initiator_depth: u8 = 39,
        /// The receiver's end-to-end context, of reliable datagrams only.
        remote_eec: u32 = 40 [0..24],
        /// How long the receiver may take to answer, as an exponent of 4.096 µs.
        remote_response_timeout: u8 = 43 [0..5],
        /// 0 for RC, 1 for UC, 2 for RD, 3 for what `extended_transport` says.
        transport_service_type: u8 = 43 [5..7],
        /// Whether the sender honours AETH credits.
        end_to_end_flow_control: bool = 43 [7..8],
        /// The PSN that the receiver must start to send with.
        starting_psn: Psn = 44,
        /// How long the sender may take to answer, as an exponent of 4.096 µs.
        local_response_timeout: u8 = 47 [0..5],
        /// How often to retransmit.
        retry_count: u8 = 47 [5..8],
        /// The partition.
        pkey: PartitionKey = 48,
        /// The path MTU's code.
        path_mtu_code: u8 = 50 [0..4],
        /// Whether a reliable datagram channel stands already.
        rdc_exists: bool = 50 [4..5],
        /// How often to try again when the receiver was not ready; 7 for ever.
        rnr_retry_count: u8 = 50 [5..8],
        /// How often each side sends a message again.
        max_cm_retries: u8 = 51 [0..4],
        /// Whether the sender's queue pair has a shared receive queue.
        srq: bool = 51 [4..5],
        /// 1 for XRC.
        extended_transport_type: u8 = 51 [5..8],
        /// The path.
        primary_path: Path = 52,
        /// The path to turn to when that fails; zeros if there is none.
        alternate_path: Path = 96,
        /// For the receiver; the RDMA CM's header is its start.
        private_data: PrivateData<92> = 140,
    }
}

impl Req {
    /// The path MTU, if its code is valid.
    pub fn path_mtu(&self) -> Option<Mtu> {
        Mtu::from_code(self.path_mtu_code)
    }

    /// The addresses that the RDMA CM puts in front of the private data, if the service is one of its.
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
    /// Asks the other side to wait longer.
    pub struct Mra: 232 bytes {
        /// The sender's name for the connection.
        local_id: CommunicationId = 0,
        /// The receiver's.
        remote_id: CommunicationId = 4,
        /// The message that will be answered later.
        message_mraed: MessageType = 8,
        /// How long that may take, as an exponent of 4.096 µs.
        service_timeout: u8 = 9 [0..5],
        /// For the receiver.
        private_data: PrivateData<222> = 10,
    }
}

impl fmt::Display for Mra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mra { local_id, remote_id, message_mraed, service_timeout, .. } = self;
        write!(f, "id={local_id} peer={remote_id} of={message_mraed} timeout={service_timeout}")
    }
}

layout! {
    /// Refuses a connection, or gives it up.
    pub struct Rej: 232 bytes {
        /// The sender's name for the connection, zero if it has none.
        local_id: CommunicationId = 0,
        /// The receiver's.
        remote_id: CommunicationId = 4,
        /// The message that is refused.
        message_rejected: MessageType = 8,
        /// How many bytes of `information` count.
        additional_info_length: u8 = 9 [0..7],
        /// Why.
        reason: RejectReason = 10,
        /// What would have been acceptable.
        additional_info: AdditionalInfo = 12,
        /// For the receiver.
        private_data: PrivateData<148> = 84,
    }
}

impl fmt::Display for Rej {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rej { local_id, remote_id, message_rejected, reason, .. } = self;
        write!(f, "id={local_id} peer={remote_id} of={message_rejected} reason={reason}")
    }
}

layout! {
    /// Accepts a connection.
    pub struct Rep: 232 bytes {
        /// The sender's name for the connection.
        local_id: CommunicationId = 0,
        /// The receiver's, from the REQ.
        remote_id: CommunicationId = 4,
        /// The sender's Q_Key, of reliable datagrams only.
        local_qkey: QueueKey = 8,
        /// The sender's queue pair.
        local_qpn: Qpn = 12,
        /// The sender's end-to-end context, of reliable datagrams only.
        local_eec: u32 = 16 [0..24],
        /// The PSN that the receiver must start to send with.
        starting_psn: Psn = 20,
        /// How many reads and atomics the sender serves at a time.
        responder_resources: u8 = 24,
        /// How many it will have outstanding.
        initiator_depth: u8 = 25,
        /// How long the sender's card may take to acknowledge, as an exponent of 4.096 µs.
        target_ack_delay: u8 = 26 [0..5],
        /// What became of the alternate path: 0 accepted, 1 not supported, 2 rejected.
        failover_accepted: u8 = 26 [5..7],
        /// Whether the sender honours AETH credits.
        end_to_end_flow_control: bool = 26 [7..8],
        /// How often to try again when the receiver was not ready; 7 for ever.
        rnr_retry_count: u8 = 27 [0..3],
        /// Whether the sender's queue pair has a shared receive queue.
        srq: bool = 27 [3..4],
        /// The sending card.
        local_ca_guid: u64 = 28,
        /// For the receiver.
        private_data: PrivateData<196> = 36,
    }
}

impl fmt::Display for Rep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "id={} peer={} qp={} psn={} reads={}/{}",
            self.local_id,
            self.remote_id,
            self.local_qpn,
            self.starting_psn,
            self.responder_resources,
            self.initiator_depth
        )
    }
}

layout! {
    /// Confirms that the connection stands.
    pub struct Rtu: 232 bytes {
        /// The sender's name for the connection.
        local_id: CommunicationId = 0,
        /// The receiver's.
        remote_id: CommunicationId = 4,
        /// For the receiver.
        private_data: PrivateData<224> = 8,
    }
}

impl fmt::Display for Rtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id={} peer={}", self.local_id, self.remote_id)
    }
}
