//! The card in a browser: a scenario goes in, its result, event log and frames come out.
//!
//! [`run_scenario`] is the same on every platform. Four functions export it to WebAssembly: the page allocates with [`input`], writes
//! the scenario there, calls [`run`], and reads the memory at [`output`]. This side owns all memory, so the page frees nothing.

use serde::Serialize;
use softhca_explorer::{Run, WhyReport};
use softhca_scenarios::{
    Diagnostic, ExpectationOutcome, Recording, RuleOutcome, Scenario, Verdict, simulate,
};
use std::sync::Mutex;

/// What came of a scenario.
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

/// Where a scenario is wrong, and how.
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

/// Reads, runs and judges a scenario with this seed.
pub fn run_scenario(text: &str, seed: u64) -> RunOutput {
    let plan = match Scenario::parse("scenario.toml", text)
        .and_then(|scenario| scenario.plan(&Default::default(), seed))
    {
        Ok(plan) => plan,
        Err(problem) => return parse_failure(&problem),
    };
    let outcome = simulate(&plan, Recording::Everything);
    let artefacts = outcome.artifacts.unwrap_or_default();
    // A run that broke off has no log.
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

/// Room for a scenario of this many bytes.
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
    // Whoever panics here is stopped by the browser with one word; what it said is left as the result.
    std::panic::set_hook(Box::new(|panic| set_output([panic.to_string().into(), Vec::new(), Vec::new()])));
    set_output(Default::default());
    let input = INPUT.lock().expect("there is one thread");
    let RunOutput { result, events, frames } = run_scenario(&String::from_utf8_lossy(&input), seed);
    set_output([result, events, frames]);
}

fn set_output(parts: [Vec<u8>; 3]) {
    *OUTPUT.lock().expect("there is one thread") = parts;
}

/// Where a part of the outcome is: 0 the result, 1 the event log, 2 the frames.
#[unsafe(no_mangle)]
pub extern "C" fn output(part: usize) -> *const u8 {
    OUTPUT.lock().expect("there is one thread").get(part).map_or(std::ptr::null(), |bytes| bytes.as_ptr())
}

/// How many bytes it has.
#[unsafe(no_mangle)]
pub extern "C" fn output_length(part: usize) -> usize {
    OUTPUT.lock().expect("there is one thread").get(part).map_or(0, Vec::len)
}
