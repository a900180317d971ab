//! Explains from an event log or a capture why a work request failed or was slow.
//!
//! [`LogAnalyzer`] reads a log, or the entries that [`CaptureConverter`](crate::log::CaptureConverter) infers from a
//! capture, and answers a [`Query`]. The evidence lists the events of the packets of the work request, in order; the
//! conclusion names the cause and gives advice. A capture also has findings about whole connections.

mod cause;
mod connection;
mod evidence;
mod explanation;
mod log_analyzer;

#[cfg(feature = "schema")]
pub use explanation::generate_schema;
pub use explanation::{Evidence, Explanation, SCHEMA};
pub use log_analyzer::LogAnalyzer;

use crate::describe::duration;
use crate::log::Certainty;
use crate::packet_counts::cut_text;
use crate::parsed_log::{QueuePairId, WorkRequest};
use crate::text::wrap;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};
use thiserror::Error;

/// What is asked.
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
    UnknownQueuePair { asked: String, known: String },
    /// The log does not know the work request.
    #[error("the log has no work request with the id {asked}; it has {known}")]
    UnknownWorkRequest { asked: u64, known: String },
}

/// The most explanations of one cause for each connection of a capture; the others are counted.
const MAX_ALIKE: usize = 4;

/// All that is answered to a question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnosis {
    /// One for each work request that needs one.
    pub explanations: Vec<Explanation>,
    /// What is to be said besides, or instead.
    pub summary: String,
    /// The certainty is printed: the input is a capture.
    states_certainty: bool,
}

impl LogAnalyzer {
    /// Answers a question. Without an id it is about every work request that failed by itself, or, if none
    /// did, about those that had to be tried again.
    pub fn diagnose(&self, question: &Query) -> Result<Diagnosis, QueryError> {
        let log = &self.log;
        let places = match &question.queue_pair {
            Some(asked) => self.queue_pairs_matching(asked)?,
            None => log.queue_pairs.clone(),
        };
        let here: Vec<&WorkRequest> =
            log.work_requests.iter().filter(|work| places.contains(&work.queue_pair)).collect();
        let matching = |wanted: &dyn Fn(&WorkRequest) -> bool| -> Vec<&WorkRequest> {
            here.iter().copied().filter(|work| wanted(work)).collect()
        };
        if let Some(id) = question.wr_id {
            let asked = matching(&|work| work.wr_id == id);
            if asked.is_empty() {
                return Err(QueryError::UnknownWorkRequest { asked: id, known: ids(&here) });
            }
            return Ok(self.explain(&asked, String::new()));
        }
        if log.is_capture {
            return Ok(self.diagnose_capture(&here, question.queue_pair.as_ref().map(|_| &places[..])));
        }
        let only = question.queue_pair.as_ref().map(|_| &places[..]);
        if let Some(answer) = self.failures(&here, only) {
            return Ok(answer);
        }
        let slow = matching(&|work| evidence::was_delayed(log, work));
        if !slow.is_empty() {
            let remark =
                "Nothing failed. These had to be tried again, or were held up, and took longer for it.";
            return Ok(self.explain(&slow, remark.into()));
        }
        Ok(self.explain(&[], self.success_summary(&here)))
    }

    /// The failures in a log, and the first request of each connection that waits for ever; none if the run shows no
    /// problem. A request that was under way at its end, and flushes that the program asked for, are none.
    pub fn problems(&self) -> Option<Diagnosis> {
        let here: Vec<&WorkRequest> = self.log.work_requests.iter().collect();
        let mut answer = self.failures(&here, None)?;
        let mut waiting = BTreeSet::new();
        answer.explanations.retain(|one| {
            let is_problem = !["incomplete", "flushed", "none"].contains(&one.code.as_str());
            let is_waiting = one.request.is_some() && one.status.is_none();
            is_problem && (!is_waiting || waiting.insert(one.connection.clone()))
        });
        (!answer.explanations.is_empty()).then_some(answer)
    }

    /// The failures in a log, about these work requests and queue pairs.
    fn failures(&self, here: &[&WorkRequest], only: Option<&[QueuePairId]>) -> Option<Diagnosis> {
        let matching = |wanted: &dyn Fn(&WorkRequest) -> bool| -> Vec<&WorkRequest> {
            here.iter().copied().filter(|work| wanted(work)).collect()
        };
        let failed = matching(&WorkRequest::failed);
        let culprits = matching(&failed_by_itself);
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
            return Some(self.explain(&culprits, remark));
        }
        let connections = connection::log_findings(self, only);
        // A program flushes the requests of a connection that failed.
        if !failed.is_empty() && connections.is_empty() {
            return Some(self.explain(&failed[..1], String::new()));
        }
        let mut answer = self.explain(&matching(&|work| work.completed.is_none()), String::new());
        answer.explanations.extend(connections);
        (!answer.explanations.is_empty()).then_some(answer)
    }

    /// A capture shows no completions: every request that was not answered at once is explained, and what is wrong
    /// with connections, or only with those of these queue pairs.
    fn diagnose_capture(&self, here: &[&WorkRequest], only: Option<&[QueuePairId]>) -> Diagnosis {
        let needs_one = |work: &&WorkRequest| {
            failed_by_itself(work) || work.completed.is_none() || evidence::was_delayed(&self.log, work)
        };
        let mut alike: BTreeMap<(String, String), usize> = BTreeMap::new();
        let mut explanations = Vec::new();
        for work in here.iter().copied().filter(needs_one) {
            let explanation = self.explain_one(work);
            let count = alike.entry((explanation.connection.clone(), explanation.code.clone())).or_default();
            *count += 1;
            if *count <= MAX_ALIKE {
                explanations.push(explanation);
            }
        }
        // A request of the connection tells it.
        let is_told = explanations.iter().any(|told| told.code == "psn-mismatch");
        let findings = connection::findings(self, only);
        explanations.extend(findings.into_iter().filter(|found| !is_told || found.code != "psn-mismatch"));
        let mut summary = connection::lifetimes(self);
        for ((connection, code), count) in alike.iter().filter(|(_, count)| **count > MAX_ALIKE) {
            summary.push(format!("{} more of {connection} have the cause {code}.", count - MAX_ALIKE));
        }
        if self.log.cut_packets > 0 {
            summary.push(cut_text(self.log.cut_packets));
        } else if explanations.is_empty() {
            summary.push(self.success_summary(here));
        }
        Diagnosis { explanations, summary: summary.join("\n"), states_certainty: true }
    }

    fn queue_pairs_matching(&self, asked: &str) -> Result<Vec<QueuePairId>, QueryError> {
        let found = self.log.find(asked);
        if !found.is_empty() {
            return Ok(found);
        }
        let log = &self.log;
        let known: Vec<String> =
            log.queue_pairs.iter().map(|place| format!("{} ({:#x})", log.name(*place), place.qp)).collect();
        let known = if known.is_empty() { "none".into() } else { known.join(", ") };
        Err(QueryError::UnknownQueuePair { asked: asked.into(), known })
    }

    fn explain(&self, works: &[&WorkRequest], summary: String) -> Diagnosis {
        let explanations = works.iter().map(|work| self.explain_one(work)).collect();
        Diagnosis { explanations, summary, states_certainty: self.log.is_capture }
    }

    fn explain_one(&self, work: &WorkRequest) -> Explanation {
        let log = &self.log;
        let findings = evidence::collect(log, work);
        let outcome = match (&work.status, work.completed) {
            (None, Some(_)) if log.is_capture => "was answered".into(),
            (None, None) if log.is_capture => "has no complete answer in the capture".into(),
            (Some(status), Some(ended)) if log.entries[ended].certainty.is_some() => {
                format!("must have ended with {status}")
            }
            (Some(status), Some(_)) if status == "SUCCESS" => "succeeded".into(),
            (Some(status), _) => format!("ended with {status}"),
            (None, Some(_)) => "succeeded, without a completion because none was wanted".into(),
            (None, None) => "has not ended".into(),
        };
        let title = format!("{} of {} {outcome}", work.title(), log.name(work.queue_pair));
        let conclusion = cause::cause_and_advice(log, work, &findings);
        let certainty = match conclusion.code.as_str() {
            "no-response" | "incomplete" if log.is_capture => Certainty::Ambiguous,
            code if code == "rnr" || code.starts_with("nak") => Certainty::Known,
            "psn-mismatch" => findings.psn_mismatch.map_or(Certainty::Known, |(_, certainty)| certainty),
            "timeout" if log.is_capture => findings.certainty.unwrap_or(Certainty::Inferred),
            _ => findings.certainty.unwrap_or(Certainty::Known),
        };
        let mut evidence = findings.evidence;
        evidence.iter_mut().for_each(|step| step.packet = self.packet_of(step.entry));
        Explanation {
            connection: format!("{} - {}", log.name(work.queue_pair), log.peer_name(work.queue_pair)),
            request: Some(work.title()),
            posted_at: work.call_site.clone(),
            status: work.status.clone(),
            code: conclusion.code,
            certainty,
            title,
            evidence,
            cause: conclusion.cause,
            advice: conclusion.advice,
        }
    }

    fn success_summary(&self, works: &[&WorkRequest]) -> String {
        let log = &self.log;
        let took = |work: &WorkRequest| {
            let (started, ended) = (work.started?, work.completed?);
            Some(log.time_of(ended) - log.time_of(started))
        };
        let slowest = works.iter().filter_map(|work| Some((took(work)?, work))).max_by_key(|(took, _)| *took);
        match slowest {
            None if log.is_capture => {
                "The capture shows no reliable connection with an answered request, and nothing wrong.".into()
            }
            None => "The log has no work request that failed.".into(),
            Some((took, work)) if log.is_capture => format!(
                "Nothing wrong was found: {} messages were answered at once. The slowest, {} of {}, took {}.",
                works.len(),
                work.title(),
                log.name(work.queue_pair),
                duration(took)
            ),
            Some((took, work)) => format!(
                "Nothing failed and nothing had to be tried again: {} work requests ended well. The slowest, {} of {}, took {}.",
                works.len(),
                work.title(),
                log.name(work.queue_pair),
                duration(took)
            ),
        }
    }
}

/// Whether a work request failed, and not because its queue pair did.
fn failed_by_itself(work: &WorkRequest) -> bool {
    work.failed() && work.status.as_deref() != Some("WR_FLUSH_ERR")
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
            explanation.write(&mut text, width, self.states_certainty);
            text.push('\n');
        }
        for paragraph in self.summary.lines() {
            for line in wrap(paragraph, width.max(40)).iter().filter(|line| !line.is_empty()) {
                let _ = writeln!(text, "{line}");
            }
        }
        text.truncate(text.trim_end().len());
        text
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(100))
    }
}
