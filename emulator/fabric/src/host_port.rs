//! The port of a host: pauses that it honours, and a receiver that may be slow and ask for pauses itself.

use crate::event_queue::SimEvent;
use crate::forwarding::pause_frame;
use crate::frame_pool::Slot;
use crate::network::{Network, Outcome};
use crate::pfc::{PauseChange, PauseGenerator, PauseState, PfcSettings, pause_ns};
use crate::sink::{EventSink, NetworkEvent};
use crate::{Direction, FabricEvent, FrameDropReason, HostId, LinkId, Node, PauseEndReason};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;
use softhca_engine::Instant;
use softhca_wire::MacAddress;

/// How fast a host takes what arrives, and what it does if that is not fast enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiverSettings {
    /// How fast frames go from the port to the card; none for at once, zero for not at all.
    pub bits_per_second: Option<u64>,
    /// Bytes that wait for the card at most.
    pub buffer: u64,
    /// Pauses the sender before frames are lost; none lets them be lost.
    pub pfc: Option<PfcSettings>,
    /// Priorities for which the port asks for pauses without end, whatever its buffer holds: a broken card.
    pub pause_storm: u8,
    /// How long the port may keep its sender stopped. After that it stops asking, and loses what it cannot
    /// take, until it has room again.
    pub watchdog: Option<Duration>,
}

impl Default for ReceiverSettings {
    fn default() -> ReceiverSettings {
        ReceiverSettings {
            bits_per_second: None,
            buffer: 512 << 10,
            pfc: Some(PfcSettings { xoff: 128 << 10, xon: 96 << 10, ..PfcSettings::default() }),
            pause_storm: 0,
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
    pub dropped_frames: u64,
    /// How often the watchdog acted.
    pub watchdog_fired: u64,
}

/// The port of a host. What every frame touches stands together and first.
#[repr(C, align(64))]
pub(crate) struct HostPort {
    /// The only cable, if there is one, and if it leads to a switch.
    pub single_uplink: Option<(LinkId, Direction)>,
    /// Frames that wait for the card.
    queue: VecDeque<u32>,
    pub receiver: ReceiverSettings,
    pub address: IpAddr,
    pub links: Vec<(LinkId, Direction)>,
    /// The cables to hosts, and those to switches.
    pub direct_links: BTreeMap<HostId, (LinkId, Direction)>,
    pub uplinks: Vec<(LinkId, Direction)>,
    pub pauses: PauseState,
    pause_generator: PauseGenerator,
    /// Bytes that wait for the card, for each priority.
    ingress_bytes: [u64; 8],
    buffered: u64,
    /// A frame is on its way from the port to the card.
    draining: bool,
    /// Priorities for which the watchdog lets nothing be asked.
    watchdog_active: u8,
    dropped_frames: u64,
    watchdog_fired: u64,
}

impl HostPort {
    pub fn new(address: IpAddr) -> HostPort {
        HostPort {
            single_uplink: None,
            address,
            links: Vec::new(),
            direct_links: BTreeMap::new(),
            uplinks: Vec::new(),
            pauses: PauseState::default(),
            receiver: ReceiverSettings::default(),
            pause_generator: PauseGenerator::default(),
            ingress_bytes: [0; 8],
            queue: VecDeque::new(),
            buffered: 0,
            draining: false,
            watchdog_active: 0,
            dropped_frames: 0,
            watchdog_fired: 0,
        }
    }

    /// A cable leads from here to a host or a switch.
    pub fn connect(&mut self, way: (LinkId, Direction), to: Node) {
        self.links.push(way);
        match to {
            Node::Host(to) => _ = self.direct_links.insert(to, way),
            Node::Switch(_) => self.uplinks.push(way),
        }
        self.single_uplink = match (&*self.links, &*self.uplinks) {
            ([_], [only]) => Some(*only),
            _ => None,
        };
    }

    pub fn counters(&self) -> HostPortCounters {
        HostPortCounters {
            pauses_sent: self.pause_generator.sent(),
            pauses_received: self.pauses.received(),
            paused_ns: self.pauses.total_ns(),
            dropped_frames: self.dropped_frames,
            watchdog_fired: self.watchdog_fired,
        }
    }
}

impl Network {
    pub fn arrive_at_host(
        &mut self,
        now: Instant,
        host: HostId,
        cable: LinkId,
        slot: u32,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let Slot { is_pause, priority, bytes, .. } = *self.event_queue.pool.slot_mut(slot);
        if is_pause {
            return self.receive_pause_at_host(now, host, cable, slot, sink);
        }
        let port = &mut self.hosts[host.0 as usize];
        if port.receiver.bits_per_second.is_none() && port.queue.is_empty() {
            self.count_delivered();
            return Outcome::Arrived { host, slot };
        }
        let bytes = u64::from(bytes);
        if port.buffered + bytes > port.receiver.buffer {
            port.dropped_frames += 1;
            self.drop_frame(now, Node::Host(host), cable, slot, FrameDropReason::BufferFull, sink);
            return Outcome::Nothing;
        }
        port.buffered += bytes;
        port.queue.push_back(slot);
        let flow = port.receiver.pfc.filter(|_| port.watchdog_active >> priority & 1 == 0);
        let held = &mut port.ingress_bytes[usize::from(priority)];
        *held += bytes;
        if port.pause_generator.on_enqueue(flow.as_ref(), now.nanos(), priority, *held) {
            self.request_host_pause(now, host, priority, sink);
        }
        self.schedule_drain(now, host);
        Outcome::Nothing
    }

    /// Sets a timer for the oldest frame in the buffer to reach the card.
    fn schedule_drain(&mut self, now: Instant, host: HostId) {
        let port = &mut self.hosts[host.0 as usize];
        let Some(slot) = port.queue.front().copied().filter(|_| !port.draining) else { return };
        let bits = self.event_queue.pool.frame(slot).wire_length() as u64 * 8;
        let wait = match port.receiver.bits_per_second {
            None => 0,
            Some(0) => return,
            Some(rate) => (bits * 1_000_000_000).div_ceil(rate),
        };
        port.draining = true;
        self.event_queue.push(now.nanos() + wait, SimEvent::ReceiverDrain { host });
    }

    /// The oldest frame in the buffer reaches the card.
    pub fn drain(&mut self, now: Instant, host: HostId, sink: &mut dyn EventSink) -> Outcome {
        let port = &mut self.hosts[host.0 as usize];
        port.draining = false;
        if port.receiver.bits_per_second == Some(0) {
            return Outcome::Nothing;
        }
        let Some(slot) = port.queue.pop_front() else { return Outcome::Nothing };
        let Slot { priority, bytes, .. } = *self.event_queue.pool.slot_mut(slot);
        let bytes = u64::from(bytes);
        port.buffered -= bytes;
        let flow = port.receiver.pfc;
        let held = &mut port.ingress_bytes[usize::from(priority)];
        *held -= bytes;
        if flow.is_some_and(|flow| *held <= flow.xon) {
            port.watchdog_active &= !(1 << priority);
        }
        let storms = port.receiver.pause_storm >> priority & 1 == 1;
        if port.pause_generator.on_dequeue(flow.as_ref(), priority, *held) {
            match storms {
                true => port.pause_generator.stop(now.nanos(), priority),
                false => self.send_host_pause(now, host, priority, 0, sink),
            }
        }
        self.schedule_drain(now, host);
        self.count_delivered();
        Outcome::Arrived { host, slot }
    }

    /// Changes how fast a host takes what arrives.
    pub fn set_receiver(
        &mut self,
        now: Instant,
        host: HostId,
        receiver: ReceiverSettings,
        sink: &mut dyn EventSink,
    ) {
        let port = &mut self.hosts[host.0 as usize];
        let before = core::mem::replace(&mut port.receiver, receiver).pause_storm;
        for priority in 0..8 {
            let port = &mut self.hosts[host.0 as usize];
            let is = |mask: u8| mask >> priority & 1 == 1;
            if is(receiver.pause_storm) && !port.pause_generator.is_stopped(priority) {
                port.pause_generator.stop(now.nanos(), priority);
                self.request_host_pause(now, host, priority, sink);
            } else if is(before)
                && !is(receiver.pause_storm)
                && port.pause_generator.on_dequeue(None, priority, 0)
            {
                self.send_host_pause(now, host, priority, 0, sink);
            }
        }
        self.schedule_drain(now, host);
    }

    /// Tells everybody who sends to a host to stop, and sees to it that they are told again.
    fn request_host_pause(&mut self, now: Instant, host: HostId, priority: u8, sink: &mut dyn EventSink) {
        let port = &mut self.hosts[host.0 as usize];
        let quanta = port.receiver.pfc.map_or(u16::MAX, |flow| flow.quanta);
        let rates =
            port.links.iter().map(|(cable, _)| self.links[cable.0 as usize].settings().bits_per_second);
        let lasts = rates.map(|rate| pause_ns(quanta, rate)).min().unwrap_or(0);
        let again = now.nanos() + (lasts / 2).max(1);
        port.pause_generator.schedule_refresh(priority, again);
        self.event_queue.push(again, SimEvent::HostPauseRefresh { host, priority });
        if let Some(after) = port.receiver.watchdog
            && port.pause_generator.stopped_at(priority) == now.nanos()
        {
            self.event_queue.push(now.plus(after).nanos(), SimEvent::HostWatchdog { host, priority });
        }
        self.send_host_pause(now, host, priority, quanta, sink);
    }

    fn send_host_pause(
        &mut self,
        now: Instant,
        host: HostId,
        priority: u8,
        quanta: u16,
        sink: &mut dyn EventSink,
    ) {
        let port = &mut self.hosts[host.0 as usize];
        port.pause_generator.count_sent(priority);
        let held = port.ingress_bytes[usize::from(priority)];
        let pause = pause_frame(MacAddress::from_ip(port.address), priority, quanta);
        let at = Node::Host(host);
        for index in 0..port.links.len() {
            let (cable, direction) = self.hosts[host.0 as usize].links[index];
            sink.on_event(
                now,
                &NetworkEvent::Fabric(FabricEvent::PauseSent {
                    node: at,
                    link: cable,
                    priority,
                    quanta,
                    ingress_bytes: held,
                }),
            );
            self.send_pause(now, cable, direction, &pause, sink);
        }
    }

    /// A pause that a host asked for may have to be asked for again.
    pub fn refresh_host_pause(&mut self, now: Instant, host: HostId, priority: u8, sink: &mut dyn EventSink) {
        let ingress = &self.hosts[host.0 as usize].pause_generator;
        if ingress.is_stopped(priority) && ingress.refresh_at(priority) == now.nanos() {
            self.request_host_pause(now, host, priority, sink);
        }
    }

    /// A host may have kept its sender stopped for too long.
    pub fn run_host_watchdog(&mut self, now: Instant, host: HostId, priority: u8, sink: &mut dyn EventSink) {
        let port = &mut self.hosts[host.0 as usize];
        let Some(after) = port.receiver.watchdog else { return };
        let since = Instant::from_nanos(port.pause_generator.stopped_at(priority));
        if !port.pause_generator.is_stopped(priority) || since.plus(after) > now {
            return;
        }
        port.pause_generator.resume(priority);
        port.watchdog_active |= 1 << priority;
        port.watchdog_fired += 1;
        let at = Node::Host(host);
        if let Some((cable, _)) = port.links.first().copied() {
            sink.on_event(
                now,
                &NetworkEvent::Fabric(FabricEvent::WatchdogFired {
                    node: at,
                    link: cable,
                    priority,
                    dropped: 0,
                }),
            );
        }
        self.send_host_pause(now, host, priority, 0, sink);
    }

    /// A pause frame came to a host.
    fn receive_pause_at_host(
        &mut self,
        now: Instant,
        host: HostId,
        cable: LinkId,
        slot: u32,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let at = Node::Host(host);
        let Some(pause) = self.event_queue.pool.frame(slot).as_pause() else {
            self.drop_frame(now, at, cable, slot, FrameDropReason::MalformedPause, sink);
            return Outcome::Nothing;
        };
        self.count_delivered();
        self.event_queue.pool.release(slot);
        let rate = self.links[cable.0 as usize].settings().bits_per_second;
        let pauses = &mut self.hosts[host.0 as usize].pauses;
        for (priority, quanta) in (0..8u8).zip(pause.pause) {
            let Some(quanta) = quanta else { continue };
            let for_ns = pause_ns(quanta, rate);
            let change = pauses.apply(now.nanos(), priority, for_ns);
            let until_ns = now.nanos() + for_ns;
            sink.on_event(
                now,
                &NetworkEvent::Fabric(FabricEvent::PauseReceived {
                    node: at,
                    link: cable,
                    priority,
                    quanta,
                    until_ns,
                }),
            );
            match change {
                PauseChange::Stopped => self.event_queue.push(until_ns, SimEvent::HostPauseExpired { host }),
                PauseChange::Resumed => {
                    let how = PauseEndReason::Resumed;
                    sink.on_event(
                        now,
                        &NetworkEvent::Fabric(FabricEvent::PauseEnded {
                            node: at,
                            link: cable,
                            priority,
                            reason: how,
                        }),
                    );
                }
                PauseChange::Unchanged => {}
            }
        }
        Outcome::Paused { host, frames: 1 }
    }

    /// A pause of a host may be over.
    pub fn expire_host_pauses(&mut self, now: Instant, host: HostId, sink: &mut dyn EventSink) -> Outcome {
        let port = &mut self.hosts[host.0 as usize];
        let over = port.pauses.expire(now.nanos());
        let Some((cable, _)) = port.links.first().copied().filter(|_| over != 0) else {
            return Outcome::Nothing;
        };
        for priority in (0..8).filter(|priority| over >> priority & 1 == 1) {
            let (at, how) = (Node::Host(host), PauseEndReason::Expired);
            sink.on_event(
                now,
                &NetworkEvent::Fabric(FabricEvent::PauseEnded {
                    node: at,
                    link: cable,
                    priority,
                    reason: how,
                }),
            );
        }
        Outcome::Paused { host, frames: 0 }
    }
}
