//! Why things failed, as the page shows it: the answer of `softhca why`.

use serde::Serialize;
use softhca_trace::log::{Entry, Header};
use softhca_trace::why::{Diagnosis, LogAnalyzer, Query};

/// An inquiry keeps the entries; a longer log is not asked about.
const MAX_ENTRIES: usize = 500_000;

/// What the page says about failures.
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

/// A log about which one question is asked at its end.
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
        if let Some(inquiry) = &mut self.analyzer {
            inquiry.push(entry);
        }
    }

    pub fn finish(self) -> WhyReport {
        let Some(inquiry) = self.analyzer else {
            let remark =
                "The log is too long to be asked why. softhca why LOG --qp Q asks about one queue pair.";
            return WhyReport { explanations: Vec::new(), summary: remark.into() };
        };
        // A question about everything names nothing that a log could lack.
        inquiry.diagnose(&Query::default()).map_or_else(|_| WhyReport::default(), WhyReport::from)
    }
}

impl From<Diagnosis> for WhyReport {
    fn from(answer: Diagnosis) -> WhyReport {
        let explanations = answer.explanations.into_iter().map(|explanation| Explanation {
            title: explanation.title,
            evidence: explanation
                .evidence
                .into_iter()
                .map(|link| Evidence { event: link.entry, time_ns: link.time_ns, text: link.text })
                .collect(),
            cause: explanation.cause,
            advice: explanation.advice,
        });
        WhyReport { explanations: explanations.collect(), summary: answer.summary }
    }
}
