//! The explanation of failures by `softhca why`, for the page.

use serde::Serialize;
use softhca_trace::log::{Entry, Header};
use softhca_trace::why::{Diagnosis, LogAnalyzer, Query};

/// The analysis keeps all entries in memory; a longer log is not analyzed.
const MAX_ENTRIES: usize = 500_000;

/// The explanations of all failures of a run.
#[derive(Debug, Default, Serialize)]
pub struct WhyReport {
    explanations: Vec<Explanation>,
    summary: String,
}

#[derive(Debug, Serialize)]
struct Explanation {
    title: String,
    evidence: Vec<Evidence>,
    cause: String,
    advice: String,
}

#[derive(Debug, Serialize)]
struct Evidence {
    event: usize,
    time_ns: u64,
    text: String,
}

/// Collects a log for its analysis.
pub(crate) struct Analysis {
    analyzer: Option<LogAnalyzer>,
    entries: usize,
}

impl Analysis {
    pub fn new(header: &Header) -> Analysis {
        Analysis { analyzer: Some(LogAnalyzer::new(header)), entries: 0 }
    }

    pub fn push(&mut self, entry: Entry) {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            self.analyzer = None;
        }
        if let Some(analyzer) = &mut self.analyzer {
            analyzer.push(entry);
        }
    }

    pub fn finish(self) -> WhyReport {
        let Some(analyzer) = self.analyzer else {
            let remark = "The log is too long to be explained here. To explain one queue pair: softhca why LOG --qp Q.";
            return WhyReport { explanations: Vec::new(), summary: remark.into() };
        };
        // The default query names nothing that a log could lack.
        analyzer.diagnose(&Query::default()).map_or_else(|_| WhyReport::default(), WhyReport::from)
    }
}

impl From<Diagnosis> for WhyReport {
    fn from(diagnosis: Diagnosis) -> WhyReport {
        let explanations = diagnosis.explanations.into_iter().map(|explanation| Explanation {
            title: explanation.title,
            evidence: explanation
                .evidence
                .into_iter()
                .map(|link| Evidence { event: link.entry, time_ns: link.time_ns, text: link.text })
                .collect(),
            cause: explanation.cause,
            advice: explanation.advice,
        });
        WhyReport { explanations: explanations.collect(), summary: diagnosis.summary }
    }
}
