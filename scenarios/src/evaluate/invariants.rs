//! Invariants: conditions that hold throughout a run.

use super::{CheckResult, Evaluator};
use crate::executor::Origin;
use crate::plan::Plan;
use crate::quantity::Time;
use crate::record::RecordedEvent;
use crate::spec::Invariant;
use softhca_engine::NotificationPoint;
use softhca_fabric::{PacketClass, PacketType};
use softhca_wire::{NakCode, Psn};
use std::collections::{BTreeMap, BTreeSet};

/// A broken invariant: the time, the queue pair and the reason.
type Violation = (u64, usize, String);

impl Evaluator<'_> {
    /// Checks an invariant, and says which.
    pub(super) fn invariant(&self, invariant: Invariant) -> (&'static str, CheckResult) {
        let (text, violation): (_, Option<Violation>) = match invariant {
            Invariant::OneNakInFlight => {
                ("at most one NAK is in flight on each queue pair", self.one_nak_in_flight())
            }
            Invariant::NakCarriesFirstLostPsn => {
                ("every sequence NAK names the first PSN that was lost", self.nak_carries_first_lost_psn())
            }
            Invariant::ExactlyOnce => {
                ("no packet changes memory twice, no message takes two receives", self.exactly_once())
            }
            Invariant::CompletionsInOrder => {
                ("send completions come in the order of posting", self.completions_in_order())
            }
            Invariant::OneCompletionPerWorkRequest => {
                ("every signalled work request completes once", self.one_completion_per_work_request())
            }
            Invariant::CnpPacing => ("CNPs of a flow keep their interval", self.cnp_pacing()),
            Invariant::OnlyInjectedLoss => ("no packet is lost that no rule lost", self.only_injected_loss()),
        };
        let finding = match violation {
            None => CheckResult::new(true, "it held throughout"),
            Some((time_ns, qp, what)) => {
                CheckResult::new(false, format!("{}: {what} at {}", self.name(qp), Time(time_ns)))
                    .at(self.location(time_ns, qp))
            }
        };
        (text, finding)
    }

    fn one_nak_in_flight(&self) -> Option<Violation> {
        let mut outstanding: BTreeMap<usize, Psn> = BTreeMap::new();
        for entry in &self.results.record.timeline {
            let Some(qp) = entry.qp else { continue };
            match &entry.event {
                RecordedEvent::Sent { packet } if matches!(packet.class, PacketClass::Nak(_)) => {
                    let psn = packet.psn?;
                    if let Some(first) = outstanding.insert(qp, psn) {
                        return Some((
                            entry.time_ns,
                            qp,
                            format!("a NAK of {psn} while one of {first} is in flight"),
                        ));
                    }
                }
                RecordedEvent::Received { packet }
                    if packet.packet_type == Some(PacketType::Request)
                        && outstanding.get(&qp).copied() == packet.psn =>
                {
                    outstanding.remove(&qp);
                }
                _ => {}
            }
        }
        None
    }

    fn nak_carries_first_lost_psn(&self) -> Option<Violation> {
        // By requester: PSNs that were lost and are still missing, and PSNs that arrived.
        let mut lost: BTreeMap<usize, BTreeSet<i64>> = BTreeMap::new();
        let mut arrived: BTreeMap<usize, BTreeSet<u32>> = BTreeMap::new();
        let mut latest = (usize::MAX, Psn::new(0), 0, false);
        for entry in &self.results.record.timeline {
            match &entry.event {
                RecordedEvent::Fault { lost: true, packet, .. }
                    if packet.packet_type == Some(PacketType::Request) =>
                {
                    let (Some(role), Some(psn), Some(relative)) =
                        (packet.flow_id, packet.psn, packet.relative_psn)
                    else {
                        continue;
                    };
                    // The loss of a packet that arrived before has no effect.
                    let qp = Plan::qp_of_role(role);
                    if !arrived.entry(qp).or_default().contains(&psn.value()) {
                        lost.entry(qp).or_default().insert(relative);
                    }
                }
                RecordedEvent::Received { packet } if packet.packet_type == Some(PacketType::Request) => {
                    let (Some(role), Some(psn), Some(relative)) =
                        (packet.flow_id, packet.psn, packet.relative_psn)
                    else {
                        continue;
                    };
                    let qp = Plan::qp_of_role(role);
                    let was_lost = lost.entry(qp).or_default().remove(&relative);
                    arrived.entry(qp).or_default().insert(psn.value());
                    latest = (qp, psn, relative, was_lost);
                }
                // An earlier copy that arrived too early does not replace a later one that was lost.
                RecordedEvent::Rejected { psn } => {
                    let (qp, last, relative, was_lost) = latest;
                    if entry.qp.map(|at| self.plan.qps[at].peer) == Some(qp) && last == *psn {
                        arrived.entry(qp).or_default().remove(&psn.value());
                        if was_lost {
                            lost.entry(qp).or_default().insert(relative);
                        }
                    }
                }
                RecordedEvent::Sent { packet }
                    if packet.class == PacketClass::Nak(NakCode::PsnSequenceError) =>
                {
                    let (Some(role), Some(named)) = (packet.flow_id, packet.relative_psn) else {
                        continue;
                    };
                    let first = lost.get(&Plan::qp_of_role(role)).and_then(|lost| lost.first().copied());
                    if first != Some(named) {
                        let qp = entry.qp.unwrap_or(0);
                        let first = first.map_or("nothing".to_owned(), |first| format!("+{first}"));
                        return Some((
                            entry.time_ns,
                            qp,
                            format!("a NAK names +{named}, but {first} was lost first"),
                        ));
                    }
                }
                _ => {}
            }
        }
        None
    }

    fn exactly_once(&self) -> Option<Violation> {
        let mut written = BTreeSet::new();
        let mut received = BTreeSet::new();
        for entry in &self.results.record.timeline {
            let Some(qp) = entry.qp else { continue };
            match &entry.event {
                RecordedEvent::MemoryWritten { psn } if !written.insert((qp, psn.value())) => {
                    return Some((entry.time_ns, qp, format!("PSN {psn} changed memory a second time")));
                }
                RecordedEvent::Completed { completion }
                    if completion.opcode.is_receive() && !received.insert((qp, completion.wr_id)) =>
                {
                    return Some((
                        entry.time_ns,
                        qp,
                        format!("receive #{} completed a second time", completion.wr_id),
                    ));
                }
                _ => {}
            }
        }
        None
    }

    fn completions_in_order(&self) -> Option<Violation> {
        let mut last: BTreeMap<usize, u64> = BTreeMap::new();
        for seen in self.results.log.completions.iter().filter(|seen| !seen.completion.opcode.is_receive()) {
            let id = seen.completion.wr_id;
            if let Some(before) = last.insert(seen.qp, id).filter(|before| *before >= id) {
                return Some((seen.time_ns, seen.qp, format!("#{id} completed after #{before}")));
            }
        }
        None
    }

    fn one_completion_per_work_request(&self) -> Option<Violation> {
        let mut ended = BTreeSet::new();
        for seen in self
            .results
            .log
            .completions
            .iter()
            .filter(|seen| !matches!(seen.origin, Some(Origin::AutoReceive)))
        {
            let key = (seen.qp, seen.completion.wr_id, seen.completion.opcode.is_receive());
            if !ended.insert(key) && !seen.completion.opcode.is_receive() {
                return Some((
                    seen.time_ns,
                    seen.qp,
                    format!("#{} completed a second time", seen.completion.wr_id),
                ));
            }
        }
        for (index, step) in self.plan.steps.iter().enumerate() {
            if self.results.log.pending_completions[index] > 0 {
                let left = self.results.log.pending_completions[index];
                return Some((
                    self.results.end.ended_ns,
                    step.qp,
                    format!("{left} work requests never completed"),
                ));
            }
        }
        None
    }

    fn cnp_pacing(&self) -> Option<Violation> {
        for (qp, times) in &self.results.record.cnps {
            let settings = &self.plan.hosts[self.plan.qps[*qp].host].settings;
            let interval =
                settings.congestion.notification_point.unwrap_or(NotificationPoint::PAPER).min_cnp_interval;
            for pair in times.windows(2) {
                if u128::from(pair[1] - pair[0]) < interval.as_nanos() {
                    return Some((
                        pair[1],
                        *qp,
                        format!("a CNP only {} after another", Time(pair[1] - pair[0])),
                    ));
                }
            }
        }
        None
    }

    fn only_injected_loss(&self) -> Option<Violation> {
        let lost = self.results.record.uninjected_losses;
        (lost > 0).then(|| (self.results.end.ended_ns, 0, format!("{lost} packets were")))
    }
}
