//! Faults at a time. The devices apply those of calls and completions.

use super::{Executor, ScheduledAction};
use crate::hosts::Hosts;
use crate::plan::{FabricChange, FaultKind, TimedFault};
use softhca_types::FaultTrigger;

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
            TimedFault::RestartProgram { .. } | TimedFault::KillDaemon { .. } => {
                unreachable!("a plan with steps or workloads has neither")
            }
        }
    }

    /// Begins the faults that wait for this. Returns whether there are any.
    pub(super) fn on_trigger(&mut self, now_ns: u64, trigger: &FaultTrigger, hosts: &mut Hosts<'_>) -> bool {
        let plan = self.plan;
        let mut any = false;
        for (index, fault) in plan.faults.iter().enumerate() {
            if !fault.waits_for(trigger) || self.begun.contains(&(index, trigger.clone())) {
                continue;
            }
            self.begun.push((index, trigger.clone()));
            any = true;
            match &fault.kind {
                FaultKind::Timed { at_ns, .. } => {
                    self.schedule(now_ns + at_ns, ScheduledAction::Fault(index));
                }
                FaultKind::Packets { links, rule } => hosts.add_rule(links, rule),
                FaultKind::Program { host, .. } => {
                    if let Err(why) = hosts.note_trigger(*host, trigger) {
                        self.log.error.get_or_insert(why);
                    }
                }
            }
        }
        any
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
}
