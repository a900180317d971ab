//! The control verbs as values. Every back end executes them with `Hca::execute`.

use crate::{
    AccessFlags, AddressVector, AhId, CallSite, CqId, DeviceLimits, FaultTrigger, InfiniBandPort,
    InjectedEvent, MAX_CALL_SITES, MemoryWindowType, ModifyQp, PdId, PortState, ProgramFaults,
    QpInitAttributes, QpSnapshot, QpState, QpType, Resource, SrqAttributes, SrqId, SrqInitAttributes, Verb,
    VerbsError, XrcdId, cm,
};
use softhca_wire::{Gid, Qpn, RemoteKey};

/// The sizes of a queue pair's queues: `struct ibv_qp_cap`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCapabilities {
    /// Outstanding send work requests.
    pub max_send_wr: u32,
    /// Outstanding receive work requests.
    pub max_recv_wr: u32,
    /// Scatter/gather entries of a send work request.
    pub max_send_sge: u32,
    /// Scatter entries of a receive work request.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

/// A control verb and its operands.
///
/// A verb that creates or resizes a queue needs memory for its rings. A verb that
/// (re)registers memory needs the memory. Both accompany the command.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the verb of its name, with the operands of that verb")]
pub enum Command {
    AllocateProtectionDomain,
    DeallocateProtectionDomain(PdId),
    RegisterMemoryRegion {
        pd: PdId,
        /// The address of the first byte; `None` lets the HCA choose.
        iova: Option<u64>,
        length: u64,
        access: AccessFlags,
    },
    /// Changes the properties that are `Some`.
    ReregisterMemoryRegion {
        rkey: RemoteKey,
        pd: Option<PdId>,
        /// The address of the first byte and the length of other memory.
        mapping: Option<(u64, u64)>,
        access: Option<AccessFlags>,
    },
    /// Fails while windows are bound to the region, unless they are to be invalidated first.
    DeregisterMemoryRegion {
        rkey: RemoteKey,
        invalidate_windows: bool,
    },
    AllocateMemoryWindow {
        pd: PdId,
        mw_type: MemoryWindowType,
    },
    DeallocateMemoryWindow(RemoteKey),
    CreateCompletionQueue {
        cqe: u32,
    },
    ResizeCompletionQueue {
        cq: CqId,
        cqe: u32,
    },
    DestroyCompletionQueue(CqId),
    CreateSharedReceiveQueue {
        init: SrqInitAttributes,
        max_wr: u32,
        max_sge: u32,
    },
    /// Changes the properties that are `Some`.
    ModifySharedReceiveQueue {
        srq: SrqId,
        max_wr: Option<u32>,
        /// The limit of the queue, which does not change.
        max_sge: u32,
        srq_limit: Option<u32>,
    },
    QuerySharedReceiveQueue(SrqId),
    DestroySharedReceiveQueue(SrqId),
    OpenXrcDomain,
    CloseXrcDomain(XrcdId),
    CreateAddressHandle {
        pd: PdId,
        address_vector: AddressVector,
    },
    DestroyAddressHandle(AhId),
    CreateQueuePair {
        init: QpInitAttributes,
        capabilities: QpCapabilities,
    },
    ModifyQueuePair {
        qpn: Qpn,
        modify: ModifyQp,
    },
    QueryQueuePair(Qpn),
    DestroyQueuePair(Qpn),
    AttachMulticast {
        qpn: Qpn,
        group: Gid,
    },
    DetachMulticast {
        qpn: Qpn,
        group: Gid,
    },
    QueryPort,
    /// The attributes that only a port of an InfiniBand subnet has.
    QueryInfiniBandPort,
    /// A call to the connection manager.
    Cm(cm::Command),
    /// Takes the queue pair of a connection through its states.
    TransitionQueuePair(cm::QpTransition),
    /// Sets the fault rules of a process.
    InjectFaults(ProgramFaults),
    /// The process calls a verb that the HCA does not execute: fails if a fault rule says so.
    AnnounceCall {
        verb: Verb,
        object: Option<(Resource, u32)>,
    },
    /// The place of calls that post work requests with this number, for events about them.
    NameCallSite {
        number: u16,
        call_site: CallSite,
    },
    /// A step or fault that fault rules wait for happened outside of their process.
    NoteTrigger(FaultTrigger),
    /// Raises an asynchronous event with its consequences. The number is that of the object, if it has one.
    RaiseEvent {
        event: InjectedEvent,
        object: Option<u32>,
    },
}

/// The result of a [`Command`].
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each carries what the verb of its name returns")]
#[allow(clippy::large_enum_variant, reason = "one at a time, and short-lived")]
pub enum Reply {
    Done,
    ProtectionDomain(PdId),
    MemoryRegion {
        rkey: RemoteKey,
        iova: u64,
    },
    MemoryWindow(RemoteKey),
    CompletionQueue(CqId),
    SharedReceiveQueue(SrqId),
    SrqAttributes(SrqAttributes),
    XrcDomain(XrcdId),
    AddressHandle(AhId),
    QueuePair(Qpn),
    QpState(QpState),
    QpSnapshot(QpSnapshot),
    PortState(PortState),
    /// `None` for a RoCE port.
    InfiniBandPort(Option<InfiniBandPort>),
    Cm(cm::Reply),
}

impl Reply {
    /// The object that the command created.
    pub fn created(&self) -> Option<(Resource, u32)> {
        Some(match self {
            Reply::ProtectionDomain(pd) => (Resource::ProtectionDomain, pd.0),
            Reply::MemoryRegion { rkey, .. } => (Resource::MemoryRegion, rkey.0),
            Reply::MemoryWindow(rkey) => (Resource::MemoryWindow, rkey.0),
            Reply::CompletionQueue(cq) => (Resource::CompletionQueue, cq.0),
            Reply::SharedReceiveQueue(srq) => (Resource::SharedReceiveQueue, srq.0),
            Reply::XrcDomain(xrcd) => (Resource::XrcDomain, xrcd.0),
            Reply::AddressHandle(ah) => (Resource::AddressHandle, ah.0),
            Reply::QueuePair(qpn) => (Resource::QueuePair, qpn.value()),
            Reply::Cm(cm::Reply::EventChannel(channel)) => (Resource::CmChannel, channel.0),
            Reply::Cm(cm::Reply::Id(id)) => (Resource::CmIdentifier, id.0),
            _ => return None,
        })
    }
}

/// The value in a reply. Another reply than that of the command is a bug.
#[macro_export]
macro_rules! reply {
    ($reply:expr, $pattern:pat => $value:expr) => {
        match $reply {
            $pattern => $value,
            other => unreachable!("the reply to another command: {other:?}"),
        }
    };
}

fn check_range(what: &'static str, value: u32, min: u32, max: u32) -> Result<(), VerbsError> {
    match value {
        _ if value > max => Err(VerbsError::LimitExceeded { what, value: value.into(), limit: max.into() }),
        _ if value < min => Err(VerbsError::Invalid { what, why: "at least one is required" }),
        _ => Ok(()),
    }
}

impl QpInitAttributes {
    /// Whether the queue pair has a send queue.
    pub fn has_send_queue(&self) -> bool {
        self.qp_type != QpType::XrcTarget
    }

    /// Whether the queue pair has a receive queue of its own.
    pub fn has_recv_queue(&self) -> bool {
        !matches!(self.qp_type, QpType::XrcInitiator | QpType::XrcTarget) && self.srq.is_none()
    }
}

impl QpCapabilities {
    fn check(&self) -> Result<(), VerbsError> {
        let limits = DeviceLimits::HCA;
        check_range("max_send_wr", self.max_send_wr, 0, limits.max_qp_wr)?;
        check_range("max_recv_wr", self.max_recv_wr, 0, limits.max_qp_wr)?;
        check_range("max_send_sge", self.max_send_sge, 0, limits.max_sge)?;
        check_range("max_recv_sge", self.max_recv_sge, 0, limits.max_sge)?;
        check_range("max_inline_data", self.max_inline_data, 0, limits.max_inline_data)
    }
}

impl Command {
    /// Checks the sizes of the queues that the command creates or resizes.
    pub fn check_sizes(&self) -> Result<(), VerbsError> {
        let limits = DeviceLimits::HCA;
        match self {
            Command::CreateCompletionQueue { cqe } | Command::ResizeCompletionQueue { cqe, .. } => {
                check_range("cqe", *cqe, 1, limits.max_cqe)
            }
            Command::CreateSharedReceiveQueue { max_wr, max_sge, .. }
            | Command::ModifySharedReceiveQueue { max_wr: Some(max_wr), max_sge, .. } => {
                check_range("max_wr", *max_wr, 1, limits.max_qp_wr)?;
                check_range("max_sge", *max_sge, 0, limits.max_sge)
            }
            Command::CreateQueuePair { capabilities, .. } => capabilities.check(),
            Command::NameCallSite { number, .. } => {
                check_range("call_site", (*number).into(), 1, MAX_CALL_SITES.into())
            }
            _ => Ok(()),
        }
    }

    /// The call of a program that the command is, and the object of the call. `None` for queries, which have other
    /// users than programs. Also `None` if no call of a program can see the failure, as at an object's end.
    pub fn call(&self) -> Option<(Verb, Option<(Resource, u32)>)> {
        let qp = |verb, qpn: &Qpn| Some((verb, Some((Resource::QueuePair, qpn.value()))));
        let mr = |verb, key: &RemoteKey| Some((verb, Some((Resource::MemoryRegion, key.0))));
        let srq = |verb, srq: &SrqId| Some((verb, Some((Resource::SharedReceiveQueue, srq.0))));
        match self {
            Command::AllocateProtectionDomain => Some((Verb::AllocPd, None)),
            Command::RegisterMemoryRegion { .. } => Some((Verb::RegMr, None)),
            Command::ReregisterMemoryRegion { rkey, .. } => mr(Verb::ReregMr, rkey),
            Command::DeregisterMemoryRegion { rkey, invalidate_windows: false } => mr(Verb::DeregMr, rkey),
            Command::AllocateMemoryWindow { .. } => Some((Verb::AllocMw, None)),
            Command::CreateCompletionQueue { .. } => Some((Verb::CreateCq, None)),
            Command::ResizeCompletionQueue { cq, .. } => {
                Some((Verb::ResizeCq, Some((Resource::CompletionQueue, cq.0))))
            }
            Command::CreateSharedReceiveQueue { .. } => Some((Verb::CreateSrq, None)),
            Command::ModifySharedReceiveQueue { srq: id, .. } => srq(Verb::ModifySrq, id),
            Command::QuerySharedReceiveQueue(id) => srq(Verb::QuerySrq, id),
            Command::OpenXrcDomain => Some((Verb::OpenXrcd, None)),
            Command::CreateAddressHandle { .. } => Some((Verb::CreateAh, None)),
            Command::CreateQueuePair { .. } => Some((Verb::CreateQp, None)),
            Command::ModifyQueuePair { qpn, .. } => qp(Verb::ModifyQp, qpn),
            Command::AttachMulticast { qpn, .. } => qp(Verb::AttachMcast, qpn),
            Command::DetachMulticast { qpn, .. } => qp(Verb::DetachMcast, qpn),
            Command::Cm(command) => command.call(),
            Command::TransitionQueuePair(transition) => transition.final_command()?.call(),
            Command::AnnounceCall { verb, object } => Some((*verb, *object)),
            Command::DeallocateProtectionDomain(_)
            | Command::DeregisterMemoryRegion { .. }
            | Command::DeallocateMemoryWindow(_)
            | Command::DestroyCompletionQueue(_)
            | Command::DestroySharedReceiveQueue(_)
            | Command::CloseXrcDomain(_)
            | Command::DestroyAddressHandle(_)
            | Command::DestroyQueuePair(_)
            | Command::QueryQueuePair(_)
            | Command::QueryPort
            | Command::QueryInfiniBandPort
            | Command::InjectFaults(_)
            | Command::NameCallSite { .. }
            | Command::NoteTrigger(_)
            | Command::RaiseEvent { .. } => None,
        }
    }

    /// The kind of resource that the command creates.
    pub fn creates(&self) -> Option<Resource> {
        Some(match self {
            Command::AllocateProtectionDomain => Resource::ProtectionDomain,
            Command::RegisterMemoryRegion { .. } => Resource::MemoryRegion,
            Command::AllocateMemoryWindow { .. } => Resource::MemoryWindow,
            Command::CreateCompletionQueue { .. } => Resource::CompletionQueue,
            Command::CreateSharedReceiveQueue { .. } => Resource::SharedReceiveQueue,
            Command::OpenXrcDomain => Resource::XrcDomain,
            Command::CreateAddressHandle { .. } => Resource::AddressHandle,
            Command::CreateQueuePair { .. } => Resource::QueuePair,
            Command::Cm(cm::Command::CreateId { .. } | cm::Command::ReservePort { .. }) => {
                Resource::CmIdentifier
            }
            Command::Cm(cm::Command::CreateEventChannel) => Resource::CmChannel,
            _ => return None,
        })
    }

    /// The resource that the command destroys, with its number.
    pub fn destroys(&self) -> Option<(Resource, u32)> {
        Some(match self {
            Command::DeallocateProtectionDomain(pd) => (Resource::ProtectionDomain, pd.0),
            Command::DeregisterMemoryRegion { rkey, .. } => (Resource::MemoryRegion, rkey.0),
            Command::DeallocateMemoryWindow(rkey) => (Resource::MemoryWindow, rkey.0),
            Command::DestroyCompletionQueue(cq) => (Resource::CompletionQueue, cq.0),
            Command::DestroySharedReceiveQueue(srq) => (Resource::SharedReceiveQueue, srq.0),
            Command::CloseXrcDomain(xrcd) => (Resource::XrcDomain, xrcd.0),
            Command::DestroyAddressHandle(ah) => (Resource::AddressHandle, ah.0),
            Command::DestroyQueuePair(qpn) => (Resource::QueuePair, qpn.value()),
            Command::Cm(cm::Command::DestroyId(id)) => (Resource::CmIdentifier, id.0),
            Command::Cm(cm::Command::DestroyEventChannel(channel)) => (Resource::CmChannel, channel.0),
            _ => return None,
        })
    }

    /// The queue pair that the command takes to RTR.
    pub fn qp_ready_to_receive(&self) -> Option<Qpn> {
        match self {
            Command::ModifyQueuePair { qpn, modify } => {
                (modify.state == Some(QpState::ReadyToReceive)).then_some(*qpn)
            }
            _ => self.connected_qp(QpState::ReadyToReceive),
        }
    }

    /// The queue pair that the command takes to RTS with its first PSN.
    pub fn qp_ready_to_send(&self) -> Option<Qpn> {
        match self {
            Command::ModifyQueuePair { qpn, modify } => {
                (modify.state == Some(QpState::ReadyToSend) && modify.sq_psn.is_some()).then_some(*qpn)
            }
            _ => self.connected_qp(QpState::ReadyToSend),
        }
    }

    fn connected_qp(&self, state: QpState) -> Option<Qpn> {
        match self {
            Command::TransitionQueuePair(transition) => {
                transition.states.contains(&state).then_some(transition.qpn)
            }
            _ => None,
        }
    }
}
