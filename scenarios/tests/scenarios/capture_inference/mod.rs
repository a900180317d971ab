//! What a capture alone shows of every scenario of the library, compared with the event log of the same run.
//!
//! Nothing that is marked `known` may be wrong. The share of causes that a capture shows stands in
//! docs/reference/why.md; `SOFTHCA_BLESS=1` writes the table, and `SOFTHCA_SHOW=1` prints each difference.

mod captures;
mod placed_cause;
mod random_faults;
mod statements;
mod truth;

use placed_cause::{Addresses, Exclusion, LogCause, PlacedCause, inferred_causes, log_causes};
use softhca_scenarios::{ParameterValues, Recording, Scenario, simulate};
use softhca_trace::log::{CaptureConverter, Certainty, Entry};
use softhca_trace::{CaptureReader, EventLogReader, Packet};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("library")
}

/// The names and texts of the library's scenarios.
fn library() -> Vec<(String, String)> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder())
        .expect("the library")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    files.sort();
    let name = |path: &Path| path.file_stem().expect("a name").to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), fs::read_to_string(path).expect("a text"))).collect()
}

#[derive(Default)]
struct Recall {
    scenarios: BTreeSet<String>,
    in_log: usize,
    packets: usize,
    excluded: usize,
    known: usize,
    inferred: usize,
    ambiguous: usize,
    /// Found at its place, as another cause that a capture cannot distinguish from it.
    as_another: usize,
    /// Found in the capture and not in the log.
    only_in_capture: usize,
}

/// Causes that a capture cannot distinguish from the one that it names: of the finding, and of the log.
const ALIKE: &[(&str, &str)] = &[
    ("request-lost", "damaged"),
    ("request-lost", "reordered"),
    ("request-lost", "delayed"),
    ("response-lost", "damaged"),
    ("response-lost", "delayed"),
    ("reordered", "request-lost"),
];

/// Whether a finding says that this answer or its request was lost.
fn is_either(finding: &PlacedCause, certainty: Certainty, answer: &PlacedCause) -> bool {
    finding.code == "request-lost" && finding.psn == answer.psn && certainty == Certainty::Ambiguous
}

/// The most certain finding for a cause of the log, at one of its places.
fn finding_of(cause: &LogCause, found: &BTreeMap<PlacedCause, Certainty>) -> Option<Certainty> {
    let exact = cause.places.iter().filter_map(|place| found.get(place).copied()).min();
    exact.or_else(|| {
        let either =
            |place: &&PlacedCause| found.iter().any(|(finding, sure)| is_either(finding, *sure, place));
        let is_answer = cause.code() == "response-lost";
        cause.places.iter().find(|place| is_answer && either(place)).map(|_| Certainty::Ambiguous)
    })
}

fn is_alike(finding: &PlacedCause, truth: &PlacedCause) -> bool {
    ALIKE.contains(&(finding.code.as_str(), truth.code.as_str()))
        && (&finding.sender, finding.dest_qp, finding.psn) == (&truth.sender, truth.dest_qp, truth.psn)
}

/// Runs with a longer log, in bytes, are left out: they take long, and the page names them.
const MAX_LOG: usize = 100_000_000;

#[test]
fn a_capture_shows_what_the_log_knows() {
    let mut recalls: BTreeMap<String, Recall> = BTreeMap::new();
    let mut exclusions: BTreeMap<(String, Exclusion), usize> = BTreeMap::new();
    let mut left_out = Vec::new();
    let (mut mistakes, mut report) = (String::new(), String::new());
    for (name, text) in library() {
        let scenario = Scenario::parse(&name, &text).expect("a scenario");
        let plan = scenario.plan(&ParameterValues::new(), 1).expect("a plan");
        let Some(artifacts) = simulate(&plan, Recording::Everything).artifacts else { continue };
        if artifacts.events.len() > MAX_LOG {
            left_out.push(format!("`{name}`"));
            continue;
        }
        let reader = EventLogReader::new(&artifacts.events[..]).expect("a log");
        let header = reader.header().clone();
        let log: Vec<Entry> = reader.map(|entry| entry.expect("an entry")).collect();
        let truth = log_causes(&Addresses::new(&header), &log, text.contains("\"go-back-0\""));
        let places: BTreeSet<PlacedCause> =
            truth.iter().flat_map(|cause| cause.places.iter().cloned()).collect();
        let mut converter = CaptureConverter::default();
        let mut start_ns = None;
        for record in CaptureReader::new(&artifacts.capture[..]).expect("a capture") {
            let record = record.expect("a whole record");
            converter.push(&Packet::new(&record, *start_ns.get_or_insert(record.time_ns)));
        }
        let (header, entries) = converter.finish(&name);
        let inferred: Vec<Entry> = entries.map(|(_, entry)| entry).collect();
        let found = inferred_causes(&Addresses::new(&header), &inferred);
        for (cause, certainty) in &found {
            let is_right = places.contains(cause)
                || places.iter().any(|other| is_alike(cause, other))
                || places
                    .iter()
                    .any(|other| other.code == "response-lost" && is_either(cause, *certainty, other));
            if !is_right {
                recalls.entry(cause.code.clone()).or_default().only_in_capture += 1;
                let _ = writeln!(report, "{name}: only in the capture: {certainty:?} {cause:?}");
                if *certainty == Certainty::Known {
                    let _ = writeln!(mistakes, "{name}: {cause:?} is marked known");
                }
            }
        }
        for cause in &truth {
            let recall = recalls.entry(cause.code().to_owned()).or_default();
            recall.scenarios.insert(name.clone());
            recall.in_log += 1;
            recall.packets += cause.places.len();
            if let Some(exclusion) = cause.exclusion {
                recall.excluded += 1;
                *exclusions.entry((cause.code().to_owned(), exclusion)).or_default() += 1;
                continue;
            }
            let is_found_as_another =
                || found.keys().any(|finding| cause.places.iter().any(|place| is_alike(finding, place)));
            match finding_of(cause, &found) {
                Some(Certainty::Known) => recall.known += 1,
                Some(Certainty::Inferred) => recall.inferred += 1,
                Some(Certainty::Ambiguous) => recall.ambiguous += 1,
                None if is_found_as_another() => recall.as_another += 1,
                None => {
                    let _ = writeln!(report, "{name}: not in the capture: {:?}", cause.places);
                }
            }
        }
    }
    if std::env::var_os("SOFTHCA_SHOW").is_some() {
        println!("{report}");
    }
    assert!(mistakes.is_empty(), "{mistakes}");
    let mut table = String::from(
        "| cause | scenarios | packets | in the logs | not comparable | known | inferred | ambiguous | as another cause | recall | only in the capture |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for (code, recall) in &recalls {
        let Recall {
            scenarios,
            in_log,
            packets,
            excluded,
            known,
            inferred,
            ambiguous,
            as_another,
            only_in_capture,
        } = recall;
        let (found, comparable) = (known + inferred + ambiguous, in_log - excluded);
        let share = (found * 100).checked_div(comparable).map_or("–".into(), |share| format!("{share} %"));
        let count = scenarios.len();
        let _ = writeln!(
            table,
            "| `{code}` | {count} | {packets} | {in_log} | {excluded} | {known} | {inferred} | {ambiguous} | {as_another} | {share} | {only_in_capture} |"
        );
    }
    table.push_str("\n| not comparable | why | packets |\n|---|---|---|\n");
    for ((code, why), count) in &exclusions {
        let _ = writeln!(table, "| `{code}` | {why} | {count} |");
    }
    if !left_out.is_empty() {
        let _ = writeln!(table, "\nLeft out because their logs are long: {}.", left_out.join(", "));
    }
    check_page(&table);
}

/// Compares the table with that of the reference page, or writes it.
fn check_page(table: &str) {
    const START: &str = "<!-- recall: SOFTHCA_BLESS=1 cargo test -p softhca-scenarios --test scenarios capture_inference writes this part -->\n";
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
