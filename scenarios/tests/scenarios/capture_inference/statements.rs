//! Compares each statement that is inferred from a capture with the event log of the run.

use super::truth::{Connection, Harm, Place, Truth};
use softhca_trace::log::{Certainty, EffectData, Entry, LogEvent};
use std::collections::BTreeMap;

/// The statements about a capture that was taken at `place` which the log contradicts. A statement is about one of these
/// connections; the capture has no more than the addresses and numbers of the queue pairs.
pub fn false_statements(
    truths: &[Truth],
    (place, knows_direction): (&Place, bool),
    entries: &[Entry],
) -> Vec<String> {
    let mut messages = BTreeMap::new();
    let wrong = entries.iter().filter_map(|entry| {
        if let LogEvent::WqeFetched { wr_id, first_psn, .. } = &entry.event {
            messages.insert(*wr_id, *first_psn);
        }
        let about = truths.iter().filter(|truth| is_about(entry, &truth.connection));
        let problems =
            about.map(|truth| Checker { truth, place, knows_direction, messages: &messages }.problem(entry));
        let problem = problems.collect::<Option<Vec<String>>>()?.into_iter().next()?;
        let text = serde_json::to_string(entry).unwrap_or_default();
        Some(format!("at {place:?}: {problem}: {text}"))
    });
    wrong.collect()
}

/// Whether a statement may be about the requests of a connection. A capture may not show the number of a sender.
fn is_about(entry: &Entry, connection: &Connection) -> bool {
    let Connection { requester, responder } = connection;
    match &entry.event {
        LogEvent::Fault { class, dest_qp, .. } => {
            let (from, to) = if class == "request" { (requester, responder) } else { (responder, requester) };
            entry.host == from.address && [Some(0), Some(to.qp)].contains(dest_qp)
        }
        LogEvent::DuplicateRequestHandled { qp, .. } => {
            (&entry.host, *qp) == (&responder.address, responder.qp)
        }
        event => {
            let qp = event.queue_pair();
            entry.host == requester.address && (qp == Some(0) || qp == Some(requester.qp))
        }
    }
}

struct Checker<'a> {
    truth: &'a Truth,
    place: &'a Place,
    /// The capture says whether packets left or entered the host.
    knows_direction: bool,
    /// First PSN of the messages of the capture by their numbers.
    messages: &'a BTreeMap<u64, u32>,
}

impl Checker<'_> {
    fn is_at_requester(&self) -> bool {
        matches!(self.place, Place::Node(node) if *node == self.truth.connection.requester.host)
    }

    /// Why a statement is false, if it is.
    fn problem(&self, entry: &Entry) -> Option<String> {
        let truth = self.truth;
        match &entry.event {
            LogEvent::Fault { effect, class, psn: Some(psn), .. } => {
                let text = entry.trigger.as_deref().unwrap_or_default();
                let is_response = class != "request";
                let certainty = entry.certainty.unwrap_or(Certainty::Known);
                self.fault(effect, is_response, *psn, text, certainty, entry.time)
            }
            LogEvent::AckTimedOut { oldest_psn, .. } => {
                let is_true = truth.timeouts.iter().any(|(_, time)| *time <= entry.time)
                    && self.is_sent_because(*oldest_psn, entry.time, &["timeout"]);
                (!is_true).then(|| "the timer did not expire".into())
            }
            LogEvent::Retransmitted { from_psn, cause, .. } => {
                let causes = ["timeout", "sequence-nak", "response-gap", "receiver-not-ready"];
                let is_true = match entry.certainty {
                    // Or it was late.
                    Some(Certainty::Ambiguous) => {
                        self.is_sent_because(*from_psn, entry.time, &causes)
                            || self.is_copied(*from_psn, entry.time)
                    }
                    // Elsewhere than at the requester it only says that it was sent after the NAK.
                    _ if cause == "sequence-nak" && !(self.is_at_requester() && self.knows_direction) => {
                        self.is_sent_because(*from_psn, entry.time, &causes)
                    }
                    _ => self.is_sent_because(*from_psn, entry.time, &[cause.as_ref()]),
                };
                (!is_true).then(|| "not sent again for this reason".into())
            }
            LogEvent::RnrWaitStarted { psn, .. } if entry.certainty != Some(Certainty::Ambiguous) => {
                let is_true = truth.rnr_waits.iter().any(|(waits, _)| waits == psn);
                (!is_true).then(|| "the requester did not wait".into())
            }
            LogEvent::DuplicateRequestHandled { psn, .. } => {
                // Or the network made a second answer, or delayed the first.
                // The answer names the last request, which need not be the duplicate.
                let is_true = !truth.duplicates.is_empty() || truth.harmed(true, *psn).next().is_some();
                (!is_true).then(|| "no duplicate was answered".into())
            }
            LogEvent::Completed { completion, .. } => {
                let first = self.messages.get(&completion.wr_id)?;
                let work = truth.works.iter().find(|work| work.has(*first));
                let status = work.and_then(|work| work.end.as_ref()).map(|(_, status)| status.as_str());
                (status != Some(completion.status.as_ref())).then(|| format!("it ended with {status:?}"))
            }
            LogEvent::UnsignaledCompleted { wr_id, .. } => self.answered(*wr_id, entry.time),
            _ => None,
        }
    }

    /// The requester sent this PSN again at this time for one of these reasons.
    fn is_sent_because(&self, psn: u32, time: u64, causes: &[&str]) -> bool {
        let is_exact = self.is_at_requester() || *self.place == Place::Senders;
        let window = if is_exact { 0 } else { self.truth.request_flight_ns };
        self.truth.requests.iter().any(|sent| {
            sent.psn == psn
                && sent.is_retransmission
                && (time.saturating_sub(window)..=time).contains(&sent.time)
                && causes.contains(&sent.cause.as_str())
        })
    }

    /// The network made a second copy of a request, or delayed it.
    fn is_copied(&self, psn: u32, time: u64) -> bool {
        self.truth
            .harmed(false, psn)
            .any(|packet| packet.time <= time && matches!(packet.harm, Harm::Copied | Harm::Late))
    }

    fn fault(
        &self,
        effect: &EffectData,
        is_response: bool,
        psn: u32,
        text: &str,
        certainty: Certainty,
        time: u64,
    ) -> Option<String> {
        let kinds: Vec<Harm> = match effect {
            EffectData::Dropped { .. } => {
                let words = [
                    ("lost", Harm::Lost),
                    ("damaged", Harm::Damaged),
                    ("overtaken", Harm::Late),
                    ("late", Harm::Late),
                ];
                words.iter().filter(|(word, _)| text.contains(word)).map(|(_, harm)| *harm).collect()
            }
            EffectData::Reordered { .. } | EffectData::Delayed { .. } => vec![Harm::Late],
            EffectData::Duplicated { .. } => vec![Harm::Copied],
            EffectData::MarkedCe => return None,
            // It was captured damaged, and damaged again in the same bit.
            EffectData::NotCaptured { .. }
                if self.truth.harmed(is_response, psn).any(|packet| packet.harm == Harm::Damaged) =>
            {
                return None;
            }
            // Or the first requests were lost.
            EffectData::Irregular { code } if code == "psn-mismatch" && certainty == Certainty::Ambiguous => {
                let is_lost = self.truth.harmed(false, psn).any(|packet| packet.harm == Harm::Lost);
                return (!is_lost).then(|| "the ends agree, and nothing was lost".into());
            }
            other => return Some(format!("{other:?} did not happen")),
        };
        if certainty == Certainty::Ambiguous && kinds == [Harm::Copied] {
            let causes = ["timeout", "sequence-nak", "response-gap", "receiver-not-ready"];
            let is_true = self.is_copied(psn, time) || self.is_sent_because(psn, time, &causes);
            return (!is_true).then(|| "there was no second one".into());
        }
        if certainty == Certainty::Ambiguous {
            return self.ambiguous_loss(psn, &kinds, text, time);
        }
        if let EffectData::Delayed { .. } = effect {
            return self.ambiguous_loss(psn, &kinds, "its answer", time);
        }
        if text.contains("answered twice")
            && self.truth.harmed(false, psn).any(|packet| packet.harm == Harm::Copied)
        {
            return None;
        }
        if text.contains("an earlier packet") {
            return self.ambiguous_loss(psn, &kinds, text, time);
        }
        let (is_behind, is_before) =
            (text.contains("behind the capture point"), text.contains("before the capture point"));
        let is_true = self.truth.harmed(is_response, psn).any(|packet| {
            kinds.contains(&packet.harm)
                && packet.time <= time
                && (!is_behind || packet.is_behind(self.place) != Some(false))
                && (!is_before || packet.is_behind(self.place) != Some(true))
        });
        (!is_true).then(|| format!("no such packet was {kinds:?}"))
    }

    /// A request, an answer to it or a later one, or no loss but a timer that is too short.
    fn ambiguous_loss(&self, psn: u32, kinds: &[Harm], text: &str, time: u64) -> Option<String> {
        let work = self.truth.works.iter().find(|work| work.has(psn));
        let is_near = |harmed: u32| harmed == psn || work.is_some_and(|work| work.has(harmed));
        let is_true = self.truth.harmed.iter().any(|packet| {
            let is_before = psn.wrapping_sub(packet.psn) & 0xff_ffff < 64;
            packet.time <= time
                && kinds.contains(&packet.harm)
                && (is_near(packet.psn)
                    || packet.is_response && text.contains("answer")
                    || is_before && text.contains("an earlier packet"))
        });
        let is_silent = text.contains("the peer does not answer")
            && work.and_then(|work| work.end.as_ref()).is_some_and(|(_, status)| status == "RETRY_EXC_ERR");
        (!is_true && !is_silent).then(|| format!("nothing around it was {kinds:?}"))
    }

    /// The time at which a message is answered.
    fn answered(&self, wr_id: u64, time: u64) -> Option<String> {
        let first = *self.messages.get(&wr_id)?;
        let Some(work) = self.truth.works.iter().find(|work| work.has(first)) else {
            return Some("there is no such message".into());
        };
        let Some((end, status)) = &work.end else { return None };
        if status != "SUCCESS" {
            return None;
        }
        let is_late = |from: u64| {
            self.truth.harmed.iter().any(|packet| {
                packet.is_response && packet.harm == Harm::Late && (from..=*end).contains(&packet.time)
            })
        };
        let is_right = match () {
            // A fault of the program held the completion back.
            () if self.truth.holds_completions => time <= *end,
            // The requester sees the answer when it ends.
            () if self.is_at_requester() => time == *end,
            // A second copy looks like a retransmission whose first answer was lost.
            () if (work.first_psn..work.first_psn + work.packets)
                .any(|psn| self.is_copied(psn & 0xff_ffff, time)) =>
            {
                true
            }
            // The requester may send again while the answer is on its way.
            () if self.truth.requests.iter().any(|sent| {
                let is_before = work.first_psn.wrapping_sub(sent.psn) & 0xff_ffff < 64;
                sent.is_retransmission
                    && (work.has(sent.psn) || is_before)
                    && sent.time + self.truth.flight_ns > *end
            }) =>
            {
                true
            }
            () => time <= *end && (end - time <= self.truth.flight_ns || is_late(time)),
        };
        (!is_right).then(|| format!("it was complete at {end}"))
    }
}
