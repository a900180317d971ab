//! Points of a run: where a fault can be injected.

use softhca::fault::FlowId;
use softhca::{QpType, Verb};

/// A point of injection: the program, its action, the object in order of creation, and the n-th time on this object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// The name of the program.
    pub role: String,
    /// The program's action.
    pub kind: PointKind,
    /// The object; `None` for calls on the device. For packets, the queue pair of the requester, in the order in which
    /// queue pairs of its host become ready to receive.
    pub object: Option<u32>,
    /// From 1. For packets, the PSN relative to the first, plus 1.
    pub nth: u64,
}

/// A program's action at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PointKind {
    /// It calls a verb.
    Call(Verb),
    /// A work request completes.
    Completion,
    /// Its queue pair sends a request packet.
    Request,
    /// Its queue pair receives a response packet.
    Response,
}

/// The flows of one host that packet rules can select.
pub const FLOWS_PER_HOST: u32 = 64;

impl Point {
    /// The name in tables: the verb, or `completion`.
    pub fn name(&self) -> &'static str {
        match self.kind {
            PointKind::Call(verb) => verb.name(),
            PointKind::Completion => "completion",
            PointKind::Request => "request",
            PointKind::Response => "response",
        }
    }

    /// The call, if it is one.
    pub fn verb(&self) -> Option<Verb> {
        if let PointKind::Call(verb) = self.kind { Some(verb) } else { None }
    }
}

/// The flow of a queue pair: those of each host have numbers of their own.
pub fn flow_id(host: usize, ordinal: u32) -> FlowId {
    FlowId(1 + host as u32 * FLOWS_PER_HOST + ordinal - 1)
}

/// The flows of a host, in the order in which its queue pairs become ready to receive.
pub fn flows_of_host(host: usize) -> Vec<(QpType, FlowId)> {
    (1..=FLOWS_PER_HOST).map(|ordinal| (QpType::Rc, flow_id(host, ordinal))).collect()
}
