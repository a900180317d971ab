//! Send work requests as values.

use bitflags::bitflags;
use softhca_wire::{LocalKey, Qpn, QueueKey, RemoteKey};

/// One piece of local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sge {
    /// Its first byte, in the region's own terms.
    pub address: u64,
    /// How many bytes.
    pub length: u32,
    /// The region.
    pub lkey: LocalKey,
}

/// A place in a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RemoteAddress {
    /// The first byte, in the region's own terms.
    pub address: u64,
    /// The region or window.
    pub rkey: RemoteKey,
}

bitflags! {
    /// What a region or window allows. The bits are those of `enum ibv_access_flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct AccessFlags: u32 {
        /// The card may write on behalf of local receives, reads and atomics.
        const LOCAL_WRITE = 1;
        /// Peers may write.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may read.
        const REMOTE_READ = 1 << 2;
        /// Peers may do atomics.
        const REMOTE_ATOMIC = 1 << 3;
        /// Windows may be bound to it.
        const MW_BIND = 1 << 4;
        /// Addresses count from zero.
        const ZERO_BASED = 1 << 5;
        /// Accepted and without effect here.
        const ON_DEMAND = 1 << 6;
        /// Accepted and without effect here.
        const HUGETLB = 1 << 7;
        /// Accepted and without effect here: everything is ordered.
        const RELAXED_ORDERING = 1 << 20;
    }

    /// Modifiers of a send work request. The bits are those of `enum ibv_send_flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct SendFlags: u8 {
        /// Wait until earlier reads and atomics are done.
        const FENCE = 1;
        /// Report success with a completion.
        const SIGNALED = 1 << 1;
        /// Ask for a completion event at the receiver.
        const SOLICITED = 1 << 2;
        /// The data travels in the request itself.
        const INLINE = 1 << 3;
    }
}

/// What a SEND brings besides its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SendImmOrInvalidate {
    /// Nothing.
    #[default]
    None,
    /// Four bytes for the receiver's completion.
    Immediate(u32),
    /// A key that the receiver's card invalidates.
    Invalidate(RemoteKey),
}

/// A window and what it is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MemoryWindowBind {
    /// The window's present key.
    pub mw_rkey: RemoteKey,
    /// The key that it gets. For type 1 the card chooses and this is ignored.
    pub new_rkey: RemoteKey,
    /// The region.
    pub mr_lkey: LocalKey,
    /// The first byte of the range, in the region's own terms.
    pub address: u64,
    /// How many bytes; zero unbinds a type 1 window.
    pub length: u64,
    /// What peers may do through the window.
    pub access: AccessFlags,
}

/// What a send work request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the operands of the same name in every verbs text")]
pub enum Operation {
    /// Two-sided data.
    Send(SendImmOrInvalidate),
    /// One-sided data, optionally with immediate data for the receiver.
    Write { remote: RemoteAddress, imm_data: Option<u32> },
    /// Fetch a peer's memory.
    Read { remote: RemoteAddress },
    /// Swap eight bytes if they compare equal.
    CompareSwap { remote: RemoteAddress, compare: u64, swap: u64 },
    /// Add to eight bytes.
    FetchAdd { remote: RemoteAddress, add: u64 },
    /// Bind a memory window.
    BindMemoryWindow(MemoryWindowBind),
    /// Invalidate a local key.
    LocalInvalidate { rkey: RemoteKey },
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct UdDestination {
    /// The address handle.
    pub ah: u32,
    /// The receiving queue pair.
    pub remote_qpn: Qpn,
    /// The receiver's Q_Key.
    pub remote_qkey: QueueKey,
}

/// The data of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Gathered from, or scattered to, registered memory.
    Gather(&'a [Sge]),
    /// Copied into the request when it is posted.
    Inline(&'a [u8]),
}

/// A send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendWorkRequest<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub operation: Operation,
    /// How.
    pub flags: SendFlags,
    /// With which data.
    pub payload: Payload<'a>,
    /// To whom, on a datagram queue pair.
    pub ud: UdDestination,
    /// To which shared receive queue, on an XRC queue pair.
    pub remote_srqn: u32,
}

impl<'a> SendWorkRequest<'a> {
    /// A signalled request; change what differs.
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
