//! Tests that need a program that may not be installed.
//!
//! Their targets use libtest-mimic: a test whose program is missing prints that and counts as ignored. With
//! SOFTHCA_REQUIRE_TOOLS=1, as in CI, it fails instead.

use libtest_mimic::{Arguments, Failed, Trial};
use std::process::{Command, ExitCode, Stdio};

/// Whether a program can be started.
pub fn is_installed(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok()
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
        return Trial::test(name, move || {
            test();
            Ok(())
        });
    }
    if std::env::var_os("SOFTHCA_REQUIRE_TOOLS").is_some_and(|value| value == "1") {
        return Trial::test(name, || Err(Failed::from(reason)));
    }
    eprintln!("skipped: {reason}");
    Trial::test(name, || Ok(())).with_ignored_flag(true)
}

/// The name of a group of tests, and what makes them.
pub type Group<'a> = (&'a str, fn() -> Vec<Trial>);

/// Runs groups of tests. `--list` and filters show a test of the group `g` as `[g] name`.
pub fn run_groups(groups: &[Group]) -> ExitCode {
    let trials = |(group, trials): &Group| -> Vec<Trial> {
        trials().into_iter().map(|trial| trial.with_kind(*group)).collect()
    };
    run(groups.iter().flat_map(trials).collect())
}

/// Runs the tests that the command line selects.
pub fn run(tests: Vec<Trial>) -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}
