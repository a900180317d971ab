//! The results of a sweep: a table by verb and fault, JUnit, JSON.

use super::coverage::Group;
use super::injection::Injection;
use super::outcome::Outcome;
use super::point::{Point, PointKind};
use crate::run::junit::{self, TestCase};
use serde::{Deserialize, Serialize};
use softhca_scenarios::Verdict;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

/// The result of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunResult {
    /// The address of the point and the fault.
    pub point: String,
    /// The verb, or `completion`.
    pub name: String,
    pub fault: String,
    pub seed: u64,
    pub outcome: Outcome,
    pub detail: String,
    pub replay: String,
    /// The folder of its files, if it was bad.
    pub kept: Option<String>,
    /// The core file of each program that a signal ended, or why there is none.
    #[serde(default)]
    pub cores: Vec<String>,
    pub milliseconds: u64,
    /// Whether the fault happened.
    pub reached: bool,
}

impl RunResult {
    fn test_case(&self) -> TestCase<'_> {
        let mut lines = vec![self.detail.clone(), format!("replay: {}", self.replay)];
        lines.extend(self.cores.iter().cloned());
        TestCase {
            class: &self.name,
            name: format!("{} (seed {})", self.point, self.seed),
            milliseconds: self.milliseconds,
            verdict: if self.outcome.is_bad() { Verdict::Fail } else { Verdict::Pass },
            is_flaky: false,
            message: format!("{}: {}", self.outcome.name(), self.detail),
            text: lines.join("\n"),
            outputs: "",
        }
    }

    /// The object of `--json`.
    pub fn json(&self, injection: &Injection) -> String {
        let point = &injection.point;
        let kind = match point.kind {
            PointKind::Call(_) => "verb",
            PointKind::Completion => "completion",
            PointKind::Request | PointKind::Response => "packet",
        };
        let address = serde_json::json!({
            "program": point.role, "object": point.object, "nth": point.nth,
        });
        serde_json::json!({
            "point": { "kind": kind, "name": self.name, "address": address },
            "fault": self.fault, "seed": self.seed, "outcome": self.outcome.name(), "detail": self.detail,
            "reached": self.reached, "kept": self.kept, "cores": self.cores, "replay": self.replay,
        })
        .to_string()
    }
}

fn found(coverage: &[(&Group, usize)]) -> usize {
    coverage.iter().map(|(group, _)| group.points.len()).sum()
}

fn ran(coverage: &[(&Group, usize)]) -> usize {
    coverage.iter().map(|(_, ran)| ran).sum()
}

/// All results.
pub struct Report<'a> {
    pub results: &'a [RunResult],
    pub groups: &'a [Group],
    pub duration: Duration,
    /// The runs of this invocation.
    pub runs: usize,
}

impl Report<'_> {
    fn count(&self, outcome: Outcome) -> usize {
        self.results.iter().filter(|run| run.outcome == outcome).count()
    }

    fn per_minute(&self) -> f64 {
        self.runs as f64 * 60.0 / self.duration.as_secs_f64().max(0.001)
    }

    /// The groups that have faults, and how many points of each have a result.
    fn coverage(&self) -> Vec<(&Group, usize)> {
        let points: BTreeSet<Point> = self
            .results
            .iter()
            .filter_map(|run| run.point.parse::<Injection>().ok())
            .map(|injection| injection.point)
            .collect();
        let covered = self.groups.iter().filter(|group| group.is_covered());
        let ran = |group: &Group| group.points.iter().filter(|point| points.contains(*point)).count();
        covered.map(|group| (group, ran(group))).collect()
    }

    /// The last object of `--json`.
    pub fn totals_json(&self) -> String {
        let outcomes: BTreeMap<&str, usize> =
            Outcome::ALL.into_iter().map(|outcome| (outcome.name(), self.count(outcome))).collect();
        let coverage = self.coverage();
        let groups: Vec<_> = coverage
            .iter()
            .map(|(group, ran)| {
                let found = group.points.len();
                serde_json::json!({ "group": group.key.to_string(), "points_found": found, "points_run": ran })
            })
            .collect();
        serde_json::json!({
            "totals": outcomes, "points_found": found(&coverage), "points_run": ran(&coverage), "groups": groups,
            "runs": self.results.len(), "not_reached": self.results.iter().filter(|run| !run.reached).count(),
            "runs_per_minute": self.per_minute().round(),
        })
        .to_string()
    }

    /// The table and the bad runs.
    pub fn text(&self) -> String {
        let mut rows: BTreeMap<(&str, &str), [usize; 6]> = BTreeMap::new();
        for run in self.results {
            let row = rows.entry((&run.name, &run.fault)).or_default();
            let place = Outcome::ALL.iter().position(|outcome| *outcome == run.outcome).unwrap_or(0);
            row[place] += 1;
        }
        let width = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0).max(5);
        let verb_width = width(&mut rows.keys().map(|(name, _)| name.len()));
        let fault_width = width(&mut rows.keys().map(|(_, fault)| fault.len()));
        let mut text = format!("{:verb_width$}  {:fault_width$}", "point", "fault");
        for outcome in Outcome::ALL {
            let _ = write!(text, "  {}", outcome.name());
        }
        text.push('\n');
        for ((name, fault), counts) in &rows {
            let _ = write!(text, "{name:verb_width$}  {fault:fault_width$}");
            for (outcome, count) in Outcome::ALL.into_iter().zip(counts) {
                let width = outcome.name().len();
                let shown = if *count == 0 { "-".to_owned() } else { count.to_string() };
                let _ = write!(text, "  {shown:>width$}");
            }
            text.push('\n');
        }
        let coverage = self.coverage();
        let _ = writeln!(
            text,
            "\n{} runs in {:.1} s, {:.0} a minute; {} points in {} groups, {} of them run",
            self.results.len(),
            self.duration.as_secs_f32(),
            self.per_minute(),
            found(&coverage),
            coverage.len(),
            ran(&coverage),
        );
        for (group, ran) in coverage.iter().filter(|(group, ran)| *ran > 0 && *ran < group.points.len()) {
            let _ = writeln!(text, "  {}: {ran} of {} run", group.key, group.points.len());
        }
        match coverage.iter().filter(|(_, ran)| *ran == 0).count() {
            0 => {}
            count => {
                let _ = writeln!(text, "  {count} groups have no run");
            }
        }
        let bad: Vec<&RunResult> = self.results.iter().filter(|run| run.outcome.is_bad()).collect();
        match bad.len() {
            0 => text.push_str("no bad outcome\n"),
            count => {
                let _ = writeln!(text, "{count} bad outcomes:");
            }
        }
        for run in bad {
            let _ = writeln!(
                text,
                "  {} at {}: {}\n    {}",
                run.outcome.name(),
                run.point,
                run.detail,
                run.replay
            );
            for core in &run.cores {
                let _ = writeln!(text, "    {core}");
            }
            if let Some(folder) = &run.kept {
                let _ = writeln!(text, "    files: {folder}");
            }
        }
        text
    }

    /// The JUnit report.
    pub fn junit(&self, title: &str) -> String {
        let cases = self.results.iter().map(RunResult::test_case).collect();
        junit::document("softhca sweep", &[(title, cases)])
    }
}
