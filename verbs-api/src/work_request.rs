//! Work requests.

use crate::{
    AddressHandle, Operation, Qpn, QueueKey, RemoteAddress, SendFlags, SendImmOrInvalidate, Sge,
    UdDestination,
};
use softhca_types::Payload;

/// A receive work request.
pub type ReceiveRequest<'a> = softhca_types::ReceiveWorkRequest<'a>;

/// A send work request, signaled by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendRequest<'a> {
    pub(crate) inner: softhca_types::SendWorkRequest<'a>,
}

impl<'a> SendRequest<'a> {
    /// A request for any operation.
    pub fn new(id: u64, operation: Operation, gather: &'a [Sge]) -> SendRequest<'a> {
        SendRequest { inner: softhca_types::SendWorkRequest::new(id, operation, gather) }
    }

    /// A SEND.
    pub fn send(id: u64, gather: &'a [Sge]) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Send(SendImmOrInvalidate::None), gather)
    }

    /// A SEND with immediate data.
    pub fn send_with_imm(id: u64, gather: &'a [Sge], immediate: u32) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Send(SendImmOrInvalidate::Immediate(immediate)), gather)
    }

    /// An RDMA WRITE.
    pub fn rdma_write(id: u64, gather: &'a [Sge], remote: RemoteAddress) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Write { remote, imm_data: None }, gather)
    }

    /// An RDMA WRITE with immediate data.
    pub fn rdma_write_with_imm(
        id: u64,
        gather: &'a [Sge],
        remote: RemoteAddress,
        immediate: u32,
    ) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Write { remote, imm_data: Some(immediate) }, gather)
    }

    /// An RDMA READ.
    pub fn rdma_read(id: u64, scatter: &'a [Sge], remote: RemoteAddress) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Read { remote }, scatter)
    }

    /// A compare-and-swap of eight bytes.
    pub fn compare_and_swap(
        id: u64,
        scatter: &'a [Sge],
        remote: RemoteAddress,
        compare: u64,
        swap: u64,
    ) -> SendRequest<'a> {
        SendRequest::new(id, Operation::CompareSwap { remote, compare, swap }, scatter)
    }

    /// A fetch-and-add of eight bytes.
    pub fn fetch_and_add(id: u64, scatter: &'a [Sge], remote: RemoteAddress, add: u64) -> SendRequest<'a> {
        SendRequest::new(id, Operation::FetchAdd { remote, add }, scatter)
    }

    /// The number of the call that posts it, from [`QueuePair::name_call_site`](crate::QueuePair::name_call_site); 0 is
    /// none.
    #[doc(hidden)]
    pub fn call_site(mut self, number: u16) -> SendRequest<'a> {
        self.inner.call_site = number;
        self
    }

    /// With these flags instead of "signalled".
    pub fn flags(mut self, flags: SendFlags) -> SendRequest<'a> {
        self.inner.flags = flags;
        self
    }

    /// With the data in the request itself instead of gathered.
    pub fn inline_data(mut self, bytes: &'a [u8]) -> SendRequest<'a> {
        self.inner.payload = Payload::Inline(bytes);
        self
    }

    /// To this queue pair, from a datagram queue pair.
    pub fn ud_address(
        mut self,
        handle: &AddressHandle,
        queue_pair: Qpn,
        queue_key: QueueKey,
    ) -> SendRequest<'a> {
        self.inner.ud = UdDestination { ah: handle.handle(), remote_qpn: queue_pair, remote_qkey: queue_key };
        self
    }

    /// To this shared receive queue of the peer, from an XRC queue pair.
    pub fn xrc_srqn(mut self, number: u32) -> SendRequest<'a> {
        self.inner.remote_srqn = number;
        self
    }
}
