//! Conclusions from the packets of a capture: losses, reordering, timeouts, the kinds of retransmissions.
//!
//! A capture is taken at one point. A packet that was captured may be lost behind that point. A packet that was not
//! captured may have been lost before it, or missed by the capture. The answers of the receiver distinguish these.

mod answer;
mod end;

use super::Certainty;
use super::value::{EffectData, Keyword};
use crate::sequence::{Arrival, RequestSequence};
use softhca_wire::{Opcode, Operation, Psn};
use std::collections::BTreeMap;

/// Without a measured round trip, a repetition within this time is not a reaction of the sender.
const ASSUMED_ROUND_TRIP_NS: i64 = 50_000;
/// A requester that misses part of a response asks for it again within so many round trips.
const PROMPT_ROUND_TRIPS: i64 = 8;
/// So many recent transmissions and answers are remembered for each flow.
const MAX_REMEMBERED: usize = 8192;

/// A packet of the capture: its index among the packets that become entries.
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

/// What is inferred at a packet: before its entry, or after it.
#[derive(Debug)]
pub(super) struct InferredEvent {
    pub packet: usize,
    pub is_after: bool,
    pub what: Inferred,
}

#[derive(Clone, Copy, Debug)]
struct Transmission {
    opcode: Opcode,
    packet: usize,
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
    opcode: Opcode,
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
    /// The request that was lost, or whose answer was.
    lost: i64,
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
    /// The last position of a burst of retransmissions.
    burst: Option<i64>,
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

    /// A packet was lost.
    fn lose(
        &mut self,
        packet: usize,
        is_response: bool,
        psn: Psn,
        opcode: Option<Opcode>,
        certainty: Certainty,
        text: &str,
    ) {
        let (effect, text) = (EffectData::Dropped { copies: 0 }, text.to_owned());
        self.push(packet, false, Inferred::Fault { is_response, psn, opcode, effect, certainty, text });
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
        let count = 1 + self.transmissions.get(&position).map_or(0, |sent| sent.count);
        let SeenPacket { packet, time_ns, opcode, .. } = seen;
        let sent = Transmission { opcode, packet, time_ns, count };
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
        if let Some(last) = &mut self.burst
            && position > *last
        {
            *last = position;
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
        self.burst = Some(position);
        if let Some(gap) = self.gap_at(position, false)
            && gap.fate == GapFate::Unknown
        {
            gap.fate = GapFate::Lost;
        }
        let has_data_response =
            opcode.operation() == Operation::ReadRequest || opcode.operation().is_atomic();
        // An answer before the last transmission is one that the requester missed before.
        let last_sent = self.transmissions.range(..=position).next_back().map_or(0, |(_, sent)| sent.packet);
        let answers = self.answers.range(position..).filter(|(_, (packet, _))| *packet > last_sent);
        let answer = answers.map(|(at, answer)| (*at, *answer)).next();
        let has_later_answer = self.answers.range(position + 1..).next().is_some();
        let rejection = self.rejection.filter(|rejection| !rejection.is_answered);
        // A NAK may be lost behind the capture point, and the ACK timer expire: no cause is known.
        let cause = match rejection {
            Some(rejection) if position < rejection.position => {
                self.rejection.iter_mut().for_each(|rejection| rejection.is_answered = true);
                self.lose_nak(sequence, seen, rejection);
                "timeout"
            }
            Some(rejection) => {
                self.rejection.iter_mut().for_each(|rejection| rejection.is_answered = true);
                match rejection.kind {
                    RejectionKind::Sequence => "sequence-nak",
                    RejectionKind::ReceiverNotReady => "receiver-not-ready",
                }
            }
            None if has_data_response && has_later_answer && self.is_prompt(seen.time_ns) => "response-gap",
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

    /// Whether the last answer was captured so recently that the sender reacts to it.
    fn is_prompt(&self, time_ns: i64) -> bool {
        let round_trip = self.round_trip_ns.unwrap_or(ASSUMED_ROUND_TRIP_NS);
        self.last_answer_ns.is_some_and(|answer| time_ns - answer < PROMPT_ROUND_TRIPS * round_trip)
    }

    /// A retransmission starts before the PSN of the last NAK: the requester did not receive the NAK, which acknowledges
    /// everything before its PSN.
    fn lose_nak(&mut self, sequence: &RequestSequence, seen: SeenPacket, rejection: Rejection) {
        let psn = sequence.psn_at(rejection.position).unwrap_or(seen.psn);
        let text = "a NAK that was captured, but the requester sends again what the NAK acknowledges: lost behind the \
                    capture point";
        self.lose(seen.packet, true, psn, Some(rejection.opcode), Certainty::Inferred, text);
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
            let text = "captured, but the requester did not react to it and sent the request again: lost behind \
                        the capture point, or late";
            self.lose(seen.packet, true, psn, Some(opcode), Certainty::Inferred, text);
        } else if cause == "response-gap" && !has_response_gap {
            // No part of the answer was captured: the request or the answer was lost.
            self.add_loss_of_request_or_answer(sequence, seen.packet, position);
        } else if cause == "timeout" && self.is_inside_response(position) {
            let text = "the response was captured up to this packet, and the requester asked for the rest again: lost \
                        before the capture point";
            self.lose(seen.packet, true, seen.psn, None, Certainty::Inferred, text);
        } else if cause == "timeout" && !has_response_gap {
            // A lost packet with others behind it draws a NAK, but only one: the retransmission of the missing packet was
            // lost, or else the last packet, which no report covers.
            let asked = self.rejection.filter(|rejection| rejection.kind == RejectionKind::Sequence);
            let lost = match asked.filter(|rejection| rejection.position >= position) {
                Some(rejection) => rejection.position,
                None => sequence.position(sequence.next().unwrap_or(seen.psn)).unwrap_or(1) - 1,
            };
            self.timeouts.push(Timeout { packet: seen.packet, position, lost });
        }
    }

    /// Whether the response to a READ was captured up to the packet before this one.
    fn is_inside_response(&self, position: i64) -> bool {
        self.answers.get(&(position - 1)).is_some_and(|(_, opcode)| {
            opcode.operation() == Operation::ReadResponse && !opcode.position().ends_message()
        })
    }

    fn add_loss_of_request_or_answer(&mut self, sequence: &RequestSequence, packet: usize, position: i64) {
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
        self.add_request_loss(sequence, packet, position, certainty, text);
    }

    fn add_request_loss(
        &mut self,
        sequence: &RequestSequence,
        packet: usize,
        position: i64,
        certainty: Certainty,
        text: &str,
    ) {
        let Some(psn) = sequence.psn_at(position) else { return };
        let opcode = self.transmissions.range(..=position).next_back().map(|(_, sent)| sent.opcode);
        self.lose(packet, false, psn, opcode, certainty, text);
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

    pub fn irregular(&mut self, seen: SeenPacket, code: &'static str, certainty: Certainty, text: String) {
        let effect = EffectData::Irregular { code: code.into() };
        let (psn, opcode) = (seen.psn, Some(seen.opcode));
        let is_response = !seen.opcode.operation().is_request();
        self.push(seen.packet, true, Inferred::Fault { is_response, psn, opcode, effect, certainty, text });
    }
}
