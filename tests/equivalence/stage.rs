//! Two hosts that play a script, in virtual time or over sockets, and what they tell.

use softhca::{
    Access, Action, Completion, CompletionQueue, Context, Device, EmbeddedOptions, Endpoint, Event, Fault,
    Instant, Loopback, MemoryRegion, Observer, Path, ProtectionDomain, QpKind, QueueKey, QueuePair,
    ReceiveRequest, Recovery, Repeat, Role, Rule, RuleId, Selector, SendRequest, Settings,
    SharedReceiveQueue, Span, Witness, World,
};
use softhca_engine::Acks;
use softhca_fabric::{CableId, Flow, HostId, Sense};
use softhca_trace::{Cast, Story};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);
const SEED: u64 = 5;
pub const KEY: QueueKey = QueueKey(0x1234);
const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::WINDOW_BIND);

/// What both cards told.
#[derive(Default)]
struct Record {
    events: Vec<(HostId, Event)>,
    faults: Vec<Fault>,
}

type Shared = Arc<Mutex<Record>>;

/// The pen of one card on real sockets.
struct Scribe(HostId, Shared);

impl Witness for Scribe {
    fn card(&mut self, _: Instant, event: &Event) {
        self.1.lock().unwrap().events.push((self.0, *event));
    }

    fn fault(&mut self, _: Instant, fault: &Fault) {
        self.1.lock().unwrap().faults.push(*fault);
    }
}

/// The pen of a world.
struct Chronicler(Shared);

impl Observer for Chronicler {
    fn card(&mut self, _: Instant, host: HostId, event: &Event) {
        self.0.lock().unwrap().events.push((host, *event));
    }

    fn fault(&mut self, _: Instant, _: CableId, fault: &Fault) {
        self.0.lock().unwrap().faults.push(*fault);
    }
}

/// Where a script is played.
#[derive(Clone, Copy, Debug)]
pub enum On {
    World,
    /// Two hosts.
    Sockets,
    /// Both ends on one host.
    OneHost(Loopback),
}

/// One host of a script.
pub struct End {
    pub device: Device,
    pub context: Context,
    pub domain: ProtectionDomain,
    pub queue: CompletionQueue,
    pub region: MemoryRegion,
    pub pair: QueuePair,
    pub shared: Option<SharedReceiveQueue>,
}

/// Two hosts, and what they tell.
pub struct Play {
    pub a: End,
    pub b: End,
    cast: Cast,
    record: Shared,
    rules: u32,
    _world: Option<World>,
}

/// A script, and what it needs.
#[derive(Clone, Copy)]
pub struct Script {
    pub name: &'static str,
    kind: QpKind,
    pub recovery: Recovery,
    path: Path,
    act: fn(&mut Play),
}

impl Script {
    pub fn new(name: &'static str, act: fn(&mut Play)) -> Script {
        Script { name, kind: QpKind::Rc, recovery: Recovery::Fatal, path: Path::default(), act }
    }

    pub fn kind(self, kind: QpKind) -> Script {
        Script { kind, ..self }
    }

    pub fn recovery(self, recovery: Recovery) -> Script {
        Script { recovery, ..self }
    }

    pub fn path(mut self, change: fn(&mut Path)) -> Script {
        change(&mut self.path);
        self
    }

    /// Plays the script and tells its story.
    pub fn play(&self, on: On) -> Story {
        let record = Shared::default();
        let settings = Settings { recovery: self.recovery, acks: Acks::Each, ..Settings::default() };
        let mut world = None;
        let devices = match on {
            On::World => {
                let world = world.insert(World::new(SEED));
                world.settings(settings).observe(Chronicler(record.clone()));
                ["alice", "bob"].map(|name| world.device(name))
            }
            On::Sockets => {
                [HostId(0), HostId(1)].map(|host| embedded(host, Loopback::Socket, settings, &record))
            }
            On::OneHost(loopback) => {
                let device = embedded(HostId(0), loopback, settings, &record);
                [device.clone(), device]
            }
        };
        let mut cast = Cast::new();
        for (index, name) in ["alice", "bob"].into_iter().enumerate() {
            cast.name_host(HostId(index as u32), name, devices[index].address());
        }
        let [a, b] = devices;
        let a = End::new(a, self.kind, false);
        let b = End::new(b, self.kind, true);
        let mut play = Play { a, b, cast, record, rules: 0, _world: world };
        play.begin(self, on);
        (self.act)(&mut play);
        // A completion is seen before the turn ends that made it; a verb waits for that end.
        for end in [&play.a, &play.b] {
            end.pair.state().unwrap();
        }
        let record = play.record.lock().unwrap();
        Story::of(&play.cast, record.events.iter().map(|(host, event)| (*host, event)), &record.faults)
    }
}

/// A card on real sockets.
fn embedded(host: HostId, loopback: Loopback, settings: Settings, record: &Shared) -> Device {
    let mut options = EmbeddedOptions { loopback, ..EmbeddedOptions::default() };
    let least_ack_timeout = options.settings.least_ack_timeout;
    options.settings = Settings { least_ack_timeout, ..settings };
    options.witness = Box::new(Scribe(host, record.clone()));
    Device::embedded_with(options).unwrap()
}

impl End {
    pub fn new(device: Device, kind: QpKind, is_target: bool) -> End {
        let context = device.open();
        let domain = context.allocate_domain().unwrap();
        let queue = context.create_completion_queue(256).unwrap();
        let region = domain.register(1 << 20, ALL).unwrap();
        let (pair, shared) = match kind {
            QpKind::XrcInitiator if is_target => {
                let xrc_domain = context.open_xrc_domain().unwrap();
                let shared = domain.create_xrc_shared_receive_queue(&xrc_domain, &queue, 16, 4).unwrap();
                (xrc_domain.create_target().unwrap(), Some(shared))
            }
            _ => (domain.queue_pair(kind, &queue).create().unwrap(), None),
        };
        End { device, context, domain, queue, region, pair, shared }
    }

    pub fn completion(&self) -> Completion {
        self.queue.wait_for(PATIENCE).expect("a completion")
    }

    pub fn completions(&self, count: usize) {
        for _ in 0..count {
            self.completion();
        }
    }

    pub fn event(&self) {
        self.context.wait_event(PATIENCE).expect("an asynchronous event");
    }

    pub fn receive(&self, id: u64, length: u32) {
        let request = ReceiveRequest { id, scatter: &[self.region.entry(id * 8192, length)] };
        match &self.shared {
            Some(shared) => shared.post(&request).unwrap(),
            None => self.pair.post_receive(&request).unwrap(),
        }
    }

    pub fn endpoint(&self) -> softhca_fabric::Endpoint {
        softhca_fabric::Endpoint { address: self.device.address(), qpn: self.pair.number() }
    }
}

impl Play {
    pub fn begin(&mut self, script: &Script, on: On) {
        let Play { a, b, cast, .. } = self;
        if script.kind.is_datagram() {
            a.pair.start_datagrams(KEY).unwrap();
            b.pair.start_datagrams(KEY).unwrap();
        } else {
            a.pair.connect_both(&b.pair, &script.path).unwrap();
        }
        let connected = !script.kind.is_datagram();
        for (index, (end, peer)) in [(&*a, &*b), (&*b, &*a)].into_iter().enumerate() {
            let Endpoint { psn, .. } = end.pair.endpoint();
            let at = end.endpoint();
            cast.name_queue_pair(at, ["alice.1", "bob.1"][index]);
            cast.start_at(at, psn);
            cast.give_role(Role(index as u32), at);
            if connected {
                cast.connect(at, peer.endpoint());
            }
            // A world gives the roles itself, in this order.
            if !matches!(on, On::World) {
                let flow = Flow {
                    role: Role(index as u32),
                    requester: at,
                    responder: connected.then(|| peer.endpoint()),
                    first_psn: psn,
                };
                end.device.add_flow(SEED, flow);
                peer.device.add_flow(SEED, flow);
            }
        }
    }

    pub fn rule(&mut self, at_alice: bool, selector: Selector, repeat: Repeat, action: Action) {
        self.rules += 1;
        let rule = Rule { id: RuleId(self.rules), selector, repeat, action };
        let end = if at_alice { &self.a } else { &self.b };
        end.device.add_rule(SEED, rule);
    }

    /// Has requests of alice with these PSNs meet a fault, the first transmission only.
    pub fn on_request(&mut self, psn: u64, action: Action) {
        let selector = Selector { psn: Some(Span::exactly(psn)), ..requests() };
        self.rule(true, selector, Repeat::times(1), action);
    }

    /// The same for bob's answers.
    pub fn on_answer(&mut self, psn: u64, action: Action) {
        let psn = Some(Span::exactly(psn));
        let selector = Selector { psn, sense: Some(Sense::Response), ..requests() };
        self.rule(false, selector, Repeat::times(1), action);
    }

    pub fn post(&self, request: SendRequest<'_>) {
        let request = match &self.b.shared {
            Some(shared) => request.to_shared_receive_queue(shared.number()),
            None => request,
        };
        self.a.pair.post(&request).unwrap();
    }

    pub fn send(&self, id: u64, length: u32) {
        self.post(SendRequest::send(id, &[self.a.region.entry(0, length)]));
    }

    pub fn write(&self, id: u64, length: u32) {
        self.post(SendRequest::write(id, &[self.a.region.entry(0, length)], self.b.region.remote(0)));
    }

    pub fn read(&self, id: u64, length: u32) {
        self.post(SendRequest::read(id, &[self.a.region.entry(0, length)], self.b.region.remote(0)));
    }

    pub fn fetch_add(&self, id: u64) {
        self.post(SendRequest::fetch_add(id, &[self.a.region.entry(0, 8)], self.b.region.remote(8), 3));
    }
}

pub fn requests() -> Selector {
    Selector { role: Some(Role(0)), sense: Some(Sense::Request), ..Selector::default() }
}
