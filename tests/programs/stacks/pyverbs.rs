//! rdma-core's test suite from Debian's python3-pyverbs. The book lists the skipped tests with their reasons.

use crate::rig::Rig;
use libtest_mimic::Trial;
use softhca_tests::tools;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const SUITE: &str = "/usr/share/doc/rdma-core/tests";
const DOCUMENTED: &str = include_str!("../../../docs/reference/pyverbs.md");
/// The minimum number of passed tests on any machine.
const PASSED: usize = 100;

/// The skips that the book lists: the reason without numbers, and the number of tests.
fn documented() -> BTreeMap<String, usize> {
    let rows = DOCUMENTED.lines().filter(|line| line.starts_with("| `"));
    let fields = rows.map(|row| row.split('|').map(str::trim).collect::<Vec<_>>());
    fields
        .map(|fields| (without_numbers(fields[1].trim_matches('`')), fields[2].parse().expect("a number")))
        .collect()
}

fn without_numbers(text: &str) -> String {
    text.split(|c: char| c.is_ascii_digit()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("N")
}

/// The suite, which Debian's python3-pyverbs installs as documentation.
pub fn trial() -> Trial {
    let is_installed = Path::new(SUITE).is_dir();
    let reason = format!("{SUITE} of Debian's python3-pyverbs is not installed");
    tools::needs_condition(
        is_installed,
        reason,
        "the_rdma_core_test_suite_passes",
        the_rdma_core_test_suite_passes,
    )
}

fn the_rdma_core_test_suite_passes() {
    let mut rig = Rig::new();
    let folder = rig.file("tests");
    let script = format!("cp -r {SUITE} {folder} && gunzip -f {folder}/*.gz");
    let copied = Command::new("sh").args(["-c", &script]).status().expect("a shell");
    assert!(copied.success(), "{script}");
    let file = format!("{folder}/run_tests.py");
    let seen = rig.run(&["/usr/bin/python3", &file, "--gid", "0", "-v"]);
    let text = &seen.text;
    assert!(seen.success, "{text}");
    let passed = text.lines().filter(|line| line.ends_with("... ok")).count();
    assert!(passed >= PASSED, "{passed} tests passed: {text}");

    let mut skipped: BTreeMap<String, usize> = BTreeMap::new();
    for line in text.lines() {
        if let Some((_, reason)) = line.split_once("... skipped ") {
            *skipped.entry(without_numbers(reason.trim_matches(['\'', '"']))).or_default() += 1;
        }
    }
    let documented = documented();
    let unexplained: Vec<_> =
        skipped.iter().filter(|(reason, _)| !documented.contains_key(*reason)).collect();
    assert!(unexplained.is_empty(), "docs/reference/pyverbs.md does not explain {unexplained:?}");
    // Machines differ in GPUs, huge pages and iproute2; a reason covers at most the listed number of tests.
    for (reason, count) in &skipped {
        assert!(count <= &documented[reason], "{count} tests are skipped for {reason:?}");
    }
}
