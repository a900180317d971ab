//! Work requests.

use crate::{AddressHandle, Datagram, Operation, Qpn, QueueKey, RemoteAddress, SendFlags, SendTrailer, Sge};
use softhca_queue::Payload;

/// A receive work request.
pub type ReceiveRequest<'a> = softhca_queue::Receive<'a>;

/// A send work request, signalled unless told otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendRequest<'a> {
    pub(crate) inner: softhca_queue::SendRequest<'a>,
}

impl<'a> SendRequest<'a> {
    /// A request for any operation.
    pub fn new(id: u64, operation: Operation, gather: &'a [Sge]) -> SendRequest<'a> {
        SendRequest { inner: softhca_queue::SendRequest::new(id, operation, gather) }
    }

    /// A SEND.
    pub fn send(id: u64, gather: &'a [Sge]) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Send(SendTrailer::None), gather)
    }

    /// A SEND with immediate data.
    pub fn send_immediate(id: u64, gather: &'a [Sge], immediate: u32) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Send(SendTrailer::Immediate(immediate)), gather)
    }

    /// An RDMA WRITE.
    pub fn write(id: u64, gather: &'a [Sge], remote: RemoteAddress) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Write { remote, immediate: None }, gather)
    }

    /// An RDMA WRITE with immediate data.
    pub fn write_immediate(
        id: u64,
        gather: &'a [Sge],
        remote: RemoteAddress,
        immediate: u32,
    ) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Write { remote, immediate: Some(immediate) }, gather)
    }

    /// An RDMA READ.
    pub fn read(id: u64, scatter: &'a [Sge], remote: RemoteAddress) -> SendRequest<'a> {
        SendRequest::new(id, Operation::Read { remote }, scatter)
    }

    /// A compare-and-swap of eight bytes.
    pub fn compare_swap(
        id: u64,
        scatter: &'a [Sge],
        remote: RemoteAddress,
        compare: u64,
        swap: u64,
    ) -> SendRequest<'a> {
        SendRequest::new(id, Operation::CompareSwap { remote, compare, swap }, scatter)
    }

    /// A fetch-and-add of eight bytes.
    pub fn fetch_add(id: u64, scatter: &'a [Sge], remote: RemoteAddress, add: u64) -> SendRequest<'a> {
        SendRequest::new(id, Operation::FetchAdd { remote, add }, scatter)
    }

    /// With these flags instead of "signalled".
    pub fn flags(mut self, flags: SendFlags) -> SendRequest<'a> {
        self.inner.flags = flags;
        self
    }

    /// With the data in the request itself instead of gathered.
    pub fn inline(mut self, bytes: &'a [u8]) -> SendRequest<'a> {
        self.inner.payload = Payload::Inline(bytes);
        self
    }

    /// To this queue pair, from a datagram queue pair.
    pub fn to(mut self, handle: &AddressHandle, queue_pair: Qpn, queue_key: QueueKey) -> SendRequest<'a> {
        self.inner.datagram = Datagram { address_handle: handle.number(), queue_pair, queue_key };
        self
    }

    /// To this shared receive queue of the peer, from an XRC queue pair.
    pub fn to_shared_receive_queue(mut self, number: u32) -> SendRequest<'a> {
        self.inner.shared_receive_queue = number;
        self
    }
}
