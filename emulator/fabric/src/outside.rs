//! The ports of other machines at a network: each has a cable of its own to the switch of the host that it sends to.
//!
//! What comes from such a machine waits here for the line, and for the pauses that the network asked of it: a port here
//! honours them at once, whatever the machine itself does. What it is asked for is kept until somebody tells it.

use crate::agenda::Happening;
use crate::fabric_event::Culprit;
use crate::network::Network;
use crate::observer::Observer;
use crate::{CableId, Direction, FabricEvent, Fault, Frame, HostId, Line, LossCause, Node, Stage};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_engine::{Event, Instant};
use softhca_wire::{Envelope, Pfc};

/// The most ports of other machines. What comes from more of them goes past the network.
const MOST: usize = 1024;

/// Where a frame that arrived came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A host of the network.
    Inside,
    /// Another machine.
    Outside,
}

/// What changed at the port of another machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutsideNews {
    /// The machine's address.
    pub peer: IpAddr,
    /// Bytes that wait for its line.
    pub waiting: u64,
    /// What it is asked for: the last word for each priority.
    pub pause: Option<Pfc>,
}

struct Port {
    /// Its own number in the network, and that of the host that it sends to.
    id: HostId,
    host: HostId,
    address: IpAddr,
    /// The address of the host that it sends to.
    destination: IpAddr,
    cable: CableId,
    queues: [VecDeque<Frame>; 8],
    /// The queues that hold frames.
    occupied: u8,
    waiting: u64,
    /// Frames that wait here or are on their way to the host.
    under_way: u64,
    /// It will be looked at when its line is free.
    waits: bool,
    asked: Option<Pfc>,
}

impl Port {
    fn pop(&mut self, priority: u8) -> Option<Frame> {
        let queue = &mut self.queues[usize::from(priority)];
        let frame = queue.pop_front()?;
        if queue.is_empty() {
            self.occupied &= !(1 << priority);
        }
        self.waiting -= frame.bytes.len() as u64;
        Some(frame)
    }
}

/// All ports of other machines.
pub(crate) struct Outside {
    line: Line,
    ports: Vec<Port>,
    by_ends: BTreeMap<(HostId, IpAddr), usize>,
    by_id: BTreeMap<HostId, usize>,
    by_cable: BTreeMap<CableId, usize>,
    /// Those that there is something to tell of.
    stirred: BTreeSet<(HostId, usize)>,
}

impl Outside {
    /// Nobody yet; the cables will be like this.
    pub fn new(line: Line) -> Outside {
        Outside {
            line,
            ports: Vec::new(),
            by_ends: BTreeMap::new(),
            by_id: BTreeMap::new(),
            by_cable: BTreeMap::new(),
            stirred: BTreeSet::new(),
        }
    }

    pub fn is_port(&self, id: HostId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub fn find(&self, host: HostId, peer: IpAddr) -> Option<usize> {
        self.by_ends.get(&(host, peer)).copied()
    }

    /// Connects a port to the switch of a host, or to the host itself if it has none.
    pub fn attach(
        &mut self,
        host: HostId,
        envelope: &Envelope,
        network: &mut Network,
        observer: &mut dyn Observer,
    ) -> Option<usize> {
        let Envelope { source: address, destination, .. } = *envelope;
        if self.ports.len() >= MOST {
            return None;
        }
        let uplink = network.hosts[host.0 as usize].uplinks.first().copied();
        let there = match uplink {
            Some((cable, direction)) => network.start_of(cable, direction.reverse()),
            None => Node::Host(host),
        };
        let id = network.add_port(address);
        let ends = [Node::Host(id), there];
        let cable = network.add_cable(ends, self.line);
        let index = self.ports.len();
        self.ports.push(Port {
            id,
            host,
            address,
            destination,
            cable,
            queues: Default::default(),
            occupied: 0,
            waiting: 0,
            under_way: 0,
            waits: false,
            asked: None,
        });
        self.by_ends.insert((host, address), index);
        self.by_id.insert(id, index);
        self.by_cable.insert(cable, index);
        observer.attached(id, address, cable, ends);
        Some(index)
    }

    /// Takes a frame in, unless too much waits already.
    pub fn enter(
        &mut self,
        now: Instant,
        index: usize,
        frame: Frame,
        most: u64,
        network: &mut Network,
        woken: &mut Vec<HostId>,
        observer: &mut dyn Observer,
    ) {
        let port = &mut self.ports[index];
        let (priority, bytes) = (frame.priority(), frame.bytes.len() as u64);
        if port.waiting + bytes > most {
            let (at, cable, culprit) = (Node::Host(port.id), port.cable, Culprit::of(&frame));
            let cause = LossCause::BufferFull;
            return observer.fabric(now, &FabricEvent::Lost { at, cable, priority, cause, culprit });
        }
        port.waiting += bytes;
        port.under_way += 1;
        port.occupied |= 1 << priority;
        port.queues[usize::from(priority)].push_back(frame);
        self.stirred.insert((port.host, index));
        self.serve(now, index, network, woken, observer);
    }

    /// Sends what the port may send now: the highest priority first, as hosts do.
    fn serve(
        &mut self,
        now: Instant,
        index: usize,
        network: &mut Network,
        woken: &mut Vec<HostId>,
        observer: &mut dyn Observer,
    ) {
        loop {
            let port = &mut self.ports[index];
            let may = port.occupied & !network.hosts[port.id.0 as usize].pauses.mask();
            if may == 0 {
                return;
            }
            let free_at = network.host_free_at(port.id);
            if free_at > now.nanos() {
                if !port.waits {
                    port.waits = true;
                    network.agenda.push(free_at, Happening::HostLine { host: port.id });
                }
                return;
            }
            let Some(frame) = port.pop(7 - may.leading_zeros() as u8) else { return };
            let (host, way) = (port.host, (port.cable, Direction::Forward));
            if port.occupied == 0 {
                woken.push(host);
            }
            self.stirred.insert((host, index));
            network.send_over(now, way, host, frame, &mut Border { observer, outside: self });
        }
    }

    /// The line of a port is free, if it is one of these.
    pub fn line_is_free(
        &mut self,
        now: Instant,
        id: HostId,
        network: &mut Network,
        woken: &mut Vec<HostId>,
        observer: &mut dyn Observer,
    ) {
        if let Some(index) = self.by_id.get(&id).copied() {
            self.ports[index].waits = false;
            self.serve(now, index, network, woken, observer);
        }
    }

    /// A port was told to stop, or goes on: its machine is to be told.
    pub fn pauses_changed(
        &mut self,
        now: Instant,
        id: HostId,
        network: &mut Network,
        woken: &mut Vec<HostId>,
        observer: &mut dyn Observer,
    ) {
        if let Some(index) = self.by_id.get(&id).copied() {
            woken.push(self.ports[index].host);
            self.serve(now, index, network, woken, observer);
        }
    }

    /// What there is to tell of a port that sends to `host`.
    pub fn news(&mut self, host: HostId) -> Option<OutsideNews> {
        let entry = *self.stirred.range((host, 0)..=(host, usize::MAX)).next()?;
        self.stirred.remove(&entry);
        let port = &mut self.ports[entry.1];
        Some(OutsideNews { peer: port.address, waiting: port.waiting, pause: port.asked.take() })
    }

    pub fn carries(&self, host: HostId, peer: IpAddr) -> bool {
        self.find(host, peer).is_some_and(|index| self.ports[index].under_way > 0)
    }

    /// A frame of a machine left the network, or was lost there.
    pub fn note_left(&mut self, host: HostId, peer: IpAddr) -> Origin {
        match self.find(host, peer) {
            Some(index) => {
                let port = &mut self.ports[index];
                port.under_way = port.under_way.saturating_sub(1);
                Origin::Outside
            }
            None => Origin::Inside,
        }
    }

    /// A frame between these addresses was lost in the network.
    fn note_lost(&mut self, culprit: &Culprit) {
        let ends = (culprit.source, culprit.destination);
        if let Some(port) = self.ports.iter_mut().find(|port| (port.address, port.destination) == ends) {
            port.under_way = port.under_way.saturating_sub(1);
        }
    }

    pub fn forget(&mut self, host: HostId, peer: IpAddr) {
        if let Some(index) = self.find(host, peer) {
            let port = &mut self.ports[index];
            let dropped: usize = port.queues.iter().map(VecDeque::len).sum();
            port.under_way -= dropped as u64;
            port.queues.iter_mut().for_each(VecDeque::clear);
            (port.occupied, port.waiting, port.asked) = (0, 0, None);
            self.stirred.insert((host, index));
        }
    }

    pub fn ports(&self) -> impl Iterator<Item = (HostId, IpAddr, CableId, HostId)> {
        self.ports.iter().map(|port| (port.host, port.address, port.cable, port.id))
    }
}

/// Shows everything to somebody else, and takes note of what concerns the ports of other machines.
pub(crate) struct Border<'a> {
    pub observer: &'a mut dyn Observer,
    pub outside: &'a mut Outside,
}

impl Observer for Border<'_> {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        self.observer.card(now, host, event);
    }

    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        self.observer.frame(now, cable, direction, stage, frame);
    }

    fn pause(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, pause: &Pfc) {
        self.observer.pause(now, cable, direction, stage, pause);
        let came = stage == Stage::Delivered && direction == Direction::Backward;
        if let Some(index) = self.outside.by_cable.get(&cable).copied().filter(|_| came) {
            let port = &mut self.outside.ports[index];
            let asked = port.asked.get_or_insert(*pause);
            for (known, later) in asked.pause.iter_mut().zip(pause.pause) {
                *known = later.or(*known);
            }
            self.outside.stirred.insert((port.host, index));
        }
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        self.observer.fault(now, cable, fault);
    }

    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        self.observer.fabric(now, event);
        if let FabricEvent::Lost { culprit, .. } = event {
            self.outside.note_lost(culprit);
        }
    }

    fn attached(&mut self, port: HostId, address: IpAddr, cable: CableId, ends: [Node; 2]) {
        self.observer.attached(port, address, cable, ends);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fabric, FlowControl, Receiver, SwitchSettings, Topology};
    use alloc::vec;
    use core::net::Ipv4Addr;
    use core::num::NonZeroU64;

    const BOB: HostId = HostId(0);

    fn address(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }

    /// Bob behind a switch, who takes what comes at a tenth of the rate of the lines.
    fn slow_host() -> Fabric {
        let line =
            Line { bits_per_second: NonZeroU64::new(1_000_000_000), delay_ns: 1_000, ..Line::default() };
        let flow_control = Some(FlowControl { xoff: 16_000, xon: 12_000, ..FlowControl::default() });
        let settings = SwitchSettings { flow_control, ..SwitchSettings::default() };
        let (mut fabric, _) =
            Fabric::new(1, &[address(1)], &Topology::Star { hosts: 1 }, line, settings).unwrap();
        let receiver = Receiver {
            bits_per_second: Some(100_000_000),
            flow_control: settings.flow_control,
            ..Receiver::default()
        };
        fabric.set_receiver(Instant::from_nanos(0), BOB, receiver, &mut ());
        fabric
    }

    /// A packet of priority 3 that tells its number.
    fn packet(from: u8, number: u8) -> Frame {
        let envelope = Envelope { traffic_class: 3 << 5, ..Envelope::between(address(from), address(1)) };
        Frame::new(envelope, vec![number; 1_000])
    }

    #[derive(Default)]
    struct Losses(Vec<LossCause>);

    impl Observer for Losses {
        fn fabric(&mut self, _: Instant, event: &FabricEvent) {
            if let FabricEvent::Lost { cause, .. } = event {
                self.0.push(*cause);
            }
        }
    }

    /// Lets time pass until nothing happens any more. Returns the numbers of what Bob got, and what machines were
    /// told about priority 3.
    fn settle(fabric: &mut Fabric, losses: &mut Losses) -> (Vec<u8>, Vec<(IpAddr, u16)>) {
        let (mut taken, mut told) = (Vec::new(), Vec::new());
        while let Some(at) = fabric.next_at() {
            fabric.advance(at, losses);
            while let Some((frame, origin)) = fabric.take(BOB) {
                assert_eq!(origin, Origin::Outside);
                taken.push(frame.bytes[0]);
            }
            while let Some(news) = fabric.news(BOB) {
                told.extend(news.pause.and_then(|pause| pause.pause[3]).map(|quanta| (news.peer, quanta)));
            }
        }
        (taken, told)
    }

    #[test]
    fn a_slow_host_stops_other_machines_in_time_and_lets_them_go_on() {
        let (mut fabric, mut losses) = (slow_host(), Losses::default());
        for number in 0..200 {
            fabric.enter(Instant::from_nanos(0), BOB, packet(2, number), u64::MAX, &mut losses).unwrap();
        }
        assert!(fabric.carries(BOB, address(2)) && !fabric.carries(BOB, address(3)));
        let (taken, told) = settle(&mut fabric, &mut losses);
        assert_eq!(taken, (0..200).collect::<Vec<u8>>(), "all of it, in its order");
        assert_eq!(losses.0, []);
        assert_eq!(told.first(), Some(&(address(2), u16::MAX)));
        assert_eq!(told.last(), Some(&(address(2), 0)));
        assert!(!fabric.carries(BOB, address(2)) && fabric.census().balances());
        let ports: Vec<_> = fabric.outside().collect();
        let [(BOB, peer, cable, port)] = ports[..] else { panic!("{ports:?}") };
        assert_eq!(peer, address(2));
        assert_eq!(port.pauses_received[3] as usize, told.len());
        assert_eq!(fabric.ends(cable)[1], Node::Switch(crate::SwitchId(0)));
    }

    #[test]
    fn a_machine_that_sends_more_than_it_may_loses_that_and_stops_nobody_else() {
        let (mut fabric, mut losses) = (slow_host(), Losses::default());
        for number in 0..100 {
            fabric.enter(Instant::from_nanos(0), BOB, packet(2, number), 10_000, &mut losses).unwrap();
        }
        fabric.enter(Instant::from_nanos(0), BOB, packet(3, 200), 10_000, &mut losses).unwrap();
        // One was on its way at once, ten waited.
        assert_eq!(losses.0, [LossCause::BufferFull; 89]);
        let (taken, _) = settle(&mut fabric, &mut losses);
        assert_eq!((taken.len(), losses.0.len()), (12, 89));
        assert!(taken.contains(&200));
    }

    #[test]
    fn what_waits_of_a_machine_that_is_gone_is_dropped() {
        let (mut fabric, mut losses) = (slow_host(), Losses::default());
        for number in 0..10 {
            fabric.enter(Instant::from_nanos(0), BOB, packet(2, number), u64::MAX, &mut losses).unwrap();
        }
        fabric.forget(BOB, address(2));
        let news = fabric.news(BOB).unwrap();
        assert_eq!((news.peer, news.waiting), (address(2), 0));
        assert_eq!(settle(&mut fabric, &mut losses).0, [0], "what was on its way arrives");
        assert!(!fabric.carries(BOB, address(2)));
    }
}
