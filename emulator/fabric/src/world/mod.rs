//! Hosts, links and switches under a virtual clock.
//!
//! One event queue orders all events by time and then by the order of scheduling. Equal calls and seeds give equal
//! bytes and events on every machine.

mod host;
mod memory;

pub use host::Host;
pub use memory::simulated_memory;

use crate::network::{Moment, Network, Outcome};
use crate::sim_event::SimEvent;
use crate::{
    BuiltTopology, Direction, EventSink, FlowTable, Frame, FrameContent, FrameCounters, HostId,
    HostPortCounters, Layout, Link, LinkId, LinkSettings, LinkState, NetworkEvent, Node, ReceiverSettings,
    Rule, Seed, Switch, SwitchId, SwitchSettings, Topology, TopologyError,
};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::hint::black_box;
use core::net::{IpAddr, Ipv4Addr};
use softhca_engine::{Context, Event, Instant, MemoryObjects, PacketBatch, PayloadMode, PortState, Settings};
use softhca_wire::Icrc;

/// Hosts, links and switches under a virtual clock, with a sink for their events.
pub struct World<O: EventSink = Box<dyn EventSink>> {
    now: Instant,
    hosts: Vec<Host>,
    network: Network,
    sink: O,
    /// Loopback frames, oldest first: they bypass the links.
    loopback: VecDeque<(HostId, Frame)>,
    /// Whether any host was ever stalled.
    any_stalled: bool,
    scratch: Vec<u8>,
}

/// The largest frame: the largest path MTU with the largest headers.
const MAX_FRAME: usize = 4096 + 128;

impl World {
    /// An empty world. The seed determines queue pair numbers, keys and all random draws.
    pub fn new(seed: u64) -> World {
        World::with_sink(seed, Box::new(()))
    }

    /// Sends all further events to `sink`.
    pub fn set_sink(&mut self, sink: impl EventSink + 'static) {
        self.sink = Box::new(sink);
    }
}

impl<O: EventSink> World<O> {
    /// An empty world that sends events to `sink`. The world is `Send` if the sink is.
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

    pub fn sink(&mut self) -> &mut O {
        &mut self.sink
    }

    /// The time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Adds a host at 10.0.0.N, with N counting from 1.
    pub fn add_host(&mut self, name: &str, settings: Settings) -> HostId {
        let n = self.hosts.len() as u32 + 1;
        let address = IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + n));
        self.add_host_at(name, address, settings)
    }

    pub fn add_host_at(&mut self, name: &str, address: IpAddr, mut settings: Settings) -> HostId {
        let id = self.network.add_host(address);
        settings.seed = self.network.seed.draw(&[0x686f_7374, u64::from(id.0)]);
        self.hosts.push(Host::new(name, address, settings));
        id
    }

    /// A host.
    ///
    /// # Panics
    /// If the ID belongs to another world.
    pub fn host(&self, id: HostId) -> &Host {
        &self.hosts[id.0 as usize]
    }

    /// All hosts in the order of addition.
    pub fn hosts(&self) -> impl Iterator<Item = (HostId, &Host)> {
        self.hosts.iter().enumerate().map(|(index, host)| (HostId(index as u32), host))
    }

    pub fn add_switch(&mut self, name: &str, settings: SwitchSettings) -> SwitchId {
        self.network.add_switch(name, settings)
    }

    /// A switch.
    ///
    /// # Panics
    /// If the ID belongs to another world.
    pub fn switch(&self, id: SwitchId) -> &Switch {
        &self.network.switches[id.0 as usize]
    }

    /// Changes the settings of a switch. Queued frames stay; new thresholds apply from the next frame on.
    ///
    /// # Panics
    /// If the ID belongs to another world.
    pub fn set_switch_settings(&mut self, id: SwitchId, settings: SwitchSettings) {
        self.network.switches[id.0 as usize].set_settings(settings);
    }

    /// All switches in the order of addition.
    pub fn switches(&self) -> impl Iterator<Item = (SwitchId, &Switch)> {
        self.network.switches.iter().enumerate().map(|(index, switch)| (SwitchId(index as u32), switch))
    }

    /// Adds a link between two hosts or switches; its forward direction leads from `first` to `second`.
    pub fn add_link(
        &mut self,
        first: impl Into<Node>,
        second: impl Into<Node>,
        link_settings: LinkSettings,
    ) -> LinkId {
        let id = self.network.add_link([first.into(), second.into()], link_settings);
        self.attach_link_to_hosts(id, link_settings);
        id
    }

    /// Adds a new link to the hosts at its ends.
    fn attach_link_to_hosts(&mut self, id: LinkId, link_settings: LinkSettings) {
        for (end, direction) in self.link_ends(id).into_iter().zip([Direction::Forward, Direction::Backward])
        {
            let Node::Host(host) = end else { continue };
            let host = self.host_mut(host);
            host.links.push((id, direction));
            if let Some(rate) = link_settings.bits_per_second {
                host.hca.set_line_rate(rate.get());
            }
        }
    }

    /// Builds a topology with the first hosts of `hosts`. All links get `link_settings`, all switches `settings`; both
    /// can change later.
    ///
    /// # Panics
    /// If the topology has more hosts.
    pub fn build_topology(
        &mut self,
        topology: &Topology,
        hosts: &[HostId],
        link_settings: LinkSettings,
        settings: SwitchSettings,
    ) -> Result<BuiltTopology, TopologyError> {
        Ok(self.build_layout(&topology.layout()?, hosts, link_settings, settings))
    }

    /// Builds a layout.
    ///
    /// # Panics
    /// If the layout has more hosts.
    pub fn build_layout(
        &mut self,
        layout: &Layout,
        hosts: &[HostId],
        link_settings: LinkSettings,
        settings: SwitchSettings,
    ) -> BuiltTopology {
        let built = self.network.build_layout(layout, hosts, link_settings, settings);
        built.links.iter().for_each(|link| self.attach_link_to_hosts(*link, link_settings));
        built
    }

    /// Sets a static route: frames to a host leave a switch over these links instead of all shortest paths.
    /// Each flow uses one of them. Ignores links that are not connected to the switch.
    pub fn set_route(&mut self, switch: SwitchId, host: HostId, links: &[LinkId]) {
        self.network.set_route(switch, host, links);
    }

    /// Changes the receiver of a host.
    pub fn set_receiver(&mut self, host: HostId, receiver: ReceiverSettings) {
        let moment = &mut Moment { now: self.now, sink: &mut self.sink };
        self.network.set_receiver(moment, host, receiver);
    }

    pub fn receiver(&self, host: HostId) -> &ReceiverSettings {
        &self.network.hosts[host.0 as usize].receiver
    }

    /// PFC and buffer counters of a host's port.
    pub fn port_counters(&self, host: HostId) -> HostPortCounters {
        self.network.hosts[host.0 as usize].counters()
    }

    /// Bit mask of the priorities that PFC has paused at a host.
    pub fn paused_priorities(&self, host: HostId) -> u8 {
        self.network.hosts[host.0 as usize].pauses.mask()
    }

    pub fn link(&self, id: LinkId) -> &Link {
        &self.network.links[id.0 as usize]
    }

    /// A link, to change its settings, state or rules.
    pub fn link_mut(&mut self, id: LinkId) -> &mut Link {
        &mut self.network.links[id.0 as usize]
    }

    /// Takes one direction of a link down or up. A host's port is down if all its links are down in both
    /// directions.
    pub fn set_link_state(&mut self, id: LinkId, direction: Direction, state: LinkState) {
        self.link_mut(id).set_state(direction, state);
        for end in self.network.link_ends[id.0 as usize].ends {
            let Node::Host(host) = end else { continue };
            let now_ns = self.now().nanos();
            let carries = |link: &Link| {
                [Direction::Forward, Direction::Backward]
                    .map(|direction| link.state(now_ns, direction))
                    .contains(&LinkState::Up)
            };
            let mut links = self.network.links.iter().zip(&self.network.link_ends);
            let port = match links.any(|(link, ends)| ends.ends.contains(&end) && carries(link)) {
                true => PortState::Active,
                false => PortState::Down,
            };
            self.with_hca(host, |hca, ctx| hca.set_port_state(ctx, port));
        }
    }

    /// The nodes at the ends of a link, if it exists.
    pub fn try_link_ends(&self, id: LinkId) -> Option<[Node; 2]> {
        self.network.link_ends.get(id.0 as usize).map(|link| link.ends)
    }

    /// The nodes at the ends of a link.
    pub fn link_ends(&self, id: LinkId) -> [Node; 2] {
        self.network.link_ends[id.0 as usize].ends
    }

    /// The node at the start of a direction.
    pub fn link_source(&self, id: LinkId, direction: Direction) -> Node {
        self.network.link_source(id, direction)
    }

    /// Adds a fault rule to a link.
    pub fn add_rule(&mut self, link: LinkId, rule: Rule) {
        self.link_mut(link).add_rule(rule);
    }

    /// The flow table of the fault rules.
    pub fn flows(&self) -> &FlowTable {
        &self.network.flows
    }

    /// The flow table of the fault rules, to add flows.
    pub fn flows_mut(&mut self) -> &mut FlowTable {
        &mut self.network.flows
    }

    /// Changes the seed of all further draws of the links.
    pub fn reseed(&mut self, seed: u64) {
        self.network.seed = Seed(seed);
        self.network.links.iter_mut().for_each(|link| link.set_seed(Seed(seed)));
    }

    /// A number drawn from the world's seed, the same for the same words.
    pub fn draw(&self, words: &[u64]) -> u64 {
        self.network.seed.draw(words)
    }

    /// Calls `act` with a host's HCA and a context, then processes doorbells and transmits.
    pub fn with_hca<R>(
        &mut self,
        id: HostId,
        act: impl FnOnce(&mut softhca_engine::Hca, &mut Context<'_>) -> R,
    ) -> R {
        let result = self.with_context(id, act);
        self.process_doorbells(id);
        result
    }

    /// Calls `act` with a host's HCA and a context. The HCA transmits nothing before the world continues.
    pub fn with_context<R>(
        &mut self,
        id: HostId,
        act: impl FnOnce(&mut softhca_engine::Hca, &mut Context<'_>) -> R,
    ) -> R {
        let now = self.now;
        let Host { hca, memory, .. } = &mut self.hosts[id.0 as usize];
        let sink = &mut self.sink;
        let mut events = |now, event: &Event| sink.on_event(now, &NetworkEvent::Hca { host: id, event });
        act(hca, &mut Context { now, memory, events: &mut events })
    }

    /// The memory of a host's regions.
    pub fn memory(&mut self, host: HostId) -> &mut MemoryObjects {
        &mut self.host_mut(host).memory
    }

    fn host_mut(&mut self, id: HostId) -> &mut Host {
        &mut self.hosts[id.0 as usize]
    }

    pub fn frame_counters(&self) -> FrameCounters {
        self.network.frame_counters()
    }

    /// Runs until no event is left or `until` is reached. Returns whether events are left.
    ///
    /// # Panics
    /// If a frame is not accounted for: only a bug can cause that.
    pub fn run_until(&mut self, until: Instant) -> bool {
        let is_left = self.process_until(until);
        let counters = self.frame_counters();
        assert!(counters.is_balanced(), "frames appeared or vanished: {counters:?}");
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

    /// Runs until no event is left. This may never return: a permanently paused sender is paused again and
    /// again.
    pub fn run(&mut self) {
        self.run_until(Instant::from_nanos(u64::MAX));
    }

    /// When the next event is due, if any.
    pub fn next_event_at(&self) -> Option<Instant> {
        self.network.event_queue.next_at().map(Instant::from_nanos)
    }

    /// Stalls a host until a time: its HCA neither sends nor receives, and frames wait.
    pub fn stall(&mut self, id: HostId, until: Instant) {
        self.any_stalled = true;
        let host = self.host_mut(id);
        host.stalled_until = host.stalled_until.max(until.nanos());
        // The host checks for frames to send when the stall ends.
        self.network.event_queue.push(until.nanos(), SimEvent::HostLinkFree { host: id });
    }

    /// The host of an event, if any.
    fn event_host(&self, event: &SimEvent) -> Option<HostId> {
        match *event {
            SimEvent::HostLinkFree { host } | SimEvent::HostTimer { host } => Some(host),
            SimEvent::Arrival { link, direction, .. } => {
                self.network.link_source(link, direction.reverse()).host()
            }
            SimEvent::Loopback => self.loopback.front().map(|(host, _)| *host),
            _ => None,
        }
    }

    /// Processes the next event. Returns false if none is left.
    pub fn step(&mut self) -> bool {
        self.step_until(u64::MAX)
    }

    /// Processes the next event, if it is due by `until`.
    fn step_until(&mut self, until: u64) -> bool {
        let Some((at, event)) = self.network.event_queue.pop_until(until) else { return false };
        self.now = self.now.max(Instant::from_nanos(at));
        if let Some(slot) = self.network.event_queue.next_slot() {
            self.prefetch(slot);
        }
        if self.any_stalled
            && let Some(host) = self.event_host(&event)
            && self.host(host).stalled_until > at
        {
            self.network.event_queue.push(self.host(host).stalled_until, event);
            return true;
        }
        let output = match event {
            SimEvent::HostLinkFree { host } => {
                self.host_mut(host).waiting_for_link = false;
                self.transmit_ready(host);
                Outcome::Nothing
            }
            SimEvent::HostTimer { host } => {
                let now = self.now;
                let expired = self.host_mut(host);
                expired.on_wakeup();
                expired.memory.expire(now);
                self.with_context(host, |hca, ctx| hca.expire(ctx));
                self.transmit_ready(host);
                Outcome::Nothing
            }
            SimEvent::Loopback => {
                let (host, frame) = self.loopback.pop_front().expect("each frame was scheduled once");
                self.inject(host, frame);
                Outcome::Nothing
            }
            other => self.network.handle_event(&mut Moment { now: self.now, sink: &mut self.sink }, other),
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

    /// Prefetches the memory of the next event.
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

    /// Processes a host's doorbells and transmits.
    fn process_doorbells(&mut self, id: HostId) {
        if self.host(id).stalled_until > self.now.nanos() {
            return;
        }
        self.with_context(id, |hca, ctx| hca.process_doorbells(ctx));
        self.transmit_ready(id);
    }

    /// Transmits while the host's link is free, then schedules its timer.
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
        let timeouts = host.hca.next_timeout().into_iter().chain(host.memory.next_deadline());
        let Some(at) = timeouts.min().map(Instant::nanos) else { return };
        // An early wakeup is cheap; a wakeup for each moved deadline would fill the queue.
        if host.schedule_wakeup(at) {
            self.network.event_queue.push(at, SimEvent::HostTimer { host: id });
        }
    }

    /// Sends the packet in the scratch buffer.
    fn send(&mut self, id: HostId, run: &PacketBatch, content: FrameContent) {
        let World { now, network, sink, scratch, .. } = self;
        let moment = &mut Moment { now: *now, sink };
        let (addressing, bytes, service_level) = (&run.addressing, &scratch[..run.bytes], run.service_level);
        let destination = addressing.destination;
        let is_own = destination == self.hosts[id.0 as usize].address;
        if !is_own && !destination.is_multicast() {
            return network.send_bytes(moment, id, (addressing, bytes), content, service_level);
        }
        let frame = Frame { addressing: *addressing, bytes: bytes.to_vec(), content, service_level };
        if !is_own {
            network.send(moment, id, frame.clone());
        }
        self.loop_back(id, frame);
    }

    fn loop_back(&mut self, id: HostId, frame: Frame) {
        self.loopback.push_back((id, frame));
        self.network.event_queue.push(self.now.nanos(), SimEvent::Loopback);
    }

    /// Delivers a frame to a host that no host sent: from a capture or an attacker.
    pub fn inject(&mut self, to: HostId, frame: Frame) {
        receive(self.now, to, &mut self.hosts[to.0 as usize], &frame, &mut self.sink);
        self.transmit_ready(to);
    }
}

/// Passes a frame to a host's HCA.
fn receive(now: Instant, id: HostId, host: &mut Host, frame: &Frame, sink: &mut impl EventSink) {
    let mut events = |now, event: &Event| sink.on_event(now, &NetworkEvent::Hca { host: id, event });
    let Host { hca, memory, .. } = host;
    let ctx = &mut Context { now, memory, events: &mut events };
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
