//! Faults of programs: at a time, in a verb call, with a completion.

use super::{Executor, ScheduledAction};
use crate::hosts::Hosts;
use crate::plan::{CompletionChange, FabricChange, FaultKind, TimedFault};
use crate::spec::{Errno, Verb};
use softhca_fabric::{Choice, Repeat, RuleId, Seed};
use softhca_queue::Completion;

/// Counts the calls or completions that match a fault.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HitCounter {
    matched: u64,
    hit: u64,
}

impl HitCounter {
    fn next(&mut self, repeat: &Repeat, seed: u64, id: RuleId) -> bool {
        self.matched += 1;
        let Some(ordinal @ 1..) = self.matched.checked_sub(repeat.skip) else { return false };
        let hit = match repeat.choice {
            Choice::All => true,
            Choice::Burst(_) => unreachable!("only packet faults have bursts"),
            Choice::Every(n) => ordinal.is_multiple_of(n.get()),
            Choice::Pattern(pattern) => pattern.hits(ordinal - 1),
            Choice::Probability { per_billion } => Seed(seed).happens(per_billion, &[id.0.into(), ordinal]),
        };
        let hit = hit && repeat.times.is_none_or(|times| self.hit < times);
        self.hit += u64::from(hit);
        hit
    }
}

impl Executor<'_> {
    /// Applies a change to the fabric.
    pub(super) fn apply_change(&mut self, what: FabricChange, hosts: &mut Hosts<'_>) {
        if let Err(why) = hosts.apply(what) {
            self.log.error.get_or_insert(why);
        }
    }

    /// Applies a timed fault.
    pub(super) fn apply_timed_fault(&mut self, now_ns: u64, what: &TimedFault, hosts: &mut Hosts<'_>) {
        match *what {
            TimedFault::Fabric { change: what, for_ns } => {
                self.apply_change(what, hosts);
                if let (Some(for_ns), Some(opposite)) = (for_ns, what.inverse()) {
                    self.schedule(now_ns + for_ns, ScheduledAction::Fabric(opposite));
                }
            }
            TimedFault::Flap(flap) => {
                let (link, directions) = (flap.link, [true, true]);
                for (at_ns, state) in flap.transitions(now_ns) {
                    let change = FabricChange::LinkState { link, directions, state };
                    self.schedule(at_ns, ScheduledAction::Fabric(change));
                }
            }
            TimedFault::Stall { host, for_ns } => {
                let until = &mut self.programs[host].stalled_until;
                *until = (*until).max(now_ns + for_ns);
                self.apply_change(FabricChange::Stall { host, for_ns }, hosts);
            }
            TimedFault::WithholdReceives { host, for_ns } => {
                self.programs[host].no_receives_until = now_ns + for_ns
            }
            TimedFault::DelayReceives { host, delay_ns } => self.programs[host].receive_delay = delay_ns,
            TimedFault::KillProgram { host } => self.kill(host, hosts),
        }
    }

    fn kill(&mut self, host: usize, hosts: &mut Hosts<'_>) {
        for qp in 0..self.plan.qps.len() {
            if self.plan.qps[qp].host == host && !self.qps[qp].is_destroyed {
                self.qps[qp].is_destroyed = true;
                hosts.destroy(qp);
            }
        }
        hosts.destroy_cm_ids(host);
        for (progress, flow) in self.log.progress.iter_mut().zip(&self.plan.flows) {
            progress.is_finished |= self.plan.qps[flow.qp].host == host;
        }
    }

    /// The error that a fault injects into this call.
    pub(super) fn injected_error(&mut self, qp: usize, call: Verb) -> Option<Errno> {
        let plan = self.plan;
        for fault in &plan.faults {
            if let FaultKind::Verbs { host, verb: wanted, repeat, errno } = &fault.kind
                && *host == plan.qps[qp].host
                && *wanted == call
                && self.hit_counters.entry(fault.id).or_default().next(repeat, plan.seed, fault.id)
            {
                *self.log.fired.entry(fault.id).or_default() += 1;
                return Some(*errno);
            }
        }
        None
    }

    /// Applies the faults of a completion; returns the delay of its delivery.
    pub(super) fn apply_completion_faults(&mut self, qp: usize, completion: &mut Completion) -> u64 {
        let plan = self.plan;
        let mut hold_ns = 0;
        for fault in &plan.faults {
            if let FaultKind::Completions { qp: wanted, repeat, change } = &fault.kind
                && *wanted == qp
                && self.hit_counters.entry(fault.id).or_default().next(repeat, plan.seed, fault.id)
            {
                *self.log.fired.entry(fault.id).or_default() += 1;
                match change {
                    CompletionChange::Status(status) => completion.status = *status,
                    CompletionChange::Delay(ns) => hold_ns += ns,
                }
            }
        }
        hold_ns
    }
}
