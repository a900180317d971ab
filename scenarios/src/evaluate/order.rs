//! Things that must happen in an order, held against the story of a run.

use super::{CheckResult, Evaluator};
use crate::executor::ObservedCompletion;
use crate::plan::OrderCheck;
use crate::record::{RecordedEvent, TimelineEntry};
use softhca_fabric::Direction;

impl Evaluator<'_> {
    pub(super) fn order(&self, checks: &[OrderCheck]) -> CheckResult {
        let mut left = checks;
        let mut last: Option<&TimelineEntry> = None;
        for told in &self.results.record.timeline {
            let Some(first) = left.first() else { break };
            if self.item_matches(first, told) {
                left = &left[1..];
                last = Some(told);
            }
        }
        let (time_ns, qp) = last.map_or((0, 0), |told| (told.time_ns, told.qp.unwrap_or(0)));
        match left.first() {
            None => CheckResult::new(true, format!("all {} did", checks.len())),
            Some(missing) => {
                let behind = match checks.len() - left.len() {
                    0 => "it never came".to_owned(),
                    n => format!("it did not come after {}", checks[n - 1].text()),
                };
                CheckResult::new(false, format!("missing: {}; {behind}", missing.text()))
                    .at(self.location(time_ns, qp))
            }
        }
    }

    fn item_matches(&self, check: &OrderCheck, told: &TimelineEntry) -> bool {
        match (check, &told.event) {
            (OrderCheck::Packet(look, _), RecordedEvent::Sent { sighting }) => {
                look.from.is_none_or(|host| told.host == Some(host))
                    && look.selector.matches(told.time_ns, Direction::Forward, sighting)
            }
            (OrderCheck::Completion(check, _), RecordedEvent::Completed { completion }) => {
                let Some(qp) = told.qp else { return false };
                let seen = &self.results.log.completions;
                let same = |seen: &&ObservedCompletion| {
                    seen.qp == qp
                        && seen.completion.wr_id == completion.wr_id
                        && seen.completion.opcode.is_receive() == completion.opcode.is_receive()
                };
                let origin = seen.iter().find(same).and_then(|seen| seen.origin);
                self.completion_matches(check, qp, completion, origin, told.time_ns)
            }
            (OrderCheck::State(qp, is, _), RecordedEvent::StateChanged { to }) => {
                told.qp == Some(*qp) && to == is
            }
            (OrderCheck::Event(host, name), RecordedEvent::AsyncEvent { name: raised }) => {
                told.host == Some(*host) && name == raised
            }
            (OrderCheck::Connection(check, _), RecordedEvent::CmEvent { id, kind, status }) => {
                let qp = told.host.and_then(|host| self.results.log.connections.qp_of(host, *id));
                check.kind == *kind
                    && check.status.is_none_or(|wanted| wanted == *status)
                    && check.host.is_none_or(|host| told.host == Some(host))
                    && check.qp.is_none_or(|wanted| qp == Some(wanted))
                    && (check.during.first..=check.during.last).contains(&told.time_ns)
            }
            (
                OrderCheck::Fault(id, _),
                RecordedEvent::Fault { rule: Some(rule), .. } | RecordedEvent::RuleFired { rule },
            ) => rule == id,
            _ => false,
        }
    }
}
