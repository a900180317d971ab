//! The same network under a clock that somebody else keeps: between cards in real time.

use crate::event_queue::SimEvent;
use crate::external_ports::{ExternalPortSink, ExternalPorts};
use crate::network::{Network, Outcome};
use crate::sink::EventSink;
use crate::{
    BuiltTopology, ExternalPortUpdate, Frame, FrameCounters, HostId, HostPortCounters, LinkId, LinkSettings,
    Node, Origin, ReceiverSettings, Seed, Switch, SwitchId, SwitchSettings, Topology, TopologyError,
};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_engine::Instant;

/// Cables and switches between hosts whose cards somebody else drives.
///
/// Frames go in with [`Fabric::send`], time passes with [`Fabric::advance`], and what has arrived by then is taken
/// out with [`Fabric::take`]. Who sends waits until [`Fabric::free_at`], as a port does. What comes from other
/// machines enters with [`Fabric::enter`], each over a cable of its own, and what the network asks of them is told by
/// [`Fabric::news`].
pub struct Fabric {
    network: Network,
    external_ports: ExternalPorts,
    /// What has arrived at each host.
    received: Vec<VecDeque<Frame>>,
    /// Hosts that have something to look at: frames, or other pauses than before.
    ready_hosts: Vec<HostId>,
}

impl Fabric {
    /// Hosts with these addresses, connected as a topology says; there must be as many as it has.
    pub fn new(
        seed: u64,
        addresses: &[IpAddr],
        topology: &Topology,
        line: LinkSettings,
        settings: SwitchSettings,
    ) -> Result<(Fabric, BuiltTopology), TopologyError> {
        let layout = topology.layout()?;
        if addresses.len() != layout.hosts as usize {
            return Err(TopologyError::WrongHostCount { hosts: addresses.len(), expected: layout.hosts });
        }
        let mut network = Network::new(Seed(seed));
        let hosts: Vec<_> = addresses.iter().map(|address| network.add_host(*address)).collect();
        let laid = network.build_layout(&layout, &hosts, line, settings);
        let arrived = hosts.iter().map(|_| VecDeque::new()).collect();
        Ok((
            Fabric {
                network,
                external_ports: ExternalPorts::new(line),
                received: arrived,
                ready_hosts: Vec::new(),
            },
            laid,
        ))
    }

    /// The host with this address.
    pub fn host_with_address(&self, address: IpAddr) -> Option<HostId> {
        self.network.addresses.find(address)
    }

    /// A switch.
    ///
    /// # Panics
    /// If the id is of another network.
    pub fn switch(&self, id: SwitchId) -> &Switch {
        &self.network.switches[id.0 as usize]
    }

    /// What is at a cable's two ends.
    ///
    /// # Panics
    /// If the id is of another network.
    pub fn link_ends(&self, id: LinkId) -> [Node; 2] {
        self.network.link_ends[id.0 as usize].ends
    }

    /// When the line of a host takes the next frame.
    pub fn link_free_at(&self, host: HostId) -> Instant {
        Instant::from_nanos(self.network.host_link_free_at(host))
    }

    /// Takes a frame that a host sends.
    pub fn send(&mut self, now: Instant, from: HostId, frame: Frame, sink: &mut dyn EventSink) {
        self.network.send(now, from, frame, sink);
    }

    /// Lets everything happen that was to happen by `now`, each at its own time.
    pub fn advance(&mut self, now: Instant, sink: &mut dyn EventSink) {
        while let Some((at, happening)) = self.network.event_queue.pop_until(now.nanos()) {
            let at = Instant::from_nanos(at);
            let Fabric { network, external_ports: outside, received: arrived, ready_hosts: woken } = self;
            match network.handle_event(
                at,
                happening,
                &mut ExternalPortSink { inner: sink, external_ports: outside },
            ) {
                Outcome::Nothing => {
                    if let SimEvent::HostLinkFree { host } = happening {
                        outside.on_link_free(at, host, network, woken, sink);
                    }
                }
                Outcome::Arrived { host, slot } => {
                    arrived[host.0 as usize].push_back(network.event_queue.pool.remove(slot));
                    woken.push(host);
                }
                Outcome::Paused { host, .. } if outside.contains(host) => {
                    outside.on_pause_change(at, host, network, woken, sink);
                }
                Outcome::Paused { host, .. } => woken.push(host),
            }
        }
    }

    /// Takes a frame that came from another machine for a host. It waits for the line that its sender's port has to
    /// the switch of the host, behind at most `most` bytes of the same sender: what is beyond that is lost. Gives the
    /// frame back if there are too many such ports already.
    pub fn inject_external(
        &mut self,
        now: Instant,
        host: HostId,
        frame: Frame,
        most: u64,
        sink: &mut dyn EventSink,
    ) -> Result<(), Frame> {
        let Fabric { network, external_ports: outside, ready_hosts: woken, .. } = self;
        let index = match outside.find(host, frame.addressing.source) {
            Some(index) => index,
            None => match outside.attach(now, host, &frame.addressing, network, sink) {
                Some(index) => index,
                None => return Err(frame),
            },
        };
        outside.enqueue(now, index, frame, most, network, woken, sink);
        Ok(())
    }

    /// What changed at one of the ports of other machines that send to a host, since it was last told here.
    pub fn next_external_update(&mut self, host: HostId) -> Option<ExternalPortUpdate> {
        self.external_ports.next_update(host)
    }

    /// Whether frames of another machine are on their way to a host.
    pub fn has_in_flight(&self, host: HostId, peer: IpAddr) -> bool {
        self.external_ports.has_in_flight(host, peer)
    }

    /// Another machine is gone: what it sent to a host and what still waits for its line is dropped.
    pub fn drop_peer(&mut self, host: HostId, peer: IpAddr) {
        self.external_ports.drop_peer(host, peer);
    }

    /// The ports of other machines: the host that each sends to, its address, the cable, and its own counters.
    pub fn external_ports(&self) -> impl Iterator<Item = (HostId, IpAddr, LinkId, HostPortCounters)> {
        self.external_ports
            .ports()
            .map(|(host, address, cable, port)| (host, address, cable, self.port_counters(port)))
    }

    /// A host that has something to look at since it was last told here.
    pub fn next_ready_host(&mut self) -> Option<HostId> {
        self.ready_hosts.pop()
    }

    /// The oldest frame that has arrived at a host, and whether another machine sent it.
    pub fn receive(&mut self, host: HostId) -> Option<(Frame, Origin)> {
        let frame = self.received[host.0 as usize].pop_front()?;
        let origin = self.external_ports.record_departure(host, frame.addressing.source);
        Some((frame, origin))
    }

    /// The priorities that a host may not send now, as a mask.
    pub fn paused_priorities(&self, host: HostId) -> u8 {
        self.network.hosts[host.0 as usize].pauses.mask()
    }

    /// What the port of a host counted about pauses and its buffer.
    pub fn port_counters(&self, host: HostId) -> HostPortCounters {
        self.network.hosts[host.0 as usize].counters()
    }

    /// Changes how fast a host takes what arrives.
    pub fn set_receiver(
        &mut self,
        now: Instant,
        host: HostId,
        receiver: ReceiverSettings,
        sink: &mut dyn EventSink,
    ) {
        self.network.set_receiver(now, host, receiver, sink);
    }

    /// When the next thing happens.
    pub fn next_at(&self) -> Option<Instant> {
        self.network.event_queue.next_at().map(Instant::from_nanos)
    }

    /// How many frames went where; those that nobody took yet have been delivered.
    pub fn frame_counters(&self) -> FrameCounters {
        self.network.frame_counters()
    }
}
