//! JUnit reports for CI systems.

use super::job::{Failure, Job, Summary};
use softhca_scenarios::Verdict;
use std::fmt::Write;
use std::time::Duration;

const XML_HEADER: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
const SUITES_TAG: &str = "<testsuites name=\"softhca run\"";
const REPLAY: &str = "replay: ";

/// Text for an attribute or an element.
pub fn escaped(text: &str) -> String {
    let mut result = String::new();
    for c in text.chars() {
        match c {
            '&' => result += "&amp;",
            '<' => result += "&lt;",
            '>' => result += "&gt;",
            '"' => result += "&quot;",
            '\n' => result += "&#10;",
            // XML does not allow other control characters.
            c if c.is_control() => result.push(' '),
            c => result.push(c),
        }
    }
    result
}

/// Text that [`escaped`] made.
fn unescaped(text: &str) -> String {
    let entities = [("&#10;", "\n"), ("&quot;", "\""), ("&gt;", ">"), ("&lt;", "<"), ("&amp;", "&")];
    entities.into_iter().fold(text.to_owned(), |text, (entity, c)| text.replace(entity, c))
}

/// The file and the name of a run, as its test case has them.
pub type Case = (String, String);

/// The test case of a run.
pub fn case_of(job: &Job) -> Case {
    let set: String = job.parameters.iter().map(|(name, value)| format!(", {name} = {value}")).collect();
    let name = format!("{} (seed {}{set})", job.scenario.title, job.seed);
    (escaped(job.scenario.name()), escaped(&name))
}

/// Whether this is the begin of a report: its first line.
pub fn begins(line: &[u8]) -> bool {
    line == XML_HEADER.as_bytes()
}

/// Reads a line of a report: a test case as [`case_of`] names it, and its result. `None` for other lines of a report,
/// an error for those of other files.
pub fn read_line(line: &str) -> Result<Option<(Case, Summary)>, &'static str> {
    let tag = line.trim_start();
    match tag.strip_prefix("<testcase classname=\"") {
        Some(case) => read_case(case).map(Some).ok_or("not a test case of --junit"),
        None if ["<testsuite ", SUITES_TAG, "</testsuite"].iter().any(|known| tag.starts_with(known)) => {
            Ok(None)
        }
        None => Err("not from a report of --junit"),
    }
}

fn read_case(case: &str) -> Option<(Case, Summary)> {
    let (file, rest) = case.split_once("\" name=\"")?;
    let (name, rest) = rest.split_once("\" time=\"")?;
    let (time, rest) = rest.split_once('"')?;
    let element = |name: &str| {
        let (_, rest) = rest.split_once(&format!("<{name}"))?;
        let (_, rest) = rest.split_once('>')?;
        Some(unescaped(rest.split_once(&format!("</{name}>"))?.0))
    };
    let (verdict, text) = match (element("failure"), element("error")) {
        (Some(text), _) => (Verdict::Fail, text),
        (_, Some(text)) => (Verdict::Error, text),
        _ => (Verdict::Pass, String::new()),
    };
    let failures = text.lines().take_while(|line| !line.starts_with(REPLAY));
    let summary = Summary {
        verdict,
        duration: Duration::from_millis(time.replace('.', "").parse().ok()?),
        failures: failures.map(|text| Failure { text: text.to_owned(), at: None }).collect(),
        outputs: element("system-out").unwrap_or_default(),
        is_flaky: rest.starts_with("><flakyFailure"),
    };
    Some(((file.to_owned(), name.to_owned()), summary))
}

#[derive(Clone, Copy, Default)]
struct Totals {
    tests: u64,
    failures: u64,
    errors: u64,
    milliseconds: u64,
}

impl Totals {
    fn attributes(&self) -> String {
        let Totals { tests, failures, errors, milliseconds } = self;
        let (seconds, rest) = (milliseconds / 1000, milliseconds % 1000);
        format!("tests=\"{tests}\" failures=\"{failures}\" errors=\"{errors}\" time=\"{seconds}.{rest:03}\"")
    }

    fn add(&mut self, other: Totals) {
        self.tests += other.tests;
        self.failures += other.failures;
        self.errors += other.errors;
        self.milliseconds += other.milliseconds;
    }
}

fn document(suites: &str, totals: Totals) -> String {
    format!("{XML_HEADER}{SUITES_TAG} {}>\n{suites}</testsuites>\n", totals.attributes())
}

/// The report of all runs, with a suite for each scenario file.
pub fn report(jobs: &[Job], ran: &[(usize, Summary)]) -> String {
    let (mut suites, mut all) = (String::new(), Totals::default());
    for runs in ran.chunk_by(|(a, _), (b, _)| jobs[*a].scenario.name() == jobs[*b].scenario.name()) {
        let file = jobs[runs[0].0].scenario.name();
        let (mut cases, mut totals) = (String::new(), Totals::default());
        for (index, summary) in runs {
            let job = &jobs[*index];
            let (file, name) = case_of(job);
            let milliseconds = summary.duration.as_millis() as u64;
            let time = format!("{}.{:03}", milliseconds / 1000, milliseconds % 1000);
            totals.add(Totals {
                tests: 1,
                failures: u64::from(summary.verdict == Verdict::Fail),
                errors: u64::from(summary.verdict == Verdict::Error),
                milliseconds,
            });
            let _ = write!(cases, "    <testcase classname=\"{file}\" name=\"{name}\" time=\"{time}\"");
            let failures = summary.failures_text();
            let text = escaped(&format!("{failures}\n{REPLAY}{}", job.replay()));
            let first = escaped(failures.lines().next().unwrap_or_default());
            let output = match summary.outputs.is_empty() {
                true => String::new(),
                false => format!("<system-out>{}</system-out>", escaped(&summary.outputs)),
            };
            let _ = match summary.verdict {
                // As Maven Surefire reports it, which CI systems know.
                Verdict::Pass if summary.is_flaky => {
                    writeln!(cases, "><flakyFailure message=\"an earlier attempt failed\"/></testcase>")
                }
                Verdict::Pass => writeln!(cases, "/>"),
                Verdict::Fail => {
                    writeln!(cases, "><failure message=\"{first}\">{text}</failure>{output}</testcase>")
                }
                Verdict::Error => {
                    writeln!(cases, "><error message=\"{first}\">{text}</error>{output}</testcase>")
                }
            };
        }
        let _ = write!(
            suites,
            "  <testsuite name=\"{}\" {}>\n{cases}  </testsuite>\n",
            escaped(file),
            totals.attributes()
        );
        all.add(totals);
    }
    document(&suites, all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escaped("a<b> & \"c\"\n\u{1}"), "a&lt;b&gt; &amp; &quot;c&quot;&#10; ");
        assert_eq!(unescaped(&escaped("&lt; <&#10;> \"\n")), "&lt; <&#10;> \"\n");
    }
}
