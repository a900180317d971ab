//! Grades one submission: builds its program, runs every check, and prints a line of JSON for each.
//!
//! This runs in a process of its own, which [`super::sandbox`] isolates.

use super::exercise::{CheckSpec, Exercise, HintSpec, Language, OutputSpec};
use super::program;
use crate::run::{Backend, run_plan};
use serde::{Deserialize, Serialize};
use softhca_scenarios::{Outcome, Plan, Scenario, Verdict};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// The number of failed expectations that a report names, and the length of each text in it.
const MAX_DETAILS: usize = 8;
const MAX_TEXT: usize = 2000;
/// The lines of each program's output in a report.
const MAX_OUTPUT_LINES: usize = 12;
/// How often a run of programs that could not be executed is repeated: a busy machine may have prevented it.
const ATTEMPTS: u32 = 3;
/// The most values of an answers file.
const MAX_ANSWERS: usize = 256;

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct CheckReport {
    pub name: String,
    pub result: Verdict,
    /// The failures, in words.
    pub details: Vec<String>,
    /// The ends of the outputs of programs and compilers, if it failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub output: String,
    /// The hints that belong to the failure.
    pub hints: Vec<String>,
}

/// A line that the grading process prints.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    Check(CheckReport),
    /// A limit ended the grading.
    Stopped(String),
    /// All checks are done.
    End,
}

/// A failure: its causes, and the outputs of programs.
struct Failure {
    result: Verdict,
    details: Vec<String>,
    output: String,
    /// A text for the choice of a hint, which is not printed.
    matched: String,
}

impl Failure {
    fn of_submission(detail: impl Into<String>) -> Failure {
        let (output, matched) = (String::new(), String::new());
        Failure { result: Verdict::Fail, details: vec![detail.into()], output, matched }
    }

    fn of_grader(detail: impl Into<String>) -> Failure {
        Failure { result: Verdict::Error, ..Failure::of_submission(detail) }
    }
}

/// A submission that is graded. The working directory has its files and the program.
pub struct Grader<'e> {
    pub exercise: &'e Exercise,
    pub language: Option<Language>,
    /// The files that the student handed in.
    pub submitted: BTreeMap<String, Vec<u8>>,
    /// The time that a program has.
    pub program_timeout: Duration,
}

impl Grader<'_> {
    /// Runs all checks and passes their results to `report`.
    pub fn grade(&self, report: &mut dyn FnMut(CheckReport)) {
        if let Some(language) = self.language
            && let Err(failed) = program::build(language, Path::new("."))
        {
            let program::BuildError { is_environment, message, output } = failed;
            let result = if is_environment { Verdict::Error } else { Verdict::Fail };
            let output = last_lines(&output);
            let failure = Failure { result, output, ..Failure::of_submission(message) };
            let hint = HintSpec {
                when: None,
                text: vec![
                    "The first message of the compiler names the file, the line and the cause.".into(),
                ],
            };
            report(checked("the program compiles", Some(failure), std::slice::from_ref(&hint)));
            return;
        }
        let mut has_failed = false;
        for check in &self.exercise.manifest.check {
            let mut checked = checked(&check.name, self.run_check(check).err(), &check.hint);
            // Students correct the first failure first.
            if has_failed {
                checked.hints.clear();
            }
            has_failed |= checked.result != Verdict::Pass;
            report(checked);
        }
    }

    fn run_check(&self, check: &CheckSpec) -> Result<(), Failure> {
        let plan = self.plan(check)?;
        let outcome = self.run(&plan)?;
        let output = outputs(&outcome);
        let failed = |details: Vec<String>| {
            let (output, matched) = (output.clone(), String::new());
            Failure { result: Verdict::Fail, details, output, matched }
        };
        if let Some(error) = &outcome.error {
            // Only a submission kills the daemon of its run.
            let is_killed = error.contains("the daemon is gone");
            let result = if is_killed { Verdict::Fail } else { Verdict::Error };
            return Err(Failure { result, ..failed(vec![error.clone()]) });
        }
        let mut details = Vec::new();
        match (check.verdict, outcome.verdict) {
            // The details would be the answers.
            (Verdict::Pass, Verdict::Fail) if check.answers.is_some() => {
                let (wrong, all) = (outcome.failures().count(), outcome.expectations.len());
                let failures: String =
                    outcome.failures().map(|failure| failure.text.clone() + "\n").collect();
                let details =
                    vec![format!("{wrong} of {all} statements that follow from the answers are wrong")];
                return Err(Failure { matched: failures, ..failed(details) });
            }
            (Verdict::Pass, Verdict::Fail) => {
                let failures = outcome.failures();
                details.extend(failures.map(|failure| format!("{}: {}", failure.text, failure.detail)));
            }
            (Verdict::Fail, Verdict::Pass) => {
                details.push("every expectation holds, but this run must fail".into());
            }
            _ => {}
        }
        details.extend(check.output.iter().filter_map(|wanted| missing_line(&outcome, wanted)));
        // How a program ended says most.
        details.sort_by_key(|detail| !detail.starts_with("program "));
        if details.is_empty() { Ok(()) } else { Err(failed(details)) }
    }

    /// A file of the submission or of the exercise, and whether it is the student's.
    fn read(&self, file: &str) -> Result<(&str, bool), Failure> {
        let own = self.submitted.get(file);
        let bytes = own.map(Vec::as_slice).or_else(|| self.exercise.hidden(file));
        let bytes = bytes.ok_or_else(|| Failure::of_submission(format!("{file} is missing")))?;
        let text = std::str::from_utf8(bytes);
        let text = text.map_err(|error| Failure::of_submission(format!("{file} is not UTF-8: {error}")))?;
        Ok((text, own.is_some()))
    }

    fn plan(&self, check: &CheckSpec) -> Result<Plan, Failure> {
        let failed = |is_own: bool, why: String| match is_own {
            true => Failure::of_submission(why),
            false => Failure::of_grader(format!("exercise {}: {why}", self.exercise.name)),
        };
        let (text, is_own) = self.read(&check.run)?;
        let parsed = Scenario::parse(&check.run, text);
        let mut scenario = parsed.map_err(|problem| failed(is_own, problem.to_string()))?;
        if let Some(expect) = &check.expect {
            let (text, is_own_expectation) = self.read(expect)?;
            // Expectations of the exercise may name what a student's scenario does not have.
            scenario = scenario
                .with_expectations(expect, text)
                .map_err(|problem| failed(is_own || is_own_expectation, problem.to_string()))?;
        }
        let answers = match &check.answers {
            Some(file) => answers(file, self.read(file)?.0).map_err(Failure::of_submission)?,
            None => Vec::new(),
        };
        let defaults = scenario.plan(&Default::default(), scenario.seed);
        let defaults = defaults.map_err(|problem| failed(is_own, problem.to_string()))?;
        // A scenario uses some of the answers.
        let used: Vec<(String, String)> =
            answers.into_iter().filter(|(name, _)| defaults.parameters.contains_key(name)).collect();
        let is_answered = |name: &&String| used.iter().any(|(answered, _)| answered == *name);
        if let (Some(file), Some(name)) =
            (&check.answers, defaults.parameters.keys().find(|name| !is_answered(name)))
        {
            return Err(Failure::of_submission(format!("{file}: {name} has no answer yet")));
        }
        let mut plan = match used.is_empty() {
            true => Ok(defaults),
            false => scenario
                .sweep(&used)
                .and_then(|runs| scenario.plan(&runs.first().cloned().unwrap_or_default(), scenario.seed)),
        }
        .map_err(|problem| {
            let why = problem.message.trim_start_matches("--set ");
            let help = problem.help.as_ref().map(|help| format!("; {help}")).unwrap_or_default();
            failed(is_own || check.answers.is_some(), format!("{why}{help}"))
        })?;
        if is_own && !plan.commands.is_empty() {
            return Err(Failure::of_submission("a scenario of this exercise cannot start programs"));
        }
        let limit = self.program_timeout.as_nanos() as u64;
        for command in &mut plan.commands {
            let timeout = command.timeout_ns.get_or_insert(limit);
            *timeout = limit.min(*timeout);
        }
        Ok(plan)
    }

    fn run(&self, plan: &Plan) -> Result<Outcome, Failure> {
        if plan.commands.is_empty() {
            return Ok(run_plan(plan, Backend::Sim, false));
        }
        if !cfg!(target_os = "linux") {
            return Err(Failure::of_grader(
                "programs run on Linux only; exercises without a program work here",
            ));
        }
        let mut outcome = run_plan(plan, Backend::Udp, true);
        for _ in 1..ATTEMPTS {
            if outcome.verdict == Verdict::Error {
                outcome = run_plan(plan, Backend::Udp, true);
            }
        }
        Ok(outcome)
    }
}

/// The report of a check.
fn checked(name: &str, failure: Option<Failure>, hints: &[HintSpec]) -> CheckReport {
    let name = name.to_owned();
    let Some(Failure { result, mut details, output, matched }) = failure else {
        let (details, hints) = (Vec::new(), Vec::new());
        return CheckReport { name, result: Verdict::Pass, details, output: String::new(), hints };
    };
    let text = format!("{}\n{output}\n{matched}", details.join("\n"));
    let belongs = |hint: &&HintSpec| hint.when.as_ref().is_none_or(|when| text.contains(when.as_str()));
    let chosen = hints.iter().find(belongs).filter(|_| result == Verdict::Fail);
    let hints = chosen.map(|hint| hint.text.clone()).unwrap_or_default();
    if details.len() > MAX_DETAILS {
        let more = details.len() - MAX_DETAILS;
        details.truncate(MAX_DETAILS);
        details.push(format!("{more} more"));
    }
    let details = details.iter().map(|detail| shortened(detail)).collect();
    CheckReport { name, result, details, output, hints }
}

/// The begin of a text that may be long.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The last lines of an output, each shortened.
fn last_lines(output: &[u8]) -> String {
    // Lines may be long: only this much of the end is looked at.
    let end = &output[output.len().saturating_sub(MAX_OUTPUT_LINES * MAX_TEXT)..];
    let text = String::from_utf8_lossy(end);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(MAX_OUTPUT_LINES)..];
    last.iter().map(|line| shortened(line) + "\n").collect()
}

fn outputs(outcome: &Outcome) -> String {
    let outputs = outcome.artifacts.iter().flat_map(|artifacts| &artifacts.outputs);
    let printed = outputs.filter(|(_, output)| !output.is_empty());
    printed.map(|(program, output)| format!("{program}:\n{}", last_lines(output))).collect()
}

/// The message about a line that a program did not print.
fn missing_line(outcome: &Outcome, wanted: &OutputSpec) -> Option<String> {
    let OutputSpec { program, line } = wanted;
    let outputs = outcome.artifacts.iter().flat_map(|artifacts| &artifacts.outputs);
    let mut outputs = outputs.filter(|(name, _)| name == program);
    let is_there = outputs.any(|(_, output)| {
        output.split(|byte| *byte == b'\n').any(|printed| printed.trim_ascii() == line.as_bytes())
    });
    (!is_there).then(|| format!("program {program:?} did not print the line {line:?}"))
}

/// The values of an answers file as `--set` takes them. An answer that is an empty text is missing.
fn answers(file: &str, text: &str) -> Result<Vec<(String, String)>, String> {
    let table: toml::Table =
        toml::from_str(text).map_err(|error| format!("{file}: {}", error.to_string().trim_end()))?;
    if table.len() > MAX_ANSWERS {
        return Err(format!("{file}: more than {MAX_ANSWERS} answers"));
    }
    let value = |(name, value): (String, toml::Value)| match value {
        toml::Value::String(text) if text.trim().is_empty() => {
            Err(format!("{file}: {name} has no answer yet"))
        }
        toml::Value::String(text) if text == softhca_scenarios::SWEEP_ALL => {
            Err(format!("{file}: {name}: {text:?} is not an answer"))
        }
        toml::Value::String(text) => Ok((name, text.trim().to_owned())),
        toml::Value::Integer(_) | toml::Value::Boolean(_) | toml::Value::Float(_) => {
            Ok((name, value.to_string()))
        }
        other => Err(format!("{file}: {name}: a {} is not an answer", other.type_str())),
    };
    table.into_iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_values_of_parameters_and_bad_ones_name_their_key() {
        let values = answers("a.toml", "status = \" SUCCESS \"\npsn = 3\n").expect("they are valid");
        assert_eq!(values, [("psn", "3"), ("status", "SUCCESS")].map(|(a, b)| (a.into(), b.into())));
        for (text, part) in [
            ("psn = \"\"", "psn has no answer yet"),
            ("psn = \"all\"", "is not an answer"),
            ("psn = [1]", "a array is not an answer"),
            ("psn = ", "a.toml: "),
        ] {
            let error = answers("a.toml", text).expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_first_hint_whose_text_is_in_the_failure_is_given() {
        let hint = |when: Option<&str>, text: &str| HintSpec {
            when: when.map(str::to_owned),
            text: vec![text.to_owned()],
        };
        let hints = [hint(Some("RNR"), "post receives"), hint(None, "read the text")];
        for (detail, wanted) in [("ended with RNR_RETRY_EXC_ERR", "post receives"), ("else", "read the text")]
        {
            let report = checked("n", Some(Failure::of_submission(detail)), &hints);
            assert_eq!((report.result, &report.hints[..]), (Verdict::Fail, &[wanted.to_owned()][..]));
        }
        let report = checked("n", Some(Failure::of_grader("RNR")), &hints);
        assert_eq!(
            (report.result, report.hints.len()),
            (Verdict::Error, 0),
            "it is not the student's mistake"
        );
    }

    #[test]
    fn long_outputs_are_bounded() {
        let endless = vec![b'x'; 10 << 20];
        assert!(last_lines(&endless).len() <= MAX_TEXT + "…\n".len());
        let lines = "line\n".repeat(100_000);
        assert_eq!(last_lines(lines.as_bytes()), "line\n".repeat(MAX_OUTPUT_LINES));
        let many: Vec<String> = (0..100).map(|_| "y".repeat(10_000)).collect();
        let failure = Failure { details: many, ..Failure::of_submission("") };
        let report = checked("n", Some(failure), &[]);
        assert_eq!(report.details.len(), MAX_DETAILS + 1);
        assert!(report.details.iter().all(|detail| detail.len() <= MAX_TEXT + 3));
    }
}
