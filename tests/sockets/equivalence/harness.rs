//! Two hosts that run a script in virtual time or over sockets, and their comparable traces.

use softhca::{
    AccessFlags, Completion, CompletionQueue, ConnectOptions, Context, Device, EmbeddedOptions, Endpoint,
    Instant, Loopback, MemoryRegion, ProtectionDomain, QpType, QueueKey, QueuePair, ReceiveRequest, Recovery,
    SendRequest, Settings, SharedReceiveQueue,
    fault::{Action, Fault, FlowId, InclusiveRange, Repeat, Rule, RuleId, Selector},
    sim::World,
    trace::{Event, EventSink, NetworkEvent},
};
use softhca_engine::AckPolicy;
use softhca_fabric::{Flow, HostId, PacketType};
use softhca_trace::{ComparableTrace, NameTable};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const COMPLETION_TIMEOUT: Duration = Duration::from_secs(60);
const SEED: u64 = 5;
pub const QUEUE_KEY: QueueKey = QueueKey(0x1234);
const ALL_ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);

/// The events of both devices.
#[derive(Default)]
struct Recording {
    events: Vec<(HostId, Event)>,
    faults: Vec<Fault>,
}

type SharedRecording = Arc<Mutex<Recording>>;

/// Records the events of a device on real sockets.
struct SocketSink(HostId, SharedRecording);

impl EventSink for SocketSink {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::Hca { event, .. } => self.1.lock().unwrap().events.push((self.0, *event)),
            NetworkEvent::Fault { fault, .. } => self.1.lock().unwrap().faults.push(*fault),
            _ => {}
        }
    }
}

/// Records the events of a simulation.
struct SimulationSink(SharedRecording);

impl EventSink for SimulationSink {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::Hca { host, event } => self.0.lock().unwrap().events.push((host, *event)),
            NetworkEvent::Fault { fault, .. } => self.0.lock().unwrap().faults.push(*fault),
            _ => {}
        }
    }
}

/// Where a script runs.
#[derive(Clone, Copy, Debug)]
pub enum Backend {
    Simulation,
    /// Two hosts.
    Sockets,
    /// Both ends on one host.
    OneHost(Loopback),
}

/// One host of a script.
pub struct ScriptHost {
    pub device: Device,
    pub context: Context,
    pub domain: ProtectionDomain,
    pub cq: CompletionQueue,
    pub region: MemoryRegion,
    pub qp: QueuePair,
    pub srq: Option<SharedReceiveQueue>,
}

/// Two hosts and their recording.
pub struct ScriptRun {
    pub a: ScriptHost,
    pub b: ScriptHost,
    names: NameTable,
    recording: SharedRecording,
    rules: u32,
    _world: Option<World>,
}

/// A script and its parameters.
#[derive(Clone, Copy)]
pub struct Script {
    pub name: &'static str,
    kind: QpType,
    pub recovery: Recovery,
    path: ConnectOptions,
    steps: fn(&mut ScriptRun),
}

impl Script {
    pub fn new(name: &'static str, act: fn(&mut ScriptRun)) -> Script {
        Script {
            name,
            kind: QpType::Rc,
            recovery: Recovery::Fatal,
            path: ConnectOptions::default(),
            steps: act,
        }
    }

    pub fn kind(self, kind: QpType) -> Script {
        Script { kind, ..self }
    }

    pub fn recovery(self, recovery: Recovery) -> Script {
        Script { recovery, ..self }
    }

    pub fn path(mut self, change: fn(&mut ConnectOptions)) -> Script {
        change(&mut self.path);
        self
    }

    /// Runs the script and returns its comparable trace.
    pub fn run(&self, on: Backend) -> ComparableTrace {
        let record = SharedRecording::default();
        let settings =
            Settings { recovery: self.recovery, ack_policy: AckPolicy::PerRequest, ..Settings::default() };
        let mut world = None;
        let devices = match on {
            Backend::Simulation => {
                let world = world.insert(World::new(SEED));
                world.settings(settings).event_sink(SimulationSink(record.clone()));
                ["alice", "bob"].map(|name| world.device(name))
            }
            Backend::Sockets => {
                [HostId(0), HostId(1)].map(|host| embedded(host, Loopback::Socket, settings, &record))
            }
            Backend::OneHost(loopback) => {
                let device = embedded(HostId(0), loopback, settings, &record);
                [device.clone(), device]
            }
        };
        let mut names = NameTable::new();
        for (index, name) in ["alice", "bob"].into_iter().enumerate() {
            names.add_host(HostId(index as u32), name, devices[index].address());
        }
        let [a, b] = devices;
        let a = ScriptHost::new(a, self.kind, false);
        let b = ScriptHost::new(b, self.kind, true);
        let mut play = ScriptRun { a, b, names, recording: record, rules: 0, _world: world };
        play.connect(self, on);
        (self.steps)(&mut play);
        // A completion is visible before the poll that produced it ends; a verb waits for the end.
        for end in [&play.a, &play.b] {
            end.qp.state().unwrap();
        }
        let record = play.recording.lock().unwrap();
        ComparableTrace::from_events(
            &play.names,
            record.events.iter().map(|(host, event)| (*host, event)),
            &record.faults,
        )
    }
}

/// A device on real sockets.
fn embedded(host: HostId, loopback: Loopback, settings: Settings, record: &SharedRecording) -> Device {
    let mut options = EmbeddedOptions { loopback, ..EmbeddedOptions::default() };
    let least_ack_timeout = options.settings.min_ack_timeout;
    options.settings = Settings { min_ack_timeout: least_ack_timeout, ..settings };
    options.event_sink = Box::new(SocketSink(host, record.clone()));
    Device::embedded_with(options).unwrap()
}

impl ScriptHost {
    pub fn new(device: Device, kind: QpType, is_target: bool) -> ScriptHost {
        let context = device.open();
        let domain = context.allocate_protection_domain().unwrap();
        let queue = context.create_completion_queue(256).unwrap();
        let region = domain.allocate_region(1 << 20, ALL_ACCESS).unwrap();
        let (pair, shared) = match kind {
            QpType::XrcInitiator if is_target => {
                let xrc_domain = context.open_xrc_domain().unwrap();
                let shared = domain.create_xrc_shared_receive_queue(&xrc_domain, &queue, 16, 4).unwrap();
                (xrc_domain.create_target_queue_pair().unwrap(), Some(shared))
            }
            _ => (domain.create_queue_pair(kind, &queue).build().unwrap(), None),
        };
        ScriptHost { device, context, domain, cq: queue, region, qp: pair, srq: shared }
    }

    pub fn wait_completion(&self) -> Completion {
        self.cq.wait_for(COMPLETION_TIMEOUT).expect("a completion")
    }

    pub fn wait_completions(&self, count: usize) {
        for _ in 0..count {
            self.wait_completion();
        }
    }

    pub fn wait_async_event(&self) {
        self.context.wait_async_event(COMPLETION_TIMEOUT).expect("an asynchronous event");
    }

    pub fn post_receive(&self, id: u64, length: u32) {
        let request = ReceiveRequest { wr_id: id, sg_list: &[self.region.sge(id * 8192, length)] };
        match &self.srq {
            Some(shared) => shared.post_recv(&request).unwrap(),
            None => self.qp.post_recv(&request).unwrap(),
        }
    }

    pub fn endpoint(&self) -> softhca_fabric::Endpoint {
        softhca_fabric::Endpoint { address: self.device.address(), qpn: self.qp.qpn() }
    }
}

impl ScriptRun {
    pub fn connect(&mut self, script: &Script, on: Backend) {
        let ScriptRun { a, b, names, .. } = self;
        if script.kind.is_datagram() {
            a.qp.start_ud(QUEUE_KEY).unwrap();
            b.qp.start_ud(QUEUE_KEY).unwrap();
        } else {
            a.qp.connect_both(&b.qp, &script.path).unwrap();
        }
        let connected = !script.kind.is_datagram();
        for (index, (end, peer)) in [(&*a, &*b), (&*b, &*a)].into_iter().enumerate() {
            let Endpoint { psn, .. } = end.qp.endpoint();
            let at = end.endpoint();
            names.add_queue_pair(at, ["alice.1", "bob.1"][index]);
            let flow = Flow {
                id: FlowId(index as u32),
                requester: at,
                responder: connected.then(|| peer.endpoint()),
                first_psn: psn,
            };
            names.add_flow(&flow);
            // A simulation assigns the roles itself, in this order.
            if !matches!(on, Backend::Simulation) {
                end.device.add_flow(SEED, flow);
                peer.device.add_flow(SEED, flow);
            }
        }
    }

    pub fn add_rule(&mut self, at_alice: bool, selector: Selector, repeat: Repeat, action: Action) {
        self.rules += 1;
        let rule = Rule { id: RuleId(self.rules), selector, repeat, action };
        let end = if at_alice { &self.a } else { &self.b };
        end.device.add_rule(SEED, rule);
    }

    /// Applies a fault to the first transmission of alice's request with this PSN.
    pub fn fault_on_request(&mut self, psn: u64, action: Action) {
        let selector = Selector { psn: Some(InclusiveRange::exactly(psn)), ..requests() };
        self.add_rule(true, selector, Repeat::times(1), action);
    }

    /// The same for bob's responses.
    pub fn fault_on_response(&mut self, psn: u64, action: Action) {
        let psn = Some(InclusiveRange::exactly(psn));
        let selector = Selector { psn, packet_type: Some(PacketType::Response), ..requests() };
        self.add_rule(false, selector, Repeat::times(1), action);
    }

    pub fn post(&self, request: SendRequest<'_>) {
        let request = match &self.b.srq {
            Some(shared) => request.xrc_srqn(shared.srqn()),
            None => request,
        };
        self.a.qp.post_send(&request).unwrap();
    }

    pub fn send(&self, id: u64, length: u32) {
        self.post(SendRequest::send(id, &[self.a.region.sge(0, length)]));
    }

    pub fn write(&self, id: u64, length: u32) {
        self.post(SendRequest::rdma_write(
            id,
            &[self.a.region.sge(0, length)],
            self.b.region.remote_address(0),
        ));
    }

    pub fn read(&self, id: u64, length: u32) {
        self.post(SendRequest::rdma_read(
            id,
            &[self.a.region.sge(0, length)],
            self.b.region.remote_address(0),
        ));
    }

    pub fn fetch_add(&self, id: u64) {
        self.post(SendRequest::fetch_and_add(
            id,
            &[self.a.region.sge(0, 8)],
            self.b.region.remote_address(8),
            3,
        ));
    }
}

pub fn requests() -> Selector {
    Selector { flow_id: Some(FlowId(0)), packet_type: Some(PacketType::Request), ..Selector::default() }
}
