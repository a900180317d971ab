//! A network driven by an external clock, between hosts in real time.

use crate::network::{ExternalPortSink, ExternalPorts, Moment, Network, Outcome};
use crate::sim_event::SimEvent;
use crate::sink::EventSink;
use crate::{
    BuiltTopology, ExternalPortUpdate, Frame, FrameCounters, HostId, HostPortCounters, LinkId, LinkSettings,
    Node, Origin, ReceiverSettings, Seed, Switch, SwitchId, SwitchSettings, Topology, TopologyError,
};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_engine::Instant;

/// Links and switches between hosts that other code drives.
///
/// [`Fabric::send`] accepts frames, [`Fabric::advance`] advances time, and [`Fabric::receive`] returns the
/// frames that have arrived. A sender waits until [`Fabric::link_free_at`], as a port does. Frames from other
/// machines enter with [`Fabric::inject_external`], each machine over its own link;
/// [`Fabric::next_external_update`] returns the pauses that the network requests from them.
pub struct Fabric {
    network: Network,
    external_ports: ExternalPorts,
    /// Frames that arrived, by host.
    received: Vec<VecDeque<Frame>>,
    /// Hosts with new frames or changed pauses.
    ready_hosts: Vec<HostId>,
}

impl Fabric {
    /// Connects hosts with these addresses in a topology. The number of hosts must match.
    pub fn new(
        seed: u64,
        addresses: &[IpAddr],
        topology: &Topology,
        link_settings: LinkSettings,
        settings: SwitchSettings,
    ) -> Result<(Fabric, BuiltTopology), TopologyError> {
        let layout = topology.layout()?;
        if addresses.len() != layout.hosts as usize {
            return Err(TopologyError::WrongHostCount { hosts: addresses.len(), expected: layout.hosts });
        }
        let mut network = Network::new(Seed(seed));
        let hosts: Vec<_> = addresses.iter().map(|address| network.add_host(*address)).collect();
        let built = network.build_layout(&layout, &hosts, link_settings, settings);
        let arrived = hosts.iter().map(|_| VecDeque::new()).collect();
        Ok((
            Fabric {
                network,
                external_ports: ExternalPorts::new(link_settings),
                received: arrived,
                ready_hosts: Vec::new(),
            },
            built,
        ))
    }

    pub fn host_with_address(&self, address: IpAddr) -> Option<HostId> {
        self.network.addresses.find(address)
    }

    /// A switch.
    ///
    /// # Panics
    /// If the ID belongs to another network.
    pub fn switch(&self, id: SwitchId) -> &Switch {
        &self.network.switches[id.0 as usize]
    }

    /// The nodes at the two ends of a link.
    ///
    /// # Panics
    /// If the ID belongs to another network.
    pub fn link_ends(&self, id: LinkId) -> [Node; 2] {
        self.network.link_ends[id.0 as usize].ends
    }

    /// When the host's link can accept the next frame.
    pub fn link_free_at(&self, host: HostId) -> Instant {
        Instant::from_nanos(self.network.host_link_free_at(host))
    }

    /// Accepts a frame from a host.
    pub fn send(&mut self, now: Instant, from: HostId, frame: Frame, sink: &mut dyn EventSink) {
        self.network.send(&mut Moment { now, sink }, from, frame);
    }

    /// Processes all events due by `now`, in order.
    pub fn advance(&mut self, now: Instant, sink: &mut dyn EventSink) {
        while let Some((at, event)) = self.network.event_queue.pop_until(now.nanos()) {
            let at = Instant::from_nanos(at);
            let Fabric { network, external_ports, received: arrived, ready_hosts } = self;
            let port_sink = &mut ExternalPortSink { inner: sink, external_ports };
            let outcome = network.handle_event(&mut Moment { now: at, sink: port_sink }, event);
            let moment = &mut Moment { now: at, sink };
            match outcome {
                Outcome::Nothing => {
                    if let SimEvent::HostLinkFree { host } = event {
                        external_ports.on_link_free(moment, host, network, ready_hosts);
                    }
                }
                Outcome::Arrived { host, slot } => {
                    arrived[host.0 as usize].push_back(network.event_queue.pool.remove(slot));
                    ready_hosts.push(host);
                }
                Outcome::Paused { host, .. } if external_ports.contains(host) => {
                    external_ports.on_pause_change(moment, host, network, ready_hosts);
                }
                Outcome::Paused { host, .. } => ready_hosts.push(host),
            }
        }
    }

    /// Accepts a frame from another machine to a host. It queues at the sender's external port to the host's
    /// switch. Drops the frame if the port already has `max_queued_bytes` queued. Returns the frame if all
    /// external ports are in use.
    pub fn inject_external(
        &mut self,
        now: Instant,
        host: HostId,
        frame: Frame,
        most: u64,
        sink: &mut dyn EventSink,
    ) -> Result<(), Frame> {
        let Fabric { network, external_ports, ready_hosts, .. } = self;
        let moment = &mut Moment { now, sink };
        let index = match external_ports.find(host, frame.addressing.source) {
            Some(index) => index,
            None => match external_ports.attach(moment, host, &frame.addressing, network) {
                Some(index) => index,
                None => return Err(frame),
            },
        };
        external_ports.enqueue(moment, index, frame, most, network, ready_hosts);
        Ok(())
    }

    /// The next change at an external port that sends to a host.
    pub fn next_external_update(&mut self, host: HostId) -> Option<ExternalPortUpdate> {
        self.external_ports.next_update(host)
    }

    /// Whether frames from another machine to a host are in flight.
    pub fn has_in_flight(&self, host: HostId, peer: IpAddr) -> bool {
        self.external_ports.has_in_flight(host, peer)
    }

    /// Removes another machine: drops its frames that are still queued.
    pub fn drop_peer(&mut self, host: HostId, peer: IpAddr) {
        self.external_ports.drop_peer(host, peer);
    }

    /// The external ports: destination host, address, link and counters.
    pub fn external_ports(&self) -> impl Iterator<Item = (HostId, IpAddr, LinkId, HostPortCounters)> {
        self.external_ports
            .ports()
            .map(|(host, address, link, port)| (host, address, link, self.port_counters(port)))
    }

    /// The next host with new frames or changed pauses.
    pub fn next_ready_host(&mut self) -> Option<HostId> {
        self.ready_hosts.pop()
    }

    /// Removes the oldest frame that arrived at a host. Also returns whether another machine sent it.
    pub fn receive(&mut self, host: HostId) -> Option<(Frame, Origin)> {
        let frame = self.received[host.0 as usize].pop_front()?;
        let origin = self.external_ports.record_departure(host, frame.addressing.source);
        Some((frame, origin))
    }

    /// Bit mask of the priorities that PFC has paused at a host.
    pub fn paused_priorities(&self, host: HostId) -> u8 {
        self.network.hosts[host.0 as usize].pauses.mask()
    }

    /// PFC and buffer counters of a host's port.
    pub fn port_counters(&self, host: HostId) -> HostPortCounters {
        self.network.hosts[host.0 as usize].counters()
    }

    /// Changes the receiver of a host.
    pub fn set_receiver(
        &mut self,
        now: Instant,
        host: HostId,
        receiver: ReceiverSettings,
        sink: &mut dyn EventSink,
    ) {
        self.network.set_receiver(&mut Moment { now, sink }, host, receiver);
    }

    /// When the next event is due.
    pub fn next_at(&self) -> Option<Instant> {
        self.network.event_queue.next_at().map(Instant::from_nanos)
    }

    /// Frame counters. Frames that no host has received yet count as delivered.
    pub fn frame_counters(&self) -> FrameCounters {
        self.network.frame_counters()
    }
}
