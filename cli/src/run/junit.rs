//! JUnit reports for CI systems.

use super::job::{Job, Summary};
use softhca_scenarios::Verdict;
use std::fmt::Write;

const XML_HEADER: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
const SUITES_TAG: &str = "<testsuites name=\"softhca run\"";

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
            let set: String =
                job.parameters.iter().map(|(name, value)| format!(", {name} = {value}")).collect();
            let name = escaped(&format!("{} (seed {}{set})", job.scenario.title, job.seed));
            let milliseconds = summary.duration.as_millis() as u64;
            let time = format!("{}.{:03}", milliseconds / 1000, milliseconds % 1000);
            totals.add(Totals {
                tests: 1,
                failures: u64::from(summary.verdict == Verdict::Fail),
                errors: u64::from(summary.verdict == Verdict::Error),
                milliseconds,
            });
            let _ = write!(
                cases,
                "    <testcase classname=\"{}\" name=\"{name}\" time=\"{time}\"",
                escaped(file)
            );
            let failures = summary.failures_text();
            let text = escaped(&format!("{failures}\nreplay: {}", job.replay()));
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
    }
}
