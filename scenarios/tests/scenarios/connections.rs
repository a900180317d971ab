//! Connections that steps make: every scenario about them holds with every value of its parameters.

use softhca_scenarios::{Recording, SWEEP_ALL, Scenario, Verdict, simulate};
use std::fs;
use std::path::Path;

/// The scenarios of the library about connections, by name.
fn library() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("library");
    let entries = fs::read_dir(folder).expect("the library").map(|entry| entry.expect("an entry").path());
    let mut files: Vec<(String, String)> = entries
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?.to_owned();
            let text = fs::read_to_string(&path).ok()?;
            (name.starts_with("cm-") && name.ends_with(".toml")).then_some((name, text))
        })
        .collect();
    files.sort();
    files
}

#[test]
fn every_message_is_lost_late_and_doubled_with_the_outcome_that_its_scenario_tells() {
    let mut swept = Vec::new();
    for (name, text) in library() {
        let scenario = Scenario::parse(&name, &text).unwrap_or_else(|problem| panic!("{problem}"));
        let names =
            ["fault", "message"].into_iter().filter(|name| text.contains(&format!("\n{name} = {{ default")));
        let set: Vec<(String, String)> = names.map(|name| (name.into(), SWEEP_ALL.into())).collect();
        let runs = scenario.sweep(&set).expect("the parameters have values");
        for values in &runs {
            let plan = scenario.plan(values, 1).unwrap_or_else(|problem| panic!("{problem}"));
            let outcome = simulate(&plan, Recording::Digest);
            let failures: Vec<String> =
                outcome.failures().map(|failure| format!("{}: {}", failure.text, failure.detail)).collect();
            assert_eq!(
                outcome.verdict,
                Verdict::Pass,
                "{name} {values:?}: {failures:#?} {:?}",
                outcome.error
            );
        }
        if runs.len() == 3 {
            swept.push(name);
        }
    }
    let messages = ["drep", "dreq", "mra", "rej", "rep", "req", "rtu", "sidr-rep", "sidr-req"];
    assert_eq!(swept, messages.map(|message| format!("cm-{message}.toml")));
}
