//! The card in a browser: a scenario goes in, its result, event log and frames come out.
//!
//! [`play`] is the same in every place. Around it are four functions for WebAssembly: the page asks for room with [`input`], writes
//! the scenario there, calls [`run`], and reads what [`output`] points at. Everything is owned on this side, so nothing has to be freed.

use serde::Serialize;
use softhca_explorer::{Run, Why};
use softhca_scenarios::{ExpectationOutcome, Problem, Recording, RuleOutcome, Scenario, Verdict, simulate};
use std::sync::Mutex;

/// What came of a scenario.
#[derive(Debug, Default)]
pub struct Played {
    /// The result, in JSON.
    pub result: Vec<u8>,
    /// The event log.
    pub events: Vec<u8>,
    /// The frames, as the page reads them.
    pub frames: Vec<u8>,
}

#[derive(Serialize)]
struct Failed<'a> {
    problem: At<'a>,
}

/// Where a scenario is wrong, and how.
#[derive(Serialize)]
struct At<'a> {
    line: usize,
    column: usize,
    message: &'a str,
    help: Option<&'a str>,
}

#[derive(Serialize)]
struct Done<'a> {
    title: &'a str,
    verdict: Verdict,
    trace_sha256: Option<&'a str>,
    error: Option<&'a str>,
    expectations: &'a [ExpectationOutcome],
    rules: &'a [RuleOutcome],
    why: Option<&'a Why>,
}

/// Reads, runs and judges a scenario with this seed.
pub fn play(text: &str, seed: u64) -> Played {
    let plan = match Scenario::read("scenario.toml", text)
        .and_then(|scenario| scenario.plan(&Default::default(), seed))
    {
        Ok(plan) => plan,
        Err(problem) => return failed(&problem),
    };
    let outcome = simulate(&plan, Recording::Everything);
    let artefacts = outcome.artefacts.unwrap_or_default();
    // A run that broke off has no log.
    let run = Run::of_log(&plan.title, &artefacts.events[..], Some(&artefacts.capture[..])).ok();
    let done = Done {
        title: &plan.title,
        verdict: outcome.verdict,
        trace_sha256: outcome.trace_sha256.as_deref(),
        error: outcome.error.as_deref(),
        expectations: &outcome.expectations,
        rules: &outcome.rules,
        why: run.as_ref().and_then(Run::why),
    };
    let result = json(&done);
    Played { result, events: artefacts.events, frames: run.map_or(Vec::new(), |run| run.frames().to_vec()) }
}

fn failed(problem: &Problem) -> Played {
    let Problem { line, column, message, help, .. } = problem;
    let problem = At { line: *line, column: *column, message, help: help.as_deref() };
    Played { result: json(&Failed { problem }), ..Played::default() }
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
    std::panic::set_hook(Box::new(|panic| put([panic.to_string().into(), Vec::new(), Vec::new()])));
    put(Default::default());
    let input = INPUT.lock().expect("there is one thread");
    let Played { result, events, frames } = play(&String::from_utf8_lossy(&input), seed);
    put([result, events, frames]);
}

fn put(parts: [Vec<u8>; 3]) {
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
