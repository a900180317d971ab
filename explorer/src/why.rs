//! Why things failed, as the page shows it: the answer of `softhca why`.

use serde::Serialize;
use softhca_trace::log::{Entry, Header};
use softhca_trace::why::{Answer, Inquiry, Question};

/// An inquiry keeps the entries; a longer log is not asked about.
const MOST_ENTRIES: usize = 500_000;

/// What the page says about failures.
#[derive(Debug, Default, Serialize)]
pub struct Why {
    explanations: Vec<Explanation>,
    remark: String,
}

#[derive(Debug, Serialize)]
struct Explanation {
    title: String,
    chain: Vec<Link>,
    cause: String,
    advice: String,
}

#[derive(Debug, Serialize)]
struct Link {
    event: usize,
    time_ns: u64,
    text: String,
}

/// A log about which one question is asked at its end.
pub(crate) struct Asked {
    inquiry: Option<Inquiry>,
    entries: usize,
}

impl Asked {
    pub fn new(header: &Header) -> Asked {
        Asked { inquiry: Some(Inquiry::new(header)), entries: 0 }
    }

    pub fn push(&mut self, entry: Entry) {
        self.entries += 1;
        if self.entries > MOST_ENTRIES {
            self.inquiry = None;
        }
        if let Some(inquiry) = &mut self.inquiry {
            inquiry.push(entry);
        }
    }

    pub fn answer(self) -> Why {
        let Some(inquiry) = self.inquiry else {
            let remark =
                "The log is too long to be asked why. softhca why LOG --qp Q asks about one queue pair.";
            return Why { explanations: Vec::new(), remark: remark.into() };
        };
        // A question about everything names nothing that a log could lack.
        inquiry.answer(&Question::default()).map_or_else(|_| Why::default(), Why::from)
    }
}

impl From<Answer> for Why {
    fn from(answer: Answer) -> Why {
        let explanations = answer.explanations.into_iter().map(|explanation| Explanation {
            title: explanation.title,
            chain: explanation
                .chain
                .into_iter()
                .map(|link| Link { event: link.entry, time_ns: link.time_ns, text: link.text })
                .collect(),
            cause: explanation.cause,
            advice: explanation.advice,
        });
        Why { explanations: explanations.collect(), remark: answer.remark }
    }
}
