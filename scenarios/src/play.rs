//! The program of every host: posts what the plan says, when it says so, and takes completions.
//!
//! It knows nothing of clocks and cards: a driver tells it the time, gives it [`Hosts`] to act on, and brings
//! it completions. The same program runs in virtual and in real time.

mod connections;
mod faults;
mod flows;

pub use connections::{ConnectionManagers, Connections, Heard, News};
pub use flows::Progress;

use crate::language::{CallName, Errno};
use crate::plan::{Area, Deed, FaultKind, FlowKind, Incident, Plan, StepPlan, Work, limits};
use faults::Count;
use softhca_engine::State;
use softhca_fabric::RuleId;
use softhca_queue::{Access, Completion, Status};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// The cards that a program acts on. Queue pairs and hosts are named by their place in the plan.
pub trait Hosts: ConnectionManagers {
    /// Posts a send work request.
    fn post(&mut self, qp: usize, id: u64, work: &Work) -> Result<(), Errno>;
    /// Posts a receive, `offset` bytes into the queue pair's memory.
    fn post_receive(&mut self, qp: usize, id: u64, offset: u64, bytes: u32) -> Result<(), Errno>;
    /// Changes a queue pair's state.
    fn modify(&mut self, qp: usize, state: State, notify_drained: bool) -> Result<(), String>;
    /// Destroys a queue pair.
    fn destroy(&mut self, qp: usize);
    /// Takes the memory of a queue pair away.
    fn unmap(&mut self, qp: usize) -> Result<(), String>;
    /// Deregisters the memory of a queue pair.
    fn deregister(&mut self, qp: usize) -> Result<(), String>;
    /// Changes what the memory of a queue pair allows.
    fn reregister(&mut self, qp: usize, access: Access) -> Result<(), String>;
    /// Makes a queue pair a member of a multicast group.
    fn join(&mut self, qp: usize, group: IpAddr) -> Result<(), String>;
    /// Takes a queue pair out of a multicast group.
    fn leave(&mut self, qp: usize, group: IpAddr) -> Result<(), String>;
    /// Does something to a cable, a switch or a card.
    fn disturb(&mut self, what: Incident) -> Result<(), String>;
}

/// Whose work a completion ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A step's.
    Step(usize),
    /// A flow's.
    Flow(usize),
    /// The answer in a ping-pong flow.
    Answer(usize),
    /// A receive that is posted again whenever it is used.
    Standing,
}

/// A completion as the program got it.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// When.
    pub time_ns: u64,
    /// On which queue pair.
    pub qp: usize,
    /// What.
    pub completion: Completion,
    /// Whose work it was.
    pub origin: Option<Origin>,
    /// When that was posted.
    pub posted_ns: u64,
    /// Its size.
    pub bytes: u32,
}

/// A call that failed.
#[derive(Clone, Debug)]
pub struct Failed {
    /// When.
    pub time_ns: u64,
    /// On which host.
    pub host: usize,
    /// With which error.
    pub errno: Errno,
}

/// What the programs of all hosts did and saw: what a judge hears of them.
#[derive(Clone, Debug, Default)]
pub struct Account {
    /// How far each flow has come.
    pub progress: Vec<Progress>,
    /// Completions that each step has still to wait for.
    pub step_left: Vec<u32>,
    /// How often each fault happened that is not about packets.
    pub fired: BTreeMap<RuleId, u64>,
    /// Every completion that a program got.
    pub seen: Vec<Seen>,
    /// Every call that failed.
    pub failed: Vec<Failed>,
    /// Their connections.
    pub connections: Connections,
    /// What the driver could not do.
    pub broken: Option<String>,
}

impl Account {
    /// Nothing was done yet.
    pub fn new(plan: &Plan) -> Account {
        let left = |step: &StepPlan| if step.deed.is_awaited() { step.repeat } else { 0 };
        Account {
            progress: vec![Progress::default(); plan.flows.len()],
            step_left: plan.steps.iter().map(left).collect(),
            ..Account::default()
        }
    }
}

/// What is done at a time.
#[derive(Clone, Debug)]
enum Cue {
    Fault(usize),
    Incident(Incident),
    Receives(usize),
    Step(usize),
    Flow(usize),
    HandOver(usize, Completion),
}

/// What a program knows of a work request that it posted.
#[derive(Clone, Copy, Debug)]
struct Posted {
    origin: Origin,
    at_ns: u64,
    bytes: u32,
}

#[derive(Clone, Debug, Default)]
struct Side {
    next_id: u64,
    next_receive: u64,
    posted: BTreeMap<u64, Posted>,
    /// Standing receives that are not posted at present.
    missing: u32,
    is_gone: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Program {
    stalled_until: u64,
    no_receives_until: u64,
    receive_delay: u64,
}

/// Standing receives have ids of their own, so that the work requests of steps count from 1.
const FIRST_STANDING: u64 = 1_000_000;

/// The programs of all hosts.
pub struct Play<'p> {
    plan: &'p Plan,
    agenda: BTreeMap<(u64, u64), Cue>,
    serial: u64,
    sides: Vec<Side>,
    programs: Vec<Program>,
    counts: BTreeMap<RuleId, Count>,
    /// What they did and saw.
    pub account: Account,
}

impl<'p> Play<'p> {
    /// Everything is still to be done.
    pub fn new(plan: &'p Plan) -> Play<'p> {
        let mut play = Play {
            plan,
            agenda: BTreeMap::new(),
            serial: 0,
            sides: vec![Side { next_id: 1, next_receive: FIRST_STANDING, ..Side::default() }; plan.qps.len()],
            programs: vec![Program::default(); plan.hosts.len()],
            counts: BTreeMap::new(),
            account: Account::new(plan),
        };
        // At one time, faults come first, then receives, then work.
        for (index, fault) in plan.faults.iter().enumerate() {
            if let FaultKind::Timed { at_ns, .. } = fault.kind {
                play.schedule(at_ns, Cue::Fault(index));
            }
        }
        for (qp, side) in plan.qps.iter().enumerate() {
            let receives = plan.pairs.get(side.pair).map_or(0, |pair| pair.receives);
            if receives > 0 {
                play.sides[qp].missing = receives;
                play.schedule(0, Cue::Receives(qp));
            }
        }
        for (index, step) in plan.steps.iter().enumerate() {
            if step.after.is_none() {
                play.schedule(step.at_ns, Cue::Step(index));
            }
        }
        for (index, flow) in plan.flows.iter().enumerate() {
            play.schedule(flow.at_ns, Cue::Flow(index));
        }
        play
    }

    fn schedule(&mut self, at_ns: u64, cue: Cue) {
        self.serial += 1;
        self.agenda.insert((at_ns, self.serial), cue);
    }

    /// When the program does something of its own accord next.
    pub fn next_at(&self) -> Option<u64> {
        self.agenda.keys().next().map(|(at, _)| *at)
    }

    /// Does everything that is due.
    pub fn act(&mut self, now_ns: u64, hosts: &mut dyn Hosts) {
        while let Some(entry) = self.agenda.first_entry() {
            if entry.key().0 > now_ns {
                return;
            }
            let cue = entry.remove();
            self.do_cue(now_ns, cue, hosts);
        }
    }

    fn host_of(&self, cue: &Cue) -> Option<usize> {
        let qp = match cue {
            Cue::Receives(qp) | Cue::HandOver(qp, _) => *qp,
            Cue::Step(step) => self.plan.steps[*step].qp,
            Cue::Flow(flow) => self.plan.flows[*flow].qp,
            Cue::Fault(_) | Cue::Incident(_) => return None,
        };
        Some(self.plan.qps[qp].host)
    }

    fn do_cue(&mut self, now_ns: u64, cue: Cue, hosts: &mut dyn Hosts) {
        if let Some(host) = self.host_of(&cue) {
            let until = self.programs[host].stalled_until;
            if until > now_ns {
                return self.schedule(until, cue);
            }
        }
        match cue {
            Cue::Fault(index) => {
                let fault = &self.plan.faults[index];
                if let FaultKind::Timed { what, .. } = &fault.kind {
                    *self.account.fired.entry(fault.id).or_default() += 1;
                    self.disturb(now_ns, what, hosts);
                }
            }
            Cue::Incident(what) => self.tell(what, hosts),
            Cue::Receives(qp) => self.post_receives(now_ns, qp, hosts),
            Cue::Step(step) => self.do_step(now_ns, step, hosts),
            Cue::Flow(flow) => {
                self.account.progress[flow].waits = false;
                self.pump(now_ns, flow, hosts);
            }
            Cue::HandOver(qp, completion) => self.take(now_ns, qp, completion, hosts),
        }
    }

    fn post_receives(&mut self, now_ns: u64, qp: usize, hosts: &mut dyn Hosts) {
        let plan = self.plan;
        let until = self.programs[plan.qps[qp].host].no_receives_until;
        if until > now_ns {
            return self.schedule(until, Cue::Receives(qp));
        }
        let pair = plan.pair_of(qp);
        while self.sides[qp].missing > 0 && !self.sides[qp].is_gone {
            self.sides[qp].missing -= 1;
            let id = self.sides[qp].next_receive;
            self.sides[qp].next_receive += 1;
            let offset = Area::Received.start(pair.area);
            self.post_receive(now_ns, qp, id, offset, pair.receive_bytes, Origin::Standing, hosts);
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
        hosts: &mut dyn Hosts,
    ) -> bool {
        let result = match self.refusal(qp, CallName::PostReceive) {
            Some(errno) => Err(errno),
            None => hosts.post_receive(qp, id, offset, bytes),
        };
        self.note(now_ns, qp, id, bytes, origin, result)
    }

    fn post(&mut self, now_ns: u64, qp: usize, work: &Work, origin: Origin, hosts: &mut dyn Hosts) -> bool {
        let id = self.sides[qp].next_id;
        self.sides[qp].next_id += 1;
        let result = match self.refusal(qp, CallName::PostSend) {
            Some(errno) => Err(errno),
            None if self.sides[qp].is_gone || !self.is_ready(qp) => Err(Errno::EINVAL),
            None => hosts.post(qp, id, work),
        };
        self.note(now_ns, qp, id, work.bytes, origin, result)
    }

    fn note(
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
                self.sides[qp].posted.insert(id, Posted { origin, at_ns: now_ns, bytes });
                true
            }
            Err(errno) => {
                self.account.failed.push(Failed { time_ns: now_ns, host: self.plan.qps[qp].host, errno });
                false
            }
        }
    }

    fn do_step(&mut self, now_ns: u64, index: usize, hosts: &mut dyn Hosts) {
        let plan = self.plan;
        let step = &plan.steps[index];
        let area = plan.pair_of(step.qp).area;
        for _ in 0..step.repeat {
            let outcome = match &step.deed {
                Deed::Post(work) => {
                    let posted = self.post(now_ns, step.qp, work, Origin::Step(index), hosts);
                    if !posted {
                        self.account.step_left[index] = self.account.step_left[index].saturating_sub(1);
                    }
                    Ok(())
                }
                Deed::Receive { bytes, offset } => {
                    let id = self.sides[step.qp].next_id;
                    self.sides[step.qp].next_id += 1;
                    let offset = Area::Received.start(area) + offset;
                    let posted =
                        self.post_receive(now_ns, step.qp, id, offset, *bytes, Origin::Step(index), hosts);
                    if !posted {
                        self.account.step_left[index] = self.account.step_left[index].saturating_sub(1);
                    }
                    Ok(())
                }
                Deed::Modify { state, notify_drained } => hosts.modify(step.qp, *state, *notify_drained),
                Deed::Join(group) => hosts.join(step.qp, *group),
                Deed::Leave(group) => hosts.leave(step.qp, *group),
                Deed::Destroy => {
                    self.sides[step.qp].is_gone = true;
                    hosts.destroy(step.qp);
                    Ok(())
                }
                Deed::Unmap => hosts.unmap(step.qp),
                Deed::Deregister => hosts.deregister(step.qp),
                Deed::Reregister(access) => hosts.reregister(step.qp, *access),
                Deed::Listen { .. }
                | Deed::Connect { .. }
                | Deed::Accept { .. }
                | Deed::Reject { .. }
                | Deed::Disconnect => {
                    self.do_connecting(now_ns, index, hosts);
                    Ok(())
                }
            };
            if let Err(why) = outcome {
                let name = step.name.clone().unwrap_or_else(|| format!("step {}", index + 1));
                self.account.broken.get_or_insert(format!("{name}: {why}"));
            }
        }
    }

    /// A completion came out of a queue.
    pub fn completed(&mut self, now_ns: u64, qp: usize, mut completion: Completion, hosts: &mut dyn Hosts) {
        let hold_ns = self.alter(qp, &mut completion);
        match hold_ns {
            0 => self.take(now_ns, qp, completion, hosts),
            _ => self.schedule(now_ns + hold_ns, Cue::HandOver(qp, completion)),
        }
    }

    fn take(&mut self, now_ns: u64, qp: usize, completion: Completion, hosts: &mut dyn Hosts) {
        if self.account.seen.len() == limits::COMPLETIONS {
            let why = format!("more than {} completions: make the run shorter", limits::COMPLETIONS);
            self.account.broken.get_or_insert(why);
            return;
        }
        let posted = self.sides[qp].posted.remove(&completion.id);
        let (posted_ns, bytes) =
            posted.map_or((now_ns, completion.bytes), |posted| (posted.at_ns, posted.bytes));
        let origin = posted.map(|posted| posted.origin);
        let is_receive = completion.operation.is_receive();
        let is_round = is_receive && self.ping_pong_of(qp).is_some();
        if !is_round || origin != Some(Origin::Standing) {
            self.account.seen.push(Seen { time_ns: now_ns, qp, completion, origin, posted_ns, bytes });
        }
        let success = completion.status == Status::Success;
        match origin {
            Some(Origin::Step(step)) => {
                self.account.step_left[step] = self.account.step_left[step].saturating_sub(1);
                if self.account.step_left[step] == 0 {
                    self.start_followers(now_ns, step);
                }
            }
            Some(Origin::Flow(flow)) => match self.plan.flows[flow].kind {
                // The round is over when the answer is there.
                FlowKind::PingPong if success => {}
                _ => self.advance(now_ns, flow, success, hosts),
            },
            Some(Origin::Standing) => {
                self.sides[qp].missing += 1;
                if success {
                    let delay = self.programs[self.plan.qps[qp].host].receive_delay;
                    match delay {
                        0 => self.post_receives(now_ns, qp, hosts),
                        delay => self.schedule(now_ns + delay, Cue::Receives(qp)),
                    }
                    self.bounce(now_ns, qp, &completion, hosts);
                }
            }
            Some(Origin::Answer(_)) | None => {}
        }
    }

    fn start_followers(&mut self, now_ns: u64, step: usize) {
        let plan = self.plan;
        for (index, follower) in plan.steps.iter().enumerate() {
            if follower.after == Some(step) {
                self.schedule(now_ns + follower.at_ns, Cue::Step(index));
            }
        }
    }
}
