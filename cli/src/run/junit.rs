//! JUnit reports for CI systems, and merging of the reports of shards.

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
            let text = escaped(&format!("{}\nreplay: {}", summary.failures, job.replay()));
            let first = escaped(summary.failures.lines().next().unwrap_or_default());
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

/// Merges reports that [`report`] wrote.
pub fn merge(reports: &[(String, String)]) -> Result<String, String> {
    let (mut suites, mut all) = (String::new(), Totals::default());
    for (name, text) in reports {
        let foreign = || format!("{name}: not a report of `softhca run --junit`");
        let rest = text
            .strip_prefix(XML_HEADER)
            .and_then(|rest| rest.strip_prefix(SUITES_TAG))
            .ok_or_else(foreign)?;
        let (attributes, rest) = rest.split_once(">\n").ok_or_else(foreign)?;
        let body = rest.strip_suffix("</testsuites>\n").ok_or_else(foreign)?;
        let value = |key: &str| -> Option<&str> {
            let (_, rest) = attributes.split_once(&format!("{key}=\""))?;
            rest.split_once('"').map(|(value, _)| value)
        };
        let number = |key: &str| {
            value(key).and_then(|text| text.replace('.', "").parse::<u64>().ok()).ok_or_else(foreign)
        };
        all.add(Totals {
            tests: number("tests")?,
            failures: number("failures")?,
            errors: number("errors")?,
            milliseconds: number("time")?,
        });
        suites += body;
    }
    Ok(document(&suites, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_adds_totals_and_rejects_other_files() {
        let part = |tests, failures| {
            let totals = Totals { tests, failures, errors: 0, milliseconds: 1_500 };
            document("  <testsuite name=\"a\"></testsuite>\n", totals)
        };
        let merged = merge(&[("1".into(), part(3, 1)), ("2".into(), part(2, 0))]).expect("our own");
        assert!(merged.contains("tests=\"5\" failures=\"1\" errors=\"0\" time=\"3.000\""), "{merged}");
        assert_eq!(merged.matches("<testsuite ").count(), 2);
        assert!(merge(&[("x".into(), "<xml/>".into())]).unwrap_err().starts_with("x: not a report"));
        assert_eq!(merge(&[("1".into(), merged.clone())]).expect("a merged one is one, too"), merged);
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escaped("a<b> & \"c\"\n\u{1}"), "a&lt;b&gt; &amp; &quot;c&quot;&#10; ");
    }
}
