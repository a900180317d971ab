//! The port of a host: pauses that it honours, and a receiver that may be slow and ask for pauses itself.

use crate::agenda::Happening;
use crate::network::{Network, Output};
use crate::observer::Observer;
use crate::pause::{FlowControl, Ingress, PauseChange, Pauses, pause_ns};
use crate::slots::Slot;
use crate::switching::pause_frame;
use crate::{CableId, Direction, FabricEvent, HostId, LossCause, Node, PauseEnd};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;
use softhca_engine::Instant;
use softhca_wire::MacAddress;

/// How fast a host takes what arrives, and what it does if that is not fast enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receiver {
    /// How fast frames go from the port to the card; none for at once, zero for not at all.
    pub bits_per_second: Option<u64>,
    /// Bytes that wait for the card at most.
    pub buffer: u64,
    /// Pauses the sender before frames are lost; none lets them be lost.
    pub flow_control: Option<FlowControl>,
    /// Priorities for which the port asks for pauses without end, whatever its buffer holds: a broken card.
    pub storm: u8,
    /// How long the port may keep its sender stopped. After that it stops asking, and loses what it cannot
    /// take, until it has room again.
    pub watchdog: Option<Duration>,
}

impl Default for Receiver {
    fn default() -> Receiver {
        Receiver {
            bits_per_second: None,
            buffer: 512 << 10,
            flow_control: Some(FlowControl { xoff: 128 << 10, xon: 96 << 10, ..FlowControl::default() }),
            storm: 0,
            watchdog: None,
        }
    }
}

/// What the port of a host counted about pauses and its buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPortCounters {
    /// Pause frames sent, for each priority; those that let the peer go on included.
    pub pauses_sent: [u64; 8],
    /// Pause frames that came, for each priority.
    pub pauses_received: [u64; 8],
    /// How long each priority was stopped, in nanoseconds.
    pub paused_ns: [u64; 8],
    /// Frames that the buffer had no room for.
    pub lost_frames: u64,
    /// How often the watchdog acted.
    pub watchdog_fired: u64,
}

/// The port of a host. What every frame touches stands together and first.
#[repr(C, align(64))]
pub(crate) struct HostPort {
    /// The only cable, if there is one, and if it leads to a switch.
    pub only: Option<(CableId, Direction)>,
    /// Frames that wait for the card.
    queue: VecDeque<u32>,
    pub receiver: Receiver,
    pub address: IpAddr,
    pub cables: Vec<(CableId, Direction)>,
    /// The cables to hosts, and those to switches.
    pub direct: BTreeMap<HostId, (CableId, Direction)>,
    pub uplinks: Vec<(CableId, Direction)>,
    pub pauses: Pauses,
    ingress: Ingress,
    /// Bytes that wait for the card, for each priority.
    held: [u64; 8],
    buffered: u64,
    /// A frame is on its way from the port to the card.
    drains: bool,
    /// Priorities for which the watchdog lets nothing be asked.
    muted: u8,
    lost_frames: u64,
    watchdog_fired: u64,
}

impl HostPort {
    pub fn new(address: IpAddr) -> HostPort {
        HostPort {
            only: None,
            address,
            cables: Vec::new(),
            direct: BTreeMap::new(),
            uplinks: Vec::new(),
            pauses: Pauses::default(),
            receiver: Receiver::default(),
            ingress: Ingress::default(),
            held: [0; 8],
            queue: VecDeque::new(),
            buffered: 0,
            drains: false,
            muted: 0,
            lost_frames: 0,
            watchdog_fired: 0,
        }
    }

    /// A cable leads from here to a host or a switch.
    pub fn connect(&mut self, way: (CableId, Direction), to: Node) {
        self.cables.push(way);
        match to {
            Node::Host(to) => _ = self.direct.insert(to, way),
            Node::Switch(_) => self.uplinks.push(way),
        }
        self.only = match (&*self.cables, &*self.uplinks) {
            ([_], [only]) => Some(*only),
            _ => None,
        };
    }

    pub fn counters(&self) -> HostPortCounters {
        HostPortCounters {
            pauses_sent: self.ingress.sent(),
            pauses_received: self.pauses.received(),
            paused_ns: self.pauses.total_ns(),
            lost_frames: self.lost_frames,
            watchdog_fired: self.watchdog_fired,
        }
    }
}

impl Network {
    pub fn arrive_at_host(
        &mut self,
        now: Instant,
        host: HostId,
        cable: CableId,
        slot: u32,
        observer: &mut dyn Observer,
    ) -> Output {
        let Slot { is_pause, priority, bytes, .. } = *self.agenda.slots.at(slot);
        if is_pause {
            return self.pause_host(now, host, cable, slot, observer);
        }
        let port = &mut self.hosts[host.0 as usize];
        if port.receiver.bits_per_second.is_none() && port.queue.is_empty() {
            self.note_arrived();
            return Output::Arrived { host, slot };
        }
        let bytes = u64::from(bytes);
        if port.buffered + bytes > port.receiver.buffer {
            port.lost_frames += 1;
            self.lose(now, Node::Host(host), cable, slot, LossCause::BufferFull, observer);
            return Output::Nothing;
        }
        port.buffered += bytes;
        port.queue.push_back(slot);
        let flow = port.receiver.flow_control.filter(|_| port.muted >> priority & 1 == 0);
        let held = &mut port.held[usize::from(priority)];
        *held += bytes;
        if port.ingress.fill(flow.as_ref(), now.nanos(), priority, *held) {
            self.ask_sender(now, host, priority, observer);
        }
        self.drain_next(now, host);
        Output::Nothing
    }

    /// Sets a timer for the oldest frame in the buffer to reach the card.
    fn drain_next(&mut self, now: Instant, host: HostId) {
        let port = &mut self.hosts[host.0 as usize];
        let Some(slot) = port.queue.front().copied().filter(|_| !port.drains) else { return };
        let bits = self.agenda.slots.frame(slot).wire_length() as u64 * 8;
        let wait = match port.receiver.bits_per_second {
            None => 0,
            Some(0) => return,
            Some(rate) => (bits * 1_000_000_000).div_ceil(rate),
        };
        port.drains = true;
        self.agenda.push(now.nanos() + wait, Happening::Drain { host });
    }

    /// The oldest frame in the buffer reaches the card.
    pub fn drain(&mut self, now: Instant, host: HostId, observer: &mut dyn Observer) -> Output {
        let port = &mut self.hosts[host.0 as usize];
        port.drains = false;
        if port.receiver.bits_per_second == Some(0) {
            return Output::Nothing;
        }
        let Some(slot) = port.queue.pop_front() else { return Output::Nothing };
        let Slot { priority, bytes, .. } = *self.agenda.slots.at(slot);
        let bytes = u64::from(bytes);
        port.buffered -= bytes;
        let flow = port.receiver.flow_control;
        let held = &mut port.held[usize::from(priority)];
        *held -= bytes;
        if flow.is_some_and(|flow| *held <= flow.xon) {
            port.muted &= !(1 << priority);
        }
        let storms = port.receiver.storm >> priority & 1 == 1;
        if port.ingress.release(flow.as_ref(), priority, *held) {
            match storms {
                true => port.ingress.stop(now.nanos(), priority),
                false => self.tell_sender(now, host, priority, 0, observer),
            }
        }
        self.drain_next(now, host);
        self.note_arrived();
        Output::Arrived { host, slot }
    }

    /// Changes how fast a host takes what arrives.
    pub fn set_receiver(
        &mut self,
        now: Instant,
        host: HostId,
        receiver: Receiver,
        observer: &mut dyn Observer,
    ) {
        let port = &mut self.hosts[host.0 as usize];
        let before = core::mem::replace(&mut port.receiver, receiver).storm;
        for priority in 0..8 {
            let port = &mut self.hosts[host.0 as usize];
            let is = |mask: u8| mask >> priority & 1 == 1;
            if is(receiver.storm) && !port.ingress.is_stopped(priority) {
                port.ingress.stop(now.nanos(), priority);
                self.ask_sender(now, host, priority, observer);
            } else if is(before) && !is(receiver.storm) && port.ingress.release(None, priority, 0) {
                self.tell_sender(now, host, priority, 0, observer);
            }
        }
        self.drain_next(now, host);
    }

    /// Tells everybody who sends to a host to stop, and sees to it that they are told again.
    fn ask_sender(&mut self, now: Instant, host: HostId, priority: u8, observer: &mut dyn Observer) {
        let port = &mut self.hosts[host.0 as usize];
        let quanta = port.receiver.flow_control.map_or(u16::MAX, |flow| flow.quanta);
        let rates = port.cables.iter().map(|(cable, _)| self.cables[cable.0 as usize].line().bits_per_second);
        let lasts = rates.map(|rate| pause_ns(quanta, rate)).min().unwrap_or(0);
        let again = now.nanos() + (lasts / 2).max(1);
        port.ingress.ask_again(priority, again);
        self.agenda.push(again, Happening::HostRefresh { host, priority });
        if let Some(after) = port.receiver.watchdog
            && port.ingress.stopped_at(priority) == now.nanos()
        {
            self.agenda.push(now.plus(after).nanos(), Happening::HostWatch { host, priority });
        }
        self.tell_sender(now, host, priority, quanta, observer);
    }

    fn tell_sender(
        &mut self,
        now: Instant,
        host: HostId,
        priority: u8,
        quanta: u16,
        observer: &mut dyn Observer,
    ) {
        let port = &mut self.hosts[host.0 as usize];
        port.ingress.note_sent(priority);
        let held = port.held[usize::from(priority)];
        let pause = pause_frame(MacAddress::of(port.address), priority, quanta);
        let at = Node::Host(host);
        for index in 0..port.cables.len() {
            let (cable, direction) = self.hosts[host.0 as usize].cables[index];
            observer.fabric(now, &FabricEvent::PauseSent { at, cable, priority, quanta, held });
            self.send_pause(now, cable, direction, &pause, observer);
        }
    }

    /// A pause that a host asked for may have to be asked for again.
    pub fn refresh_host(&mut self, now: Instant, host: HostId, priority: u8, observer: &mut dyn Observer) {
        let ingress = &self.hosts[host.0 as usize].ingress;
        if ingress.is_stopped(priority) && ingress.refresh_at(priority) == now.nanos() {
            self.ask_sender(now, host, priority, observer);
        }
    }

    /// A host may have kept its sender stopped for too long.
    pub fn watch_host(&mut self, now: Instant, host: HostId, priority: u8, observer: &mut dyn Observer) {
        let port = &mut self.hosts[host.0 as usize];
        let Some(after) = port.receiver.watchdog else { return };
        let since = Instant::from_nanos(port.ingress.stopped_at(priority));
        if !port.ingress.is_stopped(priority) || since.plus(after) > now {
            return;
        }
        port.ingress.resume(priority);
        port.muted |= 1 << priority;
        port.watchdog_fired += 1;
        let at = Node::Host(host);
        if let Some((cable, _)) = port.cables.first().copied() {
            observer.fabric(now, &FabricEvent::WatchdogFired { at, cable, priority, lost: 0 });
        }
        self.tell_sender(now, host, priority, 0, observer);
    }

    /// A pause frame came to a host.
    fn pause_host(
        &mut self,
        now: Instant,
        host: HostId,
        cable: CableId,
        slot: u32,
        observer: &mut dyn Observer,
    ) -> Output {
        let at = Node::Host(host);
        let Some(pause) = self.agenda.slots.frame(slot).as_pause() else {
            self.lose(now, at, cable, slot, LossCause::Unreadable, observer);
            return Output::Nothing;
        };
        self.note_arrived();
        self.agenda.slots.release(slot);
        let rate = self.cables[cable.0 as usize].line().bits_per_second;
        let pauses = &mut self.hosts[host.0 as usize].pauses;
        for (priority, quanta) in (0..8u8).zip(pause.pause) {
            let Some(quanta) = quanta else { continue };
            let for_ns = pause_ns(quanta, rate);
            let change = pauses.apply(now.nanos(), priority, for_ns);
            let until_ns = now.nanos() + for_ns;
            observer.fabric(now, &FabricEvent::PauseReceived { at, cable, priority, quanta, until_ns });
            match change {
                PauseChange::Stopped => self.agenda.push(until_ns, Happening::HostPauseOver { host }),
                PauseChange::Resumed => {
                    let how = PauseEnd::Resumed;
                    observer.fabric(now, &FabricEvent::PauseEnded { at, cable, priority, how });
                }
                PauseChange::Nothing => {}
            }
        }
        Output::Paused { host, frames: 1 }
    }

    /// A pause of a host may be over.
    pub fn end_host_pauses(&mut self, now: Instant, host: HostId, observer: &mut dyn Observer) -> Output {
        let port = &mut self.hosts[host.0 as usize];
        let over = port.pauses.expire(now.nanos());
        let Some((cable, _)) = port.cables.first().copied().filter(|_| over != 0) else {
            return Output::Nothing;
        };
        for priority in (0..8).filter(|priority| over >> priority & 1 == 1) {
            let (at, how) = (Node::Host(host), PauseEnd::Expired);
            observer.fabric(now, &FabricEvent::PauseEnded { at, cable, priority, how });
        }
        Output::Paused { host, frames: 0 }
    }
}
