//! A trace for the Perfetto UI has the fields of Chrome's trace format.

use serde_json::Value;
use softhca_trace::EventLogReader;
use softhca_trace::why::LogAnalyzer;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

fn trace(name: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/captures").join(name);
    let log = std::fs::read(path).expect("a log");
    let reader = EventLogReader::new(&log[..]).expect("a log");
    let mut analyzer = LogAnalyzer::new(reader.header());
    reader.for_each(|entry| analyzer.push(entry.expect("an entry")));
    let mut object = analyzer.perfetto();
    assert_eq!(object["displayTimeUnit"], "ns");
    match object["traceEvents"].take() {
        Value::Array(events) => events,
        other => panic!("{other}"),
    }
}

fn text(event: &Value, key: &str) -> String {
    event[key].as_str().unwrap_or_else(|| panic!("{key} of {event}")).to_owned()
}

fn track(event: &Value) -> (u64, u64) {
    let number = |key: &str| event[key].as_u64().unwrap_or_else(|| panic!("{key} of {event}"));
    (number("pid"), number("tid"))
}

#[test]
fn every_event_has_the_fields_of_its_phase() {
    for name in
        ["rc-write.jsonl", "loss-go-back-n.jsonl", "rnr-exhausted.jsonl", "cnp.jsonl", "cm-connect.jsonl"]
    {
        for event in trace(name) {
            track(&event);
            assert!(event["ts"].as_f64().is_some_and(|ts| ts >= 0.0), "{event}");
            assert!(!text(&event, "name").is_empty());
            match text(&event, "ph").as_str() {
                "M" => assert!(!text(&event["args"], "name").is_empty()),
                "X" => assert!(event["dur"].as_f64().is_some_and(|length| length > 0.0), "{event}"),
                "i" => assert_eq!(event["s"], "t"),
                "s" | "b" | "e" => assert!(event["id"].is_u64(), "{event}"),
                "f" => assert!(event["id"].is_u64() && event["bp"] == "e", "{event}"),
                "C" => assert!(event["args"].as_object().is_some_and(|args| !args.is_empty()), "{event}"),
                other => panic!("phase {other}: {event}"),
            }
        }
    }
}

#[test]
fn every_queue_pair_has_a_named_track() {
    let events = trace("rc-write.jsonl");
    let named: BTreeSet<(u64, u64)> =
        events.iter().filter(|event| event["name"] == "thread_name").map(track).collect();
    let used: BTreeSet<(u64, u64)> =
        events.iter().filter(|event| event["cat"] == "packet").map(track).collect();
    assert!(!used.is_empty() && used.is_subset(&named), "{used:?} {named:?}");
    let hosts: BTreeSet<String> = events
        .iter()
        .filter(|event| event["name"] == "process_name")
        .map(|event| text(&event["args"], "name"))
        .collect();
    assert_eq!(hosts, ["alice", "bob"].map(str::to_owned).into());
}

/// An arrow starts and ends inside of a slice of its track, as the UI requires, and leads forward in time.
#[test]
fn an_arrow_leads_from_post_to_completion() {
    let events = trace("loss-go-back-n.jsonl");
    let slices: Vec<((u64, u64), f64, f64)> = events
        .iter()
        .filter(|event| event["ph"] == "X")
        .map(|event| {
            (track(event), event["ts"].as_f64().unwrap_or(-1.0), event["dur"].as_f64().unwrap_or(-1.0))
        })
        .collect();
    let mut ends: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
    for event in &events {
        let phase = text(event, "ph");
        if phase != "s" && phase != "f" {
            continue;
        }
        let time = event["ts"].as_f64().expect("a time");
        let is_inside = slices.iter().any(|(place, start, length)| {
            *place == track(event) && (*start..=start + length).contains(&time)
        });
        assert!(is_inside, "{event}");
        let end = ends.entry(event["id"].as_u64().expect("an id")).or_insert((-1.0, -1.0));
        if phase == "s" { end.0 = time } else { end.1 = time }
    }
    assert_eq!(ends.len(), 2);
    assert!(ends.values().all(|(start, end)| *start >= 0.0 && end > start), "{ends:?}");
}
