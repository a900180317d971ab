//! The canonical captures: small files that show one thing each, the same bytes in every build.
//!
//! `SOFTHCA_BLESS=1 cargo test -p softhca-tests --test canonical` writes them.

mod plays;

use plays::{PLAYS, Play};
use softhca_fabric::{Observer, RuleId, World};
use softhca_trace::log::What;
use softhca_trace::{
    Capture, CaptureWriter, Cast, Contents, EventLog, EventLogReader, Packet, Points, Tally, Tap,
};
use softhca_wire::{NakCode, Opcode, Operation, Service, Syndrome};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;
use std::rc::Rc;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/captures")
}

/// What a play puts on the wire, and what the cards tell of it.
fn perform(play: &Play) -> [Vec<u8>; 2] {
    let (mut tap, mut log) = (None, None);
    let mut pair = (play.setup)().build_seen(|world: &World| {
        let mut cast = Cast::of(world);
        cast.name_rule(RuleId(1), play.rule);
        let writer = CaptureWriter::new(Vec::new()).expect("a vector takes everything");
        let wire = Tap::new(writer, cast.clone(), Points::Senders).expect("a vector takes everything");
        let wire = tap.insert(Rc::new(RefCell::new(wire))).clone();
        let events = log.insert(Rc::new(RefCell::new(EventLog::new(Vec::new(), play.about, cast)))).clone();
        let both: Vec<Box<dyn Observer>> = vec![Box::new(wire), Box::new(events)];
        Box::new(both)
    });
    (play.act)(&mut pair);
    pair.world.run();
    drop(pair);
    let mut tap = Rc::into_inner(tap.expect("the pair was built")).expect("let go of").into_inner();
    let mut log = Rc::into_inner(log.expect("the pair was built")).expect("let go of").into_inner();
    tap.finish().expect("a vector takes everything");
    log.finish().expect("a vector takes everything");
    [tap.into_inner(), log.into_inner()]
}

/// Every file of the folder by its name.
fn files() -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut page = String::from(PREFACE);
    for play in PLAYS {
        let [capture, log] = perform(play);
        let (tally, events) = (tally(&capture), EventLogReader::new(&log[..]).expect("a log").count());
        let _ = writeln!(page, "| `{}` | {} | {} | {events} |", play.name, play.about, tally.packets);
        files.insert(format!("{}.pcapng", play.name), capture);
        files.insert(format!("{}.jsonl", play.name), log);
    }
    files.insert("README.md".into(), page.into_bytes());
    files
}

const PREFACE: &str = "\
# Captures

One thing each, of two hosts (alice at 10.0.0.1, bob at 10.0.0.2) in virtual time: `NAME.pcapng` for Wireshark and `softhca trace`, `NAME.jsonl` is the event
log for `softhca why` and `softhca lint`. Frames are captured where they leave a host, before any fault; a packet that a rule touched has a comment that
says so. `SOFTHCA_BLESS=1 cargo test -p softhca-tests --test canonical` builds them again; without it the same test sees that no byte differs.

| name | what it shows | packets | events |
|---|---|---|---|
";

fn tally(capture: &[u8]) -> Tally {
    let mut tally = Tally::default();
    for record in Capture::new(capture).expect("a capture") {
        tally.count(&Packet::new(&record.expect("a whole record"), 0));
    }
    tally
}

#[test]
fn the_folder_holds_what_the_code_makes_byte_for_byte() {
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
fn every_capture_is_well_formed_and_shows_what_it_promises() {
    let (mut opcodes, mut naks) = (BTreeSet::new(), BTreeSet::new());
    for play in PLAYS {
        let [capture, log] = perform(play);
        let tally = tally(&capture);
        assert!(tally.packets > 0 && tally.is_clean(), "{}: {tally}", play.name);
        for record in Capture::new(&capture[..]).expect("a capture") {
            let record = record.expect("a whole record");
            let Contents::Roce(roce) = Packet::new(&record, 0).contents else { continue };
            let header = roce.transport.header;
            opcodes.insert(header.bth.opcode);
            match header.aeth.map(|aeth| aeth.syndrome) {
                Some(Syndrome::Nak(code)) => naks.insert(code.name()),
                Some(Syndrome::RnrNak(_)) => naks.insert("RNR"),
                _ => false,
            };
        }
        let started = EventLogReader::new(&log[..])
            .expect("a log")
            .filter(|entry| matches!(entry.as_ref().expect("an entry").what, What::Configured { .. }));
        assert!(started.count() > 0, "{}: nobody got ready", play.name);
    }
    let never = [Operation::Flush, Operation::AtomicWrite, Operation::CongestionNotification];
    let expected: BTreeSet<Opcode> = Opcode::all()
        .filter(|opcode| opcode.service() != Service::Xrc && !never.contains(&opcode.operation()))
        .collect();
    let missing: Vec<_> = expected.difference(&opcodes).collect();
    assert!(missing.is_empty(), "no capture has {missing:?}");
    let codes =
        [NakCode::SequenceError, NakCode::InvalidRequest, NakCode::RemoteAccess, NakCode::RemoteOperational];
    let wanted: BTreeSet<_> = codes.iter().map(|code| code.name()).chain(["RNR"]).collect();
    assert_eq!(naks, wanted);
}
