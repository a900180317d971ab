//! A plan in virtual time: a world, the programs of its hosts, and a record of what happened.

mod group;
mod hosts;
mod meeting;
mod queue_pairs;
mod watcher;

use crate::judge::{self, Evidence};
use crate::plan::{FaultKind, Node, Plan};
use crate::play::Play;
use crate::record::Record;
use crate::report::{Artefacts, Outcome};
use group::Groups;
use meeting::Meetings;
use queue_pairs::{Side, create_queue_pairs};
use sha2::{Digest, Sha256};
use softhca_engine::{CqId, Instant};
use softhca_fabric::{self as fabric, CableId, Endpoint, Fault, HostId, RuleId, SwitchId, World};
use softhca_trace::{CaptureWriter, Cast, EventLog, Ladders, Points, Story, Tap};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use watcher::{Hashed, Watcher};

/// How much of a run is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recording {
    /// The digest of the event log.
    Digest,
    /// The event log itself, a capture and the ladders.
    Everything,
}

/// Without an end in the file, a run that goes on for longer than this in virtual time has got stuck.
const PATIENCE_NS: u64 = 600_000_000_000;

/// Carries a plan out in virtual time and judges it.
pub fn simulate(plan: &Plan, recording: Recording) -> Outcome {
    perform(plan, recording).0
}

/// The same, and every packet that a rule hit, with its cable.
pub(crate) fn trace_faults(plan: &Plan) -> (Outcome, Vec<(usize, Fault)>) {
    perform(plan, Recording::Digest)
}

fn perform(plan: &Plan, recording: Recording) -> (Outcome, Vec<(usize, Fault)>) {
    let broken = |why: &str| (Outcome::broken(why), Vec::new());
    if !plan.commands.is_empty() {
        return broken("the file starts programs, which run in real time only: say `--on udp`");
    }
    if plan.qps.is_empty() || plan.pairs.is_empty() {
        return broken("the file connects no queue pairs: it is for `softhca exec --scenario`");
    }
    let mut stage = match Theatre::build(plan, recording) {
        Ok(stage) => stage,
        Err(why) => return broken(&why),
    };
    let mut play = Play::new(plan);
    let limit = plan.ends_ns.unwrap_or(PATIENCE_NS);
    let is_stuck = stage.run(&mut play, limit) && plan.ends_ns.is_none();
    stage.finish(plan, play, is_stuck)
}

/// The world with everything in its place.
struct Theatre {
    world: World,
    sides: Vec<Side>,
    watcher: Rc<RefCell<Watcher>>,
    by_queue: BTreeMap<(HostId, CqId), usize>,
    meetings: Meetings,
    groups: Groups,
}

impl Theatre {
    fn build(plan: &Plan, recording: Recording) -> Result<Theatre, String> {
        let mut world = World::new(plan.seed);
        for host in &plan.hosts {
            world.add_host_at(&host.name, host.address, host.settings);
        }
        for switch in &plan.switches {
            world.add_switch(&switch.name, switch.settings);
        }
        let mut senders = Vec::new();
        for cable in &plan.cables {
            let [first, second] = cable.ends.map(|end| match end {
                Node::Host(host) => fabric::Node::Host(HostId(host as u32)),
                Node::Switch(switch) => fabric::Node::Switch(SwitchId(switch as u32)),
            });
            world.add_cable(first, second, cable.line);
            senders.push([first, second].map(|end| end.host().map(|host| host.0 as usize)));
        }
        for route in &plan.routes {
            let cable = CableId(route.cable as u32);
            world.set_route(SwitchId(route.switch as u32), HostId(route.host as u32), &[cable]);
        }
        for (host, receiver) in plan.hosts.iter().enumerate() {
            if let Some(receiver) = receiver.receiver {
                world.set_receiver(HostId(host as u32), receiver);
            }
        }
        let sides = create_queue_pairs(plan, &mut world)?;
        let groups = Groups::new(plan, &mut world, &sides)?;
        let cables = |list: &[usize]| list.iter().map(|cable| CableId(*cable as u32)).collect::<Vec<_>>();
        // Counting rules come first: they see packets before any fault.
        for count in &plan.counts {
            for cable in cables(&count.cables) {
                world.add_rule(cable, count.rule.clone());
            }
        }
        for fault in &plan.faults {
            if let FaultKind::Packets { cables: list, rule } = &fault.kind {
                for cable in cables(list) {
                    world.add_rule(cable, rule.clone());
                }
            }
        }
        let mut cast = Cast::of(&world);
        for (index, side) in sides.iter().enumerate() {
            let address = plan.hosts[plan.qps[index].host].address;
            cast.name_queue_pair(Endpoint { address, qpn: side.qpn }, &plan.qps[index].name);
        }
        for fault in &plan.faults {
            cast.name_rule(fault.id, &fault.name);
        }
        let mut record = Record::new(plan);
        for host in &plan.hosts {
            record.know_host(host.address);
        }
        for (index, side) in sides.iter().enumerate() {
            let address = plan.hosts[plan.qps[index].host].address;
            let pair = plan.pair_of(index);
            let first_psn = pair.psns[usize::from(pair.qps[1] == index)];
            record.know(index, Endpoint { address, qpn: side.qpn }, first_psn);
        }
        let everything = recording == Recording::Everything;
        let tap = match everything {
            false => None,
            true => {
                let writer = CaptureWriter::new(Vec::new()).map_err(|error| error.to_string())?;
                Some(Tap::new(writer, cast.clone(), Points::Senders).map_err(|error| error.to_string())?)
            }
        };
        let kept = everything.then(Vec::new);
        let watcher = Rc::new(RefCell::new(Watcher {
            log: EventLog::new(Hashed { hash: Sha256::new(), kept }, &plan.title, cast.clone()),
            record,
            senders,
            cast: cast.clone(),
            tap,
            ladders: everything.then(|| Ladders::new(cast)),
            ready: Vec::new(),
            news: Vec::new(),
            hits: Vec::new(),
            events: everything.then(Vec::new),
        }));
        world.observe(watcher.clone());
        for (side, qp) in sides.iter().zip(&plan.qps) {
            if let Some(rate) = plan.hosts[qp.host].initial_rate {
                world.with_card(side.host, |hca, ctx| hca.set_rate(ctx, side.qpn, rate));
            }
        }
        let by_queue = sides.iter().enumerate().map(|(index, side)| ((side.host, side.cq), index)).collect();
        let meetings = Meetings::new(plan);
        Ok(Theatre { world, sides, watcher, by_queue, meetings, groups })
    }

    /// Plays until nothing is left to happen or the limit is reached; tells whether something was left.
    fn run(&mut self, play: &mut Play<'_>, limit_ns: u64) -> bool {
        loop {
            self.hand_over(play);
            if play.account.broken.is_some() {
                return false;
            }
            let world_at = self.world.next_event_at().map(Instant::nanos);
            let play_at = play.next_at();
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
                play.act(next, self);
            }
        }
    }

    /// Brings the programs what is in their completion queues, and what they are told of connections.
    fn hand_over(&mut self, play: &mut Play<'_>) {
        loop {
            let ready = std::mem::take(&mut self.watcher.borrow_mut().ready);
            if !self.hand_over_news(play) && ready.is_empty() {
                return;
            }
            for (host, cq) in ready {
                let Some(qp) = self.by_queue.get(&(host, cq)).copied() else { continue };
                while let Some(completion) = self.world.on(host).poll(cq) {
                    play.completed(self.world.now().nanos(), qp, completion, self);
                }
            }
        }
    }

    fn finish(mut self, plan: &Plan, play: Play<'_>, is_stuck: bool) -> (Outcome, Vec<(usize, Fault)>) {
        let census = self.world.census();
        debug_assert!(census.balances(), "the world checks this itself");
        let tally = |id: RuleId| {
            let rules =
                (0..plan.cables.len()).flat_map(|cable| self.world.cable(CableId(cable as u32)).rules());
            rules
                .filter(|(rule, _)| rule.id == id)
                .fold((0, 0), |sum, (_, tally)| (sum.0 + tally.matched, sum.1 + tally.fired))
        };
        let counted = plan.counts.iter().map(|count| tally(count.rule.id).0).collect();
        let mut fired: BTreeMap<RuleId, u64> = play.account.fired.clone();
        for fault in &plan.faults {
            if matches!(fault.kind, FaultKind::Packets { .. }) {
                fired.insert(fault.id, tally(fault.id).1);
            }
        }
        let counters = plan
            .hosts
            .iter()
            .enumerate()
            .map(|(host, _)| *self.world.host(HostId(host as u32)).card().counters());
        let counters = counters.collect();
        for (id, switch) in self.world.switches() {
            let ports = switch.cables().filter_map(|(cable, _)| switch.counters(cable));
            let deepest = ports.map(|port| port.deepest).max().unwrap_or(0);
            self.watcher.borrow_mut().record.hold(id, deepest);
        }
        let states = self
            .sides
            .iter()
            .map(|side| {
                if side.is_gone {
                    None
                } else {
                    self.world.on(side.host).query(side.qpn).ok().map(|view| view.state)
                }
            })
            .collect();
        let ended_ns = self.world.now().nanos();
        let mut memory = |qp: usize, offset: u64, length: u64| {
            let side = self.sides[qp];
            self.world.on(side.host).read(side.key, side.base + offset, length as usize)
        };
        let record = std::mem::take(&mut self.watcher.borrow_mut().record);
        let evidence = Evidence {
            record: &record,
            account: &play.account,
            counted,
            fired,
            counters,
            states,
            ended_ns,
            is_stuck,
            in_real_time: false,
            of_programs: false,
        };
        let mut outcome = judge::judge(plan, &evidence, &mut memory);
        self.world.observe(());
        let watcher = Rc::into_inner(self.watcher).expect("the world let go of it").into_inner();
        let hashed = watcher.log.into_inner();
        outcome.trace_sha256 =
            Some(hashed.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        if let (Some(events), Some(mut tap), Some(mut ladders)) = (hashed.kept, watcher.tap, watcher.ladders)
        {
            let capture = tap.finish().map(|()| tap.into_inner()).unwrap_or_default();
            outcome.artefacts = Some(Artefacts { events, capture, ladders: ladders.ladders() });
        }
        if let Some(events) = &watcher.events {
            let events = events.iter().map(|(host, event)| (*host, event));
            let story = Story::of(&watcher.cast, events, watcher.hits.iter().map(|(_, fault)| fault));
            outcome.order_sha256 = Some(story.order_sha256());
            outcome.story = Some(story);
        }
        (outcome, watcher.hits)
    }
}
