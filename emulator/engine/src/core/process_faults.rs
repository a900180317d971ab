//! The faults of the processes that use the HCA, and the completions that they hold.

use crate::{ClientId, CqId, Instant, Reason};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use softhca_types::{Completion, FaultMatcher, Resource};
use softhca_wire::Qpn;

/// The owner of the timer that releases held completions: no queue pair has this number.
pub(crate) const HELD_COMPLETIONS: Qpn = Qpn::new(0);

/// The faults of the processes that use the HCA.
#[derive(Default)]
pub(crate) struct ProcessFaults {
    pub matchers: BTreeMap<u32, FaultMatcher>,
    pub processes: BTreeMap<ClientId, u32>,
    pub held: BTreeMap<CqId, VecDeque<HeldCompletion>>,
    /// Queue pairs whose completions were made to fail, and that have not entered ERR yet.
    pub failed_qps: Vec<(Qpn, u32)>,
}

/// A completion that waits, with all later ones of its queue behind it.
pub(crate) struct HeldCompletion {
    pub completion: Completion,
    pub reason: Reason,
    pub faults: CqeFaults,
    pub due: Instant,
    /// It is due at once when so many wait.
    pub burst: Option<u32>,
}

/// The faults that concern the write of a CQE.
#[derive(Clone, Copy, Default)]
pub(crate) struct CqeFaults {
    pub overflow: bool,
    pub drop_notification: bool,
}

impl ProcessFaults {
    pub fn matcher(&mut self, client: ClientId) -> Option<(u32, &mut FaultMatcher)> {
        let process = *self.processes.get(&client)?;
        self.matchers.get_mut(&process).map(|matcher| (process, matcher))
    }

    /// Whether completions wait.
    pub fn holds_completions(&self) -> bool {
        !self.held.is_empty()
    }

    /// The number of an object, by its place in order of creation.
    pub fn number(&self, kind: Resource, ordinal: u32) -> Option<u32> {
        self.matchers.values().find_map(|matcher| matcher.number(kind, ordinal))
    }
}
