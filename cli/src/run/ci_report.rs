//! Reports for CI systems: a Markdown summary, and annotations of lines for GitHub Actions.

use super::job::{Job, Summary};
use softhca_scenarios::{SourceLine, Verdict};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// GitHub shows this many annotations of a step.
const MAX_ANNOTATIONS: usize = 10;
/// A summary of GitHub may have 1 MiB.
const MAX_FILES: usize = 200;
const MAX_FAILURES: usize = 50;
const MAX_TEXT: usize = 1000;

/// Text for a cell of a table.
fn cell(text: &str) -> String {
    let mut result = String::new();
    for c in text.chars().take(MAX_TEXT) {
        match c {
            '&' => result += "&amp;",
            '<' => result += "&lt;",
            '|' => result += "&#124;",
            '`' => result += "&#96;",
            '*' | '_' | '[' | ']' | '\\' | '#' => {
                result.push('\\');
                result.push(c);
            }
            c if c.is_control() => result.push(' '),
            c => result.push(c),
        }
    }
    result
}

fn seconds(time: Duration) -> String {
    format!("{}.{:03} s", time.as_secs(), time.subsec_millis())
}

/// Counts of runs in words: "3 of 5 runs passed, 2 failed".
pub fn describe_counts(ran: &[(usize, Summary)]) -> String {
    let count = |verdict| ran.iter().filter(|(_, summary)| summary.verdict == verdict).count();
    let flaky = ran.iter().filter(|(_, summary)| summary.is_flaky).count();
    let mut text = format!("{} of {} runs passed", count(Verdict::Pass), ran.len());
    for (number, words) in
        [(count(Verdict::Fail), "failed"), (count(Verdict::Error), "could not be run"), (flaky, "flaky")]
    {
        if number > 0 {
            let _ = write!(text, ", {number} {words}");
        }
    }
    text
}

/// A summary in Markdown: a row for each file with its time, and the failed runs.
pub fn markdown(jobs: &[Job], ran: &[(usize, Summary)]) -> String {
    let mut text = format!("### SoftHCA: {}\n\n", describe_counts(ran));
    let failed = |summary: &Summary| summary.verdict != Verdict::Pass;
    let mut files = BTreeMap::<&str, (usize, usize, Duration)>::new();
    for (index, summary) in ran {
        let (runs, failures, time) = files.entry(jobs[*index].scenario.name()).or_default();
        *runs += 1;
        *failures += usize::from(failed(summary));
        *time += summary.duration;
    }
    let mut rows: Vec<_> = files.into_iter().collect();
    // Failed files first, then the slowest.
    rows.sort_by_key(|(_, (_, failures, time))| std::cmp::Reverse((*failures > 0, *time)));
    text += "| scenario | runs | failed | time |\n|---|--:|--:|--:|\n";
    for (file, (runs, failures, time)) in rows.iter().take(MAX_FILES) {
        let _ = writeln!(text, "| {} | {runs} | {failures} | {} |", cell(file), seconds(*time));
    }
    if rows.len() > MAX_FILES {
        let _ = writeln!(text, "| {} more | | | |", rows.len() - MAX_FILES);
    }
    let all: Vec<_> = ran.iter().filter(|(_, summary)| failed(summary)).collect();
    if !all.is_empty() {
        text += "\n| failed run | cause | repeat |\n|---|---|---|\n";
    }
    for (index, summary) in all.iter().take(MAX_FAILURES) {
        let job = &jobs[*index];
        let cause = summary.failures.first().map_or("", |failure| failure.text.as_str());
        let _ = writeln!(
            text,
            "| {} | {} | <code>{}</code> |",
            cell(&job.heading()),
            cell(cause),
            cell(&job.replay())
        );
    }
    if all.len() > MAX_FAILURES {
        let _ = writeln!(text, "| {} more | | |", all.len() - MAX_FAILURES);
    }
    text + "\n"
}

/// A line that fails in one run or several.
struct Place {
    first: usize,
    text: String,
    runs: usize,
}

/// An annotation for each line that fails, with the first run in which it does.
pub fn annotations(jobs: &[Job], ran: &[(usize, Summary)]) -> Vec<String> {
    let mut places = BTreeMap::<(String, usize), Place>::new();
    for (index, summary) in ran {
        for failure in &summary.failures {
            let (file, line) = match &failure.at {
                Some(SourceLine { file, line }) => (file.clone(), *line),
                None => (jobs[*index].scenario.name().to_owned(), 0),
            };
            let place = Place { first: *index, text: failure.text.clone(), runs: 0 };
            places.entry((file, line)).or_insert(place).runs += 1;
        }
    }
    let lines = places.iter().map(|((file, line), Place { first, text, runs })| {
        let job = &jobs[*first];
        let others = if *runs > 1 { format!("\nThis line fails in {runs} runs.") } else { String::new() };
        annotation(file, *line, &job.scenario.title, &format!("{text}{others}\nrepeat: {}", job.replay()))
    });
    lines.take(MAX_ANNOTATIONS).collect()
}

/// The annotation of an error message of a file: `FILE:LINE:COLUMN: MESSAGE`.
pub fn annotate_problem(problem: &str) -> String {
    let mut parts = problem.splitn(4, ':');
    let place = (|| Some((parts.next()?, parts.next()?.parse().ok()?, parts.next()?, parts.next()?)))();
    match place {
        Some((file, line, _, message)) => annotation(file, line, "invalid scenario", message.trim()),
        None => format!("::error::{}", escaped(problem)),
    }
}

fn annotation(file: &str, line: usize, title: &str, message: &str) -> String {
    let property = |text: &str| escaped(text).replace(':', "%3A").replace(',', "%2C");
    let line = if line > 0 { format!(",line={line}") } else { String::new() };
    format!("::error file={}{line},title={}::{}", property(file), property(title), escaped(message))
}

/// The escapes of workflow commands.
fn escaped(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::job::{Backend, Failure};
    use softhca_scenarios::{ParameterValues, Scenario};
    use std::sync::Arc;

    const SCENARIO: &str = "title = \"50 %: a, b\"\nhosts = [\"alice\", \"bob\"]\n";

    fn jobs(seeds: u64) -> Vec<Job> {
        let text = include_str!("../../../scenarios/library/fatal-lost-write-middle.toml");
        let text = text.lines().filter(|line| !line.starts_with("title")).collect::<Vec<_>>().join("\n");
        let title = SCENARIO.lines().next().unwrap();
        let scenario = Arc::new(Scenario::parse("a|b.toml", &format!("{title}\n{text}")).expect("valid"));
        let parameters = ParameterValues::new();
        let job = |seed| Job {
            scenario: scenario.clone(),
            parameters: parameters.clone(),
            seed,
            swarm: false,
            backend: Backend::Sim,
        };
        (1..=seeds).map(job).collect()
    }

    fn failed(text: &str, line: Option<usize>) -> Summary {
        let at = line.map(|line| SourceLine { file: "a|b.toml".into(), line });
        Summary {
            verdict: Verdict::Fail,
            duration: Duration::from_millis(1500),
            failures: vec![Failure { text: text.into(), at }],
            outputs: String::new(),
            is_flaky: false,
            sometimes: Vec::new(),
        }
    }

    #[test]
    fn a_line_that_fails_in_many_runs_has_one_annotation() {
        let jobs = jobs(3);
        let ran = [
            (0, failed("100 % wrong:\nreally", Some(7))),
            (1, failed("other", Some(7))),
            (2, failed("no line", None)),
        ];
        assert_eq!(
            annotations(&jobs, &ran),
            [
                "::error file=a|b.toml,title=50 %25%3A a%2C b::no line%0Arepeat: softhca run 'a|b.toml' --seed 3",
                "::error file=a|b.toml,line=7,title=50 %25%3A a%2C b::100 %25 wrong:%0Areally%0AThis line fails in 2 \
                 runs.%0Arepeat: softhca run 'a|b.toml' --seed 1",
            ]
        );
        assert_eq!(
            annotate_problem("x.toml:3:5: unknown key\n 3 | x"),
            "::error file=x.toml,line=3,title=invalid scenario::unknown key%0A 3 | x"
        );
        assert_eq!(annotate_problem("x: No such file"), "::error::x: No such file");
    }

    #[test]
    fn a_summary_is_limited_and_its_text_is_no_markup() {
        let jobs = jobs(60);
        let ran: Vec<_> = (0..60).map(|index| (index, failed("<b>|`x`\n*", Some(1)))).collect();
        let text = markdown(&jobs, &ran);
        assert!(text.starts_with("### SoftHCA: 0 of 60 runs passed, 60 failed\n"), "{text}");
        assert!(text.contains("| a&#124;b.toml | 60 | 60 | 90.000 s |"), "{text}");
        assert!(text.contains("| &lt;b>&#124;&#96;x&#96; \\* |"), "{text}");
        assert!(text.contains("| 10 more | | |"), "{text}");
        assert_eq!(text.matches("<code>").count(), 50);
    }
}
