//! Conclusions at the end of a capture: the fate of packets that it does not contain, and of unanswered requests.

use super::{ASSUMED_ROUND_TRIP_NS, FlowInference, Gap, GapFate, Inferred, RejectionKind};
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
        if !has_unanswered {
            return;
        }
        // None of these transmissions was answered.
        let mut timeouts = self.timeouts.clone();
        timeouts.dedup_by_key(|timeout| timeout.lost);
        for timeout in timeouts {
            let text = "captured, and no answer to any transmission of it was captured: the request or its answer was \
                        lost, or the peer does not answer";
            self.add_request_loss(sequence, timeout.packet, timeout.lost, Certainty::Ambiguous, text);
        }
        let waited = |since: i64, this: &FlowInference| {
            let round_trip = this.round_trip_ns.unwrap_or(ASSUMED_ROUND_TRIP_NS);
            if end_ns - since > 16 * round_trip { Certainty::Inferred } else { Certainty::Ambiguous }
        };
        let (status, reason, certainty, text) = match self.rejection {
            Some(rejection) if !rejection.is_answered => {
                let certainty = waited(rejection.time_ns, self);
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
            _ if !self.timeouts.is_empty() => {
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
        let text = text.to_owned();
        self.push(last_packet, true, Inferred::Failed { status, reason, certainty, text });
    }

    fn finish_gap(&mut self, sequence: &RequestSequence, gap: Gap) {
        let positions = gap.first..gap.first + i64::from(gap.count);
        let missing: Vec<i64> = match gap.fate {
            GapFate::Reordered => return,
            GapFate::Lost => positions.collect(),
            _ if gap.is_response => positions.collect(),
            _ => positions
                .filter(|at| sequence.psn_at(*at).is_some_and(|psn| !sequence.has_seen(psn)))
                .collect(),
        };
        let what = if gap.is_response { "answer" } else { "request" };
        let (certainty, text) = match gap.fate {
            GapFate::Lost => (
                Certainty::Inferred,
                format!("this {what} was not captured when its turn came, and was asked for or sent again: lost before the capture point"),
            ),
            GapFate::NotCaptured => (
                Certainty::Known,
                "the receiver acknowledged packets that the capture does not contain: the capture is incomplete".to_owned(),
            ),
            _ if gap.is_response => (
                Certainty::Ambiguous,
                "not captured, and not asked for again: the capture missed it, or the requester gave up".to_owned(),
            ),
            _ => (
                Certainty::Ambiguous,
                "not captured, and not reported missing: lost before the capture point, or missed by the capture".to_owned(),
            ),
        };
        let Some(first) = missing.first().and_then(|at| sequence.psn_at(*at)) else { return };
        if gap.fate == GapFate::NotCaptured {
            let (is_response, effect) =
                (gap.is_response, EffectData::NotCaptured { packets: missing.len() as u32 });
            let fault = Inferred::Fault { is_response, psn: first, opcode: None, effect, certainty, text };
            return self.push(gap.packet, false, fault);
        }
        for psn in missing.iter().filter_map(|at| sequence.psn_at(*at)) {
            self.lose(gap.packet, gap.is_response, psn, None, certainty, &text);
        }
    }
}
