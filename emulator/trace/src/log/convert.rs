//! A capture told as an event log.
//!
//! Packets are what a capture has; what follows from them is added, as far as it does for sure: where a
//! message begins and which answer ends it, and which bytes a WRITE puts where.

use super::vocabulary::What;
use super::{Entry, FORMAT, Header, VERSION, VantagePoint, entry};
use crate::ladder::Flows;
use crate::words::slug;
use crate::{Contents, Packet, Roce};
use softhca_fabric::Endpoint;
use softhca_wire::{Malformed, Opcode, Operation, Psn, Reth, Syndrome};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

/// How many WRITEs back a packet may still belong to.
const RECENT_WRITES: usize = 64;

/// An entry, and which packet it is, counted from 0 in the order they were given; none if it only follows.
pub type Converted = (Option<u64>, Entry);

/// Takes the packets of a capture, in order, and tells them as entries.
#[derive(Debug, Default)]
pub struct Conversion {
    flows: Flows,
    facts: Vec<(u64, i64, Fact)>,
    messages: Vec<Message>,
    /// Per flow: the messages without an answer, oldest first.
    unanswered: BTreeMap<usize, VecDeque<usize>>,
    /// Per flow: the last WRITEs.
    writes: BTreeMap<usize, VecDeque<Write>>,
    hosts: Vec<IpAddr>,
    packets: u64,
    earliest: i64,
}

#[derive(Debug)]
enum Fact {
    Roce(Box<Seen>),
    Malformed { at: Option<IpAddr>, reason: Malformed },
}

#[derive(Debug)]
struct Seen {
    flow: usize,
    opcode: Opcode,
    psn: Psn,
    payload: u32,
    syndrome: Option<Syndrome>,
    again: bool,
    is_intact: bool,
    management: Option<String>,
    /// The message that the packet belongs to, if it is a request, and whether it begins it.
    message: Option<(usize, bool)>,
    /// The messages that the packet ends.
    ended: Vec<usize>,
    /// Key, address and length of what it writes.
    written: Option<(u32, u64)>,
}

#[derive(Debug)]
struct Message {
    id: u64,
    flow: usize,
    operation: &'static str,
    first: Psn,
    packets: u32,
    bytes: u32,
}

#[derive(Clone, Copy, Debug)]
struct Write {
    first: Psn,
    reth: Reth,
    /// Bytes of its first packet: the path MTU, if it has more than one.
    piece: u32,
}

impl Conversion {
    /// Takes the next packet. Other protocols are counted and not told.
    pub fn packet(&mut self, packet: &Packet<'_>) {
        let number = self.packets;
        self.packets += 1;
        let fact = match &packet.contents {
            Contents::Roce(roce) => Fact::Roce(Box::new(self.roce(roce))),
            Contents::Malformed(network, reason) => {
                let at = network.as_ref().map(|network| network.destination());
                at.into_iter().for_each(|address| self.host(address));
                Fact::Malformed { at, reason: *reason }
            }
            Contents::Pause(_) | Contents::Other(_) => return,
        };
        self.earliest =
            if self.facts.is_empty() { packet.time_ns } else { self.earliest.min(packet.time_ns) };
        self.facts.push((number, packet.time_ns, fact));
    }

    fn host(&mut self, address: IpAddr) {
        if !self.hosts.contains(&address) {
            self.hosts.push(address);
        }
    }

    fn roce(&mut self, roce: &Roce<'_>) -> Seen {
        let header = &roce.transport.header;
        let network = &roce.frame.network;
        let (opcode, psn) = (header.bth.opcode, header.bth.psn);
        let payload = roce.transport.payload.len() as u32;
        let to = Endpoint { address: network.destination(), qpn: header.bth.destination };
        self.host(network.source());
        self.host(to.address);
        let port = network.envelope().map_or(0, |envelope| envelope.source_port);
        let sender = header.deth.map(|deth| deth.source);
        let flow = self.flows.of(network.source(), sender, to, opcode, port);
        let mut seen = Seen {
            flow,
            opcode,
            psn,
            payload,
            syndrome: header.aeth.map(|aeth| aeth.syndrome),
            again: false,
            is_intact: roce.intact,
            management: roce.management.as_ref().map(ToString::to_string),
            message: None,
            ended: Vec::new(),
            written: None,
        };
        if opcode.operation().is_request() {
            seen.again = self.flows.get_mut(flow).request(psn);
            let begins = self.flows.get_mut(flow).open(opcode, psn, seen.again) > 0;
            seen.message = self.message(&seen, begins, header.reth);
            seen.written = self.written(&seen, header.reth);
        } else if opcode != Opcode::CNP {
            self.flows.answer(flow, psn);
            if let Some(requests) = self.flows.reverse(flow) {
                let ended = self.flows.get_mut(requests).close(opcode, psn, seen.syndrome);
                let unanswered = self.unanswered.entry(requests).or_default();
                seen.ended = (0..ended).filter_map(|_| unanswered.pop_front()).collect();
            }
        }
        seen
    }

    /// The message of a request, made if the request begins one.
    fn message(&mut self, seen: &Seen, begins: bool, reth: Option<Reth>) -> Option<(usize, bool)> {
        if begins {
            let index = self.messages.len();
            self.messages.push(Message {
                id: index as u64 + 1,
                flow: seen.flow,
                operation: operation(seen.opcode),
                first: seen.psn,
                packets: 1,
                bytes: reth.map_or(seen.payload, |reth| reth.length),
            });
            self.unanswered.entry(seen.flow).or_default().push_back(index);
            return Some((index, true));
        }
        let unanswered = self.unanswered.get(&seen.flow)?;
        let index =
            *unanswered.iter().rev().find(|index| !seen.psn.is_before(self.messages[**index].first))?;
        if !seen.again {
            let message = &mut self.messages[index];
            message.packets += 1;
            // A WRITE's length stands in its first packet.
            if seen.opcode.operation() == Operation::Send {
                message.bytes += seen.payload;
            }
        }
        Some((index, false))
    }

    /// Where a packet of a WRITE puts its payload.
    fn written(&mut self, seen: &Seen, reth: Option<Reth>) -> Option<(u32, u64)> {
        if seen.opcode.operation() != Operation::Write || !seen.is_intact || seen.payload == 0 {
            return None;
        }
        let writes = self.writes.entry(seen.flow).or_default();
        if let Some(reth) = reth {
            writes.push_back(Write { first: seen.psn, reth, piece: seen.payload });
            if writes.len() > RECENT_WRITES {
                writes.pop_front();
            }
        }
        let write = writes.iter().rev().find(|write| !seen.psn.is_before(write.first))?;
        let offset = u64::from(seen.psn.distance(write.first) as u32) * u64::from(write.piece);
        (offset < u64::from(write.reth.length))
            .then(|| (write.reth.key.0, write.reth.address.wrapping_add(offset)))
    }

    /// The first line of the log, and its entries. The hosts are called by their addresses.
    pub fn finish(mut self, title: &str) -> (Header, impl Iterator<Item = Converted> + use<>) {
        self.flows.settle();
        let vantage_points =
            self.hosts.iter().map(|address| VantagePoint { host: address.to_string(), address: *address });
        let header = Header {
            format: FORMAT.into(),
            version: VERSION,
            title: title.into(),
            vantage_points: vantage_points.collect(),
        };
        let facts = std::mem::take(&mut self.facts);
        let told = facts.into_iter().flat_map(move |(number, time_ns, fact)| {
            let time = time_ns.saturating_sub(self.earliest).max(0) as u64;
            match fact {
                Fact::Roce(seen) => self.tell(number, time, &seen),
                Fact::Malformed { at, reason } => vec![malformed(number, time, at, reason)],
            }
        });
        (header, told)
    }

    /// What one packet tells.
    fn tell(&self, number: u64, time: u64, seen: &Seen) -> Vec<Converted> {
        let flow = self.flows.get(seen.flow);
        let (from, to) = (flow.from.to_string(), flow.to.address.to_string());
        let sender = flow.from_qp.map_or(0, |qpn| qpn.value());
        let packet = |peer| {
            entry::packet(&softhca_engine::Packet {
                opcode: seen.opcode,
                psn: seen.psn,
                destination: flow.to.qpn,
                payload: seen.payload,
                syndrome: seen.syndrome,
                peer,
            })
        };
        let mut told = Vec::new();
        let mut tell = |number, host: &str, what, trigger| {
            told.push((number, Entry { time, host: host.into(), what, trigger }));
        };
        if let Some((index, true)) = seen.message {
            let Message { id, operation, first, packets, bytes, .. } = self.messages[index];
            let (operation, first_psn) = (operation.into(), first.value());
            let what = What::WorkStarted { qp: sender, id, operation, bytes, first_psn, packets, buffer: None };
            tell(None, &from, what, None);
        }
        let work = seen.message.map(|(index, _)| self.messages[index].id);
        let sent = packet(flow.to.address);
        // Why something was sent again, a capture does not tell.
        let cause = if seen.opcode.operation().is_request() { "work" } else { "request" }.into();
        let what = What::PacketSent { qp: sender, packet: sent, work, again: seen.again, cause };
        tell(Some(number), &from, what, seen.management.clone());
        let qp = flow.to.qpn.value();
        if !seen.is_intact {
            let what = What::PacketDropped { qp, packet: Some(packet(flow.from)), work, reason: "bad-icrc".into() };
            tell(None, &to, what, Some("the ICRC is wrong".into()));
        }
        if let Some((key, address)) = seen.written {
            let (length, psn) = (seen.payload, seen.psn.value());
            tell(None, &to, What::MemoryWritten { qp, key, address, length, psn }, None);
        }
        for index in &seen.ended {
            let Message { id, flow, .. } = self.messages[*index];
            let requests = self.flows.get(flow);
            let qp = requests.from_qp.map_or(0, |qpn| qpn.value());
            tell(None, &requests.from.to_string(), What::WorkRetired { qp, id }, None);
        }
        told
    }
}

fn malformed(number: u64, time: u64, at: Option<IpAddr>, reason: Malformed) -> Converted {
    let what =
        What::PacketDropped { qp: 0, packet: None, work: None, reason: format!("malformed/{}", slug(&reason)).into() };
    let host = at.map_or(String::new(), |address| address.to_string());
    (Some(number), Entry { time, host, what, trigger: Some(format!("malformed: {reason}")) })
}

/// The operation of a message as completions name it.
fn operation(opcode: Opcode) -> &'static str {
    match opcode.operation() {
        Operation::Write => "write",
        Operation::ReadRequest => "read",
        Operation::CompareSwap => "compare-swap",
        Operation::FetchAdd => "fetch-add",
        Operation::Flush => "flush",
        Operation::AtomicWrite => "atomic-write",
        _ => "send",
    }
}
