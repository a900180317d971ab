//! The page's statements about a run as a whole: the answer of `softhca why`, the summary, and lints.

use serde::Serialize;
use softhca_trace::lint::{Finding, Linter};
use softhca_trace::log::{ConvertedEntry, Entry, Header};
use softhca_trace::summary::Summary;
use softhca_trace::why::{Diagnosis, Explanation, LogAnalyzer, Query};

/// The analysis keeps all entries in memory; a longer log is not analyzed.
const MAX_ENTRIES: usize = 500_000;

/// The explanations of all failures of a run.
#[derive(Debug, Default, Serialize)]
pub struct WhyReport {
    explanations: Vec<Explanation>,
    summary: String,
    /// The numbers of the summary tab; absent for a run that is too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    numbers: Option<Summary>,
    lints: Vec<Finding>,
}

impl WhyReport {
    /// The cause of the first explanation.
    pub fn first_cause(&self) -> Option<&str> {
        self.explanations.first().map(|explanation| explanation.cause.as_str())
    }
}

/// Collects a log for its analysis.
pub(crate) struct Analysis {
    analyzer: Option<LogAnalyzer>,
    linter: Option<Linter>,
    entries: usize,
}

impl Analysis {
    pub fn new(header: &Header) -> Analysis {
        // A capture does not show what the program did.
        let linter = header.source.is_none().then(|| Linter::new(header));
        Analysis { analyzer: Some(LogAnalyzer::new(header)), linter, entries: 0 }
    }

    pub fn push(&mut self, entry: Entry) {
        self.push_converted((None, entry));
    }

    pub fn push_converted(&mut self, entry: ConvertedEntry) {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            self.analyzer = None;
        }
        if let Some(linter) = &mut self.linter {
            linter.push(&entry.1);
        }
        if let Some(analyzer) = &mut self.analyzer {
            analyzer.push_converted(entry);
        }
    }

    pub fn finish(self) -> WhyReport {
        let lints = self.linter.iter().flat_map(Linter::findings).cloned().collect();
        let Some(analyzer) = self.analyzer else {
            let summary =
                "The run is too long to be analysed as a whole. softhca why FILE --qp Q asks about one queue pair.".into();
            return WhyReport { summary, lints, ..WhyReport::default() };
        };
        // A question about everything fits every log.
        let Diagnosis { explanations, summary, .. } =
            analyzer.diagnose(&Query::default()).unwrap_or_default();
        WhyReport { explanations, summary, numbers: Some(analyzer.summary()), lints }
    }
}
