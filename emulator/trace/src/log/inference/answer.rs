//! Conclusions from answers: rejections, acknowledgements of packets that were not captured, gaps in READ responses.

use super::responses::ResponseArrival;
use super::{
    FlowInference, GapFate, Inferred, MAX_REMEMBERED, Rejection, RejectionKind, SeenPacket, Timeout,
};
use crate::describe::kebab_case;
use crate::log::Certainty;
use crate::log::value::EffectData;
use crate::sequence::RequestSequence;
use softhca_wire::{NakCode, Operation, Position, Syndrome};

/// The most requests that may have been lost before the first captured one.
const MAX_LOST_BEFORE: i64 = 256;

impl FlowInference {
    /// Takes an answer to the requests of this flow.
    pub fn answer(&mut self, sequence: &RequestSequence, seen: SeenPacket, syndrome: Option<Syndrome>) {
        let Some(position) = sequence.position(seen.psn) else { return };
        self.last_answer_ns = Some(seen.time_ns);
        if let Some(sent) = self.transmissions.range(..=position).next_back().map(|(_, sent)| *sent)
            && sent.count == 1
        {
            let round_trip = seen.time_ns - sent.time_ns;
            if round_trip >= 0 {
                self.round_trip_ns =
                    Some(self.round_trip_ns.map_or(round_trip, |known| known.min(round_trip)));
            }
        }
        let is_nak = matches!(syndrome, Some(Syndrome::Nak(_) | Syndrome::RnrNak(_)));
        if is_nak {
            if !self.follows_nak(seen) || self.naks.len() == MAX_REMEMBERED {
                self.naks.clear();
            }
            self.naks.insert(position);
            self.last_nak_ns = Some(seen.time_ns);
            let is_late = self.acknowledged.is_some_and(|acknowledged| acknowledged >= position);
            // With go-back-0 a NAK names the first packet of a message of which a part was acknowledged.
            let restarts = matches!(syndrome, Some(Syndrome::Nak(NakCode::PsnSequenceError)))
                && self
                    .transmissions
                    .get(&position)
                    .is_some_and(|sent| sent.opcode.position() == Position::First);
            if is_late && !restarts {
                // The requester ignores it.
                return;
            }
        }
        match syndrome {
            Some(Syndrome::Nak(NakCode::PsnSequenceError)) => self.sequence_nak(sequence, seen, position),
            Some(Syndrome::RnrNak(timer)) => {
                self.acknowledge(position - 1);
                let text = "the receiver has no receive posted".to_owned();
                let (psn, error) = (seen.psn, "receiver-not-ready".into());
                self.push(seen.packet, false, Inferred::Rejected { psn, expected_psn: None, error, text });
                self.rejection = Some(Rejection {
                    kind: RejectionKind::ReceiverNotReady,
                    position,
                    opcode: seen.opcode,
                    packet: seen.packet,
                    time_ns: seen.time_ns,
                    wait_ns: timer.nanoseconds() as i64,
                    is_answered: false,
                    loss: None,
                });
            }
            Some(syndrome @ Syndrome::Nak(code)) => {
                self.acknowledge(position - 1);
                let (psn, error) = (seen.psn, kebab_case(&syndrome).into());
                let text = format!("the NAK says {}", code.name());
                self.push(seen.packet, false, Inferred::Rejected { psn, expected_psn: None, error, text });
            }
            _ => self.positive_answer(sequence, seen, position),
        }
    }

    fn sequence_nak(&mut self, sequence: &RequestSequence, seen: SeenPacket, position: i64) {
        let is_repeated = self.rejection.is_some_and(|old| old.position == position && !old.is_answered);
        if is_repeated {
            // Also after an RNR NAK: rxe sends one for the packets that follow the rejected one.
            return;
        }
        let has_answer = self.acknowledged.is_some();
        self.acknowledge(position - 1);
        let (packet, psn) = (seen.packet, seen.psn);
        let later = self.transmissions.range(position + 1..).next().map(|(at, _)| *at);
        let got = sequence.psn_at(later.unwrap_or(position + 1)).unwrap_or(psn);
        let text = "the NAK says sequence error".to_owned();
        let error = "psn-out-of-sequence".into();
        self.push(packet, false, Inferred::Rejected { psn: got, expected_psn: Some(psn), error, text });
        let mut loss = None;
        if position < 0 {
            if !has_answer {
                self.answer_before_first(sequence, seen);
            }
        } else if self
            .transmissions
            .get(&position)
            .is_some_and(|sent| sent.count == 1 && self.gap_has_lost(position))
        {
            // It was sent again before this NAK was captured, which may be about the first transmission.
        } else if sequence.has_seen(psn) {
            loss = Some(self.events.len());
            let opcode = self.transmissions.range(..=position).next_back().map(|(_, sent)| sent.opcode);
            let is_first = self.transmissions.get(&position).is_some_and(|sent| sent.count == 1);
            let certainty = if is_first { Certainty::Inferred } else { Certainty::Ambiguous };
            let text = "captured, but the receiver asks for it again: it, or an earlier packet, was lost, damaged or \
                        overtaken behind the capture point";
            self.lose(packet, false, psn, opcode, certainty, text);
        } else {
            self.lose_gap_at(sequence, position);
        }
        self.rejection = Some(Rejection {
            kind: RejectionKind::Sequence,
            position,
            opcode: seen.opcode,
            packet,
            time_ns: seen.time_ns,
            wait_ns: 0,
            is_answered: false,
            loss,
        });
    }

    /// An answer to a PSN before the first captured request.
    pub fn answer_before_first(&mut self, sequence: &RequestSequence, seen: SeenPacket) {
        let Some(before) = sequence.position(seen.psn).filter(|position| *position < 0) else { return };
        let text = format!(
            "it answers with a PSN {} before the first captured request: the two ends disagree about the first PSN, \
             or requests before the capture were lost",
            -before
        );
        // A network hardly loses so many requests in a row.
        let certainty = if -before > MAX_LOST_BEFORE { Certainty::Inferred } else { Certainty::Ambiguous };
        self.irregular(seen, "psn-mismatch", certainty, text);
    }

    fn positive_answer(&mut self, sequence: &RequestSequence, seen: SeenPacket, position: i64) {
        if position < -(1 << 16) && self.acknowledged.is_none() {
            return self.answer_before_first(sequence, seen);
        }
        if seen.opcode.operation() == Operation::Acknowledge {
            self.responses.pass_over(position, sequence.path_mtu(), seen.packet);
            self.duplicate_ack(seen, position);
        } else {
            self.data_response(sequence, seen, position);
        }
        self.has_late_response |= self.rejection.is_some_and(|rejection| position < rejection.position);
        if let Some(rejection) = self.rejection
            && rejection.position <= position
        {
            if let Some(loss) = rejection.loss
                && !rejection.is_answered
                && self.transmissions.get(&rejection.position).is_some_and(|sent| sent.count == 1)
                && let Inferred::Fault { effect, text, .. } = &mut self.events[loss].what
            {
                *effect = EffectData::Reordered { behind: 1 };
                *text = "captured; the receiver got a later packet first, and then this one before it could be sent \
                         again: reordered"
                    .into();
            }
            self.rejection = None;
        }
        self.answer_timeouts(sequence, seen, position);
        self.answers.insert(position, (seen.packet, seen.opcode));
        while self.answers.len() > MAX_REMEMBERED {
            self.answers.pop_first();
        }
        // An answer to a READ or an atomic says nothing of requests before it at a requester that waits for these.
        self.acknowledge(position);
    }

    fn acknowledge(&mut self, position: i64) {
        for gap in &mut self.gaps {
            let last = gap.first + i64::from(gap.count) - 1;
            if gap.fate == GapFate::Unknown && last <= position {
                gap.fate = GapFate::NotCaptured;
            }
        }
        self.acknowledged = Some(self.acknowledged.map_or(position, |known| known.max(position)));
    }

    /// The responder acknowledges what it acknowledged before.
    fn duplicate_ack(&mut self, seen: SeenPacket, position: i64) {
        let is_repeated = self.answers.get(&position).is_some_and(|(_, opcode)| *opcode == seen.opcode);
        let sent = self.transmissions.get(&position).filter(|sent| sent.count > 1);
        if let Some(sent) = sent.filter(|_| is_repeated)
            && self.last_ack_ns.is_none_or(|last| !self.is_too_soon(seen.time_ns - last))
        {
            let what = Inferred::DuplicateHandled { psn: seen.psn, opcode: sent.opcode };
            self.push(seen.packet, false, what);
        }
        self.last_ack_ns = Some(seen.time_ns);
    }

    /// A response to a READ or an atomic.
    fn data_response(&mut self, sequence: &RequestSequence, seen: SeenPacket, position: i64) {
        if self.responses.respond(position, sequence.path_mtu(), seen.packet) == ResponseArrival::Late {
            self.has_late_response = true;
            let text = "captured after later responses, and not asked for again: reordered, or answered twice, before the \
                        capture point";
            self.push(
                seen.packet,
                true,
                Inferred::Fault {
                    is_response: true,
                    psn: seen.psn,
                    opcode: Some(seen.opcode),
                    effect: EffectData::Reordered { behind: 1 },
                    certainty: Certainty::Inferred,
                    text: text.into(),
                },
            );
        }
    }

    /// Answers to requests that were sent again because the ACK timer expired.
    fn answer_timeouts(&mut self, sequence: &RequestSequence, seen: SeenPacket, position: i64) {
        for mut timeout in std::mem::take(&mut self.timeouts) {
            if timeout.position > position {
                self.timeouts.push(timeout);
                continue;
            }
            let Some(answered_ns) = timeout.answered_ns else {
                timeout.lost = timeout.lost.min(position);
                timeout.answered_ns = Some(seen.time_ns);
                // An answer to a packet that was not sent again: the packet arrived, and the answer was late.
                if self.transmissions.get(&timeout.lost).is_none_or(|sent| sent.count > 1) {
                    self.timeouts.push(timeout);
                }
                continue;
            };
            // The answers to a READ may belong to several requests.
            let is_twice = self.transmissions.get(&timeout.lost).is_some_and(|sent| {
                timeout.is_timer && sent.count == 2 && sent.opcode.operation() != Operation::ReadRequest
            });
            if is_twice && position == timeout.lost && !self.is_too_soon(seen.time_ns - answered_ns) {
                self.add_late_answer(sequence, timeout);
            } else {
                self.timeouts.push(timeout);
            }
        }
    }

    /// Both transmissions of a request were answered, and the first answer came after the second transmission.
    fn add_late_answer(&mut self, sequence: &RequestSequence, timeout: Timeout) {
        let Some(psn) = sequence.psn_at(timeout.lost) else { return };
        let opcode = self.transmissions.get(&timeout.lost).map(|sent| sent.opcode);
        let text = "both transmissions were answered: nothing was lost, but the first answer came after the ACK timer had \
                    expired";
        let (effect, certainty) = (EffectData::Delayed { ns: 0 }, Certainty::Inferred);
        let (is_response, text) = (false, text.to_owned());
        self.push(
            timeout.packet,
            false,
            Inferred::Fault { is_response, psn, opcode, effect, certainty, text },
        );
    }
}
