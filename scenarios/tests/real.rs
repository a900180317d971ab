//! The library on real sockets: the same verdicts and the same story as in virtual time.

#![cfg(feature = "udp")]

use softhca_scenarios::{Recording, Scenario, Values, Verdict, real, simulate};
use softhca_trace::log::What;
use softhca_trace::{Capture, Contents, EventLogReader, Packet, Style};
use std::fs;
use std::path::Path;

/// Nothing in these depends on how long something takes; where chance decides about packets that are sent again, the
/// verdicts are compared.
#[test]
fn the_library_tells_the_same_story_on_real_sockets() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("library");
    let mut files: Vec<_> =
        fs::read_dir(folder).expect("the library").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    let (mut compared, mut differences) = (0, Vec::new());
    for path in files.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
    {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let scenario =
            Scenario::read(&name, &fs::read_to_string(&path).expect("a text")).expect("a scenario");
        let plan = scenario.plan(&Values::new(), 1).expect("a plan");
        if plan.needs_virtual_time().is_some() || plan.timed_expectations().next().is_some() {
            continue;
        }
        compared += 1;
        let virtual_time = simulate(&plan, Recording::Everything);
        let real_time = real::perform(&plan, Recording::Digest);
        if real_time.verdict != virtual_time.verdict {
            let failures: Vec<String> =
                real_time.failures().map(|failure| format!("{}: {}", failure.text, failure.detail)).collect();
            differences.push(format!("{name}: {:?} {failures:?} {:?}", real_time.verdict, real_time.error));
        }
        if let (false, Some(ours), Some(theirs)) =
            (plan.leaves_to_chance(), &virtual_time.story, &real_time.story)
        {
            differences.extend(
                ours.differences(theirs).into_iter().map(|difference| format!("{name}: {difference}")),
            );
        }
        assert_ne!(virtual_time.verdict, Verdict::Error, "{name}: {:?}", virtual_time.error);
    }
    assert!(compared >= 25, "only {compared} scenarios were compared");
    assert!(differences.is_empty(), "{differences:#?}");
}

fn plan_of(text: &str) -> softhca_scenarios::Plan {
    Scenario::read("test.toml", text).expect("a scenario").plan(&Values::new(), 1).expect("a plan")
}

const LOSS: &str = include_str!("../library/fatal-lost-write-middle.toml");

#[test]
fn a_real_run_leaves_a_log_a_capture_and_ladders() {
    let outcome = real::perform(&plan_of(LOSS), Recording::Everything);
    assert_eq!(outcome.verdict, Verdict::Pass, "{:?}", outcome.error);
    let artefacts = outcome.artefacts.expect("they were asked for");
    let entries: Vec<_> = EventLogReader::new(&artefacts.events[..])
        .expect("a log")
        .map(|entry| entry.expect("an entry"))
        .collect();
    let fault = entries.iter().find(|entry| matches!(entry.what, What::Fault { .. })).expect("the fault");
    assert_eq!(fault.host, "alice");
    assert_eq!(fault.trigger.as_deref(), Some("dropped by \"lose the second packet\""));
    assert!(entries.iter().any(|entry| entry.host == "bob"));
    let comment = b"dropped by \"lose the second packet\"";
    assert_eq!(artefacts.capture.windows(comment.len()).filter(|window| window == comment).count(), 1);
    let records: Vec<_> =
        Capture::new(&artefacts.capture[..]).expect("a capture").map(|record| record.expect("one")).collect();
    let roce = records.iter().filter(|record| matches!(Packet::new(record, 0).contents, Contents::Roce(_)));
    // Four packets of the WRITE, and the NAK.
    assert!(roce.count() >= 5);
    let drawn: Vec<String> = artefacts.ladders.iter().map(|ladder| ladder.draw(Style::default())).collect();
    assert!(drawn.join("\n").contains("lose the second packet"), "{drawn:?}");
}

#[test]
fn a_real_run_that_fails_is_written_down_whether_or_not_somebody_asked() {
    let wrong = format!("{LOSS}\n[[expect]]\ncompletion = {{ qp = \"alice.1\", status = \"success\" }}\n");
    assert!(real::perform(&plan_of(&wrong), Recording::Digest).artefacts.is_some());
    assert!(real::perform(&plan_of(LOSS), Recording::Digest).artefacts.is_none());
}
