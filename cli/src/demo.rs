//! `softhca demo`: two emulated hosts over real UDP sockets do everything once, and the ladder of each is shown.

use crate::{EXIT_BAD_INPUT, output, terminal};
use clap::Args;
use softhca::{
    AccessFlags, AddressVector, Completion, CompletionQueue, ConnectOptions, Context, Device,
    EmbeddedOptions, EventSink, MemoryRegion, NetworkEvent, ProtectionDomain, QpType, QueueKey, QueuePair,
    ReceiveRequest, SendFlags, SendRequest,
};
use softhca_engine::Instant;
use softhca_fabric::{
    Action, Endpoint, Flow, FlowId, HostId, InclusiveRange, Repeat, Rule, RuleId, Selector, Stage,
};
use softhca_trace::{CaptureWriter, InterfaceId, LadderBuilder, NameTable, PortTap};
use softhca_wire::Gid;
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

type DemoError = Box<dyn std::error::Error + Send + Sync>;

/// How long a step may take before the demo gives up: nothing here takes a thousandth of it.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(20);
/// The packet that the last act loses, and the rule that loses it.
const DROP_RULE: RuleId = RuleId(1);
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
            return ExitCode::from(EXIT_BAD_INPUT);
        }
    };
    match run_demo(file) {
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
struct Recording {
    /// When the demo began, and when the act did.
    started: std::time::Instant,
    step_started: std::time::Instant,
    ladders: LadderBuilder,
    capture: CaptureWriter<BufWriter<File>>,
    write_error: Option<std::io::Error>,
}

/// One card's pen for the record.
struct RecordingSink {
    recording: Arc<Mutex<Recording>>,
    host: HostId,
    tap: PortTap,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// One clock for both cards: what was told first happened first.
fn elapsed(start: std::time::Instant) -> Instant {
    Instant::from_nanos(start.elapsed().as_nanos() as u64)
}

impl EventSink for RecordingSink {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        let record = &mut *lock(&self.recording);
        let written = match *event {
            NetworkEvent::Hca { event, .. } => {
                record.ladders.record_event(elapsed(record.step_started), self.host, event);
                self.tap.flush_pending(&mut record.capture)
            }
            NetworkEvent::Frame { stage: Stage::Admitted, addressing, packet, .. } => {
                record.ladders.record_frame(elapsed(record.step_started), addressing, packet);
                let now = elapsed(record.started);
                self.tap.packet_sent(&mut record.capture, now.nanos(), addressing, packet)
            }
            NetworkEvent::Fault { fault, .. } => {
                record.ladders.record_fault(None, fault);
                self.tap.add_fault(fault, record.ladders.names_mut());
                Ok(())
            }
            _ => Ok(()),
        };
        record.write_error = record.write_error.take().or(written.err());
    }
}

impl Drop for RecordingSink {
    fn drop(&mut self) {
        let record = &mut *lock(&self.recording);
        let written = self.tap.flush_pending(&mut record.capture);
        record.write_error = record.write_error.take().or(written.err());
    }
}

/// One emulated host, ready to create queue pairs.
struct DemoHost {
    name: &'static str,
    device: Device,
    context: Context,
    domain: ProtectionDomain,
    cq: CompletionQueue,
    region: MemoryRegion,
}

impl DemoHost {
    fn new(
        name: &'static str,
        host: HostId,
        interface: InterfaceId,
        record: &Arc<Mutex<Recording>>,
    ) -> Result<DemoHost, DemoError> {
        let scribe = RecordingSink { recording: record.clone(), host, tap: PortTap::new(interface) };
        let options = EmbeddedOptions { event_sink: Box::new(scribe), ..EmbeddedOptions::default() };
        let device = Device::embedded_with(options)?;
        let context = device.open();
        let domain = context.allocate_protection_domain()?;
        let queue = context.create_completion_queue(64)?;
        let rights = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_ATOMIC;
        let region = domain.allocate_region(8192, rights)?;
        Ok(DemoHost { name, device, context, domain, cq: queue, region })
    }

    fn queue_pair(&self, kind: QpType) -> Result<QueuePair, DemoError> {
        Ok(self.domain.create_queue_pair(kind, &self.cq).build()?)
    }

    fn endpoint(&self, pair: &QueuePair) -> Endpoint {
        Endpoint { address: self.device.address(), qpn: pair.qpn() }
    }

    fn completion(&self) -> Result<Completion, DemoError> {
        self.cq
            .wait_for(COMPLETION_TIMEOUT)
            .ok_or_else(|| format!("{} waited in vain for a completion", self.name).into())
    }
}

/// The two hosts and what is told of them.
struct Demo {
    recording: Arc<Mutex<Recording>>,
    alice: DemoHost,
    bob: DemoHost,
    step: u32,
}

impl Demo {
    /// Announces an act: what will be seen, and why.
    fn begin_step(&mut self, title: &str, text: &str) {
        self.step += 1;
        say!("{}. {title}\n", self.step);
        for line in text.lines() {
            say!("   {}", line.trim());
        }
        say!("");
    }

    /// Two queue pairs of the act, named for the ladder, connected if they can be.
    fn connect_queue_pairs(&self, kind: QpType) -> Result<[QueuePair; 2], DemoError> {
        let pairs = [self.alice.queue_pair(kind)?, self.bob.queue_pair(kind)?];
        let ends = [self.alice.endpoint(&pairs[0]), self.bob.endpoint(&pairs[1])];
        let mut record = lock(&self.recording);
        let mut cast = NameTable::new();
        for (index, host) in [&self.alice, &self.bob].into_iter().enumerate() {
            cast.add_host(HostId(index as u32), host.name, host.device.address());
            cast.add_queue_pair(ends[index], host.name);
            cast.set_first_psn(ends[index], pairs[index].endpoint().psn);
        }
        cast.connect(ends[0], ends[1]);
        cast.add_rule(DROP_RULE, "lose the second packet");
        record.ladders = LadderBuilder::new(cast);
        drop(record);
        if kind.is_datagram() {
            pairs.iter().try_for_each(|pair| pair.start_ud(QKEY))?;
        } else {
            let path = ConnectOptions::default();
            pairs[0].connect(&pairs[1].endpoint(), &path)?;
            pairs[1].connect(&pairs[0].endpoint(), &path)?;
        }
        // The way to RTS is not the act.
        let mut record = lock(&self.recording);
        let cast = std::mem::take(record.ladders.names_mut());
        record.ladders = LadderBuilder::new(cast);
        record.step_started = std::time::Instant::now();
        drop(record);
        Ok(pairs)
    }

    /// Shows the ladder of the act.
    fn print_ladder(&self) {
        let mut record = lock(&self.recording);
        for ladder in record.ladders.ladders() {
            say!("{}", ladder.draw(terminal::style()));
        }
    }
}

const QKEY: QueueKey = QueueKey(0x1111_1111);

fn run_demo(file: File) -> Result<(), DemoError> {
    let mut capture = CaptureWriter::new(BufWriter::new(file))?;
    let interfaces =
        [capture.add_interface("alice", "SoftHCA demo")?, capture.add_interface("bob", "SoftHCA demo")?];
    let started = std::time::Instant::now();
    let record = Arc::new(Mutex::new(Recording {
        started,
        step_started: started,
        ladders: LadderBuilder::default(),
        capture,
        write_error: None,
    }));
    let alice = DemoHost::new("alice", HostId(0), interfaces[0], &record)?;
    let bob = DemoHost::new("bob", HostId(1), interfaces[1], &record)?;
    say!(
        "Two RDMA cards made of software, in one process, talk RoCEv2 over real UDP sockets:\n\
         alice at {}, bob at {}, port 4791. A thick rail is a work request under way.\n",
        alice.device.address(),
        bob.device.address()
    );
    let mut stage = Demo { recording: record, alice, bob, step: 0 };
    sends(&mut stage)?;
    writes(&mut stage)?;
    reads(&mut stage)?;
    atomics(&mut stage)?;
    unreliable(&mut stage)?;
    datagram(&mut stage)?;
    loss(&mut stage)?;
    // The cards go first: they may still hold a packet each.
    let Demo { recording: record, alice, bob, .. } = stage;
    drop((alice, bob));
    let mut record = lock(&record);
    record.capture.flush()?;
    record.write_error.take().map_or(Ok(()), |error| Err(error.into()))
}

fn check_success(completion: Completion) -> Result<Completion, DemoError> {
    match completion.status.is_success() {
        true => Ok(completion),
        false => Err(format!("a work request ended with {}", completion.status.name()).into()),
    }
}

fn sends(stage: &mut Demo) -> Result<(), DemoError> {
    stage.begin_step(
        "SEND: two-sided",
        "Bob posts a receive, alice sends 2500 bytes: three packets at path MTU 1024.
         The last one asks for an acknowledgement; it completes both sides.",
    );
    let [a, b] = stage.connect_queue_pairs(QpType::Rc)?;
    let Demo { alice, bob, .. } = &*stage;
    b.post_recv(&ReceiveRequest { wr_id: 7, sg_list: &[bob.region.sge(0, 4096)] })?;
    a.post_send(&SendRequest::send(1, &[alice.region.sge(0, 2500)]))?;
    check_success(alice.completion()?)?;
    check_success(bob.completion()?)?;
    stage.print_ladder();
    Ok(())
}

fn writes(stage: &mut Demo) -> Result<(), DemoError> {
    stage.begin_step(
        "RDMA WRITE: one-sided",
        "Alice writes into bob's memory. Bob's program does nothing and hears nothing:
         the first packet names address, key and length, and his card checks all three.",
    );
    let [a, _b] = stage.connect_queue_pairs(QpType::Rc)?;
    let Demo { alice, bob, .. } = &*stage;
    alice.region.write_at(0, b"written by alice");
    a.post_send(&SendRequest::rdma_write(1, &[alice.region.sge(0, 16)], bob.region.remote_address(64)))?;
    check_success(alice.completion()?)?;
    assert_eq!(bob.region.read_at(64, 16), b"written by alice");
    stage.print_ladder();
    Ok(())
}

fn reads(stage: &mut Demo) -> Result<(), DemoError> {
    stage.begin_step(
        "RDMA READ: one-sided, the other way",
        "One request takes as many PSNs as the answer has packets; the answer uses them.",
    );
    let [a, _b] = stage.connect_queue_pairs(QpType::Rc)?;
    let Demo { alice, bob, .. } = &*stage;
    bob.region.write_at(0, b"bob's bytes");
    a.post_send(&SendRequest::rdma_read(1, &[alice.region.sge(4096, 2048)], bob.region.remote_address(0)))?;
    check_success(alice.completion()?)?;
    assert_eq!(alice.region.read_at(4096, 11), b"bob's bytes");
    stage.print_ladder();
    Ok(())
}

fn atomics(stage: &mut Demo) -> Result<(), DemoError> {
    stage.begin_step(
        "Atomics",
        "Fetch-and-add, then compare-and-swap on eight bytes of bob's memory.
         The answer brings the value that was found.",
    );
    let [a, _b] = stage.connect_queue_pairs(QpType::Rc)?;
    let Demo { alice, bob, .. } = &*stage;
    bob.region.write_at(8, &40u64.to_ne_bytes());
    let result = [alice.region.sge(0, 8)];
    a.post_send(&SendRequest::fetch_and_add(1, &result, bob.region.remote_address(8), 2))?;
    check_success(alice.completion()?)?;
    a.post_send(&SendRequest::compare_and_swap(2, &result, bob.region.remote_address(8), 42, 7))?;
    check_success(alice.completion()?)?;
    assert_eq!((alice.region.load(0), bob.region.load(8)), (42, 7));
    stage.print_ladder();
    Ok(())
}

fn unreliable(stage: &mut Demo) -> Result<(), DemoError> {
    stage.begin_step(
        "UC: connected, without acknowledgements",
        "The send completes when the packets have left. Nobody would notice a loss but the program.",
    );
    let [a, b] = stage.connect_queue_pairs(QpType::Uc)?;
    let Demo { alice, bob, .. } = &*stage;
    b.post_recv(&ReceiveRequest { wr_id: 7, sg_list: &[bob.region.sge(0, 4096)] })?;
    a.post_send(&SendRequest::send(1, &[alice.region.sge(0, 1500)]))?;
    check_success(alice.completion()?)?;
    check_success(bob.completion()?)?;
    stage.print_ladder();
    Ok(())
}

fn datagram(stage: &mut Demo) -> Result<(), DemoError> {
    stage.begin_step(
        "UD: datagrams",
        "Every request names its receiver, and a key that lets it in. Forty bytes of
         routing header stand before the data that bob gets.",
    );
    let [a, b] = stage.connect_queue_pairs(QpType::Ud)?;
    let Demo { alice, bob, .. } = &*stage;
    b.post_recv(&ReceiveRequest { wr_id: 7, sg_list: &[bob.region.sge(0, 4096)] })?;
    let to = AddressVector::to(Gid::from(bob.device.address()));
    let handle = alice.domain.create_address_handle(to)?;
    let data = [alice.region.sge(0, 100)];
    a.post_send(&SendRequest::send_with_imm(1, &data, 0xcafe).ud_address(&handle, b.qpn(), QKEY))?;
    check_success(alice.completion()?)?;
    let received = check_success(bob.completion()?)?;
    assert_eq!((received.byte_len, received.imm_data), (140, 0xcafe));
    stage.print_ladder();
    Ok(())
}

fn loss(stage: &mut Demo) -> Result<(), DemoError> {
    stage.begin_step(
        "A lost packet is fatal",
        "A rule drops the second packet of a WRITE. RDMA expects a network that loses nothing, so
         the gap ends the connection: bob refuses, alice's request fails, the rest is flushed.",
    );
    let [a, b] = stage.connect_queue_pairs(QpType::Rc)?;
    let Demo { alice, bob, .. } = &*stage;
    let (requester, responder) = (alice.endpoint(&a), Some(bob.endpoint(&b)));
    alice.device.add_flow(SEED, Flow { id: FlowId(1), requester, responder, first_psn: a.endpoint().psn });
    let selector =
        Selector { flow_id: Some(FlowId(1)), psn: Some(InclusiveRange::exactly(1)), ..Selector::default() };
    let rule = Rule { id: DROP_RULE, selector, repeat: Repeat::times(1), action: Action::Drop };
    alice.device.add_rule(SEED, rule);
    let requests = [(1, 4000), (2, 100)].map(|(id, length)| (id, [alice.region.sge(0, length)]));
    let requests = requests.each_ref().map(|(id, entry)| {
        SendRequest::rdma_write(*id, entry, bob.region.remote_address(0)).flags(SendFlags::SIGNALED)
    });
    a.post_send_list(&requests)?;
    let outcomes = [alice.completion()?, alice.completion()?].map(|completion| completion.status.name());
    if outcomes != ["retry-exceeded", "flushed"] {
        return Err(format!("the loss should have ended the connection, but: {outcomes:?}").into());
    }
    let raised = bob.context.wait_async_event(COMPLETION_TIMEOUT);
    stage.print_ladder();
    say!("   bob's program also hears of it: {raised:?}\n");
    std::io::stdout().flush()?;
    Ok(())
}
