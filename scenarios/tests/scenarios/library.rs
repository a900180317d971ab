//! Every scenario that we ship passes, teaches, and gives the same trace on every machine.

use softhca_scenarios::{Outcome, ParameterValues, Recording, Scenario, Verdict, simulate};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("library")
}

fn library() -> Vec<(String, String)> {
    let mut files: Vec<(String, String)> = fs::read_dir(folder())
        .expect("the library")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .map(|path| {
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            (name, fs::read_to_string(&path).expect("a text"))
        })
        .collect();
    files.sort();
    files
}

fn read(name: &str, text: &str) -> Scenario {
    Scenario::parse(name, text).unwrap_or_else(|problem| panic!("{problem}"))
}

fn run(scenario: &Scenario, seed: u64, recording: Recording) -> Outcome {
    let plan = scenario.plan(&ParameterValues::new(), seed).unwrap_or_else(|problem| panic!("{problem}"));
    simulate(&plan, recording)
}

fn complaint(outcome: &Outcome) -> String {
    let failures = outcome.failures().map(|failure| format!("{}: {}", failure.text, failure.detail));
    outcome.error.iter().cloned().chain(failures).collect::<Vec<_>>().join("\n    ")
}

/// The traces of seed 1 are kept in the repository: a change of what happens on the wire shows here.
/// `SOFTHCA_UPDATE=1` writes them anew.
#[test]
fn every_scenario_passes_with_the_trace_that_is_kept() {
    let path = folder().join("traces.txt");
    let (mut traces, mut failures) = (String::new(), String::new());
    for (name, text) in library() {
        let outcome = run(&read(&name, &text), 1, Recording::Digest);
        if outcome.verdict != Verdict::Pass {
            let _ = writeln!(failures, "{name}: {}", complaint(&outcome));
        }
        let _ = writeln!(traces, "{}  {name}", outcome.trace_sha256.unwrap_or_default());
    }
    assert!(failures.is_empty(), "{failures}");
    if std::env::var_os("SOFTHCA_UPDATE").is_some() {
        fs::write(&path, &traces).expect("traces.txt can be written");
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let changed: Vec<&str> = traces.lines().filter(|line| !kept.contains(*line)).collect();
    assert!(changed.is_empty(), "other traces than library/traces.txt has: {changed:#?}");
    assert_eq!(kept.lines().count(), traces.lines().count(), "traces.txt names scenarios that are gone");
}

#[test]
fn every_scenario_begins_with_what_it_teaches() {
    let files = library();
    assert!(files.len() >= 40, "{} scenarios", files.len());
    for (name, text) in files {
        let comment: usize = text.lines().take_while(|line| line.starts_with('#')).map(str::len).sum();
        assert!(comment >= 80, "{name}: no comment that teaches");
        let scenario = read(&name, &text);
        assert!(!scenario.title.ends_with('.') && scenario.title.len() > 10, "{name}: {:?}", scenario.title);
    }
}

/// Chance is in the seed and nowhere else: what is kept of a run does not change it, nor does a second time.
#[test]
fn recording_and_repeating_change_nothing() {
    for name in ["gbn-random-loss", "key-value-under-loss", "reorder-fatal"] {
        let text =
            fs::read_to_string(folder().join(format!("{name}.toml"))).expect("a scenario of the library");
        let scenario = read(name, &text);
        let [first, second] =
            [Recording::Digest, Recording::Everything].map(|recording| run(&scenario, 7, recording));
        assert_eq!(first.trace_sha256, second.trace_sha256, "{name}");
    }
}

/// No scenario depends on the order in which data becomes visible, nor on the microsecond that READs then take longer.
#[test]
fn every_scenario_passes_in_any_order_of_placement() {
    // Streams of bulk data that nobody reads take long, because each cache line is a piece of its own.
    const BULK: [&str; 4] = ["dcqcn", "incast", "livelock", "victim-flow"];
    let mut failures = String::new();
    for (name, text) in library() {
        if BULK.iter().any(|bulk| name.contains(bulk)) {
            continue;
        }
        let mut table: toml::Table = text.parse().expect("TOML");
        for placement in ["out-of-order", "adversarial"] {
            let device = table.entry("device").or_insert_with(|| toml::Table::new().into());
            device.as_table_mut().expect("a table").insert("placement".into(), placement.into());
            let outcome = run(&read(&name, &table.to_string()), 1, Recording::Digest);
            if outcome.verdict != Verdict::Pass {
                let _ = writeln!(failures, "{name}, {placement}: {}", complaint(&outcome));
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn random_loss_is_survived_with_many_seeds() {
    for name in ["gbn-random-loss", "gbn-burst-loss", "key-value-under-loss"] {
        let text =
            fs::read_to_string(folder().join(format!("{name}.toml"))).expect("a scenario of the library");
        let scenario = read(name, &text);
        for seed in 1..=20 {
            let outcome = run(&scenario, seed, Recording::Digest);
            let replay = format!("softhca run scenarios/library/{name}.toml --seed {seed}");
            assert_eq!(outcome.verdict, Verdict::Pass, "{replay}\n{}", complaint(&outcome));
        }
    }
}

#[test]
fn the_schema_in_the_repository_is_that_of_the_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema.json");
    let schema = softhca_scenarios::generate_schema();
    if std::env::var_os("SOFTHCA_UPDATE").is_some() {
        fs::write(&path, &schema).expect("schema.json can be written");
    }
    assert!(
        softhca_scenarios::SCHEMA == schema,
        "run with SOFTHCA_UPDATE=1 to write scenarios/schema.json anew"
    );
}
