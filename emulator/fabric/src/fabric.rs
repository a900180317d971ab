//! The same network under a clock that somebody else keeps: between cards in real time.

use crate::agenda::Happening;
use crate::network::{Network, Output};
use crate::observer::Observer;
use crate::outside::{Border, Outside};
use crate::{
    BadTopology, CableId, Census, Frame, HostId, HostPortCounters, Laid, Line, Node, Origin, OutsideNews,
    Receiver, Seed, Switch, SwitchId, SwitchSettings, Topology,
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
    outside: Outside,
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
        Ok((Fabric { network, outside: Outside::new(line), arrived, woken: Vec::new() }, laid))
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
            let at = Instant::from_nanos(at);
            let Fabric { network, outside, arrived, woken } = self;
            match network.happen(at, happening, &mut Border { observer, outside }) {
                Output::Nothing => {
                    if let Happening::HostLine { host } = happening {
                        outside.line_is_free(at, host, network, woken, observer);
                    }
                }
                Output::Arrived { host, slot } => {
                    arrived[host.0 as usize].push_back(network.agenda.slots.remove(slot));
                    woken.push(host);
                }
                Output::Paused { host, .. } if outside.is_port(host) => {
                    outside.pauses_changed(at, host, network, woken, observer);
                }
                Output::Paused { host, .. } => woken.push(host),
            }
        }
    }

    /// Takes a frame that came from another machine for a host. It waits for the line that its sender's port has to
    /// the switch of the host, behind at most `most` bytes of the same sender: what is beyond that is lost. Gives the
    /// frame back if there are too many such ports already.
    pub fn enter(
        &mut self,
        now: Instant,
        host: HostId,
        frame: Frame,
        most: u64,
        observer: &mut dyn Observer,
    ) -> Result<(), Frame> {
        let Fabric { network, outside, woken, .. } = self;
        let index = match outside.find(host, frame.envelope.source) {
            Some(index) => index,
            None => match outside.attach(host, &frame.envelope, network, observer) {
                Some(index) => index,
                None => return Err(frame),
            },
        };
        outside.enter(now, index, frame, most, network, woken, observer);
        Ok(())
    }

    /// What changed at one of the ports of other machines that send to a host, since it was last told here.
    pub fn news(&mut self, host: HostId) -> Option<OutsideNews> {
        self.outside.news(host)
    }

    /// Whether frames of another machine are on their way to a host.
    pub fn carries(&self, host: HostId, peer: IpAddr) -> bool {
        self.outside.carries(host, peer)
    }

    /// Another machine is gone: what it sent to a host and what still waits for its line is dropped.
    pub fn forget(&mut self, host: HostId, peer: IpAddr) {
        self.outside.forget(host, peer);
    }

    /// The ports of other machines: the host that each sends to, its address, the cable, and its own counters.
    pub fn outside(&self) -> impl Iterator<Item = (HostId, IpAddr, CableId, HostPortCounters)> {
        self.outside
            .ports()
            .map(|(host, address, cable, port)| (host, address, cable, self.port_counters(port)))
    }

    /// A host that has something to look at since it was last told here.
    pub fn woken(&mut self) -> Option<HostId> {
        self.woken.pop()
    }

    /// The oldest frame that has arrived at a host, and whether another machine sent it.
    pub fn take(&mut self, host: HostId) -> Option<(Frame, Origin)> {
        let frame = self.arrived[host.0 as usize].pop_front()?;
        let origin = self.outside.note_left(host, frame.envelope.source);
        Some((frame, origin))
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
