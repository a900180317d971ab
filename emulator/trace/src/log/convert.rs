//! A capture as an event log.
//!
//! The packets of a capture become entries. Conclusions from them are added: the beginning and the answer of each
//! message, the target of a WRITE's bytes, and the results of `inference` with their certainty.

mod cm;
mod messages;

use super::event::LogEvent;
use super::inference::{FlowInference, Inferred, InferredEvent, SeenPacket};
use super::value::{CompletionData, EffectData, Keyword, LogField};
use super::{Certainty, Entry, FORMAT, Header, VERSION, VantagePoint};
use crate::describe::kebab_case;
use crate::ladder::Flows;
use crate::sequence::{Arrival, RequestHeaders};
use crate::{Packet, PacketContents, RocePacket};
use cm::CmConnections;
use messages::{Message, OpenMessage, RecentWrite};
use softhca_fabric::Endpoint;
use softhca_wire::{Ecn, Malformed, Opcode, Operation, Position, Psn, Syndrome};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

/// An entry, and which packet it is, counted from 0 in the order they were given; none if it only follows.
pub type ConvertedEntry = (Option<u64>, Entry);

/// Converts the packets of a capture, in order, to entries.
#[derive(Debug, Default)]
pub struct CaptureConverter {
    flows: Flows,
    packets: Vec<(u64, i64, CapturedPacket)>,
    messages: Vec<Message>,
    /// Per flow: the messages by their number.
    messages_of_flow: BTreeMap<usize, Vec<usize>>,
    inferences: BTreeMap<usize, FlowInference>,
    /// Per flow: the message that the last request continues, if it does; absent where the capture does not show it.
    open_messages: BTreeMap<usize, Option<OpenMessage>>,
    /// Answers whose requests were not known when they were captured: their flow, and the packet.
    unpaired_answers: Vec<(usize, SeenPacket)>,
    /// Per flow: the last WRITEs.
    writes: BTreeMap<usize, VecDeque<RecentWrite>>,
    connections: CmConnections,
    /// Hosts that sent a packet with a correct ICRC. The packets of others have none: they were captured before it was written, or come from a
    /// simulation without payload.
    icrc_senders: BTreeSet<IpAddr>,
    hosts: Vec<IpAddr>,
    records: u64,
    cut: u64,
    start_ns: i64,
    end_ns: i64,
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
    is_marked: bool,
    mad: Option<String>,
    /// The message of the connection manager, its id, and whether it was sent before.
    cm: Option<(&'static str, u32, bool)>,
    /// The message that the packet belongs to, if it is a request, and whether it begins it.
    message: Option<(usize, bool)>,
    /// The messages that the packet ends.
    completed_messages: Vec<usize>,
    /// Key and address of what it writes.
    write_target: Option<(u32, u64)>,
}

impl CaptureConverter {
    /// Takes the next packet. Packets of other protocols are only counted.
    pub fn push(&mut self, packet: &Packet<'_>) {
        let number = self.records;
        self.records += 1;
        let fact = match &packet.contents {
            PacketContents::Roce(roce) => {
                CapturedPacket::Roce(Box::new(self.add_roce(roce, packet.time_ns, packet.at_sender)))
            }
            PacketContents::Malformed(..) if packet.contents.is_cut() => {
                self.cut += 1;
                return;
            }
            PacketContents::Malformed(network, reason) => {
                let at = network.as_ref().map(|network| network.destination());
                at.into_iter().for_each(|address| self.add_host(address));
                CapturedPacket::Malformed { at, reason: *reason }
            }
            PacketContents::Pause(_) | PacketContents::Other(_) => return,
        };
        let is_first = self.packets.is_empty();
        self.start_ns = if is_first { packet.time_ns } else { self.start_ns.min(packet.time_ns) };
        self.end_ns = if is_first { packet.time_ns } else { self.end_ns.max(packet.time_ns) };
        self.packets.push((number, packet.time_ns, fact));
    }

    fn add_host(&mut self, address: IpAddr) {
        if !self.hosts.contains(&address) {
            self.hosts.push(address);
        }
    }

    fn add_roce(&mut self, roce: &RocePacket<'_>, time_ns: i64, at_sender: Option<bool>) -> RoceInfo {
        let header = &roce.transport.header;
        let network = &roce.frame.network;
        let (opcode, psn) = (header.bth.opcode, header.bth.psn);
        let payload = roce.transport.payload.len() as u32;
        let to = Endpoint { address: network.destination(), qpn: header.bth.destination_qp };
        self.add_host(network.source());
        self.add_host(to.address);
        let port = network.addressing().map_or(0, |addressing| addressing.source_port);
        let sender = header.deth.map(|deth| deth.source_qp);
        let known_flows = self.flows.len();
        let flow = self.flows.flow_index(network.source(), sender, to, opcode, port);
        if self.flows.len() > known_flows {
            for (one, other) in &self.connections.pairs {
                self.flows.pair_endpoints(*one, *other);
            }
        }
        if roce.icrc_ok {
            self.icrc_senders.insert(network.source());
        }
        let icrc_ok = roce.icrc_ok || !self.icrc_senders.contains(&network.source());
        let mut seen = RoceInfo {
            flow,
            opcode,
            psn,
            payload,
            syndrome: header.aeth.map(|aeth| aeth.syndrome),
            retransmission: false,
            icrc_ok,
            is_marked: roce.ecn() == Ecn::CongestionExperienced,
            mad: roce.mad.as_ref().map(ToString::to_string),
            cm: None,
            message: None,
            completed_messages: Vec::new(),
            write_target: None,
        };
        if let Some(mad) = &roce.mad {
            seen.cm = self.connections.observe(network.source(), to.address, mad);
        }
        if !icrc_ok {
            // The receiver does not take it: it neither begins nor ends anything.
            return seen;
        }
        let observation = self.flows.observe(flow, header, payload);
        let dma_length = header.reth.map(|reth| reth.dma_length);
        let packet = SeenPacket { packet: self.packets.len(), time_ns, psn, opcode, dma_length };
        if let Some(arrival) = observation.arrival {
            seen.retransmission = arrival == Arrival::Again;
            // Without a correct ICRC the payload need not be whole: simulations may leave it out.
            if roce.icrc_ok {
                self.check_message(packet, flow, arrival, payload, header.reth);
            }
            let sequenced = self.flows.get(flow);
            if sequenced.is_sequenced() {
                let inference = self.inferences.entry(flow).or_default();
                inference.at_sender[0] = at_sender;
                let is_reliable = opcode.service().is_reliable();
                if inference.request(&sequenced.requests, packet, arrival, is_reliable) {
                    self.reopen(flow, &RequestHeaders { opcode, psn, payload, dma_length });
                }
            }
            seen.message = self.message_of(&seen, observation.begins, arrival, header.reth);
            seen.write_target = self.write_target(&seen, header.reth);
        } else if let Some(requests) = self.flows.reverse(flow).filter(|_| opcode != Opcode::CNP) {
            let sequence = &self.flows.get(requests).requests;
            let inference = self.inferences.entry(requests).or_default();
            inference.at_sender[1] = at_sender;
            if let Some((first, count)) = observation.unseen {
                inference.unseen(sequence, packet, first, count);
                self.open_messages.remove(&requests);
            }
            inference.answer(sequence, packet, seen.syndrome);
            let of_flow = self.messages_of_flow.entry(requests).or_default();
            let messages = |ids: &[usize]| ids.iter().filter_map(|id| of_flow.get(*id)).copied().collect();
            let partly: Vec<usize> = messages(&observation.answers.partly);
            seen.completed_messages = messages(&observation.answers.complete);
            for message in partly.iter().chain(&seen.completed_messages) {
                self.messages[*message].answered_at = Some(packet.packet);
            }
            if opcode.operation() == Operation::ReadResponse
                && matches!(opcode.position(), Position::First | Position::Middle)
                && sequence.path_mtu().is_some_and(|path_mtu| path_mtu != payload)
            {
                let path_mtu = sequence.path_mtu().unwrap_or_default();
                let text = format!(
                    "a response packet of {payload} B on a connection with packets of {path_mtu} B: the two ends use \
                     different path MTUs"
                );
                inference.irregular(packet, "path-mtu", Certainty::Known, text);
            }
        } else if opcode != Opcode::CNP && opcode.service().is_reliable() {
            self.unpaired_answers.push((flow, packet));
        }
        seen
    }

    /// Requests are sent again whose answers were captured: they are not answered yet.
    fn reopen(&mut self, flow: usize, request: &RequestHeaders) {
        let reopened = self.flows.get_mut(flow).send_again(request);
        let of_flow = self.messages_of_flow.entry(flow).or_default();
        for message in reopened.iter().filter_map(|id| of_flow.get(*id)) {
            let answered_at = self.messages[*message].answered_at.take();
            if let Some((.., CapturedPacket::Roce(seen))) =
                answered_at.and_then(|at| self.packets.get_mut(at))
            {
                seen.completed_messages.retain(|completed| completed != message);
            }
        }
    }

    /// Requesters went on although the capture lacks a part of the answers: they were complete at the latest when their
    /// last captured part came.
    fn complete_out_of_sight(&mut self) {
        for (flow, of_flow) in &self.messages_of_flow {
            let mut last = None;
            for id in self.flows.get_mut(*flow).answered_out_of_sight() {
                let Some(message) = of_flow.get(id) else { continue };
                last = last.max(self.messages[*message].answered_at);
                if let Some((.., CapturedPacket::Roce(seen))) = last.and_then(|at| self.packets.get_mut(at)) {
                    seen.completed_messages.push(*message);
                }
            }
        }
    }

    /// The first line of the log, and its entries. The hosts are called by their addresses.
    pub fn finish(mut self, title: &str) -> (Header, impl Iterator<Item = ConvertedEntry> + use<>) {
        self.flows.pair_remaining();
        for (flow, packet) in std::mem::take(&mut self.unpaired_answers) {
            if let Some(requests) = self.flows.reverse(flow) {
                let sequence = &self.flows.get(requests).requests;
                self.inferences.entry(requests).or_default().answer_before_first(sequence, packet);
            }
        }
        self.complete_out_of_sight();
        let vantage_points =
            self.hosts.iter().map(|address| VantagePoint { host: address.to_string(), address: *address });
        let header = Header {
            format: FORMAT.into(),
            version: VERSION,
            title: title.into(),
            vantage_points: vantage_points.collect(),
            source: Some("capture".into()),
            cut_packets: self.cut,
        };
        let mut inferred: BTreeMap<usize, Vec<(usize, InferredEvent)>> = BTreeMap::new();
        let last_packet = self.packets.len().saturating_sub(1);
        for (flow, mut inference) in std::mem::take(&mut self.inferences) {
            let requests = self.flows.get(flow);
            let has_unanswered = requests.unanswered().next().is_some();
            inference.finish(&requests.requests, self.end_ns, last_packet, has_unanswered);
            for event in inference.events {
                inferred.entry(event.packet).or_default().push((flow, event));
            }
        }
        let facts = std::mem::take(&mut self.packets);
        let entries = facts.into_iter().enumerate().flat_map(move |(index, (number, time_ns, fact))| {
            let time = self.log_time(time_ns);
            let mut entries = Vec::new();
            let events = inferred.remove(&index).unwrap_or_default();
            let add = |is_after: bool, entries: &mut Vec<ConvertedEntry>| {
                let events = events.iter().filter(|(_, event)| event.is_after == is_after);
                for (flow, event) in events {
                    entries.extend(self.inferred_entry(*flow, time, &event.what));
                    entries.extend(self.failed_entries(*flow, time, &event.what));
                }
            };
            add(false, &mut entries);
            match fact {
                CapturedPacket::Roce(seen) => self.entries_of(number, time, &seen, &mut entries),
                CapturedPacket::Malformed { at, reason } => {
                    entries.push(malformed_entry(number, time, at, reason));
                }
            }
            add(true, &mut entries);
            entries
        });
        (header, entries)
    }

    fn log_time(&self, time_ns: i64) -> u64 {
        time_ns.saturating_sub(self.start_ns).max(0) as u64
    }

    /// The failure of the oldest message without an answer; the later ones are flushed with it.
    fn failed_entries(&self, flow: usize, time: u64, what: &Inferred) -> Vec<ConvertedEntry> {
        let Inferred::Failed { status, reason, certainty, text } = what else { return Vec::new() };
        let requests = self.flows.get(flow);
        let of_flow = self.messages_of_flow.get(&flow).map_or(&[][..], Vec::as_slice);
        let unanswered = requests.unanswered().filter_map(|id| Some(&self.messages[*of_flow.get(id)?]));
        let entries = unanswered.enumerate().map(|(at, message)| {
            let (event, trigger) = match at {
                0 => (self.completed(message, status, reason), Some(text.clone())),
                _ => (self.completed(message, "WR_FLUSH_ERR", "flushed"), None),
            };
            let host = requests.from.to_string();
            (None, Entry { time, host, event, trigger, certainty: Some(*certainty) })
        });
        entries.collect()
    }

    fn inferred_entry(&self, flow: usize, time: u64, what: &Inferred) -> Option<ConvertedEntry> {
        let requests = self.flows.get(flow);
        let requester = (requests.from.to_string(), requests.from_qp.map_or(0, |qpn| qpn.value()));
        let responder = (requests.to.address.to_string(), requests.to.qpn.value());
        let mut trigger = None;
        let mut how = None;
        let (host, event) = match what {
            Inferred::Fault { is_response, psn, opcode, effect, certainty, text } => {
                let (from, to) = if *is_response { (responder, requester) } else { (requester, responder) };
                (trigger, how) = (Some(text.clone()), Some(*certainty));
                let class = match opcode.map(Opcode::operation) {
                    Some(Operation::Acknowledge) => "ack".into(),
                    Some(Operation::ReadResponse | Operation::AtomicAcknowledge) => "response".into(),
                    None if *is_response => "response".into(),
                    _ => "request".into(),
                };
                let position = requests.requests.position(*psn);
                let event = captured_fault(effect.clone(), class, opcode.log(), *psn, position, to.1);
                (from.0, event)
            }
            Inferred::Rejected { psn, expected_psn, error, text } => {
                trigger = Some(text.clone());
                let event = LogEvent::RequestRejected {
                    qp: responder.1,
                    psn: psn.value(),
                    error: error.clone(),
                    expected_psn: expected_psn.map(Psn::value),
                };
                (responder.0, event)
            }
            Inferred::DuplicateHandled { psn, opcode } => {
                how = Some(Certainty::Ambiguous);
                let (psn, opcode) = (psn.value(), opcode.log());
                (responder.0, LogEvent::DuplicateRequestHandled { qp: responder.1, psn, opcode })
            }
            Inferred::RnrWait { psn, until_ns, certainty } => {
                how = Some(*certainty);
                let until = self.log_time(*until_ns);
                let (qp, psn) = (requester.1, psn.value());
                (requester.0, LogEvent::RnrWaitStarted { qp, psn, until, retries_left: None })
            }
            Inferred::TimedOut { psn } => {
                how = Some(Certainty::Inferred);
                (requester.0, LogEvent::AckTimedOut { qp: requester.1, oldest_psn: psn.value() })
            }
            Inferred::Retransmitted { psn, cause, certainty } => {
                how = Some(*certainty);
                let (qp, from_psn, cause) = (requester.1, psn.value(), (*cause).into());
                (requester.0, LogEvent::Retransmitted { qp, from_psn, cause, retries_left: None })
            }
            // See `failed_entries`.
            Inferred::Failed { .. } => return None,
        };
        Some((None, Entry { time, host, event, trigger, certainty: how }))
    }

    fn completed(&self, message: &Message, status: &'static str, reason: &'static str) -> LogEvent {
        let qp = self.flows.get(message.flow).from_qp.map_or(0, |qpn| qpn.value());
        let completion = CompletionData {
            qp,
            wr_id: message.wr_id,
            operation: message.operation.into(),
            status: status.into(),
            bytes: message.bytes,
            imm_data: None,
            invalidated_rkey: None,
            src_qp: None,
            vendor_err: 0,
        };
        LogEvent::Completed { cq: 0, completion, reason: reason.into() }
    }

    /// The entries of one packet.
    fn entries_of(&self, number: u64, time: u64, seen: &RoceInfo, entries: &mut Vec<ConvertedEntry>) {
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
        let mut push = |number, host: &str, event, trigger, certainty| {
            entries.push((number, Entry { time, host: host.into(), event, trigger, certainty }));
        };
        if let Some((index, true)) = seen.message {
            let message = &self.messages[index];
            let (packets, missing) = self.packets_of(message);
            let fetched = LogEvent::WqeFetched {
                qp: sender,
                wr_id: message.wr_id,
                operation: message.operation.into(),
                bytes: message.bytes,
                first_psn: message.first_psn.value(),
                packets,
                first_sge: None,
                call_site: None,
            };
            let trigger = (missing > 0).then(|| format!("{missing} of them are not in the capture"));
            push(None, &from, fetched, trigger, None);
        }
        let work = seen.message.map(|(index, _)| self.messages[index].wr_id);
        let cause = match (seen.opcode.operation().is_request(), seen.retransmission) {
            (false, _) => "request",
            (true, false) => "work",
            (true, true) => "unknown",
        };
        let sent = LogEvent::PacketSent {
            qp: sender,
            packet: packet(flow.to.address),
            wr_id: work,
            retransmission: seen.retransmission,
            cause: cause.into(),
        };
        push(Some(number), &from, sent, seen.mad.clone(), None);
        if let Some((message, id, retransmission)) = seen.cm {
            let event = LogEvent::CmSent {
                id: (id != 0).then_some(id),
                message: message.into(),
                peer: flow.to.address,
                retransmission,
            };
            push(None, &from, event, seen.mad.clone(), None);
        }
        let qp = flow.to.qpn.value();
        if seen.is_marked {
            let class = if seen.opcode.operation().is_request() { "request" } else { "response" };
            let opcode = Some(seen.opcode.log());
            let fault = captured_fault(EffectData::MarkedCe, class.into(), opcode, seen.psn, None, qp);
            push(None, &from, fault, Some("marked CE".into()), Some(Certainty::Known));
        }
        if !seen.icrc_ok {
            let dropped = LogEvent::PacketDropped {
                qp,
                packet: Some(packet(flow.from)),
                wr_id: work,
                reason: "bad-icrc".into(),
            };
            push(None, &to, dropped, Some("the ICRC is wrong".into()), Some(Certainty::Inferred));
        }
        if let Some((key, address)) = seen.write_target {
            let (length, psn) = (seen.payload, seen.psn.value());
            push(None, &to, LogEvent::MemoryWritten { qp, key, address, length, psn }, None, None);
        }
        for index in &seen.completed_messages {
            let message = &self.messages[*index];
            let requests = self.flows.get(message.flow);
            let host = requests.from.to_string();
            let last_psn = message.first_psn.plus(self.packets_of(message).0 - 1);
            let (event, certainty) = match seen.syndrome {
                Some(Syndrome::Nak(code)) if !last_psn.is_before(seen.psn) => {
                    let is_culprit = !seen.psn.is_before(message.first_psn);
                    let status = match code as u8 {
                        _ if !is_culprit => "WR_FLUSH_ERR",
                        1 => "REM_INV_REQ_ERR",
                        2 => "REM_ACCESS_ERR",
                        _ => "REM_OP_ERR",
                    };
                    let reason = if is_culprit { "nak" } else { "flushed" };
                    (self.completed(message, status, reason), Some(Certainty::Inferred))
                }
                _ => {
                    let qp = requests.from_qp.map_or(0, |qpn| qpn.value());
                    (LogEvent::UnsignaledCompleted { qp, wr_id: message.wr_id }, None)
                }
            };
            push(None, &host, event, None, certainty);
        }
    }
}

/// A fault that a capture shows.
fn captured_fault(
    effect: EffectData,
    class: Keyword,
    opcode: Option<Keyword>,
    psn: Psn,
    relative_psn: Option<i64>,
    dest_qp: u32,
) -> LogEvent {
    LogEvent::Fault {
        link: None,
        direction: "forward".into(),
        cause: "capture".into(),
        rule: None,
        effect,
        class,
        opcode,
        psn: Some(psn.value()),
        relative_psn,
        flow: None,
        dest_qp: Some(dest_qp),
        transmission: 0,
    }
}

fn malformed_entry(number: u64, time: u64, at: Option<IpAddr>, reason: Malformed) -> ConvertedEntry {
    let event = LogEvent::PacketDropped {
        qp: 0,
        packet: None,
        wr_id: None,
        reason: format!("malformed/{}", kebab_case(&reason)).into(),
    };
    let host = at.map_or(String::new(), |address| address.to_string());
    let trigger = Some(format!("malformed: {reason}"));
    (Some(number), Entry { time, host, event, trigger, certainty: None })
}
