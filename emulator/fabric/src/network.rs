//! What lies between hosts: cables, switches, and the ports of hosts, under one agenda.
//!
//! A network moves frames from node to node; it knows no card. Whoever owns it lets things happen in their
//! order, hands frames in and takes frames out: [`crate::World`] under a virtual clock, [`crate::Fabric`] under
//! any other.

use crate::agenda::{Agenda, Happening};
use crate::fabric_event::Culprit;
use crate::observer::{Observer, Stage};
use crate::receiver::HostPort;
use crate::slots::{NONE, Slot};
use crate::switch::Switch;
use crate::{
    Cable, CableId, Content, Direction, End, FabricEvent, Fault, Flows, Frame, HostId, Layout, Ledger, Line,
    LossCause, Node, Outlet, Seed, SwitchId, SwitchSettings,
};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::hint::black_box;
use core::net::{IpAddr, Ipv4Addr};
use softhca_engine::Instant;
use softhca_wire::{Envelope, Pfc};

/// Who has which address.
#[derive(Default)]
pub(crate) struct Addresses {
    all: BTreeMap<IpAddr, HostId>,
    /// Where the address of the first host plus `n` is that of host `n`, no search is needed.
    first: Option<Ipv4Addr>,
    in_order: u32,
}

impl Addresses {
    fn insert(&mut self, address: IpAddr, host: HostId) {
        self.all.insert(address, host);
        if let (IpAddr::V4(address), 0) = (address, host.0) {
            self.first = Some(address);
        }
        let expected = self.first.map(|first| Ipv4Addr::from(first.to_bits().wrapping_add(host.0)));
        if self.in_order == host.0 && expected.map(IpAddr::V4) == Some(address) {
            self.in_order += 1;
        }
    }

    #[inline]
    pub fn find(&self, address: IpAddr) -> Option<HostId> {
        if let (IpAddr::V4(address), Some(first)) = (address, self.first) {
            let index = address.to_bits().wrapping_sub(first.to_bits());
            if index < self.in_order {
                return Some(HostId(index));
            }
        }
        self.all.get(&address).copied()
    }
}

/// What a cable ends in. Every frame that arrives asks for it, hence apart from the cable.
pub(crate) struct Link {
    pub ends: [Node; 2],
    /// The port of the switch at each end.
    pub ports: [u16; 2],
}

/// What came of something that happened, for the owner of the network.
pub(crate) enum Output {
    Nothing,
    /// A frame reached a host; whoever takes it frees its slot.
    Arrived {
        host: HostId,
        slot: u32,
    },
    /// Other priorities of a host are stopped than before; so many pause frames did that.
    Paused {
        host: HostId,
        frames: u64,
    },
}

pub(crate) struct Network {
    pub seed: Seed,
    pub hosts: Vec<HostPort>,
    pub cables: Vec<Cable>,
    /// What each cable ends in.
    pub links: Vec<Link>,
    pub switches: Vec<Switch>,
    pub flows: Flows,
    pub addresses: Addresses,
    /// Routes that were set by hand: at a switch, to a host, over these ports.
    pub pinned: BTreeMap<(SwitchId, HostId), Vec<u16>>,
    pub agenda: Agenda,
    pub routes_are_stale: bool,
    /// Frames that reached a host, and pause frames that reached a switch.
    arrived: u64,
    /// Frames that were lost in switches and at hosts.
    lost: u64,
    /// Frames that switches put on cables though hosts had sent them.
    forwarded: u64,
    /// Copies of datagrams for groups that switches made.
    copied: u64,
}

/// What came of laying out a topology, in the order of its layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Laid {
    /// The switches.
    pub switches: Vec<SwitchId>,
    /// The cables.
    pub cables: Vec<CableId>,
}

/// Stands for the flow that a packet belongs to: addresses and ports.
fn flow_of(envelope: &Envelope) -> u64 {
    let port = u64::from(envelope.source_port);
    match (envelope.source, envelope.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let addresses = u64::from(source.to_bits()) << 32 | u64::from(destination.to_bits());
            Seed(addresses).draw(&[port])
        }
        (source, destination) => {
            let words = |address: IpAddr| match address {
                IpAddr::V4(v4) => [0, u64::from(v4.to_bits())],
                IpAddr::V6(v6) => [(v6.to_bits() >> 64) as u64, v6.to_bits() as u64],
            };
            let ([a, b], [c, d]) = (words(source), words(destination));
            Seed(port).draw(&[a, b, c, d])
        }
    }
}

/// How many frames went where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Frames that hosts put on cables, duplicates that rules made, pause frames and copies that switches made.
    pub admitted: u64,
    /// Frames that reached a host, and pause frames that reached a switch.
    pub delivered: u64,
    /// Frames that were lost.
    pub dropped: u64,
    /// Frames that are on their way, queued and held-back ones included.
    pub in_flight: u64,
}

impl Census {
    /// Nothing appeared and nothing vanished.
    pub const fn balances(&self) -> bool {
        self.admitted == self.delivered + self.dropped + self.in_flight
    }
}

impl Network {
    pub fn new(seed: Seed) -> Network {
        Network {
            seed,
            hosts: Vec::new(),
            cables: Vec::new(),
            links: Vec::new(),
            switches: Vec::new(),
            flows: Flows::new(),
            addresses: Addresses::default(),
            pinned: BTreeMap::new(),
            agenda: Agenda::default(),
            routes_are_stale: false,
            arrived: 0,
            lost: 0,
            forwarded: 0,
            copied: 0,
        }
    }

    pub fn add_host(&mut self, address: IpAddr) -> HostId {
        let id = self.add_port(address);
        self.addresses.insert(address, id);
        id
    }

    /// A port that nothing is sent to: it has no place among the addresses.
    pub fn add_port(&mut self, address: IpAddr) -> HostId {
        let id = HostId(self.hosts.len() as u32);
        self.hosts.push(HostPort::new(address));
        self.routes_are_stale = true;
        id
    }

    pub fn add_switch(&mut self, name: &str, settings: SwitchSettings) -> SwitchId {
        let id = SwitchId(self.switches.len() as u32);
        let salt = self.seed.draw(&[0x7377_6974_6368, id.0.into()]);
        self.switches.push(Switch::new(name, settings, salt));
        id
    }

    pub fn add_cable(&mut self, ends: [Node; 2], line: Line) -> CableId {
        let id = CableId(self.links.len() as u32);
        let mut ports = [0; 2];
        for (at, direction) in [Direction::Forward, Direction::Backward].into_iter().enumerate() {
            match (ends[at], ends[1 - at]) {
                (Node::Switch(switch), _) => {
                    ports[at] = self.switches[switch.0 as usize].add_port(id, direction);
                }
                (Node::Host(here), there) => {
                    self.hosts[here.0 as usize].connect((id, direction), there);
                }
            }
        }
        self.cables.push(Cable::new(self.seed, line));
        self.links.push(Link { ends, ports });
        self.routes_are_stale = true;
        id
    }

    /// Connects hosts as a layout says.
    pub fn lay(&mut self, layout: &Layout, hosts: &[HostId], line: Line, settings: SwitchSettings) -> Laid {
        assert!(hosts.len() >= layout.hosts as usize, "{} hosts for {}", hosts.len(), layout.hosts);
        let switches: Vec<_> = layout.switches.iter().map(|name| self.add_switch(name, settings)).collect();
        let node = |end| match end {
            End::Host(host) => Node::Host(hosts[host as usize]),
            End::Switch(switch) => Node::Switch(switches[switch as usize]),
        };
        let cables: Vec<_> = layout.cables.iter().map(|ends| self.add_cable(ends.map(node), line)).collect();
        for (switch, host, cable) in &layout.routes {
            self.set_route(switches[*switch as usize], hosts[*host as usize], &[cables[*cable]]);
        }
        Laid { switches, cables }
    }

    pub fn set_route(&mut self, switch: SwitchId, host: HostId, cables: &[CableId]) {
        let ports = self.switches[switch.0 as usize].ports.iter().zip(0..);
        let ports = ports.filter(|(port, _)| cables.contains(&port.cable)).map(|(_, port)| port).collect();
        self.pinned.insert((switch, host), ports);
        self.routes_are_stale = true;
    }

    /// Reads a word of what the next thing is going to ask for, and of what follows it. In a large network many things
    /// happen within one nanosecond, each somewhere else: while one happens, the memory of the next is on its way.
    /// The host that comes next, if it is one.
    pub fn look_ahead(&mut self, slot: u32) -> Option<HostId> {
        let Slot { happening, next, host: to, .. } = *self.agenda.slots.at(slot);
        if next != NONE {
            black_box(self.agenda.slots.at(next).serial);
        }
        match happening {
            Happening::Arrival { cable, direction, .. } => {
                let Link { ends, ports } = &self.links[cable.0 as usize];
                let end = direction.reverse() as usize;
                match ends[end] {
                    Node::Switch(switch) => {
                        let switch = &self.switches[switch.0 as usize];
                        black_box(switch.ports[usize::from(ports[end])].received_frames);
                        black_box(switch.routes.by_host.get(to as usize).copied());
                        None
                    }
                    Node::Host(host) => {
                        self.agenda.slots.touch_frame(slot);
                        Some(host)
                    }
                }
            }
            Happening::PortLine { switch, port } => {
                black_box(self.switches[switch.0 as usize].ports[usize::from(port)].occupied);
                None
            }
            Happening::HostLine { host } | Happening::HostTimer { host } => Some(host),
            _ => None,
        }
    }

    /// Lets something happen. What is the business of hosts only is not done here.
    pub fn happen(&mut self, now: Instant, happening: Happening, observer: &mut dyn Observer) -> Output {
        match happening {
            Happening::Arrival { slot, cable, direction } => {
                return self.arrive(now, slot, cable, direction, observer);
            }
            Happening::HostPauseOver { host } => return self.end_host_pauses(now, host, observer),
            Happening::Drain { host } => return self.drain(now, host, observer),
            Happening::PortLine { switch, port } => {
                self.switches[switch.0 as usize].ports[usize::from(port)].waits = false;
                self.serve(now, switch, port, observer);
            }
            Happening::Held { cable } => {
                self.through(now, cable, observer, |cable, _, outlet| cable.expire(now.nanos(), outlet));
            }
            Happening::PauseOver { switch, port } => self.end_pauses(now, switch, port, observer),
            Happening::Refresh { switch, port, priority } => {
                self.refresh(now, switch, port, priority, observer);
            }
            Happening::Watch { switch, port, priority } => self.watch(now, switch, port, priority, observer),
            Happening::HostRefresh { host, priority } => self.refresh_host(now, host, priority, observer),
            Happening::HostWatch { host, priority } => self.watch_host(now, host, priority, observer),
            Happening::HostLine { .. } | Happening::HostTimer { .. } | Happening::Looped => {}
        }
        Output::Nothing
    }

    /// The node that a direction of a cable starts at.
    pub fn start_of(&self, cable: CableId, direction: Direction) -> Node {
        self.links[cable.0 as usize].ends[direction as usize]
    }

    /// When every line of a host has room: a host with several cables sends at the pace of its slowest.
    pub fn host_free_at(&self, host: HostId) -> u64 {
        let HostPort { only, cables, .. } = &self.hosts[host.0 as usize];
        let free_at =
            |(cable, direction): (CableId, Direction)| self.cables[cable.0 as usize].free_at_ns(direction);
        match *only {
            Some(only) => free_at(only),
            None => cables.iter().copied().map(free_at).max().unwrap_or(0),
        }
    }

    /// Takes a frame that a host sends to others. A frame for nobody's address goes nowhere, as on a network
    /// without a route.
    pub fn send(&mut self, now: Instant, from: HostId, frame: Frame, observer: &mut dyn Observer) {
        if self.routes_are_stale {
            self.find_routes();
        }
        let destination = frame.envelope.destination;
        if destination.is_multicast() {
            for (cable, direction) in self.hosts[from.0 as usize].cables.clone() {
                let slot = self.agenda.slots.insert(frame.clone(), Slot::EVERYBODY, 0);
                self.put(now, cable, direction, slot, Stage::Admitted, observer);
            }
            return;
        }
        let flow = flow_of(&frame.envelope);
        if let Some((to, (cable, direction))) = self.way(from, destination, flow) {
            let slot = self.agenda.slots.insert(frame, to.0, flow);
            self.put(now, cable, direction, slot, Stage::Admitted, observer);
        }
    }

    /// Takes a frame that a host sends to another.
    pub fn send_bytes(
        &mut self,
        now: Instant,
        from: HostId,
        (envelope, bytes): (&Envelope, &[u8]),
        content: Content,
        service_level: u8,
        observer: &mut dyn Observer,
    ) {
        if self.routes_are_stale {
            self.find_routes();
        }
        let flow = flow_of(envelope);
        if let Some((to, (cable, direction))) = self.way(from, envelope.destination, flow) {
            let slot = self.agenda.slots.fill(envelope, bytes, content, service_level, to.0, flow);
            self.put(now, cable, direction, slot, Stage::Admitted, observer);
        }
    }

    /// Who has an address, and by which cable a host sends to it.
    fn way(&self, from: HostId, destination: IpAddr, flow: u64) -> Option<(HostId, (CableId, Direction))> {
        let port = &self.hosts[from.0 as usize];
        let to = self.addresses.find(destination)?;
        if let Some(only) = port.only {
            return Some((to, only));
        }
        let way = match port.direct.get(&to) {
            Some(way) => *way,
            None if port.uplinks.len() < 2 => *port.uplinks.first()?,
            None => port.uplinks[Seed(0).below(port.uplinks.len() as u64, &[flow]) as usize],
        };
        Some((to, way))
    }

    /// Takes a frame for a host at one of a cable's ends.
    pub fn send_over(
        &mut self,
        now: Instant,
        (cable, direction): (CableId, Direction),
        to: HostId,
        frame: Frame,
        observer: &mut dyn Observer,
    ) {
        if self.routes_are_stale {
            self.find_routes();
        }
        let flow = flow_of(&frame.envelope);
        let slot = self.agenda.slots.insert(frame, to.0, flow);
        self.put(now, cable, direction, slot, Stage::Admitted, observer);
    }

    /// Puts a frame on a cable.
    pub fn put(
        &mut self,
        now: Instant,
        cable: CableId,
        direction: Direction,
        slot: u32,
        stage: Stage,
        observer: &mut dyn Observer,
    ) {
        self.show(now, cable, direction, stage, slot, observer);
        let Slot { bytes, is_pause, .. } = *self.agenda.slots.at(slot);
        let line = &mut self.cables[cable.0 as usize];
        if let Some(at) = line.pass(now.nanos(), direction, bytes as usize, is_pause) {
            return self.agenda.push(at, Happening::Arrival { slot, cable, direction });
        }
        let frame = self.agenda.slots.remove(slot);
        self.through(now, cable, observer, |cable, flows, outlet| {
            cable.admit(now.nanos(), direction, frame, flows, outlet);
        });
    }

    /// Calls `act` with a cable and takes what comes out of it.
    pub fn through(
        &mut self,
        now: Instant,
        id: CableId,
        observer: &mut dyn Observer,
        act: impl FnOnce(&mut Cable, &Flows, &mut dyn Outlet),
    ) {
        let Network { cables, flows, agenda, addresses, .. } = self;
        let cable = &mut cables[id.0 as usize];
        act(cable, flows, &mut Exit { id, now, agenda, addresses, observer });
        if let Some(at) = cable.next_timeout() {
            self.agenda.push(at, Happening::Held { cable: id });
        }
    }

    /// A frame comes out of a cable.
    pub fn arrive(
        &mut self,
        now: Instant,
        slot: u32,
        cable: CableId,
        direction: Direction,
        observer: &mut dyn Observer,
    ) -> Output {
        let link = &self.links[cable.0 as usize];
        let end = direction.reverse() as usize;
        match link.ends[end] {
            Node::Switch(switch) => {
                let port = link.ports[end];
                self.arrive_at_switch(now, switch, port, slot, observer);
                Output::Nothing
            }
            Node::Host(host) => {
                self.show(now, cable, direction, Stage::Delivered, slot, observer);
                self.arrive_at_host(now, host, cable, slot, observer)
            }
        }
    }

    /// A frame is where it was to go; whoever takes it frees its slot.
    pub fn note_arrived(&mut self) {
        self.arrived += 1;
    }

    /// Loses a frame.
    pub fn lose(
        &mut self,
        now: Instant,
        at: Node,
        cable: CableId,
        slot: u32,
        cause: LossCause,
        observer: &mut dyn Observer,
    ) {
        self.lost += 1;
        let frame = self.agenda.slots.frame(slot);
        let (priority, culprit) = (frame.priority(), Culprit::of(frame));
        observer.fabric(now, &FabricEvent::Lost { at, cable, priority, cause, culprit });
        self.agenda.slots.release(slot);
    }

    pub fn note_forwarded(&mut self) {
        self.forwarded += 1;
    }

    pub fn note_copied(&mut self, copies: u64) {
        self.copied += copies;
    }

    /// Sends a pause frame over a cable.
    pub fn send_pause(
        &mut self,
        now: Instant,
        cable: CableId,
        direction: Direction,
        pause: &Pfc,
        observer: &mut dyn Observer,
    ) {
        let slot = self.agenda.slots.insert(Frame::pause(pause), 0, 0);
        self.put(now, cable, direction, slot, Stage::Admitted, observer);
    }

    /// How many frames went where.
    pub fn census(&self) -> Census {
        let mut census = Census {
            delivered: self.arrived,
            dropped: self.lost,
            in_flight: self.agenda.slots.frames() as u64,
            admitted: self.copied,
        };
        for cable in &self.cables {
            for direction in [Direction::Forward, Direction::Backward] {
                let Ledger { admitted, duplicated, dropped, held, .. } = cable.ledger(direction);
                census.admitted += admitted + duplicated;
                census.dropped += dropped;
                census.in_flight += held;
            }
        }
        census.admitted -= self.forwarded;
        census
    }

    /// Shows a frame to whoever looks.
    #[inline]
    fn show(
        &mut self,
        now: Instant,
        cable: CableId,
        direction: Direction,
        stage: Stage,
        slot: u32,
        observer: &mut dyn Observer,
    ) {
        if observer.looks() {
            self.show_frame(now, cable, direction, stage, slot, observer);
        }
    }

    /// Shows a frame, or the pause that it asks for.
    fn show_frame(
        &mut self,
        now: Instant,
        cable: CableId,
        direction: Direction,
        stage: Stage,
        slot: u32,
        observer: &mut dyn Observer,
    ) {
        let frame = self.agenda.slots.frame(slot);
        match (frame.content, frame.as_pause()) {
            (Content::Pause, Some(pause)) => observer.pause(now, cable, direction, stage, &pause),
            (Content::Pause, None) => {}
            _ => observer.frame(now, cable, direction, stage, frame),
        }
    }
}

/// Where a cable's frames come out: the agenda.
struct Exit<'a> {
    id: CableId,
    now: Instant,
    agenda: &'a mut Agenda,
    addresses: &'a Addresses,
    observer: &'a mut dyn Observer,
}

impl Outlet for Exit<'_> {
    fn deliver(&mut self, at_ns: u64, direction: Direction, frame: Frame) {
        let destination = frame.envelope.destination;
        let host = match destination.is_multicast() {
            true => Slot::EVERYBODY,
            false => self.addresses.find(destination).map_or(Slot::EVERYBODY - 1, |host| host.0),
        };
        let flow = flow_of(&frame.envelope);
        let slot = self.agenda.slots.insert(frame, host, flow);
        self.agenda.push(at_ns, Happening::Arrival { slot, cable: self.id, direction });
    }

    fn report(&mut self, fault: Fault) {
        self.observer.fault(self.now, self.id, &fault);
    }
}
