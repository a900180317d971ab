//! A plan in virtual time: a world, the programs of its hosts, and a record of what happened.

mod cm;
mod hosts;
mod multicast;
mod queue_pairs;
mod recorder;

use crate::evaluate::{self, RunResults};
use crate::executor::Executor;
use crate::plan::{FaultKind, Node, Plan};
use crate::record::RunRecord;
use crate::report::{Artifacts, Outcome};
use cm::CmConnections;
use multicast::MulticastGroups;
use queue_pairs::{SimQueuePair, create_queue_pairs};
use recorder::{HashingWriter, SimulationRecorder};
use sha2::{Digest, Sha256};
use softhca_engine::{CqId, Instant};
use softhca_fabric::{self as fabric, Endpoint, Fault, HostId, LinkId, RuleId, SwitchId, World};
use softhca_trace::{CapturePoints, CaptureWriter, ComparableTrace, EventLog, LadderBuilder, NameTable, Tap};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// How much of a run is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recording {
    /// The digest of the event log.
    Digest,
    /// The event log itself, a capture and the ladders.
    Everything,
}

/// Without an end in the file, a run that goes on for longer than this in virtual time has got stuck.
const MAX_VIRTUAL_TIME_NS: u64 = 600_000_000_000;

/// Carries a plan out in virtual time and judges it.
pub fn simulate(plan: &Plan, recording: Recording) -> Outcome {
    run_plan(plan, recording).0
}

/// The same, and every packet that a rule hit, with its cable.
pub(crate) fn trace_faults(plan: &Plan) -> (Outcome, Vec<(usize, Fault)>) {
    run_plan(plan, Recording::Digest)
}

fn run_plan(plan: &Plan, recording: Recording) -> (Outcome, Vec<(usize, Fault)>) {
    let broken = |why: &str| (Outcome::failed_to_run(why), Vec::new());
    if !plan.commands.is_empty() {
        return broken("the file starts programs, which run in real time only: say `--on udp`");
    }
    if plan.qps.is_empty() || plan.pairs.is_empty() {
        return broken("the file connects no queue pairs: it is for `softhca exec --scenario`");
    }
    let mut stage = match Simulation::build(plan, recording) {
        Ok(stage) => stage,
        Err(why) => return broken(&why),
    };
    let mut play = Executor::new(plan);
    let limit = plan.duration_ns.unwrap_or(MAX_VIRTUAL_TIME_NS);
    let is_stuck = stage.run(&mut play, limit) && plan.duration_ns.is_none();
    stage.finish(plan, play, is_stuck)
}

/// The world with everything in its place.
struct Simulation {
    world: World,
    qps: Vec<SimQueuePair>,
    recorder: Rc<RefCell<SimulationRecorder>>,
    qp_by_cq: BTreeMap<(HostId, CqId), usize>,
    connections: CmConnections,
    multicast: MulticastGroups,
}

impl Simulation {
    fn build(plan: &Plan, recording: Recording) -> Result<Simulation, String> {
        let mut world = World::new(plan.seed);
        for host in &plan.hosts {
            world.add_host_at(&host.name, host.address, host.settings);
        }
        for switch in &plan.switches {
            world.add_switch(&switch.name, switch.settings);
        }
        let mut senders = Vec::new();
        for cable in &plan.links {
            let [first, second] = cable.ends.map(|end| match end {
                Node::Host(host) => fabric::Node::Host(HostId(host as u32)),
                Node::Switch(switch) => fabric::Node::Switch(SwitchId(switch as u32)),
            });
            world.add_link(first, second, cable.line);
            senders.push([first, second].map(|end| end.host().map(|host| host.0 as usize)));
        }
        for route in &plan.routes {
            let cable = LinkId(route.link as u32);
            world.set_route(SwitchId(route.switch as u32), HostId(route.host as u32), &[cable]);
        }
        for (host, receiver) in plan.hosts.iter().enumerate() {
            if let Some(receiver) = receiver.receiver {
                world.set_receiver(HostId(host as u32), receiver);
            }
        }
        let sides = create_queue_pairs(plan, &mut world)?;
        let groups = MulticastGroups::new(plan, &mut world, &sides)?;
        let cables = |list: &[usize]| list.iter().map(|cable| LinkId(*cable as u32)).collect::<Vec<_>>();
        // Counting rules come first: they see packets before any fault.
        for count in &plan.counting_rules {
            for cable in cables(&count.links) {
                world.add_rule(cable, count.rule.clone());
            }
        }
        for fault in &plan.faults {
            if let FaultKind::Packets { links: list, rule } = &fault.kind {
                for cable in cables(list) {
                    world.add_rule(cable, rule.clone());
                }
            }
        }
        let mut cast = NameTable::from_world(&world);
        for (index, side) in sides.iter().enumerate() {
            let address = plan.hosts[plan.qps[index].host].address;
            cast.add_queue_pair(Endpoint { address, qpn: side.qpn }, &plan.qps[index].name);
        }
        for fault in &plan.faults {
            cast.add_rule(fault.id, &fault.name);
        }
        let mut record = RunRecord::new(plan);
        for host in &plan.hosts {
            record.add_host(host.address);
        }
        for (index, side) in sides.iter().enumerate() {
            let address = plan.hosts[plan.qps[index].host].address;
            let pair = plan.pair_of(index);
            let first_psn = pair.sq_psns[usize::from(pair.qps[1] == index)];
            record.add_queue_pair(index, Endpoint { address, qpn: side.qpn }, first_psn);
        }
        let everything = recording == Recording::Everything;
        let tap = match everything {
            false => None,
            true => {
                let writer = CaptureWriter::new(Vec::new()).map_err(|error| error.to_string())?;
                Some(
                    Tap::new(writer, cast.clone(), CapturePoints::Senders)
                        .map_err(|error| error.to_string())?,
                )
            }
        };
        let kept = everything.then(Vec::new);
        let watcher = Rc::new(RefCell::new(SimulationRecorder {
            log: EventLog::new(HashingWriter { hash: Sha256::new(), kept }, &plan.title, cast.clone()),
            record,
            senders,
            cast: cast.clone(),
            tap,
            ladders: everything.then(|| LadderBuilder::new(cast)),
            ready_cqs: Vec::new(),
            ready_cm_channels: Vec::new(),
            packet_faults: Vec::new(),
            events: everything.then(Vec::new),
        }));
        world.set_sink(watcher.clone());
        for (side, qp) in sides.iter().zip(&plan.qps) {
            if let Some(rate) = plan.hosts[qp.host].initial_rate {
                world.with_hca(side.host, |hca, ctx| hca.set_rate(ctx, side.qpn, rate));
            }
        }
        let by_queue = sides.iter().enumerate().map(|(index, side)| ((side.host, side.cq), index)).collect();
        let meetings = CmConnections::new(plan);
        Ok(Simulation {
            world,
            qps: sides,
            recorder: watcher,
            qp_by_cq: by_queue,
            connections: meetings,
            multicast: groups,
        })
    }

    /// Plays until nothing is left to happen or the limit is reached; tells whether something was left.
    fn run(&mut self, play: &mut Executor<'_>, limit_ns: u64) -> bool {
        loop {
            self.deliver_completions(play);
            if play.log.error.is_some() {
                return false;
            }
            let world_at = self.world.next_event_at().map(Instant::nanos);
            let play_at = play.next_due();
            let Some(next) = [world_at, play_at].into_iter().flatten().min() else { return false };
            if next > limit_ns {
                self.world.run_until(Instant::from_nanos(limit_ns));
                return true;
            }
            if world_at == Some(next) {
                self.world.step();
            } else {
                // Nothing happens in the world before: this only moves the clock.
                self.world.run_until(Instant::from_nanos(next));
                play.run_due(next, self);
            }
        }
    }

    /// Brings the programs what is in their completion queues, and what they are told of connections.
    fn deliver_completions(&mut self, play: &mut Executor<'_>) {
        loop {
            let ready = std::mem::take(&mut self.recorder.borrow_mut().ready_cqs);
            if !self.deliver_cm_events(play) && ready.is_empty() {
                return;
            }
            for (host, cq) in ready {
                let Some(qp) = self.qp_by_cq.get(&(host, cq)).copied() else { continue };
                while let Some(completion) = self.world.verbs(host).poll(cq) {
                    play.on_completion(self.world.now().nanos(), qp, completion, self);
                }
            }
        }
    }

    fn finish(mut self, plan: &Plan, play: Executor<'_>, is_stuck: bool) -> (Outcome, Vec<(usize, Fault)>) {
        let census = self.world.frame_counters();
        debug_assert!(census.is_balanced(), "the world checks this itself");
        let tally = |id: RuleId| {
            let rules = (0..plan.links.len()).flat_map(|cable| self.world.link(LinkId(cable as u32)).rules());
            rules
                .filter(|(rule, _)| rule.id == id)
                .fold((0, 0), |sum, (_, tally)| (sum.0 + tally.matched, sum.1 + tally.fired))
        };
        let counted = plan.counting_rules.iter().map(|count| tally(count.rule.id).0).collect();
        let mut fired: BTreeMap<RuleId, u64> = play.log.fired.clone();
        for fault in &plan.faults {
            if matches!(fault.kind, FaultKind::Packets { .. }) {
                fired.insert(fault.id, tally(fault.id).1);
            }
        }
        let counters = plan
            .hosts
            .iter()
            .enumerate()
            .map(|(host, _)| *self.world.host(HostId(host as u32)).hca().counters());
        let counters = counters.collect();
        for (id, switch) in self.world.switches() {
            let ports = switch.links().filter_map(|(cable, _)| switch.counters(cable));
            let deepest = ports.map(|port| port.max_queue_bytes).max().unwrap_or(0);
            self.recorder.borrow_mut().record.set_max_queue_bytes(id, deepest);
        }
        let states = self
            .qps
            .iter()
            .map(|side| {
                if side.is_destroyed {
                    None
                } else {
                    self.world.verbs(side.host).query_queue_pair(side.qpn).ok().map(|view| view.state)
                }
            })
            .collect();
        let ended_ns = self.world.now().nanos();
        let mut memory = |qp: usize, offset: u64, length: u64| {
            let side = self.qps[qp];
            self.world.verbs(side.host).read_memory(side.key, side.base + offset, length as usize)
        };
        let record = std::mem::take(&mut self.recorder.borrow_mut().record);
        let evidence = RunResults {
            record: &record,
            log: &play.log,
            counted_packets: counted,
            fired,
            counters,
            states,
            ended_ns,
            timed_out: is_stuck,
            in_real_time: false,
            external_programs: false,
        };
        let mut outcome = evaluate::evaluate(plan, &evidence, &mut memory);
        self.world.set_sink(());
        let watcher = Rc::into_inner(self.recorder).expect("the world let go of it").into_inner();
        let hashed = watcher.log.into_inner();
        outcome.trace_sha256 =
            Some(hashed.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        if let (Some(events), Some(mut tap), Some(mut ladders)) = (hashed.kept, watcher.tap, watcher.ladders)
        {
            let capture = tap.finish().map(|()| tap.into_inner()).unwrap_or_default();
            outcome.artifacts = Some(Artifacts { events, capture, ladders: ladders.ladders() });
        }
        if let Some(events) = &watcher.events {
            let events = events.iter().map(|(host, event)| (*host, event));
            let story = ComparableTrace::from_events(
                &watcher.cast,
                events,
                watcher.packet_faults.iter().map(|(_, fault)| fault),
            );
            outcome.order_sha256 = Some(story.order_sha256());
            outcome.comparable_trace = Some(story);
        }
        (outcome, watcher.packet_faults)
    }
}
