//! Converts a capture to an event log.
//!
//! Packets are what a capture has; what follows from them is added, as far as it does for sure: where a
//! message begins and which answer ends it, and which bytes a WRITE puts where.

use super::event::LogEvent;
use super::value::LogField;
use super::{Entry, FORMAT, Header, VERSION, VantagePoint};
use crate::describe::kebab_case;
use crate::ladder::Flows;
use crate::{Packet, PacketContents, RocePacket};
use softhca_fabric::Endpoint;
use softhca_wire::{Malformed, Opcode, Operation, Psn, Reth, Syndrome};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

/// How many WRITEs back a packet may still belong to.
const RECENT_WRITES: usize = 64;

/// An entry, and which packet it is, counted from 0 in the order they were given; none if it only follows.
pub type ConvertedEntry = (Option<u64>, Entry);

/// Converts the packets of a capture, in order, to entries.
#[derive(Debug, Default)]
pub struct CaptureConverter {
    flows: Flows,
    packets: Vec<(u64, i64, CapturedPacket)>,
    messages: Vec<Message>,
    /// Per flow: the messages without an answer, oldest first.
    pending_messages: BTreeMap<usize, VecDeque<usize>>,
    /// Per flow: the last WRITEs.
    writes: BTreeMap<usize, VecDeque<RecentWrite>>,
    hosts: Vec<IpAddr>,
    records: u64,
    start_ns: i64,
}

#[derive(Debug)]
enum CapturedPacket {
    Roce(Box<RoceInfo>),
    Malformed { at: Option<IpAddr>, reason: Malformed },
}

#[derive(Debug)]
struct RoceInfo {
    flow: usize,
    opcode: Opcode,
    psn: Psn,
    payload: u32,
    syndrome: Option<Syndrome>,
    retransmission: bool,
    icrc_ok: bool,
    mad: Option<String>,
    /// The message that the packet belongs to, if it is a request, and whether it begins it.
    message: Option<(usize, bool)>,
    /// The messages that the packet ends.
    completed_messages: Vec<usize>,
    /// Key, address and length of what it writes.
    write_target: Option<(u32, u64)>,
}

#[derive(Debug)]
struct Message {
    wr_id: u64,
    flow: usize,
    operation: &'static str,
    first_psn: Psn,
    packets: u32,
    bytes: u32,
}

#[derive(Clone, Copy, Debug)]
struct RecentWrite {
    first_psn: Psn,
    reth: Reth,
    /// Bytes of its first packet: the path MTU, if it has more than one.
    first_payload: u32,
}

impl CaptureConverter {
    /// Adds the next packet. Packets of other protocols are counted and have no entry.
    pub fn push(&mut self, push: &Packet<'_>) {
        let number = self.records;
        self.records += 1;
        let fact = match &push.contents {
            PacketContents::Roce(roce) => CapturedPacket::Roce(Box::new(self.add_roce(roce))),
            PacketContents::Malformed(network, reason) => {
                let at = network.as_ref().map(|network| network.destination());
                at.into_iter().for_each(|address| self.add_host(address));
                CapturedPacket::Malformed { at, reason: *reason }
            }
            PacketContents::Pause(_) | PacketContents::Other(_) => return,
        };
        self.start_ns = if self.packets.is_empty() { push.time_ns } else { self.start_ns.min(push.time_ns) };
        self.packets.push((number, push.time_ns, fact));
    }

    fn add_host(&mut self, address: IpAddr) {
        if !self.hosts.contains(&address) {
            self.hosts.push(address);
        }
    }

    fn add_roce(&mut self, add_roce: &RocePacket<'_>) -> RoceInfo {
        let header = &add_roce.transport.header;
        let network = &add_roce.frame.network;
        let (opcode, psn) = (header.bth.opcode, header.bth.psn);
        let payload = add_roce.transport.payload.len() as u32;
        let to = Endpoint { address: network.destination(), qpn: header.bth.destination_qp };
        self.add_host(network.source());
        self.add_host(to.address);
        let port = network.addressing().map_or(0, |envelope| envelope.source_port);
        let sender = header.deth.map(|deth| deth.source_qp);
        let flow = self.flows.flow_index(network.source(), sender, to, opcode, port);
        let mut seen = RoceInfo {
            flow,
            opcode,
            psn,
            payload,
            syndrome: header.aeth.map(|aeth| aeth.syndrome),
            retransmission: false,
            icrc_ok: add_roce.icrc_ok,
            mad: add_roce.mad.as_ref().map(ToString::to_string),
            message: None,
            completed_messages: Vec::new(),
            write_target: None,
        };
        if opcode.operation().is_request() {
            seen.retransmission = self.flows.get_mut(flow).record_request(psn);
            let begins = self.flows.get_mut(flow).begin_message(opcode, psn, seen.retransmission) > 0;
            seen.message = self.message_of(&seen, begins, header.reth);
            seen.write_target = self.write_target(&seen, header.reth);
        } else if opcode != Opcode::CNP {
            self.flows.record_response(flow, psn);
            if let Some(requests) = self.flows.reverse(flow) {
                let ended = self.flows.get_mut(requests).complete_messages(opcode, psn, seen.syndrome);
                let unanswered = self.pending_messages.entry(requests).or_default();
                seen.completed_messages = (0..ended).filter_map(|_| unanswered.pop_front()).collect();
            }
        }
        seen
    }

    /// The message of a request, made if the request begins one.
    fn message_of(&mut self, seen: &RoceInfo, begins: bool, reth: Option<Reth>) -> Option<(usize, bool)> {
        if begins {
            let index = self.messages.len();
            self.messages.push(Message {
                wr_id: index as u64 + 1,
                flow: seen.flow,
                operation: operation_name(seen.opcode),
                first_psn: seen.psn,
                packets: 1,
                bytes: reth.map_or(seen.payload, |reth| reth.dma_length),
            });
            self.pending_messages.entry(seen.flow).or_default().push_back(index);
            return Some((index, true));
        }
        let unanswered = self.pending_messages.get(&seen.flow)?;
        let index =
            *unanswered.iter().rev().find(|index| !seen.psn.is_before(self.messages[**index].first_psn))?;
        if !seen.retransmission {
            let message = &mut self.messages[index];
            message.packets += 1;
            // The first packet of a WRITE has its length.
            if seen.opcode.operation() == Operation::Send {
                message.bytes += seen.payload;
            }
        }
        Some((index, false))
    }

    /// Where a packet of a WRITE puts its payload.
    fn write_target(&mut self, seen: &RoceInfo, reth: Option<Reth>) -> Option<(u32, u64)> {
        if seen.opcode.operation() != Operation::Write || !seen.icrc_ok || seen.payload == 0 {
            return None;
        }
        let writes = self.writes.entry(seen.flow).or_default();
        if let Some(reth) = reth {
            writes.push_back(RecentWrite { first_psn: seen.psn, reth, first_payload: seen.payload });
            if writes.len() > RECENT_WRITES {
                writes.pop_front();
            }
        }
        let write = writes.iter().rev().find(|write| !seen.psn.is_before(write.first_psn))?;
        let offset = u64::from(seen.psn.distance(write.first_psn) as u32) * u64::from(write.first_payload);
        (offset < u64::from(write.reth.dma_length))
            .then(|| (write.reth.rkey.0, write.reth.virtual_address.wrapping_add(offset)))
    }

    /// The first line of the log, and its entries. The hosts are called by their addresses.
    pub fn finish(mut self, title: &str) -> (Header, impl Iterator<Item = ConvertedEntry> + use<>) {
        self.flows.pair_remaining();
        let vantage_points =
            self.hosts.iter().map(|address| VantagePoint { host: address.to_string(), address: *address });
        let header = Header {
            format: FORMAT.into(),
            version: VERSION,
            title: title.into(),
            vantage_points: vantage_points.collect(),
        };
        let facts = std::mem::take(&mut self.packets);
        let entries = facts.into_iter().flat_map(move |(number, time_ns, fact)| {
            let time = time_ns.saturating_sub(self.start_ns).max(0) as u64;
            match fact {
                CapturedPacket::Roce(seen) => self.entries_of(number, time, &seen),
                CapturedPacket::Malformed { at, reason } => vec![malformed_entry(number, time, at, reason)],
            }
        });
        (header, entries)
    }

    /// The entries of one packet.
    fn entries_of(&self, number: u64, time: u64, seen: &RoceInfo) -> Vec<ConvertedEntry> {
        let flow = self.flows.get(seen.flow);
        let (from, to) = (flow.from.to_string(), flow.to.address.to_string());
        let sender = flow.from_qp.map_or(0, |qpn| qpn.value());
        let packet = |peer| {
            softhca_engine::PacketSummary {
                opcode: seen.opcode,
                psn: seen.psn,
                dest_qp: flow.to.qpn,
                payload_length: seen.payload,
                syndrome: seen.syndrome,
                peer,
            }
            .log()
        };
        let mut entries = Vec::new();
        let mut push = |number, host: &str, what, trigger| {
            entries.push((number, Entry { time, host: host.into(), event: what, trigger }));
        };
        if let Some((index, true)) = seen.message {
            let Message { wr_id: id, operation, first_psn: first, packets, bytes, .. } = self.messages[index];
            let (operation, first_psn) = (operation.into(), first.value());
            let what = LogEvent::WqeFetched {
                qp: sender,
                wr_id: id,
                operation,
                bytes,
                first_psn,
                packets,
                first_sge: None,
            };
            push(None, &from, what, None);
        }
        let work = seen.message.map(|(index, _)| self.messages[index].wr_id);
        let sent = packet(flow.to.address);
        let cause = match (seen.opcode.operation().is_request(), seen.retransmission) {
            (false, _) => "request",
            (true, false) => "work",
            (true, true) => "unknown",
        };
        let what = LogEvent::PacketSent {
            qp: sender,
            packet: sent,
            wr_id: work,
            retransmission: seen.retransmission,
            cause: cause.into(),
        };
        push(Some(number), &from, what, seen.mad.clone());
        let qp = flow.to.qpn.value();
        if !seen.icrc_ok {
            let what = LogEvent::PacketDropped {
                qp,
                packet: Some(packet(flow.from)),
                wr_id: work,
                reason: "bad-icrc".into(),
            };
            push(None, &to, what, Some("the ICRC is wrong".into()));
        }
        if let Some((key, address)) = seen.write_target {
            let (length, psn) = (seen.payload, seen.psn.value());
            push(None, &to, LogEvent::MemoryWritten { qp, key, address, length, psn }, None);
        }
        for index in &seen.completed_messages {
            let Message { wr_id: id, flow, .. } = self.messages[*index];
            let requests = self.flows.get(flow);
            let qp = requests.from_qp.map_or(0, |qpn| qpn.value());
            push(None, &requests.from.to_string(), LogEvent::UnsignaledCompleted { qp, wr_id: id }, None);
        }
        entries
    }
}

fn malformed_entry(number: u64, time: u64, at: Option<IpAddr>, reason: Malformed) -> ConvertedEntry {
    let what = LogEvent::PacketDropped {
        qp: 0,
        packet: None,
        wr_id: None,
        reason: format!("malformed/{}", kebab_case(&reason)).into(),
    };
    let host = at.map_or(String::new(), |address| address.to_string());
    (Some(number), Entry { time, host, event: what, trigger: Some(format!("malformed: {reason}")) })
}

/// The operation of a message as completions name it.
fn operation_name(opcode: Opcode) -> &'static str {
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
