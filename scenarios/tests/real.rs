//! The library on real sockets: the same verdicts and the same story as in virtual time.

#![cfg(feature = "udp")]

use softhca_scenarios::{Recording, Scenario, Values, Verdict, real, simulate};
use std::fs;
use std::path::Path;

/// Nothing in these depends on how long something takes: everywhere else a real clock may tell another story.
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
        if let (Some(ours), Some(theirs)) = (&virtual_time.story, &real_time.story) {
            differences.extend(
                ours.differences(theirs).into_iter().map(|difference| format!("{name}: {difference}")),
            );
        }
        assert_ne!(virtual_time.verdict, Verdict::Error, "{name}: {:?}", virtual_time.error);
    }
    assert!(compared >= 25, "only {compared} scenarios were compared");
    assert!(differences.is_empty(), "{differences:#?}");
}
