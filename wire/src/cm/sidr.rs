//! The messages that find a service's datagram queue pair: SIDR_REQ, SIDR_REP.

use super::address::{RdmaCmHeader, ServiceId};
use super::codes::{AdditionalInfo, PrivateData, SidrStatus};
use crate::layout::layout;
use crate::{Malformed, PartitionKey, Qpn, QueueKey};
use core::fmt;

layout! {
    /// Asks for the datagram queue pair of a service.
    pub struct SidrReq: 232 bytes {
        /// Pairs the answer with the question.
        request_id: u32 = 0,
        /// The partition.
        pkey: PartitionKey = 4,
        /// The service.
        service_id: ServiceId = 8,
        /// For the receiver; the RDMA CM's header is its start.
        private_data: PrivateData<216> = 16,
    }
}

impl SidrReq {
    /// The addresses that the RDMA CM puts in front of the private data, if the service is one of its.
    pub fn rdma_cm_header(&self) -> Option<Result<RdmaCmHeader, Malformed>> {
        self.service_id.port_space().map(|_| RdmaCmHeader::parse(&self.private_data.0))
    }
}

impl fmt::Display for SidrReq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id={:#x} service={}", self.request_id, self.service_id)?;
        match self.rdma_cm_header() {
            Some(Ok(header)) => write!(f, " {header}"),
            _ => Ok(()),
        }
    }
}

layout! {
    /// Names the datagram queue pair of a service, or refuses.
    pub struct SidrRep: 232 bytes {
        /// The question's.
        request_id: u32 = 0,
        /// Whether the rest is valid.
        status: SidrStatus = 4,
        /// How many bytes of `information` count.
        additional_info_length: u8 = 5,
        /// The service's queue pair.
        qpn: Qpn = 8,
        /// The service.
        service_id: ServiceId = 12,
        /// The key to send with.
        qkey: QueueKey = 20,
        /// Where to ask instead.
        additional_info: AdditionalInfo = 24,
        /// For the receiver.
        private_data: PrivateData<136> = 96,
    }
}

impl fmt::Display for SidrRep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SidrRep { request_id, status, qpn, service_id, qkey, .. } = self;
        write!(f, "id={request_id:#x} status={status} service={service_id} qp={qpn} qkey={qkey}")
    }
}
