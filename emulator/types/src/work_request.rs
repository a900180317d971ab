//! Work requests.

use crate::{CompletionOpcode, QpType};
use bitflags::bitflags;
use softhca_wire::{ImmOrInvalidate, LocalKey, Operation as PacketOperation, Qpn, QueueKey, RemoteKey};

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

impl Operation {
    /// The opcode of its completion, and the operation of its packets. An operation of this device alone has no packets.
    #[inline]
    const fn opcodes(&self) -> (CompletionOpcode, Option<PacketOperation>) {
        match self {
            Operation::Send(_) => (CompletionOpcode::Send, Some(PacketOperation::Send)),
            Operation::Write { .. } => (CompletionOpcode::Write, Some(PacketOperation::Write)),
            Operation::Read { .. } => (CompletionOpcode::Read, Some(PacketOperation::ReadRequest)),
            Operation::CompareSwap { .. } => {
                (CompletionOpcode::CompareSwap, Some(PacketOperation::CompareSwap))
            }
            Operation::FetchAdd { .. } => (CompletionOpcode::FetchAdd, Some(PacketOperation::FetchAdd)),
            Operation::BindMemoryWindow(_) => (CompletionOpcode::BindMemoryWindow, None),
            Operation::LocalInvalidate { .. } => (CompletionOpcode::LocalInvalidate, None),
        }
    }

    /// The opcode of its completion.
    #[inline]
    pub const fn completion_opcode(&self) -> CompletionOpcode {
        self.opcodes().0
    }

    /// The operation of its packets; `None` for an operation of this device alone.
    #[inline]
    pub const fn packet_operation(&self) -> Option<PacketOperation> {
        self.opcodes().1
    }

    /// The word that the last packet of the message carries besides data.
    #[inline]
    pub const fn imm_or_invalidate(&self) -> (ImmOrInvalidate, u32) {
        match *self {
            Operation::Send(SendImmOrInvalidate::Immediate(value))
            | Operation::Write { imm_data: Some(value), .. } => (ImmOrInvalidate::Immediate, value),
            Operation::Send(SendImmOrInvalidate::Invalidate(rkey)) => (ImmOrInvalidate::Invalidate, rkey.0),
            _ => (ImmOrInvalidate::None, 0),
        }
    }

    /// Whether the message consumes a receive of the peer.
    #[inline]
    pub const fn takes_receive(&self) -> bool {
        matches!(self, Operation::Send(_) | Operation::Write { imm_data: Some(_), .. })
    }

    /// Whether a queue pair of this type can execute it.
    pub const fn is_supported_by(&self, kind: QpType) -> bool {
        match (self.packet_operation(), self.imm_or_invalidate().0) {
            (Some(PacketOperation::Send), ImmOrInvalidate::Invalidate) => kind.is_reliable(),
            (Some(PacketOperation::Send), _) => true,
            (Some(PacketOperation::Write) | None, _) => !kind.is_datagram(),
            (Some(_), _) => kind.is_reliable(),
        }
    }
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
    /// The number of the call that posts it ([`Command::NameCallSite`](crate::Command::NameCallSite)), or 0.
    pub call_site: u16,
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
            call_site: 0,
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
