//! A capture as an event log.
//!
//! The packets of a capture become entries. What follows from them is added: where a message begins and which answer
//! ends it, which bytes a WRITE puts where, and what `inference` concludes, with its certainty.

use super::event::LogEvent;
use super::inference::{FlowInference, Inferred, InferredEvent, SeenPacket};
use super::value::{CompletionData, EffectData, LogField};
use super::{Certainty, Entry, FORMAT, Header, VERSION, VantagePoint};
use crate::describe::kebab_case;
use crate::ladder::Flows;
use crate::sequence::Arrival;
use crate::{Mad, Packet, PacketContents, RocePacket};
use softhca_fabric::Endpoint;
use softhca_wire::cm::Message as CmMessage;
use softhca_wire::{Ecn, Malformed, Opcode, Operation, Position, Psn, Qpn, Reth, Syndrome};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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

#[derive(Debug)]
struct Message {
    wr_id: u64,
    flow: usize,
    operation: &'static str,
    first_psn: Psn,
    last_psn: Psn,
    /// Packets that were captured, each once.
    captured: u32,
    bytes: u32,
    /// The length that its first packet announces.
    announced: Option<u32>,
}

/// The message that the last request belongs to, as far as its packets add up.
#[derive(Clone, Copy, Debug)]
struct OpenMessage {
    operation: Operation,
    announced: Option<u32>,
    bytes: u32,
}

#[derive(Clone, Copy, Debug)]
struct RecentWrite {
    first_psn: Psn,
    reth: Reth,
    /// Bytes of its first packet: the path MTU, if it has more than one.
    first_payload: u32,
}

/// What the messages of the connection manager tell of queue pairs.
#[derive(Debug, Default)]
struct CmConnections {
    /// Requests by the sender's address and communication id.
    requests: BTreeMap<(IpAddr, u32), Qpn>,
    pairs: Vec<(Endpoint, Endpoint)>,
    /// Messages that were seen: sender, transaction and name.
    seen: BTreeSet<(IpAddr, u64, &'static str)>,
}

impl CmConnections {
    /// Takes a message; returns its name, id and whether it was sent before.
    fn observe(&mut self, from: IpAddr, to: IpAddr, mad: &Mad) -> Option<(&'static str, u32, bool)> {
        let Mad::Cm(datagram) = mad else { return None };
        let name = datagram.message.name();
        let id = match &datagram.message {
            CmMessage::Req(req) => {
                self.requests.insert((from, req.local_id.0), req.local_qpn);
                req.local_id.0
            }
            CmMessage::Rep(rep) => {
                if let Some(qpn) = self.requests.get(&(to, rep.remote_id.0)) {
                    let ends = [(from, rep.local_qpn), (to, *qpn)];
                    let [one, other] = ends.map(|(address, qpn)| Endpoint { address, qpn });
                    self.pairs.push((one, other));
                }
                rep.local_id.0
            }
            CmMessage::Rtu(rtu) => rtu.local_id.0,
            CmMessage::Rej(rej) => rej.local_id.0,
            CmMessage::Dreq(dreq) => dreq.local_id.0,
            CmMessage::Drep(drep) => drep.local_id.0,
            _ => 0,
        };
        let again = !self.seen.insert((from, datagram.header.transaction_id, name));
        Some((name, id, again))
    }
}

impl CaptureConverter {
    /// Takes the next packet. Other protocols are counted and not told.
    pub fn push(&mut self, packet: &Packet<'_>) {
        let number = self.records;
        self.records += 1;
        let fact = match &packet.contents {
            PacketContents::Roce(roce) => {
                CapturedPacket::Roce(Box::new(self.add_roce(roce, packet.time_ns, packet.at_sender)))
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
        let packet = SeenPacket { packet: self.packets.len(), time_ns, psn, opcode };
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
                inference.request(&sequenced.requests, packet, arrival, is_reliable);
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
            seen.completed_messages =
                observation.completes.iter().filter_map(|id| of_flow.get(*id)).copied().collect();
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

    /// Checks that the packets of a message add up.
    fn check_message(
        &mut self,
        packet: SeenPacket,
        flow: usize,
        arrival: Arrival,
        payload: u32,
        reth: Option<Reth>,
    ) {
        let (position, operation) = (packet.opcode.position(), packet.opcode.operation());
        if arrival.is_behind() || !self.flows.get(flow).is_sequenced() {
            return;
        }
        let path_mtu = self.flows.get(flow).requests.path_mtu();
        let open = self.open_messages.remove(&flow);
        let mut problem = None;
        let is_data = matches!(operation, Operation::Send | Operation::Write);
        let open = match open.filter(|_| arrival == Arrival::Next) {
            // The packets before it are not in the capture.
            None => None,
            Some(Some(_)) if position.starts_message() => {
                problem = Some((
                    "message-boundary",
                    "it starts a message although the one before has not ended".into(),
                ));
                None
            }
            Some(Some(open)) if open.operation != operation => {
                problem = Some(("message-boundary", "it continues a message of another operation".into()));
                None
            }
            Some(None) if !position.starts_message() => {
                problem = Some(("message-boundary", "it continues a message that has not started".into()));
                None
            }
            Some(open) => open,
        };
        if is_data && matches!(position, Position::First | Position::Middle) && path_mtu != Some(payload) {
            let text = match path_mtu {
                Some(path_mtu) => format!(
                    "{payload} B in a packet that does not end its message; others of this connection have {path_mtu} B"
                ),
                None => format!("{payload} B in a packet that does not end its message: that is no path MTU"),
            };
            problem.get_or_insert(("path-mtu", text));
        }
        if position == Position::Last && is_data && payload == 0 {
            problem.get_or_insert(("message-boundary", "the last packet of a message has no payload".into()));
        }
        let announced = reth.filter(|_| position.starts_message()).map(|reth| reth.dma_length);
        let mut message = open.unwrap_or(OpenMessage { operation, announced, bytes: 0 });
        message.bytes += payload;
        let ends = position.ends_message();
        self.open_messages.insert(flow, (is_data && !ends).then_some(message));
        if is_data
            && ends
            && let Some(announced) = message.announced.filter(|announced| *announced != message.bytes)
        {
            let bytes = message.bytes;
            let text = format!("the message has {bytes} B, and its first packet announces {announced} B");
            problem.get_or_insert(("message-boundary", text));
        }
        if let Some((code, text)) = problem {
            self.inferences.entry(flow).or_default().irregular(packet, code, Certainty::Known, text);
        }
    }

    /// The message of a request, made if the request begins one.
    fn message_of(
        &mut self,
        seen: &RoceInfo,
        begins: Option<usize>,
        arrival: Arrival,
        reth: Option<Reth>,
    ) -> Option<(usize, bool)> {
        let of_flow = self.messages_of_flow.entry(seen.flow).or_default();
        let announced = reth.map(|reth| reth.dma_length);
        if begins.is_some() {
            let index = self.messages.len();
            self.messages.push(Message {
                wr_id: index as u64 + 1,
                flow: seen.flow,
                operation: operation_name(seen.opcode),
                first_psn: seen.psn,
                last_psn: seen.psn,
                captured: 1,
                bytes: announced.unwrap_or(seen.payload),
                announced,
            });
            of_flow.push(index);
            return Some((index, true));
        }
        let index = *of_flow.get(self.flows.get(seen.flow).message_at(seen.psn)?)?;
        let message = &mut self.messages[index];
        if arrival != Arrival::Again {
            message.captured += 1;
            match announced {
                // The first packet came late.
                Some(length) => (message.bytes, message.announced) = (length, announced),
                None if message.announced.is_none() => message.bytes += seen.payload,
                None => {}
            }
            if seen.psn.is_before(message.first_psn) {
                message.first_psn = seen.psn;
            }
            if message.last_psn.is_before(seen.psn) {
                message.last_psn = seen.psn;
            }
        }
        Some((index, false))
    }

    /// The PSNs of a message, and how many of its packets are not in the capture.
    fn packets_of(&self, message: &Message) -> (u32, u32) {
        let path_mtu = self.flows.get(message.flow).requests.path_mtu();
        let span = message.last_psn.since(message.first_psn) + 1;
        let announced =
            message.announced.zip(path_mtu).map(|(length, path_mtu)| length.div_ceil(path_mtu).max(1));
        let packets = announced.map_or(span, |announced| announced.max(span));
        let is_read = message.operation == "read";
        (packets, if is_read { 0 } else { packets.saturating_sub(message.captured) })
    }

    /// Where a packet of a WRITE puts its payload.
    fn write_target(&mut self, seen: &RoceInfo, reth: Option<Reth>) -> Option<(u32, u64)> {
        if seen.opcode.operation() != Operation::Write || seen.payload == 0 {
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
        for (flow, packet) in std::mem::take(&mut self.unpaired_answers) {
            if let Some(requests) = self.flows.reverse(flow) {
                let sequence = &self.flows.get(requests).requests;
                self.inferences.entry(requests).or_default().answer_before_first(sequence, packet);
            }
        }
        let vantage_points =
            self.hosts.iter().map(|address| VantagePoint { host: address.to_string(), address: *address });
        let header = Header {
            format: FORMAT.into(),
            version: VERSION,
            title: title.into(),
            vantage_points: vantage_points.collect(),
            source: Some("capture".into()),
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
                let event = LogEvent::Fault {
                    link: None,
                    direction: "forward".into(),
                    cause: "capture".into(),
                    rule: None,
                    effect: effect.clone(),
                    class,
                    opcode: opcode.log(),
                    psn: Some(psn.value()),
                    relative_psn: requests.requests.position(*psn),
                    flow: None,
                    dest_qp: Some(to.1),
                    transmission: 0,
                };
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
                how = Some(Certainty::Inferred);
                let (psn, opcode) = (psn.value(), opcode.log());
                (responder.0, LogEvent::DuplicateRequestHandled { qp: responder.1, psn, opcode })
            }
            Inferred::RnrWait { psn, until_ns } => {
                how = Some(Certainty::Inferred);
                let until = self.log_time(*until_ns);
                let (qp, psn) = (requester.1, psn.value());
                (requester.0, LogEvent::RnrWaitStarted { qp, psn, until, retries_left: None })
            }
            Inferred::TimedOut { psn } => {
                how = Some(Certainty::Inferred);
                (requester.0, LogEvent::AckTimedOut { qp: requester.1, oldest_psn: psn.value() })
            }
            Inferred::Retransmitted { psn, cause } => {
                how = Some(Certainty::Inferred);
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

    /// What one packet tells.
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
            let is_request = seen.opcode.operation().is_request();
            let fault = LogEvent::Fault {
                link: None,
                direction: "forward".into(),
                cause: "capture".into(),
                rule: None,
                effect: EffectData::MarkedCe,
                class: if is_request { "request".into() } else { "response".into() },
                opcode: Some(seen.opcode.to_string().into()),
                psn: Some(seen.psn.value()),
                relative_psn: None,
                flow: None,
                dest_qp: Some(qp),
                transmission: 0,
            };
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
