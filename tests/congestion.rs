//! What a log and a capture tell of a congested switch: pauses, queue depths, marks and rates; and a switch before an
//! embedded card.

use softhca::{Device, EmbeddedOptions, Passage, Path, PortSwitch, Receiver, Witness};
use softhca_engine::{Congestion, Instant, QpKind, Settings};
use softhca_fabric::{
    Connection, FabricEvent, FlowControl, HostId, Line, Marking, Observer, PER_BILLION, QpOptions,
    SwitchSettings, Topology, World,
};
use softhca_queue::{Access, Operation, RemoteAddress, SendRequest, Sge};
use softhca_tests::process::PATIENCE;
use softhca_trace::log::{Entry, What};
use softhca_trace::{
    Capture, CaptureWriter, Cast, Contents, EventLog, EventLogReader, Packet, Points, Record, Tap,
};
use softhca_wire::{LocalKey, Mtu, Pfc};
use std::cell::RefCell;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

const RIGHTS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);
const BYTES: u32 = 400_000;

/// One WRITE of [`BYTES`] on priority 3.
fn start(world: &mut World, from: HostId, to: HostId) {
    let [(qp, key, base), (peer, peer_key, to_base)] = [from, to].map(|host| {
        let mut verbs = world.on(host);
        let domain = verbs.allocate_domain().unwrap();
        let cq = verbs.create_completion_queue(16).unwrap();
        let qp = verbs.create_queue_pair(QpKind::Rc, domain, cq, QpOptions::default()).unwrap();
        let (key, base) = verbs.register(domain, BYTES.into(), RIGHTS).unwrap();
        (qp, key, base)
    });
    let connection = Connection { mtu: Mtu::B1024, traffic_class: 3 << 5, ..Connection::default() };
    world.connect((from, qp), (to, peer), &connection).unwrap();
    let sge = [Sge { address: base, length: BYTES, key: LocalKey(key.0) }];
    let remote = RemoteAddress { address: to_base, key: peer_key };
    let request = SendRequest::new(0, Operation::Write { remote, immediate: None }, &sge);
    world.on(from).post_send(qp, &request).unwrap();
}

/// Alice and Carol write to Bob through one switch that marks late and pauses early: its log, and a capture.
fn incast(points: Points) -> (Vec<Entry>, Vec<Record>) {
    let mut world = World::new(1);
    let settings = Settings { congestion: Congestion::DCQCN, ..Settings::default() };
    let hosts = ["alice", "bob", "carol"].map(|name| world.add_host(name, settings));
    let line = Line { bits_per_second: NonZeroU64::new(10_000_000_000), delay_ns: 1_000, ..Line::default() };
    let switch = SwitchSettings {
        marking: Some(Marking { least: 10_000, most: 100_000, per_billion: PER_BILLION / 2 }),
        flow_control: Some(FlowControl { xoff: 30_000, xon: 20_000, ..FlowControl::default() }),
        sample_step: 10_000,
        ..SwitchSettings::default()
    };
    world.lay_out(&Topology::Star { hosts: 3 }, &hosts, line, switch).unwrap();
    let cast = Cast::of(&world);
    let writer = CaptureWriter::new(Vec::new()).unwrap();
    let tap = Rc::new(RefCell::new(Tap::new(writer, cast.clone(), points).unwrap()));
    let log = Rc::new(RefCell::new(EventLog::new(Vec::new(), "an incast", cast)));
    let observers: Vec<Box<dyn Observer>> = vec![Box::new(tap.clone()), Box::new(log.clone())];
    world.observe(observers);
    start(&mut world, hosts[0], hosts[1]);
    start(&mut world, hosts[2], hosts[1]);
    world.run();
    assert_eq!(world.census().dropped, 0);
    world.observe(());
    let mut tap = Rc::into_inner(tap).expect("the world let go of it").into_inner();
    let mut log = Rc::into_inner(log).expect("the world let go of it").into_inner();
    tap.finish().unwrap();
    log.finish().unwrap();
    let (log, capture) = (log.into_inner(), tap.into_inner());
    let entries = EventLogReader::new(&log[..]).unwrap().map(Result::unwrap).collect();
    (entries, Capture::new(&capture[..]).unwrap().map(Result::unwrap).collect())
}

#[test]
fn the_log_tells_of_pauses_queue_depths_marks_and_rates() {
    let (entries, _) = incast(Points::Senders);
    let count = |wanted: &dyn Fn(&Entry) -> bool| entries.iter().filter(|entry| wanted(entry)).count();
    let stops = count(&|entry| matches!(entry.what, What::PauseSent { priority: 3, quanta: 1.., .. }));
    let resumes = count(&|entry| matches!(entry.what, What::PauseSent { priority: 3, quanta: 0, .. }));
    assert!(stops > 0 && resumes > 0, "{stops} pauses, {resumes} ends");
    // What the switch sent, the hosts got.
    let received = count(&|entry| {
        matches!(entry.what, What::PauseReceived { .. }) && ["alice", "carol"].contains(&&*entry.host)
    });
    assert_eq!(received, stops + resumes);
    let held = |entry: &Entry| match entry.what {
        What::PauseSent { quanta: 1.., held, .. } => held,
        _ => u64::MAX,
    };
    assert!(entries.iter().all(|entry| held(entry) >= 30_000), "a pause is asked for from XOFF on");
    let depth = |entry: &Entry| match entry.what {
        What::QueueSampled { depth, priority: 3, .. } => Some(depth),
        _ => None,
    };
    let depths: Vec<u64> = entries.iter().filter_map(depth).collect();
    assert!(depths.iter().max() > Some(&30_000), "{depths:?}");
    assert!(
        depths.windows(2).all(|pair| pair[0] / 10_000 != pair[1] / 10_000),
        "each passed a step: {depths:?}"
    );
    let marked = count(&|entry| matches!(entry.what, What::EcnMarked { depth: 10_001.., .. }));
    let seen = count(&|entry| matches!(entry.what, What::MarkSeen { .. }) && entry.host == "bob");
    assert!(marked > 0 && marked == seen, "{marked} marks, {seen} seen");
    for host in ["alice", "carol"] {
        let cuts = count(&|entry| matches!(entry.what, What::RateChanged { .. }) && entry.host == host);
        assert!(cuts > 0, "the rate of {host} never changed");
    }
}

#[test]
fn pause_frames_stand_in_captures_as_real_frames() {
    let pauses = |records: &[Record]| {
        let paused = |record: &&Record| match Packet::new(record, 0).contents {
            Contents::Pause(pause) => pause.pause[3].is_some(),
            _ => false,
        };
        records.iter().filter(paused).count()
    };
    let roce = |records: &[Record]| {
        records.iter().filter(|record| matches!(Packet::new(record, 0).contents, Contents::Roce(_))).count()
    };
    let (entries, every) = incast(Points::EveryCable);
    let told = entries.iter().filter(|entry| matches!(entry.what, What::PauseSent { .. })).count();
    assert!(told > 1);
    assert_eq!(pauses(&every), told);
    let first = every.iter().find(|record| matches!(Packet::new(record, 0).contents, Contents::Pause(_)));
    // IEEE 802.1Q 36.2: the group address that no bridge forwards, EtherType 0x8808, opcode 0x0101.
    let bytes = &first.expect("a pause frame").data;
    assert_eq!(bytes[..6], [0x01, 0x80, 0xc2, 0x00, 0x00, 0x01]);
    assert_eq!(bytes[12..16], [0x88, 0x08, 0x01, 0x01]);
    assert_eq!(bytes[16..18], [0, 1 << 3], "priority 3 and no other");
    // Where packets leave hosts, where they leave the switch too, and where they arrive.
    let (_, senders) = incast(Points::Senders);
    assert_eq!((roce(&every), pauses(&senders)), (3 * roce(&senders), told));
}

/// The pauses of priority 3 that passed a card's port, and what they did.
#[derive(Clone, Default)]
struct Pauses(Arc<Mutex<Vec<(Passage, u16)>>>, Arc<Mutex<Vec<FabricEvent>>>);

impl Witness for Pauses {
    fn pause(&mut self, _: Instant, passage: Passage, pause: &Pfc) {
        self.0.lock().unwrap().extend(pause.pause[3].map(|quanta| (passage, quanta)));
    }

    fn fabric(&mut self, _: Instant, event: &FabricEvent) {
        self.1.lock().unwrap().push(*event);
    }
}

/// Bob's card has a switch of its own and a port that takes 20 Mb/s. Alice's card is stopped and goes on, over real
/// sockets and without any loss, which would be fatal.
#[test]
fn an_embedded_card_with_a_slow_port_pauses_whoever_sends_to_it() {
    let pauses = [Pauses::default(), Pauses::default()];
    let slow = PortSwitch {
        line: Line { bits_per_second: NonZeroU64::new(1_000_000_000), delay_ns: 1_000, ..Line::default() },
        settings: SwitchSettings {
            flow_control: Some(FlowControl { xoff: 16_384, xon: 14_336, ..FlowControl::default() }),
            ..SwitchSettings::default()
        },
        receiver: Receiver { bits_per_second: Some(20_000_000), ..Receiver::default() },
    };
    let ends = [None, Some(slow)].into_iter().zip(&pauses).map(|(switch, pauses)| {
        let witness = Box::new(pauses.clone());
        let options = EmbeddedOptions { switch, witness, ..EmbeddedOptions::default() };
        let context = Device::embedded_with(options).unwrap().open();
        let domain = context.allocate_domain().unwrap();
        let queue = context.create_completion_queue(16).unwrap();
        let pair = domain.queue_pair(softhca::QpKind::Rc, &queue).create().unwrap();
        (context, domain.register(1 << 19, RIGHTS).unwrap(), queue, pair)
    });
    let ends: Vec<_> = ends.collect();
    let [(alice, from, queue, sender), (bob, to, _, receiver)] = &ends[..] else { unreachable!() };
    let path = Path { traffic_class: 3 << 5, ..Path::default() };
    sender.connect(&receiver.endpoint(), &path).unwrap();
    receiver.connect(&sender.endpoint(), &path).unwrap();
    let deadline = std::time::Instant::now() + PATIENCE;
    let (mut id, is_end) = (0, |event: &FabricEvent| matches!(event, FabricEvent::PauseEnded { .. }));
    // A sender that seldom has a processor fills no queue: it tries until it does.
    while !pauses[0].1.lock().unwrap().iter().any(is_end) {
        assert!(std::time::Instant::now() < deadline, "no queue fills");
        let bytes = vec![id as u8 + 1; 1 << 19];
        from.write_at(0, &bytes);
        sender.post(&softhca::SendRequest::write(id, &[from.entry(0, 1 << 19)], to.remote(0))).unwrap();
        let completion = queue.wait_for(PATIENCE).expect("a completion");
        assert!(completion.status.is_success(), "{completion:?}");
        assert!(to.read_at(0, 1 << 19) == bytes, "it arrived as it was");
        id += 1;
    }
    assert!(alice.counters().rx_pause_frames > 0);
    assert_eq!((alice.counters().retransmitted_pkts, bob.counters().out_of_sequence), (0, 0));
    let [heard, sent] = [&pauses[0], &pauses[1]].map(|pauses| pauses.0.lock().unwrap().clone());
    assert_eq!(sent.first(), Some(&(Passage::Sent, u16::MAX)), "Bob's side asks Alice to stop");
    assert_eq!(heard.first(), Some(&(Passage::Received, u16::MAX)), "and she hears it");
}
