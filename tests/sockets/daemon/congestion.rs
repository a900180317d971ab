//! Congestion on daemon hosts: a switch within one daemon, ECN marks and pauses between two.

use super::data::ConnectedHost;
use super::process::{TEST_TIMEOUT, TestDaemon};
use softhca::{
    ConnectOptions, DaemonControl, SendRequest,
    fault::{Action, PacketClasses, Repeat, Rule, RuleId, Selector},
};
use softhca_trace::log::{Entry, LogEvent};
use softhca_trace::{CaptureReader, EventLogReader, Packet, PacketContents, Record};
use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// A connection on priority 3.
fn connect(ends: &[ConnectedHost; 2]) {
    let path = ConnectOptions { traffic_class: 3 << 5, ..ConnectOptions::default() };
    ends[0].pair.connect(&ends[1].pair.endpoint(), &path).unwrap();
    ends[1].pair.connect(&ends[0].pair.endpoint(), &path).unwrap();
}

fn counter(control: &mut DaemonControl, host: &str, name: &str) -> u64 {
    let counters = control.counters(Some(host)).unwrap();
    counters.iter().find(|(known, _)| *known == name).expect("a counter").1
}

/// Waits until a counter is not 0.
fn wait_for(control: &mut DaemonControl, host: &str, name: &str) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while counter(control, host, name) == 0 {
        assert!(Instant::now() < deadline, "{name} of {host} stays zero");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bob receives at a fiftieth of Alice's rate. His port pauses the switch, the switch marks queued packets and pauses
/// Alice, Bob's device sends CNPs, and Alice's rate drops. Nothing is lost: loss would be fatal.
#[test]
fn a_slow_host_behind_a_switch_slows_its_sender_without_loss() {
    let subnet = format!("127.97.{}", std::process::id() % 250 + 1);
    let config = format!(
        "congestion = 'dcqcn'\n[hosts]\nalice = '{subnet}.2'\nbob = '{subnet}.3'\n[fabric]\ntopology = 'star'\n\
         rate_gbit = 1\nreceive_gbit = {{ bob = 0.02 }}\necn = {{ kmin = 1000, kmax = 2000, pmax = 1.0 }}\n\
         pfc = {{ xoff = 16384 }}\n"
    );
    let daemon = TestDaemon::with(&[("TEST_CONFIG", &config)]);
    let mut control = daemon.control();
    let folder = std::env::temp_dir().join(format!("softhca-{}", daemon.name));
    let paths = ["pcapng", "jsonl"].map(|kind| folder.with_extension(kind));
    let [capture, log] = paths.each_ref().map(|path| File::create(path).unwrap());
    control.start_recording(Some(capture.as_fd()), Some(log.as_fd())).unwrap();
    let ends = [
        ConnectedHost::new(&daemon.open("alice"), 1 << 20),
        ConnectedHost::new(&daemon.open("bob"), 1 << 20),
    ];
    connect(&ends);
    // A sender that is rarely scheduled does not fill the queue, so retry.
    let deadline = Instant::now() + TEST_TIMEOUT;
    let signs = [("bob", "np_ecn_marked_roce_packets"), ("bob", "np_cnp_sent"), ("alice", "rx_pause_frames")];
    let mut rounds = 0;
    // More than all that Bob grants at once: what has passed the switch makes room again.
    while rounds < 4 || signs.iter().any(|(host, name)| counter(&mut control, host, name) == 0) {
        assert!(Instant::now() < deadline, "the queue never fills");
        rounds += 1;
        for id in 0..16 {
            let gather = [ends[0].region.sge(id * 65_536, 65_536)];
            let remote = ends[1].region.remote_address(id * 65_536);
            ends[0].pair.post_send(&SendRequest::rdma_write(id, &gather, remote)).unwrap();
        }
        for _ in 0..16 {
            ends[0].finish();
        }
    }
    wait_for(&mut control, "alice", "rp_cnp_handled");
    control.stop_recording().unwrap();

    let log = std::fs::read(&paths[1]).unwrap();
    let entries: Vec<_> = EventLogReader::new(&log[..]).unwrap().map(|entry| entry.unwrap()).collect();
    let count = |host: &str, wanted: fn(&LogEvent) -> bool| {
        entries.iter().filter(|entry| entry.host == host && wanted(&entry.event)).count()
    };
    let pauses = |what: &LogEvent| matches!(what, LogEvent::PauseSent { quanta: 1.., priority: 3, .. });
    assert!(count("bob", pauses) > 0, "Bob's port pauses the switch");
    let switch = entries.iter().find(|entry| matches!(entry.event, LogEvent::EcnMarked { .. }));
    let switch = switch.expect("a mark").host.clone();
    assert!(!["alice", "bob"].contains(&switch.as_str()));
    assert!(count(&switch, pauses) > 0, "the switch pauses Alice");
    assert!(count("alice", |what| matches!(what, LogEvent::PauseReceived { priority: 3, .. })) > 0);
    assert!(count("alice", |what| matches!(what, LogEvent::RateChanged { .. })) > 0);
    assert!(entries.iter().all(|entry| !matches!(entry.event, LogEvent::FrameDropped { .. })));

    let bytes = std::fs::read(&paths[0]).unwrap();
    let (mut paused, mut packets) = (0, 0);
    for record in CaptureReader::new(&bytes[..]).unwrap() {
        match Packet::new(&record.unwrap(), 0).contents {
            PacketContents::Pause(pause) if pause.pause[3].is_some() => paused += 1,
            PacketContents::Roce(_) => packets += 1,
            _ => {}
        }
    }
    assert!(paused > 1 && packets > 256, "{paused} pause frames, {packets} packets");
    for path in paths {
        std::fs::remove_file(path).unwrap();
    }
}

/// Hosts of two daemons exchange packets over real sockets, which carry the mark in the IP header.
#[test]
fn an_ecn_mark_between_daemons_is_answered_with_a_cnp() {
    let daemons = [0, 1].map(|_| TestDaemon::with(&[("TEST_CONFIG", "congestion = 'dcqcn'")]));
    let mark = Rule {
        id: RuleId(1),
        selector: Selector { classes: Some(PacketClasses::Data), ..Selector::default() },
        repeat: Repeat::times(1),
        action: Action::MarkCe,
    };
    let mut controls = daemons.each_ref().map(TestDaemon::control);
    controls[0].add_rules("alice", 1, &[(mark, "mark one")]).unwrap();
    let ends = [
        ConnectedHost::new(&daemons[0].open("alice"), 65_536),
        ConnectedHost::new(&daemons[1].open("bob"), 65_536),
    ];
    connect(&ends);
    let gather = [ends[0].region.sge(0, 65_536)];
    ends[0].pair.post_send(&SendRequest::rdma_write(1, &gather, ends[1].region.remote_address(0))).unwrap();
    ends[0].finish();
    wait_for(&mut controls[0], "alice", "rp_cnp_handled");
    // A process shows its counters from time to time.
    wait_for(&mut controls[1], "bob", "np_cnp_sent");
    assert_eq!(counter(&mut controls[1], "bob", "np_ecn_marked_roce_packets"), 1);
    assert_eq!(counter(&mut controls[1], "bob", "np_cnp_sent"), 1);
}

/// The entries of a log.
fn entries(path: &std::path::Path) -> Vec<Entry> {
    let log = std::fs::read(path).unwrap();
    EventLogReader::new(&log[..]).unwrap().map(|entry| entry.unwrap()).collect()
}

fn is_stop(what: &LogEvent) -> bool {
    matches!(what, LogEvent::PauseReceived { quanta: 1.., priority: 3, .. })
}

/// Whether a log that is still being written has a pause that stops priority 3. A port that is rarely scheduled sends a
/// stop and its end in one frame, which only ends it.
fn has_stopped(path: &std::path::Path) -> bool {
    let log = std::fs::read(path).unwrap();
    let entries = EventLogReader::new(&log[..]).into_iter().flatten().map_while(Result::ok);
    entries.into_iter().any(|entry| entry.host == "alice" && is_stop(&entry.event))
}

/// The number of pause frames for priority 3 in a capture.
fn pause_frames(path: &std::path::Path) -> usize {
    let bytes = std::fs::read(path).unwrap();
    let is_pause = |record: &Record| match Packet::new(record, 0).contents {
        PacketContents::Pause(pause) => pause.pause[3].is_some(),
        _ => false,
    };
    CaptureReader::new(&bytes[..]).unwrap().filter(|record| is_pause(record.as_ref().unwrap())).count()
}

/// Bob is behind a switch of his daemon and receives at a fiftieth of the arrival rate; Alice is a host of another
/// daemon. The switch marks queued packets and pauses its link to Alice: her port stops that priority towards Bob until
/// it is resumed, and her rate drops. Nothing is lost: loss would be fatal.
#[test]
fn a_slow_host_pauses_and_resumes_a_sender_in_another_daemon() {
    let subnet = format!("127.99.{}", std::process::id() % 250 + 1);
    let config = format!(
        "congestion = 'dcqcn'\n[hosts]\nbob = '{subnet}.3'\n[fabric]\ntopology = 'star'\nrate_gbit = 1\n\
         receive_gbit = {{ bob = 0.02 }}\necn = {{ kmin = 1000, kmax = 2000, pmax = 1.0 }}\npfc = {{ xoff = 16384 }}\n"
    );
    let daemons = ["congestion = 'dcqcn'", &config].map(|text| TestDaemon::with(&[("TEST_CONFIG", text)]));
    let mut controls = daemons.each_ref().map(TestDaemon::control);
    let folder = std::env::temp_dir();
    let path = |n: usize, kind: &str| folder.join(format!("softhca-{}.{kind}", daemons[n].name));
    for (n, control) in controls.iter_mut().enumerate() {
        let [capture, log] = ["pcapng", "jsonl"].map(|kind| File::create(path(n, kind)).unwrap());
        control.start_recording(Some(capture.as_fd()), Some(log.as_fd())).unwrap();
    }
    let ends = [
        ConnectedHost::new(&daemons[0].open("alice"), 1 << 20),
        ConnectedHost::new(&daemons[1].open("bob"), 1 << 20),
    ];
    connect(&ends);
    // A sender that is rarely scheduled does not fill the queue, so retry.
    let deadline = Instant::now() + TEST_TIMEOUT;
    let signs = [(1, "bob", "np_cnp_sent"), (0, "alice", "rp_cnp_handled"), (0, "alice", "rx_pause_frames")];
    while signs.iter().any(|(n, host, name)| counter(&mut controls[*n], host, name) == 0)
        || !has_stopped(&path(0, "jsonl"))
    {
        assert!(Instant::now() < deadline, "the queue never fills");
        for id in 0..16 {
            let gather = [ends[0].region.sge(id * 65_536, 65_536)];
            let remote = ends[1].region.remote_address(id * 65_536);
            ends[0].pair.post_send(&SendRequest::rdma_write(id, &gather, remote)).unwrap();
        }
        for _ in 0..16 {
            ends[0].finish();
        }
    }
    let alice = ends[0].context.address().to_string();
    let ports = controls[1].ports().unwrap();
    let [stopped, lost] = ["pauses_sent", "lost_frames"].map(|wanted| {
        let counts = ports
            .iter()
            .flat_map(|port| port.counters.iter().map(move |(name, values)| (port, name, values)));
        counts
            .filter(|(_, name, _)| *name == wanted)
            .map(|(port, _, values)| (port, values))
            .collect::<Vec<_>>()
    });
    let to_alice = stopped.iter().find(|(port, _)| port.peer == alice && port.host.as_deref() == Some("bob"));
    assert!(
        to_alice.is_some_and(|(_, values)| values[3] > 0),
        "the switch paused its line to Alice: {ports:?}"
    );
    assert!(lost.iter().all(|(_, values)| values[0] == 0), "{ports:?}");
    for (control, host) in controls.iter_mut().zip(["alice", "bob"]) {
        for name in ["retransmitted_pkts", "out_of_sequence", "packet_seq_err"] {
            assert_eq!(counter(control, host, name), 0, "{name} of {host}");
        }
        control.stop_recording().unwrap();
    }

    let [sender, receiver] = [0, 1].map(|n| entries(&path(n, "jsonl")));
    let count = |entries: &[Entry], host: &str, wanted: fn(&LogEvent) -> bool| {
        entries.iter().filter(|entry| entry.host == host && wanted(&entry.event)).count()
    };
    let switch =
        receiver.iter().find(|entry| matches!(entry.event, LogEvent::EcnMarked { .. })).expect("a mark");
    let stops = |what: &LogEvent| matches!(what, LogEvent::PauseSent { quanta: 1.., priority: 3, .. });
    assert!(count(&receiver, "bob", stops) > 0, "Bob's port pauses the switch");
    assert!(count(&receiver, &switch.host, stops) > 0, "the switch pauses Alice");
    assert!(count(&receiver, &alice, |what| matches!(what, LogEvent::PauseReceived { priority: 3, .. })) > 0);
    assert!(receiver.iter().all(|entry| !matches!(entry.event, LogEvent::FrameDropped { .. })));
    let first = |wanted: fn(&LogEvent) -> bool| {
        sender.iter().position(|entry| entry.host == "alice" && wanted(&entry.event))
    };
    let stopped = first(is_stop);
    let resumed = first(|what| matches!(what, LogEvent::PauseEnded { priority: 3, .. }));
    assert!(stopped.is_some() && stopped < resumed, "stopped at {stopped:?}, resumed at {resumed:?}");
    assert!(count(&sender, "alice", |what| matches!(what, LogEvent::RateChanged { .. })) > 0);
    for n in [0, 1] {
        assert!(pause_frames(&path(n, "pcapng")) > 0, "the capture of daemon {n} has no pause frame");
        ["pcapng", "jsonl"].iter().for_each(|kind| std::fs::remove_file(path(n, kind)).unwrap());
    }
}
