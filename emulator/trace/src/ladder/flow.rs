//! Which packets belong together: one flow per direction, and the pairs of flows that are connections.
//!
//! A connected packet names only the queue pair that it is for. Cards tell who sent it; in a capture the
//! sender is found when an answer fits a request of the other direction.

use crate::NameTable;
use softhca_fabric::Endpoint;
use softhca_wire::{NakCode, Opcode, Operation, Psn, Qpn, Service, Syndrome};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

/// A message of a flow that is not answered yet; only followed where no card tells.
#[derive(Debug)]
struct PendingMessage {
    first_psn: Psn,
    /// Its last PSN, once seen.
    last_psn: Option<Psn>,
    has_data_response: bool,
}

/// Everything from one host, or one queue pair of it, to one queue pair.
#[derive(Debug)]
pub(crate) struct Flow {
    pub from: IpAddr,
    pub from_qp: Option<Qpn>,
    pub to: Endpoint,
    service: Service,
    source_port: u16,
    /// The zero of the relative PSNs of its requests, and of its answers where the requests are not seen.
    first_request: Option<Psn>,
    first_response: Option<Psn>,
    /// The PSN after the last that was requested.
    next_psn: Option<Psn>,
    pending: VecDeque<PendingMessage>,
}

impl Flow {
    fn is_opposite(&self, other: &Flow) -> bool {
        self.from == other.to.address && self.to.address == other.from
    }

    fn has_requested(&self, psn: Psn) -> bool {
        match (self.first_request, self.next_psn) {
            (Some(first), Some(_)) => !psn.is_before(first),
            _ => false,
        }
    }

    /// Takes note of a request; tells whether it went before.
    pub fn record_request(&mut self, psn: Psn) -> bool {
        self.first_request.get_or_insert(psn);
        let again = self.next_psn.is_some_and(|next| psn.is_before(next));
        if !again {
            self.next_psn = Some(psn.plus(1));
        }
        again
    }

    /// Follows a message of which no card tells: how many begin with this request.
    pub fn begin_message(&mut self, opcode: Opcode, psn: Psn, again: bool) -> i32 {
        if again || !opcode.service().is_reliable() {
            return 0;
        }
        let position = opcode.position();
        let data = matches!(opcode.operation(), Operation::ReadRequest) || opcode.operation().is_atomic();
        if position.starts_message() {
            self.pending.push_back(PendingMessage {
                first_psn: psn,
                last_psn: None,
                has_data_response: data,
            });
        }
        if position.ends_message()
            && !data
            && let Some(pending) = self.pending.back_mut()
        {
            pending.last_psn = Some(psn);
        }
        i32::from(position.starts_message())
    }

    /// How many messages of which no card tells end with this answer.
    pub fn complete_messages(&mut self, opcode: Opcode, psn: Psn, syndrome: Option<Syndrome>) -> i32 {
        let refused = match syndrome {
            Some(Syndrome::Nak(NakCode::PsnSequenceError) | Syndrome::RnrNak(_)) => return 0,
            Some(Syndrome::Nak(_)) => true,
            _ => false,
        };
        let mut ended = 0;
        let data = opcode.operation() != Operation::Acknowledge;
        while let Some(oldest) = self.pending.front() {
            let covered = oldest.last_psn.is_some_and(|last| !psn.is_before(last));
            let answered = data
                && opcode.position().ends_message()
                && oldest.has_data_response
                && !psn.is_before(oldest.first_psn);
            if !(covered || answered || refused) {
                break;
            }
            self.pending.pop_front();
            ended += 1;
            if answered {
                break;
            }
        }
        ended
    }
}

/// Every flow that was seen.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    flows: Vec<Flow>,
    by_key: BTreeMap<(IpAddr, Option<Qpn>, Endpoint), usize>,
    reverse: BTreeMap<usize, usize>,
}

impl Flows {
    /// The flow of a packet. The sender's queue pair is none where neither a card nor a DETH tells.
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
            first_request: None,
            first_response: None,
            next_psn: None,
            pending: VecDeque::new(),
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
            let nearest = candidate.next_psn.map_or(i32::MIN, |next| -(next.minus(1).distance(psn).abs()));
            (candidate.source_port == flow.source_port, nearest)
        });
        if let Some(other) = best {
            self.pair(index, other);
        }
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
    pub fn base_psn(&self, index: usize, is_request: bool, cast: &NameTable) -> Option<Psn> {
        let flow = &self.flows[index];
        let known = |address, qpn: Option<Qpn>| qpn.and_then(|qpn| cast.first_psn(Endpoint { address, qpn }));
        if is_request {
            return known(flow.from, flow.from_qp).or(flow.first_request);
        }
        let requests = self.reverse(index).and_then(|other| self.flows[other].first_request);
        known(flow.to.address, Some(flow.to.qpn)).or(requests).or(flow.first_response)
    }
}
