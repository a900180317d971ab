//! Compares the expected order of events with the timeline of a run.

use super::{CheckResult, Evaluator};
use crate::executor::ObservedCompletion;
use crate::plan::OrderCheck;
use crate::record::{RecordedEvent, TimelineEntry};
use softhca_fabric::Direction;

impl Evaluator<'_> {
    pub(super) fn order(&self, checks: &[OrderCheck]) -> CheckResult {
        let mut left = checks;
        let mut last: Option<&TimelineEntry> = None;
        for entry in &self.results.record.timeline {
            let Some(first) = left.first() else { break };
            if self.item_matches(first, entry) {
                left = &left[1..];
                last = Some(entry);
            }
        }
        let (time_ns, qp) = last.map_or((0, 0), |entry| (entry.time_ns, entry.qp.unwrap_or(0)));
        match left.first() {
            None => CheckResult::new(true, format!("all {} did", checks.len())),
            Some(missing) => {
                let behind = match checks.len() - left.len() {
                    0 => "it never happened".to_owned(),
                    n => format!("it did not happen after {}", checks[n - 1].text()),
                };
                CheckResult::new(false, format!("missing: {}; {behind}", missing.text()))
                    .at(self.location(time_ns, qp))
            }
        }
    }

    fn item_matches(&self, check: &OrderCheck, entry: &TimelineEntry) -> bool {
        match (check, &entry.event) {
            (OrderCheck::Packet(look, _), RecordedEvent::Sent { packet }) => {
                look.from.is_none_or(|host| entry.host == Some(host))
                    && look.selector.matches(entry.time_ns, Direction::Forward, packet)
            }
            (OrderCheck::Completion(check, _), RecordedEvent::Completed { completion }) => {
                let Some(qp) = entry.qp else { return false };
                let seen = &self.results.log.completions;
                let same = |seen: &&ObservedCompletion| {
                    seen.qp == qp
                        && seen.completion.wr_id == completion.wr_id
                        && seen.completion.opcode.is_receive() == completion.opcode.is_receive()
                };
                let origin = seen.iter().find(same).and_then(|seen| seen.origin);
                self.completion_matches(check, qp, completion, origin, entry.time_ns)
            }
            (OrderCheck::State(qp, is, _), RecordedEvent::StateChanged { to }) => {
                entry.qp == Some(*qp) && to == is
            }
            (OrderCheck::Event(host, name), RecordedEvent::AsyncEvent { name: raised }) => {
                entry.host == Some(*host) && name == raised
            }
            (OrderCheck::Connection(check, _), RecordedEvent::CmEvent { id, kind, status }) => {
                let qp = entry.host.and_then(|host| self.results.log.connections.qp_of(host, *id));
                check.kind == *kind
                    && check.status.is_none_or(|wanted| wanted == *status)
                    && check.host.is_none_or(|host| entry.host == Some(host))
                    && check.qp.is_none_or(|wanted| qp == Some(wanted))
                    && (check.during.first..=check.during.last).contains(&entry.time_ns)
            }
            (
                OrderCheck::Fault(id, _),
                RecordedEvent::Fault { rule: Some(rule), .. } | RecordedEvent::RuleFired { rule },
            ) => rule == id,
            _ => false,
        }
    }
}
