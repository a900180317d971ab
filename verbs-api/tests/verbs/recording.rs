//! The event log and the capture of embedded devices.

use softhca::sim::{EcnMarking, LinkSettings, PfcSettings, ReceiverSettings, SwitchSettings};
use softhca::{
    AccessFlags, CompletionQueue, CompletionStatus, ConnectOptions, Context, Device, EmbeddedOptions, Error,
    MemoryRegion, PortSwitch, QpType, QueuePair, ReceiveRequest, RnrTimer, SendRequest,
};
use softhca_fabric::{Action, Repeat, Rule, RuleId, Selector};
use softhca_trace::log::{Entry, LogEvent};
use softhca_trace::why::{LogAnalyzer, Query};
use softhca_trace::{CaptureReader, EventLogReader};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufReader;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A folder of this test, which is empty.
fn folder(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Writes to memory of a peer that allows no writes.
fn fail(options: impl Fn() -> EmbeddedOptions) -> Result<(), Error> {
    let devices = [Device::embedded_with(options())?, Device::embedded_with(options())?];
    let contexts = [devices[0].open(), devices[1].open()];
    let domains = [contexts[0].allocate_protection_domain()?, contexts[1].allocate_protection_domain()?];
    let queues = [contexts[0].create_completion_queue(8)?, contexts[1].create_completion_queue(8)?];
    let regions = [
        domains[0].allocate_region(64, AccessFlags::LOCAL_WRITE)?,
        domains[1].allocate_region(64, AccessFlags::LOCAL_WRITE)?,
    ];
    let pairs = [
        domains[0].create_queue_pair(QpType::Rc, &queues[0]).build()?,
        domains[1].create_queue_pair(QpType::Rc, &queues[1]).build()?,
    ];
    pairs[0].connect_both(&pairs[1], &ConnectOptions::default())?;
    pairs[0].post_send(&SendRequest::rdma_write(7, &[regions[0].sge(0, 8)], regions[1].remote_address(0)))?;
    let completion = queues[0].wait_for(Duration::from_secs(20)).expect("a completion");
    assert_eq!(completion.status, CompletionStatus::RemoteAccessError);
    Ok(())
}

fn explain(log: &Path) -> String {
    let reader = EventLogReader::new(BufReader::new(File::open(log).unwrap())).unwrap();
    let mut analyzer = LogAnalyzer::new(reader.header());
    reader.for_each(|entry| analyzer.push(entry.unwrap()));
    let text = analyzer.diagnose(&Query::default()).unwrap().to_string();
    // Without line breaks.
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn check(log: &Path, capture: &Path) {
    let text = explain(log);
    assert!(text.contains("ended with REM_ACCESS_ERR"), "{text}");
    assert!(text.contains("allows LOCAL_WRITE; the access requires REMOTE_WRITE"), "{text}");
    let packets = CaptureReader::new(BufReader::new(File::open(capture).unwrap())).unwrap();
    assert!(packets.filter(|packet| packet.is_ok()).count() >= 2, "a WRITE and a NAK");
}

#[test]
fn options_name_the_log_and_the_capture() {
    let folder = folder("options_name_the_log_and_the_capture");
    let (log, capture) = (folder.join("events.jsonl"), folder.join("packets.pcapng"));
    let options = || EmbeddedOptions {
        log: Some(log.clone()),
        capture: Some(capture.clone()),
        ..EmbeddedOptions::default()
    };
    fail(options).unwrap();
    check(&log, &capture);
}

/// A device with a queue pair.
struct End {
    device: Device,
    _context: Context,
    queue: CompletionQueue,
    region: MemoryRegion,
    pair: QueuePair,
}

impl End {
    fn new(options: EmbeddedOptions) -> End {
        let device = Device::embedded_with(options).unwrap();
        let context = device.open();
        let domain = context.allocate_protection_domain().unwrap();
        let queue = context.create_completion_queue(8).unwrap();
        let rights = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let region = domain.allocate_region(1 << 19, rights).unwrap();
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build().unwrap();
        End { device, _context: context, queue, region, pair }
    }

    /// Writes to the memory of the peer. Returns the status.
    fn write(&self, peer: &End) -> CompletionStatus {
        let (local, remote) = (self.region.sge(0, 1 << 19), peer.region.remote_address(0));
        self.pair.post_send(&SendRequest::rdma_write(1, &[local], remote)).unwrap();
        self.queue.wait_for(TIMEOUT).expect("a completion").status
    }
}

const TIMEOUT: Duration = Duration::from_secs(60);

/// Two connected devices with the same files.
fn connected(folder: &Path, switch: Option<PortSwitch>, path: &ConnectOptions) -> [End; 2] {
    let options = |switch| EmbeddedOptions {
        log: Some(folder.join("events.jsonl")),
        capture: Some(folder.join("packets.pcapng")),
        switch,
        ..EmbeddedOptions::default()
    };
    let ends = [End::new(options(None)), End::new(options(switch))];
    ends[0].pair.connect_both(&ends[1].pair, path).unwrap();
    ends
}

/// The entries of a log that is still written.
fn entries(folder: &Path) -> Vec<Entry> {
    let file = File::open(folder.join("events.jsonl")).unwrap();
    EventLogReader::new(BufReader::new(file)).unwrap().map_while(Result::ok).collect()
}

#[test]
fn the_end_of_an_rnr_wait_is_in_the_clock_of_the_log() {
    // The clock of the process starts before that of the cards.
    let _earlier = Device::embedded().unwrap();
    let folder = folder("the_end_of_an_rnr_wait_is_in_the_clock_of_the_log");
    let timer = RnrTimer::new(24);
    let path = ConnectOptions {
        min_rnr_timer: timer,
        rnr_retry: ConnectOptions::RNR_RETRY_INFINITE,
        ..ConnectOptions::default()
    };
    let [alice, bob] = connected(&folder, None, &path);
    alice.pair.post_send(&SendRequest::send(1, &[alice.region.sge(0, 8)])).unwrap();
    let deadline = std::time::Instant::now() + TIMEOUT;
    let (time, until) = loop {
        let wait = entries(&folder).into_iter().find_map(|entry| match entry.event {
            LogEvent::RnrWaitStarted { until, .. } => Some((entry.time, until)),
            _ => None,
        });
        if let Some(wait) = wait {
            break wait;
        }
        assert!(std::time::Instant::now() < deadline, "no RNR NAK");
        assert!(alice.queue.poll().is_none(), "no receive is posted");
    };
    // The event is at the time of its packet in the card's clock: it is logged at once, but not before.
    assert_eq!(until - time, timer.nanoseconds());
    bob.pair.post_recv(&ReceiveRequest { wr_id: 2, sg_list: &[bob.region.sge(0, 8)] }).unwrap();
    assert!(alice.queue.wait_for(TIMEOUT).expect("a completion").status.is_success());
}

/// Bob's port receives slowly: it pauses his switch, whose queue grows.
#[test]
fn the_marks_and_pauses_of_a_switch_are_in_the_log_with_its_name() {
    let folder = folder("the_marks_and_pauses_of_a_switch_are_in_the_log_with_its_name");
    let line = LinkSettings {
        bits_per_second: NonZeroU64::new(1_000_000_000),
        delay_ns: 1_000,
        ..LinkSettings::default()
    };
    let settings = SwitchSettings {
        ecn_marking: Some(EcnMarking { kmin: 0, kmax: 1, pmax_per_billion: 0 }),
        pfc: Some(PfcSettings { xoff: 16_384, xon: 14_336, ..PfcSettings::default() }),
        ..SwitchSettings::default()
    };
    let receiver = ReceiverSettings { bits_per_second: Some(20_000_000), ..ReceiverSettings::default() };
    let path = ConnectOptions { traffic_class: 3 << 5 | 2, ..ConnectOptions::default() };
    let [alice, bob] = connected(&folder, Some(PortSwitch { line, settings, receiver }), &path);
    let deadline = std::time::Instant::now() + TIMEOUT;
    // A sender that is rarely scheduled does not fill the queue, so retry.
    loop {
        assert_eq!(alice.write(&bob), CompletionStatus::Success);
        let entries = entries(&folder);
        let of_switch = entries.iter().filter(|entry| entry.host == "s1");
        let names: BTreeSet<_> = of_switch.map(|entry| entry.event.name()).collect();
        if ["fabric:ecn_marked", "fabric:pause_sent"].iter().all(|name| names.contains(name)) {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{names:?}");
    }
}

#[test]
fn a_fault_has_the_name_of_its_rule() {
    let folder = folder("a_fault_has_the_name_of_its_rule");
    let [alice, bob] = connected(&folder, None, &ConnectOptions::default());
    let id = RuleId(3);
    alice.device.name_rule(id, "lose the first packet");
    let (selector, repeat) = (Selector::default(), Repeat::times(1));
    alice.device.add_rule(1, Rule { id, selector, repeat, action: Action::Drop });
    assert_ne!(alice.write(&bob), CompletionStatus::Success, "a loss is fatal");
    let faults = entries(&folder).into_iter().filter(|entry| matches!(entry.event, LogEvent::Fault { .. }));
    let texts: Vec<_> = faults.filter_map(|entry| entry.trigger).collect();
    assert_eq!(texts, ["dropped by \"lose the first packet\""]);
    drop((alice, bob));
    let capture = std::fs::read(folder.join("packets.pcapng")).unwrap();
    let comment = texts[0].as_bytes();
    assert_eq!(capture.windows(comment.len()).filter(|bytes| *bytes == comment).count(), 1);
}

#[test]
fn the_environment_names_the_log_and_the_capture() {
    let folder = folder("the_environment_names_the_log_and_the_capture");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "recording::program", "--ignored"])
        .env("SOFTHCA_LOG", folder.join("%p.jsonl"))
        .env("SOFTHCA_CAPTURE", folder.join("packets.pcapng"))
        .spawn()
        .unwrap();
    let log = folder.join(format!("{}.jsonl", child.id()));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    check(&log, &folder.join("packets.pcapng"));
}

/// The program of the test above.
#[test]
#[ignore = "another test runs it with an environment of its own"]
fn program() {
    fail(EmbeddedOptions::default).unwrap();
}

#[test]
fn a_log_that_cannot_be_written_is_an_error_with_its_path() {
    let options = EmbeddedOptions { log: Some("/nowhere/events.jsonl".into()), ..EmbeddedOptions::default() };
    let error = Device::embedded_with(options).err().expect("no such folder").to_string();
    assert!(error.contains("/nowhere/events.jsonl"), "{error}");
}
