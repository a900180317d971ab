//! Collects events, frames and captured packets, and sorts them into ladders.

use super::event_text::{self, BasePsns};
use super::flow::Flows;
use super::label::{HeaderDetails, LadderPacket};
use super::{Delivery, Emphasis, Ladder, Side, Step, StepContent};
use crate::sequence::{Arrival, RequestHeaders};
use crate::{NameTable, Packet, PacketContents, describe};
use softhca_engine::{Event, Instant, QpState, Reason};
use softhca_fabric::{Endpoint, EventSink, Fault, FaultEffect, HostId, NetworkEvent, Stage};
use softhca_wire::{AddressHeaders, Icrc, Qpn, TransportPacket};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// How far back a frame or a fault looks for the packet that it is about.
const MAX_LOOKBACK: usize = 1024;

#[derive(Clone, Debug)]
enum Observation {
    Packet(LadderPacket),
    Event { address: IpAddr, event: Event },
}

/// Collects observations in the order of their times, and builds a ladder per connection.
///
/// The events of a card describe its host; frames only add what events do not contain. Other hosts are described
/// by their frames alone. It is also an event sink.
#[derive(Debug, Default)]
pub struct LadderBuilder {
    names: NameTable,
    flows: Flows,
    observations: Vec<(i64, Observation)>,
    hosts_with_events: BTreeSet<IpAddr>,
}

impl LadderBuilder {
    /// A builder with these names. It ignores events of hosts without a name.
    pub fn new(names: NameTable) -> LadderBuilder {
        LadderBuilder { names, ..LadderBuilder::default() }
    }

    pub(crate) fn names_mut(&mut self) -> &mut NameTable {
        &mut self.names
    }

    /// Adds an event of a card.
    fn record_event(&mut self, now: Instant, host: HostId, event: &Event) {
        let Some(address) = self.names.address(host) else { return };
        let time_ns = now.nanos() as i64;
        self.hosts_with_events.insert(address);
        match *event {
            Event::QpConfigured { .. }
            | Event::PacketReceived { .. }
            | Event::MemoryWritten { .. }
            | Event::CompletionNotified { .. } => {}
            Event::PacketSent { qp, packet, retransmission: again, .. } => {
                let to = Endpoint { address: packet.peer, qpn: packet.dest_qp };
                let flow = self.flows.flow_index(address, Some(qp), to, packet.opcode, 0);
                if packet.opcode.operation().is_request() {
                    let request = RequestHeaders {
                        opcode: packet.opcode,
                        psn: packet.psn,
                        payload: packet.payload_length,
                        dma_length: None,
                    };
                    self.flows.get_mut(flow).record_request(&request);
                } else {
                    self.flows.record_response(flow, packet.psn);
                }
                let (opcode, psn) = (packet.opcode, packet.psn);
                let sent = LadderPacket::new(flow, opcode, psn, packet.payload_length, packet.syndrome);
                let sent = LadderPacket { retransmission: again, ..sent };
                self.observations.push((time_ns, Observation::Packet(sent)));
            }
            event => self.observations.push((time_ns, Observation::Event { address, event })),
        }
    }

    /// Adds a frame that left a host: the packet from the BTH to the ICRC.
    fn record_frame(&mut self, now: Instant, addressing: &AddressHeaders, packet: &[u8]) {
        let Ok((bytes, _)) = Icrc::split(packet) else { return };
        let Ok(transport) = TransportPacket::parse(bytes) else { return };
        let bth = transport.header.bth;
        let mut extra = HeaderDetails::from_header(&transport.header, addressing.ecn());
        if !self.hosts_with_events.contains(&addressing.source) {
            extra.icrc_bad = !Icrc::verify(addressing, packet);
            let addresses = [addressing.source, addressing.destination];
            let port = addressing.source_port;
            let sent = self.packet_from_headers(addresses, port, &transport, extra);
            return self.observations.push((now.nanos() as i64, Observation::Packet(sent)));
        }
        let to = Endpoint { address: addressing.destination, qpn: bth.destination_qp };
        for (_, fact) in self.observations.iter_mut().rev().take(MAX_LOOKBACK) {
            let Observation::Packet(sent) = fact else { continue };
            let flow = self.flows.get(sent.flow);
            let is_it =
                (flow.from, flow.to, sent.opcode, sent.psn) == (addressing.source, to, bth.opcode, bth.psn);
            if is_it {
                sent.header_details.get_or_insert(extra);
                return;
            }
        }
    }

    /// Adds a fault to the last packet of this sender that it can concern.
    fn record_fault(&mut self, sender: Option<IpAddr>, fault: &Fault) {
        let remark = describe::fault(fault, &self.names);
        let observed = &fault.packet;
        for (_, fact) in self.observations.iter_mut().rev().take(MAX_LOOKBACK) {
            let Observation::Packet(sent) = fact else { continue };
            let from = self.flows.get(sent.flow).from;
            if sender.is_none_or(|sender| sender == from)
                && (Some(sent.opcode), Some(sent.psn)) == (observed.opcode, observed.psn)
            {
                sent.lost |= matches!(fault.effect, FaultEffect::Dropped { .. });
                sent.remarks.push(remark);
                return;
            }
        }
    }

    /// Adds a packet of a capture.
    pub fn record_packet(&mut self, packet: &Packet<'_>) {
        if let Some(sent) = self.ladder_packet(packet) {
            self.observations.push((packet.time_ns, Observation::Packet(sent)));
        }
    }

    /// A packet of two joined captures: whether it was lost between them, and a remark.
    pub fn record_joined(&mut self, packet: &Packet<'_>, lost: bool, remark: &str) {
        if let Some(mut sent) = self.ladder_packet(packet) {
            sent.lost = lost;
            sent.remarks.extend((!remark.is_empty()).then(|| remark.to_owned()));
            self.observations.push((packet.time_ns, Observation::Packet(sent)));
        }
    }

    /// Describes a packet of a capture in the light of the packets before it.
    pub(super) fn ladder_packet(&mut self, packet: &Packet<'_>) -> Option<LadderPacket> {
        let PacketContents::Roce(roce) = &packet.contents else { return None };
        let network = &roce.frame.network;
        let port = network.addressing().map_or(0, |addressing| addressing.source_port);
        let addresses = [network.source(), network.destination()];
        Some(self.packet_from_headers(addresses, port, &roce.transport, HeaderDetails::from_capture(roce)))
    }

    pub(super) fn flows(&self) -> &Flows {
        &self.flows
    }

    pub(super) fn names(&self) -> &NameTable {
        &self.names
    }

    /// A packet of a host without events.
    fn packet_from_headers(
        &mut self,
        [from, address]: [IpAddr; 2],
        port: u16,
        transport: &TransportPacket<'_>,
        extra: HeaderDetails,
    ) -> LadderPacket {
        let header = &transport.header;
        let (opcode, psn) = (header.bth.opcode, header.bth.psn);
        let to = Endpoint { address, qpn: header.bth.destination_qp };
        let flow = self.flows.flow_index(from, header.deth.map(|deth| deth.source_qp), to, opcode, port);
        let syndrome = header.aeth.map(|aeth| aeth.syndrome);
        let mut sent = LadderPacket::new(flow, opcode, psn, transport.payload.len() as u32, syndrome);
        sent.header_details = Some(extra);
        let observation = self.flows.observe(flow, header, sent.payload);
        sent.retransmission = observation.arrival == Some(Arrival::Again);
        sent.is_late = observation.arrival == Some(Arrival::Fills);
        sent.outstanding_delta =
            [i32::from(observation.begins.is_some()), -(observation.answers.complete.len() as i32)];
        sent.unseen = match observation.arrival {
            Some(Arrival::AfterGap { first, count }) => Some((first, count)),
            _ => observation.unseen,
        };
        sent
    }

    /// The ladders of everything so far, in the order in which the connections were first observed.
    pub fn ladders(&mut self) -> Vec<Ladder> {
        self.flows.pair_remaining();
        let mut sorter = ConnectionSorter::new(&self.names, &self.flows);
        for (time_ns, fact) in &self.observations {
            match fact {
                Observation::Packet(sent) => sorter.add_packet(*time_ns, sent),
                Observation::Event { address, event } => sorter.add_event(*time_ns, *address, event),
            }
        }
        sorter.ladders()
    }
}

impl EventSink for LadderBuilder {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::Hca { host, event } => self.record_event(now, host, event),
            NetworkEvent::Frame { stage: Stage::Admitted, addressing, packet, .. } => {
                self.record_frame(now, addressing, packet);
            }
            NetworkEvent::Fault { link, fault } => {
                self.record_fault(self.names.sender_address(link, fault.direction), fault);
            }
            _ => {}
        }
    }
}

/// An end of a connection: its host, and its queue pair where known.
type ConnectionEnd = Option<(IpAddr, Option<Qpn>)>;

/// A step whose words may still change.
enum PendingStep {
    /// Packets that continue each other.
    Packets(usize, Vec<(i64, LadderPacket)>),
    /// State changes that the application asked for, one after the other.
    States(usize, i64, Vec<QpState>),
    /// Anything else, with the end it is at.
    Done(usize, Step),
}

struct Connection {
    ends: [ConnectionEnd; 2],
    steps: Vec<PendingStep>,
    /// The position of its first observation among all.
    first_observed: Option<usize>,
}

#[derive(Default)]
struct WorkRequests {
    count: u64,
    /// Work requests in progress: id, number, name.
    outstanding: Vec<(u64, u64, String)>,
}

/// Sorts observations into connections.
struct ConnectionSorter<'a> {
    names: &'a NameTable,
    flows: &'a Flows,
    connections: Vec<Connection>,
    connection_of_flow: Vec<usize>,
    /// The latest connection of a queue pair.
    current: BTreeMap<Endpoint, usize>,
    connection_of_host: BTreeMap<IpAddr, usize>,
    work_requests: BTreeMap<Endpoint, WorkRequests>,
    /// Why the last completion of a queue pair failed.
    failures: BTreeMap<Endpoint, Reason>,
    observed: usize,
}

impl<'a> ConnectionSorter<'a> {
    fn new(names: &'a NameTable, flows: &'a Flows) -> ConnectionSorter<'a> {
        let mut sorter = ConnectionSorter {
            names,
            flows,
            connections: Vec::new(),
            connection_of_flow: Vec::new(),
            current: BTreeMap::new(),
            connection_of_host: BTreeMap::new(),
            work_requests: BTreeMap::new(),
            failures: BTreeMap::new(),
            observed: 0,
        };
        for (index, flow) in flows.iter().enumerate() {
            let connection = match flows.reverse(index).filter(|other| *other < index) {
                Some(other) => sorter.connection_of_flow[other],
                None => sorter
                    .connect([Some((flow.from, flow.from_qp)), Some((flow.to.address, Some(flow.to.qpn)))]),
            };
            sorter.connection_of_flow.push(connection);
        }
        sorter
    }

    fn connect(&mut self, ends: [ConnectionEnd; 2]) -> usize {
        let index = self.connections.len();
        self.connections.push(Connection { ends, steps: Vec::new(), first_observed: None });
        for (address, qpn) in ends.into_iter().flatten() {
            if let Some(qpn) = qpn {
                self.current.entry(Endpoint { address, qpn }).or_insert(index);
            }
        }
        index
    }

    /// The connection that a queue pair is in, and which of its ends it is.
    fn locate(&mut self, at: Endpoint) -> (usize, usize) {
        let known = self.current.get(&at).copied();
        let index = known.unwrap_or_else(|| {
            let peer = self.names.peer(at).map(|peer| (peer.address, Some(peer.qpn)));
            self.connect([Some((at.address, Some(at.qpn))), peer])
        });
        let is_second = self.connections[index].ends[0] != Some((at.address, Some(at.qpn)));
        (index, usize::from(is_second))
    }

    fn base_psns(&self, at: Endpoint, connection: usize) -> BasePsns {
        let mut zeros = BasePsns { own: self.names.first_psn(at), peer: None };
        for (index, flow) in self.flows.iter().enumerate() {
            if self.connection_of_flow[index] != connection {
                continue;
            }
            if (flow.from, flow.from_qp) == (at.address, Some(at.qpn)) {
                zeros.own = zeros.own.or(self.flows.base_psn(index, true, self.names));
                zeros.peer = zeros.peer.or(self.flows.base_psn(index, false, self.names));
            } else if flow.to == at {
                zeros.peer = self.flows.base_psn(index, true, self.names).or(zeros.peer);
            }
        }
        zeros
    }

    fn add_step(&mut self, connection: usize, step: PendingStep) {
        self.observed += 1;
        let connection = &mut self.connections[connection];
        connection.first_observed.get_or_insert(self.observed);
        match (connection.steps.last_mut(), step) {
            (Some(PendingStep::Packets(end, run)), PendingStep::Packets(other, next))
                if *end == other && run[run.len() - 1].1.continues_with(&next[0].1) =>
            {
                run.extend(next);
            }
            (Some(PendingStep::States(end, _, chain)), PendingStep::States(other, _, next))
                if *end == other && chain.last() == next.first() =>
            {
                chain.extend(&next[1..]);
            }
            (_, draft) => connection.steps.push(draft),
        }
    }

    fn add_note(
        &mut self,
        (connection, end): (usize, usize),
        time_ns: i64,
        bar: i32,
        tone: Emphasis,
        text: String,
    ) {
        let mut bars = [0; 2];
        bars[end] = bar;
        // The side is settled when all ends are known.
        let step = Step { outstanding_delta: bars, ..Step::note(time_ns, Side::Left, tone, text) };
        self.add_step(connection, PendingStep::Done(end, step));
    }

    fn add_packet(&mut self, time_ns: i64, packet: &LadderPacket) {
        let flow = self.flows.get(packet.flow);
        let connection = self.connection_of_flow[packet.flow];
        let end = usize::from(self.connections[connection].ends[0] != Some((flow.from, flow.from_qp)));
        if let Some(qpn) = flow.from_qp {
            self.current.insert(Endpoint { address: flow.from, qpn }, connection);
        }
        self.current.insert(flow.to, connection);
        self.connection_of_host.insert(flow.from, connection);
        self.connection_of_host.insert(flow.to.address, connection);
        if let Some(text) = packet.unseen_text(self.flows, self.names) {
            let sender = if packet.opcode.operation().is_request() { end } else { 1 - end };
            self.add_note((connection, sender), time_ns, 0, Emphasis::Unusual, text);
        }
        self.add_step(connection, PendingStep::Packets(end, vec![(time_ns, packet.clone())]));
    }

    fn add_event(&mut self, time_ns: i64, address: IpAddr, event: &Event) {
        let qpn = event_text::qpn_of_event(event).filter(|qpn| *qpn != Qpn::default());
        let Some(qpn) = qpn else {
            // About the host as a whole: shown in its latest connection.
            let Some(connection) = self.connection_of_host.get(&address).copied() else { return };
            let ends = &self.connections[connection].ends;
            let is_second = ends[0].is_none_or(|(first, _)| first != address);
            let Some((tone, text)) = event_text::describe(event, BasePsns::default(), time_ns) else {
                return;
            };
            return self.add_note((connection, usize::from(is_second)), time_ns, 0, tone, text);
        };
        let at = Endpoint { address, qpn };
        let place = self.locate(at);
        let zeros = self.base_psns(at, place.0);
        let (bar, tone, text) = match *event {
            Event::QpStateChanged { from, to, reason: Reason::Requested, .. } => {
                return self.add_step(place.0, PendingStep::States(place.1, time_ns, vec![from, to]));
            }
            Event::QpStateChanged { from, to, reason, .. } => {
                let why = match reason {
                    Reason::None => String::new(),
                    // The rejection, or the completion that failed with it, is the step before.
                    Reason::RequestRejected(_) => String::new(),
                    reason if self.failures.get(&at) == Some(&reason) => String::new(),
                    reason => format!(": {}", event_text::reason_text(reason, zeros)),
                };
                (0, Emphasis::Error, format!("{from} → {to}{why}"))
            }
            Event::WqeFetched { wr_id: id, operation, bytes, packets, .. } => {
                let works = self.work_requests.entry(at).or_default();
                works.count += 1;
                let name = operation.name().to_uppercase();
                works.outstanding.push((id, works.count, name.clone()));
                let size = match packets {
                    0 => String::new(),
                    1 => format!(", {bytes} B"),
                    _ => format!(", {bytes} B in {packets} packets"),
                };
                (1, Emphasis::Normal, format!("{name} #{}{size}", works.count))
            }
            Event::Completed { completion, reason, .. } => {
                self.failures.insert(at, reason);
                let (tone, outcome) = event_text::outcome(&completion, reason, zeros);
                let (bar, name) = self.complete_work(at, completion.wr_id, completion.opcode.is_receive());
                let name = name.unwrap_or_else(|| completion.opcode.name().to_uppercase());
                (bar, tone, format!("{name}: {outcome}"))
            }
            Event::UnsignaledCompleted { wr_id: id, .. } => {
                let (bar, name) = self.complete_work(at, id, false);
                let name = name.unwrap_or_else(|| "work request".into());
                (bar, Emphasis::Success, format!("{name}: done, no completion wanted"))
            }
            _ => match event_text::describe(event, zeros, time_ns) {
                Some((tone, text)) => (0, tone, text),
                None => return,
            },
        };
        self.add_note(place, time_ns, bar, tone, text);
    }

    /// Ends the oldest work request with this id: how the bar changes, and what it was called.
    fn complete_work(&mut self, at: Endpoint, id: u64, is_receive: bool) -> (i32, Option<String>) {
        let works = self.work_requests.entry(at).or_default();
        let found = works.outstanding.iter().position(|work| work.0 == id).filter(|_| !is_receive);
        match found.map(|index| works.outstanding.remove(index)) {
            Some((_, number, name)) => (-1, Some(format!("{name} #{number}"))),
            None => (0, None),
        }
    }

    fn ladders(self) -> Vec<Ladder> {
        let ConnectionSorter { names, flows, mut connections, .. } = self;
        connections.retain(|connection| connection.first_observed.is_some());
        connections.sort_by_key(|connection| connection.first_observed);
        connections.into_iter().map(|connection| finish_ladder(connection, names, flows)).collect()
    }
}

/// Puts the end that is observed first on the left, and formats the steps.
fn finish_ladder(connection: Connection, names: &NameTable, flows: &Flows) -> Ladder {
    let Connection { ends, steps: drafts, .. } = connection;
    let first = match drafts.first() {
        Some(PendingStep::Packets(end, _) | PendingStep::States(end, ..) | PendingStep::Done(end, _)) => *end,
        None => 0,
    };
    let side = |end: usize| if end == first { Side::Left } else { Side::Right };
    let turn = |bars: [i32; 2]| if first == 0 { bars } else { [bars[1], bars[0]] };
    let mut steps = Vec::new();
    for draft in drafts {
        match draft {
            PendingStep::Done(end, step) => {
                steps.push(Step { side: side(end), outstanding_delta: turn(step.outstanding_delta), ..step });
            }
            PendingStep::States(end, time_ns, chain) => {
                let names: Vec<_> = chain.iter().map(|state| state.name()).collect();
                steps.push(Step::note(time_ns, side(end), Emphasis::Normal, names.join(" → ")));
            }
            PendingStep::Packets(end, run) => {
                // A few are shown one by one; more are a crowd.
                const CROWD: usize = 4;
                let size = if run.len() < CROWD { 1 } else { run.len() };
                for alike in run.chunks(size) {
                    let mut step = packet_step(alike, flows, names);
                    let [own, other] = step.outstanding_delta;
                    step.side = side(end);
                    step.outstanding_delta =
                        if step.side == Side::Left { [own, other] } else { [other, own] };
                    steps.push(step);
                }
            }
        }
    }
    let ends = if first == 0 { ends } else { [ends[1], ends[0]] };
    let name = |end: ConnectionEnd| {
        end.map_or(String::new(), |(address, qpn)| names.queue_pair_heading(address, qpn))
    };
    Ladder { names: ends.map(name), qpns: ends.map(|end| end.and_then(|(_, qpn)| qpn)), steps }
}

pub(super) fn packet_step(alike: &[(i64, LadderPacket)], flows: &Flows, names: &NameTable) -> Step {
    let (time_ns, sent) = &alike[0];
    let last = (alike.len() > 1).then(|| alike[alike.len() - 1].1.psn);
    let zero = flows.base_psn(sent.flow, sent.opcode.operation().is_request(), names);
    let damaged = sent.header_details.as_ref().is_some_and(|extra| extra.icrc_bad);
    let tone = match () {
        () if sent.is_nak() || damaged || sent.lost => Emphasis::Error,
        () if sent.retransmission || sent.is_late || !sent.remarks.is_empty() => Emphasis::Unusual,
        () => Emphasis::Normal,
    };
    Step {
        time_ns: *time_ns,
        side: Side::Left,
        outstanding_delta: sent.outstanding_delta,
        emphasis: tone,
        content: StepContent::Arrow {
            label: sent.label(zero, last),
            detail: sent.detail(alike.len()),
            remark: sent.remarks.join("; "),
            fate: if sent.lost { Delivery::Lost } else { Delivery::Delivered },
        },
    }
}
