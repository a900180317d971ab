//! JUnit reports for CI systems.

use super::job::{Failure, Job, Summary};
use softhca_scenarios::Verdict;
use std::fmt::Write;
use std::time::Duration;

const XML_HEADER: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
const SUITES_TAG: &str = "<testsuites name=\"softhca run\"";
const REPLAY: &str = "replay: ";

/// Text for an attribute or an element.
fn escaped(text: &str) -> String {
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

fn case_name(job: &Job) -> String {
    let set: String = job.parameters.iter().map(|(name, value)| format!(", {name} = {value}")).collect();
    format!("{} (seed {}{set})", job.scenario.title, job.seed)
}

/// The test case of a run.
pub fn case_of(job: &Job) -> Case {
    (escaped(job.scenario.name()), escaped(&case_name(job)))
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
        sometimes: Vec::new(),
    };
    Some(((file.to_owned(), name.to_owned()), summary))
}

/// A test case of a report.
pub struct TestCase<'a> {
    pub class: &'a str,
    pub name: String,
    pub milliseconds: u64,
    pub verdict: Verdict,
    /// It passed after an attempt that failed.
    pub is_flaky: bool,
    /// Of a case that did not pass: the message, the whole text, and the outputs of programs.
    pub message: String,
    pub text: String,
    pub outputs: &'a str,
}

impl TestCase<'_> {
    fn write(&self, report: &mut String) {
        let [class, name] = [self.class, &self.name].map(escaped);
        let time = seconds(self.milliseconds);
        let _ = write!(report, "    <testcase classname=\"{class}\" name=\"{name}\" time=\"{time}\"");
        let element = match self.verdict {
            Verdict::Pass if !self.is_flaky => return report.push_str("/>\n"),
            // As Maven Surefire reports it, which CI systems know.
            Verdict::Pass => {
                return report
                    .push_str("><flakyFailure message=\"an earlier attempt failed\"/></testcase>\n");
            }
            Verdict::Fail => "failure",
            Verdict::Error => "error",
        };
        let [message, text, outputs] = [&self.message, &self.text, self.outputs].map(escaped);
        let _ = write!(report, "><{element} message=\"{message}\">{text}</{element}>");
        if !outputs.is_empty() {
            let _ = write!(report, "<system-out>{outputs}</system-out>");
        }
        report.push_str("</testcase>\n");
    }
}

fn seconds(milliseconds: u64) -> String {
    format!("{}.{:03}", milliseconds / 1000, milliseconds % 1000)
}

/// The attributes with the totals of some cases.
fn totals<'a>(cases: impl Iterator<Item = &'a TestCase<'a>> + Clone) -> String {
    let count = |verdict| cases.clone().filter(|case| case.verdict == verdict).count();
    let (tests, failures, errors) = (cases.clone().count(), count(Verdict::Fail), count(Verdict::Error));
    let time = seconds(cases.map(|case| case.milliseconds).sum());
    format!("tests=\"{tests}\" failures=\"{failures}\" errors=\"{errors}\" time=\"{time}\"")
}

/// The report of a command, with the cases of each suite.
pub fn document(command: &str, suites: &[(&str, Vec<TestCase<'_>>)]) -> String {
    let all = totals(suites.iter().flat_map(|(_, cases)| cases));
    let mut text = format!("{XML_HEADER}<testsuites name=\"{command}\" {all}>\n");
    for (name, cases) in suites {
        let _ = writeln!(text, "  <testsuite name=\"{}\" {}>", escaped(name), totals(cases.iter()));
        cases.iter().for_each(|case| case.write(&mut text));
        text += "  </testsuite>\n";
    }
    text + "</testsuites>\n"
}

/// The report of all runs, with a suite for each scenario file.
pub fn report(jobs: &[Job], ran: &[(usize, Summary)]) -> String {
    let file = |index: usize| jobs[index].scenario.name();
    let files = ran.chunk_by(|(a, _), (b, _)| file(*a) == file(*b));
    let suites = files.map(|runs| {
        let cases = runs.iter().map(|(index, summary)| test_case(&jobs[*index], summary));
        (file(runs[0].0), cases.collect())
    });
    document("softhca run", &suites.collect::<Vec<_>>())
}

fn test_case<'a>(job: &'a Job, summary: &'a Summary) -> TestCase<'a> {
    let failures = summary.failures_text();
    TestCase {
        class: job.scenario.name(),
        name: case_name(job),
        milliseconds: summary.duration.as_millis() as u64,
        verdict: summary.verdict,
        is_flaky: summary.is_flaky,
        message: failures.lines().next().unwrap_or_default().to_owned(),
        text: format!("{failures}\n{REPLAY}{}", job.replay()),
        outputs: &summary.outputs,
    }
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
