//! External ports: the ports of other machines. Each has its own link to the switch of the host that it sends
//! to.
//!
//! Frames from another machine queue here for the link and for PFC pauses. The external port honors a pause
//! at once, independent of the machine. Pause requests stay pending until the caller forwards them to the
//! machine.

use super::{Moment, Network};
use crate::fabric_event::PacketId;
use crate::sim_event::SimEvent;
use crate::sink::{EventSink, NetworkEvent};
use crate::{Direction, FabricEvent, Frame, FrameDropReason, HostId, LinkId, LinkSettings, Node, Stage};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_engine::Instant;
use softhca_wire::{AddressHeaders, Pfc};

/// The limit of external ports. Frames from further machines bypass the network.
const MAX_PORTS: usize = 1024;

/// The origin of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A host of the network.
    Internal,
    /// Another machine.
    External,
}

/// A change at an external port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExternalPortUpdate {
    /// The machine's address.
    pub peer: IpAddr,
    pub queued_bytes: u64,
    /// The pending pause request: the latest value for each priority.
    pub pause: Option<Pfc>,
}

struct ExternalPort {
    /// The port's own ID in the network; the destination host follows.
    id: HostId,
    host: HostId,
    address: IpAddr,
    /// The address of the destination host.
    destination: IpAddr,
    link: LinkId,
    queues: [VecDeque<Frame>; 8],
    /// Bit mask of the non-empty queues.
    occupied: u8,
    queued_bytes: u64,
    /// Frames queued here or in flight to the host.
    in_flight: u64,
    /// An event for the free link is scheduled.
    waiting_for_link: bool,
    pending_pause: Option<Pfc>,
}

impl ExternalPort {
    fn pop(&mut self, priority: u8) -> Option<Frame> {
        let queue = &mut self.queues[usize::from(priority)];
        let frame = queue.pop_front()?;
        if queue.is_empty() {
            self.occupied &= !(1 << priority);
        }
        self.queued_bytes -= frame.bytes.len() as u64;
        Some(frame)
    }
}

#[derive(Default)]
pub(crate) struct ExternalPorts {
    settings: LinkSettings,
    ports: Vec<ExternalPort>,
    by_ends: BTreeMap<(HostId, IpAddr), usize>,
    by_id: BTreeMap<HostId, usize>,
    by_link: BTreeMap<LinkId, usize>,
    /// Ports with a change to report.
    updated: BTreeSet<(HostId, usize)>,
}

impl ExternalPorts {
    /// No ports; new ones get links with these settings.
    pub fn new(link_settings: LinkSettings) -> ExternalPorts {
        ExternalPorts { settings: link_settings, ..ExternalPorts::default() }
    }

    pub fn contains(&self, id: HostId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub fn find(&self, host: HostId, peer: IpAddr) -> Option<usize> {
        self.by_ends.get(&(host, peer)).copied()
    }

    /// Connects a port to the switch of a host, or to the host itself if it has no switch.
    pub fn attach(
        &mut self,
        moment: &mut Moment<'_>,
        host: HostId,
        addressing: &AddressHeaders,
        network: &mut Network,
    ) -> Option<usize> {
        let AddressHeaders { source: address, destination, .. } = *addressing;
        if self.ports.len() >= MAX_PORTS {
            return None;
        }
        let uplink = network.hosts[host.0 as usize].uplinks.first().copied();
        let there = match uplink {
            Some((link, direction)) => network.link_source(link, direction.reverse()),
            None => Node::Host(host),
        };
        let id = network.add_port(address);
        let ends = [Node::Host(id), there];
        let link = network.add_link(ends, self.settings);
        let index = self.ports.len();
        self.ports.push(ExternalPort {
            id,
            host,
            address,
            destination,
            link,
            queues: Default::default(),
            occupied: 0,
            queued_bytes: 0,
            in_flight: 0,
            waiting_for_link: false,
            pending_pause: None,
        });
        self.by_ends.insert((host, address), index);
        self.by_id.insert(id, index);
        self.by_link.insert(link, index);
        moment.on_event(&NetworkEvent::PortAttached { port: id, address, link, ends });
        Some(index)
    }

    /// Queues a frame, or drops it if the queue is full.
    pub fn enqueue(
        &mut self,
        moment: &mut Moment<'_>,
        index: usize,
        frame: Frame,
        max_queued_bytes: u64,
        network: &mut Network,
        ready_hosts: &mut Vec<HostId>,
    ) {
        let port = &mut self.ports[index];
        let (priority, bytes) = (frame.priority(), frame.bytes.len() as u64);
        if port.queued_bytes + bytes > max_queued_bytes {
            let (node, link, packet) = (Node::Host(port.id), port.link, PacketId::of(&frame));
            let reason = FrameDropReason::BufferFull;
            return moment.emit(FabricEvent::FrameDropped { node, link, priority, reason, packet });
        }
        port.queued_bytes += bytes;
        port.in_flight += 1;
        port.occupied |= 1 << priority;
        port.queues[usize::from(priority)].push_back(frame);
        self.updated.insert((port.host, index));
        self.serve(moment, index, network, ready_hosts);
    }

    /// Sends frames while the link is free: highest unpaused priority first, as hosts do.
    fn serve(
        &mut self,
        moment: &mut Moment<'_>,
        index: usize,
        network: &mut Network,
        ready_hosts: &mut Vec<HostId>,
    ) {
        loop {
            let port = &mut self.ports[index];
            let may = port.occupied & !network.hosts[port.id.0 as usize].pauses.mask();
            if may == 0 {
                return;
            }
            let free_at = network.host_link_free_at(port.id);
            if free_at > moment.now.nanos() {
                if !port.waiting_for_link {
                    port.waiting_for_link = true;
                    network.event_queue.push(free_at, SimEvent::HostLinkFree { host: port.id });
                }
                return;
            }
            let Some(frame) = port.pop(7 - may.leading_zeros() as u8) else { return };
            let (host, way) = (port.host, (port.link, Direction::Forward));
            if port.occupied == 0 {
                ready_hosts.push(host);
            }
            self.updated.insert((host, index));
            let Moment { now, sink: inner } = moment;
            let sink = &mut ExternalPortSink { inner: *inner, external_ports: self };
            network.send_on_link(&mut Moment { now: *now, sink }, way, host, frame);
        }
    }

    /// Handles a free link, if it belongs to an external port.
    pub fn on_link_free(
        &mut self,
        moment: &mut Moment<'_>,
        id: HostId,
        network: &mut Network,
        ready_hosts: &mut Vec<HostId>,
    ) {
        if let Some(index) = self.by_id.get(&id).copied() {
            self.ports[index].waiting_for_link = false;
            self.serve(moment, index, network, ready_hosts);
        }
    }

    /// Handles a pause or resume of an external port.
    pub fn on_pause_change(
        &mut self,
        moment: &mut Moment<'_>,
        id: HostId,
        network: &mut Network,
        ready_hosts: &mut Vec<HostId>,
    ) {
        if let Some(index) = self.by_id.get(&id).copied() {
            ready_hosts.push(self.ports[index].host);
            self.serve(moment, index, network, ready_hosts);
        }
    }

    /// The next change at a port that sends to `host`.
    pub fn next_update(&mut self, host: HostId) -> Option<ExternalPortUpdate> {
        let entry = *self.updated.range((host, 0)..=(host, usize::MAX)).next()?;
        self.updated.remove(&entry);
        let port = &mut self.ports[entry.1];
        Some(ExternalPortUpdate {
            peer: port.address,
            queued_bytes: port.queued_bytes,
            pause: port.pending_pause.take(),
        })
    }

    pub fn has_in_flight(&self, host: HostId, peer: IpAddr) -> bool {
        self.find(host, peer).is_some_and(|index| self.ports[index].in_flight > 0)
    }

    /// Accounts for a frame that left the network or was dropped.
    pub fn record_departure(&mut self, host: HostId, peer: IpAddr) -> Origin {
        match self.find(host, peer) {
            Some(index) => {
                let port = &mut self.ports[index];
                port.in_flight = port.in_flight.saturating_sub(1);
                Origin::External
            }
            None => Origin::Internal,
        }
    }

    /// Accounts for a dropped frame between these addresses.
    fn record_drop(&mut self, packet: &PacketId) {
        let ends = (packet.source, packet.destination);
        if let Some(port) = self.ports.iter_mut().find(|port| (port.address, port.destination) == ends) {
            port.in_flight = port.in_flight.saturating_sub(1);
        }
    }

    pub fn drop_peer(&mut self, host: HostId, peer: IpAddr) {
        if let Some(index) = self.find(host, peer) {
            let port = &mut self.ports[index];
            let dropped: usize = port.queues.iter().map(VecDeque::len).sum();
            port.in_flight -= dropped as u64;
            port.queues.iter_mut().for_each(VecDeque::clear);
            (port.occupied, port.queued_bytes, port.pending_pause) = (0, 0, None);
            self.updated.insert((host, index));
        }
    }

    pub fn ports(&self) -> impl Iterator<Item = (HostId, IpAddr, LinkId, HostId)> {
        self.ports.iter().map(|port| (port.host, port.address, port.link, port.id))
    }
}

/// Forwards events to another sink and tracks those that concern external ports.
pub(crate) struct ExternalPortSink<'a> {
    pub inner: &'a mut dyn EventSink,
    pub external_ports: &'a mut ExternalPorts,
}

impl EventSink for ExternalPortSink<'_> {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        self.inner.on_event(now, event);
        match event {
            NetworkEvent::PauseFrame {
                link,
                direction: Direction::Backward,
                stage: Stage::Delivered,
                pause,
            } => {
                if let Some(index) = self.external_ports.by_link.get(link).copied() {
                    let port = &mut self.external_ports.ports[index];
                    let pending = port.pending_pause.get_or_insert(**pause);
                    for (known, later) in pending.pause.iter_mut().zip(pause.pause) {
                        *known = later.or(*known);
                    }
                    self.external_ports.updated.insert((port.host, index));
                }
            }
            NetworkEvent::Fabric(FabricEvent::FrameDropped { packet, .. }) => {
                self.external_ports.record_drop(packet);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fabric, PfcSettings, ReceiverSettings, SwitchSettings, Topology};
    use alloc::vec;
    use core::net::Ipv4Addr;
    use core::num::NonZeroU64;

    const BOB: HostId = HostId(0);

    fn address(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }

    /// Bob behind a switch; his receiver has a tenth of the link rate.
    fn slow_host() -> Fabric {
        let link_settings = LinkSettings {
            bits_per_second: NonZeroU64::new(1_000_000_000),
            delay_ns: 1_000,
            ..LinkSettings::default()
        };
        let flow_control = Some(PfcSettings { xoff: 16_000, xon: 12_000, ..PfcSettings::default() });
        let settings = SwitchSettings { pfc: flow_control, ..SwitchSettings::default() };
        let (mut fabric, _) =
            Fabric::new(1, &[address(1)], &Topology::Star { hosts: 1 }, link_settings, settings).unwrap();
        let receiver = ReceiverSettings {
            bits_per_second: Some(100_000_000),
            pfc: settings.pfc,
            ..ReceiverSettings::default()
        };
        fabric.set_receiver(Instant::from_nanos(0), BOB, receiver, &mut ());
        fabric
    }

    /// A packet of priority 3 with a number as its content.
    fn packet(from: u8, number: u8) -> Frame {
        let addressing =
            AddressHeaders { traffic_class: 3 << 5, ..AddressHeaders::between(address(from), address(1)) };
        Frame::new(addressing, vec![number; 1_000])
    }

    #[derive(Default)]
    struct Losses(Vec<FrameDropReason>);

    impl EventSink for Losses {
        fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
            if let NetworkEvent::Fabric(FabricEvent::FrameDropped { reason, .. }) = event {
                self.0.push(*reason);
            }
        }
    }

    /// Processes all events. Returns the numbers that Bob received and the pause times for priority 3 sent to
    /// machines.
    fn settle(fabric: &mut Fabric, losses: &mut Losses) -> (Vec<u8>, Vec<(IpAddr, u16)>) {
        let (mut taken, mut reported) = (Vec::new(), Vec::new());
        while let Some(at) = fabric.next_at() {
            fabric.advance(at, losses);
            while let Some((frame, origin)) = fabric.receive(BOB) {
                assert_eq!(origin, Origin::External);
                taken.push(frame.bytes[0]);
            }
            while let Some(news) = fabric.next_external_update(BOB) {
                reported
                    .extend(news.pause.and_then(|pause| pause.pause[3]).map(|quanta| (news.peer, quanta)));
            }
        }
        (taken, reported)
    }

    #[test]
    fn slow_host_pauses_and_resumes_other_machines_without_loss() {
        let (mut fabric, mut losses) = (slow_host(), Losses::default());
        for number in 0..200 {
            fabric
                .inject_external(Instant::from_nanos(0), BOB, packet(2, number), u64::MAX, &mut losses)
                .unwrap();
        }
        assert!(fabric.has_in_flight(BOB, address(2)) && !fabric.has_in_flight(BOB, address(3)));
        let (taken, reported) = settle(&mut fabric, &mut losses);
        assert_eq!(taken, (0..200).collect::<Vec<u8>>(), "all of it, in its order");
        assert_eq!(losses.0, []);
        assert_eq!(reported.first(), Some(&(address(2), u16::MAX)));
        assert_eq!(reported.last(), Some(&(address(2), 0)));
        assert!(!fabric.has_in_flight(BOB, address(2)) && fabric.frame_counters().is_balanced());
        let ports: Vec<_> = fabric.external_ports().collect();
        let [(BOB, peer, link, port)] = ports[..] else { panic!("{ports:?}") };
        assert_eq!(peer, address(2));
        assert_eq!(port.pauses_received[3] as usize, reported.len());
        assert_eq!(fabric.link_ends(link)[1], Node::Switch(crate::SwitchId(0)));
    }

    #[test]
    fn machine_that_exceeds_its_queue_loses_only_its_own_frames() {
        let (mut fabric, mut losses) = (slow_host(), Losses::default());
        for number in 0..100 {
            fabric
                .inject_external(Instant::from_nanos(0), BOB, packet(2, number), 10_000, &mut losses)
                .unwrap();
        }
        fabric.inject_external(Instant::from_nanos(0), BOB, packet(3, 200), 10_000, &mut losses).unwrap();
        // One frame was sent at once, ten were queued.
        assert_eq!(losses.0, [FrameDropReason::BufferFull; 89]);
        let (taken, _) = settle(&mut fabric, &mut losses);
        assert_eq!((taken.len(), losses.0.len()), (12, 89));
        assert!(taken.contains(&200));
    }

    #[test]
    fn queued_frames_of_a_removed_machine_are_dropped() {
        let (mut fabric, mut losses) = (slow_host(), Losses::default());
        for number in 0..10 {
            fabric
                .inject_external(Instant::from_nanos(0), BOB, packet(2, number), u64::MAX, &mut losses)
                .unwrap();
        }
        fabric.drop_peer(BOB, address(2));
        let news = fabric.next_external_update(BOB).unwrap();
        assert_eq!((news.peer, news.queued_bytes), (address(2), 0));
        assert_eq!(settle(&mut fabric, &mut losses).0, [0], "what was on its way arrives");
        assert!(!fabric.has_in_flight(BOB, address(2)));
    }
}
