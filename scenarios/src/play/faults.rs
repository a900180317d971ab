//! What goes wrong for programs: at a time, in a call, with a completion.

use super::{Cue, Hosts, Play};
use crate::language::{CallName, Errno};
use crate::plan::{Change, Disturbance, FaultKind, Incident};
use softhca_fabric::{Choice, Repeat, RuleId, Seed};
use softhca_queue::Completion;

/// Which of the calls or completions a fault hits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    matched: u64,
    hit: u64,
}

impl Count {
    fn next(&mut self, repeat: &Repeat, seed: u64, id: RuleId) -> bool {
        self.matched += 1;
        let Some(ordinal @ 1..) = self.matched.checked_sub(repeat.skip) else { return false };
        let hit = match repeat.choice {
            Choice::Each => true,
            Choice::Burst(_) => unreachable!("bursts are of packets"),
            Choice::Every(n) => ordinal.is_multiple_of(n.get()),
            Choice::Pattern(pattern) => pattern.hits(ordinal - 1),
            Choice::Chance { per_billion } => Seed(seed).happens(per_billion, &[id.0.into(), ordinal]),
        };
        let hit = hit && repeat.times.is_none_or(|times| self.hit < times);
        self.hit += u64::from(hit);
        hit
    }
}

impl Play<'_> {
    /// Has the driver do it.
    pub(super) fn tell(&mut self, what: Incident, hosts: &mut dyn Hosts) {
        if let Err(why) = hosts.disturb(what) {
            self.account.broken.get_or_insert(why);
        }
    }

    /// Something happens to programs, cards or cables.
    pub(super) fn disturb(&mut self, now_ns: u64, what: &Disturbance, hosts: &mut dyn Hosts) {
        match *what {
            Disturbance::Incident { what, for_ns } => {
                self.tell(what, hosts);
                if let (Some(for_ns), Some(opposite)) = (for_ns, what.opposite()) {
                    self.schedule(now_ns + for_ns, Cue::Incident(opposite));
                }
            }
            Disturbance::Flap(flap) => {
                let (cable, ways) = (flap.cable, [true, true]);
                for (at_ns, state) in flap.turns(now_ns) {
                    self.schedule(at_ns, Cue::Incident(Incident::Link { cable, ways, state }));
                }
            }
            Disturbance::Stall { host, for_ns } => {
                let until = &mut self.programs[host].stalled_until;
                *until = (*until).max(now_ns + for_ns);
                self.tell(Incident::Stall { host, for_ns }, hosts);
            }
            Disturbance::NoReceives { host, for_ns } => {
                self.programs[host].no_receives_until = now_ns + for_ns
            }
            Disturbance::SlowReceiver { host, delay_ns } => self.programs[host].receive_delay = delay_ns,
            Disturbance::Kill { host } => self.kill(host, hosts),
        }
    }

    fn kill(&mut self, host: usize, hosts: &mut dyn Hosts) {
        for qp in 0..self.plan.qps.len() {
            if self.plan.qps[qp].host == host && !self.sides[qp].is_gone {
                self.sides[qp].is_gone = true;
                hosts.destroy(qp);
            }
        }
        hosts.close(host);
        for (progress, flow) in self.account.progress.iter_mut().zip(&self.plan.flows) {
            progress.is_over |= self.plan.qps[flow.qp].host == host;
        }
    }

    /// The error that a fault makes this call return.
    pub(super) fn refusal(&mut self, qp: usize, call: CallName) -> Option<Errno> {
        let plan = self.plan;
        for fault in &plan.faults {
            if let FaultKind::Calls { host, call: wanted, repeat, errno } = &fault.kind
                && *host == plan.qps[qp].host
                && *wanted == call
                && self.counts.entry(fault.id).or_default().next(repeat, plan.seed, fault.id)
            {
                *self.account.fired.entry(fault.id).or_default() += 1;
                return Some(*errno);
            }
        }
        None
    }

    /// Changes a completion as faults say; tells how long it is held back.
    pub(super) fn alter(&mut self, qp: usize, completion: &mut Completion) -> u64 {
        let plan = self.plan;
        let mut hold_ns = 0;
        for fault in &plan.faults {
            if let FaultKind::Completions { qp: wanted, repeat, change } = &fault.kind
                && *wanted == qp
                && self.counts.entry(fault.id).or_default().next(repeat, plan.seed, fault.id)
            {
                *self.account.fired.entry(fault.id).or_default() += 1;
                match change {
                    Change::Status(status) => completion.status = status.status(),
                    Change::Hold(ns) => hold_ns += ns,
                }
            }
        }
        hold_ns
    }
}
