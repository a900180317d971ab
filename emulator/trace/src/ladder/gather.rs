//! Gathers what cards, cables and captures tell, and sorts it into ladders.

use super::flow::Flows;
use super::label::{Extra, Sent};
use super::tell::{self, Zeros};
use super::{Fate, Ladder, Side, Sight, Step, Tone};
use crate::{Cast, Contents, Packet, words};
use softhca_engine::{Event, Instant, Reason, State};
use softhca_fabric::{CableId, Direction, Effect, Endpoint, Fault, Frame, HostId, Observer, Stage};
use softhca_wire::{Envelope, Icrc, Qpn, Transport};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// How far back a frame or a fault looks for the packet that it is about.
const RECENT: usize = 1024;

#[derive(Clone, Debug)]
enum Fact {
    Sent(Sent),
    Told { address: IpAddr, event: Event },
}

/// Gathers facts from anywhere, in the order of their times, and yields a ladder per connection.
///
/// A host whose card is heard is told from its events; frames only add what events do not say. Of other
/// hosts the frames are all there is. As an [`Observer`] it watches a world.
#[derive(Debug, Default)]
pub struct Ladders {
    cast: Cast,
    flows: Flows,
    facts: Vec<(i64, Fact)>,
    heard: BTreeSet<IpAddr>,
}

impl Ladders {
    /// Nothing is known yet but names. Events of hosts that have none are not told.
    pub fn new(cast: Cast) -> Ladders {
        Ladders { cast, ..Ladders::default() }
    }

    /// The names, to add some.
    pub fn cast_mut(&mut self) -> &mut Cast {
        &mut self.cast
    }

    /// A card told an event.
    pub fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        let Some(address) = self.cast.address(host) else { return };
        let time_ns = now.nanos() as i64;
        self.heard.insert(address);
        match *event {
            Event::Configured { .. }
            | Event::PacketReceived { .. }
            | Event::MemoryWritten { .. }
            | Event::Notified { .. } => {}
            Event::PacketSent { qp, packet, again, .. } => {
                let to = Endpoint { address: packet.peer, qpn: packet.destination };
                let flow = self.flows.of(address, Some(qp), to, packet.opcode, 0);
                if packet.opcode.operation().is_request() {
                    self.flows.get_mut(flow).request(packet.psn);
                } else {
                    self.flows.answer(flow, packet.psn);
                }
                let sent = Sent {
                    flow,
                    opcode: packet.opcode,
                    psn: packet.psn,
                    payload: packet.payload,
                    syndrome: packet.syndrome,
                    again,
                    extra: None,
                    remarks: Vec::new(),
                    lost: false,
                    bars: [0; 2],
                };
                self.facts.push((time_ns, Fact::Sent(sent)));
            }
            event => self.facts.push((time_ns, Fact::Told { address, event })),
        }
    }

    /// A frame left a host: the packet from the BTH to the ICRC.
    pub fn frame(&mut self, now: Instant, envelope: &Envelope, packet: &[u8]) {
        let Ok((bytes, _)) = Icrc::split(packet) else { return };
        let Ok(transport) = Transport::parse(bytes) else { return };
        let bth = transport.header.bth;
        let mut extra = Extra::of(&transport.header, envelope.ecn());
        if !self.heard.contains(&envelope.source) {
            extra.damaged = !Icrc::verify(envelope, packet);
            let addresses = [envelope.source, envelope.destination];
            let port = envelope.source_port;
            let sent = self.seen(addresses, port, &transport, extra);
            return self.facts.push((now.nanos() as i64, Fact::Sent(sent)));
        }
        let to = Endpoint { address: envelope.destination, qpn: bth.destination };
        for (_, fact) in self.facts.iter_mut().rev().take(RECENT) {
            let Fact::Sent(sent) = fact else { continue };
            let flow = self.flows.get(sent.flow);
            let is_it =
                (flow.from, flow.to, sent.opcode, sent.psn) == (envelope.source, to, bth.opcode, bth.psn);
            if is_it {
                sent.extra.get_or_insert(extra);
                return;
            }
        }
    }

    /// A fault happened to a packet of this sender, if it is known who that is.
    pub fn fault(&mut self, sender: Option<IpAddr>, fault: &Fault) {
        let remark = words::fault(fault, &self.cast);
        let sighting = &fault.sighting;
        for (_, fact) in self.facts.iter_mut().rev().take(RECENT) {
            let Fact::Sent(sent) = fact else { continue };
            let from = self.flows.get(sent.flow).from;
            if sender.is_none_or(|sender| sender == from)
                && (Some(sent.opcode), Some(sent.psn)) == (sighting.opcode, sighting.psn)
            {
                sent.lost |= matches!(fault.effect, Effect::Dropped { .. });
                sent.remarks.push(remark);
                return;
            }
        }
    }

    /// A packet of a capture.
    pub fn packet(&mut self, packet: &Packet<'_>) {
        if let Some(sent) = self.sight(packet) {
            self.facts.push((packet.time_ns, Fact::Sent(sent)));
        }
    }

    /// What a packet of a capture is, in the light of those before it.
    pub(super) fn sight(&mut self, packet: &Packet<'_>) -> Option<Sent> {
        let Contents::Roce(roce) = &packet.contents else { return None };
        let network = &roce.frame.network;
        let port = network.envelope().map_or(0, |envelope| envelope.source_port);
        let addresses = [network.source(), network.destination()];
        Some(self.seen(addresses, port, &roce.transport, Extra::of_capture(roce)))
    }

    pub(super) fn flows(&self) -> &Flows {
        &self.flows
    }

    pub(super) fn cast(&self) -> &Cast {
        &self.cast
    }

    /// A packet of a host whose card is not heard.
    fn seen(
        &mut self,
        [from, address]: [IpAddr; 2],
        port: u16,
        transport: &Transport<'_>,
        extra: Extra,
    ) -> Sent {
        let header = &transport.header;
        let (opcode, psn) = (header.bth.opcode, header.bth.psn);
        let to = Endpoint { address, qpn: header.bth.destination };
        let flow = self.flows.of(from, header.deth.map(|deth| deth.source), to, opcode, port);
        let mut sent = Sent {
            flow,
            opcode,
            psn,
            payload: transport.payload.len() as u32,
            syndrome: header.aeth.map(|aeth| aeth.syndrome),
            again: false,
            extra: Some(extra),
            remarks: Vec::new(),
            lost: false,
            bars: [0; 2],
        };
        if opcode.operation().is_request() {
            let flow = self.flows.get_mut(flow);
            sent.again = flow.request(psn);
            sent.bars[0] = flow.open(opcode, psn, sent.again);
        } else if opcode != softhca_wire::Opcode::CNP {
            self.flows.answer(flow, psn);
            if let Some(requests) = self.flows.reverse(flow) {
                sent.bars[1] = -self.flows.get_mut(requests).close(opcode, psn, sent.syndrome);
            }
        }
        sent
    }

    /// The ladders of everything so far, in the order in which the connections were first heard of.
    pub fn ladders(&mut self) -> Vec<Ladder> {
        self.flows.settle();
        let mut sorter = Sorter::new(&self.cast, &self.flows);
        for (time_ns, fact) in &self.facts {
            match fact {
                Fact::Sent(sent) => sorter.sent(*time_ns, sent),
                Fact::Told { address, event } => sorter.told(*time_ns, *address, event),
            }
        }
        sorter.ladders()
    }
}

impl Observer for Ladders {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        Ladders::card(self, now, host, event);
    }

    fn frame(&mut self, now: Instant, _: CableId, _: Direction, stage: Stage, frame: &Frame) {
        if stage == Stage::Admitted {
            Ladders::frame(self, now, &frame.envelope, &frame.bytes);
        }
    }

    fn fault(&mut self, _: Instant, cable: CableId, fault: &Fault) {
        let sender = self.cast.ends(cable, fault.direction).map(|[sender, _]| sender);
        Ladders::fault(self, sender, fault);
    }
}

/// An end of a connection: its host, and its queue pair where known.
type End = Option<(IpAddr, Option<Qpn>)>;

/// A step whose words may still change.
enum Draft {
    /// Packets that continue each other.
    Packets(usize, Vec<(i64, Sent)>),
    /// State changes that the application asked for, one after the other.
    States(usize, i64, Vec<State>),
    /// Anything else, with the end it is at.
    Done(usize, Step),
}

struct Connection {
    ends: [End; 2],
    drafts: Vec<Draft>,
    /// When it was first heard of, among all facts.
    rank: Option<usize>,
}

#[derive(Default)]
struct Works {
    count: u64,
    /// Those under way: id, number, name.
    open: Vec<(u64, u64, String)>,
}

/// Sorts facts into connections.
struct Sorter<'a> {
    cast: &'a Cast,
    flows: &'a Flows,
    connections: Vec<Connection>,
    /// The connection of each flow.
    of_flow: Vec<usize>,
    /// The connection that a queue pair was last heard in.
    current: BTreeMap<Endpoint, usize>,
    of_host: BTreeMap<IpAddr, usize>,
    works: BTreeMap<Endpoint, Works>,
    /// Why the last completion of a queue pair failed.
    failures: BTreeMap<Endpoint, Reason>,
    facts: usize,
}

impl<'a> Sorter<'a> {
    fn new(cast: &'a Cast, flows: &'a Flows) -> Sorter<'a> {
        let mut sorter = Sorter {
            cast,
            flows,
            connections: Vec::new(),
            of_flow: Vec::new(),
            current: BTreeMap::new(),
            of_host: BTreeMap::new(),
            works: BTreeMap::new(),
            failures: BTreeMap::new(),
            facts: 0,
        };
        for (index, flow) in flows.iter().enumerate() {
            let connection = match flows.reverse(index).filter(|other| *other < index) {
                Some(other) => sorter.of_flow[other],
                None => sorter
                    .connect([Some((flow.from, flow.from_qp)), Some((flow.to.address, Some(flow.to.qpn)))]),
            };
            sorter.of_flow.push(connection);
        }
        sorter
    }

    fn connect(&mut self, ends: [End; 2]) -> usize {
        let index = self.connections.len();
        self.connections.push(Connection { ends, drafts: Vec::new(), rank: None });
        for (address, qpn) in ends.into_iter().flatten() {
            if let Some(qpn) = qpn {
                self.current.entry(Endpoint { address, qpn }).or_insert(index);
            }
        }
        index
    }

    /// The connection that a queue pair is in, and which of its ends it is.
    fn place(&mut self, at: Endpoint) -> (usize, usize) {
        let known = self.current.get(&at).copied();
        let index = known.unwrap_or_else(|| {
            let peer = self.cast.peer(at).map(|peer| (peer.address, Some(peer.qpn)));
            self.connect([Some((at.address, Some(at.qpn))), peer])
        });
        let is_second = self.connections[index].ends[0] != Some((at.address, Some(at.qpn)));
        (index, usize::from(is_second))
    }

    fn zeros(&self, at: Endpoint, connection: usize) -> Zeros {
        let mut zeros = Zeros { own: self.cast.first_psn(at), peer: None };
        for (index, flow) in self.flows.iter().enumerate() {
            if self.of_flow[index] != connection {
                continue;
            }
            if (flow.from, flow.from_qp) == (at.address, Some(at.qpn)) {
                zeros.own = zeros.own.or(self.flows.zero(index, true, self.cast));
                zeros.peer = zeros.peer.or(self.flows.zero(index, false, self.cast));
            } else if flow.to == at {
                zeros.peer = self.flows.zero(index, true, self.cast).or(zeros.peer);
            }
        }
        zeros
    }

    fn draft(&mut self, connection: usize, draft: Draft) {
        self.facts += 1;
        let connection = &mut self.connections[connection];
        connection.rank.get_or_insert(self.facts);
        match (connection.drafts.last_mut(), draft) {
            (Some(Draft::Packets(end, run)), Draft::Packets(other, next))
                if *end == other && run[run.len() - 1].1.continues_with(&next[0].1) =>
            {
                run.extend(next);
            }
            (Some(Draft::States(end, _, chain)), Draft::States(other, _, next))
                if *end == other && chain.last() == next.first() =>
            {
                chain.extend(&next[1..]);
            }
            (_, draft) => connection.drafts.push(draft),
        }
    }

    fn note(&mut self, (connection, end): (usize, usize), time_ns: i64, bar: i32, tone: Tone, text: String) {
        let mut bars = [0; 2];
        bars[end] = bar;
        // The side is settled when all ends are known.
        let step = Step { time_ns, side: Side::Left, bars, tone, sight: Sight::Note(text) };
        self.draft(connection, Draft::Done(end, step));
    }

    fn sent(&mut self, time_ns: i64, sent: &Sent) {
        let flow = self.flows.get(sent.flow);
        let connection = self.of_flow[sent.flow];
        let end = usize::from(self.connections[connection].ends[0] != Some((flow.from, flow.from_qp)));
        if let Some(qpn) = flow.from_qp {
            self.current.insert(Endpoint { address: flow.from, qpn }, connection);
        }
        self.current.insert(flow.to, connection);
        self.of_host.insert(flow.from, connection);
        self.of_host.insert(flow.to.address, connection);
        self.draft(connection, Draft::Packets(end, vec![(time_ns, sent.clone())]));
    }

    fn told(&mut self, time_ns: i64, address: IpAddr, event: &Event) {
        let qpn = tell::queue_pair(event).filter(|qpn| *qpn != Qpn::default());
        let Some(qpn) = qpn else {
            // About the host as a whole: told where that was last heard.
            let Some(connection) = self.of_host.get(&address).copied() else { return };
            let ends = &self.connections[connection].ends;
            let is_second = ends[0].is_none_or(|(first, _)| first != address);
            let Some((tone, text)) = tell::sentence(event, Zeros::default(), time_ns) else { return };
            return self.note((connection, usize::from(is_second)), time_ns, 0, tone, text);
        };
        let at = Endpoint { address, qpn };
        let place = self.place(at);
        let zeros = self.zeros(at, place.0);
        let (bar, tone, text) = match *event {
            Event::StateChanged { from, to, reason: Reason::Asked, .. } => {
                return self.draft(place.0, Draft::States(place.1, time_ns, vec![from, to]));
            }
            Event::StateChanged { from, to, reason, .. } => {
                let why = match reason {
                    Reason::None => String::new(),
                    // The refusal, or the completion that failed with it, has been told right before.
                    Reason::Refused(_) => String::new(),
                    reason if self.failures.get(&at) == Some(&reason) => String::new(),
                    reason => format!(": {}", tell::reason_text(reason, zeros)),
                };
                (0, Tone::Bad, format!("{from} → {to}{why}"))
            }
            Event::WorkStarted { id, operation, bytes, packets, .. } => {
                let works = self.works.entry(at).or_default();
                works.count += 1;
                let name = operation.name().to_uppercase();
                works.open.push((id, works.count, name.clone()));
                let size = match packets {
                    0 => String::new(),
                    1 => format!(", {bytes} B"),
                    _ => format!(", {bytes} B in {packets} packets"),
                };
                (1, Tone::Plain, format!("{name} #{}{size}", works.count))
            }
            Event::Completed { completion, reason, .. } => {
                self.failures.insert(at, reason);
                let (tone, outcome) = tell::outcome(&completion, reason, zeros);
                let (bar, name) = self.end_work(at, completion.id, completion.operation.is_receive());
                let name = name.unwrap_or_else(|| completion.operation.name().to_uppercase());
                (bar, tone, format!("{name}: {outcome}"))
            }
            Event::Retired { id, .. } => {
                let (bar, name) = self.end_work(at, id, false);
                let name = name.unwrap_or_else(|| "work request".into());
                (bar, Tone::Good, format!("{name}: done, no completion wanted"))
            }
            _ => match tell::sentence(event, zeros, time_ns) {
                Some((tone, text)) => (0, tone, text),
                None => return,
            },
        };
        self.note(place, time_ns, bar, tone, text);
    }

    /// Ends the oldest work request with this id: how the bar changes, and what it was called.
    fn end_work(&mut self, at: Endpoint, id: u64, is_receive: bool) -> (i32, Option<String>) {
        let works = self.works.entry(at).or_default();
        let found = works.open.iter().position(|work| work.0 == id).filter(|_| !is_receive);
        match found.map(|index| works.open.remove(index)) {
            Some((_, number, name)) => (-1, Some(format!("{name} #{number}"))),
            None => (0, None),
        }
    }

    fn ladders(self) -> Vec<Ladder> {
        let Sorter { cast, flows, mut connections, .. } = self;
        connections.retain(|connection| connection.rank.is_some());
        connections.sort_by_key(|connection| connection.rank);
        connections.into_iter().map(|connection| finish(connection, cast, flows)).collect()
    }
}

/// Puts whoever is heard first on the left, and settles the words.
fn finish(connection: Connection, cast: &Cast, flows: &Flows) -> Ladder {
    let Connection { ends, drafts, .. } = connection;
    let first = match drafts.first() {
        Some(Draft::Packets(end, _) | Draft::States(end, ..) | Draft::Done(end, _)) => *end,
        None => 0,
    };
    let side = |end: usize| if end == first { Side::Left } else { Side::Right };
    let turn = |bars: [i32; 2]| if first == 0 { bars } else { [bars[1], bars[0]] };
    let mut steps = Vec::new();
    for draft in drafts {
        match draft {
            Draft::Done(end, step) => {
                steps.push(Step { side: side(end), bars: turn(step.bars), ..step });
            }
            Draft::States(end, time_ns, chain) => {
                let names: Vec<_> = chain.iter().map(|state| state.name()).collect();
                let sight = Sight::Note(names.join(" → "));
                steps.push(Step { time_ns, side: side(end), bars: [0; 2], tone: Tone::Plain, sight });
            }
            Draft::Packets(end, run) => {
                // A few are shown one by one; more are a crowd.
                const CROWD: usize = 4;
                let size = if run.len() < CROWD { 1 } else { run.len() };
                for alike in run.chunks(size) {
                    let mut step = arrow(alike, flows, cast);
                    let [own, other] = step.bars;
                    step.side = side(end);
                    step.bars = if step.side == Side::Left { [own, other] } else { [other, own] };
                    steps.push(step);
                }
            }
        }
    }
    let ends = if first == 0 { ends } else { [ends[1], ends[0]] };
    let name = |end: End| end.map_or(String::new(), |(address, qpn)| cast.heading(address, qpn));
    Ladder { names: ends.map(name), numbers: ends.map(|end| end.and_then(|(_, qpn)| qpn)), steps }
}

pub(super) fn arrow(alike: &[(i64, Sent)], flows: &Flows, cast: &Cast) -> Step {
    let (time_ns, sent) = &alike[0];
    let last = (alike.len() > 1).then(|| alike[alike.len() - 1].1.psn);
    let zero = flows.zero(sent.flow, sent.opcode.operation().is_request(), cast);
    let damaged = sent.extra.as_ref().is_some_and(|extra| extra.damaged);
    let tone = match () {
        () if sent.is_refusal() || damaged || sent.lost => Tone::Bad,
        () if sent.again || !sent.remarks.is_empty() => Tone::Odd,
        () => Tone::Plain,
    };
    Step {
        time_ns: *time_ns,
        side: Side::Left,
        bars: sent.bars,
        tone,
        sight: Sight::Arrow {
            label: sent.label(zero, last),
            detail: sent.detail(alike.len()),
            remark: sent.remarks.join("; "),
            fate: if sent.lost { Fate::Lost } else { Fate::Arrives },
        },
    }
}
