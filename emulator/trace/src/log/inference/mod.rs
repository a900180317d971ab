//! Conclusions from the packets of a capture: losses, reordering, timeouts, the kinds of retransmissions.
//!
//! A capture is taken at one point. A packet that was captured may be lost behind that point. A packet that was not
//! captured may have been lost before it, or missed by the capture. The answers of the receiver distinguish these.

mod answer;
mod end;
mod responses;
mod retransmission;

use super::Certainty;
use super::value::{EffectData, Keyword};
use crate::sequence::{Arrival, RequestSequence};
use responses::ResponseOrder;
use softhca_wire::{Opcode, Operation, Psn};
use std::collections::{BTreeMap, BTreeSet};

/// The round trip of a capture that shows none. A capture near the receiver does not show it whole.
const ASSUMED_ROUND_TRIP_NS: i64 = 50_000;
/// A repetition within this time is not a reaction of the sender, wherever it was captured.
const MIN_ROUND_TRIP_NS: i64 = 1_000;
/// A requester reacts to what it receives within so many round trips.
const PROMPT_ROUND_TRIPS: i64 = 8;
/// A requester that sends again after this time, and many round trips, does not react to what it received: its ACK timer
/// expired. Cards do not have shorter timers.
const MIN_ACK_TIMEOUT_NS: i64 = 1_000_000;
/// How many recent transmissions and answers are remembered for each flow.
const MAX_REMEMBERED: usize = 8192;

/// A packet of the capture: its index among the packets that become entries.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeenPacket {
    pub packet: usize,
    pub time_ns: i64,
    pub psn: Psn,
    pub opcode: Opcode,
    /// The length in the RETH.
    pub dma_length: Option<u32>,
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
    RnrWait { psn: Psn, until_ns: i64, certainty: Certainty },
    /// The ACK timer of the requester expired.
    TimedOut { psn: Psn },
    /// The requester retransmits.
    Retransmitted { psn: Psn, cause: &'static str, certainty: Certainty },
    /// The oldest work request without an answer failed.
    Failed { status: &'static str, reason: &'static str, certainty: Certainty, text: String },
}

impl Inferred {
    fn certainty_mut(&mut self) -> Option<&mut Certainty> {
        match self {
            Inferred::Fault { certainty, .. }
            | Inferred::RnrWait { certainty, .. }
            | Inferred::Retransmitted { certainty, .. } => Some(certainty),
            _ => None,
        }
    }
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
    packet: usize,
    time_ns: i64,
    /// The wait that an RNR NAK asks for.
    wait_ns: i64,
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

#[derive(Clone, Debug)]
struct Gap {
    first: i64,
    count: u32,
    packet: usize,
    time_ns: i64,
    fate: GapFate,
    /// The positions that were asked for or sent again. The others may be those of responses.
    lost: Vec<i64>,
}

/// Packets that are sent again, one after the other.
#[derive(Clone, Debug)]
struct Burst {
    last: i64,
    /// Entries inferred from its first packet alone. The network may have delayed that packet.
    unconfirmed: Vec<usize>,
}

/// A timeout of the requester, until an answer comes.
#[derive(Clone, Copy, Debug)]
struct Timeout {
    packet: usize,
    position: i64,
    /// The request that was lost, or whose answer was.
    lost: i64,
    /// The ACK timer expired, or no gap in responses can be the reason.
    is_timer: bool,
    /// When an answer to it was captured.
    answered_ns: Option<i64>,
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
    responses: ResponseOrder,
    rejection: Option<Rejection>,
    /// The retransmissions under way.
    burst: Option<Burst>,
    gaps: Vec<Gap>,
    timeouts: Vec<Timeout>,
    round_trip_ns: Option<i64>,
    /// When the last request and the last answer were captured.
    last_request_ns: Option<i64>,
    last_answer_ns: Option<i64>,
    /// When the last ACK was captured.
    last_ack_ns: Option<i64>,
    /// When the last NAK was captured, and the positions of NAKs since one was captured long before.
    last_nak_ns: Option<i64>,
    naks: BTreeSet<i64>,
    /// A response came after later ones.
    has_late_response: bool,
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
        // A measured round trip includes what the receiver takes for its answer.
        elapsed_ns < self.round_trip_ns.map_or(0, |measured| measured / 2).max(MIN_ROUND_TRIP_NS)
    }

    /// Takes a request. Returns whether its requester sent it again.
    pub fn request(
        &mut self,
        sequence: &RequestSequence,
        seen: SeenPacket,
        arrival: Arrival,
        is_reliable: bool,
    ) -> bool {
        let Some(position) = sequence.position(seen.psn) else { return false };
        let is_sent_again = match arrival {
            Arrival::Next => {
                self.burst = None;
                false
            }
            Arrival::AfterGap { first, count } => {
                self.burst = None;
                let first = sequence.position(first).unwrap_or_default();
                self.add_gap(first, count, seen);
                false
            }
            Arrival::Fills | Arrival::Again => self.behind(sequence, seen, position, arrival, is_reliable),
        };
        let is_asked_again = arrival == Arrival::Again
            || arrival == Arrival::Fills && self.responses.may_hold(position, sequence.path_mtu());
        if has_data_response(seen.opcode) && (is_sent_again || !is_asked_again) {
            self.responses.ask(position, seen.dma_length, sequence.path_mtu(), is_asked_again);
        }
        self.last_request_ns = Some(seen.time_ns);
        let count = 1 + self.transmissions.get(&position).map_or(0, |sent| sent.count);
        let SeenPacket { packet, time_ns, opcode, .. } = seen;
        let sent = Transmission { opcode, packet, time_ns, count };
        self.transmissions.insert(position, sent);
        while self.transmissions.len() > MAX_REMEMBERED {
            self.transmissions.pop_first();
        }
        is_sent_again
    }

    fn add_gap(&mut self, first: i64, count: u32, seen: SeenPacket) {
        let SeenPacket { packet, time_ns, .. } = seen;
        self.gaps.push(Gap { first, count, packet, time_ns, fate: GapFate::Unknown, lost: Vec::new() });
    }

    fn gap_at(&mut self, position: i64) -> Option<&mut Gap> {
        let holds = |gap: &&mut Gap| (gap.first..gap.first + i64::from(gap.count)).contains(&position);
        self.gaps.iter_mut().rev().find(holds)
    }

    /// A packet that was missing at its turn was asked for or sent again.
    fn gap_has_lost(&self, position: i64) -> bool {
        self.gaps.iter().any(|gap| gap.lost.contains(&position))
    }

    fn fault_here(&mut self, seen: SeenPacket, effect: EffectData, certainty: Certainty, text: &str) {
        let (psn, opcode) = (seen.psn, Some(seen.opcode));
        let fault = Inferred::Fault { is_response: false, psn, opcode, effect, certainty, text: text.into() };
        self.push(seen.packet, true, fault);
    }

    /// Requests that an ACK covers were not captured.
    pub fn unseen(&mut self, sequence: &RequestSequence, seen: SeenPacket, first: Psn, count: u32) {
        let first = sequence.position(first).unwrap_or_default();
        self.add_gap(first, count, seen);
    }

    pub fn irregular(&mut self, seen: SeenPacket, code: &'static str, certainty: Certainty, text: String) {
        let effect = EffectData::Irregular { code: code.into() };
        let (psn, opcode) = (seen.psn, Some(seen.opcode));
        let is_response = !seen.opcode.operation().is_request();
        self.push(seen.packet, true, Inferred::Fault { is_response, psn, opcode, effect, certainty, text });
    }
}

fn has_data_response(opcode: Opcode) -> bool {
    opcode.operation() == Operation::ReadRequest || opcode.operation().is_atomic()
}
