//! Which packets belong together: one flow per direction, and the pairs of flows that are connections.
//!
//! A connected packet names only the queue pair that it is for. Events of a card show its sender; in a capture the
//! sender is found when an answer fits a request of the other direction.

use super::messages::{Answered, Messages};
use crate::NameTable;
use crate::sequence::{Arrival, RequestHeaders, RequestSequence};
use softhca_fabric::Endpoint;
use softhca_wire::{Opcode, Operation, Position, Psn, Qpn, Service, Syndrome, TransportHeader};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Everything from one host, or one queue pair of it, to one queue pair.
#[derive(Debug)]
pub(crate) struct Flow {
    pub from: IpAddr,
    pub from_qp: Option<Qpn>,
    pub to: Endpoint,
    pub service: Service,
    source_port: u16,
    pub requests: RequestSequence,
    /// The zero of the relative PSNs of its answers where the requests are not seen.
    first_response: Option<Psn>,
    /// Only followed where a card reports no events.
    messages: Messages,
}

impl Flow {
    fn is_opposite(&self, other: &Flow) -> bool {
        self.from == other.to.address && self.to.address == other.from
    }

    fn has_requested(&self, psn: Psn) -> bool {
        self.requests.first().is_some_and(|first| !psn.is_before(first))
    }

    /// Whether PSNs of this flow are consecutive: those of datagrams count the packets to all destinations.
    pub fn is_sequenced(&self) -> bool {
        self.service != Service::Ud && self.to.qpn != Qpn::GSI
    }

    /// Takes note of a request.
    pub fn record_request(&mut self, request: &RequestHeaders) -> Arrival {
        match self.is_sequenced() {
            true => self.requests.record(request),
            false => self.requests.record_unsequenced(request.psn),
        }
    }

    /// Follows a message that no card reports: the number of the one that begins with this request.
    pub fn begin_message(&mut self, request: &RequestHeaders, arrival: Arrival) -> Option<usize> {
        self.messages.begin(request, arrival)
    }

    /// The number of the message that a request belongs to.
    pub fn message_at(&self, psn: Psn) -> Option<usize> {
        self.messages.at(psn)
    }

    /// The requester sends a request again. Returns the answered messages that are open again.
    pub fn send_again(&mut self, request: &RequestHeaders) -> Vec<usize> {
        self.messages.send_again(request, self.requests.path_mtu())
    }

    /// The messages without a complete answer, oldest first.
    pub fn unanswered(&self) -> impl Iterator<Item = usize> {
        self.messages.unanswered()
    }

    /// The messages whose requester went on although the capture lacks a part of their answers.
    pub fn answered_out_of_sight(&mut self) -> Vec<usize> {
        self.messages.answered_out_of_sight(self.requests.path_mtu())
    }
}

/// The changes by a packet of a capture.
#[derive(Debug, Default)]
pub(crate) struct Observation {
    /// How a request relates to those before it.
    pub arrival: Option<Arrival>,
    /// The message that begins with it.
    pub begins: Option<usize>,
    /// The messages that it answers.
    pub answers: Answered,
    /// Requests that it acknowledges although they were not seen: the first PSN and their number.
    pub unseen: Option<(Psn, u32)>,
}

/// An ACK further beyond the last request than this belongs to other requests.
const MAX_UNSEEN: i32 = 1 << 16;

/// Every flow that was seen.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    flows: Vec<Flow>,
    by_key: BTreeMap<(IpAddr, Option<Qpn>, Endpoint), usize>,
    reverse: BTreeMap<usize, usize>,
}

impl Flows {
    /// The flow of a packet. The sender's queue pair is none where neither a card nor a DETH names it.
    pub fn flow_index(
        &mut self,
        from: IpAddr,
        from_qp: Option<Qpn>,
        to: Endpoint,
        opcode: Opcode,
        port: u16,
    ) -> usize {
        let key = (from, from_qp, to);
        if let Some(flow) = self.by_key.get(&key) {
            return *flow;
        }
        let index = self.flows.len();
        self.flows.push(Flow {
            from,
            from_qp,
            to,
            service: opcode.service(),
            source_port: port,
            requests: RequestSequence::default(),
            first_response: None,
            messages: Messages::default(),
        });
        self.by_key.insert(key, index);
        if let Some(qpn) = from_qp {
            let back = (to.address, Some(to.qpn), Endpoint { address: from, qpn });
            if let Some(other) = self.by_key.get(&back).copied() {
                self.pair(index, other);
            }
        }
        index
    }

    fn pair(&mut self, one: usize, other: usize) {
        self.reverse.insert(one, other);
        self.reverse.insert(other, one);
        for (one, other) in [(one, other), (other, one)] {
            let qpn = self.flows[other].to.qpn;
            self.flows[one].from_qp.get_or_insert(qpn);
        }
    }

    pub fn len(&self) -> usize {
        self.flows.len()
    }

    pub fn get(&self, index: usize) -> &Flow {
        &self.flows[index]
    }

    pub fn get_mut(&mut self, index: usize) -> &mut Flow {
        &mut self.flows[index]
    }

    pub fn iter(&self) -> impl Iterator<Item = &Flow> {
        self.flows.iter()
    }

    /// The requests that the answers of this flow are about.
    pub fn reverse(&self, index: usize) -> Option<usize> {
        self.reverse.get(&index).copied()
    }

    /// Pairs the flows of two queue pairs that a connection manager connected, as soon as both are seen.
    pub fn pair_endpoints(&mut self, one: Endpoint, other: Endpoint) {
        let find = |from: Endpoint, to: Endpoint| self.by_key.get(&(from.address, None, to)).copied();
        if let (Some(there), Some(back)) = (find(one, other), find(other, one))
            && !self.reverse.contains_key(&there)
            && !self.reverse.contains_key(&back)
        {
            self.pair(there, back);
        }
    }

    /// Takes note of an answer: it may show which flow it answers.
    pub fn record_response(&mut self, index: usize, psn: Psn) {
        self.flows[index].first_response.get_or_insert(psn);
        if self.reverse.contains_key(&index) {
            return;
        }
        let flow = &self.flows[index];
        let fits = |other: &usize| {
            let candidate = &self.flows[*other];
            *other != index
                && !self.reverse.contains_key(other)
                && candidate.is_opposite(flow)
                && candidate.service == flow.service
                && candidate.has_requested(psn)
        };
        // Cards that vary their source port use the same one for both directions of a connection.
        let best = (0..self.flows.len()).filter(fits).max_by_key(|other| {
            let candidate = &self.flows[*other];
            let nearest =
                candidate.requests.next().map_or(i32::MIN, |next| -(next.minus(1).distance(psn).abs()));
            (candidate.source_port == flow.source_port, nearest)
        });
        if let Some(other) = best {
            self.pair(index, other);
        }
    }

    /// Follows a packet of a host whose card reports no events.
    pub fn observe(&mut self, index: usize, header: &TransportHeader, payload: u32) -> Observation {
        let (opcode, psn) = (header.bth.opcode, header.bth.psn);
        let mut observation = Observation::default();
        if opcode.operation().is_request() {
            let dma_length = header.reth.map(|reth| reth.dma_length);
            let flow = &mut self.flows[index];
            let request = RequestHeaders { opcode, psn, payload, dma_length };
            let arrival = flow.record_request(&request);
            observation.begins = flow.begin_message(&request, arrival);
            observation.arrival = Some(arrival);
        } else if opcode != Opcode::CNP {
            self.record_response(index, psn);
            let Some(requests) = self.reverse(index).map(|requests| &mut self.flows[requests]) else {
                return observation;
            };
            let data = opcode.operation() == Operation::ReadResponse;
            if data && matches!(opcode.position(), Position::First | Position::Middle) {
                requests.requests.learn_path_mtu(payload);
            }
            if data && opcode.position().ends_message() {
                requests.requests.end_read(psn);
            }
            let syndrome = header.aeth.map(|aeth| aeth.syndrome);
            let unseen = requests.requests.next().filter(|_| matches!(syndrome, Some(Syndrome::Ack(_))));
            if let Some(next) = unseen
                && (0..MAX_UNSEEN).contains(&psn.distance(next))
                && !(data && requests.requests.extend_read(psn))
            {
                observation.unseen = Some((next, psn.since(next) + 1));
                requests.requests.skip_to(psn.plus(1));
            }
            let path_mtu = requests.requests.path_mtu();
            observation.answers = requests.messages.answer(opcode, psn, syndrome, path_mtu);
        }
        observation
    }

    /// Pairs what no answer has paired: same service and source port, or the only one each way.
    pub fn pair_remaining(&mut self) {
        for one in 0..self.flows.len() {
            if self.reverse.contains_key(&one) || self.flows[one].from_qp.is_some() {
                continue;
            }
            let flow = &self.flows[one];
            let alike = |other: &usize, opposite: bool| {
                let candidate = &self.flows[*other];
                let faces = if opposite {
                    candidate.is_opposite(flow)
                } else {
                    candidate.from == flow.from && candidate.to.address == flow.to.address
                };
                faces
                    && candidate.service == flow.service
                    && candidate.from_qp.is_none()
                    && !self.reverse.contains_key(other)
                    && (candidate.source_port == flow.source_port || opposite)
            };
            let others: Vec<usize> =
                (0..self.flows.len()).filter(|other| *other != one && alike(other, true)).collect();
            let same_port: Vec<usize> = others
                .iter()
                .copied()
                .filter(|other| self.flows[*other].source_port == flow.source_port)
                .collect();
            let rivals = (0..self.flows.len()).filter(|other| alike(other, false)).count();
            let choice = match (&same_port[..], &others[..]) {
                ([other], _) | ([], [other]) if rivals == 1 => Some(*other),
                _ => None,
            };
            if let Some(other) = choice {
                self.pair(one, other);
            }
        }
    }

    /// The zero of relative PSNs of a packet of this flow.
    pub fn base_psn(&self, index: usize, is_request: bool, names: &NameTable) -> Option<Psn> {
        let flow = &self.flows[index];
        let known =
            |address, qpn: Option<Qpn>| qpn.and_then(|qpn| names.first_psn(Endpoint { address, qpn }));
        if is_request {
            return known(flow.from, flow.from_qp).or(flow.requests.first());
        }
        let requests = self.reverse(index).and_then(|other| self.flows[other].requests.first());
        known(flow.to.address, Some(flow.to.qpn)).or(requests).or(flow.first_response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets of messages of four: the PSN of each says its place.
    fn observe(flow: &mut Flow, operation: Operation, psn: u32) -> Option<usize> {
        let position = match psn % 4 {
            0 => Position::First,
            3 => Position::Last,
            _ => Position::Middle,
        };
        let opcode = Opcode::all().find(|opcode| {
            (opcode.service(), opcode.operation(), opcode.position()) == (Service::Rc, operation, position)
        });
        let request = RequestHeaders {
            opcode: opcode.expect("an opcode"),
            psn: Psn::new(psn),
            payload: 1024,
            dma_length: (operation == Operation::Write && position == Position::First).then_some(4096),
        };
        let arrival = flow.record_request(&request);
        flow.begin_message(&request, arrival)
    }

    fn acknowledge(flow: &mut Flow, psn: u32) -> usize {
        let ack = Opcode::all().find(|opcode| opcode.operation() == Operation::Acknowledge);
        flow.messages.answer(ack.expect("an opcode"), Psn::new(psn), None, None).complete.len()
    }

    /// The end of one message and the start of the next are captured after what follows them.
    #[test]
    fn a_message_whose_start_comes_late_is_ended_by_its_ack() {
        let to = Endpoint { address: IpAddr::from([10, 0, 0, 2]), qpn: Qpn::new(7) };
        for operation in [Operation::Send, Operation::Write] {
            let mut flows = Flows::default();
            let index = flows.flow_index(IpAddr::from([10, 0, 0, 1]), None, to, Opcode::CNP, 0);
            let flow = flows.get_mut(index);
            flow.service = Service::Rc;
            let psns = [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 3, 4, 5, 6, 7, 8, 9, 10, 11];
            let begun = psns.iter().filter(|psn| observe(flow, operation, **psn).is_some()).count();
            assert_eq!(begun, 3, "{operation:?}");
            assert_eq!([3, 7, 11].map(|psn| acknowledge(flow, psn)), [1, 1, 1], "{operation:?}");
            assert_eq!(flow.unanswered().count(), 0);
        }
    }
}
