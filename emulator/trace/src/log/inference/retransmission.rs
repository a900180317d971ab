//! Requests that were captured before, or after later ones: reordered, duplicated, or sent again, and why.

use super::{ASSUMED_ROUND_TRIP_NS, Certainty};
use super::{
    Burst, FlowInference, GapFate, Inferred, MIN_ACK_TIMEOUT_NS, MIN_ROUND_TRIP_NS, PROMPT_ROUND_TRIPS,
    Rejection, RejectionKind, SeenPacket, Timeout, has_data_response,
};
use crate::log::value::EffectData;
use crate::sequence::{Arrival, RequestSequence};
use softhca_wire::{Opcode, Operation};

/// Why a requester sends again, as far as the capture shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Timeout,
    ResponseGap,
    Rejected(RejectionKind, Certainty),
    Unknown,
}

impl Cause {
    fn name(self) -> (&'static str, Certainty) {
        match self {
            Cause::Timeout => ("timeout", Certainty::Inferred),
            Cause::ResponseGap => ("response-gap", Certainty::Inferred),
            Cause::Rejected(RejectionKind::Sequence, certainty) => ("sequence-nak", certainty),
            Cause::Rejected(RejectionKind::ReceiverNotReady, certainty) => ("receiver-not-ready", certainty),
            Cause::Unknown => ("unknown", Certainty::Ambiguous),
        }
    }
}

impl FlowInference {
    /// A request that is not the next one. Returns whether its requester sent it again.
    pub(super) fn behind(
        &mut self,
        sequence: &RequestSequence,
        seen: SeenPacket,
        position: i64,
        arrival: Arrival,
        is_reliable: bool,
    ) -> bool {
        if let Some(burst) = &mut self.burst
            && position > burst.last
        {
            burst.last = position;
            // Packets that are late together are not captured before.
            if arrival == Arrival::Again {
                for event in std::mem::take(&mut burst.unconfirmed) {
                    self.events[event]
                        .what
                        .certainty_mut()
                        .into_iter()
                        .for_each(|sure| *sure = Certainty::Inferred);
                }
            }
            if let Some(rejection) =
                self.rejection.as_mut().filter(|rejection| rejection.position == position)
            {
                rejection.is_answered = true;
            }
            if arrival == Arrival::Fills {
                self.lose_gap_at(sequence, position);
            }
            return true;
        }
        if self.is_reordered(sequence, seen, position, arrival, is_reliable)
            || self.is_copy(seen, position, arrival, is_reliable)
        {
            self.burst.iter_mut().for_each(|burst| burst.unconfirmed.clear());
            return false;
        }
        // Where it was sent, or at a PSN at which no message began, it is no packet that the network delayed.
        let is_certain = self.at_sender[0] == Some(true)
            || (arrival == Arrival::Again && !self.transmissions.contains_key(&position));
        let start = self.events.len();
        let was_missing = arrival == Arrival::Fills && self.lose_gap_at(sequence, position);
        let cause = self.cause_of(sequence, seen, position);
        if cause == Cause::Timeout {
            self.push(seen.packet, false, Inferred::TimedOut { psn: seen.psn });
        }
        if !matches!(cause, Cause::Rejected(..)) && !was_missing {
            self.infer_loss_behind(sequence, seen, position, cause);
        }
        let (name, certainty) = cause.name();
        self.push(seen.packet, false, Inferred::Retransmitted { psn: seen.psn, cause: name, certainty });
        let is_doubtful = !is_certain && cause != Cause::Timeout;
        let mut unconfirmed = if is_doubtful { self.doubt(start) } else { Vec::new() };
        if arrival == Arrival::Fills {
            // Packets after it may be sent again, and it may be late.
            unconfirmed.clear();
        }
        self.burst = Some(Burst { last: position, unconfirmed });
        true
    }

    /// The packet may be one that the network delayed, until others show that it was sent again. Returns the events
    /// that are uncertain for this reason.
    fn doubt(&mut self, start: usize) -> Vec<usize> {
        let mut doubtful = Vec::new();
        for (at, event) in self.events.iter_mut().enumerate().skip(start) {
            if let Some(certainty) = event.what.certainty_mut().filter(|sure| **sure == Certainty::Inferred) {
                *certainty = Certainty::Ambiguous;
                doubtful.push(at);
            }
        }
        doubtful
    }

    /// A packet that was missing was sent again. Returns whether it was.
    pub(super) fn lose_gap_at(&mut self, sequence: &RequestSequence, position: i64) -> bool {
        if self.responses.may_hold(position, sequence.path_mtu()) {
            return false;
        }
        let gap = self.gap_at(position).filter(|gap| matches!(gap.fate, GapFate::Unknown | GapFate::Lost));
        let Some(gap) = gap else { return false };
        gap.fate = GapFate::Lost;
        let is_new = !gap.lost.contains(&position);
        gap.lost.extend(is_new.then_some(position));
        is_new
    }

    fn is_rejected(&self, position: i64) -> bool {
        self.rejection.is_some_and(|rejection| !rejection.is_answered && rejection.position <= position)
    }

    pub(super) fn follows_nak(&self, seen: SeenPacket) -> bool {
        self.last_nak_ns.is_some_and(|nak| seen.time_ns - nak < MIN_ACK_TIMEOUT_NS)
    }

    fn is_reordered(
        &mut self,
        sequence: &RequestSequence,
        seen: SeenPacket,
        position: i64,
        arrival: Arrival,
        is_reliable: bool,
    ) -> bool {
        let since = self.gap_at(position).map(|gap| gap.time_ns).filter(|_| arrival == Arrival::Fills);
        let is_soon = since.is_some_and(|since| self.is_too_soon(seen.time_ns - since) || !is_reliable);
        // After a NAK, it may be the retransmission.
        if self.follows_nak(seen) || !is_soon {
            return false;
        }
        self.gap_at(position).into_iter().for_each(|gap| gap.fate = GapFate::Reordered);
        let next = sequence.next().unwrap_or(seen.psn);
        let behind = sequence.position(next).unwrap_or(0) - position - 1;
        let effect = EffectData::Reordered { behind: behind.max(1) as u32 };
        let text = "captured after later packets, sooner than anybody could have asked for it: reordered before the \
                    capture point";
        self.fault_here(seen, effect, Certainty::Inferred, text);
        true
    }

    /// A copy that the network made, or that it delayed.
    fn is_copy(&mut self, seen: SeenPacket, position: i64, arrival: Arrival, is_reliable: bool) -> bool {
        let previous = self.transmissions.get(&position).copied().filter(|_| arrival == Arrival::Again);
        let Some(previous) = previous.filter(|_| self.at_sender[0] != Some(true)) else { return false };
        if self.is_rejected(position) {
            return false;
        }
        let effect = EffectData::Duplicated { copies: 1 };
        if self.is_too_soon(seen.time_ns - previous.time_ns) || !is_reliable {
            let (certainty, text) = match is_reliable {
                true => (
                    Certainty::Ambiguous,
                    "captured again, sooner than the sender could have reacted: duplicated or late before the capture \
                     point",
                ),
                false => (Certainty::Inferred, "captured twice: duplicated before the capture point"),
            };
            self.fault_here(seen, effect, certainty, text);
            return true;
        }
        let is_acknowledged = self.acknowledged.is_some_and(|acknowledged| acknowledged >= position);
        let since = self.last_answer_ns.map_or(i64::MAX, |answer| seen.time_ns - answer);
        if is_acknowledged && since < MIN_ACK_TIMEOUT_NS && !has_data_response(seen.opcode) {
            let text = "captured again a moment after it was acknowledged: duplicated or late before the capture point, \
                        or sent again with an earlier request whose answer is missing";
            self.fault_here(seen, effect, Certainty::Ambiguous, text);
            return true;
        }
        false
    }

    fn round_trip(&self) -> i64 {
        self.round_trip_ns.unwrap_or(ASSUMED_ROUND_TRIP_NS).max(ASSUMED_ROUND_TRIP_NS)
    }

    /// Why the requester sends again. A NAK may be lost behind the capture point, and the ACK timer expire.
    fn cause_of(&mut self, sequence: &RequestSequence, seen: SeenPacket, position: i64) -> Cause {
        let prompt = PROMPT_ROUND_TRIPS * self.round_trip();
        let rejection = self.rejection.filter(|rejection| !rejection.is_answered);
        // A later packet may be one that is late.
        if let Some(rejection) = self.rejection.as_mut().filter(|rejection| position <= rejection.position) {
            rejection.is_answered = true;
        }
        let since = self.last_answer_ns.map(|answer| seen.time_ns - answer);
        let is_late = since.is_none_or(|since| since >= prompt.max(MIN_ACK_TIMEOUT_NS));
        if let Some(rejection) = rejection.filter(|rejection| rejection.position > position)
            && is_late
        {
            self.lose_nak(sequence, seen, rejection);
        }
        if let Some(rejection) = rejection.filter(|rejection| rejection.position <= position) {
            let waited = seen.time_ns - rejection.time_ns - rejection.wait_ns;
            let is_prompt = (-self.round_trip()..prompt).contains(&waited) && rejection.position == position;
            let certainty = if is_prompt { Certainty::Inferred } else { Certainty::Ambiguous };
            if rejection.kind == RejectionKind::ReceiverNotReady {
                let psn = sequence.psn_at(rejection.position).unwrap_or(seen.psn);
                let until_ns = rejection.time_ns + rejection.wait_ns;
                self.push(rejection.packet, true, Inferred::RnrWait { psn, until_ns, certainty });
            }
            return Cause::Rejected(rejection.kind, certainty);
        }
        // The RNR NAK, or the end of its wait, may be later than a timeout.
        if let Some(refused) = self.rejection
            && refused.kind == RejectionKind::ReceiverNotReady
            && refused.position == position
            && self.at_sender[1] != Some(false)
        {
            return Cause::Rejected(refused.kind, Certainty::Ambiguous);
        }
        // A packet that was late may have been taken for the end of the wait.
        let is_in_rnr_wait = self.rejection.is_some_and(|rejection| {
            let end_ns = rejection.time_ns + rejection.wait_ns + MIN_ACK_TIMEOUT_NS;
            rejection.kind == RejectionKind::ReceiverNotReady && seen.time_ns < end_ns
        });
        let has_later_answer = self.answers.range(position + 1..).next().is_some();
        if is_late && !is_in_rnr_wait {
            // A later response that the network delayed shows the gap late, except where answers arrive.
            let may_be_gap =
                has_data_response(seen.opcode) && has_later_answer && self.at_sender[1] != Some(false);
            return if may_be_gap { Cause::Unknown } else { Cause::Timeout };
        }
        // After a NAK, a packet that was late may have been taken for the retransmission. Where requests are sent, the one
        // that the NAK asks for starts at its PSN.
        let is_after_nak =
            self.follows_nak(seen) && (self.at_sender[0] != Some(true) || self.naks.contains(&position));
        // Among others, it may be one of them that was late.
        let is_alone = self.at_sender[0] == Some(true)
            || self.last_request_ns.is_none_or(|last| seen.time_ns - last >= MIN_ROUND_TRIP_NS);
        let is_prompt = since.is_some_and(|since| since < prompt) && !is_after_nak && is_alone;
        match is_prompt && has_data_response(seen.opcode) && has_later_answer {
            true => Cause::ResponseGap,
            false => Cause::Unknown,
        }
    }

    /// A retransmission starts before the PSN of the last NAK: the requester did not receive the NAK, which acknowledges
    /// everything before its PSN.
    fn lose_nak(&mut self, sequence: &RequestSequence, seen: SeenPacket, rejection: Rejection) {
        let psn = sequence.psn_at(rejection.position).unwrap_or(seen.psn);
        let text = "a NAK that was captured, but the requester sends again what it acknowledges: the NAK, or an earlier \
                    packet of the connection, was lost, damaged or late";
        self.lose(seen.packet, true, psn, Some(rejection.opcode), Certainty::Inferred, text);
    }

    /// A retransmission that no NAK asked for: the answer was lost or late, or the request was lost.
    fn infer_loss_behind(
        &mut self,
        sequence: &RequestSequence,
        seen: SeenPacket,
        position: i64,
        cause: Cause,
    ) {
        // An answer before the last transmission is one that the requester missed before.
        let last_sent = self.transmissions.range(..=position).next_back().map_or(0, |(_, sent)| sent.packet);
        let has_data = has_data_response(seen.opcode);
        let end = if has_data { position + 1 } else { i64::MAX };
        let answered = |answer: &(&i64, &(usize, Opcode))| answer.1.0 > last_sent;
        let answer = self.answers.range(position..end).find(answered).map(|(at, answer)| (*at, *answer));
        let missing = self.responses.take_missing(position);
        let is_missing = missing.contains_key(&position);
        for (at, packet) in missing {
            let Some(psn) = sequence.psn_at(at) else { continue };
            let text = "not captured when its turn came, and asked for again: lost, damaged or late before the capture point";
            self.lose(packet, true, psn, None, Certainty::Inferred, text);
        }
        if is_missing {
            return;
        }
        if let Some((at, (_, opcode))) = answer {
            let psn = sequence.psn_at(at).unwrap_or(seen.psn);
            let text = "captured, but the requester sent the request again: this answer, or an earlier packet of the \
                        connection, was lost, damaged or late behind the capture point";
            return self.lose(seen.packet, true, psn, Some(opcode), Certainty::Inferred, text);
        }
        if has_data && self.is_inside_response(position) {
            let text = "the response was captured up to the packet before, and the requester asked for the rest again: \
                        it, or an earlier packet of the connection, was lost, damaged or late";
            return self.lose(seen.packet, true, seen.psn, None, Certainty::Inferred, text);
        }
        if cause == Cause::ResponseGap {
            return;
        }
        // A lost packet with others behind it draws a NAK, but only one: the retransmission of the missing packet was
        // lost, or else the last packet, which no report covers.
        let asked = self.rejection.filter(|rejection| rejection.kind == RejectionKind::Sequence);
        let lost = match asked.filter(|rejection| rejection.position >= position) {
            Some(rejection) => rejection.position,
            None => sequence.position(sequence.next().unwrap_or(seen.psn)).unwrap_or(1) - 1,
        };
        self.timeouts.push(Timeout {
            packet: seen.packet,
            position,
            lost,
            is_timer: cause == Cause::Timeout || !has_data,
            answered_ns: None,
        });
    }

    /// Whether the response to a READ was captured up to the packet before this one.
    fn is_inside_response(&self, position: i64) -> bool {
        self.answers.get(&(position - 1)).is_some_and(|(_, opcode)| {
            opcode.operation() == Operation::ReadResponse && !opcode.position().ends_message()
        })
    }

    /// The ACK timer expired, and the capture does not show whether the request was lost or its answer.
    pub(super) fn add_loss_of_request_or_answer(
        &mut self,
        sequence: &RequestSequence,
        packet: usize,
        position: i64,
    ) {
        let (certainty, text) = match self.at_sender {
            [Some(true), Some(true)] => (
                Certainty::Inferred,
                "captured, and the receiver, whose packets were captured where it sent them, did not answer it: it, or \
                 an earlier packet of the connection, was lost, damaged or late",
            ),
            _ => (
                Certainty::Ambiguous,
                "captured again: the request, its answer or an earlier packet of the \
                 connection was lost, damaged or late",
            ),
        };
        self.add_request_loss(sequence, packet, position, certainty, text);
    }

    pub(super) fn add_request_loss(
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
}
