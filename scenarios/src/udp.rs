//! The same plans in real time: embedded cards on loopback addresses, with the rules on their cables.

mod cm;
mod multicast;

use crate::Recording;
use crate::evaluate::{self, RunResults};
use crate::executor::{Executor, Hosts};
use crate::plan::{FabricChange, FaultKind, Node, Plan, WorkRequest};
use crate::record::RunRecord;
use crate::report::{Artifacts, Outcome, Verdict};
use crate::spec::Errno;
use crate::verbs::{DATAGRAM_QKEY, fill_pattern, send_request};
use cm::CmConnections;
use multicast::MulticastGroups;
use softhca::{
    AddressHandle, AddressVector, CompletionQueue, ConnectOptions, Context, Device, EmbeddedOptions,
    MemoryRegion, ModifyQp, ProtectionDomain, QpState, QueuePair, ReceiveRequest, SendRequest,
    trace::{Event, EventSink, NetworkEvent},
};
use softhca_engine::Instant;
use softhca_fabric::{Endpoint, Fault, Flow, HostId, LinkId, RuleId, Seed, Stage};
use softhca_queue::AccessFlags;
use softhca_trace::{CaptureWriter, ComparableTrace, EventLog, LadderBuilder, NameTable, PortTap};
use softhca_wire::{AddressHeaders, Gid, Psn, Qpn, QueueKey};
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant as Clock};

/// A run is over when nothing has happened for this long and no work is outstanding.
const IDLE_TIME: Duration = Duration::from_millis(150);
/// A run in which nothing happens for this long has got stuck.
const STUCK_TIMEOUT: Duration = Duration::from_secs(120);

/// The least time for an acknowledgement, as an exponent: half a second. A machine that was busy elsewhere would make
/// packets go twice that a quiet one sends once.
const MIN_ACK_TIMEOUT: u8 = 17;
/// Bytes of packets that are kept for a capture; what is sent beyond is left out of it.
const MAX_CAPTURED_BYTES: usize = 64 << 20;

/// Carries a plan out on real sockets and judges it. Expectations about time are left out.
pub fn run(plan: &Plan, recording: Recording) -> Outcome {
    if !plan.commands.is_empty() {
        return Outcome::failed_to_run("the file starts programs, which only the command `softhca run` can");
    }
    if plan.qps.is_empty() || plan.pairs.is_empty() {
        return Outcome::failed_to_run(
            "the file connects no queue pairs: it is for `softhca exec --scenario`",
        );
    }
    if let Some(why) = plan.unsupported_on_udp() {
        return Outcome::failed_to_run(format!("not possible on real sockets: {why}"));
    }
    match RealTimeRun::build(plan) {
        Ok(mut stage) => {
            let mut play = Executor::new(plan);
            let is_stuck = stage.run(&mut play);
            let mut outcome = stage.finish(&play, is_stuck);
            // A real run cannot be done again: one that fails is written down whether or not somebody asked.
            if recording == Recording::Everything || outcome.verdict != Verdict::Pass {
                outcome.artifacts = stage.artifacts().ok();
            }
            outcome
        }
        Err(why) => Outcome::failed_to_run(why),
    }
}

/// Something that a card or its cable told.
enum DeviceReport {
    Card(HostId, Event),
    Fault(HostId, Fault),
    Packet(HostId, AddressHeaders, Box<[u8]>),
}

/// What all cards told, in the order in which they told it.
struct Journal {
    start: Clock,
    last: Clock,
    reports: Vec<(u64, DeviceReport)>,
    /// Bytes of the packets among it.
    captured: usize,
    started: bool,
}

fn lock(notes: &Mutex<Journal>) -> MutexGuard<'_, Journal> {
    notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// One card's pen.
struct JournalSink(HostId, Arc<Mutex<Journal>>);

impl JournalSink {
    fn append(&self, told: DeviceReport) {
        let mut notes = lock(&self.1);
        if let DeviceReport::Packet(.., packet) = &told {
            notes.captured += packet.len();
        }
        // The way to RTS is not part of the run.
        if notes.started
            && (notes.captured <= MAX_CAPTURED_BYTES || !matches!(told, DeviceReport::Packet(..)))
        {
            notes.last = Clock::now();
            let at = notes.start.elapsed().as_nanos() as u64;
            notes.reports.push((at, told));
        }
    }
}

impl EventSink for JournalSink {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::Hca { event, .. } => self.append(DeviceReport::Card(self.0, *event)),
            NetworkEvent::Frame { stage: Stage::Admitted, addressing, packet, .. } => {
                self.append(DeviceReport::Packet(self.0, *addressing, packet.into()));
            }
            NetworkEvent::Fault { fault, .. } => self.append(DeviceReport::Fault(self.0, *fault)),
            _ => {}
        }
    }
}

/// A queue pair of the plan on its card. What is gone is destroyed.
struct RealQueuePair {
    domain: ProtectionDomain,
    pair: Option<QueuePair>,
    region: Option<MemoryRegion>,
    queue: CompletionQueue,
    /// Where datagrams go.
    target: Option<(AddressHandle, Qpn, QueueKey)>,
    qpn: Qpn,
    /// What its region is called, also when it is gone.
    memory: (u64, softhca::RemoteKey, u64),
    sq_psn: Psn,
}

struct RealTimeRun<'p> {
    plan: &'p Plan,
    devices: Vec<Device>,
    contexts: Vec<Context>,
    qps: Vec<RealQueuePair>,
    journal: Arc<Mutex<Journal>>,
    cast: NameTable,
    connections: CmConnections,
    multicast: MulticastGroups,
}

impl<'p> RealTimeRun<'p> {
    fn build(plan: &'p Plan) -> Result<RealTimeRun<'p>, String> {
        let notes = Journal {
            start: Clock::now(),
            last: Clock::now(),
            reports: Vec::new(),
            captured: 0,
            started: false,
        };
        let notes = Arc::new(Mutex::new(notes));
        let (mut devices, mut contexts, mut cast) = (Vec::new(), Vec::new(), NameTable::new());
        for (index, host) in plan.hosts.iter().enumerate() {
            let id = HostId(index as u32);
            let mut options = EmbeddedOptions::default();
            let least_ack_timeout = options.settings.min_ack_timeout;
            options.settings = softhca::Settings { min_ack_timeout: least_ack_timeout, ..host.settings };
            options.settings.seed = Seed(plan.seed).draw(&[0x686f_7374, index as u64]) | 1;
            options.event_sink = Box::new(JournalSink(id, notes.clone()));
            let device = Device::embedded_with(options).map_err(|why| format!("{}: {why}", host.name))?;
            cast.add_host(id, &host.name, device.address());
            contexts.push(device.open());
            devices.push(device);
        }
        let (meetings, groups) = (CmConnections::default(), MulticastGroups::default());
        let mut stage = RealTimeRun {
            plan,
            devices,
            contexts,
            qps: Vec::new(),
            journal: notes,
            cast,
            connections: meetings,
            multicast: groups,
        };
        stage.create().map_err(|why| why.to_string())?;
        stage.connect().map_err(|why| why.to_string())?;
        stage.multicast =
            MulticastGroups::new(plan, &stage.devices, &stage.qps).map_err(|why| why.to_string())?;
        stage.install_rules();
        Ok(stage)
    }

    fn create(&mut self) -> Result<(), softhca::Error> {
        for (index, qp) in self.plan.qps.iter().enumerate() {
            let pair = self.plan.pair_of(index);
            let context = &self.contexts[qp.host];
            let domain: ProtectionDomain = context.allocate_protection_domain()?;
            let region = domain
                .allocate_region(4 * pair.area_bytes as usize, pair.access | AccessFlags::LOCAL_WRITE)?;
            region.write_at(0, &fill_pattern(index, pair.area_bytes.min(1 << 20) as usize));
            let queue = context.create_completion_queue(pair.cqe)?;
            let builder = domain
                .create_queue_pair(pair.kind, &queue)
                .max_send_wr(pair.max_send_wr)
                .max_recv_wr(pair.posted_receives.max(128));
            let created = builder.build()?;
            self.qps.push(RealQueuePair {
                qpn: created.qpn(),
                sq_psn: created.endpoint().psn,
                memory: (region.address(), region.rkey(), pair.area_bytes),
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
        Endpoint { address: self.devices[self.plan.qps[qp].host].address(), qpn: self.qps[qp].qpn }
    }

    fn connect(&mut self) -> Result<(), softhca::Error> {
        for pair in &self.plan.pairs {
            let [a, b] = pair.qps;
            let (Some(first), Some(second)) = (&self.qps[a].pair, &self.qps[b].pair) else { continue };
            for qp in [a, b] {
                self.cast.add_queue_pair(self.endpoint(qp), &self.plan.qps[qp].name);
            }
            if pair.uses_cm {
                cm::init_for_cm(first, pair)?;
                cm::init_for_cm(second, pair)?;
                continue;
            }
            let is_connected = !pair.kind.is_datagram();
            if is_connected {
                // Zero is for ever, and a timer that races against a delay is meant to.
                let is_patient = pair.timeout > 0 && !self.plan.has_delay_faults();
                let path = ConnectOptions {
                    path_mtu: pair.mtu,
                    access: pair.access,
                    max_rd_atomic: pair.max_rd_atomic,
                    timeout: if is_patient { pair.timeout.max(MIN_ACK_TIMEOUT) } else { pair.timeout },
                    retry_cnt: pair.retry_count,
                    rnr_retry: pair.rnr_retry,
                    min_rnr_timer: pair.min_rnr_timer,
                    traffic_class: pair.traffic_class,
                };
                first.connect_both(second, &path)?;
            } else {
                first.start_ud(DATAGRAM_QKEY)?;
                second.start_ud(DATAGRAM_QKEY)?;
            }
            for [here, there] in [[a, b], [b, a]] {
                let responder = self.endpoint(there);
                if !is_connected {
                    let traffic_class = pair.traffic_class;
                    let vector =
                        AddressVector { traffic_class, ..AddressVector::to(Gid::from(responder.address)) };
                    let handle = self.qps[here].domain.create_address_handle(vector)?;
                    self.qps[here].target = Some((handle, responder.qpn, DATAGRAM_QKEY));
                }
                self.register_flow(here, self.qps[here].sq_psn, is_connected.then_some(responder));
            }
        }
        for fault in &self.plan.faults {
            self.cast.add_rule(fault.id, &fault.name);
        }
        for (index, cable) in self.plan.links.iter().enumerate() {
            if let [Node::Host(first), Node::Host(second)] = cable.ends {
                let ends = [first, second].map(|host| HostId(host as u32));
                self.cast.add_link(LinkId(index as u32), ends);
            }
        }
        Ok(())
    }

    /// Lets rules and traces know a queue pair that is ready to send.
    fn register_flow(&mut self, qp: usize, first_psn: Psn, responder: Option<Endpoint>) {
        let (role, requester) = (Plan::role_of(qp), self.endpoint(qp));
        self.cast.set_first_psn(requester, first_psn);
        self.cast.set_role(role, requester);
        if let Some(responder) = responder {
            self.cast.connect(requester, responder);
        }
        let flow = Flow { id: role, requester, responder, first_psn };
        for at in [qp, self.plan.qps[qp].peer] {
            self.devices[self.plan.qps[at].host].add_flow(self.plan.seed, flow);
        }
    }

    fn install_rules(&self) {
        for (host, device) in self.devices.iter().enumerate() {
            for (_, rule) in self.plan.rules_for_host(host) {
                device.add_rule(self.plan.seed, rule);
            }
        }
    }

    /// Plays until nothing is left to happen; tells whether it got stuck.
    fn run(&mut self, play: &mut Executor<'_>) -> bool {
        let start = Clock::now();
        {
            let mut notes = lock(&self.journal);
            (notes.start, notes.last, notes.started) = (start, start, true);
        }
        let cut = self.plan.duration_ns.map(|ends| Duration::from_nanos(ends) + IDLE_TIME);
        loop {
            let now = start.elapsed();
            let now_ns = now.as_nanos() as u64;
            // Asked before the queues are emptied: what ends after this is seen in the next round.
            let idle = play.next_due().is_none() && !self.is_outstanding();
            let quiet = lock(&self.journal).last.elapsed();
            play.run_due(now_ns, self);
            let mut came = self.deliver_cm_events(start, play);
            for qp in 0..self.qps.len() {
                while let Some(completion) = self.qps[qp].queue.poll() {
                    came = true;
                    play.on_completion(start.elapsed().as_nanos() as u64, qp, completion, self);
                }
            }
            if play.log.error.is_some() || cut.is_some_and(|cut| now > cut) {
                return false;
            }
            if idle && !came && quiet > IDLE_TIME {
                return false;
            }
            if quiet > STUCK_TIMEOUT {
                return true;
            }
            if !came {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Whether a queue pair still waits for an answer.
    fn is_outstanding(&self) -> bool {
        let waits = |side: &RealQueuePair| {
            let view = side.pair.as_ref().and_then(|pair| pair.query().ok());
            view.is_some_and(|view| view.outstanding > 0)
        };
        self.qps.iter().any(waits) || self.connections.is_outstanding()
    }

    fn finish(&self, play: &Executor<'_>, is_stuck: bool) -> Outcome {
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
        let counted = plan.counting_rules.iter().map(|count| sum(count.rule.id).0).collect();
        let mut fired: BTreeMap<RuleId, u64> = play.log.fired.clone();
        for fault in &plan.faults {
            if matches!(fault.kind, FaultKind::Packets { .. }) {
                fired.insert(fault.id, sum(fault.id).1);
            }
        }
        let states =
            self.qps.iter().map(|side| side.pair.as_ref().and_then(|pair| pair.state().ok())).collect();
        let counters = self.contexts.iter().map(Context::counters).collect();
        let mut record = RunRecord::new(plan);
        for device in &self.devices {
            record.add_host(device.address());
        }
        for qp in 0..self.qps.len() {
            record.add_queue_pair(qp, self.endpoint(qp), self.qps[qp].sq_psn);
        }
        let notes = lock(&self.journal);
        for (time_ns, told) in &notes.reports {
            match told {
                DeviceReport::Card(host, event) => record.on_engine_event(*time_ns, host.0 as usize, event),
                DeviceReport::Fault(host, fault) => {
                    record.on_packet_fault(*time_ns, Some(host.0 as usize), fault)
                }
                DeviceReport::Packet(..) => {}
            }
        }
        let events = notes.reports.iter().filter_map(|(_, told)| match told {
            DeviceReport::Card(host, event) => Some((*host, event)),
            DeviceReport::Fault(..) | DeviceReport::Packet(..) => None,
        });
        let faults = notes.reports.iter().filter_map(|(_, told)| match told {
            DeviceReport::Fault(_, fault) => Some(fault),
            DeviceReport::Card(..) | DeviceReport::Packet(..) => None,
        });
        let story = ComparableTrace::from_events(&self.cast, events, faults);
        let ended_ns = notes.last.duration_since(notes.start).as_nanos() as u64;
        let mut memory = |qp: usize, offset: u64, length: u64| match &self.qps[qp].region {
            Some(region) => region.read_at(offset, length as usize),
            None => Vec::new(),
        };
        let evidence = RunResults {
            record: &record,
            log: &play.log,
            counted_packets: counted,
            fired,
            counters,
            states,
            ended_ns,
            timed_out: is_stuck,
            in_real_time: true,
            external_programs: false,
        };
        let mut outcome = evaluate::evaluate(plan, &evidence, &mut memory);
        outcome.order_sha256 = Some(story.order_sha256());
        outcome.comparable_trace = Some(story);
        outcome
    }
}

impl RealTimeRun<'_> {
    /// The event log, the capture and the ladders of what was told. Packets are captured where they leave a card.
    fn artifacts(&self) -> io::Result<Artifacts> {
        let mut log = EventLog::new(Vec::new(), &self.plan.title, self.cast.clone());
        let mut ladders = LadderBuilder::new(self.cast.clone());
        let mut capture = CaptureWriter::new(Vec::new())?;
        let mut taps = Vec::new();
        for (name, address) in self.cast.hosts() {
            taps.push(PortTap::new(capture.add_interface(name, &address.to_string())?));
        }
        for (time_ns, told) in &lock(&self.journal).reports {
            let now = Instant::from_nanos(*time_ns);
            match told {
                DeviceReport::Card(host, event) => {
                    log.record_event(now, *host, event);
                    ladders.record_event(now, *host, event);
                    taps[host.0 as usize].flush_pending(&mut capture)?;
                }
                DeviceReport::Packet(host, envelope, packet) => {
                    ladders.record_frame(now, envelope, packet);
                    taps[host.0 as usize].packet_sent(&mut capture, *time_ns, envelope, packet)?;
                }
                DeviceReport::Fault(host, fault) => {
                    if let Some(cable) = self.link_of(*host) {
                        log.record_fault(now, cable, fault);
                    }
                    ladders.record_fault(self.cast.address(*host), fault);
                    taps[host.0 as usize].add_fault(fault, &self.cast);
                }
            }
        }
        for tap in &mut taps {
            tap.flush_pending(&mut capture)?;
        }
        log.finish()?;
        Ok(Artifacts { events: log.into_inner(), capture: capture.into_inner(), ladders: ladders.ladders() })
    }

    /// The one cable of a host.
    fn link_of(&self, host: HostId) -> Option<LinkId> {
        let end = Node::Host(host.0 as usize);
        let index = self.plan.links.iter().position(|cable| cable.ends.contains(&end))?;
        Some(LinkId(index as u32))
    }
}

impl Hosts for RealTimeRun<'_> {
    fn post(&mut self, qp: usize, id: u64, work: &WorkRequest) -> Result<(), Errno> {
        let (side, peer) = (&self.qps[qp], self.plan.qps[qp].peer);
        let Some(pair) = &side.pair else { return Err(Errno::EINVAL) };
        let (request, sge) = send_request(id, work, side.memory, self.qps[peer].memory);
        let gather = [sge];
        let gather: &[_] = if work.bytes == 0 || work.inline { &[] } else { &gather };
        let inline;
        let mut posted = SendRequest::new(id, request.operation, gather).flags(request.flags);
        if work.inline {
            let Some(region) = &side.region else { return Err(Errno::EINVAL) };
            inline = region.read_at(sge.address - side.memory.0, sge.length as usize);
            posted = posted.inline_data(&inline);
        }
        if let Some(group) = work.group {
            let (handle, key) = self.multicast.target(qp, group);
            posted = posted.ud_address(handle, Qpn::MULTICAST, key);
        } else if let Some((handle, number, key)) = &side.target {
            posted = posted.ud_address(handle, *number, *key);
        }
        pair.post_send(&posted).map_err(|_| Errno::ENOMEM)
    }

    fn post_receive(&mut self, qp: usize, id: u64, offset: u64, bytes: u32) -> Result<(), Errno> {
        let side = &self.qps[qp];
        let (Some(pair), Some(region)) = (&side.pair, &side.region) else { return Err(Errno::EINVAL) };
        let request = ReceiveRequest { wr_id: id, sg_list: &[region.sge(offset, bytes)] };
        pair.post_recv(&request).map_err(|_| Errno::ENOMEM)
    }

    fn modify(&mut self, qp: usize, state: QpState, notify_drained: bool) -> Result<(), String> {
        let Some(pair) = &self.qps[qp].pair else { return Err("the queue pair is gone".into()) };
        let mut modify = ModifyQp::default().state(state);
        if notify_drained {
            modify = modify.sqd_async_notify(true);
        }
        pair.modify(&modify).map(|_| ()).map_err(|why| why.to_string())
    }

    fn destroy(&mut self, qp: usize) {
        self.qps[qp].pair = None;
    }

    fn unmap(&mut self, _: usize) -> Result<(), String> {
        Err("the memory of a real process stays where it is".into())
    }

    fn deregister(&mut self, qp: usize) -> Result<(), String> {
        self.qps[qp].region = None;
        Ok(())
    }

    fn reregister(&mut self, qp: usize, access: AccessFlags) -> Result<(), String> {
        match &self.qps[qp].region {
            Some(region) => region.change_access(access).map_err(|why| why.to_string()),
            None => Err("the region is gone".into()),
        }
    }

    fn attach_multicast(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let Some(pair) = &self.qps[qp].pair else { return Err("the queue pair is gone".into()) };
        pair.attach_multicast(self.multicast.gid(group)).map_err(|why| why.to_string())
    }

    fn detach_multicast(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let Some(pair) = &self.qps[qp].pair else { return Err("the queue pair is gone".into()) };
        pair.detach_multicast(self.multicast.gid(group)).map_err(|why| why.to_string())
    }

    fn apply(&mut self, what: FabricChange) -> Result<(), String> {
        Err(format!("not possible on real sockets: {what:?}"))
    }
}
