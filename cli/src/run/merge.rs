//! Merges the results of shards: lines of `--json` in files, folders of `--out` and JUnit reports. The runs that were
//! requested come from the arguments of the shards, so that missing ones have names.

use super::job::{Backend, Failure, Job, Summary};
use super::junit;
use serde::Deserialize;
use softhca_scenarios::{SourceLine, Verdict};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The maximum length of a result. The largest of the library has 20 kB.
const MAX_LINE: u64 = 1 << 20;
/// The maximum number of files.
const MAX_FILES: usize = 1_000_000;
/// Up to this many names are listed.
const MAX_NAMES: usize = 10;
/// The result of a run in its folder.
const RESULT: &str = "result.json";
/// In merged reports, the error of a run without a result.
const NO_RESULT: &str = "no shard has a result of this run";

/// The merged results of all runs.
pub struct Merged {
    /// A summary for each job. A run without a result is an error.
    pub results: Vec<(usize, Summary)>,
    /// The lines of the results, in the order of jobs. Those of JUnit reports have none.
    pub lines: Vec<String>,
    /// The runs without a result.
    pub missing: Vec<usize>,
    /// The ignored files and results, each with the reason.
    pub notes: Vec<String>,
}

/// A line of `--json`.
#[derive(Deserialize)]
struct ResultLine {
    replay: String,
    verdict: Verdict,
    #[serde(default)]
    flaky: bool,
    trace_sha256: Option<String>,
    #[serde(default)]
    duration_ms: u64,
    expectations: Vec<Expectation>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Expectation {
    text: String,
    held: bool,
    #[serde(default)]
    sometimes: bool,
    detail: String,
    at: Option<SourceLine>,
}

impl ResultLine {
    fn sometimes(&self) -> Vec<(String, bool)> {
        let counted = self.expectations.iter().filter(|expectation| expectation.sometimes);
        counted.map(|expectation| (expectation.text.clone(), expectation.held)).collect()
    }

    fn summary(&self) -> Summary {
        let error = self.error.iter().map(|error| Failure { text: error.clone(), at: None });
        let failed =
            self.expectations.iter().filter(|expectation| !expectation.held && !expectation.sometimes);
        let failures = failed.map(|Expectation { text, detail, at, .. }| Failure {
            text: format!("{text}: {detail}"),
            at: at.clone(),
        });
        Summary {
            verdict: self.verdict,
            duration: Duration::from_millis(self.duration_ms),
            failures: error.chain(failures).collect(),
            outputs: String::new(),
            is_flaky: self.flaky,
            sometimes: self.sometimes(),
        }
    }
}

/// The result of a run.
struct Found {
    summary: Summary,
    /// The digest of its trace, and the line with it. JUnit reports have neither.
    digest: Option<String>,
    line: Option<String>,
}

/// The results that were found so far.
struct Collection<'a> {
    /// The index of each job by the command that repeats it.
    indices: HashMap<String, usize>,
    /// The index of each job by its test case in JUnit reports.
    cases: HashMap<junit::Case, usize>,
    jobs: &'a [Job],
    found: Vec<Option<Found>>,
    others: usize,
    notes: Vec<String>,
}

/// Collects the results of `jobs` from files and folders.
pub fn merge(jobs: &[Job], paths: &[PathBuf]) -> Result<Merged, Vec<String>> {
    let mut collection = Collection {
        indices: jobs.iter().enumerate().map(|(index, job)| (job.replay(), index)).collect(),
        cases: jobs.iter().enumerate().map(|(index, job)| (junit::case_of(job), index)).collect(),
        jobs,
        found: jobs.iter().map(|_| None).collect(),
        others: 0,
        notes: Vec::new(),
    };
    let mut problems = Vec::new();
    for path in paths {
        for file in result_files(path).unwrap_or_else(|why| {
            problems.push(why);
            Vec::new()
        }) {
            if let Err(error) = collection.read(&file) {
                problems.push(format!("{}: {error}", file.display()));
            }
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    if collection.others > 0 {
        let others = collection.others;
        collection.notes.push(format!(
            "{others} results are of other runs: give --merge the files, seeds and values of the shards"
        ));
    }
    let mut merged =
        Merged { results: Vec::new(), lines: Vec::new(), missing: Vec::new(), notes: collection.notes };
    for (index, found) in collection.found.into_iter().enumerate() {
        let summary = match found {
            Some(found) => {
                merged.lines.extend(found.line);
                found.summary
            }
            None => {
                merged.missing.push(index);
                Summary::error(NO_RESULT)
            }
        };
        merged.results.push((index, summary));
    }
    Ok(merged)
}

/// The file itself, or the results in a folder: of each run folder its result, otherwise `*.json`, `*.jsonl` and
/// `*.xml`.
fn result_files(path: &Path) -> Result<Vec<PathBuf>, String> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let (mut found, mut folders) = (Vec::new(), vec![path.to_owned()]);
    while let Some(folder) = folders.pop() {
        if folder.join(RESULT).is_file() {
            found.push(folder.join(RESULT));
            continue;
        }
        let entries = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        for entry in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let is_result = entry
                .extension()
                .is_some_and(|name| ["json", "jsonl", "xml"].iter().any(|known| name == *known));
            match (entry.is_symlink(), entry.is_dir()) {
                (false, true) => folders.push(entry),
                (_, false) if is_result => found.push(entry),
                _ => {}
            }
        }
        if found.len() > MAX_FILES {
            return Err(format!("{}: more than {MAX_FILES} files", path.display()));
        }
    }
    found.sort();
    match found.is_empty() {
        true => Err(format!("{}: the folder contains no results (*.json, *.jsonl, *.xml)", path.display())),
        false => Ok(found),
    }
}

impl Collection<'_> {
    /// Reads the results in a file.
    fn read(&mut self, path: &Path) -> io::Result<()> {
        let mut file = BufReader::new(File::open(path)?);
        let mut is_junit = false;
        for number in 1.. {
            let mut line = Vec::new();
            if (&mut file).take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
                break;
            }
            let place = format!("{}:{number}", path.display());
            let is_whole = line.ends_with(b"\n");
            if number == 1 && junit::begins(&line) {
                is_junit = true;
                continue;
            }
            if is_junit {
                let text = str::from_utf8(&line).map_err(|_| "not UTF-8");
                let case = text.and_then(junit::read_line);
                let case = case.map_err(|why| io::Error::other(format!("line {number} is {why}")))?;
                if let Some((case, summary)) = case {
                    self.add_case(&place, &case, summary);
                }
                continue;
            }
            match std::str::from_utf8(&line).ok().and_then(|text| {
                let text = text.trim_end();
                Some((serde_json::from_str::<ResultLine>(text).ok()?, text))
            }) {
                Some((result, text)) => self.add(&place, result, text),
                // A shard that was killed leaves a part of a line.
                None if !is_whole && (line.len() as u64) < MAX_LINE => {
                    self.notes.push(format!("{place}: the file ends within a result"));
                }
                None => {
                    let why = "not a result: --merge takes what --json printed, reports of --junit and folders of --out";
                    return Err(io::Error::other(format!("line {number} is {why}")));
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, place: &str, result: ResultLine, line: &str) {
        let found =
            Found { summary: result.summary(), digest: result.trace_sha256, line: Some(line.to_owned()) };
        match self.indices.get(&result.replay) {
            Some(index) => self.keep(place, *index, found),
            None => self.others += 1,
        }
    }

    fn add_case(&mut self, place: &str, case: &junit::Case, summary: Summary) {
        match self.cases.get(case) {
            // The report is of an earlier merge.
            Some(_) if summary.failures.iter().any(|failure| failure.text == NO_RESULT) => {}
            Some(index) => self.keep(place, *index, Found { summary, digest: None, line: None }),
            None => self.others += 1,
        }
    }

    /// Keeps a result. A run may have several, because its shard was repeated or wrote it in two forms.
    fn keep(&mut self, place: &str, index: usize, new: Found) {
        let (job, kept) = (&self.jobs[index], &mut self.found[index]);
        let Some(old) = kept else {
            *kept = Some(new);
            return;
        };
        if job.backend == Backend::Sim {
            let digests_differ = old.digest.is_some() && new.digest.is_some() && old.digest != new.digest;
            if old.summary.verdict != new.summary.verdict || digests_differ {
                let why = "two results of this run differ, in virtual time: were the shards of one version?";
                self.notes.push(format!("{place}: {why}"));
                old.summary = Summary::error(why);
            } else if old.line.is_none() {
                *old = new;
            }
            return;
        }
        match (old.summary.verdict, new.summary.verdict) {
            (Verdict::Pass, Verdict::Pass) => {
                let is_flaky = old.summary.is_flaky || new.summary.is_flaky;
                if old.line.is_none() {
                    *old = new;
                }
                old.summary.is_flaky = is_flaky;
            }
            (_, Verdict::Pass) => {
                *old = Found { summary: Summary { is_flaky: true, ..new.summary }, ..new };
            }
            (Verdict::Pass, _) => old.summary.is_flaky = true,
            _ if old.line.is_none() => *old = new,
            _ => {}
        }
    }
}

/// Describes runs without a result: by shard, if the number of shards is known.
pub fn describe_missing(jobs: &[Job], missing: &[usize], shards: Option<usize>) -> Vec<String> {
    let Some(shards) = shards else {
        return match missing.is_empty() {
            true => Vec::new(),
            false => vec![format!("{} runs have no result: {}", missing.len(), names(jobs, missing))],
        };
    };
    let mut lines = Vec::new();
    for shard in 0..shards.min(jobs.len()) {
        let here: Vec<usize> = missing.iter().copied().filter(|index| index % shards == shard).collect();
        let all = (jobs.len() - shard).div_ceil(shards);
        let name = format!("shard {}/{shards}", shard + 1);
        match (here.len(), all) {
            (0, _) => {}
            (lost, all) if lost == all => {
                lines.push(format!("{name} is missing: none of its {all} runs has a result"))
            }
            (lost, all) => {
                lines.push(format!(
                    "{name} is incomplete: {lost} of its {all} runs have no result: {}",
                    names(jobs, &here)
                ));
            }
        }
    }
    lines
}

/// The first of some runs: files and seeds.
fn names(jobs: &[Job], indices: &[usize]) -> String {
    let mut names = Vec::new();
    for runs in indices.chunk_by(|a, b| jobs[*a].scenario.name() == jobs[*b].scenario.name()) {
        let seeds: Vec<String> =
            runs.iter().take(MAX_NAMES).map(|index| jobs[*index].seed.to_string()).collect();
        let more = if runs.len() > MAX_NAMES { ", …" } else { "" };
        let noun = if runs.len() == 1 { "seed" } else { "seeds" };
        names.push(format!("{} {noun} {}{more}", jobs[runs[0]].scenario.name(), seeds.join(", ")));
    }
    let more = names.len().saturating_sub(MAX_NAMES);
    names.truncate(MAX_NAMES);
    if more > 0 {
        names.push(format!("and {more} more files"));
    }
    names.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_scenarios::{ParameterValues, Scenario};
    use std::sync::Arc;

    const SCENARIO: &str = include_str!("../../../scenarios/library/fatal-lost-write-middle.toml");

    fn jobs(backend: Backend, seeds: u64) -> Vec<Job> {
        let scenario = Arc::new(Scenario::parse("lost.toml", SCENARIO).expect("a scenario of the library"));
        let job = |seed| Job {
            scenario: scenario.clone(),
            parameters: ParameterValues::new(),
            seed,
            swarm: false,
            backend,
        };
        (1..=seeds).map(job).collect()
    }

    fn line(job: &Job, verdict: &str, digest: &str) -> String {
        format!(
            r#"{{"replay":"{}","verdict":"{verdict}","trace_sha256":"{digest}","duration_ms":3,"expectations":[]}}"#,
            job.replay()
        )
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("softhca-merge-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn missing_shards_and_seeds_have_names() {
        let (folder, jobs) = (folder("missing"), jobs(Backend::Sim, 8));
        // The first of three shards is whole. The second was killed within its second line.
        let lines = |indices: &[usize]| -> String {
            indices.iter().map(|index| line(&jobs[*index], "pass", "a") + "\n").collect()
        };
        std::fs::write(folder.join("1.json"), lines(&[0, 3, 6])).unwrap();
        let cut = line(&jobs[4], "pass", "a");
        std::fs::write(folder.join("2.jsonl"), lines(&[1]) + &cut[..cut.len() / 2]).unwrap();
        let merged = merge(&jobs, std::slice::from_ref(&folder)).unwrap();
        assert_eq!(merged.missing, [2, 4, 5, 7]);
        assert_eq!((merged.results.len(), merged.lines.len()), (8, 4));
        assert!(merged.notes[0].ends_with("2.jsonl:2: the file ends within a result"), "{:?}", merged.notes);
        assert_eq!(
            describe_missing(&jobs, &merged.missing, Some(3)),
            [
                "shard 2/3 is incomplete: 2 of its 3 runs have no result: lost.toml seeds 5, 8",
                "shard 3/3 is missing: none of its 2 runs has a result"
            ]
        );
        assert_eq!(
            describe_missing(&jobs, &merged.missing, None),
            ["4 runs have no result: lost.toml seeds 3, 5, 6, 8"]
        );
        assert!(
            describe_missing(&jobs, &[], Some(3)).is_empty() && describe_missing(&jobs, &[], None).is_empty()
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_run_may_have_several_results() {
        let folder = folder("several");
        for (backend, [one, other], verdict, is_flaky) in [
            (Backend::Sim, [("pass", "a"), ("pass", "a")], Verdict::Pass, false),
            (Backend::Sim, [("pass", "a"), ("pass", "b")], Verdict::Error, false),
            (Backend::Sim, [("fail", "a"), ("pass", "a")], Verdict::Error, false),
            (Backend::Udp, [("fail", "a"), ("pass", "b")], Verdict::Pass, true),
            (Backend::Udp, [("pass", "a"), ("fail", "b")], Verdict::Pass, true),
            (Backend::Udp, [("fail", "a"), ("fail", "b")], Verdict::Fail, false),
        ] {
            let (jobs, file) = (jobs(backend, 1), folder.join("1.json"));
            let text = [one, other].map(|(verdict, digest)| line(&jobs[0], verdict, digest) + "\n").concat();
            std::fs::write(&file, text).unwrap();
            let merged = merge(&jobs, &[file]).unwrap();
            let (_, summary) = &merged.results[0];
            assert_eq!((summary.verdict, summary.is_flaky), (verdict, is_flaky), "{one:?} {other:?}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn junit_reports_have_the_results_of_json() {
        let (folder, jobs) = (folder("junit"), jobs(Backend::Udp, 4));
        let summary = |verdict, text: &str| Summary {
            verdict,
            failures: text.lines().map(|text| Failure { text: text.to_owned(), at: None }).collect(),
            outputs: if verdict == Verdict::Fail { "a:\n<b> & \"c\"\n".into() } else { String::new() },
            is_flaky: false,
            sometimes: Vec::new(),
            duration: Duration::from_millis(61_007),
        };
        let ran = [
            (0, Summary { is_flaky: true, ..summary(Verdict::Pass, "") }),
            (1, summary(Verdict::Fail, "one & two: <3>\n4 > 3: \"no\"")),
            (2, summary(Verdict::Error, "no port")),
        ];
        std::fs::write(folder.join("1.xml"), junit::report(&jobs, &ran)).unwrap();
        let merged = merge(&jobs, std::slice::from_ref(&folder)).unwrap();
        assert_eq!((&merged.missing[..], merged.lines.len()), (&[3][..], 0));
        for ((_, read), (_, wrote)) in merged.results.iter().zip(&ran) {
            assert_eq!(format!("{read:?}"), format!("{wrote:?}"));
        }
        // A merged report has an error for the missing run, which is no result.
        std::fs::write(folder.join("2.xml"), junit::report(&jobs, &merged.results)).unwrap();
        assert_eq!(merge(&jobs, std::slice::from_ref(&folder)).unwrap().missing, [3]);
        // The result of --json counts, because it has more.
        std::fs::write(folder.join("0.json"), line(&jobs[1], "fail", "a") + "\n").unwrap();
        assert_eq!(merge(&jobs, std::slice::from_ref(&folder)).unwrap().lines.len(), 1);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn other_files_and_other_runs_are_reported() {
        let (folder, jobs) = (folder("others"), jobs(Backend::Sim, 2));
        let file = folder.join("1.json");
        let error = |contents: &[u8]| {
            std::fs::write(&file, contents).unwrap();
            merge(&jobs, std::slice::from_ref(&file)).err().expect("not results").join("\n")
        };
        assert!(error(b"{}\n").contains("line 1 is not a result"));
        assert!(error(b"\xff\n").contains("line 1 is not a result"));
        let xml = b"<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
        assert!(error(&[xml, &b"<testsuites name=\"other\">\n"[..]].concat()).contains("not from a report"));
        assert!(error(&[xml, &b"  <testcase classname=\"a\"/>\n"[..]].concat()).contains("not a test case"));
        assert!(error(&[xml, &b"\xff\n"[..]].concat()).contains("line 2 is not UTF-8"));
        assert!(error(&vec![b'x'; 2 << 20]).contains("line 1 is not a result"));
        let empty = folder.join("empty");
        std::fs::create_dir(&empty).unwrap();
        assert!(merge(&jobs, &[empty]).err().expect("nothing")[0].contains("contains no results"));
        std::fs::write(&file, line(&jobs[0], "pass", "a").replace("seed 1", "seed 9") + "\n").unwrap();
        let merged = merge(&jobs, &[file]).unwrap();
        assert_eq!(merged.missing, [0, 1]);
        assert!(merged.notes[0].starts_with("1 results are of other runs"), "{:?}", merged.notes);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
