//! A plan in virtual time: a world, the programs of its hosts, and a record of what happened.

pub(crate) mod group;
pub(crate) mod meeting;

use crate::judge::{self, Evidence};
use crate::language::{Errno, Placement, RaisedName};
use crate::plan::{Area, Disturbance, FaultKind, Job, Node, Plan, SwitchChange, Work};
use crate::play::{Hosts, Play};
use crate::record::Record;
use crate::report::{Artefacts, Outcome};
use group::Groups;
use meeting::Meetings;
use sha2::{Digest, Sha256};
use softhca_engine::{
    AddressVector, AsyncEvent, CmChannelId, CmId, CqId, Event, Instant, Modify, PdId, QpKind, State,
};
use softhca_fabric::{
    self as fabric, CableId, Connection, Direction, Endpoint, FabricEvent, Fault, Flow, Frame, HostId,
    LinkState, Observer, QpOptions, RuleId, Stage, SwitchId, World,
};
use softhca_queue::cm::{self, DatagramTarget, RejectReason};
use softhca_queue::{
    Access, Datagram, Operation, Payload, Receive, RemoteAddress, SendFlags, SendRequest, SendTrailer, Sge,
};
use softhca_trace::{CaptureWriter, Cast, EventLog, Ladders, Points, Story, Tap};
use softhca_wire::{Gid, LocalKey, Pfc, Qpn, QueueKey, RemoteKey};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::rc::Rc;

/// How much of a run is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recording {
    /// The digest of the event log.
    Digest,
    /// The event log itself, a capture and the ladders.
    Everything,
}

/// The Q_Key of datagram pairs.
pub(crate) const QUEUE_KEY: QueueKey = QueueKey(0x1111_1111);

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

/// Hashes what is written, and keeps it if asked to.
struct Hashed {
    hash: Sha256,
    kept: Option<Vec<u8>>,
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hash.update(bytes);
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sees everything in the world.
struct Watcher {
    cast: Cast,
    log: EventLog<Hashed>,
    record: Record,
    /// The hosts at the two ends of each cable; none where a switch is.
    senders: Vec<[Option<usize>; 2]>,
    tap: Option<Tap<Vec<u8>>>,
    ladders: Option<Ladders>,
    /// Completion queues with something new in them.
    ready: Vec<(HostId, CqId)>,
    /// Channels of the connection manager with something new in them.
    news: Vec<(HostId, CmChannelId)>,
    /// Packets that rules hit.
    hits: Vec<(usize, Fault)>,
    /// Everything that cards told, if it is kept.
    events: Option<Vec<(HostId, Event)>>,
}

impl Observer for Watcher {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        self.log.card(now, host, event);
        self.record.card(now.nanos(), host.0 as usize, event);
        if let Event::Completed { cq, .. } = event {
            self.ready.push((host, *cq));
        }
        if let Event::CmRaised { channel, .. } = event {
            self.news.push((host, *channel));
        }
        if let Some(ladders) = &mut self.ladders {
            ladders.card(now, host, event);
        }
        if let Some(events) = &mut self.events {
            events.push((host, *event));
        }
    }

    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        if let Some(tap) = &mut self.tap {
            tap.frame(now, cable, direction, stage, frame);
        }
        if let Some(ladders) = &mut self.ladders {
            Observer::frame(ladders, now, cable, direction, stage, frame);
        }
    }

    fn pause(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, pause: &Pfc) {
        if let Some(tap) = &mut self.tap {
            tap.pause(now, cable, direction, stage, pause);
        }
    }

    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        self.log.fabric(now, event);
        self.record.fabric(event);
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        self.log.fault(now, cable, fault);
        let sender = self.senders[cable.0 as usize][fault.direction as usize];
        self.record.fault(now.nanos(), sender, fault);
        self.hits.push((cable.0 as usize, *fault));
        if let Some(tap) = &mut self.tap {
            tap.fault(now, cable, fault);
        }
        if let Some(ladders) = &mut self.ladders {
            Observer::fault(ladders, now, cable, fault);
        }
    }
}

/// A queue pair of the plan in the world.
#[derive(Clone, Copy, Debug)]
struct Side {
    host: HostId,
    qpn: Qpn,
    cq: CqId,
    key: RemoteKey,
    base: u64,
    area: u64,
    /// Where datagrams go.
    datagram: Datagram,
    domain: PdId,
    peer: usize,
    is_gone: bool,
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
            if play.broken.is_some() {
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
        let mut fired: BTreeMap<RuleId, u64> = play.fired.clone();
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
            play: &play,
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

fn create_queue_pairs(plan: &Plan, world: &mut World) -> Result<Vec<Side>, String> {
    let mut sides = Vec::new();
    let failed = |what: &str, name: &str, why: String| format!("{name}: cannot {what}: {why}");
    for qp in &plan.qps {
        let pair = &plan.pairs[qp.pair];
        let host = HostId(qp.host as u32);
        let mut verbs = world.on(host);
        let error = |what: &str| {
            let (what, name) = (what.to_owned(), qp.name.clone());
            move |why: softhca_engine::Error| failed(&what, &name, why.to_string())
        };
        let domain = verbs.allocate_domain().map_err(error("allocate a domain"))?;
        let (key, base) = verbs
            .register(domain, region_length(pair.area), pair.access | Access::LOCAL_WRITE)
            .map_err(error("register memory"))?;
        let cq =
            verbs.create_completion_queue(pair.completions).map_err(error("create a completion queue"))?;
        let receives = pair.receives.max(128);
        let options = QpOptions { sends: pair.sends, receives, ..QpOptions::default() };
        let qpn =
            verbs.create_queue_pair(pair.kind, domain, cq, options).map_err(error("create a queue pair"))?;
        let (area, peer, datagram) = (pair.area, qp.peer, Datagram::default());
        sides.push(Side { host, qpn, cq, key, base, area, datagram, domain, peer, is_gone: false });
    }
    for pair in &plan.pairs {
        let [a, b] = pair.qps;
        let ends = [sides[a], sides[b]];
        if pair.by_cm {
            for side in ends {
                meeting::prepare(world, side.host, side.qpn, pair)
                    .map_err(|why| failed("prepare", &plan.qps[a].name, why.to_string()))?;
            }
            continue;
        }
        let roles = pair.qps.map(|qp| Some(Plan::role(qp)));
        let name = |why: softhca_engine::Error| failed("connect", &plan.qps[a].name, why.to_string());
        if pair.kind.is_datagram() {
            for side in 0..2 {
                let (here, there) = (ends[side], ends[1 - side]);
                let peer = Gid::from(world.host(there.host).address());
                let vector = AddressVector { traffic_class: pair.traffic_class, ..AddressVector::to(peer) };
                let mut verbs = world.on(here.host);
                verbs.start_datagrams(here.qpn, QUEUE_KEY, pair.psns[side]).map_err(name)?;
                let handle = verbs.create_address_handle(here.domain, vector).map_err(name)?;
                sides[pair.qps[side]].datagram =
                    Datagram { address_handle: handle.0, queue_pair: there.qpn, queue_key: QUEUE_KEY };
                let address = world.host(here.host).address();
                let requester = Endpoint { address, qpn: here.qpn };
                let (role, first_psn) = (Plan::role(pair.qps[side]), pair.psns[side]);
                world.flows_mut().insert(Flow { role, requester, responder: None, first_psn });
            }
            continue;
        }
        let connection = Connection {
            mtu: pair.mtu,
            psns: pair.psns,
            access: pair.access,
            reads: pair.reads,
            timeout: pair.timeout,
            retry_count: pair.retry_count,
            rnr_retry: pair.rnr_retry,
            min_rnr_timer: pair.min_rnr_timer,
            traffic_class: pair.traffic_class,
            roles,
            service_level: 0,
        };
        world.connect((ends[0].host, ends[0].qpn), (ends[1].host, ends[1].qpn), &connection).map_err(name)?;
    }
    for (index, side) in sides.iter().enumerate() {
        if side.area <= LARGEST_FILLED {
            let bytes = pattern(index, side.area as usize);
            world.on(side.host).write(side.key, side.base, &bytes);
        }
    }
    Ok(sides)
}

/// What is larger than this is left as zeroes: nobody looks at every byte of it.
const LARGEST_FILLED: u64 = 1 << 20;

/// The length of the region behind four areas. Large ones are made so large that the store keeps only what is
/// not zero.
const fn region_length(area: u64) -> u64 {
    let length = 4 * area;
    if area > LARGEST_FILLED && length < 64 << 20 { 64 << 20 } else { length }
}

/// What a queue pair sends: bytes that differ at every place and for every queue pair.
pub(crate) fn pattern(qp: usize, length: usize) -> Vec<u8> {
    let salt = (qp as u64 + 1) << 32;
    (0..length as u64).map(|at| ((at + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// A work request in terms of keys and addresses.
pub(crate) fn request_of(
    id: u64,
    work: &Work,
    (base, key, area): (u64, RemoteKey, u64),
    (peer_base, peer_key, peer_area): (u64, RemoteKey, u64),
) -> (SendRequest<'static>, Sge) {
    let local = match work.job {
        Job::Send { .. } | Job::Write { .. } => Area::Source,
        Job::Read | Job::CompareSwap { .. } | Job::FetchAdd { .. } => Area::Fetched,
    };
    let sge =
        Sge { address: base + local.start(area) + work.offset, length: work.bytes, key: LocalKey(key.0) };
    let target = peer_base + Area::Target.start(peer_area) + work.remote_offset;
    let remote = match work.remote {
        Placement::Region => RemoteAddress { address: target, key: peer_key },
        Placement::WrongKey => RemoteAddress { address: target, key: RemoteKey(peer_key.0 ^ 0xff00) },
        Placement::OutOfBounds => {
            RemoteAddress { address: peer_base + region_length(peer_area), key: peer_key }
        }
        Placement::Misaligned => RemoteAddress { address: target + 1, key: peer_key },
    };
    let operation = match work.job {
        Job::Send { immediate: None } => Operation::Send(SendTrailer::None),
        Job::Send { immediate: Some(immediate) } => Operation::Send(SendTrailer::Immediate(immediate)),
        Job::Write { immediate } => Operation::Write { remote, immediate },
        Job::Read => Operation::Read { remote },
        Job::CompareSwap { compare, swap } => Operation::CompareSwap { remote, compare, swap },
        Job::FetchAdd { add } => Operation::FetchAdd { remote, add },
    };
    let mut request = SendRequest::new(id, operation, &[]);
    request.flags = SendFlags::empty();
    for (wanted, flag) in [
        (work.signaled, SendFlags::SIGNALED),
        (work.fence, SendFlags::FENCE),
        (work.solicited, SendFlags::SOLICITED),
        (work.inline, SendFlags::INLINE),
    ] {
        if wanted {
            request.flags |= flag;
        }
    }
    (request, sge)
}

impl Theatre {
    /// Changes for which priorities a card pauses its neighbours without reason.
    fn storm(&mut self, host: usize, change: impl Fn(u8) -> u8) {
        let host = HostId(host as u32);
        let mut receiver = *self.world.receiver(host);
        receiver.storm = change(receiver.storm);
        self.world.set_receiver(host, receiver);
    }

    fn place(&self, qp: usize) -> (u64, RemoteKey, u64) {
        let side = &self.sides[qp];
        (side.base, side.key, side.area)
    }
}

fn refused(error: softhca_engine::Error) -> Errno {
    Errno::of(error.errno())
}

impl Hosts for Theatre {
    fn post(&mut self, qp: usize, id: u64, work: &Work) -> Result<(), Errno> {
        let side = self.sides[qp];
        if side.is_gone {
            return Err(Errno::EINVAL);
        }
        let (mut request, sge) = request_of(id, work, self.place(qp), self.place(side.peer));
        request.datagram = work.group.map_or(side.datagram, |group| self.groups.datagram(qp, group));
        let inline;
        let gather = [sge];
        request.payload = if work.inline {
            inline = self.world.on(side.host).read(side.key, sge.address, sge.length as usize);
            Payload::Inline(&inline)
        } else if work.bytes == 0 {
            Payload::Gather(&[])
        } else {
            Payload::Gather(&gather)
        };
        self.world.on(side.host).post_send(side.qpn, &request).map_err(|_| Errno::ENOMEM)
    }

    fn post_receive(&mut self, qp: usize, id: u64, offset: u64, bytes: u32) -> Result<(), Errno> {
        let side = self.sides[qp];
        if side.is_gone {
            return Err(Errno::EINVAL);
        }
        let entry = Sge { address: side.base + offset, length: bytes, key: LocalKey(side.key.0) };
        let receive = Receive { id, scatter: &[entry] };
        self.world.on(side.host).post_receive(side.qpn, &receive).map_err(|_| Errno::ENOMEM)
    }

    fn modify(&mut self, qp: usize, state: State, notify_drained: bool) -> Result<(), String> {
        let side = self.sides[qp];
        let mut modify = Modify::default().state(state);
        if notify_drained {
            modify = modify.notify_drained(true);
        }
        self.world.on(side.host).modify(side.qpn, modify).map(|_| ()).map_err(|why| why.to_string())
    }

    fn destroy(&mut self, qp: usize) {
        let side = &mut self.sides[qp];
        if !std::mem::replace(&mut side.is_gone, true) {
            let (host, qpn) = (side.host, side.qpn);
            let _ = self.world.on(host).destroy_queue_pair(qpn);
        }
    }

    fn unmap(&mut self, qp: usize) -> Result<(), String> {
        let side = self.sides[qp];
        self.world.on(side.host).unmap(side.key).map_err(|why| why.to_string())
    }

    fn deregister(&mut self, qp: usize) -> Result<(), String> {
        let side = self.sides[qp];
        self.world.on(side.host).deregister(side.key).map_err(|why| why.to_string())
    }

    fn reregister(&mut self, qp: usize, access: Access) -> Result<(), String> {
        let side = self.sides[qp];
        let changed = self.world.on(side.host).reregister(side.key, |region| region.access = access);
        changed.map(|_| ()).map_err(|why| why.to_string())
    }

    fn join(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        group::join(self, qp, group).map_err(|why| why.to_string())
    }

    fn leave(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        group::leave(self, qp, group).map_err(|why| why.to_string())
    }

    fn listen(&mut self, host: usize, kind: QpKind, port: u16) -> Result<u32, Errno> {
        meeting::listen(self, host, kind, port).map_err(refused)
    }

    fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno> {
        meeting::connect(self, qp, port, private_data).map_err(refused)
    }

    fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno> {
        meeting::accept(self, qp, CmId(id), private_data).map_err(refused)
    }

    fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno> {
        let (id, reason, private_data) = (CmId(id), RejectReason(reason), private_data.to_vec());
        let call = cm::Call::Reject { id, reason, private_data };
        self.world.on(self.sides[qp].host).cm(call).map(|_| ()).map_err(refused)
    }

    fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        meeting::establish(self, qp, CmId(id)).map_err(refused)
    }

    fn aim(&mut self, qp: usize, target: DatagramTarget) -> Result<(), Errno> {
        meeting::aim(self, qp, target).map_err(refused)
    }

    fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        let mut verbs = self.world.on(self.sides[qp].host);
        // One that is in the error state already is as good.
        let _ = verbs.modify(self.sides[qp].qpn, Modify::default().state(State::Error));
        verbs.cm(cm::Call::Disconnect(CmId(id))).map(|_| ()).map_err(refused)
    }

    fn close(&mut self, host: usize) {
        for id in self.meetings.forget(host) {
            // A request that nobody answered went with its listener.
            let _ = self.world.on(HostId(host as u32)).cm(cm::Call::Destroy(id));
        }
    }

    fn disturb(&mut self, what: &Disturbance) -> Result<(), String> {
        let directions = |ways: [bool; 2]| {
            [Direction::Forward, Direction::Backward].into_iter().zip(ways).filter(|(_, wanted)| *wanted)
        };
        match *what {
            Disturbance::Down { cable, ways, .. } => {
                for (direction, _) in directions(ways) {
                    self.world.set_link(CableId(cable as u32), direction, LinkState::Down);
                }
            }
            Disturbance::Up { cable, ways } => {
                for (direction, _) in directions(ways) {
                    self.world.set_link(CableId(cable as u32), direction, LinkState::Up);
                }
            }
            Disturbance::Rate { cable, rate } => {
                let cable = self.world.cable_mut(CableId(cable as u32));
                let mut line = *cable.line();
                line.bits_per_second = NonZeroU64::new(rate);
                cable.set_line(line);
            }
            Disturbance::Mtu { cable, mtu } => {
                let cable = self.world.cable_mut(CableId(cable as u32));
                let mut line = *cable.line();
                line.mtu = mtu;
                cable.set_line(line);
            }
            Disturbance::Stall { host, for_ns } => {
                let until = self.world.now().nanos() + for_ns;
                self.world.stall(HostId(host as u32), Instant::from_nanos(until));
            }
            Disturbance::Raise { host, event } => {
                let event = match event {
                    RaisedName::PortErr => AsyncEvent::PortDown,
                    RaisedName::PortActive => AsyncEvent::PortActive,
                    RaisedName::GidChange => AsyncEvent::GidChange,
                    RaisedName::DeviceFatal => AsyncEvent::DeviceFatal,
                };
                self.world.with_card(HostId(host as u32), |hca, ctx| hca.raise(ctx, event));
            }
            Disturbance::Switch { switch, change } => {
                let id = SwitchId(switch as u32);
                let mut settings = *self.world.switch(id).settings();
                match change {
                    SwitchChange::Buffer(bytes) => settings.buffer = bytes,
                    SwitchChange::Marking(marking) => settings.marking = Some(marking),
                    SwitchChange::FlowControl(flow) => settings.flow_control = Some(flow),
                }
                self.world.set_switch(id, settings);
            }
            Disturbance::PauseStorm { host, priority, .. } => {
                self.storm(host, |storm| storm | 1 << priority);
            }
            Disturbance::StormOver { host, priority } => {
                self.storm(host, |storm| storm & !(1 << priority));
            }
            Disturbance::Flap { .. }
            | Disturbance::NoReceives { .. }
            | Disturbance::SlowReceiver { .. }
            | Disturbance::Kill { .. } => unreachable!("the program does these itself"),
        }
        Ok(())
    }
}
