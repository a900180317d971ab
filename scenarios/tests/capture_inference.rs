//! What a capture alone shows of every scenario of the library, compared with the event log of the same run.
//!
//! Nothing that is marked `known` may be wrong. The share of causes that a capture shows stands in
//! docs/reference/why.md; `SOFTHCA_BLESS=1` writes the table.

use softhca_scenarios::{ParameterValues, Recording, Scenario, simulate};
use softhca_trace::log::{CaptureConverter, Certainty, Entry, Header, ObservedCause};
use softhca_trace::{CaptureReader, EventLogReader, Packet};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("library")
}

/// A cause at a place: the code, the address of the host that the entry is about, and the PSN.
type PlacedCause = (String, String, Option<u32>);

/// The causes of entries, with how often and how sure.
fn causes<'a>(header: &Header, entries: impl Iterator<Item = &'a Entry>) -> BTreeMap<PlacedCause, Certainty> {
    let address = |host: &str| {
        let point = header.vantage_points.iter().find(|point| point.host == host);
        point.map_or(host.to_owned(), |point| point.address.to_string())
    };
    let mut causes = BTreeMap::new();
    for entry in entries {
        let Some(ObservedCause { code, psn, certainty }) = ObservedCause::of(entry) else { continue };
        // A switch has no address in a capture; the packet is known by its PSN.
        let host =
            if code.ends_with("lost") || code == "damaged" { String::new() } else { address(&entry.host) };
        let known = causes.entry((code, host, psn)).or_insert(certainty);
        *known = certainty.min(*known);
    }
    causes
}

#[derive(Default)]
struct Recall {
    scenarios: BTreeSet<String>,
    in_log: usize,
    known: usize,
    inferred: usize,
    ambiguous: usize,
    /// Found in the capture and not in the log.
    wrong: usize,
}

/// Larger runs take long and show nothing that smaller ones do not.
const MAX_EVENTS: usize = 20_000_000;

#[test]
fn a_capture_shows_what_the_log_knows() {
    let mut recalls: BTreeMap<String, Recall> = BTreeMap::new();
    let mut mistakes = String::new();
    let mut files: Vec<PathBuf> = fs::read_dir(folder())
        .expect("the library")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    files.sort();
    for path in files {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let scenario =
            Scenario::parse(&name, &fs::read_to_string(&path).expect("a text")).expect("a scenario");
        let plan = scenario.plan(&ParameterValues::new(), 1).expect("a plan");
        let Some(artifacts) = simulate(&plan, Recording::Everything).artifacts else { continue };
        if artifacts.events.len() > MAX_EVENTS {
            continue;
        }
        let reader = EventLogReader::new(&artifacts.events[..]).expect("a log");
        let header = reader.header().clone();
        let log: Vec<Entry> = reader.map(|entry| entry.expect("an entry")).collect();
        let truth = causes(&header, log.iter());
        let mut converter = CaptureConverter::default();
        let mut start_ns = None;
        for record in CaptureReader::new(&artifacts.capture[..]).expect("a capture") {
            let record = record.expect("a whole record");
            converter.push(&Packet::new(&record, *start_ns.get_or_insert(record.time_ns)));
        }
        let (header, entries) = converter.finish(&name);
        let inferred: Vec<Entry> = entries.map(|(_, entry)| entry).collect();
        let found = causes(&header, inferred.iter());
        for (cause, certainty) in &found {
            let recall = recalls.entry(cause.0.clone()).or_default();
            if !truth.contains_key(cause) {
                recall.wrong += 1;
                if *certainty == Certainty::Known {
                    let _ = writeln!(mistakes, "{name}: {cause:?} is marked known");
                }
            }
        }
        for cause in truth.keys() {
            let recall = recalls.entry(cause.0.clone()).or_default();
            recall.scenarios.insert(name.clone());
            recall.in_log += 1;
            match found.get(cause) {
                Some(Certainty::Known) => recall.known += 1,
                Some(Certainty::Inferred) => recall.inferred += 1,
                Some(Certainty::Ambiguous) => recall.ambiguous += 1,
                None => {}
            }
        }
    }
    assert!(mistakes.is_empty(), "{mistakes}");
    let mut table = String::from(
        "| cause | scenarios | in the logs | known | inferred | ambiguous | recall | only in the capture |\n|---|---|---|---|---|---|---|---|\n",
    );
    for (code, recall) in &recalls {
        let Recall { scenarios, in_log, known, inferred, ambiguous, wrong } = recall;
        let found = known + inferred + ambiguous;
        let share = if *in_log == 0 { "–".to_owned() } else { format!("{} %", found * 100 / in_log) };
        let count = scenarios.len();
        let _ = writeln!(
            table,
            "| `{code}` | {count} | {in_log} | {known} | {inferred} | {ambiguous} | {share} | {wrong} |"
        );
    }
    check_page(&table);
}

/// Compares the table with that of the reference page, or writes it.
fn check_page(table: &str) {
    const START: &str = "<!-- recall: SOFTHCA_BLESS=1 cargo test -p softhca-scenarios --test capture_inference writes this part -->\n";
    const END: &str = "<!-- end of recall -->\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/why.md");
    let page = fs::read_to_string(&path).expect("the reference page");
    let (head, rest) = page.split_once(START).expect("the start of the table");
    let (written, tail) = rest.split_once(END).expect("the end of the table");
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        return fs::write(&path, [head, START, table, END, tail].concat())
            .expect("a page that can be written");
    }
    assert_eq!(written, table, "run again with SOFTHCA_BLESS=1");
}
