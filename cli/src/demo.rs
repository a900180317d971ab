//! `softhca demo`: two emulated hosts over real UDP sockets do everything once, and the ladder of each is shown.

use crate::{BAD_INPUT, output, terminal};
use clap::Args;
use softhca::{
    Access, AddressVector, Completion, CompletionQueue, Context, Device, EmbeddedOptions, MemoryRegion,
    Passage, Path, ProtectionDomain, QpKind, QueueKey, QueuePair, ReceiveRequest, SendFlags, SendRequest,
    Witness,
};
use softhca_engine::{Event, Instant};
use softhca_fabric::{Action, Endpoint, Fault, Flow, HostId, Repeat, Role, Rule, RuleId, Selector, Span};
use softhca_trace::{CaptureWriter, Cast, InterfaceId, Ladders, PortTap};
use softhca_wire::{Envelope, Gid};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What `softhca demo` takes.
#[derive(Args)]
pub struct Arguments {
    /// Where the capture is written; a file in the temporary directory unless said
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How long a step may take before the demo gives up: nothing here takes a thousandth of it.
const PATIENCE: Duration = Duration::from_secs(20);
/// The packet that the last act loses, and the rule that loses it.
const LOSE_ONE: RuleId = RuleId(1);
const SEED: u64 = 1;

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let path = arguments
        .capture
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("softhca-demo-{}.pcapng", std::process::id())));
    let file = match output::create("--capture", &path) {
        Ok(file) => file,
        Err(why) => {
            eprintln!("softhca demo: {why}");
            return ExitCode::from(BAD_INPUT);
        }
    };
    match play(file) {
        Ok(()) => {
            say!("capture: {}", path.display());
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("softhca demo: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Everything that both cards tell, in the order in which they tell it.
struct Record {
    /// When the demo began, and when the act did.
    started: std::time::Instant,
    act: std::time::Instant,
    ladders: Ladders,
    capture: CaptureWriter<BufWriter<File>>,
    broken: Option<std::io::Error>,
}

/// One card's pen for the record.
struct Scribe {
    record: Arc<Mutex<Record>>,
    host: HostId,
    tap: PortTap,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// One clock for both cards: what was told first happened first.
fn since(start: std::time::Instant) -> Instant {
    Instant::from_nanos(start.elapsed().as_nanos() as u64)
}

impl Witness for Scribe {
    fn card(&mut self, _: Instant, event: &Event) {
        let record = &mut *lock(&self.record);
        record.ladders.card(since(record.act), self.host, event);
        let written = self.tap.release(&mut record.capture);
        record.broken = record.broken.take().or(written.err());
    }

    fn frame(&mut self, _: Instant, passage: Passage, envelope: &Envelope, packet: &[u8]) {
        if passage != Passage::Sent {
            return;
        }
        let record = &mut *lock(&self.record);
        record.ladders.frame(since(record.act), envelope, packet);
        let now = since(record.started);
        let written = self.tap.sent(&mut record.capture, now.nanos(), envelope, packet);
        record.broken = record.broken.take().or(written.err());
    }

    fn fault(&mut self, _: Instant, fault: &Fault) {
        let record = &mut *lock(&self.record);
        record.ladders.fault(None, fault);
        self.tap.fault(fault, record.ladders.cast_mut());
    }
}

impl Drop for Scribe {
    fn drop(&mut self) {
        let record = &mut *lock(&self.record);
        let written = self.tap.release(&mut record.capture);
        record.broken = record.broken.take().or(written.err());
    }
}

/// One emulated host, ready to create queue pairs.
struct Host {
    name: &'static str,
    device: Device,
    context: Context,
    domain: ProtectionDomain,
    queue: CompletionQueue,
    region: MemoryRegion,
}

impl Host {
    fn new(
        name: &'static str,
        host: HostId,
        interface: InterfaceId,
        record: &Arc<Mutex<Record>>,
    ) -> Result<Host, Failure> {
        let scribe = Scribe { record: record.clone(), host, tap: PortTap::new(interface) };
        let options = EmbeddedOptions { witness: Box::new(scribe), ..EmbeddedOptions::default() };
        let device = Device::embedded_with(options)?;
        let context = device.open();
        let domain = context.allocate_domain()?;
        let queue = context.create_completion_queue(64)?;
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let region = domain.register(8192, rights)?;
        Ok(Host { name, device, context, domain, queue, region })
    }

    fn queue_pair(&self, kind: QpKind) -> Result<QueuePair, Failure> {
        Ok(self.domain.queue_pair(kind, &self.queue).create()?)
    }

    fn endpoint(&self, pair: &QueuePair) -> Endpoint {
        Endpoint { address: self.device.address(), qpn: pair.number() }
    }

    fn completion(&self) -> Result<Completion, Failure> {
        self.queue
            .wait_for(PATIENCE)
            .ok_or_else(|| format!("{} waited in vain for a completion", self.name).into())
    }
}

/// The two hosts and what is told of them.
struct Stage {
    record: Arc<Mutex<Record>>,
    alice: Host,
    bob: Host,
    act: u32,
}

impl Stage {
    /// Announces an act: what will be seen, and why.
    fn open(&mut self, title: &str, text: &str) {
        self.act += 1;
        say!("{}. {title}\n", self.act);
        for line in text.lines() {
            say!("   {}", line.trim());
        }
        say!("");
    }

    /// Two queue pairs of the act, named for the ladder, connected if they can be.
    fn cast(&self, kind: QpKind) -> Result<[QueuePair; 2], Failure> {
        let pairs = [self.alice.queue_pair(kind)?, self.bob.queue_pair(kind)?];
        let ends = [self.alice.endpoint(&pairs[0]), self.bob.endpoint(&pairs[1])];
        let mut record = lock(&self.record);
        let mut cast = Cast::new();
        for (index, host) in [&self.alice, &self.bob].into_iter().enumerate() {
            cast.name_host(HostId(index as u32), host.name, host.device.address());
            cast.name_queue_pair(ends[index], host.name);
            cast.start_at(ends[index], pairs[index].endpoint().psn);
        }
        cast.connect(ends[0], ends[1]);
        cast.name_rule(LOSE_ONE, "lose the second packet");
        record.ladders = Ladders::new(cast);
        drop(record);
        if kind.is_datagram() {
            pairs.iter().try_for_each(|pair| pair.start_datagrams(KEY))?;
        } else {
            let path = Path::default();
            pairs[0].connect(&pairs[1].endpoint(), &path)?;
            pairs[1].connect(&pairs[0].endpoint(), &path)?;
        }
        // The way to RTS is not the act.
        let mut record = lock(&self.record);
        let cast = std::mem::take(record.ladders.cast_mut());
        record.ladders = Ladders::new(cast);
        record.act = std::time::Instant::now();
        drop(record);
        Ok(pairs)
    }

    /// Shows the ladder of the act.
    fn close(&self) {
        let mut record = lock(&self.record);
        for ladder in record.ladders.ladders() {
            say!("{}", ladder.draw(terminal::style()));
        }
    }
}

const KEY: QueueKey = QueueKey(0x1111_1111);

fn play(file: File) -> Result<(), Failure> {
    let mut capture = CaptureWriter::new(BufWriter::new(file))?;
    let interfaces =
        [capture.add_interface("alice", "SoftHCA demo")?, capture.add_interface("bob", "SoftHCA demo")?];
    let started = std::time::Instant::now();
    let record = Arc::new(Mutex::new(Record {
        started,
        act: started,
        ladders: Ladders::default(),
        capture,
        broken: None,
    }));
    let alice = Host::new("alice", HostId(0), interfaces[0], &record)?;
    let bob = Host::new("bob", HostId(1), interfaces[1], &record)?;
    say!(
        "Two RDMA cards made of software, in one process, talk RoCEv2 over real UDP sockets:\n\
         alice at {}, bob at {}, port 4791. A thick rail is a work request under way.\n",
        alice.device.address(),
        bob.device.address()
    );
    let mut stage = Stage { record, alice, bob, act: 0 };
    sends(&mut stage)?;
    writes(&mut stage)?;
    reads(&mut stage)?;
    atomics(&mut stage)?;
    unreliable(&mut stage)?;
    datagram(&mut stage)?;
    loss(&mut stage)?;
    // The cards go first: they may still hold a packet each.
    let Stage { record, alice, bob, .. } = stage;
    drop((alice, bob));
    let mut record = lock(&record);
    record.capture.flush()?;
    record.broken.take().map_or(Ok(()), |error| Err(error.into()))
}

fn succeed(completion: Completion) -> Result<Completion, Failure> {
    match completion.status.is_success() {
        true => Ok(completion),
        false => Err(format!("a work request ended with {}", completion.status.name()).into()),
    }
}

fn sends(stage: &mut Stage) -> Result<(), Failure> {
    stage.open(
        "SEND: two-sided",
        "Bob posts a receive, alice sends 2500 bytes: three packets at path MTU 1024.
         The last one asks for an acknowledgement; it completes both sides.",
    );
    let [a, b] = stage.cast(QpKind::Rc)?;
    let Stage { alice, bob, .. } = &*stage;
    b.post_receive(&ReceiveRequest { id: 7, scatter: &[bob.region.entry(0, 4096)] })?;
    a.post(&SendRequest::send(1, &[alice.region.entry(0, 2500)]))?;
    succeed(alice.completion()?)?;
    succeed(bob.completion()?)?;
    stage.close();
    Ok(())
}

fn writes(stage: &mut Stage) -> Result<(), Failure> {
    stage.open(
        "RDMA WRITE: one-sided",
        "Alice writes into bob's memory. Bob's program does nothing and hears nothing:
         the first packet names address, key and length, and his card checks all three.",
    );
    let [a, _b] = stage.cast(QpKind::Rc)?;
    let Stage { alice, bob, .. } = &*stage;
    alice.region.write_at(0, b"written by alice");
    a.post(&SendRequest::write(1, &[alice.region.entry(0, 16)], bob.region.remote(64)))?;
    succeed(alice.completion()?)?;
    assert_eq!(bob.region.read_at(64, 16), b"written by alice");
    stage.close();
    Ok(())
}

fn reads(stage: &mut Stage) -> Result<(), Failure> {
    stage.open(
        "RDMA READ: one-sided, the other way",
        "One request takes as many PSNs as the answer has packets; the answer uses them.",
    );
    let [a, _b] = stage.cast(QpKind::Rc)?;
    let Stage { alice, bob, .. } = &*stage;
    bob.region.write_at(0, b"bob's bytes");
    a.post(&SendRequest::read(1, &[alice.region.entry(4096, 2048)], bob.region.remote(0)))?;
    succeed(alice.completion()?)?;
    assert_eq!(alice.region.read_at(4096, 11), b"bob's bytes");
    stage.close();
    Ok(())
}

fn atomics(stage: &mut Stage) -> Result<(), Failure> {
    stage.open(
        "Atomics",
        "Fetch-and-add, then compare-and-swap on eight bytes of bob's memory.
         The answer brings the value that was found.",
    );
    let [a, _b] = stage.cast(QpKind::Rc)?;
    let Stage { alice, bob, .. } = &*stage;
    bob.region.write_at(8, &40u64.to_ne_bytes());
    let result = [alice.region.entry(0, 8)];
    a.post(&SendRequest::fetch_add(1, &result, bob.region.remote(8), 2))?;
    succeed(alice.completion()?)?;
    a.post(&SendRequest::compare_swap(2, &result, bob.region.remote(8), 42, 7))?;
    succeed(alice.completion()?)?;
    assert_eq!((alice.region.load(0), bob.region.load(8)), (42, 7));
    stage.close();
    Ok(())
}

fn unreliable(stage: &mut Stage) -> Result<(), Failure> {
    stage.open(
        "UC: connected, without acknowledgements",
        "The send completes when the packets have left. Nobody would notice a loss but the program.",
    );
    let [a, b] = stage.cast(QpKind::Uc)?;
    let Stage { alice, bob, .. } = &*stage;
    b.post_receive(&ReceiveRequest { id: 7, scatter: &[bob.region.entry(0, 4096)] })?;
    a.post(&SendRequest::send(1, &[alice.region.entry(0, 1500)]))?;
    succeed(alice.completion()?)?;
    succeed(bob.completion()?)?;
    stage.close();
    Ok(())
}

fn datagram(stage: &mut Stage) -> Result<(), Failure> {
    stage.open(
        "UD: datagrams",
        "Every request names its receiver, and a key that lets it in. Forty bytes of
         routing header stand before the data that bob gets.",
    );
    let [a, b] = stage.cast(QpKind::Ud)?;
    let Stage { alice, bob, .. } = &*stage;
    b.post_receive(&ReceiveRequest { id: 7, scatter: &[bob.region.entry(0, 4096)] })?;
    let to = AddressVector::to(Gid::from(bob.device.address()));
    let handle = alice.domain.create_address_handle(to)?;
    let data = [alice.region.entry(0, 100)];
    a.post(&SendRequest::send_immediate(1, &data, 0xcafe).to(&handle, b.number(), KEY))?;
    succeed(alice.completion()?)?;
    let received = succeed(bob.completion()?)?;
    assert_eq!((received.bytes, received.immediate), (140, 0xcafe));
    stage.close();
    Ok(())
}

fn loss(stage: &mut Stage) -> Result<(), Failure> {
    stage.open(
        "A lost packet is fatal",
        "A rule drops the second packet of a WRITE. RDMA expects a network that loses nothing, so
         the gap ends the connection: bob refuses, alice's request fails, the rest is flushed.",
    );
    let [a, b] = stage.cast(QpKind::Rc)?;
    let Stage { alice, bob, .. } = &*stage;
    let (requester, responder) = (alice.endpoint(&a), Some(bob.endpoint(&b)));
    alice.device.add_flow(SEED, Flow { role: Role(1), requester, responder, first_psn: a.endpoint().psn });
    let selector = Selector { role: Some(Role(1)), psn: Some(Span::exactly(1)), ..Selector::default() };
    let rule = Rule { id: LOSE_ONE, selector, repeat: Repeat::times(1), action: Action::Drop };
    alice.device.add_rule(SEED, rule);
    let requests = [(1, 4000), (2, 100)].map(|(id, length)| (id, [alice.region.entry(0, length)]));
    let requests = requests
        .each_ref()
        .map(|(id, entry)| SendRequest::write(*id, entry, bob.region.remote(0)).flags(SendFlags::SIGNALED));
    a.post_all(&requests)?;
    let outcomes = [alice.completion()?, alice.completion()?].map(|completion| completion.status.name());
    if outcomes != ["retry-exceeded", "flushed"] {
        return Err(format!("the loss should have ended the connection, but: {outcomes:?}").into());
    }
    let raised = bob.context.wait_event(PATIENCE);
    stage.close();
    say!("   bob's program also hears of it: {raised:?}\n");
    std::io::stdout().flush()?;
    Ok(())
}
