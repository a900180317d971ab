//! The canonical captures: small files for one topic each, identical in every build.
//!
//! `SOFTHCA_BLESS=1 cargo test -p softhca-tests --test conformance canonical` updates them.

mod cm_captures;
mod congestion_captures;
mod pair_captures;

use cm_captures::{CM_CAPTURES, CmCapture};
use congestion_captures::{CONGESTION_CAPTURES, CongestionCapture};
use pair_captures::{PAIR_CAPTURES, PairCapture};
use softhca_engine::Instant;
use softhca_fabric::{EventSink, HostId, LinkId, NetworkEvent, RuleId};
use softhca_tests::verbs::World;
use softhca_trace::{
    CapturePoints, CaptureReader, CaptureWriter, EventLog, EventLogReader, Mad, NameTable, Packet,
    PacketContents, PacketCounts, Tap,
};
use softhca_wire::{Ecn, NakCode, Opcode, Operation, Syndrome};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/captures")
}

/// The capture and the event log of a pair.
fn run_pair_capture(play: &PairCapture) -> [Vec<u8>; 2] {
    let (mut tap, mut log) = (None, None);
    let mut pair = (play.setup)().build_with_sink(|world: &World| {
        let mut names = NameTable::from_world(world);
        names.add_rule(RuleId(1), play.rule);
        let writer = CaptureWriter::new(Vec::new()).expect("a vector takes everything");
        let wire =
            Tap::new(writer, names.clone(), CapturePoints::Senders).expect("a vector takes everything");
        let wire = tap.insert(Rc::new(RefCell::new(wire))).clone();
        let events = log.insert(Rc::new(RefCell::new(EventLog::new(Vec::new(), play.about, names)))).clone();
        let both: Vec<Box<dyn EventSink>> = vec![Box::new(wire), Box::new(events)];
        Box::new(both)
    });
    (play.run)(&mut pair);
    pair.world.run();
    drop(pair);
    let mut tap = Rc::into_inner(tap.expect("the pair was built")).expect("let go of").into_inner();
    let mut log = Rc::into_inner(log.expect("the pair was built")).expect("let go of").into_inner();
    tap.finish().expect("a vector takes everything");
    log.finish().expect("a vector takes everything");
    [tap.into_inner(), log.into_inner()]
}

/// The same for a network; frames are also captured at their receivers.
fn run_congestion_capture(network: &CongestionCapture) -> [Vec<u8>; 2] {
    let (mut world, [alice, bob, carol]) = network.world();
    let names = NameTable::from_world(&world);
    let writer = CaptureWriter::new(Vec::new()).expect("a vector takes everything");
    let tap = Tap::new(writer, names.clone(), CapturePoints::BothEnds).expect("a vector takes everything");
    let tap = Rc::new(RefCell::new(tap));
    let log = Rc::new(RefCell::new(EventLog::new(Vec::new(), network.about, names)));
    let both: Vec<Box<dyn EventSink>> = vec![Box::new(tap.clone()), Box::new(log.clone())];
    world.set_sink(both);
    for sender in [alice, bob] {
        congestion_captures::write(&mut world, sender, carol);
    }
    world.run();
    drop(world);
    let mut tap = Rc::into_inner(tap).expect("let go of").into_inner();
    let mut log = Rc::into_inner(log).expect("let go of").into_inner();
    tap.finish().expect("a vector takes everything");
    log.finish().expect("a vector takes everything");
    [tap.into_inner(), log.into_inner()]
}

/// The writers of a capture and a log.
type Writers = (Tap<Vec<u8>>, EventLog<Vec<u8>>);

/// An event sink that shares the writers with the test.
#[derive(Clone)]
struct WritersSink(Arc<Mutex<Writers>>);

impl EventSink for WritersSink {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        let both = &mut *self.0.lock().expect("no panic");
        both.0.on_event(now, event);
        both.1.on_event(now, event);
    }
}

/// The same for connection management.
fn run_cm_capture(dialogue: &CmCapture) -> [Vec<u8>; 2] {
    let mut names = NameTable::new();
    for (index, name) in ["alice", "bob"].into_iter().enumerate() {
        names.add_host(HostId(index as u32), name, [10, 0, 0, index as u8 + 1].into());
    }
    names.add_link(LinkId(0), [HostId(0), HostId(1)]);
    names.add_rule(RuleId(0), "lose the first REQ");
    let writer = CaptureWriter::new(Vec::new()).expect("a vector takes everything");
    let tap = Tap::new(writer, names.clone(), CapturePoints::Senders).expect("a vector takes everything");
    let log = EventLog::new(Vec::new(), dialogue.about, names);
    let sink = WritersSink(Arc::new(Mutex::new((tap, log))));
    let mut world = softhca::sim::World::new(1);
    world.event_sink(sink.clone());
    (dialogue.run)(&mut world);
    world.run().unwrap_or_else(|failure| panic!("{}: {failure}", dialogue.name));
    drop(world);
    let both = Arc::into_inner(sink.0).expect("the world let go of it");
    let (mut tap, mut log) = both.into_inner().expect("no panic");
    tap.finish().expect("a vector takes everything");
    log.finish().expect("a vector takes everything");
    [tap.into_inner(), log.into_inner()]
}

/// A capture and its log.
struct CaptureFiles {
    name: &'static str,
    about: &'static str,
    points: CapturePoints,
    capture: Vec<u8>,
    log: Vec<u8>,
}

/// All captures, in the order of the README.
fn all() -> Vec<CaptureFiles> {
    let made = |name, about, points, [capture, log]: [Vec<u8>; 2]| CaptureFiles {
        name,
        about,
        points,
        capture,
        log,
    };
    let plays = PAIR_CAPTURES
        .iter()
        .map(|play| made(play.name, play.about, CapturePoints::Senders, run_pair_capture(play)));
    let dialogues = CM_CAPTURES
        .iter()
        .map(|play| made(play.name, play.about, CapturePoints::Senders, run_cm_capture(play)));
    let networks = CONGESTION_CAPTURES
        .iter()
        .map(|play| made(play.name, play.about, CapturePoints::BothEnds, run_congestion_capture(play)));
    plays.chain(dialogues).chain(networks).collect()
}

/// Every file of the folder by name.
fn files() -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut page = String::from(PREFACE);
    for CaptureFiles { name, about, capture, log, .. } in all() {
        let packets = count_packets(&capture).packets;
        let events = EventLogReader::new(&log[..]).expect("a log").count();
        let _ = writeln!(page, "| `{name}` | {about} | {packets} | {events} |");
        files.insert(format!("{name}.pcapng"), capture);
        files.insert(format!("{name}.jsonl"), log);
    }
    files.insert("README.md".into(), page.into_bytes());
    files
}

const PREFACE: &str = "\
# Captures

Each capture shows one topic between two hosts (alice at 10.0.0.1, bob at 10.0.0.2) in virtual time: `NAME.pcapng` for Wireshark and `softhca trace`, `NAME.jsonl` is the event
log for `softhca why` and `softhca lint`. Frames are captured at the sender, before any fault; a packet with a fault has a comment. The last two have a
third host (carol at 10.0.0.3) and a switch, and show each frame again at its receiver, possibly with a CE mark. `SOFTHCA_BLESS=1 cargo test -p softhca-tests --test conformance canonical` updates them; without the variable the same test checks that they are up to date.

| name | contents | packets | events |
|---|---|---|---|
";

fn count_packets(capture: &[u8]) -> PacketCounts {
    let mut counts = PacketCounts::default();
    for record in CaptureReader::new(capture).expect("a capture") {
        counts.add(&Packet::new(&record.expect("a whole record"), 0));
    }
    counts
}

#[test]
fn the_captures_are_up_to_date() {
    let made = files();
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        for (name, bytes) in &made {
            std::fs::write(folder().join(name), bytes).expect("a folder that can be written");
        }
    }
    let entries = std::fs::read_dir(folder()).expect("the folder of captures");
    let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
    let found: BTreeSet<String> = names.collect();
    assert_eq!(found, made.keys().cloned().collect(), "run again with SOFTHCA_BLESS=1");
    for (name, bytes) in made {
        let kept = std::fs::read(folder().join(&name)).expect("a file");
        assert!(kept == bytes, "{name} differs: run again with SOFTHCA_BLESS=1");
    }
}

#[test]
fn the_captures_are_valid_and_cover_every_opcode() {
    let (mut opcodes, mut naks, mut messages) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let (mut stopped, mut released, mut marks) = (0, 0, 0);
    for CaptureFiles { name, points, capture, log, .. } in all() {
        let counts = count_packets(&capture);
        assert!(counts.packets > 0 && counts.is_clean(), "{name}: {counts}");
        for record in CaptureReader::new(&capture[..]).expect("a capture") {
            let record = record.expect("a whole record");
            let roce = match Packet::new(&record, 0).contents {
                PacketContents::Roce(roce) => roce,
                PacketContents::Pause(pause) => {
                    let quanta = pause.pause[3].expect("priority 3 is paused");
                    *if quanta > 0 { &mut stopped } else { &mut released } += 1;
                    continue;
                }
                other => panic!("{name}: {other:?}"),
            };
            let header = roce.transport.header;
            opcodes.insert(header.bth.opcode);
            marks += usize::from(roce.ecn() == Ecn::CongestionExperienced);
            match header.aeth.map(|aeth| aeth.syndrome) {
                Some(Syndrome::Nak(code)) => naks.insert(code.name()),
                Some(Syndrome::RnrNak(_)) => naks.insert("RNR"),
                _ => false,
            };
            if let Some(Mad::Cm(datagram)) = roce.mad {
                messages.insert(datagram.message.name());
            }
        }
        if points != CapturePoints::Senders {
            continue;
        }
        let entries = EventLogReader::new(&log[..]).expect("a log");
        let sent =
            entries.filter(|entry| entry.as_ref().expect("an entry").event.name() == "transport:packet_sent");
        assert_eq!(
            sent.count() as u64,
            counts.packets,
            "{name}: the log and the capture contain the same packets"
        );
    }
    let never = [Operation::Flush, Operation::AtomicWrite];
    let expected: BTreeSet<Opcode> =
        Opcode::all().filter(|opcode| !never.contains(&opcode.operation())).collect();
    let missing: Vec<_> = expected.difference(&opcodes).collect();
    assert!(missing.is_empty(), "no capture has {missing:?}");
    let codes = [
        NakCode::PsnSequenceError,
        NakCode::InvalidRequest,
        NakCode::RemoteAccessError,
        NakCode::RemoteOperationalError,
    ];
    let wanted: BTreeSet<_> = codes.iter().map(|code| code.name()).chain(["RNR"]).collect();
    assert_eq!(naks, wanted);
    let spoken = ["DREP", "DREQ", "MRA", "REJ", "REP", "REQ", "RTU", "SIDR_REP", "SIDR_REQ"];
    assert_eq!(messages.into_iter().collect::<Vec<_>>(), spoken);
    assert!(stopped >= 2 && released >= 2, "{stopped} pauses, {released} ends");
    assert!(marks >= 2, "{marks} marked packets");
}
