//! Work requests.

use bitflags::bitflags;
use softhca_wire::{LocalKey, Qpn, QueueKey, RemoteKey};

/// A scatter/gather entry (`struct ibv_sge`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sge {
    /// The address of the first byte in the address space of the memory region.
    pub address: u64,
    /// The length in bytes.
    pub length: u32,
    /// The lkey of the memory region.
    pub lkey: LocalKey,
}

/// A remote memory address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RemoteAddress {
    /// The address of the first byte in the address space of the memory region.
    pub address: u64,
    /// The rkey of the memory region or memory window.
    pub rkey: RemoteKey,
}

bitflags! {
    /// The access rights of a memory region or memory window. The bits are those of `enum ibv_access_flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct AccessFlags: u32 {
        /// Local receives, READs and atomics may write.
        const LOCAL_WRITE = 1;
        /// Remote WRITEs are allowed.
        const REMOTE_WRITE = 1 << 1;
        /// Remote READs are allowed.
        const REMOTE_READ = 1 << 2;
        /// Remote atomics are allowed.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to the region.
        const MW_BIND = 1 << 4;
        /// The first byte has address zero.
        const ZERO_BASED = 1 << 5;
        /// Accepted; has no effect.
        const ON_DEMAND = 1 << 6;
        /// Accepted; has no effect.
        const HUGETLB = 1 << 7;
        /// Accepted; has no effect, because all accesses are ordered.
        const RELAXED_ORDERING = 1 << 20;
    }

    /// Modifiers of a send work request. The bits are those of `enum ibv_send_flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct SendFlags: u8 {
        /// Wait until earlier READs and atomics have completed.
        const FENCE = 1;
        /// Generate a completion on success.
        const SIGNALED = 1 << 1;
        /// Request a solicited event at the receiver.
        const SOLICITED = 1 << 2;
        /// The WQE contains the data.
        const INLINE = 1 << 3;
    }
}

/// The immediate data or the rkey to invalidate that a SEND carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SendImmOrInvalidate {
    /// Neither.
    #[default]
    None,
    /// Immediate data for the completion of the receiver.
    Immediate(u32),
    /// An rkey that the HCA of the receiver invalidates.
    Invalidate(RemoteKey),
}

/// The binding of a memory window (`struct ibv_mw_bind`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MemoryWindowBind {
    /// The memory window: its present rkey or any earlier one. Only the upper 24 bits count.
    pub mw_rkey: RemoteKey,
    /// The rkey from the successful bind on. Only the lower 8 bits count, the consumer's part of the key.
    pub new_rkey: RemoteKey,
    /// The lkey of the memory region.
    pub mr_lkey: LocalKey,
    /// The address of the first byte in the address space of the memory region.
    pub address: u64,
    /// The length in bytes; zero unbinds a type 1 window.
    pub length: u64,
    /// The access rights of the window. With ZERO_BASED, peers address its first byte as 0.
    pub access: AccessFlags,
}

/// The operation of a send work request, with its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the operands of the same name in every verbs text")]
pub enum Operation {
    /// SEND.
    Send(SendImmOrInvalidate),
    /// RDMA WRITE, optionally with immediate data.
    Write { remote: RemoteAddress, imm_data: Option<u32> },
    /// RDMA READ.
    Read { remote: RemoteAddress },
    /// Atomic compare and swap.
    CompareSwap { remote: RemoteAddress, compare: u64, swap: u64 },
    /// Atomic fetch and add.
    FetchAdd { remote: RemoteAddress, add: u64 },
    /// Bind a memory window.
    BindMemoryWindow(MemoryWindowBind),
    /// Invalidate a local rkey.
    LocalInvalidate { rkey: RemoteKey },
}

/// The destination of a datagram (`wr.ud` of `struct ibv_send_wr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct UdDestination {
    /// The address handle.
    pub ah: u32,
    /// The destination queue pair.
    pub remote_qpn: Qpn,
    /// The Q_Key of the destination.
    pub remote_qkey: QueueKey,
}

/// The data of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// SGEs of registered memory.
    Gather(&'a [Sge]),
    /// Inline data, copied into the WQE when it is posted.
    Inline(&'a [u8]),
}

/// A send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendWorkRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation,
    /// The flags.
    pub flags: SendFlags,
    /// The data.
    pub payload: Payload<'a>,
    /// The destination, on a UD queue pair.
    pub ud: UdDestination,
    /// The destination SRQ, on an XRC queue pair.
    pub remote_srqn: u32,
}

impl<'a> SendWorkRequest<'a> {
    /// A signaled work request with default options.
    pub const fn new(id: u64, operation: Operation, gather: &'a [Sge]) -> SendWorkRequest<'a> {
        SendWorkRequest {
            wr_id: id,
            operation,
            flags: SendFlags::SIGNALED,
            payload: Payload::Gather(gather),
            ud: UdDestination { ah: 0, remote_qpn: Qpn::new(0), remote_qkey: QueueKey(0) },
            remote_srqn: 0,
        }
    }
}

/// A receive work request, as an application posts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveWorkRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// The memory that receives the data.
    pub sg_list: &'a [Sge],
}
