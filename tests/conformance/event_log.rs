//! The event log of a run is deterministic and can be parsed.

use softhca_fabric::{Action, Direction, InclusiveRange, Repeat, RuleId, Selector};
use softhca_tests::pair::{Pair, Setup};
use softhca_trace::log::{EVENT_SCHEMAS, Entry};
use softhca_trace::{EventLog, EventLogReader, NameTable};
use std::cell::RefCell;
use std::rc::Rc;

/// The log of a WRITE whose second packet is lost.
fn log_of_a_loss() -> Vec<u8> {
    let mut pair = Setup::default().build();
    let mut names = NameTable::from_world(&pair.world);
    names.add_rule(RuleId(1), "lose the second packet");
    let log = Rc::new(RefCell::new(EventLog::new(Vec::new(), "a lost packet", names)));
    pair.world.set_sink(log.clone());
    lose_second(&mut pair);
    pair.post_write(7, 0, 0, 3000);
    pair.run();
    pair.world.set_sink(());
    let mut log = Rc::into_inner(log).expect("the world let go of it").into_inner();
    log.finish().expect("a vector takes everything");
    log.into_inner()
}

fn lose_second(pair: &mut Pair) {
    let direction = Some(Direction::Forward);
    let selector = Selector { direction, psn: Some(InclusiveRange::exactly(1)), ..Selector::default() };
    pair.add_rule(selector, Repeat::times(1), Action::Drop);
}

#[test]
fn a_lost_packet_is_logged_with_its_reasons() {
    insta::assert_snapshot!(String::from_utf8(log_of_a_loss()).expect("UTF-8"));
}

#[test]
fn the_same_run_gives_the_same_bytes() {
    assert_eq!(log_of_a_loss(), log_of_a_loss());
}

#[test]
fn a_log_round_trips() {
    let log = log_of_a_loss();
    let reader = EventLogReader::new(&log[..]).expect("a log");
    assert_eq!(reader.header().title, "a lost packet");
    assert_eq!(reader.header().vantage_points[1].host, "bob");
    let entries: Vec<Entry> = reader.map(|entry| entry.expect("an entry")).collect();
    for (entry, line) in entries.iter().zip(log.split(|byte| *byte == b'\n').skip(1)) {
        assert!(EVENT_SCHEMAS.iter().any(|name| name.name == entry.event.name()));
        assert_eq!(serde_json::to_vec(entry).expect("JSON"), line);
    }
    assert_eq!(entries.len() + 1, log.iter().filter(|byte| **byte == b'\n').count());
}

#[test]
fn invalid_logs_are_rejected_with_the_line() {
    let failure = |text: &str| match EventLogReader::new(text.as_bytes()) {
        Err(error) => error.to_string(),
        Ok(mut reader) => reader.find_map(Result::err).expect("an error").to_string(),
    };
    let header = r#"{"format":"softhca-events","version":1,"title":"","vantage_points":[]}"#;
    let texts = [
        String::new(),
        "{}".into(),
        header.replace(":1,", ":2,"),
        format!("{header}\n{{\"time\":0,\"host\":\"a\",\"name\":\"nothing:known\",\"data\":{{}}}}"),
        format!("{header}\nnonsense"),
    ];
    insta::assert_snapshot!(texts.map(|text| failure(&text)).join("\n"));
}
