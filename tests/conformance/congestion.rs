//! Congestion in the event log and the capture: PFC pauses, queue depths, ECN marks and rates.

use softhca_engine::{CongestionSettings, QpType, Settings};
use softhca_fabric::{
    EcnMarking, EventSink, HostId, LinkSettings, PER_BILLION, PfcSettings, SwitchSettings, Topology,
};
use softhca_tests::verbs::{ConnectOptions, QpOptions, World};
use softhca_trace::log::{Entry, LogEvent};
use softhca_trace::{
    CapturePoints, CaptureReader, CaptureWriter, EventLog, EventLogReader, NameTable, Packet, PacketContents,
    Record, Tap,
};
use softhca_types::{AccessFlags, Operation, RemoteAddress, SendWorkRequest, Sge};
use softhca_wire::{LocalKey, Mtu};
use std::cell::RefCell;
use std::num::NonZeroU64;
use std::rc::Rc;

const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE);
const BYTES: u32 = 400_000;

/// One WRITE of [`BYTES`] on priority 3.
fn start(world: &mut World, from: HostId, to: HostId) {
    let [(qp, key, base), (peer, peer_key, to_base)] = [from, to].map(|host| {
        let mut verbs = world.verbs(host);
        let domain = verbs.allocate_protection_domain().unwrap();
        let cq = verbs.create_completion_queue(16).unwrap();
        let qp = verbs.create_queue_pair(QpType::Rc, domain, cq, QpOptions::default()).unwrap();
        let (key, base) = verbs.register_memory(domain, BYTES.into(), ACCESS).unwrap();
        (qp, key, base)
    });
    let connection =
        ConnectOptions { path_mtu: Mtu::B1024, traffic_class: 3 << 5, ..ConnectOptions::default() };
    world.connect((from, qp), (to, peer), &connection).unwrap();
    let sge = [Sge { address: base, length: BYTES, lkey: LocalKey(key.0) }];
    let remote = RemoteAddress { address: to_base, rkey: peer_key };
    let request = SendWorkRequest::new(0, Operation::Write { remote, imm_data: None }, &sge);
    world.verbs(from).post_send(qp, &request).unwrap();
}

/// Alice and Carol write to Bob through one switch with a high marking and a low XOFF threshold: its log and a capture.
fn incast(points: CapturePoints) -> (Vec<Entry>, Vec<Record>) {
    let mut world = World::new(1);
    let settings = Settings { congestion: CongestionSettings::DCQCN, ..Settings::default() };
    let hosts = ["alice", "bob", "carol"].map(|name| world.add_host(name, settings));
    let line = LinkSettings {
        bits_per_second: NonZeroU64::new(10_000_000_000),
        delay_ns: 1_000,
        ..LinkSettings::default()
    };
    let switch = SwitchSettings {
        ecn_marking: Some(EcnMarking { kmin: 10_000, kmax: 100_000, pmax_per_billion: PER_BILLION / 2 }),
        pfc: Some(PfcSettings { xoff: 30_000, xon: 20_000, ..PfcSettings::default() }),
        sample_step: 10_000,
        ..SwitchSettings::default()
    };
    world.build_topology(&Topology::Star { hosts: 3 }, &hosts, line, switch).unwrap();
    let names = NameTable::from_world(&world);
    let writer = CaptureWriter::new(Vec::new()).unwrap();
    let tap = Rc::new(RefCell::new(Tap::new(writer, names.clone(), points).unwrap()));
    let log = Rc::new(RefCell::new(EventLog::new(Vec::new(), "an incast", names)));
    let observers: Vec<Box<dyn EventSink>> = vec![Box::new(tap.clone()), Box::new(log.clone())];
    world.set_sink(observers);
    start(&mut world, hosts[0], hosts[1]);
    start(&mut world, hosts[2], hosts[1]);
    world.run();
    assert_eq!(world.frame_counters().dropped, 0);
    world.set_sink(());
    let mut tap = Rc::into_inner(tap).expect("the world let go of it").into_inner();
    let mut log = Rc::into_inner(log).expect("the world let go of it").into_inner();
    tap.finish().unwrap();
    log.finish().unwrap();
    let (log, capture) = (log.into_inner(), tap.into_inner());
    let entries = EventLogReader::new(&log[..]).unwrap().map(Result::unwrap).collect();
    (entries, CaptureReader::new(&capture[..]).unwrap().map(Result::unwrap).collect())
}

#[test]
fn the_log_contains_pauses_queue_depths_marks_and_rates() {
    let (entries, _) = incast(CapturePoints::Senders);
    let count = |wanted: &dyn Fn(&Entry) -> bool| entries.iter().filter(|entry| wanted(entry)).count();
    let stops = count(&|entry| matches!(entry.event, LogEvent::PauseSent { priority: 3, quanta: 1.., .. }));
    let resumes = count(&|entry| matches!(entry.event, LogEvent::PauseSent { priority: 3, quanta: 0, .. }));
    assert!(stops > 0 && resumes > 0, "{stops} pauses, {resumes} ends");
    // The hosts receive every pause of the switch.
    let received = count(&|entry| {
        matches!(entry.event, LogEvent::PauseReceived { .. }) && ["alice", "carol"].contains(&&*entry.host)
    });
    assert_eq!(received, stops + resumes);
    let held = |entry: &Entry| match entry.event {
        LogEvent::PauseSent { quanta: 1.., ingress_bytes: held, .. } => held,
        _ => u64::MAX,
    };
    assert!(entries.iter().all(|entry| held(entry) >= 30_000), "pauses start at XOFF");
    let depth = |entry: &Entry| match entry.event {
        LogEvent::QueueSampled { depth, priority: 3, .. } => Some(depth),
        _ => None,
    };
    let depths: Vec<u64> = entries.iter().filter_map(depth).collect();
    assert!(depths.iter().max() > Some(&30_000), "{depths:?}");
    assert!(
        depths.windows(2).all(|pair| pair[0] / 10_000 != pair[1] / 10_000),
        "each passed a step: {depths:?}"
    );
    let marked = count(&|entry| matches!(entry.event, LogEvent::EcnMarked { depth: 10_001.., .. }));
    let seen = count(&|entry| matches!(entry.event, LogEvent::EcnMarkReceived { .. }) && entry.host == "bob");
    assert!(marked > 0 && marked == seen, "{marked} marks, {seen} seen");
    for host in ["alice", "carol"] {
        let cuts = count(&|entry| matches!(entry.event, LogEvent::RateChanged { .. }) && entry.host == host);
        assert!(cuts > 0, "the rate of {host} never changed");
    }
}

#[test]
fn pause_frames_are_captured_as_ethernet_frames() {
    let pauses = |records: &[Record]| {
        let paused = |record: &&Record| match Packet::new(record, 0).contents {
            PacketContents::Pause(pause) => pause.pause[3].is_some(),
            _ => false,
        };
        records.iter().filter(paused).count()
    };
    let roce = |records: &[Record]| {
        records
            .iter()
            .filter(|record| matches!(Packet::new(record, 0).contents, PacketContents::Roce(_)))
            .count()
    };
    let (entries, every) = incast(CapturePoints::EveryLink);
    let logged = entries.iter().filter(|entry| matches!(entry.event, LogEvent::PauseSent { .. })).count();
    assert!(logged > 1);
    assert_eq!(pauses(&every), logged);
    let first =
        every.iter().find(|record| matches!(Packet::new(record, 0).contents, PacketContents::Pause(_)));
    // IEEE 802.1Q 36.2: the group address that no bridge forwards, EtherType 0x8808, opcode 0x0101.
    let bytes = &first.expect("a pause frame").data;
    assert_eq!(bytes[..6], [0x01, 0x80, 0xc2, 0x00, 0x00, 0x01]);
    assert_eq!(bytes[12..16], [0x88, 0x08, 0x01, 0x01]);
    assert_eq!(bytes[16..18], [0, 1 << 3], "priority 3 and no other");
    // At the senders, at the switch and at the receivers.
    let (_, senders) = incast(CapturePoints::Senders);
    assert_eq!((roce(&every), pauses(&senders)), (3 * roce(&senders), logged));
}
