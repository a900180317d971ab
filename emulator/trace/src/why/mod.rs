//! Explains from an event log why a work request failed or was slow.
//!
//! [`LogAnalyzer`] reads a log and answers a [`Query`]. The evidence lists the events of the packets of the work
//! request, in order; the conclusion names the cause and gives advice.

mod cause;
mod evidence;

use crate::describe::duration;
use crate::log::{Entry, Header};
use crate::parsed_log::{ParsedLog, QueuePairId, WorkRequest};
use crate::text::wrap;
use std::fmt::{self, Write};
use thiserror::Error;

/// What somebody wants to know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// Only this queue pair: its number, decimal or with `0x`, or its name: `alice.1`.
    pub queue_pair: Option<String>,
    /// Only the work request with this id.
    pub wr_id: Option<u64>,
}

/// Why a question has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum QueryError {
    /// The log does not know the queue pair.
    #[error("the log has no queue pair `{asked}`; it has {known}")]
    UnknownQueuePair {
        /// What was asked for.
        asked: String,
        /// Those that it has.
        known: String,
    },
    /// The log does not know the work request.
    #[error("the log has no work request with the id {asked}; it has {known}")]
    UnknownWorkRequest {
        /// What was asked for.
        asked: u64,
        /// Those that it has.
        known: String,
    },
}

/// A log that questions are asked about.
#[derive(Debug)]
pub struct LogAnalyzer {
    log: ParsedLog,
}

/// One step of an explanation: where in the log, when, and what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// The number of the entry that tells it, counted from 0.
    pub entry: usize,
    /// Nanoseconds since the start of the log.
    pub time_ns: u64,
    /// A sentence.
    pub text: String,
}

/// Why one work request ended as it did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// What is explained.
    pub title: String,
    /// What happened, in order.
    pub evidence: Vec<Evidence>,
    /// The cause, in a few sentences.
    pub cause: String,
    /// What to do about it. Empty if nothing is to be done.
    pub advice: String,
}

/// All that is answered to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// One for each work request that needs one.
    pub explanations: Vec<Explanation>,
    /// What is to be said besides, or instead.
    pub summary: String,
}

impl LogAnalyzer {
    /// A log with no entries yet.
    pub fn new(header: &Header) -> LogAnalyzer {
        LogAnalyzer { log: ParsedLog::new(header) }
    }

    /// Takes the next entry of the log.
    pub fn push(&mut self, entry: Entry) {
        self.log.push(entry);
    }

    /// Answers a question. Without an id it is about every work request that failed by itself, or, if none
    /// did, about those that had to be tried again.
    pub fn diagnose(&self, question: &Query) -> Result<Diagnosis, QueryError> {
        let account = &self.log;
        let places = match &question.queue_pair {
            Some(asked) => self.queue_pairs_matching(asked)?,
            None => account.queue_pairs.clone(),
        };
        let here: Vec<&WorkRequest> =
            account.work_requests.iter().filter(|work| places.contains(&work.queue_pair)).collect();
        if let Some(id) = question.wr_id {
            let asked: Vec<&WorkRequest> = here.iter().copied().filter(|work| work.wr_id == id).collect();
            if asked.is_empty() {
                return Err(QueryError::UnknownWorkRequest { asked: id, known: ids(&here) });
            }
            return Ok(self.explain(&asked, String::new()));
        }
        let failed: Vec<&WorkRequest> = here.iter().copied().filter(|work| work.failed()).collect();
        let culprits: Vec<&WorkRequest> =
            failed.iter().copied().filter(|work| work.status.as_deref() != Some("WR_FLUSH_ERR")).collect();
        if !culprits.is_empty() {
            let flushed = failed.len() - culprits.len();
            let remark = match flushed {
                0 => String::new(),
                1 => {
                    "One more was flushed: it failed because its queue pair did. `--wr` asks about it.".into()
                }
                _ => format!(
                    "{flushed} more were flushed: they failed because their queue pair did. `--wr` asks about one of them."
                ),
            };
            return Ok(self.explain(&culprits, remark));
        }
        if !failed.is_empty() {
            return Ok(self.explain(&failed[..1], String::new()));
        }
        let stuck: Vec<&WorkRequest> = here.iter().copied().filter(|work| work.completed.is_none()).collect();
        if !stuck.is_empty() {
            return Ok(self.explain(&stuck, String::new()));
        }
        let slow: Vec<&WorkRequest> =
            here.iter().copied().filter(|work| evidence::was_delayed(account, work)).collect();
        if !slow.is_empty() {
            let remark =
                "Nothing failed. These had to be tried again, or were held up, and took longer for it.";
            return Ok(self.explain(&slow, remark.into()));
        }
        Ok(Diagnosis { explanations: Vec::new(), summary: self.success_summary(&here) })
    }

    fn queue_pairs_matching(&self, asked: &str) -> Result<Vec<QueuePairId>, QueryError> {
        let found = self.log.find(asked);
        if !found.is_empty() {
            return Ok(found);
        }
        let account = &self.log;
        let known: Vec<String> = account
            .queue_pairs
            .iter()
            .map(|place| format!("{} ({:#x})", account.name(*place), place.qp))
            .collect();
        let known = if known.is_empty() { "none".into() } else { known.join(", ") };
        Err(QueryError::UnknownQueuePair { asked: asked.into(), known })
    }

    fn explain(&self, works: &[&WorkRequest], remark: String) -> Diagnosis {
        Diagnosis { explanations: works.iter().map(|work| self.explain_one(work)).collect(), summary: remark }
    }

    fn explain_one(&self, work: &WorkRequest) -> Explanation {
        let account = &self.log;
        let findings = evidence::collect(account, work);
        let outcome = match (&work.status, work.completed) {
            (Some(status), Some(_)) if status == "SUCCESS" => "succeeded".into(),
            (Some(status), _) => format!("ended with {status}"),
            (None, Some(_)) => "succeeded, without a completion because none was wanted".into(),
            (None, None) => "has not ended".into(),
        };
        let title = format!("{} of {} {outcome}", work.title(), account.name(work.queue_pair));
        let (cause, advice) = cause::cause_and_advice(account, work, &findings);
        Explanation { title, evidence: findings.evidence, cause, advice }
    }

    fn success_summary(&self, works: &[&WorkRequest]) -> String {
        let account = &self.log;
        let took = |work: &WorkRequest| {
            let (started, ended) = (work.started?, work.completed?);
            Some(account.time_of(ended) - account.time_of(started))
        };
        let slowest = works.iter().filter_map(|work| Some((took(work)?, work))).max_by_key(|(took, _)| *took);
        match slowest {
            None => "The log has no work request that failed.".into(),
            Some((took, work)) => format!(
                "Nothing failed and nothing had to be tried again: {} work requests ended well. The slowest, {} of {}, took {}.",
                works.len(),
                work.title(),
                account.name(work.queue_pair),
                duration(took)
            ),
        }
    }
}

fn ids(works: &[&WorkRequest]) -> String {
    const SHOWN: usize = 8;
    let mut ids: Vec<u64> = works.iter().map(|work| work.wr_id).collect();
    ids.sort_unstable();
    ids.dedup();
    let shown: Vec<String> = ids.iter().take(SHOWN).map(u64::to_string).collect();
    match ids.len() {
        0 => "none".into(),
        count if count > SHOWN => format!("{} and {} more", shown.join(", "), count - SHOWN),
        _ => shown.join(", "),
    }
}

impl Diagnosis {
    /// The answer as text of at most `width` columns.
    pub fn text(&self, width: usize) -> String {
        let mut text = String::new();
        for explanation in &self.explanations {
            explanation.write(&mut text, width);
            text.push('\n');
        }
        for line in wrap(&self.summary, width.max(40)).iter().filter(|line| !line.is_empty()) {
            let _ = writeln!(text, "{line}");
        }
        text.truncate(text.trim_end().len());
        text
    }
}

impl Explanation {
    fn write(&self, text: &mut String, width: usize) {
        const TIME: usize = 10;
        let width = width.max(40);
        for line in wrap(&self.title, width) {
            let _ = writeln!(text, "{line}");
        }
        text.push('\n');
        for link in &self.evidence {
            for (number, line) in wrap(&link.text, width - TIME - 2).iter().enumerate() {
                let time = if number == 0 { duration(link.time_ns) } else { String::new() };
                let _ = writeln!(text, "{time:>TIME$}  {line}");
            }
        }
        for (heading, body) in [("Cause", &self.cause), ("What to do", &self.advice)] {
            if body.is_empty() {
                continue;
            }
            text.push('\n');
            for line in wrap(&format!("{heading}: {body}"), width) {
                let _ = writeln!(text, "{line}");
            }
        }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(100))
    }
}
