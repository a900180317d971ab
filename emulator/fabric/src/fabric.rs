//! The same network under a clock that somebody else keeps: between cards in real time.

use crate::network::{Network, Output};
use crate::world::Observer;
use crate::{
    BadTopology, CableId, Census, Frame, HostId, HostPortCounters, Laid, Line, Node, Receiver, Seed, Switch,
    SwitchId, SwitchSettings, Topology,
};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_engine::Instant;

/// Cables and switches between hosts whose cards somebody else drives.
///
/// Frames go in with [`Fabric::send`], time passes with [`Fabric::advance`], and what has arrived by then is taken
/// out with [`Fabric::take`]. Who sends waits until [`Fabric::free_at`], as a port does.
pub struct Fabric {
    network: Network,
    /// What has arrived at each host.
    arrived: Vec<VecDeque<Frame>>,
    /// Hosts that have something to look at: frames, or other pauses than before.
    woken: Vec<HostId>,
}

impl Fabric {
    /// Hosts with these addresses, connected as a topology says; there must be as many as it has.
    pub fn new(
        seed: u64,
        addresses: &[IpAddr],
        topology: &Topology,
        line: Line,
        settings: SwitchSettings,
    ) -> Result<(Fabric, Laid), BadTopology> {
        let layout = topology.layout()?;
        if addresses.len() != layout.hosts as usize {
            return Err(BadTopology::WrongHosts { hosts: addresses.len(), wanted: layout.hosts });
        }
        let mut network = Network::new(Seed(seed));
        let hosts: Vec<_> = addresses.iter().map(|address| network.add_host(*address)).collect();
        let laid = network.lay(&layout, &hosts, line, settings);
        let arrived = hosts.iter().map(|_| VecDeque::new()).collect();
        Ok((Fabric { network, arrived, woken: Vec::new() }, laid))
    }

    /// The host with this address.
    pub fn host_at(&self, address: IpAddr) -> Option<HostId> {
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
    pub fn ends(&self, id: CableId) -> [Node; 2] {
        self.network.links[id.0 as usize].ends
    }

    /// When the line of a host takes the next frame.
    pub fn free_at(&self, host: HostId) -> Instant {
        Instant::from_nanos(self.network.host_free_at(host))
    }

    /// Takes a frame that a host sends.
    pub fn send(&mut self, now: Instant, from: HostId, frame: Frame, observer: &mut dyn Observer) {
        self.network.send(now, from, frame, observer);
    }

    /// Lets everything happen that was to happen by `now`, each at its own time.
    pub fn advance(&mut self, now: Instant, observer: &mut dyn Observer) {
        while let Some((at, happening)) = self.network.agenda.pop_until(now.nanos()) {
            match self.network.happen(Instant::from_nanos(at), happening, observer) {
                Output::Nothing => {}
                Output::Arrived { host, frame } => {
                    self.arrived[host.0 as usize].push_back(frame);
                    self.woken.push(host);
                }
                Output::Paused { host, .. } => self.woken.push(host),
            }
        }
    }

    /// A host that has something to look at since it was last told here.
    pub fn woken(&mut self) -> Option<HostId> {
        self.woken.pop()
    }

    /// The oldest frame that has arrived at a host.
    pub fn take(&mut self, host: HostId) -> Option<Frame> {
        self.arrived[host.0 as usize].pop_front()
    }

    /// The priorities that a host may not send now, as a mask.
    pub fn paused(&self, host: HostId) -> u8 {
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
        receiver: Receiver,
        observer: &mut dyn Observer,
    ) {
        self.network.set_receiver(now, host, receiver, observer);
    }

    /// When the next thing happens.
    pub fn next_at(&self) -> Option<Instant> {
        self.network.agenda.next_at().map(Instant::from_nanos)
    }

    /// How many frames went where; those that nobody took yet have been delivered.
    pub fn census(&self) -> Census {
        self.network.census()
    }
}
