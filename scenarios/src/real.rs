//! The same plans in real time: embedded cards on loopback addresses, with the rules on their cables.

mod group;
mod meeting;

use crate::Recording;
use crate::judge::{self, Evidence};
use crate::language::Errno;
use crate::plan::{FaultKind, Incident, Node, Plan, Work};
use crate::play::{Hosts, Play};
use crate::record::Record;
use crate::report::{Artefacts, Outcome, Verdict};
use crate::verbs::{QUEUE_KEY, pattern, request_of};
use group::Groups;
use meeting::Meetings;
use softhca::{
    AddressHandle, AddressVector, CompletionQueue, Context, Device, EmbeddedOptions, Event, MemoryRegion,
    Modify, Passage, Path, ProtectionDomain, QueuePair, ReceiveRequest, SendRequest, State, Witness,
};
use softhca_engine::Instant;
use softhca_fabric::{CableId, Endpoint, Fault, Flow, HostId, RuleId, Seed};
use softhca_queue::Access;
use softhca_trace::{CaptureWriter, Cast, EventLog, Ladders, PortTap, Story};
use softhca_wire::{Envelope, Gid, Psn, Qpn, QueueKey};
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant as Clock};

/// A run is over when nothing has happened for this long and no work is outstanding.
const QUIET: Duration = Duration::from_millis(150);
/// A run in which nothing happens for this long has got stuck.
const PATIENCE: Duration = Duration::from_secs(120);

/// The least time for an acknowledgement, as an exponent: half a second. A machine that was busy elsewhere would make
/// packets go twice that a quiet one sends once.
const LEAST_TIMEOUT: u8 = 17;
/// Bytes of packets that are kept for a capture; what is sent beyond is left out of it.
const CAPTURED: usize = 64 << 20;

/// Carries a plan out on real sockets and judges it. Expectations about time are left out.
pub fn perform(plan: &Plan, recording: Recording) -> Outcome {
    if !plan.commands.is_empty() {
        return Outcome::broken("the file starts programs, which only the command `softhca run` can");
    }
    if plan.qps.is_empty() || plan.pairs.is_empty() {
        return Outcome::broken("the file connects no queue pairs: it is for `softhca exec --scenario`");
    }
    if let Some(why) = plan.needs_virtual_time() {
        return Outcome::broken(format!("not possible on real sockets: {why}"));
    }
    match Stage::build(plan) {
        Ok(mut stage) => {
            let mut play = Play::new(plan);
            let is_stuck = stage.run(&mut play);
            let mut outcome = stage.finish(&play, is_stuck);
            // A real run cannot be done again: one that fails is written down whether or not somebody asked.
            if recording == Recording::Everything || outcome.verdict != Verdict::Pass {
                outcome.artefacts = stage.write_down().ok();
            }
            outcome
        }
        Err(why) => Outcome::broken(why),
    }
}

/// Something that a card or its cable told.
enum Told {
    Card(HostId, Event),
    Fault(HostId, Fault),
    Packet(HostId, Envelope, Box<[u8]>),
}

/// What all cards told, in the order in which they told it.
struct Notes {
    start: Clock,
    last: Clock,
    told: Vec<(u64, Told)>,
    /// Bytes of the packets among it.
    captured: usize,
    begun: bool,
}

fn lock(notes: &Mutex<Notes>) -> MutexGuard<'_, Notes> {
    notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// One card's pen.
struct Scribe(HostId, Arc<Mutex<Notes>>);

impl Scribe {
    fn put(&self, told: Told) {
        let mut notes = lock(&self.1);
        if let Told::Packet(.., packet) = &told {
            notes.captured += packet.len();
        }
        // The way to RTS is not part of the run.
        if notes.begun && (notes.captured <= CAPTURED || !matches!(told, Told::Packet(..))) {
            notes.last = Clock::now();
            let at = notes.start.elapsed().as_nanos() as u64;
            notes.told.push((at, told));
        }
    }
}

impl Witness for Scribe {
    fn card(&mut self, _: Instant, event: &Event) {
        self.put(Told::Card(self.0, *event));
    }

    fn frame(&mut self, _: Instant, passage: Passage, envelope: &Envelope, packet: &[u8]) {
        if passage == Passage::Sent {
            self.put(Told::Packet(self.0, *envelope, packet.into()));
        }
    }

    fn fault(&mut self, _: Instant, fault: &Fault) {
        self.put(Told::Fault(self.0, *fault));
    }
}

/// A queue pair of the plan on its card. What is gone is destroyed.
struct Side {
    domain: ProtectionDomain,
    pair: Option<QueuePair>,
    region: Option<MemoryRegion>,
    queue: CompletionQueue,
    /// Where datagrams go.
    target: Option<(AddressHandle, Qpn, QueueKey)>,
    number: Qpn,
    /// What its region is called, also when it is gone.
    place: (u64, softhca::RemoteKey, u64),
    psn: Psn,
}

struct Stage<'p> {
    plan: &'p Plan,
    devices: Vec<Device>,
    contexts: Vec<Context>,
    sides: Vec<Side>,
    notes: Arc<Mutex<Notes>>,
    cast: Cast,
    meetings: Meetings,
    groups: Groups,
}

impl<'p> Stage<'p> {
    fn build(plan: &'p Plan) -> Result<Stage<'p>, String> {
        let notes =
            Notes { start: Clock::now(), last: Clock::now(), told: Vec::new(), captured: 0, begun: false };
        let notes = Arc::new(Mutex::new(notes));
        let (mut devices, mut contexts, mut cast) = (Vec::new(), Vec::new(), Cast::new());
        for (index, host) in plan.hosts.iter().enumerate() {
            let id = HostId(index as u32);
            let mut options = EmbeddedOptions::default();
            let least_ack_timeout = options.settings.least_ack_timeout;
            options.settings = softhca::Settings { least_ack_timeout, ..host.settings };
            options.settings.seed = Seed(plan.seed).draw(&[0x686f_7374, index as u64]) | 1;
            options.witness = Box::new(Scribe(id, notes.clone()));
            let device = Device::embedded_with(options).map_err(|why| format!("{}: {why}", host.name))?;
            cast.name_host(id, &host.name, device.address());
            contexts.push(device.open());
            devices.push(device);
        }
        let (meetings, groups) = (Meetings::default(), Groups::default());
        let mut stage = Stage { plan, devices, contexts, sides: Vec::new(), notes, cast, meetings, groups };
        stage.create().map_err(|why| why.to_string())?;
        stage.connect().map_err(|why| why.to_string())?;
        stage.groups = Groups::new(plan, &stage.devices, &stage.sides).map_err(|why| why.to_string())?;
        stage.lay_rules();
        Ok(stage)
    }

    fn create(&mut self) -> Result<(), softhca::Error> {
        for (index, qp) in self.plan.qps.iter().enumerate() {
            let pair = self.plan.pair_of(index);
            let context = &self.contexts[qp.host];
            let domain: ProtectionDomain = context.allocate_domain()?;
            let region = domain.register(4 * pair.area as usize, pair.access | Access::LOCAL_WRITE)?;
            region.write_at(0, &pattern(index, pair.area.min(1 << 20) as usize));
            let queue = context.create_completion_queue(pair.completions)?;
            let builder =
                domain.queue_pair(pair.kind, &queue).sends(pair.sends).receives(pair.receives.max(128));
            let created = builder.create()?;
            self.sides.push(Side {
                number: created.number(),
                psn: created.endpoint().psn,
                place: (region.address(), region.remote_key(), pair.area),
                pair: Some(created),
                region: Some(region),
                queue,
                target: None,
                domain,
            });
        }
        Ok(())
    }

    fn endpoint(&self, qp: usize) -> Endpoint {
        Endpoint { address: self.devices[self.plan.qps[qp].host].address(), qpn: self.sides[qp].number }
    }

    fn connect(&mut self) -> Result<(), softhca::Error> {
        for pair in &self.plan.pairs {
            let [a, b] = pair.qps;
            let (Some(first), Some(second)) = (&self.sides[a].pair, &self.sides[b].pair) else { continue };
            for qp in [a, b] {
                self.cast.name_queue_pair(self.endpoint(qp), &self.plan.qps[qp].name);
            }
            if pair.by_cm {
                meeting::prepare(first, pair)?;
                meeting::prepare(second, pair)?;
                continue;
            }
            let is_connected = !pair.kind.is_datagram();
            if is_connected {
                // Zero is for ever, and a timer that races against a delay is meant to.
                let is_patient = pair.timeout > 0 && !self.plan.delays();
                let path = Path {
                    mtu: pair.mtu,
                    access: pair.access,
                    reads: pair.reads,
                    timeout: if is_patient { pair.timeout.max(LEAST_TIMEOUT) } else { pair.timeout },
                    retry_count: pair.retry_count,
                    rnr_retry: pair.rnr_retry,
                    min_rnr_timer: pair.min_rnr_timer,
                    traffic_class: pair.traffic_class,
                };
                first.connect_both(second, &path)?;
            } else {
                first.start_datagrams(QUEUE_KEY)?;
                second.start_datagrams(QUEUE_KEY)?;
            }
            for [here, there] in [[a, b], [b, a]] {
                let responder = self.endpoint(there);
                if !is_connected {
                    let traffic_class = pair.traffic_class;
                    let vector =
                        AddressVector { traffic_class, ..AddressVector::to(Gid::from(responder.address)) };
                    let handle = self.sides[here].domain.create_address_handle(vector)?;
                    self.sides[here].target = Some((handle, responder.qpn, QUEUE_KEY));
                }
                self.introduce(here, self.sides[here].psn, is_connected.then_some(responder));
            }
        }
        for fault in &self.plan.faults {
            self.cast.name_rule(fault.id, &fault.name);
        }
        for (index, cable) in self.plan.cables.iter().enumerate() {
            if let [Node::Host(first), Node::Host(second)] = cable.ends {
                let ends = [first, second].map(|host| HostId(host as u32));
                self.cast.name_cable(CableId(index as u32), ends);
            }
        }
        Ok(())
    }

    /// Lets rules and traces know a queue pair that is ready to send.
    fn introduce(&mut self, qp: usize, first_psn: Psn, responder: Option<Endpoint>) {
        let (role, requester) = (Plan::role(qp), self.endpoint(qp));
        self.cast.start_at(requester, first_psn);
        self.cast.give_role(role, requester);
        if let Some(responder) = responder {
            self.cast.connect(requester, responder);
        }
        let flow = Flow { role, requester, responder, first_psn };
        for at in [qp, self.plan.qps[qp].peer] {
            self.devices[self.plan.qps[at].host].add_flow(self.plan.seed, flow);
        }
    }

    fn lay_rules(&self) {
        for (host, device) in self.devices.iter().enumerate() {
            for (_, rule) in self.plan.rules_of(host) {
                device.add_rule(self.plan.seed, rule);
            }
        }
    }

    /// Plays until nothing is left to happen; tells whether it got stuck.
    fn run(&mut self, play: &mut Play<'_>) -> bool {
        let start = Clock::now();
        {
            let mut notes = lock(&self.notes);
            (notes.start, notes.last, notes.begun) = (start, start, true);
        }
        let cut = self.plan.ends_ns.map(|ends| Duration::from_nanos(ends) + QUIET);
        loop {
            let now = start.elapsed();
            let now_ns = now.as_nanos() as u64;
            // Asked before the queues are emptied: what ends after this is seen in the next round.
            let idle = play.next_at().is_none() && !self.is_outstanding();
            let quiet = lock(&self.notes).last.elapsed();
            play.act(now_ns, self);
            let mut came = self.hand_over_news(start, play);
            for qp in 0..self.sides.len() {
                while let Some(completion) = self.sides[qp].queue.poll() {
                    came = true;
                    play.completed(start.elapsed().as_nanos() as u64, qp, completion, self);
                }
            }
            if play.account.broken.is_some() || cut.is_some_and(|cut| now > cut) {
                return false;
            }
            if idle && !came && quiet > QUIET {
                return false;
            }
            if quiet > PATIENCE {
                return true;
            }
            if !came {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Whether a queue pair still waits for an answer.
    fn is_outstanding(&self) -> bool {
        let waits = |side: &Side| {
            let view = side.pair.as_ref().and_then(|pair| pair.query().ok());
            view.is_some_and(|view| view.outstanding > 0)
        };
        self.sides.iter().any(waits) || self.meetings.is_outstanding()
    }

    fn finish(&self, play: &Play<'_>, is_stuck: bool) -> Outcome {
        let plan = self.plan;
        let tallies: Vec<(RuleId, u64, u64)> = self
            .devices
            .iter()
            .flat_map(Device::rules)
            .map(|(rule, tally)| (rule.id, tally.matched, tally.fired))
            .collect();
        let sum = |id: RuleId| {
            tallies
                .iter()
                .filter(|(rule, ..)| *rule == id)
                .fold((0, 0), |sum, (_, matched, fired)| (sum.0 + matched, sum.1 + fired))
        };
        let counted = plan.counts.iter().map(|count| sum(count.rule.id).0).collect();
        let mut fired: BTreeMap<RuleId, u64> = play.account.fired.clone();
        for fault in &plan.faults {
            if matches!(fault.kind, FaultKind::Packets { .. }) {
                fired.insert(fault.id, sum(fault.id).1);
            }
        }
        let states =
            self.sides.iter().map(|side| side.pair.as_ref().and_then(|pair| pair.state().ok())).collect();
        let counters = self.contexts.iter().map(Context::counters).collect();
        let mut record = Record::new(plan);
        for device in &self.devices {
            record.know_host(device.address());
        }
        for qp in 0..self.sides.len() {
            record.know(qp, self.endpoint(qp), self.sides[qp].psn);
        }
        let notes = lock(&self.notes);
        for (time_ns, told) in &notes.told {
            match told {
                Told::Card(host, event) => record.card(*time_ns, host.0 as usize, event),
                Told::Fault(host, fault) => record.fault(*time_ns, Some(host.0 as usize), fault),
                Told::Packet(..) => {}
            }
        }
        let events = notes.told.iter().filter_map(|(_, told)| match told {
            Told::Card(host, event) => Some((*host, event)),
            Told::Fault(..) | Told::Packet(..) => None,
        });
        let faults = notes.told.iter().filter_map(|(_, told)| match told {
            Told::Fault(_, fault) => Some(fault),
            Told::Card(..) | Told::Packet(..) => None,
        });
        let story = Story::of(&self.cast, events, faults);
        let ended_ns = notes.last.duration_since(notes.start).as_nanos() as u64;
        let mut memory = |qp: usize, offset: u64, length: u64| match &self.sides[qp].region {
            Some(region) => region.read_at(offset, length as usize),
            None => Vec::new(),
        };
        let evidence = Evidence {
            record: &record,
            account: &play.account,
            counted,
            fired,
            counters,
            states,
            ended_ns,
            is_stuck,
            in_real_time: true,
            of_programs: false,
        };
        let mut outcome = judge::judge(plan, &evidence, &mut memory);
        outcome.order_sha256 = Some(story.order_sha256());
        outcome.story = Some(story);
        outcome
    }
}

impl Stage<'_> {
    /// The event log, the capture and the ladders of what was told. Packets are captured where they leave a card.
    fn write_down(&self) -> io::Result<Artefacts> {
        let mut log = EventLog::new(Vec::new(), &self.plan.title, self.cast.clone());
        let mut ladders = Ladders::new(self.cast.clone());
        let mut capture = CaptureWriter::new(Vec::new())?;
        let mut taps = Vec::new();
        for (name, address) in self.cast.hosts() {
            taps.push(PortTap::new(capture.add_interface(name, &address.to_string())?));
        }
        for (time_ns, told) in &lock(&self.notes).told {
            let now = Instant::from_nanos(*time_ns);
            match told {
                Told::Card(host, event) => {
                    log.card(now, *host, event);
                    ladders.card(now, *host, event);
                    taps[host.0 as usize].release(&mut capture)?;
                }
                Told::Packet(host, envelope, packet) => {
                    ladders.frame(now, envelope, packet);
                    taps[host.0 as usize].sent(&mut capture, *time_ns, envelope, packet)?;
                }
                Told::Fault(host, fault) => {
                    if let Some(cable) = self.cable_of(*host) {
                        log.fault(now, cable, fault);
                    }
                    ladders.fault(self.cast.address(*host), fault);
                    taps[host.0 as usize].fault(fault, &self.cast);
                }
            }
        }
        for tap in &mut taps {
            tap.release(&mut capture)?;
        }
        log.finish()?;
        Ok(Artefacts { events: log.into_inner(), capture: capture.into_inner(), ladders: ladders.ladders() })
    }

    /// The one cable of a host.
    fn cable_of(&self, host: HostId) -> Option<CableId> {
        let end = Node::Host(host.0 as usize);
        let index = self.plan.cables.iter().position(|cable| cable.ends.contains(&end))?;
        Some(CableId(index as u32))
    }
}

impl Hosts for Stage<'_> {
    fn post(&mut self, qp: usize, id: u64, work: &Work) -> Result<(), Errno> {
        let (side, peer) = (&self.sides[qp], self.plan.qps[qp].peer);
        let Some(pair) = &side.pair else { return Err(Errno::EINVAL) };
        let (request, sge) = request_of(id, work, side.place, self.sides[peer].place);
        let gather = [sge];
        let gather: &[_] = if work.bytes == 0 || work.inline { &[] } else { &gather };
        let inline;
        let mut posted = SendRequest::new(id, request.operation, gather).flags(request.flags);
        if work.inline {
            let Some(region) = &side.region else { return Err(Errno::EINVAL) };
            inline = region.read_at(sge.address - side.place.0, sge.length as usize);
            posted = posted.inline(&inline);
        }
        if let Some(group) = work.group {
            let (handle, key) = self.groups.target(qp, group);
            posted = posted.to(handle, Qpn::MULTICAST, key);
        } else if let Some((handle, number, key)) = &side.target {
            posted = posted.to(handle, *number, *key);
        }
        pair.post(&posted).map_err(|_| Errno::ENOMEM)
    }

    fn post_receive(&mut self, qp: usize, id: u64, offset: u64, bytes: u32) -> Result<(), Errno> {
        let side = &self.sides[qp];
        let (Some(pair), Some(region)) = (&side.pair, &side.region) else { return Err(Errno::EINVAL) };
        let request = ReceiveRequest { id, scatter: &[region.entry(offset, bytes)] };
        pair.post_receive(&request).map_err(|_| Errno::ENOMEM)
    }

    fn modify(&mut self, qp: usize, state: State, notify_drained: bool) -> Result<(), String> {
        let Some(pair) = &self.sides[qp].pair else { return Err("the queue pair is gone".into()) };
        let mut modify = Modify::default().state(state);
        if notify_drained {
            modify = modify.notify_drained(true);
        }
        pair.modify(&modify).map(|_| ()).map_err(|why| why.to_string())
    }

    fn destroy(&mut self, qp: usize) {
        self.sides[qp].pair = None;
    }

    fn unmap(&mut self, _: usize) -> Result<(), String> {
        Err("the memory of a real process stays where it is".into())
    }

    fn deregister(&mut self, qp: usize) -> Result<(), String> {
        self.sides[qp].region = None;
        Ok(())
    }

    fn reregister(&mut self, qp: usize, access: Access) -> Result<(), String> {
        match &self.sides[qp].region {
            Some(region) => region.change_access(access).map_err(|why| why.to_string()),
            None => Err("the region is gone".into()),
        }
    }

    fn join(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let Some(pair) = &self.sides[qp].pair else { return Err("the queue pair is gone".into()) };
        pair.attach_multicast(self.groups.gid(group)).map_err(|why| why.to_string())
    }

    fn leave(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let Some(pair) = &self.sides[qp].pair else { return Err("the queue pair is gone".into()) };
        pair.detach_multicast(self.groups.gid(group)).map_err(|why| why.to_string())
    }

    fn disturb(&mut self, what: Incident) -> Result<(), String> {
        Err(format!("not possible on real sockets: {what:?}"))
    }
}
