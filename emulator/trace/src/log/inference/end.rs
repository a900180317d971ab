//! Conclusions at the end of a capture: the fate of packets that it does not contain, and of unanswered requests.

use super::{ASSUMED_ROUND_TRIP_NS, FlowInference, Gap, GapFate, Inferred, RejectionKind, Timeout};
use crate::log::Certainty;
use crate::log::value::EffectData;
use crate::sequence::RequestSequence;

impl FlowInference {
    /// Concludes at the end of the capture. `has_unanswered`: a message waits for an answer.
    pub fn finish(
        &mut self,
        sequence: &RequestSequence,
        end_ns: i64,
        last_packet: usize,
        has_unanswered: bool,
    ) {
        for gap in std::mem::take(&mut self.gaps) {
            self.finish_gap(sequence, gap);
        }
        for (at, packet) in self.responses.take_missing(i64::MIN) {
            let Some(psn) = sequence.psn_at(at) else { continue };
            let text = "not captured, although later answers were, and not asked for again: the capture missed it, or it \
                        was lost, damaged or late and the requester gave up";
            self.lose(packet, true, psn, None, Certainty::Ambiguous, text);
        }
        let (answered, timeouts): (Vec<Timeout>, Vec<Timeout>) =
            std::mem::take(&mut self.timeouts).into_iter().partition(|timeout| timeout.answered_ns.is_some());
        for timeout in answered {
            self.add_loss_of_request_or_answer(sequence, timeout.packet, timeout.lost);
        }
        if !has_unanswered {
            return;
        }
        // None of these transmissions was answered.
        let has_timeouts = !timeouts.is_empty();
        let mut timeouts = timeouts;
        timeouts.dedup_by_key(|timeout| timeout.lost);
        for timeout in timeouts {
            let text = "sent again, and no answer to any transmission of it was captured: the request or its answer was \
                        lost, damaged or late, or the peer does not answer";
            self.add_request_loss(sequence, timeout.packet, timeout.lost, Certainty::Ambiguous, text);
        }
        let waited = |since: i64, this: &FlowInference| {
            let round_trip = this.round_trip_ns.unwrap_or(ASSUMED_ROUND_TRIP_NS);
            if end_ns - since > 16 * round_trip { Certainty::Inferred } else { Certainty::Ambiguous }
        };
        let (status, reason, certainty, text) = match self.rejection {
            Some(rejection) if !rejection.is_answered => {
                let certainty = waited(rejection.time_ns + 4 * rejection.wait_ns, self);
                match rejection.kind {
                    RejectionKind::Sequence => (
                        "RETRY_EXC_ERR",
                        "sequence-nak",
                        certainty,
                        "the requester did not send the missing packet again",
                    ),
                    RejectionKind::ReceiverNotReady => (
                        "RNR_RETRY_EXC_ERR",
                        "rnr-retry-exceeded",
                        certainty,
                        "the requester did not try again after the last RNR NAK",
                    ),
                }
            }
            _ if has_timeouts => {
                let since = self.last_request_ns.unwrap_or(end_ns);
                (
                    "RETRY_EXC_ERR",
                    "ack-timeout",
                    waited(since, self),
                    "no answer to any of its transmissions was captured",
                )
            }
            _ => return,
        };
        // The capture may end before the requester sends again, or not show the request that failed.
        let is_shown = self.rejection.is_none_or(|rejection| {
            sequence.psn_at(rejection.position).is_some_and(|psn| sequence.has_seen(psn))
        });
        if certainty == Certainty::Inferred && is_shown && !self.has_late_response {
            let text = text.to_owned();
            self.push(last_packet, true, Inferred::Failed { status, reason, certainty, text });
        }
    }

    fn finish_gap(&mut self, sequence: &RequestSequence, gap: Gap) {
        let positions = gap.first..gap.first + i64::from(gap.count);
        let missing: Vec<i64> = match gap.fate {
            GapFate::Reordered => return,
            GapFate::Lost => gap.lost,
            _ => positions
                .filter(|at| sequence.psn_at(*at).is_some_and(|psn| !sequence.has_seen(psn)))
                .collect(),
        };
        let (certainty, text) = match gap.fate {
            GapFate::Lost => (
                Certainty::Inferred,
                "not captured when its turn came, and asked for or sent again: lost, damaged or late before the capture point",
            ),
            GapFate::NotCaptured => (
                Certainty::Known,
                "the receiver acknowledged packets that the capture does not contain: the capture is incomplete",
            ),
            _ => (
                Certainty::Ambiguous,
                "not captured, and not reported missing: lost, damaged or late before the capture point, or missed by the capture",
            ),
        };
        let Some(first) = missing.first().and_then(|at| sequence.psn_at(*at)) else { return };
        if gap.fate == GapFate::NotCaptured {
            let effect = EffectData::NotCaptured { packets: missing.len() as u32 };
            let (is_response, text) = (false, text.to_owned());
            let fault = Inferred::Fault { is_response, psn: first, opcode: None, effect, certainty, text };
            return self.push(gap.packet, false, fault);
        }
        for psn in missing.iter().filter_map(|at| sequence.psn_at(*at)) {
            self.lose(gap.packet, false, psn, None, certainty, text);
        }
    }
}
