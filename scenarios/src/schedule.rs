//! The schedule of a run: the work of programs and the faults of a plan, each at a time or after something that happened.
//!
//! It is the same for simulated devices, devices on sockets and the programs of a daemon. It has no clock and no
//! devices: its caller passes the time and a [`HostControl`].

use crate::executor::ProgramLog;
use crate::plan::{Change, Continuation, FaultKind, Plan};
use softhca_fabric::Rule;
use softhca_types::FaultTrigger;
use std::collections::BTreeMap;

/// Whether a change had an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Applied,
    /// Nothing was left to change: the program had ended.
    Nothing,
}

/// The devices and programs of the hosts of a plan, as its faults change them. Hosts and links are indices in the plan.
pub trait HostControl {
    /// Applies a change.
    fn apply(&mut self, now_ns: u64, change: &Change) -> Result<Effect, String>;
    /// Adds a rule to links.
    fn add_rule(&mut self, links: &[usize], rule: &Rule, name: &str) -> Result<(), String>;
    /// Reports to the faults of the program of a host what they wait for.
    fn note_trigger(&mut self, host: usize, trigger: &FaultTrigger) -> Result<(), String>;
    /// Continues differently: without the faults that have begun, or with other random numbers.
    fn branch(&mut self, continuation: Continuation) -> Result<(), String> {
        Err(format!("not possible in real time: {continuation:?}"))
    }
}

/// Work of a program at a time.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// The queue pair posts its missing receives.
    PostReceives(usize),
    Step(usize),
    Flow(usize),
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Fault(usize),
    Change(Change),
    Work(Work),
    Branch(Continuation),
}

/// The actions that are due, in the order of time.
pub struct Schedule<'p> {
    plan: &'p Plan,
    /// By time, then in the order in which they were added.
    due: BTreeMap<(u64, u64), Action>,
    serial: u64,
    /// The faults that waited for something that happened.
    begun: Vec<(usize, FaultTrigger)>,
    /// No fault begins any more.
    is_healed: bool,
    /// The seed of the work of programs.
    pub seed: u64,
}

impl<'p> Schedule<'p> {
    /// The faults of a plan that have a time.
    pub fn new(plan: &'p Plan) -> Schedule<'p> {
        let (due, begun, seed) = (BTreeMap::new(), Vec::new(), plan.seed);
        let mut schedule = Schedule { plan, due, serial: 0, begun, is_healed: false, seed };
        // Before the faults of the same time.
        if let Some(heal) = &plan.heal {
            schedule.add(heal.at_ns, Action::Branch(Continuation::Healed));
        }
        if let Some(branch) = plan.branch {
            schedule.add(branch.at_ns, Action::Branch(branch.continuation));
        }
        for (index, fault) in plan.faults.iter().enumerate() {
            if let (FaultKind::Timed { at_ns, .. }, None) = (&fault.kind, &fault.after) {
                schedule.add(*at_ns, Action::Fault(index));
            }
        }
        schedule
    }

    fn add(&mut self, at_ns: u64, action: Action) {
        self.serial += 1;
        self.due.insert((at_ns, self.serial), action);
    }

    /// Adds work of a program.
    pub fn add_work(&mut self, at_ns: u64, work: Work) {
        self.add(at_ns, Action::Work(work));
    }

    /// The time of the next action.
    pub fn next_due(&self) -> Option<u64> {
        self.due.keys().next().map(|(at, _)| *at)
    }

    /// Applies the faults that are due, until work of a program is due, and returns this work.
    pub fn next_work(
        &mut self,
        now_ns: u64,
        log: &mut ProgramLog,
        hosts: &mut dyn HostControl,
    ) -> Option<Work> {
        while let Some(entry) = self.due.first_entry() {
            if entry.key().0 > now_ns {
                return None;
            }
            match entry.remove() {
                Action::Work(work) => return Some(work),
                Action::Change(change) => log.note_error(hosts.apply(now_ns, &change).map(drop)),
                Action::Fault(index) => self.begin_timed(now_ns, index, log, hosts),
                Action::Branch(continuation) => {
                    log.note_error(hosts.branch(continuation));
                    self.on_branch(now_ns, continuation);
                }
            }
        }
        None
    }

    fn on_branch(&mut self, now_ns: u64, continuation: Continuation) {
        match continuation {
            Continuation::Reseeded(seed) => self.seed = seed,
            Continuation::Healed => {
                self.is_healed = true;
                self.due.retain(|_, action| !matches!(action, Action::Fault(_) | Action::Change(_)));
                // A program that withheld its receives posts them.
                for qp in 0..self.plan.qps.len() {
                    self.add_work(now_ns, Work::PostReceives(qp));
                }
            }
        }
    }

    fn begin_timed(&mut self, now_ns: u64, index: usize, log: &mut ProgramLog, hosts: &mut dyn HostControl) {
        let fault = &self.plan.faults[index];
        let FaultKind::Timed { changes, .. } = &fault.kind else { return };
        for (delay_ns, change) in changes {
            if *delay_ns > 0 {
                self.add(now_ns + delay_ns, Action::Change(*change));
                continue;
            }
            match hosts.apply(now_ns, change) {
                Ok(Effect::Applied) => {}
                Ok(Effect::Nothing) => return log.without_effect.push(fault.id),
                Err(why) => log.note_error(Err(why)),
            }
        }
        *log.fired.entry(fault.id).or_default() += 1;
        self.on_trigger(now_ns, &FaultTrigger::Fault(fault.id.0), log, hosts);
    }

    /// Begins the faults that wait for this. Returns whether there are any.
    pub fn on_trigger(
        &mut self,
        now_ns: u64,
        trigger: &FaultTrigger,
        log: &mut ProgramLog,
        hosts: &mut dyn HostControl,
    ) -> bool {
        let plan = self.plan;
        if self.is_healed {
            return false;
        }
        let mut any = false;
        for (index, fault) in plan.faults.iter().enumerate() {
            if !fault.waits_for(trigger) || self.begun.contains(&(index, trigger.clone())) {
                continue;
            }
            self.begun.push((index, trigger.clone()));
            any = true;
            match &fault.kind {
                FaultKind::Timed { at_ns, .. } => self.add(now_ns + at_ns, Action::Fault(index)),
                FaultKind::Packets { links, rule } => {
                    log.note_error(hosts.add_rule(links, rule, &fault.name));
                }
                FaultKind::Program { host, .. } => log.note_error(hosts.note_trigger(*host, trigger)),
            }
        }
        any
    }
}
