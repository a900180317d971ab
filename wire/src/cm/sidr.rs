//! Service ID resolution messages: SIDR_REQ, SIDR_REP.

use super::address::{RdmaCmHeader, ServiceId};
use super::codes::{AdditionalInfo, PrivateData, SidrStatus};
use crate::layout::layout;
use crate::{Malformed, PartitionKey, Qpn, QueueKey};
use core::fmt;

layout! {
    /// Requests the datagram queue pair of a service.
    pub struct SidrReq: 232 bytes {
        /// Matches the response to the request.
        request_id: u32 = 0,
        /// The P_Key.
        pkey: PartitionKey = 4,
        /// The service.
        service_id: ServiceId = 8,
        /// Private data for the receiver, starting with the RDMA CM header.
        private_data: PrivateData<216> = 16,
    }
}

impl SidrReq {
    /// The RDMA CM header at the start of the private data, if the service ID belongs to the RDMA CM.
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
    /// Returns the datagram queue pair of a service, or an error status.
    pub struct SidrRep: 232 bytes,
        "id={request_id:#x} status={status} service={service_id} qp={qpn} qkey={qkey}"
    {
        /// The request's ID.
        request_id: u32 = 0,
        /// The result; the other fields are valid only on success.
        status: SidrStatus = 4,
        /// Valid bytes of `additional_info`.
        additional_info_length: u8 = 5,
        /// The service's queue pair.
        qpn: Qpn = 8,
        /// The service.
        service_id: ServiceId = 12,
        /// The Q_Key for sending.
        qkey: QueueKey = 20,
        /// A redirection.
        additional_info: AdditionalInfo = 24,
        /// Private data for the receiver.
        private_data: PrivateData<136> = 96,
    }
}
