//! Hosts, cables and switches under a virtual clock.
//!
//! Everything that will happen is in one heap, ordered by time and then by the order in which it was
//! scheduled; the same script and seed therefore give the same bytes and events on every machine.

use crate::event_queue::SimEvent;
use crate::host::{Host, HostId};
use crate::network::{Network, Outcome};
use crate::verbs::Verbs;
use crate::{
    BuiltTopology, Direction, EventSink, FlowTable, Frame, FrameContent, FrameCounters, HostPortCounters,
    Layout, Link, LinkSettings, LinkState, NetworkEvent, Node, ReceiverSettings, Rule, Seed, SparseMemory,
    Switch, SwitchId, SwitchSettings, Topology, TopologyError,
};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::hint::black_box;
use core::net::{IpAddr, Ipv4Addr};
use softhca_engine::{Context, Event, Instant, PacketBatch, PayloadMode, PortState, Settings};
use softhca_wire::{Icrc, Psn};

/// Names a cable of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

/// Hosts, cables and switches under a virtual clock, seen by an sink.
pub struct World<O: EventSink = Box<dyn EventSink>> {
    now: Instant,
    hosts: Vec<Host>,
    network: Network,
    sink: O,
    /// Frames that a host sent to itself, oldest first: they pass no cable.
    loopback: VecDeque<(HostId, Frame)>,
    /// Some host stood still at some time.
    any_stalled: bool,
    scratch: Vec<u8>,
}

/// The most that one frame takes: the largest path MTU and the largest headers.
const MAX_FRAME: usize = 4096 + 128;

impl World {
    /// An empty world. The seed decides queue pair numbers, keys and every probability.
    pub fn new(seed: u64) -> World {
        World::with_sink(seed, Box::new(()))
    }

    /// Shows everything from now on to `sink`.
    pub fn set_sink(&mut self, sink: impl EventSink + 'static) {
        self.sink = Box::new(sink);
    }

    /// The verbs of a host's application.
    pub fn verbs(&mut self, host: HostId) -> Verbs<'_> {
        Verbs { world: self, id: host }
    }
}

impl<O: EventSink> World<O> {
    /// An empty world that shows everything to `sink`: one that may change threads makes a world that may.
    pub fn with_sink(seed: u64, sink: O) -> World<O> {
        World {
            now: Instant::ZERO,
            hosts: Vec::new(),
            network: Network::new(Seed(seed)),
            sink,
            loopback: VecDeque::new(),
            any_stalled: false,
            scratch: vec![0; MAX_FRAME],
        }
    }

    /// The sink.
    pub fn sink(&mut self) -> &mut O {
        &mut self.sink
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
        let id = self.network.add_host(address);
        settings.seed = self.network.seed.draw(&[0x686f_7374, u64::from(id.0)]);
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

    /// Adds a switch.
    pub fn add_switch(&mut self, name: &str, settings: SwitchSettings) -> SwitchId {
        self.network.add_switch(name, settings)
    }

    /// A switch.
    ///
    /// # Panics
    /// If the id is of another world.
    pub fn switch(&self, id: SwitchId) -> &Switch {
        &self.network.switches[id.0 as usize]
    }

    /// Lets a switch go on with other settings: what waits in it keeps waiting, and thresholds count from the
    /// next frame on.
    ///
    /// # Panics
    /// If the id is of another world.
    pub fn set_switch_settings(&mut self, id: SwitchId, settings: SwitchSettings) {
        self.network.switches[id.0 as usize].set_settings(settings);
    }

    /// Every switch, in the order in which they were added.
    pub fn switches(&self) -> impl Iterator<Item = (SwitchId, &Switch)> {
        self.network.switches.iter().enumerate().map(|(index, switch)| (SwitchId(index as u32), switch))
    }

    /// Lays a cable between two hosts or switches; its forward direction leads from `first` to `second`.
    pub fn add_link(
        &mut self,
        first: impl Into<Node>,
        second: impl Into<Node>,
        line: LinkSettings,
    ) -> LinkId {
        let id = self.network.add_link([first.into(), second.into()], line);
        self.attach_link_to_hosts(id, line);
        id
    }

    /// Tells the hosts at a new cable of it.
    fn attach_link_to_hosts(&mut self, id: LinkId, line: LinkSettings) {
        for (end, direction) in self.link_ends(id).into_iter().zip([Direction::Forward, Direction::Backward])
        {
            let Node::Host(host) = end else { continue };
            let host = self.host_mut(host);
            host.links.push((id, direction));
            if let Some(rate) = line.bits_per_second {
                host.hca.set_line_rate(rate.get());
            }
        }
    }

    /// Connects hosts as a topology says: as many of `hosts` as it has. Every cable gets `line`, every switch
    /// `settings`; both can be changed afterwards.
    ///
    /// # Panics
    /// If there are fewer hosts than the topology has.
    pub fn build_topology(
        &mut self,
        topology: &Topology,
        hosts: &[HostId],
        line: LinkSettings,
        settings: SwitchSettings,
    ) -> Result<BuiltTopology, TopologyError> {
        Ok(self.build_layout(&topology.layout()?, hosts, line, settings))
    }

    /// Connects hosts as a layout says.
    ///
    /// # Panics
    /// If there are fewer hosts than the layout has.
    pub fn build_layout(
        &mut self,
        layout: &Layout,
        hosts: &[HostId],
        line: LinkSettings,
        settings: SwitchSettings,
    ) -> BuiltTopology {
        let laid = self.network.build_layout(layout, hosts, line, settings);
        laid.links.iter().for_each(|cable| self.attach_link_to_hosts(*cable, line));
        laid
    }

    /// Decides by which cables frames for a host leave a switch, in place of every shortest way: each flow
    /// takes one of them. Cables that are not the switch's are left out.
    pub fn set_route(&mut self, switch: SwitchId, host: HostId, cables: &[LinkId]) {
        self.network.set_route(switch, host, cables);
    }

    /// Changes how fast a host takes what arrives.
    pub fn set_receiver(&mut self, host: HostId, receiver: ReceiverSettings) {
        self.network.set_receiver(self.now, host, receiver, &mut self.sink);
    }

    /// How fast a host takes what arrives.
    pub fn receiver(&self, host: HostId) -> &ReceiverSettings {
        &self.network.hosts[host.0 as usize].receiver
    }

    /// What the port of a host counted about pauses and its buffer.
    pub fn port_counters(&self, host: HostId) -> HostPortCounters {
        self.network.hosts[host.0 as usize].counters()
    }

    /// The priorities that a host may not send now, as a mask.
    pub fn paused_priorities(&self, host: HostId) -> u8 {
        self.network.hosts[host.0 as usize].pauses.mask()
    }

    /// A cable.
    pub fn link(&self, id: LinkId) -> &Link {
        &self.network.links[id.0 as usize]
    }

    /// A cable, to change its line, its links or its rules.
    pub fn link_mut(&mut self, id: LinkId) -> &mut Link {
        &mut self.network.links[id.0 as usize]
    }

    /// Takes one direction of a cable down or brings it up. The port of a host is down when none of its cables
    /// carries anything either way.
    pub fn set_link_state(&mut self, id: LinkId, direction: Direction, state: LinkState) {
        self.link_mut(id).set_state(direction, state);
        for end in self.network.link_ends[id.0 as usize].ends {
            let Node::Host(host) = end else { continue };
            let now_ns = self.now().nanos();
            let carries = |cable: &Link| {
                [Direction::Forward, Direction::Backward]
                    .map(|way| cable.state(now_ns, way))
                    .contains(&LinkState::Up)
            };
            let mut cables = self.network.links.iter().zip(&self.network.link_ends);
            let port = match cables.any(|(cable, link)| link.ends.contains(&end) && carries(cable)) {
                true => PortState::Active,
                false => PortState::Down,
            };
            self.with_hca(host, |hca, ctx| hca.set_port_state(ctx, port));
        }
    }

    /// What is at the two ends of a cable, if there is such a cable.
    pub fn try_link_ends(&self, id: LinkId) -> Option<[Node; 2]> {
        self.network.link_ends.get(id.0 as usize).map(|link| link.ends)
    }

    /// What is at a cable's two ends.
    pub fn link_ends(&self, id: LinkId) -> [Node; 2] {
        self.network.link_ends[id.0 as usize].ends
    }

    /// The node that a direction of a cable starts at.
    pub fn link_source(&self, id: LinkId, direction: Direction) -> Node {
        self.network.link_source(id, direction)
    }

    /// Adds a fault rule to a cable.
    pub fn add_rule(&mut self, cable: LinkId, rule: Rule) {
        self.link_mut(cable).add_rule(rule);
    }

    /// The queue pairs that rules have names for.
    pub fn flows(&self) -> &FlowTable {
        &self.network.flows
    }

    /// The queue pairs that rules have names for, to add some.
    pub fn flows_mut(&mut self) -> &mut FlowTable {
        &mut self.network.flows
    }

    /// A number drawn from the world's seed; the same for the same words.
    pub fn draw(&self, words: &[u64]) -> u64 {
        self.network.seed.draw(words)
    }

    /// A PSN drawn from the world's seed.
    pub fn draw_psn(&self, words: &[u64]) -> Psn {
        Psn::new(self.draw(words) as u32)
    }

    /// Calls `act` with a host's card and a context, then lets the card hear its doorbells and send.
    pub fn with_hca<R>(
        &mut self,
        id: HostId,
        act: impl FnOnce(&mut softhca_engine::Hca, &mut Context<'_>) -> R,
    ) -> R {
        let result = self.with_context(id, act);
        self.process_doorbells(id);
        result
    }

    fn with_context<R>(
        &mut self,
        id: HostId,
        act: impl FnOnce(&mut softhca_engine::Hca, &mut Context<'_>) -> R,
    ) -> R {
        let now = self.now;
        let Host { hca, memory: store, .. } = &mut self.hosts[id.0 as usize];
        let sink = &mut self.sink;
        let mut events = |now, event: &Event| sink.on_event(now, &NetworkEvent::Hca { host: id, event });
        act(hca, &mut Context { now, memory: store, events: &mut events })
    }

    /// The memory behind a host's regions.
    pub fn memory(&mut self, host: HostId) -> &mut SparseMemory {
        &mut self.host_mut(host).memory
    }

    pub(crate) fn host_mut(&mut self, id: HostId) -> &mut Host {
        &mut self.hosts[id.0 as usize]
    }

    /// How many frames went where.
    pub fn frame_counters(&self) -> FrameCounters {
        self.network.frame_counters()
    }

    /// Goes on until nothing is left to happen, or `until` is reached. Returns whether something is left.
    ///
    /// # Panics
    /// If a frame appeared or vanished on the way: only a bug can do that.
    pub fn run_until(&mut self, until: Instant) -> bool {
        let is_left = self.process_until(until);
        let census = self.frame_counters();
        assert!(census.is_balanced(), "frames appeared or vanished: {census:?}");
        is_left
    }

    fn process_until(&mut self, until: Instant) -> bool {
        while self.step_until(until.nanos()) {}
        let is_left = self.network.event_queue.next_at().is_some();
        if is_left || until.nanos() != u64::MAX {
            self.now = self.now.max(until);
        }
        is_left
    }

    /// Goes on until nothing is left to happen. That may be never: a sender that is paused for ever is told
    /// so again and again.
    pub fn run(&mut self) {
        self.run_until(Instant::from_nanos(u64::MAX));
    }

    /// When the next thing happens, if anything is left to happen.
    pub fn next_event_at(&self) -> Option<Instant> {
        self.network.event_queue.next_at().map(Instant::from_nanos)
    }

    /// Lets a host stand still until a time: its card neither sends nor hears, and what arrives waits.
    pub fn stall(&mut self, id: HostId, until: Instant) {
        self.any_stalled = true;
        let host = self.host_mut(id);
        host.stalled_until = host.stalled_until.max(until.nanos());
        // Whatever it wanted to send in the meantime, it looks again when it wakes.
        self.network.event_queue.push(until.nanos(), SimEvent::HostLinkFree { host: id });
    }

    /// Whom something happens to, if it is a host.
    fn event_host(&self, happening: &SimEvent) -> Option<HostId> {
        match *happening {
            SimEvent::HostLinkFree { host } | SimEvent::HostTimer { host } => Some(host),
            SimEvent::Arrival { link: cable, direction, .. } => {
                self.network.link_source(cable, direction.reverse()).host()
            }
            SimEvent::Loopback => self.loopback.front().map(|(host, _)| *host),
            _ => None,
        }
    }

    /// Lets the next thing happen. False if nothing is left.
    pub fn step(&mut self) -> bool {
        self.step_until(u64::MAX)
    }

    /// Lets the next thing happen, if it happens by then.
    fn step_until(&mut self, until: u64) -> bool {
        let Some((at, happening)) = self.network.event_queue.pop_until(until) else { return false };
        self.now = self.now.max(Instant::from_nanos(at));
        if let Some(slot) = self.network.event_queue.next_slot() {
            self.prefetch(slot);
        }
        if self.any_stalled
            && let Some(host) = self.event_host(&happening)
            && self.host(host).stalled_until > at
        {
            self.network.event_queue.push(self.host(host).stalled_until, happening);
            return true;
        }
        let output = match happening {
            SimEvent::HostLinkFree { host } => {
                self.host_mut(host).waiting_for_link = false;
                self.transmit_ready(host);
                Outcome::Nothing
            }
            SimEvent::HostTimer { host } => {
                self.host_mut(host).on_wakeup();
                self.with_context(host, |hca, ctx| hca.expire(ctx));
                self.transmit_ready(host);
                Outcome::Nothing
            }
            SimEvent::Loopback => {
                let (host, frame) = self.loopback.pop_front().expect("each frame was scheduled once");
                self.inject(host, frame);
                Outcome::Nothing
            }
            other => self.network.handle_event(self.now, other, &mut self.sink),
        };
        match output {
            Outcome::Nothing => {}
            Outcome::Arrived { host, slot } => self.arrive(host, slot),
            Outcome::Paused { host, frames } => {
                let mask = self.paused_priorities(host);
                let hca = &mut self.host_mut(host).hca;
                hca.count_pause_frames(frames);
                hca.set_paused_priorities(mask);
                self.transmit_ready(host);
            }
        }
        true
    }

    /// Reads a word of what the next thing is going to ask for.
    #[inline(never)]
    fn prefetch(&mut self, slot: u32) {
        if let Some(host) = self.network.prefetch(slot) {
            let host = self.host(host);
            black_box((host.next_wakeup, host.hca.has_pending_transmit()));
        }
    }

    fn arrive(&mut self, id: HostId, slot: u32) {
        let World { now, hosts, network, sink, .. } = self;
        let slots = &mut network.event_queue.pool;
        receive(*now, id, &mut hosts[id.0 as usize], slots.frame(slot), sink);
        slots.release(slot);
        self.transmit_ready(id);
    }

    /// Lets the card of a host hear its doorbells, and send.
    pub(crate) fn process_doorbells(&mut self, id: HostId) {
        if self.host(id).stalled_until > self.now.nanos() {
            return;
        }
        self.with_context(id, |hca, ctx| hca.process_doorbells(ctx));
        self.transmit_ready(id);
    }

    /// Gives the card of a host the chance to send, and sees to its timers.
    fn transmit_ready(&mut self, id: HostId) {
        if self.host(id).stalled_until > self.now.nanos() {
            return;
        }
        while self.host(id).hca.has_pending_transmit() {
            let free_at = self.network.host_link_free_at(id);
            if free_at > self.now.nanos() {
                let host = self.host_mut(id);
                if !host.waiting_for_link {
                    host.waiting_for_link = true;
                    self.network.event_queue.push(free_at, SimEvent::HostLinkFree { host: id });
                }
                break;
            }
            let mut scratch = core::mem::take(&mut self.scratch);
            let run = self.with_context(id, |hca, ctx| hca.transmit(ctx, &mut (), &mut scratch, 1));
            self.scratch = scratch;
            let Some(run) = run else { break };
            let content = match self.host(id).hca.settings().payload_mode {
                PayloadMode::Elided => FrameContent::Elided { bytes: run.elided_payload as u32 },
                PayloadMode::Carried => {
                    Icrc::write(&run.addressing, &mut self.scratch[..run.bytes]);
                    FrameContent::Packet
                }
            };
            self.send(id, &run, content);
        }
        self.schedule_timer(id);
    }

    fn schedule_timer(&mut self, id: HostId) {
        let host = self.host_mut(id);
        let Some(at) = host.hca.next_timeout().map(Instant::nanos) else { return };
        // A wake-up that is too early costs a look; one for each deadline that moved would fill the queue.
        if host.schedule_wakeup(at) {
            self.network.event_queue.push(at, SimEvent::HostTimer { host: id });
        }
    }

    /// Sends the packet that was built last.
    fn send(&mut self, id: HostId, run: &PacketBatch, content: FrameContent) {
        let World { now, network, sink, scratch, .. } = self;
        let (envelope, bytes, service_level) = (&run.addressing, &scratch[..run.bytes], run.service_level);
        let destination = envelope.destination;
        let is_own = destination == self.hosts[id.0 as usize].address;
        if !is_own && !destination.is_multicast() {
            return network.send_bytes(*now, id, (envelope, bytes), content, service_level, sink);
        }
        let frame = Frame { addressing: *envelope, bytes: bytes.to_vec(), content, service_level };
        if !is_own {
            network.send(*now, id, frame.clone(), sink);
        }
        self.loop_back(id, frame);
    }

    fn loop_back(&mut self, id: HostId, frame: Frame) {
        self.loopback.push_back((id, frame));
        self.network.event_queue.push(self.now.nanos(), SimEvent::Loopback);
    }

    /// Brings a host a frame that no host sent: of a capture, or of a hostile network.
    pub fn inject(&mut self, to: HostId, frame: Frame) {
        receive(self.now, to, &mut self.hosts[to.0 as usize], &frame, &mut self.sink);
        self.transmit_ready(to);
    }
}

/// Gives a frame to the card of a host.
fn receive(now: Instant, id: HostId, host: &mut Host, frame: &Frame, sink: &mut impl EventSink) {
    let mut events = |now, event: &Event| sink.on_event(now, &NetworkEvent::Hca { host: id, event });
    let Host { hca, memory: store, .. } = host;
    let ctx = &mut Context { now, memory: store, events: &mut events };
    match frame.content {
        FrameContent::Elided { bytes } => {
            hca.receive_elided(ctx, &frame.addressing, &frame.bytes, bytes as usize);
        }
        FrameContent::Pause => {}
        FrameContent::Packet => match Icrc::split(&frame.bytes) {
            Ok((transport, icrc)) if Icrc::compute(&frame.addressing, transport) == icrc => {
                hca.receive(ctx, &frame.addressing, transport);
            }
            Ok(_) => hca.drop_bad_icrc(ctx),
            Err(_) => hca.receive(ctx, &frame.addressing, &[]),
        },
    }
}
