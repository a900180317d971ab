//! Things that must happen in an order, held against the story of a run.

use super::{Finding, Judge};
use crate::plan::OrderCheck;
use crate::play::Seen;
use crate::record::{Moment, Told};
use softhca_fabric::Direction;

impl Judge<'_> {
    pub(super) fn order(&self, checks: &[OrderCheck]) -> Finding {
        let mut left = checks;
        let mut last: Option<&Told> = None;
        for told in &self.evidence.record.story {
            let Some(first) = left.first() else { break };
            if self.happens(first, told) {
                left = &left[1..];
                last = Some(told);
            }
        }
        let (time_ns, qp) = last.map_or((0, 0), |told| (told.time_ns, told.qp.unwrap_or(0)));
        match left.first() {
            None => Finding::new(true, format!("all {} did", checks.len())),
            Some(missing) => {
                let behind = match checks.len() - left.len() {
                    0 => "it never came".to_owned(),
                    n => format!("it did not come after {}", checks[n - 1].text()),
                };
                Finding::new(false, format!("missing: {}; {behind}", missing.text()))
                    .at(self.around(time_ns, qp))
            }
        }
    }

    fn happens(&self, check: &OrderCheck, told: &Told) -> bool {
        match (check, &told.moment) {
            (OrderCheck::Packet(look, _), Moment::Sent { sighting }) => {
                look.from.is_none_or(|host| told.host == Some(host))
                    && look.selector.matches(told.time_ns, Direction::Forward, sighting)
            }
            (OrderCheck::Completion(check, _), Moment::Completed { completion }) => {
                let Some(qp) = told.qp else { return false };
                let seen = &self.evidence.account.seen;
                let same = |seen: &&Seen| {
                    seen.qp == qp
                        && seen.completion.id == completion.id
                        && seen.completion.operation.is_receive() == completion.operation.is_receive()
                };
                let origin = seen.iter().find(same).and_then(|seen| seen.origin);
                self.is_it(check, qp, completion, origin, told.time_ns)
            }
            (OrderCheck::State(qp, is, _), Moment::State { to }) => told.qp == Some(*qp) && to == is,
            (OrderCheck::Event(host, name), Moment::Raised { name: raised }) => {
                told.host == Some(*host) && name == raised
            }
            (OrderCheck::Connection(check, _), Moment::Connection { id, kind, status }) => {
                let qp = told.host.and_then(|host| self.evidence.account.connections.qp_of(host, *id));
                check.kind == *kind
                    && check.status.is_none_or(|wanted| wanted == *status)
                    && check.host.is_none_or(|host| told.host == Some(host))
                    && check.qp.is_none_or(|wanted| qp == Some(wanted))
                    && (check.during.first..=check.during.last).contains(&told.time_ns)
            }
            (OrderCheck::Fault(id, _), Moment::Fault { rule: Some(rule), .. } | Moment::Fired { rule }) => {
                rule == id
            }
            _ => false,
        }
    }
}
