//! `softhca demo`: runs every operation between two emulated hosts over real UDP sockets and prints the ladders.

use crate::exit_code::{CommandResult, bad_input, failure};
use crate::{output, terminal};
use clap::Args;
use softhca::{
    AccessFlags, AddressVector, Completion, CompletionQueue, ConnectOptions, Context, Device,
    EmbeddedOptions, MemoryRegion, ProtectionDomain, QpType, QueueKey, QueuePair, ReceiveRequest, SendFlags,
    SendRequest,
};
use softhca_fabric::{
    Action, Endpoint, Flow, FlowId, HostId, IdOffsets, InclusiveRange, Repeat, Rule, RuleId, Selector,
};
use softhca_trace::{CapturePoints, CardRecorder, NameTable, Recording};
use softhca_wire::Gid;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Arguments of `softhca demo`.
#[derive(Args)]
pub struct Arguments {
    /// File for the capture [default: a file in the temporary directory]
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
}

type DemoError = Box<dyn std::error::Error + Send + Sync>;

/// The timeout of a step, far longer than any step takes.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(20);
/// The fault rule of the last step.
const DROP_RULE: RuleId = RuleId(1);
const SEED: u64 = 1;

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    let created = match &arguments.capture {
        Some(path) => output::create("--capture", path).map(|file| (path.clone(), file)),
        None => {
            let path = output::unpredictable_path("softhca-demo-", ".pcapng");
            let file = output::create_new(&path);
            file.map_err(|error| output::write_error("--capture", &path, &error)).map(|file| (path, file))
        }
    };
    let (path, file) = created.map_err(bad_input)?;
    run_demo(file).map_err(failure)?;
    outln!("capture: {}", path.display());
    Ok(ExitCode::SUCCESS)
}

/// The events and packets of both devices.
type SharedRecording = Arc<Mutex<Recording<BufWriter<File>>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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
        recording: &SharedRecording,
        started: Instant,
    ) -> Result<DemoHost, DemoError> {
        let sink = CardRecorder::new(recording.clone(), IdOffsets::of_card(host), started);
        let options = EmbeddedOptions { event_sink: Box::new(sink), ..EmbeddedOptions::default() };
        let device = Device::embedded_with(options)?;
        let address = device.address();
        lock(recording).name(|names| names.add_card(host, name, address));
        let context = device.open();
        let domain = context.allocate_protection_domain()?;
        let cq = context.create_completion_queue(64)?;
        let rights = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_ATOMIC;
        let region = domain.allocate_region(8192, rights)?;
        Ok(DemoHost { name, device, context, domain, cq, region })
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
            .ok_or_else(|| format!("{} received no completion in time", self.name).into())
    }
}

/// The two hosts and the recording.
struct Demo {
    recording: SharedRecording,
    started: Instant,
    alice: DemoHost,
    bob: DemoHost,
    step: u32,
}

impl Demo {
    /// Prints the introduction of a step, runs it on two connected queue pairs, and prints its ladder.
    fn step(
        &mut self,
        title: &str,
        text: &str,
        kind: QpType,
        run: impl FnOnce(&DemoHost, &DemoHost, &[QueuePair; 2]) -> Result<(), DemoError>,
    ) -> Result<(), DemoError> {
        self.step += 1;
        outln!("{}. {title}\n", self.step);
        for line in text.lines() {
            outln!("   {}", line.trim());
        }
        outln!("");
        let (pairs, start) = self.connect_queue_pairs(kind)?;
        run(&self.alice, &self.bob, &pairs)?;
        for mut ladder in lock(&self.recording).ladders() {
            ladder.steps.iter_mut().for_each(|step| step.time_ns -= start.as_nanos() as i64);
            outln!("{}", ladder.draw(terminal::style()));
        }
        Ok(())
    }

    /// Creates two queue pairs, names them for the ladder, and connects them unless they are UD. Returns the time at which
    /// the ladder starts, after the transitions to RTS.
    fn connect_queue_pairs(&self, kind: QpType) -> Result<([QueuePair; 2], Duration), DemoError> {
        let pairs = [self.alice.queue_pair(kind)?, self.bob.queue_pair(kind)?];
        let ends = [self.alice.endpoint(&pairs[0]), self.bob.endpoint(&pairs[1])];
        // A verb of a card waits for its recorder.
        let first_psns = [0, 1].map(|index: usize| pairs[index].endpoint().psn);
        lock(&self.recording).name(|names| {
            for (index, host) in [&self.alice, &self.bob].into_iter().enumerate() {
                names.add_queue_pair(ends[index], host.name);
                names.set_first_psn(ends[index], first_psns[index]);
            }
            names.connect(ends[0], ends[1]);
        });
        if kind.is_datagram() {
            pairs.iter().try_for_each(|pair| pair.start_ud(QKEY))?;
        } else {
            let path = ConnectOptions::default();
            pairs[0].connect(&pairs[1].endpoint(), &path)?;
            pairs[1].connect(&pairs[0].endpoint(), &path)?;
        }
        lock(&self.recording).start_ladders();
        Ok((pairs, self.started.elapsed()))
    }
}

const QKEY: QueueKey = QueueKey(0x1111_1111);

fn run_demo(file: File) -> Result<(), DemoError> {
    let started = Instant::now();
    let mut names = NameTable::new();
    names.add_rule(DROP_RULE, "lose the second packet");
    let recording = Recording::new(names).with_capture(BufWriter::new(file), CapturePoints::Senders)?;
    let recording = Arc::new(Mutex::new(recording));
    let alice = DemoHost::new("alice", HostId(0), &recording, started)?;
    let bob = DemoHost::new("bob", HostId(1), &recording, started)?;
    outln!(
        "Two software RDMA devices in one process exchange RoCEv2 packets over UDP sockets:\n\
         alice at {}, bob at {}, port 4791. A thick line marks a work request in progress.\n",
        alice.device.address(),
        bob.device.address()
    );
    let mut demo = Demo { recording, started, alice, bob, step: 0 };
    sends(&mut demo)?;
    writes(&mut demo)?;
    reads(&mut demo)?;
    atomics(&mut demo)?;
    unreliable(&mut demo)?;
    datagram(&mut demo)?;
    loss(&mut demo)?;
    // Drop the devices first: each may still hold a packet.
    let Demo { recording, alice, bob, .. } = demo;
    drop((alice, bob));
    lock(&recording).finish()?;
    Ok(())
}

fn check_success(completion: Completion) -> Result<Completion, DemoError> {
    match completion.status.is_success() {
        true => Ok(completion),
        false => Err(format!("a work request ended with {}", completion.status.name()).into()),
    }
}

fn sends(demo: &mut Demo) -> Result<(), DemoError> {
    let text = "Bob posts a receive and alice sends 2500 bytes: three packets at path MTU 1024.
         The last packet requests an ACK, which completes the send.";
    demo.step("SEND: two-sided", text, QpType::Rc, |alice, bob, [a, b]| {
        b.post_recv(&ReceiveRequest { wr_id: 7, sg_list: &[bob.region.sge(0, 4096)] })?;
        a.post_send(&SendRequest::send(1, &[alice.region.sge(0, 2500)]))?;
        check_success(alice.completion()?)?;
        check_success(bob.completion()?).map(drop)
    })
}

fn writes(demo: &mut Demo) -> Result<(), DemoError> {
    let text = "Alice writes to bob's memory; bob's program is not involved. The first packet carries
         address, rkey and length (RETH), and bob's device checks all three.";
    demo.step("RDMA WRITE: one-sided", text, QpType::Rc, |alice, bob, [a, _]| {
        alice.region.write_at(0, b"written by alice");
        let remote = bob.region.remote_address(64);
        a.post_send(&SendRequest::rdma_write(1, &[alice.region.sge(0, 16)], remote))?;
        check_success(alice.completion()?)?;
        assert_eq!(bob.region.read_at(64, 16), b"written by alice");
        Ok(())
    })
}

fn reads(demo: &mut Demo) -> Result<(), DemoError> {
    let text = "One request consumes as many PSNs as the response has packets; the response uses them.";
    demo.step("RDMA READ: one-sided, the other way", text, QpType::Rc, |alice, bob, [a, _]| {
        bob.region.write_at(0, b"bob's bytes");
        let remote = bob.region.remote_address(0);
        a.post_send(&SendRequest::rdma_read(1, &[alice.region.sge(4096, 2048)], remote))?;
        check_success(alice.completion()?)?;
        assert_eq!(alice.region.read_at(4096, 11), b"bob's bytes");
        Ok(())
    })
}

fn atomics(demo: &mut Demo) -> Result<(), DemoError> {
    let text = "Fetch-and-add, then compare-and-swap on eight bytes of bob's memory.
         The response returns the original value.";
    demo.step("Atomics", text, QpType::Rc, |alice, bob, [a, _]| {
        bob.region.write_at(8, &40u64.to_ne_bytes());
        let result = [alice.region.sge(0, 8)];
        a.post_send(&SendRequest::fetch_and_add(1, &result, bob.region.remote_address(8), 2))?;
        check_success(alice.completion()?)?;
        a.post_send(&SendRequest::compare_and_swap(2, &result, bob.region.remote_address(8), 42, 7))?;
        check_success(alice.completion()?)?;
        assert_eq!((alice.region.load(0), bob.region.load(8)), (42, 7));
        Ok(())
    })
}

fn unreliable(demo: &mut Demo) -> Result<(), DemoError> {
    let text = "The send completes when its packets have been sent. The transport does not detect loss.";
    demo.step("UC: connected, without acknowledgements", text, QpType::Uc, |alice, bob, [a, b]| {
        b.post_recv(&ReceiveRequest { wr_id: 7, sg_list: &[bob.region.sge(0, 4096)] })?;
        a.post_send(&SendRequest::send(1, &[alice.region.sge(0, 1500)]))?;
        check_success(alice.completion()?)?;
        check_success(bob.completion()?).map(drop)
    })
}

fn datagram(demo: &mut Demo) -> Result<(), DemoError> {
    let text = "Every request carries an address handle, a destination QP and a Q_Key. Bob receives a
         40-byte GRH before the data.";
    demo.step("UD: datagrams", text, QpType::Ud, |alice, bob, [a, b]| {
        b.post_recv(&ReceiveRequest { wr_id: 7, sg_list: &[bob.region.sge(0, 4096)] })?;
        let to = AddressVector::to(Gid::from(bob.device.address()));
        let handle = alice.domain.create_address_handle(to)?;
        let data = [alice.region.sge(0, 100)];
        a.post_send(&SendRequest::send_with_imm(1, &data, 0xcafe).ud_address(&handle, b.qpn(), QKEY))?;
        check_success(alice.completion()?)?;
        let received = check_success(bob.completion()?)?;
        assert_eq!((received.byte_len, received.imm_data), (140, 0xcafe));
        Ok(())
    })
}

fn loss(demo: &mut Demo) -> Result<(), DemoError> {
    let text =
        "A fault rule drops the second packet of a WRITE. Recovery is `fatal`, as in a lossless network:
         bob sends a NAK, alice's request fails, and the remaining requests are flushed.";
    let mut raised = None;
    demo.step("A lost packet is fatal", text, QpType::Rc, |alice, bob, [a, b]| {
        let (id, first_psn) = (FlowId(1), a.endpoint().psn);
        let (requester, responder) = (alice.endpoint(a), Some(bob.endpoint(b)));
        alice.device.add_flow(SEED, Flow { id, requester, responder, first_psn });
        let psn = Some(InclusiveRange::exactly(1));
        let selector = Selector { flow_id: Some(id), psn, ..Selector::default() };
        let rule = Rule { id: DROP_RULE, selector, repeat: Repeat::times(1), action: Action::Drop };
        alice.device.add_rule(SEED, rule);
        let requests = [(1, 4000), (2, 100)].map(|(id, length)| (id, [alice.region.sge(0, length)]));
        let requests = requests.each_ref().map(|(id, entry)| {
            SendRequest::rdma_write(*id, entry, bob.region.remote_address(0)).flags(SendFlags::SIGNALED)
        });
        a.post_send_list(&requests)?;
        let outcomes = [alice.completion()?, alice.completion()?].map(|completion| completion.status.name());
        if outcomes != ["RETRY_EXC_ERR", "WR_FLUSH_ERR"] {
            return Err(format!("expected the loss to break the connection, got {outcomes:?}").into());
        }
        raised = bob.context.wait_async_event(COMPLETION_TIMEOUT);
        Ok(())
    })?;
    let raised = raised.ok_or("bob received no asynchronous event in time")?;
    outln!("   bob's program gets the asynchronous event IBV_EVENT_{}\n", raised.name());
    std::io::stdout().flush()?;
    Ok(())
}
