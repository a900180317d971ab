//! What the packets of a capture show beyond themselves: losses, reordering, timeouts, the kinds of retransmissions.
//!
//! A capture is taken at one point. A packet that was captured may be lost behind that point; one that was not
//! captured may have been lost before it, or missed by the capture. Feedback of the receiver tells these apart.

use super::Certainty;
use super::value::{EffectData, Keyword};
use crate::describe::kebab_case;
use crate::sequence::{Arrival, RequestSequence};
use softhca_wire::{NakCode, Opcode, Operation, Psn, Syndrome};
use std::collections::BTreeMap;

/// Without a measured round trip, a repetition within this time is not a reaction of the sender.
const ASSUMED_ROUND_TRIP_NS: i64 = 50_000;
/// So many recent transmissions and answers are remembered for each flow.
const MAX_REMEMBERED: usize = 8192;

/// A packet of the capture: its index among the packets that are told.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeenPacket {
    pub packet: usize,
    pub time_ns: i64,
    pub psn: Psn,
    pub opcode: Opcode,
}

/// Something that a capture shows.
#[derive(Clone, Debug)]
pub(super) enum Inferred {
    /// Something happened to a packet.
    Fault {
        /// The packet is an answer to this flow, not a request of it.
        is_response: bool,
        psn: Psn,
        opcode: Option<Opcode>,
        effect: EffectData,
        certainty: Certainty,
        text: String,
    },
    /// The responder rejected a request.
    Rejected { psn: Psn, expected_psn: Option<Psn>, error: Keyword, text: String },
    /// The responder answered a duplicate.
    DuplicateHandled { psn: Psn, opcode: Opcode },
    /// The requester waits for a receiver that is not ready.
    RnrWait { psn: Psn, until_ns: i64 },
    /// The ACK timer of the requester expired.
    TimedOut { psn: Psn },
    /// The requester retransmits.
    Retransmitted { psn: Psn, cause: &'static str },
    /// The oldest work request without an answer failed.
    Failed { status: &'static str, reason: &'static str, certainty: Certainty, text: String },
}

/// What is inferred at a packet: before it is told, or after it.
#[derive(Debug)]
pub(super) struct InferredEvent {
    pub packet: usize,
    pub is_after: bool,
    pub what: Inferred,
}

#[derive(Clone, Copy, Debug)]
struct Transmission {
    opcode: Opcode,
    time_ns: i64,
    count: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RejectionKind {
    Sequence,
    ReceiverNotReady,
}

/// The last NAK that asks for a retransmission.
#[derive(Clone, Copy, Debug)]
struct Rejection {
    kind: RejectionKind,
    position: i64,
    time_ns: i64,
    /// The retransmission that it asks for was seen.
    is_answered: bool,
    /// The loss that was inferred from it.
    loss: Option<usize>,
}

/// Why a PSN was not seen at its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GapFate {
    Unknown,
    /// The receiver asked for it, or the sender sent it again.
    Lost,
    /// The receiver acknowledged it.
    NotCaptured,
    /// It came later by itself.
    Reordered,
}

#[derive(Clone, Copy, Debug)]
struct Gap {
    first: i64,
    count: u32,
    packet: usize,
    time_ns: i64,
    fate: GapFate,
    is_response: bool,
}

/// A timeout of the requester, until an answer comes.
#[derive(Clone, Copy, Debug)]
struct Timeout {
    packet: usize,
    position: i64,
    /// The highest request at that time.
    last: i64,
}

#[derive(Clone, Copy, Debug)]
struct Burst {
    last: i64,
}

/// Everything inferred about the requests of one flow, and their answers.
#[derive(Debug, Default)]
pub(super) struct FlowInference {
    pub events: Vec<InferredEvent>,
    /// Whether requests and answers were captured where they were sent, as far as the capture says.
    pub at_sender: [Option<bool>; 2],
    transmissions: BTreeMap<i64, Transmission>,
    /// Captured answers by position: the packet, its opcode, and whether it is an ACK.
    answers: BTreeMap<i64, (usize, Opcode)>,
    acknowledged: Option<i64>,
    last_response: Option<(i64, bool)>,
    rejection: Option<Rejection>,
    burst: Option<Burst>,
    gaps: Vec<Gap>,
    timeouts: Vec<Timeout>,
    round_trip_ns: Option<i64>,
    /// When the last request and the last answer were captured.
    last_request_ns: Option<i64>,
    last_answer_ns: Option<i64>,
}

impl FlowInference {
    fn push(&mut self, packet: usize, is_after: bool, what: Inferred) {
        self.events.push(InferredEvent { packet, is_after, what });
    }

    fn fault(&mut self, packet: usize, fault: Inferred) {
        self.push(packet, false, fault);
    }

    /// No answer can have reached the sender in this time.
    fn is_too_soon(&self, elapsed_ns: i64) -> bool {
        elapsed_ns < self.round_trip_ns.unwrap_or(ASSUMED_ROUND_TRIP_NS)
    }

    /// Takes a request.
    pub fn request(
        &mut self,
        sequence: &RequestSequence,
        seen: SeenPacket,
        arrival: Arrival,
        is_reliable: bool,
    ) {
        let Some(position) = sequence.position(seen.psn) else { return };
        match arrival {
            Arrival::Next => self.burst = None,
            Arrival::AfterGap { first, count } => {
                self.burst = None;
                let first = sequence.position(first).unwrap_or_default();
                self.add_gap(first, count, seen, false);
            }
            Arrival::Fills | Arrival::Again => self.behind(sequence, seen, position, arrival, is_reliable),
        }
        self.last_request_ns = Some(seen.time_ns);
        let Transmission { count, .. } = self.transmissions.get(&position).copied().unwrap_or(Transmission {
            opcode: seen.opcode,
            time_ns: 0,
            count: 0,
        });
        let sent = Transmission { opcode: seen.opcode, time_ns: seen.time_ns, count: count + 1 };
        self.transmissions.insert(position, sent);
        while self.transmissions.len() > MAX_REMEMBERED {
            self.transmissions.pop_first();
        }
    }

    fn add_gap(&mut self, first: i64, count: u32, seen: SeenPacket, is_response: bool) {
        let SeenPacket { packet, time_ns, .. } = seen;
        self.gaps.push(Gap { first, count, packet, time_ns, fate: GapFate::Unknown, is_response });
    }

    fn gap_at(&mut self, position: i64, is_response: bool) -> Option<&mut Gap> {
        self.gaps.iter_mut().rev().find(|gap| {
            gap.is_response == is_response
                && (gap.first..gap.first + i64::from(gap.count)).contains(&position)
        })
    }

    /// A request that is not the next one.
    fn behind(
        &mut self,
        sequence: &RequestSequence,
        seen: SeenPacket,
        position: i64,
        arrival: Arrival,
        is_reliable: bool,
    ) {
        if let Some(burst) = &mut self.burst
            && position > burst.last
        {
            burst.last = position;
            if let Some(gap) = self.gap_at(position, false)
                && gap.fate == GapFate::Unknown
            {
                gap.fate = GapFate::Lost;
            }
            return;
        }
        let (psn, opcode) = (seen.psn, seen.opcode);
        let is_rejected = self.rejection.is_some_and(|rejection| rejection.position <= position);
        let gap = self.gap_at(position, false).map(|gap| gap.time_ns);
        let previous = self.transmissions.get(&position).map(|sent| sent.time_ns);
        if let (Arrival::Fills, Some(since), false) = (arrival, gap, is_rejected)
            && (self.is_too_soon(seen.time_ns - since) || !is_reliable)
        {
            self.gap_at(position, false).into_iter().for_each(|gap| gap.fate = GapFate::Reordered);
            let behind = sequence.position(sequence.next().unwrap_or(psn)).unwrap_or(0) - position - 1;
            let effect = EffectData::Reordered { behind: behind.max(1) as u32 };
            let text = "captured after later packets, sooner than anybody could have asked for it: \
                        reordered before the capture point";
            return self.fault_here(seen, effect, Certainty::Inferred, text);
        }
        if let (Arrival::Again, Some(since), false) = (arrival, previous, is_rejected)
            && self.at_sender[0] != Some(true)
            && (self.is_too_soon(seen.time_ns - since) || !is_reliable)
        {
            let text = "captured twice, sooner than the sender could have reacted: \
                        duplicated before the capture point";
            return self.fault_here(seen, EffectData::Duplicated { copies: 1 }, Certainty::Inferred, text);
        }
        self.burst = Some(Burst { last: position });
        if let Some(gap) = self.gap_at(position, false)
            && gap.fate == GapFate::Unknown
        {
            gap.fate = GapFate::Lost;
        }
        let has_data_response =
            opcode.operation() == Operation::ReadRequest || opcode.operation().is_atomic();
        let answer = self.answers.range(position..).next().map(|(at, answer)| (*at, *answer));
        let rejection = self.rejection.filter(|rejection| !rejection.is_answered);
        // A NAK may be lost behind the capture point, and the ACK timer expire: no cause is known.
        let cause = match rejection {
            Some(rejection) => {
                self.rejection.iter_mut().for_each(|rejection| rejection.is_answered = true);
                match rejection.kind {
                    RejectionKind::Sequence => "sequence-nak",
                    RejectionKind::ReceiverNotReady => "receiver-not-ready",
                }
            }
            None if has_data_response && answer.is_some_and(|(at, _)| at > position) => "response-gap",
            None => "timeout",
        };
        let packet = seen.packet;
        if cause == "timeout" {
            self.push(packet, false, Inferred::TimedOut { psn });
        }
        if matches!(cause, "timeout" | "response-gap") {
            self.infer_loss_behind(sequence, seen, position, cause, answer);
        }
        self.push(packet, false, Inferred::Retransmitted { psn, cause });
    }

    /// A retransmission that no NAK asked for: the answer was lost, or the request.
    fn infer_loss_behind(
        &mut self,
        sequence: &RequestSequence,
        seen: SeenPacket,
        position: i64,
        cause: &str,
        answer: Option<(i64, (usize, Opcode))>,
    ) {
        let exact = self.answers.get(&position).copied();
        let lost = match cause {
            "response-gap" => exact.map(|answer| (position, answer)),
            _ => answer,
        };
        let has_response_gap = self.gap_at(position, true).is_some();
        if let Some(gap) = self.gap_at(position, true) {
            gap.fate = GapFate::Lost;
        }
        if let Some((at, (_, opcode))) = lost {
            let psn = sequence.psn_at(at).unwrap_or(seen.psn);
            let fault = Inferred::Fault {
                is_response: true,
                psn,
                opcode: Some(opcode),
                effect: EffectData::Dropped { copies: 0 },
                certainty: Certainty::Inferred,
                text:
                    "captured, but the requester did not react to it and sent the request again: lost behind \
                       the capture point, or late"
                        .into(),
            };
            self.fault(seen.packet, fault);
        } else if cause == "response-gap" && !has_response_gap {
            // No part of the answer was captured: the request or the answer was lost.
            self.add_loss_of_request_or_answer(sequence, seen.packet, position);
        } else if cause == "timeout" && self.is_inside_response(position) {
            let fault = Inferred::Fault {
                is_response: true,
                psn: seen.psn,
                opcode: None,
                effect: EffectData::Dropped { copies: 0 },
                certainty: Certainty::Inferred,
                text: "the response was captured up to this packet, and the requester asked for the rest again: lost \
                       before the capture point"
                    .into(),
            };
            self.fault(seen.packet, fault);
        } else if cause == "timeout" && !has_response_gap {
            let last = sequence.position(sequence.next().unwrap_or(seen.psn)).unwrap_or(1) - 1;
            self.timeouts.push(Timeout { packet: seen.packet, position, last });
        }
    }

    /// Whether the response to a READ was captured up to the packet before this one.
    fn is_inside_response(&self, position: i64) -> bool {
        self.answers.get(&(position - 1)).is_some_and(|(_, opcode)| {
            opcode.operation() == Operation::ReadResponse && !opcode.position().ends_message()
        })
    }

    fn add_loss_of_request_or_answer(&mut self, sequence: &RequestSequence, packet: usize, position: i64) {
        let Some(psn) = sequence.psn_at(position) else { return };
        let opcode = self.transmissions.range(..=position).next_back().map(|(_, sent)| sent.opcode);
        let (certainty, text) = match self.at_sender[1] {
            Some(true) => (
                Certainty::Inferred,
                "captured, and the receiver, whose packets were captured where it sent them, did not answer it",
            ),
            _ => (
                Certainty::Ambiguous,
                "captured, and no answer to it was captured: the request was lost behind the capture point, or \
                 its answer before it",
            ),
        };
        let effect = EffectData::Dropped { copies: 0 };
        let fault = Inferred::Fault { is_response: false, psn, opcode, effect, certainty, text: text.into() };
        self.fault(packet, fault);
    }

    fn fault_here(&mut self, seen: SeenPacket, effect: EffectData, certainty: Certainty, text: &str) {
        let (psn, opcode) = (seen.psn, Some(seen.opcode));
        let fault = Inferred::Fault { is_response: false, psn, opcode, effect, certainty, text: text.into() };
        self.push(seen.packet, true, fault);
    }

    /// Requests that an ACK covers were not captured.
    pub fn unseen(&mut self, sequence: &RequestSequence, seen: SeenPacket, first: Psn, count: u32) {
        let first = sequence.position(first).unwrap_or_default();
        self.add_gap(first, count, seen, false);
    }

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
            let fault = Inferred::Fault {
                is_response: false,
                psn,
                opcode: self.transmissions.range(..=position).next_back().map(|(_, sent)| sent.opcode),
                effect: EffectData::Dropped { copies: 0 },
                certainty: Certainty::Inferred,
                text: "captured, but the receiver got a later packet without it: lost, damaged or overtaken behind \
                       the capture point"
                    .into(),
            };
            self.fault(packet, fault);
        } else if let Some(gap) = self.gap_at(position, false) {
            gap.fate = GapFate::Lost;
        }
        let (kind, time_ns) = (RejectionKind::Sequence, seen.time_ns);
        self.rejection = Some(Rejection { kind, position, time_ns, is_answered: false, loss });
    }

    pub fn irregular(&mut self, seen: SeenPacket, code: &'static str, certainty: Certainty, text: String) {
        let effect = EffectData::Irregular { code: code.into() };
        let (psn, opcode) = (seen.psn, Some(seen.opcode));
        let is_response = !seen.opcode.operation().is_request();
        self.push(seen.packet, true, Inferred::Fault { is_response, psn, opcode, effect, certainty, text });
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
        // A lost packet with others behind it draws a NAK: it is the last one that nobody reported.
        for timeout in answered {
            let last = timeout.last.min(position);
            // An answer to a packet that was not sent again: the packet arrived, and the answer was late.
            let has_arrived = self.transmissions.get(&last).is_some_and(|sent| sent.count == 1);
            if !has_arrived {
                self.add_loss_of_request_or_answer(sequence, timeout.packet, last);
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

    /// Concludes at the end of the capture. `has_unanswered` tells whether a message waits for an answer.
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
                "not captured, and nobody reported it missing: lost before the capture point, or missed by the capture".to_owned(),
            ),
        };
        let Some(first) = missing.first().and_then(|at| sequence.psn_at(*at)) else { return };
        if gap.fate == GapFate::NotCaptured {
            let effect = EffectData::NotCaptured { packets: missing.len() as u32 };
            let fault = Inferred::Fault {
                is_response: gap.is_response,
                psn: first,
                opcode: None,
                effect,
                certainty,
                text,
            };
            return self.fault(gap.packet, fault);
        }
        for psn in missing.iter().filter_map(|at| sequence.psn_at(*at)) {
            let effect = EffectData::Dropped { copies: 0 };
            let (is_response, text) = (gap.is_response, text.clone());
            let fault = Inferred::Fault { is_response, psn, opcode: None, effect, certainty, text };
            self.fault(gap.packet, fault);
        }
    }
}
