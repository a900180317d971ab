//! Hosts and cables under a virtual clock.
//!
//! Everything that will happen is in one heap, ordered by time and then by the order in which it was
//! scheduled; the same script and seed therefore give the same bytes and events on every machine.

use crate::host::{Host, HostId};
use crate::verbs::Verbs;
use crate::{Cable, Direction, Fault, Flows, Frame, Ledger, Line, Outlet, Rule, Seed, Store};
use alloc::boxed::Box;
use alloc::collections::{BinaryHeap, VecDeque};
use alloc::rc::Rc;
use alloc::vec;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::cmp::Reverse;
use core::net::{IpAddr, Ipv4Addr};
use softhca_engine::{Context, Event, Instant, Settings};
use softhca_wire::{Icrc, Psn};

/// Names a cable of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CableId(pub u32);

/// Where on its way a frame is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It leaves a host and enters the cable, before any fault.
    Admitted,
    /// It comes out of the cable and reaches a host.
    Delivered,
}

/// Sees what happens in a world. Every method does nothing unless it is written.
pub trait Observer {
    /// A card told an event.
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        let _ = (now, host, event);
    }

    /// A frame went by.
    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        let _ = (now, cable, direction, stage, frame);
    }

    /// A rule, or the state of a link, did something to a frame.
    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        let _ = (now, cable, fault);
    }
}

impl Observer for () {}

/// Shown to several, in order.
impl Observer for Vec<Box<dyn Observer>> {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        self.iter_mut().for_each(|observer| observer.card(now, host, event));
    }

    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        self.iter_mut().for_each(|observer| observer.frame(now, cable, direction, stage, frame));
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        self.iter_mut().for_each(|observer| observer.fault(now, cable, fault));
    }
}

/// Shown to one that somebody else keeps, to ask it afterwards.
impl<O: Observer> Observer for Rc<RefCell<O>> {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        self.borrow_mut().card(now, host, event);
    }

    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        self.borrow_mut().frame(now, cable, direction, stage, frame);
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        self.borrow_mut().fault(now, cable, fault);
    }
}

/// Shown to whatever is in the box.
impl<O: Observer + ?Sized> Observer for Box<O> {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        (**self).card(now, host, event);
    }

    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        (**self).frame(now, cable, direction, stage, frame);
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        (**self).fault(now, cable, fault);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Arrival {
        slot: u32,
        host: HostId,
        cable: CableId,
        direction: Direction,
    },
    Line {
        host: HostId,
    },
    Timer {
        host: HostId,
    },
    Held {
        cable: CableId,
    },
    /// The oldest frame that a host sent to itself comes back.
    Looped,
}

/// A cable and the hosts at its two ends.
struct Link {
    cable: Cable,
    ends: [HostId; 2],
}

/// How many frames went where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Frames that hosts put on cables, and duplicates that rules made.
    pub admitted: u64,
    /// Frames that reached a host.
    pub delivered: u64,
    /// Frames that were lost.
    pub dropped: u64,
    /// Frames that are on their way, held-back ones included.
    pub in_flight: u64,
}

impl Census {
    /// Nothing appeared and nothing vanished.
    pub const fn balances(&self) -> bool {
        self.admitted == self.delivered + self.dropped + self.in_flight
    }
}

/// Hosts and cables under a virtual clock, seen by an observer.
pub struct World<O: Observer = Box<dyn Observer>> {
    now: Instant,
    seed: u64,
    hosts: Vec<Host>,
    links: Vec<Link>,
    flows: Flows,
    agenda: BinaryHeap<Reverse<(u64, u64, Happening)>>,
    serial: u64,
    /// Frames on their way, and their places that are free.
    frames: Vec<Option<Frame>>,
    free: Vec<u32>,
    arrivals: u64,
    /// Buffers of frames that have arrived.
    buffers: Vec<Vec<u8>>,
    observer: O,
    /// Frames that a host sent to itself, oldest first: they pass no cable.
    looped: VecDeque<(HostId, Frame)>,
    scratch: Vec<u8>,
}

/// The most that one frame takes: the largest path MTU and the largest headers.
const FRAME: usize = 4096 + 128;

impl World {
    /// An empty world. The seed decides queue pair numbers, keys and every probability.
    pub fn new(seed: u64) -> World {
        World::observed(seed, Box::new(()))
    }

    /// Shows everything from now on to `observer`.
    pub fn observe(&mut self, observer: impl Observer + 'static) {
        self.observer = Box::new(observer);
    }

    /// The verbs of a host's application.
    pub fn on(&mut self, host: HostId) -> Verbs<'_> {
        Verbs { world: self, id: host }
    }
}

impl<O: Observer> World<O> {
    /// An empty world that shows everything to `observer`: one that may change threads makes a world that may.
    pub fn observed(seed: u64, observer: O) -> World<O> {
        World {
            now: Instant::ZERO,
            seed,
            hosts: Vec::new(),
            links: Vec::new(),
            flows: Flows::new(),
            agenda: BinaryHeap::new(),
            serial: 0,
            frames: Vec::new(),
            free: Vec::new(),
            arrivals: 0,
            buffers: Vec::new(),
            observer,
            looped: VecDeque::new(),
            scratch: vec![0; FRAME],
        }
    }

    /// The observer.
    pub fn observer(&mut self) -> &mut O {
        &mut self.observer
    }

    /// The time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Adds a host at 10.0.0.N, N counting from 1.
    pub fn add_host(&mut self, name: &str, settings: Settings) -> HostId {
        let n = self.hosts.len() as u32 + 1;
        let address = IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + n));
        self.add_host_at(name, address, settings)
    }

    /// Adds a host with this address.
    pub fn add_host_at(&mut self, name: &str, address: IpAddr, mut settings: Settings) -> HostId {
        let id = HostId(self.hosts.len() as u32);
        settings.seed = Seed(self.seed).draw(&[0x686f_7374, u64::from(id.0)]);
        self.hosts.push(Host::new(name, address, settings));
        id
    }

    /// A host.
    ///
    /// # Panics
    /// If the id is of another world.
    pub fn host(&self, id: HostId) -> &Host {
        &self.hosts[id.0 as usize]
    }

    /// Every host, in the order in which they were added.
    pub fn hosts(&self) -> impl Iterator<Item = (HostId, &Host)> {
        self.hosts.iter().enumerate().map(|(index, host)| (HostId(index as u32), host))
    }

    /// Lays a cable between two hosts; its forward direction leads from `first` to `second`.
    pub fn add_cable(&mut self, first: HostId, second: HostId, line: Line) -> CableId {
        let id = CableId(self.links.len() as u32);
        self.links.push(Link { cable: Cable::new(Seed(self.seed), line), ends: [first, second] });
        for (here, there, direction) in
            [(first, second, Direction::Forward), (second, first, Direction::Backward)]
        {
            let address = self.host(there).address;
            let host = &mut self.hosts[here.0 as usize];
            host.cables.push((id, direction));
            host.routes.insert(address, (id, direction));
        }
        id
    }

    /// A cable.
    pub fn cable(&self, id: CableId) -> &Cable {
        &self.links[id.0 as usize].cable
    }

    /// A cable, to change its line, its links or its rules.
    pub fn cable_mut(&mut self, id: CableId) -> &mut Cable {
        &mut self.links[id.0 as usize].cable
    }

    /// The hosts at the two ends of a cable, if there is such a cable.
    pub fn ends_of(&self, id: CableId) -> Option<[HostId; 2]> {
        self.links.get(id.0 as usize).map(|link| link.ends)
    }

    /// The hosts at a cable's two ends.
    pub fn ends(&self, id: CableId) -> [HostId; 2] {
        self.links[id.0 as usize].ends
    }

    /// Adds a fault rule to a cable.
    pub fn add_rule(&mut self, cable: CableId, rule: Rule) {
        self.cable_mut(cable).add_rule(rule);
    }

    /// The queue pairs that rules have names for.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// The queue pairs that rules have names for, to add some.
    pub fn flows_mut(&mut self) -> &mut Flows {
        &mut self.flows
    }

    /// A number drawn from the world's seed; the same for the same words.
    pub fn draw(&self, words: &[u64]) -> u64 {
        Seed(self.seed).draw(words)
    }

    /// A PSN drawn from the world's seed.
    pub fn draw_psn(&self, words: &[u64]) -> Psn {
        Psn::new(self.draw(words) as u32)
    }

    /// Calls `act` with a host's card and a context, then lets the card hear its doorbells and send.
    pub fn with_card<R>(
        &mut self,
        id: HostId,
        act: impl FnOnce(&mut softhca_engine::Hca, &mut Context<'_>) -> R,
    ) -> R {
        let now = self.now;
        let Host { hca, store, .. } = &mut self.hosts[id.0 as usize];
        let observer = &mut self.observer;
        let mut events = |now, event: &Event| observer.card(now, id, event);
        let result = act(hca, &mut Context { now, memory: store, events: &mut events });
        self.pump(id);
        result
    }

    /// The memory behind a host's regions.
    pub fn memory(&mut self, host: HostId) -> &mut Store {
        &mut self.host_mut(host).store
    }

    pub(crate) fn host_mut(&mut self, id: HostId) -> &mut Host {
        &mut self.hosts[id.0 as usize]
    }

    /// How many frames went where.
    pub fn census(&self) -> Census {
        let mut census =
            Census { in_flight: (self.frames.len() - self.free.len()) as u64, ..Census::default() };
        for link in &self.links {
            for direction in [Direction::Forward, Direction::Backward] {
                let Ledger { admitted, duplicated, dropped, held, .. } = *link.cable.ledger(direction);
                census.admitted += admitted + duplicated;
                census.dropped += dropped;
                census.in_flight += held;
            }
        }
        census.delivered = self.arrivals;
        census
    }

    /// Goes on until nothing is left to happen, or `until` is reached. Returns whether something is left.
    ///
    /// # Panics
    /// If a frame appeared or vanished on the way: only a bug can do that.
    pub fn run_until(&mut self, until: Instant) -> bool {
        let is_left = self.go_on_until(until);
        let census = self.census();
        assert!(census.balances(), "frames appeared or vanished: {census:?}");
        is_left
    }

    fn go_on_until(&mut self, until: Instant) -> bool {
        while let Some(at) = self.next_at() {
            if at > until.nanos() {
                self.now = self.now.max(until);
                return true;
            }
            self.step();
        }
        if until.nanos() != u64::MAX {
            self.now = self.now.max(until);
        }
        false
    }

    /// Goes on until nothing is left to happen.
    pub fn run(&mut self) {
        self.run_until(Instant::from_nanos(u64::MAX));
    }

    /// When the next thing happens, if anything is left to happen.
    pub fn next_event_at(&self) -> Option<Instant> {
        self.next_at().map(Instant::from_nanos)
    }

    fn next_at(&self) -> Option<u64> {
        self.agenda.peek().map(|Reverse((at, ..))| *at)
    }

    /// Lets a host stand still until a time: its card neither sends nor hears, and what arrives waits.
    pub fn stall(&mut self, id: HostId, until: Instant) {
        let host = self.host_mut(id);
        host.stalled_until = host.stalled_until.max(until.nanos());
        // Whatever it wanted to send in the meantime, it looks again when it wakes.
        self.schedule(until.nanos(), Happening::Line { host: id });
    }

    /// Whom something happens to, if it is a host.
    fn host_of(&self, happening: &Happening) -> Option<HostId> {
        match *happening {
            Happening::Arrival { host, .. } | Happening::Line { host } | Happening::Timer { host } => {
                Some(host)
            }
            Happening::Held { .. } => None,
            Happening::Looped => self.looped.front().map(|(host, _)| *host),
        }
    }

    /// Lets the next thing happen. False if nothing is left.
    pub fn step(&mut self) -> bool {
        let Some(Reverse((at, _, happening))) = self.agenda.pop() else { return false };
        self.now = self.now.max(Instant::from_nanos(at));
        if let Some(host) = self.host_of(&happening) {
            let until = self.host(host).stalled_until;
            if until > at {
                self.schedule(until, happening);
                return true;
            }
        }
        match happening {
            Happening::Arrival { slot, host, cable, direction } => {
                let frame = self.frames[slot as usize].take().expect("a frame arrives once");
                self.free.push(slot);
                self.arrivals += 1;
                self.observer.frame(self.now, cable, direction, Stage::Delivered, &frame);
                self.arrive(host, frame);
            }
            Happening::Line { host } => {
                self.host_mut(host).port_waits = false;
                self.pump(host);
            }
            Happening::Timer { host } => {
                let waiting = &mut self.host_mut(host).wakes_at;
                if waiting.is_some_and(|due| due <= at) {
                    *waiting = None;
                    self.with_card(host, |hca, ctx| hca.expire(ctx));
                }
            }
            Happening::Held { cable } => {
                let now = self.now.nanos();
                self.through(cable, |cable, _, outlet| cable.expire(now, outlet));
            }
            Happening::Looped => {
                let (host, frame) = self.looped.pop_front().expect("each frame was scheduled once");
                self.arrive(host, frame);
            }
        }
        true
    }

    fn arrive(&mut self, host: HostId, frame: Frame) {
        self.with_card(host, |hca, ctx| match Icrc::split(&frame.bytes) {
            Ok((transport, icrc)) if Icrc::compute(&frame.envelope, transport) == icrc => {
                hca.receive(ctx, &frame.envelope, transport);
            }
            Ok(_) => hca.note_bad_icrc(ctx),
            Err(_) => hca.receive(ctx, &frame.envelope, &[]),
        });
        self.buffers.push(frame.bytes);
    }

    fn schedule(&mut self, at: u64, happening: Happening) {
        self.serial += 1;
        self.agenda.push(Reverse((at, self.serial, happening)));
    }

    /// Gives the card of a host the chance to send, and sees to its timers.
    pub(crate) fn pump(&mut self, id: HostId) {
        if self.host(id).stalled_until > self.now.nanos() {
            return;
        }
        loop {
            let now = self.now;
            let Host { hca, store, .. } = &mut self.hosts[id.0 as usize];
            let observer = &mut self.observer;
            let mut events = |now, event: &Event| observer.card(now, id, event);
            let mut ctx = Context { now, memory: store, events: &mut events };
            hca.ring(&mut ctx);
            if !hca.is_ready() {
                break;
            }
            let free_at = self.free_at(id);
            if free_at > now.nanos() {
                let host = self.host_mut(id);
                if !host.port_waits {
                    host.port_waits = true;
                    self.schedule(free_at, Happening::Line { host: id });
                }
                break;
            }
            let Host { hca, store, .. } = &mut self.hosts[id.0 as usize];
            let observer = &mut self.observer;
            let mut events = |now, event: &Event| observer.card(now, id, event);
            let mut ctx = Context { now, memory: store, events: &mut events };
            let Some(run) = hca.transmit(&mut ctx, &mut (), &mut self.scratch, 1) else { break };
            let mut bytes = self.buffers.pop().unwrap_or_default();
            bytes.clear();
            bytes.extend_from_slice(&self.scratch[..run.bytes]);
            Icrc::seal(&run.envelope, &mut bytes);
            self.send(id, Frame { envelope: run.envelope, bytes });
        }
        self.watch_timers(id);
    }

    fn watch_timers(&mut self, id: HostId) {
        let host = self.host_mut(id);
        let Some(at) = host.hca.next_timeout().map(Instant::nanos) else { return };
        if host.wakes_at.is_none_or(|waiting| at < waiting) {
            host.wakes_at = Some(at);
            self.schedule(at, Happening::Timer { host: id });
        }
    }

    /// When every line of a host has room: a host with several cables sends at the pace of its slowest.
    fn free_at(&self, id: HostId) -> u64 {
        let cables = &self.host(id).cables;
        cables.iter().map(|(cable, direction)| self.cable(*cable).free_at_ns(*direction)).max().unwrap_or(0)
    }

    fn send(&mut self, id: HostId, frame: Frame) {
        let destination = frame.envelope.destination;
        let host = self.host(id);
        if destination.is_multicast() {
            let cables = host.cables.clone();
            for (cable, direction) in cables {
                self.admit(cable, direction, frame.clone());
            }
            self.loop_back(id, frame);
        } else if destination == host.address {
            self.loop_back(id, frame);
        } else if let Some((cable, direction)) = host.routes.get(&destination).copied() {
            self.admit(cable, direction, frame);
        } else {
            // Nobody has this address: the frame goes nowhere, as on a network without a route.
            self.buffers.push(frame.bytes);
        }
    }

    fn loop_back(&mut self, id: HostId, frame: Frame) {
        self.looped.push_back((id, frame));
        self.schedule(self.now.nanos(), Happening::Looped);
    }

    /// Brings a host a frame that no host sent: of a capture, or of a hostile network.
    pub fn inject(&mut self, to: HostId, frame: Frame) {
        self.arrive(to, frame);
    }

    fn admit(&mut self, cable: CableId, direction: Direction, frame: Frame) {
        let now = self.now.nanos();
        self.observer.frame(self.now, cable, direction, Stage::Admitted, &frame);
        self.through(cable, |cable, flows, outlet| cable.admit(now, direction, frame, flows, outlet));
    }

    /// Calls `act` with a cable and takes what comes out of it.
    fn through(&mut self, id: CableId, act: impl FnOnce(&mut Cable, &Flows, &mut dyn Outlet)) {
        let World { now, links, flows, agenda, serial, frames, free, observer, .. } = self;
        let Link { cable, ends } = &mut links[id.0 as usize];
        let mut exit = Exit { id, ends: *ends, now: *now, agenda, serial, frames, free, observer };
        act(cable, flows, &mut exit);
        if let Some(at) = cable.next_timeout() {
            self.schedule(at, Happening::Held { cable: id });
        }
    }
}

/// Where a cable's frames come out: the agenda.
struct Exit<'a> {
    id: CableId,
    ends: [HostId; 2],
    now: Instant,
    agenda: &'a mut BinaryHeap<Reverse<(u64, u64, Happening)>>,
    serial: &'a mut u64,
    frames: &'a mut Vec<Option<Frame>>,
    free: &'a mut Vec<u32>,
    observer: &'a mut dyn Observer,
}

impl Outlet for Exit<'_> {
    fn deliver(&mut self, at_ns: u64, direction: Direction, frame: Frame) {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.frames[slot as usize] = Some(frame);
                slot
            }
            None => {
                self.frames.push(Some(frame));
                self.frames.len() as u32 - 1
            }
        };
        let host = match direction {
            Direction::Forward => self.ends[1],
            Direction::Backward => self.ends[0],
        };
        *self.serial += 1;
        let arrival = Happening::Arrival { slot, host, cable: self.id, direction };
        self.agenda.push(Reverse((at_ns, *self.serial, arrival)));
    }

    fn report(&mut self, fault: Fault) {
        self.observer.fault(self.now, self.id, &fault);
    }
}
