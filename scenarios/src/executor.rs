//! The programs of all hosts: post work requests at the times of the plan, and process completions.
//!
//! The executor has no clock and no devices. Its caller passes the time and the [`Hosts`] to call. It is the same in
//! virtual and in real time.

mod connections;
mod flow_progress;
mod flows;

pub use connections::{ConnectionTable, ObservedCmEvent};
pub use flow_progress::FlowProgress;

use crate::hosts::Hosts;
use crate::plan::{Area, FlowKind, Plan, StepAction, StepPlan, WorkRequest, limits};
use crate::schedule::{Schedule, Work};
use crate::spec::Errno;
use softhca_fabric::RuleId;
use softhca_types::{Completion, CompletionStatus, FaultTrigger};
use std::collections::BTreeMap;

/// The origin of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    Step(usize),
    Flow(usize),
    /// The reply in a ping-pong flow.
    PingPongReply(usize),
    /// A receive that the executor keeps posted.
    AutoReceive,
}

/// A completion that a program received.
#[derive(Clone, Copy, Debug)]
pub struct ObservedCompletion {
    pub time_ns: u64,
    pub qp: usize,
    pub completion: Completion,
    pub origin: Option<Origin>,
    pub posted_ns: u64,
    pub bytes: u32,
}

/// A verb call that returned an error.
#[derive(Clone, Debug)]
pub struct FailedCall {
    pub time_ns: u64,
    pub host: usize,
    pub errno: Errno,
}

/// The actions and results of the programs of all hosts, for the evaluation.
#[derive(Clone, Debug, Default)]
pub struct ProgramLog {
    pub progress: Vec<FlowProgress>,
    /// Number of outstanding completions of each step.
    pub pending_completions: Vec<u32>,
    /// Number of times that each fault fired, without packet faults.
    pub fired: BTreeMap<RuleId, u64>,
    /// The faults whose target had ended.
    pub without_effect: Vec<RuleId>,
    pub completions: Vec<ObservedCompletion>,
    /// All calls that returned an error.
    pub failed_calls: Vec<FailedCall>,
    pub connections: ConnectionTable,
    /// The exit code of the program of `softhca exec`.
    pub exit_code: Option<u8>,
    /// Reason why the run cannot continue.
    pub error: Option<String>,
}

impl ProgramLog {
    pub fn new(plan: &Plan) -> ProgramLog {
        let left = |step: &StepPlan| if step.action.has_completion() { step.repeat } else { 0 };
        ProgramLog {
            progress: vec![FlowProgress::default(); plan.flows.len()],
            pending_completions: plan.steps.iter().map(left).collect(),
            ..ProgramLog::default()
        }
    }

    /// Keeps the first error.
    pub fn note_error(&mut self, result: Result<(), String>) {
        if let Err(why) = result {
            self.error.get_or_insert(why);
        }
    }

    /// Counts a completion of a step; returns how many are outstanding.
    fn complete_one(&mut self, step: usize) -> u32 {
        let pending = &mut self.pending_completions[step];
        *pending = pending.saturating_sub(1);
        *pending
    }
}

/// A posted work request.
#[derive(Clone, Copy, Debug)]
struct Posted {
    origin: Origin,
    at_ns: u64,
    bytes: u32,
}

#[derive(Clone, Debug, Default)]
struct QpProgress {
    next_id: u64,
    next_receive: u64,
    posted: BTreeMap<u64, Posted>,
    /// Number of missing posted receives.
    receives_to_post: u32,
}

/// First id of kept receives, so that the ids of steps count from 1.
const FIRST_AUTO_RECEIVE: u64 = 1_000_000;

/// The programs of all hosts.
pub struct Executor<'p> {
    plan: &'p Plan,
    schedule: Schedule<'p>,
    qps: Vec<QpProgress>,
    /// Their actions and results.
    pub log: ProgramLog,
}

impl<'p> Executor<'p> {
    /// Schedules all actions of a plan.
    pub fn new(plan: &'p Plan) -> Executor<'p> {
        let first = QpProgress { next_id: 1, next_receive: FIRST_AUTO_RECEIVE, ..QpProgress::default() };
        let mut executor = Executor {
            plan,
            // At the same time, faults come first, then receives, then work requests.
            schedule: Schedule::new(plan),
            qps: vec![first; plan.qps.len()],
            log: ProgramLog::new(plan),
        };
        for (qp, side) in plan.qps.iter().enumerate() {
            let receives = plan.pairs.get(side.pair).map_or(0, |pair| pair.posted_receives);
            if receives > 0 {
                executor.qps[qp].receives_to_post = receives;
                executor.schedule.add_work(0, Work::PostReceives(qp));
            }
        }
        for (index, step) in plan.steps.iter().enumerate() {
            if step.after.is_none() {
                executor.schedule.add_work(step.at_ns, Work::Step(index));
            }
        }
        for (index, flow) in plan.flows.iter().enumerate() {
            executor.schedule.add_work(flow.at_ns, Work::Flow(index));
        }
        executor
    }

    /// Time of the next scheduled action.
    pub fn next_due(&self) -> Option<u64> {
        self.schedule.next_due()
    }

    /// Performs all actions that are due.
    pub fn run_due(&mut self, now_ns: u64, hosts: &mut Hosts<'_>) {
        while let Some(work) = self.schedule.next_work(now_ns, &mut self.log, hosts) {
            self.perform(now_ns, work, hosts);
        }
    }

    fn perform(&mut self, now_ns: u64, work: Work, hosts: &mut Hosts<'_>) {
        let qp = match work {
            Work::PostReceives(qp) => qp,
            Work::Step(step) => self.plan.steps[step].qp,
            Work::Flow(flow) => self.plan.flows[flow].qp,
        };
        let until = hosts.program_of(qp).stalled_until;
        if until > now_ns {
            return self.schedule.add_work(until, work);
        }
        match work {
            Work::PostReceives(qp) => self.post_receives(now_ns, qp, hosts),
            Work::Step(step) => self.run_step(now_ns, step, hosts),
            Work::Flow(flow) => {
                self.log.progress[flow].is_scheduled = false;
                self.post_flow(now_ns, flow, hosts);
            }
        }
    }

    fn post_receives(&mut self, now_ns: u64, qp: usize, hosts: &mut Hosts<'_>) {
        let plan = self.plan;
        let until = hosts.program_of(qp).no_receives_until;
        if until > now_ns {
            return self.schedule.add_work(until, Work::PostReceives(qp));
        }
        let pair = plan.pair_of(qp);
        while self.qps[qp].receives_to_post > 0 && !hosts.is_destroyed(qp) {
            self.qps[qp].receives_to_post -= 1;
            let id = self.qps[qp].next_receive;
            self.qps[qp].next_receive += 1;
            let offset = Area::Received.start(pair.area_bytes);
            self.post_receive(now_ns, qp, id, offset, pair.receive_bytes, Origin::AutoReceive, hosts);
        }
    }

    fn post_receive(
        &mut self,
        now_ns: u64,
        qp: usize,
        id: u64,
        offset: u64,
        bytes: u32,
        origin: Origin,
        hosts: &mut Hosts<'_>,
    ) -> bool {
        let result = hosts.post_receive(qp, id, offset, bytes);
        self.record_post(now_ns, qp, id, bytes, origin, result)
    }

    fn post(
        &mut self,
        now_ns: u64,
        qp: usize,
        work: &WorkRequest,
        origin: Origin,
        hosts: &mut Hosts<'_>,
    ) -> bool {
        let id = self.qps[qp].next_id;
        self.qps[qp].next_id += 1;
        let result = match self.is_ready(qp) {
            true => hosts.post(qp, id, work),
            false => Err(Errno::EINVAL),
        };
        self.record_post(now_ns, qp, id, work.bytes, origin, result)
    }

    fn record_post(
        &mut self,
        now_ns: u64,
        qp: usize,
        id: u64,
        bytes: u32,
        origin: Origin,
        result: Result<(), Errno>,
    ) -> bool {
        match result {
            Ok(()) => {
                self.qps[qp].posted.insert(id, Posted { origin, at_ns: now_ns, bytes });
                true
            }
            Err(errno) => {
                let host = self.plan.qps[qp].host;
                self.log.failed_calls.push(FailedCall { time_ns: now_ns, host, errno });
                false
            }
        }
    }

    fn run_step(&mut self, now_ns: u64, index: usize, hosts: &mut Hosts<'_>) {
        let plan = self.plan;
        let step = &plan.steps[index];
        let area = plan.pair_of(step.qp).area_bytes;
        for _ in 0..step.repeat {
            let outcome = match &step.action {
                StepAction::Post(work) => {
                    if !self.post(now_ns, step.qp, work, Origin::Step(index), hosts) {
                        self.log.complete_one(index);
                    }
                    Ok(())
                }
                StepAction::Receive { bytes, offset } => {
                    let id = self.qps[step.qp].next_id;
                    self.qps[step.qp].next_id += 1;
                    let offset = Area::Received.start(area) + offset;
                    let origin = Origin::Step(index);
                    if !self.post_receive(now_ns, step.qp, id, offset, *bytes, origin, hosts) {
                        self.log.complete_one(index);
                    }
                    Ok(())
                }
                StepAction::Modify { state, notify_drained } => {
                    hosts.modify(step.qp, *state, *notify_drained)
                }
                StepAction::AttachMulticast(group) => hosts.attach_multicast(step.qp, *group),
                StepAction::DetachMulticast(group) => hosts.detach_multicast(step.qp, *group),
                StepAction::Destroy => {
                    hosts.destroy(step.qp);
                    Ok(())
                }
                StepAction::Unmap => hosts.unmap(step.qp),
                StepAction::Deregister => hosts.deregister(step.qp),
                StepAction::Reregister(access) => hosts.reregister(step.qp, *access),
                StepAction::Listen { .. }
                | StepAction::Connect { .. }
                | StepAction::Accept { .. }
                | StepAction::Reject { .. }
                | StepAction::Disconnect => {
                    self.run_cm_step(now_ns, index, hosts);
                    Ok(())
                }
            };
            if let Err(why) = outcome {
                let name = step.name.clone().unwrap_or_else(|| format!("step {}", index + 1));
                self.log.error.get_or_insert(format!("{name}: {why}"));
            }
        }
    }

    /// Begins the faults that waited for what has happened. Returns whether there were any.
    pub fn deliver_triggers(&mut self, now_ns: u64, hosts: &mut Hosts<'_>) -> bool {
        let triggers = hosts.take_triggers();
        triggers.iter().fold(false, |any, trigger| self.on_trigger(now_ns, trigger, hosts) | any)
    }

    fn on_trigger(&mut self, now_ns: u64, trigger: &FaultTrigger, hosts: &mut Hosts<'_>) -> bool {
        self.schedule.on_trigger(now_ns, trigger, &mut self.log, hosts)
    }

    /// Delivers connection events and completions to the programs. Returns whether there were any.
    pub fn deliver_events(&mut self, now_ns: impl Fn() -> u64, hosts: &mut Hosts<'_>) -> bool {
        let mut any = self.deliver_triggers(now_ns(), hosts);
        let (qps, cm_hosts) = hosts.take_ready();
        for host in cm_hosts {
            while let Some(event) = hosts.poll_cm(host) {
                any = true;
                self.on_cm_event(now_ns(), event, hosts);
            }
        }
        for qp in qps {
            while let Some(completion) = hosts.poll(qp) {
                any = true;
                self.deliver_completion(now_ns(), qp, completion, hosts);
            }
        }
        any
    }

    fn deliver_completion(&mut self, now_ns: u64, qp: usize, completion: Completion, hosts: &mut Hosts<'_>) {
        if self.log.completions.len() == limits::MAX_COMPLETIONS {
            let why = format!("more than {} completions: shorten the run", limits::MAX_COMPLETIONS);
            self.log.error.get_or_insert(why);
            return;
        }
        let posted = self.qps[qp].posted.remove(&completion.wr_id);
        let (posted_ns, bytes) =
            posted.map_or((now_ns, completion.byte_len), |posted| (posted.at_ns, posted.bytes));
        let origin = posted.map(|posted| posted.origin);
        let is_receive = completion.opcode.is_receive();
        let is_round = is_receive && self.ping_pong_of(qp).is_some();
        if !is_round || origin != Some(Origin::AutoReceive) {
            self.log.completions.push(ObservedCompletion {
                time_ns: now_ns,
                qp,
                completion,
                origin,
                posted_ns,
                bytes,
            });
        }
        let success = completion.status == CompletionStatus::Success;
        match origin {
            Some(Origin::Step(step)) => {
                if self.log.complete_one(step) == 0 {
                    self.schedule_dependents(now_ns, step, hosts);
                }
            }
            Some(Origin::Flow(flow)) => match self.plan.flows[flow].kind {
                // The round ends when the reply arrives.
                FlowKind::PingPong if success => {}
                _ => self.on_flow_completion(now_ns, flow, success, hosts),
            },
            Some(Origin::AutoReceive) => {
                self.qps[qp].receives_to_post += 1;
                if success {
                    let delay = hosts.program_of(qp).receive_delay;
                    match delay {
                        0 => self.post_receives(now_ns, qp, hosts),
                        delay => self.schedule.add_work(now_ns + delay, Work::PostReceives(qp)),
                    }
                    self.on_ping_pong_receive(now_ns, qp, &completion, hosts);
                }
            }
            Some(Origin::PingPongReply(_)) | None => {}
        }
    }

    fn schedule_dependents(&mut self, now_ns: u64, step: usize, hosts: &mut Hosts<'_>) {
        let plan = self.plan;
        self.on_trigger(now_ns, &FaultTrigger::Step(step as u32), hosts);
        for (index, follower) in plan.steps.iter().enumerate() {
            if follower.after == Some(step) {
                self.schedule.add_work(now_ns + follower.at_ns, Work::Step(index));
            }
        }
    }
}
