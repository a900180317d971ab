//! The actions of a plan: steps, flows, programs and their work requests.

use crate::spec::RemoteTarget;
use softhca_engine::QpState;
use softhca_queue::AccessFlags;
use std::net::IpAddr;

/// The operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkOperation {
    /// SEND.
    Send {
        /// Immediate data.
        immediate: Option<u32>,
    },
    /// RDMA WRITE.
    Write {
        /// Immediate data.
        immediate: Option<u32>,
    },
    /// RDMA READ.
    Read,
    /// Atomic compare and swap.
    CompareSwap {
        /// Value to compare with.
        compare: u64,
        /// Value to swap in.
        swap: u64,
    },
    /// Atomic fetch and add.
    FetchAdd {
        /// Value to add.
        add: u64,
    },
}

/// A send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRequest {
    /// Operation.
    pub operation: WorkOperation,
    /// Number of bytes.
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

/// The action of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum StepAction {
    /// Post a send work request.
    Post(WorkRequest),
    /// Post a receive.
    Receive {
        /// Size of the buffer.
        bytes: u32,
        /// Offset in the received area.
        offset: u64,
    },
    /// Modify the state.
    Modify {
        /// New state.
        state: QpState,
        /// Raise an event when the send queue is drained.
        notify_drained: bool,
    },
    /// Wait for the next request at a port.
    Listen {
        /// Port.
        port: u16,
    },
    /// Request a connection.
    Connect {
        /// Port.
        port: u16,
        /// Private data.
        private_data: Vec<u8>,
    },
    /// Accept the received request.
    Accept {
        /// Private data.
        private_data: Vec<u8>,
    },
    /// Reject the received request.
    Reject {
        /// Reason code.
        reason: u16,
        /// Private data.
        private_data: Vec<u8>,
    },
    /// Close the connection.
    Disconnect,
    /// Attach to a multicast group.
    AttachMulticast(IpAddr),
    /// Detach from a multicast group.
    DetachMulticast(IpAddr),
    /// Destroy the queue pair.
    Destroy,
    /// Unmap its memory.
    Unmap,
    /// Deregister its memory region.
    Deregister,
    /// Change the access rights of its memory region.
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

/// A step.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// Name.
    pub name: Option<String>,
    /// Time, or the delay after `after`.
    pub at_ns: u64,
    /// Step that must complete first.
    pub after: Option<usize>,
    /// Queue pair.
    pub qp: usize,
    /// Number of repetitions.
    pub repeat: u32,
    /// Action.
    pub action: StepAction,
}

/// The pattern of a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FlowKind {
    /// The same operation every time.
    Uniform(WorkOperation),
    /// A message, then a reply of the peer before the next.
    PingPong,
    /// READs and WRITEs of records.
    KeyValue {
        /// Number of records.
        keys: u64,
        /// Fraction of READs, per billion.
        read_per_billion: u32,
    },
}

/// The traffic of one queue pair in a workload.
#[derive(Clone, Debug)]
pub struct FlowPlan {
    /// Workload.
    pub workload: usize,
    /// Queue pair.
    pub qp: usize,
    /// Pattern.
    pub kind: FlowKind,
    /// Size of each message.
    pub bytes: u32,
    /// Number of messages.
    pub count: Option<u64>,
    /// Maximum number of outstanding messages.
    pub depth: u32,
    /// Start time.
    pub at_ns: u64,
    /// Time after which it posts no message.
    pub until_ns: Option<u64>,
    /// Minimum time between two posts.
    pub interval_ns: u64,
}

/// A program on a host.
#[derive(Clone, Debug)]
pub struct CommandPlan {
    /// Workload.
    pub workload: usize,
    /// Host.
    pub host: usize,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Start time.
    pub at_ns: u64,
    /// Expected exit code.
    pub exit_code: i32,
}
