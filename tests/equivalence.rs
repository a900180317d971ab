//! The same scripts in virtual time and over real sockets tell the same story: per queue pair, and without time. So do they
//! where both ends are on one host, whichever way it reaches itself.

use softhca::{
    Access, Action, AddressVector, Choice, Class, Classes, Completion, CompletionQueue, Context, Device,
    EmbeddedOptions, Endpoint, Event, Fault, Instant, Loopback, MemoryRegion, Observer, Operation, Path,
    ProtectionDomain, QpKind, QueueKey, QueuePair, ReceiveRequest, Recovery, RemoteAddress, RemoteKey,
    Repeat, RnrTimer, Role, Rule, RuleId, Selector, SendFlags, SendRequest, SendTrailer, Settings,
    SharedReceiveQueue, Span, State, Witness, World,
};
use softhca_engine::Acks;
use softhca_fabric::{CableId, Flow, HostId, Sense};
use softhca_trace::{Cast, Story};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);
const SEED: u64 = 5;
const KEY: QueueKey = QueueKey(0x1234);
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
enum On {
    World,
    /// Two hosts.
    Sockets,
    /// Both ends on one host.
    OneHost(Loopback),
}

/// One host of a script.
struct End {
    device: Device,
    context: Context,
    domain: ProtectionDomain,
    queue: CompletionQueue,
    region: MemoryRegion,
    pair: QueuePair,
    shared: Option<SharedReceiveQueue>,
}

/// Two hosts, and what they tell.
struct Play {
    a: End,
    b: End,
    cast: Cast,
    record: Shared,
    rules: u32,
    _world: Option<World>,
}

/// A script, and what it needs.
#[derive(Clone, Copy)]
struct Script {
    name: &'static str,
    kind: QpKind,
    recovery: Recovery,
    path: Path,
    act: fn(&mut Play),
}

impl Script {
    fn new(name: &'static str, act: fn(&mut Play)) -> Script {
        Script { name, kind: QpKind::Rc, recovery: Recovery::Fatal, path: Path::default(), act }
    }

    fn kind(self, kind: QpKind) -> Script {
        Script { kind, ..self }
    }

    fn recovery(self, recovery: Recovery) -> Script {
        Script { recovery, ..self }
    }

    fn path(mut self, change: fn(&mut Path)) -> Script {
        change(&mut self.path);
        self
    }

    /// Plays the script and tells its story.
    fn play(&self, on: On) -> Story {
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
    fn new(device: Device, kind: QpKind, is_target: bool) -> End {
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

    fn completion(&self) -> Completion {
        self.queue.wait_for(PATIENCE).expect("a completion")
    }

    fn completions(&self, count: usize) {
        for _ in 0..count {
            self.completion();
        }
    }

    fn event(&self) {
        self.context.wait_event(PATIENCE).expect("an asynchronous event");
    }

    fn receive(&self, id: u64, length: u32) {
        let request = ReceiveRequest { id, scatter: &[self.region.entry(id * 8192, length)] };
        match &self.shared {
            Some(shared) => shared.post(&request).unwrap(),
            None => self.pair.post_receive(&request).unwrap(),
        }
    }

    fn endpoint(&self) -> softhca_fabric::Endpoint {
        softhca_fabric::Endpoint { address: self.device.address(), qpn: self.pair.number() }
    }
}

impl Play {
    fn begin(&mut self, script: &Script, on: On) {
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

    fn rule(&mut self, at_alice: bool, selector: Selector, repeat: Repeat, action: Action) {
        self.rules += 1;
        let rule = Rule { id: RuleId(self.rules), selector, repeat, action };
        let end = if at_alice { &self.a } else { &self.b };
        end.device.add_rule(SEED, rule);
    }

    /// Has requests of alice with these PSNs meet a fault, the first transmission only.
    fn on_request(&mut self, psn: u64, action: Action) {
        let selector = Selector { psn: Some(Span::exactly(psn)), ..requests() };
        self.rule(true, selector, Repeat::times(1), action);
    }

    /// The same for bob's answers.
    fn on_answer(&mut self, psn: u64, action: Action) {
        let psn = Some(Span::exactly(psn));
        let selector = Selector { psn, sense: Some(Sense::Response), ..requests() };
        self.rule(false, selector, Repeat::times(1), action);
    }

    fn post(&self, request: SendRequest<'_>) {
        let request = match &self.b.shared {
            Some(shared) => request.to_shared_receive_queue(shared.number()),
            None => request,
        };
        self.a.pair.post(&request).unwrap();
    }

    fn send(&self, id: u64, length: u32) {
        self.post(SendRequest::send(id, &[self.a.region.entry(0, length)]));
    }

    fn write(&self, id: u64, length: u32) {
        self.post(SendRequest::write(id, &[self.a.region.entry(0, length)], self.b.region.remote(0)));
    }

    fn read(&self, id: u64, length: u32) {
        self.post(SendRequest::read(id, &[self.a.region.entry(0, length)], self.b.region.remote(0)));
    }

    fn fetch_add(&self, id: u64) {
        self.post(SendRequest::fetch_add(id, &[self.a.region.entry(0, 8)], self.b.region.remote(8), 3));
    }
}

fn requests() -> Selector {
    Selector { role: Some(Role(0)), sense: Some(Sense::Request), ..Selector::default() }
}

fn every_operation(play: &mut Play) {
    play.b.receive(0, 8000);
    play.b.receive(1, 8000);
    play.b.receive(2, 8000);
    play.b.receive(3, 10);
    play.send(0, 3000);
    play.post(SendRequest::send_immediate(1, &[play.a.region.entry(0, 5)], 77));
    play.write(2, 5000);
    let write = Operation::Write { remote: play.b.region.remote(0), immediate: Some(99) };
    play.post(SendRequest::new(3, write, &[play.a.region.entry(0, 10)]));
    play.read(4, 4096);
    play.fetch_add(5);
    let old = [play.a.region.entry(0, 8)];
    play.post(SendRequest::compare_swap(6, &old, play.b.region.remote(8), 3, 4));
    play.post(SendRequest::send(7, &[]).flags(SendFlags::empty()).inline(b""));
    play.write(8, 0);
    play.a.completions(8);
    play.b.completions(4);
}

fn invalidating_send(play: &mut Play) {
    let window = play.b.domain.allocate_window(softhca::WindowKind::Type2).unwrap();
    let new_key = RemoteKey(window.key().0 & !0xff | 0x5a);
    let bind = softhca::BindWindow {
        window: window.key(),
        new_key,
        region: play.b.region.local_key(),
        address: play.b.region.address(),
        length: 64,
        access: Access::REMOTE_WRITE,
    };
    play.b.pair.post(&SendRequest::new(1, Operation::BindWindow(bind), &[])).unwrap();
    play.b.completions(1);
    let remote = RemoteAddress { address: play.b.region.address(), key: new_key };
    play.b.receive(0, 64);
    play.post(SendRequest::write(1, &[play.a.region.entry(0, 64)], remote));
    let send = Operation::Send(SendTrailer::Invalidate(new_key));
    play.post(SendRequest::new(2, send, &[play.a.region.entry(0, 8)]));
    play.b.completions(1);
    play.post(SendRequest::write(3, &[play.a.region.entry(0, 64)], remote));
    play.write(4, 100);
    play.a.completions(4);
    play.b.event();
}

fn unreliable_messages(play: &mut Play) {
    play.b.receive(0, 8000);
    play.b.receive(1, 8000);
    play.send(0, 3000);
    play.write(1, 3000);
    play.post(SendRequest::send_immediate(2, &[play.a.region.entry(0, 5)], 77));
    play.a.completions(3);
    play.b.completions(2);
}

/// UC forgets the message that lacks a packet, and goes on.
fn unreliable_loss(play: &mut Play) {
    play.on_request(1, Action::Drop);
    play.b.receive(0, 8000);
    play.b.receive(1, 8000);
    play.send(0, 3000);
    play.send(1, 3000);
    play.send(2, 100);
    play.a.completions(3);
    play.b.completions(2);
}

fn datagrams(play: &mut Play) {
    for id in 0..3 {
        play.b.receive(id, 2000);
    }
    play.on_request(1, Action::Drop);
    let vector = AddressVector::to(play.b.pair.endpoint().gid);
    let handle = play.a.domain.create_address_handle(vector).unwrap();
    for id in 0..4 {
        let entries = [play.a.region.entry(0, 100 + id as u32)];
        play.a.pair.post(&SendRequest::send(id, &entries).to(&handle, play.b.pair.number(), KEY)).unwrap();
    }
    play.a.completions(4);
    play.b.completions(3);
}

fn extended_connection(play: &mut Play) {
    play.b.receive(0, 8000);
    play.b.receive(1, 8000);
    play.send(0, 3000);
    play.write(1, 3000);
    play.read(2, 3000);
    play.fetch_add(3);
    play.send(4, 10);
    play.a.completions(5);
    play.b.completions(2);
}

/// The middle of a message is lost, and more work waits behind it.
fn lost_request(play: &mut Play) {
    play.on_request(1, Action::Drop);
    play.write(1, 4000);
    play.write(2, 10);
    play.a.completions(2);
}

fn fatal_loss(play: &mut Play) {
    lost_request(play);
    play.b.event();
}

/// Nothing follows the packet that is lost: only time can tell.
fn lost_tail(play: &mut Play) {
    play.on_request(3, Action::Drop);
    play.write(1, 4000);
    play.a.completions(1);
}

fn lost_answer_of_a_read(play: &mut Play) {
    play.on_answer(1, Action::Drop);
    play.read(1, 4000);
    play.write(2, 100);
    play.a.completions(2);
}

fn lost_answer_of_an_atomic(play: &mut Play) {
    play.on_answer(0, Action::Drop);
    play.fetch_add(1);
    play.fetch_add(2);
    play.a.completions(2);
}

fn lost_read_request(play: &mut Play) {
    play.on_request(1, Action::Drop);
    play.write(1, 100);
    play.read(2, 3000);
    play.write(3, 100);
    play.a.completions(3);
}

/// An acknowledgement that a later one covers.
fn lost_acknowledgement(play: &mut Play) {
    let selector = Selector {
        classes: Some(Classes::Only(Class::Ack)),
        psn: Some(Span::exactly(0)),
        sense: Some(Sense::Response),
        ..requests()
    };
    play.rule(false, selector, Repeat::times(1), Action::Drop);
    play.write(1, 100);
    play.write(2, 100);
    play.a.completions(2);
}

fn duplicates(play: &mut Play) {
    let first = Selector { transmission: Some(Span::exactly(1)), ..requests() };
    play.rule(true, first, Repeat::default(), Action::Duplicate { copies: 1 });
    play.b.receive(0, 8000);
    play.send(0, 3000);
    play.write(1, 100);
    play.fetch_add(2);
    play.read(3, 3000);
    play.a.completions(4);
    play.b.completions(1);
}

fn held_back(play: &mut Play) {
    let action = Action::Reorder { by: NonZeroU32::new(1).unwrap(), within_ns: 50_000_000 };
    play.on_request(1, action);
    play.write(1, 4000);
    play.write(2, 100);
    play.a.completions(2);
}

fn fatal_reorder(play: &mut Play) {
    held_back(play);
    play.b.event();
}

fn corrupted(play: &mut Play) {
    let place = softhca_fabric::Place::PayloadBit(7);
    play.on_request(0, Action::Corrupt { place, seal: softhca_fabric::Seal::Stale });
    play.write(1, 3000);
    play.a.completions(1);
}

/// One message after the other: of two losses in one window, time decides whether the second is refused.
fn probable_loss(play: &mut Play) {
    let one_in_five = Repeat::choice(Choice::Chance { per_billion: 200_000_000 });
    let first = Selector { transmission: Some(Span::exactly(1)), ..requests() };
    play.rule(true, first, one_in_five, Action::Drop);
    for id in 0..30 {
        play.write(id, 2000);
        play.a.completions(1);
    }
}

fn receiver_becomes_ready(play: &mut Play) {
    play.send(0, 2000);
    play.write(1, 100);
    while play.b.context.counters().sent_rnr_err == 0 {
        assert_eq!(play.a.queue.wait_for(Duration::from_millis(1)), None);
    }
    play.b.receive(0, 4000);
    play.a.completions(2);
    play.b.completions(1);
}

fn receiver_is_never_ready(play: &mut Play) {
    play.send(0, 100);
    play.write(1, 100);
    play.a.completions(2);
}

fn forbidden_write(play: &mut Play) {
    let remote = RemoteAddress { key: RemoteKey(0x00ba_d000), ..play.b.region.remote(0) };
    play.write(0, 100);
    play.post(SendRequest::write(1, &[play.a.region.entry(0, 2000)], remote));
    play.write(2, 100);
    play.a.completions(3);
    play.b.event();
}

fn read_out_of_bounds(play: &mut Play) {
    let remote = play.b.region.remote((1 << 20) - 100);
    play.post(SendRequest::read(1, &[play.a.region.entry(0, 2000)], remote));
    play.a.completions(1);
    play.b.event();
}

fn message_too_long(play: &mut Play) {
    play.b.receive(0, 100);
    play.b.receive(1, 100);
    play.send(0, 3000);
    play.a.completions(1);
    play.b.completions(2);
}

fn local_protection(play: &mut Play) {
    play.write(1, 100);
    let mut entry = play.a.region.entry(0, 100);
    entry.key = softhca::LocalKey(0x00ba_d000);
    play.post(SendRequest::write(2, &[entry], play.b.region.remote(0)));
    play.write(3, 100);
    play.a.completions(3);
}

/// The application itself stops the queue pair.
fn asked_to_stop(play: &mut Play) {
    play.b.receive(0, 100);
    play.b.receive(1, 100);
    play.write(0, 100);
    play.a.completions(1);
    play.b.pair.modify(&softhca::Modify::default().state(State::Error)).unwrap();
    play.b.completions(2);
}

fn both_directions(play: &mut Play) {
    for id in 0..10 {
        play.a.receive(100 + id, 4000);
        play.b.receive(id, 4000);
    }
    for id in 0..10 {
        play.send(id, 3000);
        let entries = [play.b.region.entry(0, 2000)];
        play.b.pair.post(&SendRequest::send(id, &entries)).unwrap();
    }
    play.a.completions(20);
    play.b.completions(20);
}

fn scripts() -> Vec<Script> {
    use Recovery::{Fatal, GoBack0, GoBackN};
    // Long enough that nothing is sent again before all of a script is posted, on a busy machine too.
    let quick = |path: &mut Path| (path.timeout, path.retry_count) = (16, 7);
    let patient = |path: &mut Path| path.retry_count = 1;
    let few_tries = |path: &mut Path| (path.rnr_retry, path.min_rnr_timer) = (2, RnrTimer::new(5));
    let soon_ready = |path: &mut Path| path.min_rnr_timer = RnrTimer::new(14);
    let mut scripts = vec![
        Script::new("every operation", every_operation),
        Script::new("send with invalidate", invalidating_send),
        Script::new("unreliable connection", unreliable_messages).kind(QpKind::Uc),
        Script::new("unreliable connection, loss", unreliable_loss).kind(QpKind::Uc),
        Script::new("datagrams, one of them lost", datagrams).kind(QpKind::Ud),
        Script::new("extended connection", extended_connection).kind(QpKind::XrcInitiator),
        Script::new("a lost packet is fatal", fatal_loss),
        Script::new("a lost tail is fatal in time", lost_tail).path(patient),
        Script::new("a lost READ answer is fatal", lost_answer_of_a_read),
        Script::new("a lost atomic answer is fatal", lost_answer_of_an_atomic),
        Script::new("a lost READ request is fatal", lost_read_request),
        Script::new("a lost acknowledgement is covered", lost_acknowledgement),
        Script::new("reordering is fatal", fatal_reorder),
        Script::new("a corrupted packet is a lost one", corrupted),
        Script::new("the receiver becomes ready", receiver_becomes_ready).path(soon_ready),
        Script::new("the receiver is never ready", receiver_is_never_ready).path(few_tries),
        Script::new("a forbidden WRITE", forbidden_write),
        Script::new("a READ out of bounds", read_out_of_bounds),
        Script::new("a message too long for its receive", message_too_long),
        Script::new("local memory that is not there", local_protection),
        Script::new("stopped by its owner", asked_to_stop),
        Script::new("both directions at once", both_directions),
    ];
    for recovery in [Fatal, GoBackN, GoBack0] {
        scripts.push(Script::new("duplicates", duplicates).recovery(recovery));
    }
    for recovery in [GoBackN, GoBack0] {
        let more = [
            Script::new("a lost packet is sent again", lost_request),
            Script::new("a lost tail is sent again", lost_tail),
            Script::new("a lost READ answer is asked for again", lost_answer_of_a_read),
            Script::new("a lost atomic answer is repeated", lost_answer_of_an_atomic),
            Script::new("a lost READ request is sent again", lost_read_request),
            Script::new("reordering costs a retransmission", held_back),
            Script::new("a corrupted packet is sent again", corrupted),
            Script::new("some of many are lost", probable_loss),
        ];
        scripts.extend(more.map(|script| script.recovery(recovery).path(quick)));
    }
    scripts
}

#[test]
fn virtual_and_real_time_tell_the_same_story() {
    compare_with_virtual_time(On::Sockets);
}

#[test]
fn a_host_that_reaches_itself_through_its_socket_tells_the_same_story() {
    compare_with_virtual_time(On::OneHost(Loopback::Socket));
}

#[test]
fn a_host_that_reaches_itself_within_its_card_tells_the_same_story() {
    compare_with_virtual_time(On::OneHost(Loopback::Card));
}

fn compare_with_virtual_time(on: On) {
    let mut told_apart = Vec::new();
    for script in scripts() {
        let label = format!("{} ({})", script.name, script.recovery.name());
        let [virtual_time, real] = [On::World, on].map(|on| script.play(on));
        let differences = virtual_time.differences(&real);
        if differences.is_empty() {
            assert_eq!(virtual_time.order_sha256(), real.order_sha256());
            println!("{} {label}", real.order_sha256());
        } else {
            told_apart.push(format!("{label}:\n  {}\n{virtual_time}", differences.join("\n  ")));
        }
    }
    assert!(told_apart.is_empty(), "virtual time and {on:?} differ in\n{}", told_apart.join("\n"));
}

/// A script whose story is not empty tells nothing by being equal: each must have something of its own.
#[test]
fn every_script_tells_something_of_its_own() {
    let mut seen = std::collections::BTreeMap::new();
    for script in scripts() {
        let label = format!("{} ({})", script.name, script.recovery.name());
        let story = script.play(On::World);
        assert_eq!(story.chapters().filter(|(name, _)| *name == "alice.1").count(), 1, "{label}");
        let posted = story.to_string().contains("send-completed");
        assert!(posted, "{label} completes nothing:\n{story}");
        seen.entry(story.order_sha256()).or_insert_with(Vec::new).push(label);
    }
    // Recovery that sends again leaves the same story in both of its modes, unless the message begins anew.
    assert!(seen.values().all(|labels| labels.len() <= 3), "{seen:?}");
}
