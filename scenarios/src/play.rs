//! The program of every host: posts what the plan says, when it says so, and takes completions.
//!
//! It knows nothing of clocks and cards: a driver tells it the time, gives it [`Hosts`] to act on, and brings
//! it completions. The same program runs in virtual and in real time.

mod connections;

pub use connections::{Connections, Heard, News};

use crate::language::{CallName, Errno, Placement};
use crate::plan::{Area, Change, Deed, Disturbance, FaultKind, FlowKind, Job, Plan, Work};
use softhca_engine::{QpKind, State};
use softhca_fabric::{Choice, Repeat, RuleId, Seed};
use softhca_queue::cm::DatagramTarget;
use softhca_queue::{Access, Completion, Status};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// The cards that a program acts on. Queue pairs and hosts are named by their place in the plan.
pub trait Hosts {
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
    /// Takes requests at a port of a host, for queue pairs of this kind; returns the listener's identifier.
    fn listen(&mut self, host: usize, kind: QpKind, port: u16) -> Result<u32, Errno>;
    /// Asks the host of a queue pair's peer for a connection; returns the identifier.
    fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno>;
    /// Takes a queue pair to RTS and accepts the request that an identifier stands for.
    fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno>;
    /// Refuses a request.
    fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno>;
    /// Takes a queue pair whose request was accepted to RTS, and tells the other side.
    fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno>;
    /// Lets a datagram queue pair send to the one that was found.
    fn aim(&mut self, qp: usize, target: DatagramTarget) -> Result<(), Errno>;
    /// Stops a queue pair and ends its connection, or agrees to its end.
    fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno>;
    /// Lets go of everything that a host's program has of the connection manager.
    fn close(&mut self, host: usize);
    /// Does something to a cable, a switch or a card.
    fn disturb(&mut self, what: &Disturbance) -> Result<(), String>;
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

/// Work that a flow did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Messages that were posted.
    pub posted: u64,
    /// Messages that succeeded.
    pub done: u64,
    outstanding: u32,
    next_at_ns: u64,
    waits: bool,
    is_over: bool,
}

/// What is done at a time.
#[derive(Clone, Debug)]
enum Cue {
    Fault(usize),
    Undo(Disturbance),
    Receives(usize),
    Step(usize),
    Flow(usize),
    HandOver(usize, Completion),
}

/// Which of the calls or completions a fault hits.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
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
    /// How far each flow has come.
    pub progress: Vec<Progress>,
    /// Completions that each step has still to wait for.
    pub step_left: Vec<u32>,
    counts: BTreeMap<RuleId, Count>,
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

impl<'p> Play<'p> {
    /// Everything is still to be done.
    pub fn new(plan: &'p Plan) -> Play<'p> {
        let mut play = Play {
            plan,
            agenda: BTreeMap::new(),
            serial: 0,
            sides: vec![Side { next_id: 1, next_receive: FIRST_STANDING, ..Side::default() }; plan.qps.len()],
            programs: vec![Program::default(); plan.hosts.len()],
            progress: vec![Progress::default(); plan.flows.len()],
            step_left: plan
                .steps
                .iter()
                .map(|step| if step.deed.is_awaited() { step.repeat } else { 0 })
                .collect(),
            counts: BTreeMap::new(),
            fired: BTreeMap::new(),
            seen: Vec::new(),
            failed: Vec::new(),
            connections: Connections::default(),
            broken: None,
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
            Cue::Fault(_) | Cue::Undo(_) => return None,
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
                    *self.fired.entry(fault.id).or_default() += 1;
                    self.disturb(now_ns, what, hosts);
                }
            }
            Cue::Undo(what) => self.tell(&what, hosts),
            Cue::Receives(qp) => self.post_receives(now_ns, qp, hosts),
            Cue::Step(step) => self.do_step(now_ns, step, hosts),
            Cue::Flow(flow) => {
                self.progress[flow].waits = false;
                self.pump(now_ns, flow, hosts);
            }
            Cue::HandOver(qp, completion) => self.take(now_ns, qp, completion, hosts),
        }
    }

    fn tell(&mut self, what: &Disturbance, hosts: &mut dyn Hosts) {
        if let Err(why) = hosts.disturb(what) {
            self.broken.get_or_insert(why);
        }
    }

    fn disturb(&mut self, now_ns: u64, what: &Disturbance, hosts: &mut dyn Hosts) {
        match *what {
            Disturbance::NoReceives { host, for_ns } => {
                self.programs[host].no_receives_until = now_ns + for_ns
            }
            Disturbance::SlowReceiver { host, delay_ns } => self.programs[host].receive_delay = delay_ns,
            Disturbance::Kill { host } => self.kill(host, hosts),
            Disturbance::Flap { cable, down_ns, up_ns, times } => {
                let ways = [true, true];
                for n in 0..u64::from(times) {
                    let at = now_ns + n * (down_ns + up_ns);
                    self.schedule(at, Cue::Undo(Disturbance::Down { cable, ways, for_ns: None }));
                    self.schedule(at + down_ns, Cue::Undo(Disturbance::Up { cable, ways }));
                }
            }
            Disturbance::Down { cable, ways, for_ns } => {
                self.tell(what, hosts);
                if let Some(for_ns) = for_ns {
                    self.schedule(now_ns + for_ns, Cue::Undo(Disturbance::Up { cable, ways }));
                }
            }
            Disturbance::Stall { host, for_ns } => {
                let until = &mut self.programs[host].stalled_until;
                *until = (*until).max(now_ns + for_ns);
                self.tell(what, hosts);
            }
            Disturbance::PauseStorm { host, for_ns, priority } => {
                self.tell(what, hosts);
                if let Some(for_ns) = for_ns {
                    self.schedule(now_ns + for_ns, Cue::Undo(Disturbance::StormOver { host, priority }));
                }
            }
            _ => self.tell(what, hosts),
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
        for (progress, flow) in self.progress.iter_mut().zip(&self.plan.flows) {
            progress.is_over |= self.plan.qps[flow.qp].host == host;
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
                self.failed.push(Failed { time_ns: now_ns, host: self.plan.qps[qp].host, errno });
                false
            }
        }
    }

    /// The error that a fault makes this call return.
    fn refusal(&mut self, qp: usize, call: CallName) -> Option<Errno> {
        let plan = self.plan;
        for fault in &plan.faults {
            if let FaultKind::Calls { host, call: wanted, repeat, errno } = &fault.kind
                && *host == plan.qps[qp].host
                && *wanted == call
                && self.counts.entry(fault.id).or_default().next(repeat, plan.seed, fault.id)
            {
                *self.fired.entry(fault.id).or_default() += 1;
                return Some(*errno);
            }
        }
        None
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
                        self.step_left[index] = self.step_left[index].saturating_sub(1);
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
                        self.step_left[index] = self.step_left[index].saturating_sub(1);
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
                self.broken.get_or_insert(format!("{name}: {why}"));
            }
        }
    }

    /// Posts as much of a flow as may be outstanding.
    fn pump(&mut self, now_ns: u64, index: usize, hosts: &mut dyn Hosts) {
        let plan = self.plan;
        let flow = &plan.flows[index];
        while !self.progress[index].is_over {
            let progress = self.progress[index];
            if flow.count.is_some_and(|count| progress.posted >= count) {
                return;
            }
            if flow.until_ns.is_some_and(|until| now_ns > until) {
                // What is outstanding may still come back.
                self.progress[index].is_over = true;
                return;
            }
            if progress.outstanding >= flow.depth {
                return;
            }
            if progress.next_at_ns > now_ns {
                if !progress.waits {
                    self.progress[index].waits = true;
                    self.schedule(progress.next_at_ns, Cue::Flow(index));
                }
                return;
            }
            let work = self.work_of(index, progress.posted);
            let posted = self.post(now_ns, flow.qp, &work, Origin::Flow(index), hosts);
            let progress = &mut self.progress[index];
            progress.posted += 1;
            progress.next_at_ns = now_ns + flow.every_ns;
            match posted {
                true => progress.outstanding += 1,
                false => progress.is_over = true,
            }
        }
    }

    /// The n-th work request of a flow.
    fn work_of(&self, index: usize, n: u64) -> Work {
        let flow = &self.plan.flows[index];
        let (job, offset) = match flow.kind {
            FlowKind::Same(job) => (job, 0),
            FlowKind::PingPong => (Job::Send { immediate: None }, 0),
            FlowKind::KeyValue { keys, reads } => {
                let seed = Seed(self.plan.seed);
                let words = |what| [0x6b76, index as u64, n, what];
                let key = seed.below(keys, &words(0));
                let job =
                    if seed.happens(reads, &words(1)) { Job::Read } else { Job::Write { immediate: None } };
                (job, key * u64::from(flow.bytes))
            }
        };
        Work {
            job,
            bytes: if matches!(job, Job::FetchAdd { .. }) { 8 } else { flow.bytes },
            offset,
            remote_offset: offset,
            remote: Placement::Region,
            signaled: true,
            fence: false,
            solicited: false,
            inline: false,
            group: None,
        }
    }

    /// A completion came out of a queue.
    pub fn completed(&mut self, now_ns: u64, qp: usize, mut completion: Completion, hosts: &mut dyn Hosts) {
        let plan = self.plan;
        let mut hold_ns = 0;
        for fault in &plan.faults {
            if let FaultKind::Completions { qp: wanted, repeat, change } = &fault.kind
                && *wanted == qp
                && self.counts.entry(fault.id).or_default().next(repeat, plan.seed, fault.id)
            {
                *self.fired.entry(fault.id).or_default() += 1;
                match change {
                    Change::Status(status) => completion.status = status.status(),
                    Change::Hold(ns) => hold_ns += ns,
                }
            }
        }
        match hold_ns {
            0 => self.take(now_ns, qp, completion, hosts),
            _ => self.schedule(now_ns + hold_ns, Cue::HandOver(qp, completion)),
        }
    }

    fn take(&mut self, now_ns: u64, qp: usize, completion: Completion, hosts: &mut dyn Hosts) {
        let posted = self.sides[qp].posted.remove(&completion.id);
        let (posted_ns, bytes) =
            posted.map_or((now_ns, completion.bytes), |posted| (posted.at_ns, posted.bytes));
        let origin = posted.map(|posted| posted.origin);
        let is_receive = completion.operation.is_receive();
        let is_round = is_receive && self.ping_pong_of(qp).is_some();
        if !is_round || origin != Some(Origin::Standing) {
            self.seen.push(Seen { time_ns: now_ns, qp, completion, origin, posted_ns, bytes });
        }
        let success = completion.status == Status::Success;
        match origin {
            Some(Origin::Step(step)) => {
                self.step_left[step] = self.step_left[step].saturating_sub(1);
                if self.step_left[step] == 0 {
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

    fn advance(&mut self, now_ns: u64, flow: usize, success: bool, hosts: &mut dyn Hosts) {
        let progress = &mut self.progress[flow];
        progress.outstanding = progress.outstanding.saturating_sub(1);
        match success {
            true => progress.done += 1,
            false => progress.is_over = true,
        }
        self.pump(now_ns, flow, hosts);
    }

    /// The ping-pong that a queue pair takes part in.
    fn ping_pong_of(&self, qp: usize) -> Option<usize> {
        let peer = self.plan.qps[qp].peer;
        let takes_part = |flow: &crate::plan::FlowPlan| flow.qp == qp || flow.qp == peer;
        self.plan.flows.iter().position(|flow| flow.kind == FlowKind::PingPong && takes_part(flow))
    }

    /// A message of a ping-pong came: the peer answers, the beginner begins the next round.
    fn bounce(&mut self, now_ns: u64, qp: usize, completion: &Completion, hosts: &mut dyn Hosts) {
        let Some(flow) = self.ping_pong_of(qp) else { return };
        if self.plan.flows[flow].qp == qp {
            let progress = self.progress[flow];
            // The latency of a round counts from its first message.
            let posted_ns = progress.next_at_ns;
            let bytes = self.plan.flows[flow].bytes;
            let origin = Some(Origin::Flow(flow));
            self.seen.push(Seen { time_ns: now_ns, qp, completion: *completion, origin, posted_ns, bytes });
            self.advance(now_ns, flow, true, hosts);
        } else {
            let work = self.work_of(flow, 0);
            self.post(now_ns, qp, &work, Origin::Answer(flow), hosts);
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
