//! The messages of a flow whose card reports no events: where they begin, and when their answers are complete.
//!
//! A requester completes its requests in order. A READ is answered when every packet of its response was captured
//! since the requester last asked for it. A request that is sent again is open again: its answer was not accepted.

use crate::sequence::{Arrival, RequestHeaders};
use softhca_wire::{Mtu, NakCode, Opcode, Operation, Psn, Syndrome};
use std::collections::VecDeque;
use std::ops::Range;

/// The most answered messages that are remembered. A requester may send them again.
const MAX_ANSWERED: usize = 1024;

/// A message of a flow.
#[derive(Debug)]
struct Message {
    /// Its number among the messages of the flow.
    id: usize,
    first_psn: Psn,
    /// Its last PSN, once seen.
    last_psn: Option<Psn>,
    has_data_response: bool,
    /// Its first packet was seen.
    has_start: bool,
    /// The length in the RETH of a READ.
    read_length: Option<u32>,
    /// The packets of the response that were captured since they were last asked for, as offsets from the first PSN.
    received: Vec<Range<u32>>,
    /// The packets that were last asked for again: a requester that lacks them takes them in order only.
    asked_again: Range<u32>,
    /// The packet that ends the response was captured.
    has_response_end: bool,
    /// An ACK covers it.
    is_acknowledged: bool,
}

impl Message {
    /// The packets of its response, if that can be told.
    fn response_packets(&self, path_mtu: Option<u32>) -> Option<u32> {
        match (self.read_length, path_mtu) {
            (None, _) => Some(1),
            (Some(length), Some(path_mtu)) => Some(length.div_ceil(path_mtu).max(1)),
            (Some(_), None) => None,
        }
    }

    fn has_received(&self, wanted: Range<u32>) -> bool {
        let holds = |range: &Range<u32>| range.start <= wanted.start && wanted.end <= range.end;
        wanted.is_empty() || self.received.iter().any(holds)
    }

    fn receive(&mut self, offset: u32) {
        if self.asked_again.contains(&offset) && !self.has_received(self.asked_again.start..offset) {
            return;
        }
        let at = self.received.partition_point(|range| range.end < offset);
        match self.received.get_mut(at) {
            Some(range) if range.contains(&offset) => return,
            Some(range) if range.end == offset => range.end += 1,
            Some(range) if range.start == offset + 1 => range.start = offset,
            _ => self.received.insert(at, offset..offset + 1),
        }
        if let Some(next) = self.received.get(at + 1)
            && self.received[at].end == next.start
        {
            self.received[at].end = next.end;
            self.received.remove(at + 1);
        }
    }

    /// The requester asks for these packets again.
    fn forget(&mut self, asked: Range<u32>) {
        let parts = self.received.iter().flat_map(|range| {
            [range.start..range.end.min(asked.start), range.start.max(asked.end)..range.end]
        });
        self.received = parts.filter(|range| !range.is_empty()).collect();
        if self.has_data_response {
            self.asked_again = asked;
        }
        self.has_response_end = false;
        self.is_acknowledged = false;
    }

    fn is_answered(&self, path_mtu: Option<u32>) -> bool {
        if !self.has_data_response {
            return self.is_acknowledged;
        }
        match self.response_packets(path_mtu) {
            Some(packets) => matches!(&self.received[..], [all] if *all == (0..packets)),
            None => self.has_response_end,
        }
    }
}

/// The changes that an answer causes.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    /// The messages that it is a part of the answer to.
    pub partly: Vec<usize>,
    /// The messages that it completes.
    pub complete: Vec<usize>,
}

/// The messages of a flow.
#[derive(Debug, Default)]
pub(super) struct Messages {
    open: VecDeque<Message>,
    answered: VecDeque<Message>,
    count: usize,
}

impl Messages {
    /// The number of the message that begins with this request, if one does.
    pub fn begin(&mut self, request: &RequestHeaders, arrival: Arrival) -> Option<usize> {
        let RequestHeaders { opcode, psn, payload, dma_length } = *request;
        if !opcode.service().is_reliable() {
            return None;
        }
        let (starts, ends) = (opcode.position().starts_message(), opcode.position().ends_message());
        let has_data_response =
            opcode.operation() == Operation::ReadRequest || opcode.operation().is_atomic();
        // The first packet of a WRITE carries the path MTU and announces the length.
        let announced = dma_length.filter(|_| starts && !ends && Mtu::from_bytes(payload).is_some());
        let last_psn = match announced {
            Some(length) => Some(psn.plus(length.div_ceil(payload).max(1) - 1)),
            None => (ends && !has_data_response).then_some(psn),
        };
        // The message that was begun before this packet, and is not known to have ended before it.
        let behind = self.open.iter().rposition(|message| !psn.is_before(message.first_psn));
        let open = behind.filter(|at| {
            let message = &self.open[*at];
            !starts && message.last_psn.is_none_or(|last| !last.is_before(psn)) && !message.has_data_response
        });
        if let Some(open) = open {
            self.open[open].last_psn = self.open[open].last_psn.or(last_psn);
            return None;
        }
        if arrival == Arrival::Again {
            return None;
        }
        let holds = |message: &Message| {
            !psn.is_before(message.first_psn) && message.last_psn.is_some_and(|last| !last.is_before(psn))
        };
        if arrival == Arrival::Fills && self.answered.iter().rev().any(holds) {
            return None;
        }
        let at = behind.map_or(0, |behind| behind + 1);
        let mut later_end = None;
        if let Some(behind) = behind
            && !self.open[behind].has_data_response
            && self.open[behind].last_psn.is_none_or(|last| !last.is_before(psn))
        {
            // Its end was not seen, or is that of this message: it ends before this one begins.
            later_end = self.open[behind].last_psn.replace(psn.minus(1));
        }
        if starts
            && !ends
            && let Some(later) = self.open.get_mut(at)
            && !later.has_start
            && last_psn.is_none_or(|last| !last.is_before(later.first_psn))
        {
            (later.first_psn, later.has_start) = (psn, true);
            later.last_psn = last_psn.or(later.last_psn);
            return None;
        }
        let id = self.count;
        self.count += 1;
        let message = Message {
            id,
            first_psn: psn,
            last_psn: last_psn.or(later_end.filter(|_| !has_data_response)),
            has_data_response,
            has_start: starts,
            read_length: dma_length.filter(|_| opcode.operation() == Operation::ReadRequest),
            received: Vec::new(),
            asked_again: 0..0,
            has_response_end: false,
            is_acknowledged: false,
        };
        self.open.insert(at, message);
        Some(id)
    }

    /// The number of the message that a request belongs to, unless it was answered long ago.
    pub fn at(&self, psn: Psn) -> Option<usize> {
        let messages = self.answered.iter().chain(&self.open);
        messages.rev().find(|message| !psn.is_before(message.first_psn)).map(|message| message.id)
    }

    /// Takes an answer.
    pub fn answer(
        &mut self,
        opcode: Opcode,
        psn: Psn,
        syndrome: Option<Syndrome>,
        path_mtu: Option<u32>,
    ) -> Answered {
        let mut answered = Answered::default();
        let is_data = opcode.operation() != Operation::Acknowledge;
        let (acknowledged, refuses) = match syndrome {
            Some(Syndrome::Nak(NakCode::PsnSequenceError) | Syndrome::RnrNak(_)) => (psn, false),
            Some(Syndrome::Nak(_)) => (psn, true),
            _ if is_data => (psn, false),
            _ => (psn.plus(1), false),
        };
        // A requester that asks again for a response takes no later answer before it.
        let awaits = |message: &Message| !message.asked_again.is_empty() && !message.is_answered(path_mtu);
        let near = self.open.iter().take_while(|message| !psn.is_before(message.first_psn));
        let taken =
            near.enumerate().find(|(_, message)| awaits(message)).map_or(self.open.len(), |(at, _)| at + 1);
        let before = |message: &&mut Message| message.first_psn.is_before(acknowledged);
        for message in
            self.open.range_mut(..taken).take_while(before).filter(|message| !message.has_data_response)
        {
            if message.last_psn.is_some_and(|last| last.is_before(acknowledged)) && !message.is_acknowledged {
                message.is_acknowledged = true;
                answered.partly.push(message.id);
            }
        }
        let responding = |message: &Message| message.has_data_response && !psn.is_before(message.first_psn);
        let owner = self.open.iter().rposition(responding).filter(|at| is_data && *at < taken);
        if let Some(message) = owner.and_then(|at| self.open.get_mut(at)) {
            message.receive(psn.since(message.first_psn));
            message.has_response_end |= opcode.position().ends_message();
            answered.partly.push(message.id);
        }
        while self.open.front().is_some_and(|oldest| refuses || oldest.is_answered(path_mtu)) {
            let message = self.open.pop_front();
            answered.complete.extend(message.as_ref().map(|message| message.id));
            message.into_iter().for_each(|message| self.remember(message));
        }
        answered
    }

    fn remember(&mut self, message: Message) {
        self.answered.push_back(message);
        if self.answered.len() > MAX_ANSWERED {
            self.answered.pop_front();
        }
    }

    /// The requester sends a request again: it has not accepted the answers from there on. Returns the answered
    /// messages that are open again.
    pub fn send_again(&mut self, request: &RequestHeaders, path_mtu: Option<u32>) -> Vec<usize> {
        let psn = request.psn;
        let mut reopened = Vec::new();
        let is_open = self.open.front().is_some_and(|message| !psn.is_before(message.first_psn));
        let begun = self.answered.iter().rposition(|message| !psn.is_before(message.first_psn));
        if let Some(at) = begun.filter(|_| !is_open) {
            for message in self.answered.drain(at..).rev() {
                reopened.push(message.id);
                self.open.push_front(message);
            }
        }
        let Some(at) = self.open.iter().rposition(|message| !psn.is_before(message.first_psn)) else {
            return reopened;
        };
        let message = &mut self.open[at];
        let offset = psn.since(message.first_psn);
        let packets = match (request.dma_length, path_mtu) {
            (Some(length), Some(path_mtu)) if message.has_data_response => length.div_ceil(path_mtu).max(1),
            _ => u32::MAX - offset,
        };
        message.forget(offset..offset + packets);
        // A requester that misses an answer takes none of the later ACKs.
        self.open.range_mut(at..).for_each(|message| message.is_acknowledged = false);
        reopened
    }

    /// Messages at whose answers a packet is missing, and all before the last answered one: the requester went on
    /// without asking again, so that only the capture lacks it.
    pub fn answered_out_of_sight(&mut self, path_mtu: Option<u32>) -> Vec<usize> {
        let last = self.open.iter().rposition(|message| message.is_answered(path_mtu));
        let messages = self.open.drain(..last.map_or(0, |last| last + 1));
        messages.map(|message| message.id).collect()
    }

    /// The messages without a complete answer, oldest first.
    pub fn unanswered(&self) -> impl Iterator<Item = usize> {
        self.open.iter().map(|message| message.id)
    }
}
