//! What the queue pairs and programs of a plan do: steps, flows, commands, and the work requests of them.

use crate::spec::RemoteTarget;
use softhca_engine::QpState;
use softhca_queue::AccessFlags;
use std::net::IpAddr;

/// What a work request does, in terms of areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkOperation {
    /// Two-sided data.
    Send {
        /// Four bytes for the receiver.
        immediate: Option<u32>,
    },
    /// One-sided data.
    Write {
        /// Four bytes for the receiver.
        immediate: Option<u32>,
    },
    /// The peer's memory.
    Read,
    /// Swap if equal.
    CompareSwap {
        /// What must be there.
        compare: u64,
        /// What is put there.
        swap: u64,
    },
    /// Add.
    FetchAdd {
        /// How much.
        add: u64,
    },
}

/// A send work request, ready for any card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRequest {
    /// What it does.
    pub operation: WorkOperation,
    /// How much data.
    pub bytes: u32,
    /// Where in its own area.
    pub offset: u64,
    /// Where in the peer's target area.
    pub remote_offset: u64,
    /// Whether the remote address is right.
    pub remote_target: RemoteTarget,
    /// Report success.
    pub signaled: bool,
    /// Wait for earlier reads.
    pub fence: bool,
    /// Ask for an event at the receiver.
    pub solicited: bool,
    /// The data travels in the request.
    pub inline: bool,
    /// The multicast group that it goes to, in place of the peer.
    pub group: Option<IpAddr>,
}

/// What a step does.
#[derive(Clone, Debug, PartialEq)]
pub enum StepAction {
    /// Posts a work request.
    Post(WorkRequest),
    /// Posts a receive.
    Receive {
        /// Room.
        bytes: u32,
        /// Where in its area.
        offset: u64,
    },
    /// Changes the state.
    Modify {
        /// To this.
        state: QpState,
        /// And raises an event when drained.
        notify_drained: bool,
    },
    /// Takes the next request that comes to a port.
    Listen {
        /// Which.
        port: u16,
    },
    /// Asks the host of the peer.
    Connect {
        /// At which port.
        port: u16,
        /// With which words.
        private_data: Vec<u8>,
    },
    /// Accepts the request that came.
    Accept {
        /// With which words.
        private_data: Vec<u8>,
    },
    /// Refuses the request that came.
    Reject {
        /// Why.
        reason: u16,
        /// With which words.
        private_data: Vec<u8>,
    },
    /// Ends the connection.
    Disconnect,
    /// Becomes a member of a multicast group.
    AttachMulticast(IpAddr),
    /// Leaves a multicast group.
    DetachMulticast(IpAddr),
    /// Destroys the queue pair.
    Destroy,
    /// Takes its memory away.
    Unmap,
    /// Deregisters its memory.
    Deregister,
    /// Changes what its memory allows.
    Reregister(AccessFlags),
}

impl StepAction {
    /// Whether something will tell that it is done: a completion, or an event of the connection manager.
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

    /// Whether the connection manager does it.
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
    /// Its name.
    pub name: Option<String>,
    /// When, or how long after `after`.
    pub at_ns: u64,
    /// The step before it.
    pub after: Option<usize>,
    /// Who does it.
    pub qp: usize,
    /// How often.
    pub repeat: u32,
    /// What.
    pub action: StepAction,
}

/// What a flow posts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FlowKind {
    /// The same over and over.
    Uniform(WorkOperation),
    /// A message, and an answer from the peer before the next.
    PingPong,
    /// Reads and writes of records.
    KeyValue {
        /// How many records.
        keys: u64,
        /// The share of reads, per billion.
        read_per_billion: u32,
    },
}

/// Traffic of one queue pair that goes on.
#[derive(Clone, Debug)]
pub struct FlowPlan {
    /// The workload that it belongs to.
    pub workload: usize,
    /// Who posts.
    pub qp: usize,
    /// What.
    pub kind: FlowKind,
    /// Bytes of each message.
    pub bytes: u32,
    /// How many messages.
    pub count: Option<u64>,
    /// How many at once.
    pub depth: u32,
    /// When it begins.
    pub at_ns: u64,
    /// When it posts its last.
    pub until_ns: Option<u64>,
    /// Time between two at least.
    pub interval_ns: u64,
}

/// A program that is started on a host.
#[derive(Clone, Debug)]
pub struct CommandPlan {
    /// The workload that it is.
    pub workload: usize,
    /// Where.
    pub host: usize,
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// When.
    pub at_ns: u64,
    /// The exit code that it must have.
    pub exit_code: i32,
}
