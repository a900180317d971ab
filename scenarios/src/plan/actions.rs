//! The actions of a plan: steps, flows, programs and their work requests.

use crate::quantity::{Size, Time};
use crate::spec::RemoteTarget;
use softhca_engine::QpState;
use softhca_types::AccessFlags;
use std::net::IpAddr;

/// The operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkOperation {
    Send { immediate: Option<u32> },
    Write { immediate: Option<u32> },
    Read,
    CompareSwap { compare: u64, swap: u64 },
    FetchAdd { add: u64 },
}

/// A send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRequest {
    pub operation: WorkOperation,
    pub bytes: u32,
    /// Offset in the local area.
    pub offset: u64,
    /// Offset in the target area of the peer.
    pub remote_offset: u64,
    /// Remote address and rkey.
    pub remote_target: RemoteTarget,
    /// Generate a completion on success.
    pub signaled: bool,
    /// Wait for earlier READs and atomics.
    pub fence: bool,
    /// Request a solicited event at the receiver.
    pub solicited: bool,
    /// Copy the data into the work request.
    pub inline: bool,
    /// Destination multicast group, in place of the peer.
    pub group: Option<IpAddr>,
}

impl WorkRequest {
    /// A signaled work request at the start of the areas, without other flags.
    pub const fn new(operation: WorkOperation, bytes: u32) -> WorkRequest {
        WorkRequest {
            operation,
            bytes,
            offset: 0,
            remote_offset: 0,
            remote_target: RemoteTarget::Valid,
            signaled: true,
            fence: false,
            solicited: false,
            inline: false,
            group: None,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum StepAction {
    Post(WorkRequest),
    Receive { bytes: u32, offset: u64 },
    Modify { state: QpState, notify_drained: bool },
    Listen { port: u16 },
    Connect { port: u16, private_data: Vec<u8> },
    Accept { private_data: Vec<u8> },
    Reject { reason: u16, private_data: Vec<u8> },
    Disconnect,
    AttachMulticast(IpAddr),
    DetachMulticast(IpAddr),
    Destroy,
    Unmap,
    Deregister,
    Reregister(AccessFlags),
}

impl StepAction {
    /// Whether a completion or a connection management event reports its end.
    pub fn has_completion(&self) -> bool {
        match self {
            StepAction::Post(work) => work.signaled,
            StepAction::Receive { .. }
            | StepAction::Listen { .. }
            | StepAction::Connect { .. }
            | StepAction::Accept { .. }
            | StepAction::Disconnect => true,
            _ => false,
        }
    }

    /// Whether it calls the connection manager.
    pub fn is_cm_call(&self) -> bool {
        matches!(
            self,
            StepAction::Listen { .. }
                | StepAction::Connect { .. }
                | StepAction::Accept { .. }
                | StepAction::Reject { .. }
                | StepAction::Disconnect
        )
    }
}

#[derive(Clone, Debug)]
pub struct StepPlan {
    pub name: Option<String>,
    /// Time, or the delay after `after`.
    pub at_ns: u64,
    /// Step that must complete first.
    pub after: Option<usize>,
    pub qp: usize,
    pub repeat: u32,
    pub action: StepAction,
}

/// The pattern of a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FlowKind {
    /// One operation, every time.
    Uniform(WorkOperation),
    /// A message, then a reply of the peer before the next.
    PingPong,
    /// READs, this fraction per billion, and WRITEs of records.
    KeyValue { keys: u64, read_per_billion: u32 },
}

/// The traffic of one queue pair in a workload.
#[derive(Clone, Debug)]
pub struct FlowPlan {
    pub workload: usize,
    pub qp: usize,
    pub kind: FlowKind,
    /// Size of each message.
    pub bytes: u32,
    pub count: Option<u64>,
    /// Maximum number of outstanding messages.
    pub depth: u32,
    pub at_ns: u64,
    /// Time after which it posts no message.
    pub until_ns: Option<u64>,
    /// Minimum time between two posts.
    pub interval_ns: u64,
}

impl FlowPlan {
    /// A flow that posts as fast as its depth allows, and does not stop before its count.
    pub const fn new(
        workload: usize,
        qp: usize,
        kind: FlowKind,
        bytes: Size,
        count: Option<u64>,
        depth: u32,
        at: Time,
    ) -> FlowPlan {
        let (bytes, at_ns) = (bytes.0 as u32, at.0);
        FlowPlan { workload, qp, kind, bytes, count, depth, at_ns, until_ns: None, interval_ns: 0 }
    }
}

/// The conditions for the next program: all must hold.
#[derive(Clone, Debug)]
pub struct ReadyPlan {
    /// A text in its output.
    pub output: Option<String>,
    /// A program that listens on the TCP port `${PORT}`.
    pub tcp: bool,
    /// A program of its host that listens for connections of the connection manager.
    pub listen: bool,
}

/// A program on a host.
#[derive(Clone, Debug)]
pub struct CommandPlan {
    pub workload: usize,
    pub host: usize,
    /// Program and arguments.
    pub argv: Vec<String>,
    pub at_ns: u64,
    pub exit_code: i32,
    pub ready: ReadyPlan,
    /// The time from its start within which it must end.
    pub timeout_ns: Option<u64>,
}
