//! Tests that need a program that may not be installed.
//!
//! Their targets use libtest-mimic: a test whose program is missing prints that and counts as ignored. With
//! SOFTHCA_REQUIRE_TOOLS=1, as in CI, it fails instead.

use crate::namespace;
use libtest_mimic::{Arguments, Failed, Trial};
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Tests that run at once, per processor, and at most: a browser and the processes of a program take memory.
const TESTS_PER_PROCESSOR: usize = 4;
const MAX_TESTS: usize = 32;

/// Longer than any test takes. A test that does not end by itself ends its binary, so that no run of the tests hangs.
const TEST_LIMIT: Duration = Duration::from_secs(1200);

/// Whether a program is in `PATH`. It is not started: a run lists hundreds of tests, and some programs start slowly.
pub fn is_installed(program: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
}

/// A test that needs a program, with the name of its function.
#[macro_export]
macro_rules! needs {
    ($program:expr, $test:ident) => {
        $crate::tools::needs($program, stringify!($test), $test)
    };
}

/// A test that needs `program` and panics on failure.
pub fn needs(program: &'static str, name: &str, test: fn()) -> Trial {
    needs_with(program, name, test)
}

/// As [`needs()`], for a closure.
pub fn needs_with(program: &'static str, name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    needs_condition(is_installed(program), format!("{program} is not installed"), name, test)
}

/// A test that needs a condition of the machine; `reason` says what is missing.
pub fn needs_condition(
    holds: bool,
    reason: String,
    name: &str,
    test: impl FnOnce() + Send + 'static,
) -> Trial {
    if holds {
        let test_name = name.to_owned();
        return Trial::test(name, move || {
            let (running, end) = channel::<()>();
            std::thread::spawn(move || {
                if end.recv_timeout(TEST_LIMIT) == Err(RecvTimeoutError::Timeout) {
                    eprintln!("{test_name} does not end within {TEST_LIMIT:?}");
                    std::process::abort();
                }
            });
            test();
            drop(running);
            Ok(())
        });
    }
    if is_required() {
        return Trial::test(name, || Err(Failed::from(reason)));
    }
    eprintln!("skipped: {reason}");
    Trial::test(name, || Ok(())).with_ignored_flag(true)
}

/// Whether a missing tool fails the test, as in CI.
pub fn is_required() -> bool {
    std::env::var_os("SOFTHCA_REQUIRE_TOOLS").is_some_and(|value| value == "1")
}

/// A test that needs a network namespace.
pub fn needs_namespace(name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    needs_condition(namespace::wrapper().is_some(), namespace::NOT_ALLOWED.into(), name, test)
}

/// The name of a group of tests, and what makes them.
pub type Group = (&'static str, fn() -> Vec<Trial>);

/// Runs groups of tests. `--list` and filters show a test of the group `g` as `[g] name`.
///
/// The tests wait for other processes most of the time, so more of them run at once than there are processors. Each group
/// is spread over the whole run: programs that poll run beside tests that wait.
pub fn run_groups(groups: &[Group]) -> ExitCode {
    let mut order = Vec::new();
    for (group, trials) in groups {
        let trials = trials();
        let count = trials.len();
        let places = (0..count).map(|index| index * 1000 / count);
        order.extend(places.zip(trials.into_iter().map(|trial| trial.with_kind(*group))));
    }
    order.sort_by_key(|(place, _)| *place);
    let trials = order.into_iter().map(|(_, trial)| trial).collect();
    let mut arguments = Arguments::from_args();
    let processors = std::thread::available_parallelism().map_or(1, Into::into);
    arguments.test_threads.get_or_insert((TESTS_PER_PROCESSOR * processors).min(MAX_TESTS));
    libtest_mimic::run(&arguments, trials).exit_code()
}
