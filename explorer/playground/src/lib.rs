//! The emulator in a browser: takes a scenario, returns its result, event log and frames.
//!
//! [`run_scenario`] is the same on every platform. Five functions export it to WebAssembly: the page allocates with [`input`], writes
//! the scenario there, calls [`run`] or [`check`], and reads the memory at [`output`]. This module owns all memory, so the page frees nothing.

use serde::Serialize;
use softhca_explorer::{Run, WhyReport};
use softhca_scenarios::{
    Diagnostic, ExpectationOutcome, Plan, Recording, RuleOutcome, Scenario, Verdict, simulate,
};
use std::sync::Mutex;

/// The output of a scenario.
#[derive(Debug, Default)]
pub struct RunOutput {
    /// The result, in JSON.
    pub result: Vec<u8>,
    /// The event log.
    pub events: Vec<u8>,
    /// The frames, as the page reads them.
    pub frames: Vec<u8>,
}

#[derive(Serialize)]
struct ParseFailure<'a> {
    problem: ProblemLocation<'a>,
}

/// The position and text of an error in a scenario.
#[derive(Serialize)]
struct ProblemLocation<'a> {
    line: usize,
    column: usize,
    message: &'a str,
    help: Option<&'a str>,
}

#[derive(Serialize)]
struct RunResult<'a> {
    title: &'a str,
    verdict: Verdict,
    trace_sha256: Option<&'a str>,
    error: Option<&'a str>,
    expectations: &'a [ExpectationOutcome],
    rules: &'a [RuleOutcome],
    why: Option<&'a WhyReport>,
}

fn plan(text: &str, seed: u64) -> Result<Plan, Diagnostic> {
    Scenario::parse("scenario.toml", text).and_then(|scenario| scenario.plan(&Default::default(), seed))
}

/// Checks a scenario without running it: its error, or an empty result.
pub fn check_scenario(text: &str) -> RunOutput {
    plan(text, 1).map_or_else(|problem| parse_failure(&problem), |_| RunOutput::default())
}

/// Runs a scenario with this seed and evaluates its expectations.
pub fn run_scenario(text: &str, seed: u64) -> RunOutput {
    let plan = match plan(text, seed) {
        Ok(plan) => plan,
        Err(problem) => return parse_failure(&problem),
    };
    let outcome = simulate(&plan, Recording::Everything);
    let artefacts = outcome.artifacts.unwrap_or_default();
    // A run that failed to start has no log.
    let run = Run::from_log(&plan.title, &artefacts.events[..], Some(&artefacts.capture[..])).ok();
    let done = RunResult {
        title: &plan.title,
        verdict: outcome.verdict,
        trace_sha256: outcome.trace_sha256.as_deref(),
        error: outcome.error.as_deref(),
        expectations: &outcome.expectations,
        rules: &outcome.rules,
        why: run.as_ref().and_then(Run::why),
    };
    let result = json(&done);
    RunOutput {
        result,
        events: artefacts.events,
        frames: run.map_or(Vec::new(), |run| run.frames().to_vec()),
    }
}

fn parse_failure(problem: &Diagnostic) -> RunOutput {
    let Diagnostic { line, column, message, help, .. } = problem;
    let problem = ProblemLocation { line: *line, column: *column, message, help: help.as_deref() };
    RunOutput { result: json(&ParseFailure { problem }), ..RunOutput::default() }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings and numbers are JSON")
}

static INPUT: Mutex<Vec<u8>> = Mutex::new(Vec::new());
static OUTPUT: Mutex<[Vec<u8>; 3]> = Mutex::new([Vec::new(), Vec::new(), Vec::new()]);

/// Allocates memory for a scenario of this many bytes.
#[unsafe(no_mangle)]
pub extern "C" fn input(length: usize) -> *mut u8 {
    let mut input = INPUT.lock().expect("there is one thread");
    input.clear();
    input.resize(length, 0);
    input.as_mut_ptr()
}

/// Runs the scenario that was written to [`input`].
#[unsafe(no_mangle)]
pub extern "C" fn run(seed: u64) {
    execute(|text| run_scenario(text, seed));
}

/// Checks the scenario that was written to [`input`].
#[unsafe(no_mangle)]
pub extern "C" fn check() {
    execute(check_scenario);
}

fn execute(action: impl FnOnce(&str) -> RunOutput) {
    // The browser reports a panic without its message; the message becomes the result.
    std::panic::set_hook(Box::new(|panic| set_output([panic.to_string().into(), Vec::new(), Vec::new()])));
    set_output(Default::default());
    let input = INPUT.lock().expect("there is one thread");
    let RunOutput { result, events, frames } = action(&String::from_utf8_lossy(&input));
    set_output([result, events, frames]);
}

fn set_output(parts: [Vec<u8>; 3]) {
    *OUTPUT.lock().expect("there is one thread") = parts;
}

/// The address of a part of the output: 0 the result, 1 the event log, 2 the frames.
#[unsafe(no_mangle)]
pub extern "C" fn output(part: usize) -> *const u8 {
    OUTPUT.lock().expect("there is one thread").get(part).map_or(std::ptr::null(), |bytes| bytes.as_ptr())
}

/// The number of bytes of that part.
#[unsafe(no_mangle)]
pub extern "C" fn output_length(part: usize) -> usize {
    OUTPUT.lock().expect("there is one thread").get(part).map_or(0, Vec::len)
}
