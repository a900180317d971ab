//! PFC and the receive buffer at the ports of hosts.

use super::{Network, Outcome};
use crate::frame_pool::Slot;
use crate::pfc::{PauseChange, pause_frame, pause_ns};
use crate::sim_event::SimEvent;
use crate::sink::EventSink;
use crate::{FabricEvent, FrameDropReason, HostId, LinkId, Node, PauseEndReason, ReceiverSettings};
use softhca_engine::Instant;
use softhca_wire::MacAddress;

impl Network {
    pub fn arrive_at_host(
        &mut self,
        now: Instant,
        host: HostId,
        link: LinkId,
        slot: u32,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let Slot { is_pause, priority, bytes, .. } = *self.event_queue.pool.slot_mut(slot);
        if is_pause {
            return self.receive_pause_at_host(now, host, link, slot, sink);
        }
        let port = &mut self.hosts[host.0 as usize];
        if port.receiver.bits_per_second.is_none() && port.queue.is_empty() {
            self.count_delivered();
            return Outcome::Arrived { host, slot };
        }
        let bytes = u64::from(bytes);
        if port.buffered + bytes > port.receiver.buffer {
            port.dropped_frames += 1;
            self.drop_frame(now, Node::Host(host), link, slot, FrameDropReason::BufferFull, sink);
            return Outcome::Nothing;
        }
        port.buffered += bytes;
        port.queue.push_back(slot);
        let flow = port.receiver.pfc.filter(|_| port.watchdog_active >> priority & 1 == 0);
        let ingress_bytes = &mut port.ingress_bytes[usize::from(priority)];
        *ingress_bytes += bytes;
        if port.pause_generator.on_enqueue(flow.as_ref(), now.nanos(), priority, *ingress_bytes) {
            self.request_host_pause(now, host, priority, sink);
        }
        self.schedule_drain(now, host);
        Outcome::Nothing
    }

    /// Schedules the transfer of the oldest buffered frame to the HCA.
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

    /// Transfers the oldest buffered frame to the HCA.
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
        let ingress_bytes = &mut port.ingress_bytes[usize::from(priority)];
        *ingress_bytes -= bytes;
        if flow.is_some_and(|flow| *ingress_bytes <= flow.xon) {
            port.watchdog_active &= !(1 << priority);
        }
        let storms = port.receiver.pause_storm >> priority & 1 == 1;
        if port.pause_generator.on_dequeue(flow.as_ref(), priority, *ingress_bytes) {
            match storms {
                true => port.pause_generator.stop(now.nanos(), priority),
                false => self.send_host_pause(now, host, priority, 0, sink),
            }
        }
        self.schedule_drain(now, host);
        self.count_delivered();
        Outcome::Arrived { host, slot }
    }

    /// Changes the receiver of a host.
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

    /// Pauses all senders to a host and schedules the refresh.
    fn request_host_pause(&mut self, now: Instant, host: HostId, priority: u8, sink: &mut dyn EventSink) {
        let port = &mut self.hosts[host.0 as usize];
        let quanta = port.receiver.pfc.map_or(u16::MAX, |flow| flow.quanta);
        let rates = port.links.iter().map(|(link, _)| self.links[link.0 as usize].settings().bits_per_second);
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
        let ingress_bytes = port.ingress_bytes[usize::from(priority)];
        let pause = pause_frame(MacAddress::from_ip(port.address), priority, quanta);
        let node = Node::Host(host);
        for index in 0..port.links.len() {
            let (link, direction) = self.hosts[host.0 as usize].links[index];
            sink.on_fabric_event(now, FabricEvent::PauseSent { node, link, priority, quanta, ingress_bytes });
            self.send_pause(now, link, direction, &pause, sink);
        }
    }

    /// Refreshes a pause that is still needed.
    pub fn refresh_host_pause(&mut self, now: Instant, host: HostId, priority: u8, sink: &mut dyn EventSink) {
        let ingress = &self.hosts[host.0 as usize].pause_generator;
        if ingress.is_stopped(priority) && ingress.refresh_at(priority) == now.nanos() {
            self.request_host_pause(now, host, priority, sink);
        }
    }

    /// Ends a pause that lasted too long.
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
        let node = Node::Host(host);
        if let Some((link, _)) = port.links.first().copied() {
            sink.on_fabric_event(now, FabricEvent::WatchdogFired { node, link, priority, dropped: 0 });
        }
        self.send_host_pause(now, host, priority, 0, sink);
    }

    /// Handles a pause frame at a host.
    fn receive_pause_at_host(
        &mut self,
        now: Instant,
        host: HostId,
        link: LinkId,
        slot: u32,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let node = Node::Host(host);
        let Some(pause) = self.event_queue.pool.frame(slot).as_pause() else {
            self.drop_frame(now, node, link, slot, FrameDropReason::MalformedPause, sink);
            return Outcome::Nothing;
        };
        self.count_delivered();
        self.event_queue.pool.release(slot);
        let rate = self.links[link.0 as usize].settings().bits_per_second;
        let pauses = &mut self.hosts[host.0 as usize].pauses;
        for (priority, quanta) in (0..8u8).zip(pause.pause) {
            let Some(quanta) = quanta else { continue };
            let for_ns = pause_ns(quanta, rate);
            let change = pauses.apply(now.nanos(), priority, for_ns);
            let until_ns = now.nanos() + for_ns;
            sink.on_fabric_event(now, FabricEvent::PauseReceived { node, link, priority, quanta, until_ns });
            match change {
                PauseChange::Stopped => self.event_queue.push(until_ns, SimEvent::HostPauseExpired { host }),
                PauseChange::Resumed => {
                    let reason = PauseEndReason::Resumed;
                    sink.on_fabric_event(now, FabricEvent::PauseEnded { node, link, priority, reason });
                }
                PauseChange::Unchanged => {}
            }
        }
        Outcome::Paused { host, frames: 1 }
    }

    /// Ends expired pauses.
    pub fn expire_host_pauses(&mut self, now: Instant, host: HostId, sink: &mut dyn EventSink) -> Outcome {
        let port = &mut self.hosts[host.0 as usize];
        let over = port.pauses.expire(now.nanos());
        let Some((link, _)) = port.links.first().copied().filter(|_| over != 0) else {
            return Outcome::Nothing;
        };
        for priority in (0..8).filter(|priority| over >> priority & 1 == 1) {
            let (node, reason) = (Node::Host(host), PauseEndReason::Expired);
            sink.on_fabric_event(now, FabricEvent::PauseEnded { node, link, priority, reason });
        }
        Outcome::Paused { host, frames: 0 }
    }
}
