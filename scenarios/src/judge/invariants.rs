//! What must hold throughout a run.

use super::{Finding, Judge};
use crate::language::Invariant;
use crate::plan::Plan;
use crate::play::Origin;
use crate::quantity::Time;
use crate::record::Moment;
use softhca_engine::Notification;
use softhca_fabric::{Class, Sense};
use softhca_wire::{NakCode, Psn};
use std::collections::{BTreeMap, BTreeSet};

/// Where an invariant was broken: when, on which queue pair, and how.
type Violation = (u64, usize, String);

impl Judge<'_> {
    /// Checks an invariant, and says which.
    pub(super) fn invariant(&self, invariant: Invariant) -> (&'static str, Finding) {
        let (text, violation): (_, Option<Violation>) = match invariant {
            Invariant::OneNakInFlight => ("at most one NAK is in flight on each queue pair", self.one_nak()),
            Invariant::NakNamesFirstLoss => {
                ("every sequence NAK names the first PSN that was lost", self.first_loss())
            }
            Invariant::ExactlyOnce => {
                ("no packet changes memory twice, no message takes two receives", self.exactly_once())
            }
            Invariant::CompletionsInOrder => {
                ("send completions come in the order of posting", self.in_order())
            }
            Invariant::OneCompletionEach => ("every signalled work request completes once", self.one_each()),
            Invariant::CnpPacing => ("CNPs of a flow keep their interval", self.cnp_pacing()),
            Invariant::NoOtherLoss => ("no packet is lost that no rule lost", self.no_other_loss()),
        };
        let finding = match violation {
            None => Finding::new(true, "it held throughout"),
            Some((time_ns, qp, what)) => {
                Finding::new(false, format!("{}: {what} at {}", self.name(qp), Time(time_ns)))
                    .at(self.around(time_ns, qp))
            }
        };
        (text, finding)
    }

    fn one_nak(&self) -> Option<Violation> {
        let mut outstanding: BTreeMap<usize, Psn> = BTreeMap::new();
        for told in &self.evidence.record.story {
            let Some(qp) = told.qp else { continue };
            match &told.moment {
                Moment::Sent { sighting } if matches!(sighting.class, Class::Nak(_)) => {
                    let psn = sighting.psn?;
                    if let Some(first) = outstanding.insert(qp, psn) {
                        return Some((
                            told.time_ns,
                            qp,
                            format!("a NAK of {psn} while one of {first} is in flight"),
                        ));
                    }
                }
                Moment::Received { sighting }
                    if sighting.sense == Some(Sense::Request)
                        && outstanding.get(&qp).copied() == sighting.psn =>
                {
                    outstanding.remove(&qp);
                }
                _ => {}
            }
        }
        None
    }

    fn first_loss(&self) -> Option<Violation> {
        // By the queue pair that asks: requests that were lost and are missed, and those that were taken.
        let mut lost: BTreeMap<usize, BTreeSet<i64>> = BTreeMap::new();
        let mut taken: BTreeMap<usize, BTreeSet<u32>> = BTreeMap::new();
        let mut came = (usize::MAX, Psn::new(0), 0, false);
        for told in &self.evidence.record.story {
            match &told.moment {
                Moment::Fault { lost: true, sighting, .. } if sighting.sense == Some(Sense::Request) => {
                    let (Some(role), Some(psn), Some(relative)) =
                        (sighting.role, sighting.psn, sighting.relative_psn)
                    else {
                        continue;
                    };
                    // Nobody misses the loss of a packet that came before.
                    let qp = Plan::of_role(role);
                    if !taken.entry(qp).or_default().contains(&psn.value()) {
                        lost.entry(qp).or_default().insert(relative);
                    }
                }
                Moment::Received { sighting } if sighting.sense == Some(Sense::Request) => {
                    let (Some(role), Some(psn), Some(relative)) =
                        (sighting.role, sighting.psn, sighting.relative_psn)
                    else {
                        continue;
                    };
                    let qp = Plan::of_role(role);
                    let was_lost = lost.entry(qp).or_default().remove(&relative);
                    taken.entry(qp).or_default().insert(psn.value());
                    came = (qp, psn, relative, was_lost);
                }
                // An earlier copy that came too early does not make up for a later one that was lost.
                Moment::Declined { psn } => {
                    let (qp, last, relative, was_lost) = came;
                    if told.qp.map(|at| self.plan.qps[at].peer) == Some(qp) && last == *psn {
                        taken.entry(qp).or_default().remove(&psn.value());
                        if was_lost {
                            lost.entry(qp).or_default().insert(relative);
                        }
                    }
                }
                Moment::Sent { sighting } if sighting.class == Class::Nak(NakCode::SequenceError) => {
                    let (Some(role), Some(named)) = (sighting.role, sighting.relative_psn) else { continue };
                    let first = lost.get(&Plan::of_role(role)).and_then(|lost| lost.first().copied());
                    if first != Some(named) {
                        let qp = told.qp.unwrap_or(0);
                        let first = first.map_or("nothing".to_owned(), |first| format!("+{first}"));
                        return Some((
                            told.time_ns,
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
        for told in &self.evidence.record.story {
            let Some(qp) = told.qp else { continue };
            match &told.moment {
                Moment::Written { psn } if !written.insert((qp, psn.value())) => {
                    return Some((told.time_ns, qp, format!("PSN {psn} changed memory a second time")));
                }
                Moment::Completed { completion }
                    if completion.operation.is_receive() && !received.insert((qp, completion.id)) =>
                {
                    return Some((
                        told.time_ns,
                        qp,
                        format!("receive #{} completed a second time", completion.id),
                    ));
                }
                _ => {}
            }
        }
        None
    }

    fn in_order(&self) -> Option<Violation> {
        let mut last: BTreeMap<usize, u64> = BTreeMap::new();
        for seen in self.evidence.account.seen.iter().filter(|seen| !seen.completion.operation.is_receive()) {
            let id = seen.completion.id;
            if let Some(before) = last.insert(seen.qp, id).filter(|before| *before >= id) {
                return Some((seen.time_ns, seen.qp, format!("#{id} completed after #{before}")));
            }
        }
        None
    }

    fn one_each(&self) -> Option<Violation> {
        let mut ended = BTreeSet::new();
        for seen in
            self.evidence.account.seen.iter().filter(|seen| !matches!(seen.origin, Some(Origin::Standing)))
        {
            let key = (seen.qp, seen.completion.id, seen.completion.operation.is_receive());
            if !ended.insert(key) && !seen.completion.operation.is_receive() {
                return Some((
                    seen.time_ns,
                    seen.qp,
                    format!("#{} completed a second time", seen.completion.id),
                ));
            }
        }
        for (index, step) in self.plan.steps.iter().enumerate() {
            if self.evidence.account.step_left[index] > 0 {
                let left = self.evidence.account.step_left[index];
                return Some((
                    self.evidence.ended_ns,
                    step.qp,
                    format!("{left} work requests never completed"),
                ));
            }
        }
        None
    }

    fn cnp_pacing(&self) -> Option<Violation> {
        for (qp, times) in &self.evidence.record.cnps {
            let settings = &self.plan.hosts[self.plan.qps[*qp].host].settings;
            let interval = settings.congestion.notification.unwrap_or(Notification::PAPER).interval;
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

    fn no_other_loss(&self) -> Option<Violation> {
        let lost = self.evidence.record.other_losses;
        (lost > 0).then(|| (self.evidence.ended_ns, 0, format!("{lost} packets were")))
    }
}
