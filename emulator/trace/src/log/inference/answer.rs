//! Conclusions from answers: rejections, acknowledgements of packets that were not captured, gaps in READ responses.

use super::{
    FlowInference, GapFate, Inferred, MAX_REMEMBERED, Rejection, RejectionKind, SeenPacket, Timeout,
};
use crate::describe::kebab_case;
use crate::log::Certainty;
use crate::log::value::EffectData;
use crate::sequence::RequestSequence;
use softhca_wire::{NakCode, Operation, Syndrome};

impl FlowInference {
    /// Takes an answer to the requests of this flow.
    pub fn answer(&mut self, sequence: &RequestSequence, seen: SeenPacket, syndrome: Option<Syndrome>) {
        let Some(position) = sequence.position(seen.psn) else { return };
        self.last_answer_ns = Some(seen.time_ns);
        if let Some(sent) = self.transmissions.range(..=position).next_back().map(|(_, sent)| *sent)
            && sent.count == 1
        {
            let round_trip = seen.time_ns - sent.time_ns;
            if round_trip > 0 {
                self.round_trip_ns =
                    Some(self.round_trip_ns.map_or(round_trip, |known| known.min(round_trip)));
            }
        }
        match syndrome {
            Some(Syndrome::Nak(NakCode::PsnSequenceError)) => self.sequence_nak(sequence, seen, position),
            Some(Syndrome::RnrNak(timer)) => {
                self.acknowledge(position - 1);
                let text = "the receiver has no receive posted".to_owned();
                let (psn, error) = (seen.psn, "receiver-not-ready".into());
                self.push(seen.packet, false, Inferred::Rejected { psn, expected_psn: None, error, text });
                let until_ns = seen.time_ns + timer.nanoseconds() as i64;
                self.push(seen.packet, true, Inferred::RnrWait { psn, until_ns });
                self.rejection = Some(Rejection {
                    kind: RejectionKind::ReceiverNotReady,
                    position,
                    opcode: seen.opcode,
                    time_ns: seen.time_ns,
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
        } else if sequence.has_seen(psn) {
            loss = Some(self.events.len());
            let opcode = self.transmissions.range(..=position).next_back().map(|(_, sent)| sent.opcode);
            let text = "captured, but the receiver got a later packet without it: lost, damaged or overtaken behind \
                        the capture point";
            self.lose(packet, false, psn, opcode, Certainty::Inferred, text);
        } else if let Some(gap) = self.gap_at(position, false) {
            gap.fate = GapFate::Lost;
        }
        let (kind, time_ns) = (RejectionKind::Sequence, seen.time_ns);
        self.rejection =
            Some(Rejection { kind, position, opcode: seen.opcode, time_ns, is_answered: false, loss });
    }

    /// An answer to a PSN before the first captured request.
    pub fn answer_before_first(&mut self, sequence: &RequestSequence, seen: SeenPacket) {
        let Some(before) = sequence.position(seen.psn).filter(|position| *position < 0) else { return };
        let text = format!(
            "the receiver answers with a PSN {} before the first captured request: the two ends disagree about the \
             first PSN, or requests before the capture were lost",
            -before
        );
        self.irregular(seen, "psn-mismatch", Certainty::Inferred, text);
    }

    fn positive_answer(&mut self, sequence: &RequestSequence, seen: SeenPacket, position: i64) {
        if position < -(1 << 16) && self.acknowledged.is_none() {
            return self.answer_before_first(sequence, seen);
        }
        if seen.opcode.operation() == Operation::ReadResponse {
            self.read_response(seen, position);
        } else if seen.opcode.operation() == Operation::Acknowledge
            && self.answers.get(&position).is_some_and(|(_, opcode)| *opcode == seen.opcode)
            && self.transmissions.get(&position).is_some_and(|sent| sent.count > 1)
        {
            let opcode = self.transmissions[&position].opcode;
            let what = Inferred::DuplicateHandled { psn: seen.psn, opcode };
            self.push(seen.packet, false, what);
        }
        if let Some(rejection) = self.rejection
            && rejection.position <= position
        {
            if let Some(loss) = rejection.loss
                && !rejection.is_answered
                && let Inferred::Fault { effect, text, .. } = &mut self.events[loss].what
            {
                *effect = EffectData::Reordered { behind: 1 };
                *text = "captured; the receiver got a later packet first, and then this one before it could be sent \
                         again: reordered behind the capture point"
                    .into();
            }
            self.rejection = None;
        }
        let answered: Vec<Timeout> =
            self.timeouts.iter().copied().filter(|timeout| timeout.position <= position).collect();
        self.timeouts.retain(|timeout| timeout.position > position);
        for timeout in answered {
            let lost = timeout.lost.min(position);
            // An answer to a packet that was not sent again: the packet arrived, and the answer was late.
            let has_arrived = self.transmissions.get(&lost).is_some_and(|sent| sent.count == 1);
            if !has_arrived {
                self.add_loss_of_request_or_answer(sequence, timeout.packet, lost);
            }
        }
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
            if gap.fate == GapFate::Unknown && !gap.is_response && last <= position {
                gap.fate = GapFate::NotCaptured;
            }
        }
        self.acknowledged = Some(self.acknowledged.map_or(position, |known| known.max(position)));
    }

    /// Follows the packets of a READ response.
    fn read_response(&mut self, seen: SeenPacket, position: i64) {
        let (starts, ends) = (seen.opcode.position().starts_message(), seen.opcode.position().ends_message());
        let request = self.transmissions.range(..=position).next_back().map(|(at, _)| *at);
        let expected = match self.last_response {
            Some((last, false)) => Some(last + 1),
            _ if !starts => request,
            _ => None,
        };
        if let Some(expected) = expected
            && (1..1 << 16).contains(&(position - expected))
            && request.is_none_or(|request| request <= expected || !starts)
            && request != Some(position)
        {
            self.add_gap(expected, (position - expected) as u32, seen, true);
        }
        self.last_response = Some((position, ends));
    }
}
