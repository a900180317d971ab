//! PFC and the receive buffer at the ports of hosts.

use super::{Moment, Network, Outcome};
use crate::frame_pool::Slot;
use crate::pfc::{PauseChange, pause_frame, pause_ns};
use crate::sim_event::SimEvent;
use crate::{FabricEvent, FrameDropReason, HostId, LinkId, Node, PauseEndReason, ReceiverSettings};
use softhca_engine::Instant;
use softhca_wire::MacAddress;

impl Network {
    pub fn arrive_at_host(
        &mut self,
        moment: &mut Moment<'_>,
        host: HostId,
        link: LinkId,
        slot: u32,
    ) -> Outcome {
        let Slot { is_pause, priority, bytes, .. } = *self.event_queue.pool.slot_mut(slot);
        if is_pause {
            return self.receive_pause_at_host(moment, host, link, slot);
        }
        let port = &mut self.hosts[host.0 as usize];
        if port.receiver.bits_per_second.is_none() && port.queue.is_empty() {
            self.count_delivered();
            return Outcome::Arrived { host, slot };
        }
        let bytes = u64::from(bytes);
        if port.buffered + bytes > port.receiver.buffer {
            port.dropped_frames += 1;
            self.drop_frame(moment, Node::Host(host), link, slot, FrameDropReason::BufferFull);
            return Outcome::Nothing;
        }
        port.buffered += bytes;
        port.queue.push_back(slot);
        let flow = port.receiver.pfc.filter(|_| port.watchdog_active >> priority & 1 == 0);
        let ingress_bytes = &mut port.ingress_bytes[usize::from(priority)];
        *ingress_bytes += bytes;
        if port.pause_generator.on_enqueue(flow.as_ref(), moment.now.nanos(), priority, *ingress_bytes) {
            self.request_host_pause(moment, host, priority);
        }
        self.schedule_drain(moment.now, host);
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
    pub fn drain(&mut self, moment: &mut Moment<'_>, host: HostId) -> Outcome {
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
                true => port.pause_generator.stop(moment.now.nanos(), priority),
                false => self.send_host_pause(moment, host, priority, 0),
            }
        }
        self.schedule_drain(moment.now, host);
        self.count_delivered();
        Outcome::Arrived { host, slot }
    }

    /// Changes the receiver of a host.
    pub fn set_receiver(&mut self, moment: &mut Moment<'_>, host: HostId, receiver: ReceiverSettings) {
        let port = &mut self.hosts[host.0 as usize];
        let before = core::mem::replace(&mut port.receiver, receiver).pause_storm;
        for priority in 0..8 {
            let port = &mut self.hosts[host.0 as usize];
            let is = |mask: u8| mask >> priority & 1 == 1;
            if is(receiver.pause_storm) && !port.pause_generator.is_stopped(priority) {
                port.pause_generator.stop(moment.now.nanos(), priority);
                self.request_host_pause(moment, host, priority);
            } else if is(before)
                && !is(receiver.pause_storm)
                && port.pause_generator.on_dequeue(None, priority, 0)
            {
                self.send_host_pause(moment, host, priority, 0);
            }
        }
        self.schedule_drain(moment.now, host);
    }

    /// Pauses all senders to a host and schedules the refresh.
    fn request_host_pause(&mut self, moment: &mut Moment<'_>, host: HostId, priority: u8) {
        let port = &mut self.hosts[host.0 as usize];
        let quanta = port.receiver.pfc.map_or(u16::MAX, |flow| flow.quanta);
        let rates = port.links.iter().map(|(link, _)| self.links[link.0 as usize].settings().bits_per_second);
        let lasts = rates.map(|rate| pause_ns(quanta, rate)).min().unwrap_or(0);
        let again = moment.now.nanos() + (lasts / 2).max(1);
        port.pause_generator.schedule_refresh(priority, again);
        self.event_queue.push(again, SimEvent::HostPauseRefresh { host, priority });
        if let Some(after) = port.receiver.watchdog
            && port.pause_generator.stopped_at(priority) == moment.now.nanos()
        {
            self.event_queue.push(moment.now.plus(after).nanos(), SimEvent::HostWatchdog { host, priority });
        }
        self.send_host_pause(moment, host, priority, quanta);
    }

    fn send_host_pause(&mut self, moment: &mut Moment<'_>, host: HostId, priority: u8, quanta: u16) {
        let port = &mut self.hosts[host.0 as usize];
        port.pause_generator.count_sent(priority);
        let ingress_bytes = port.ingress_bytes[usize::from(priority)];
        let pause = pause_frame(MacAddress::from_ip(port.address), priority, quanta);
        let node = Node::Host(host);
        for index in 0..port.links.len() {
            let (link, direction) = self.hosts[host.0 as usize].links[index];
            moment.emit(FabricEvent::PauseSent { node, link, priority, quanta, ingress_bytes });
            self.send_pause(moment, (link, direction), &pause);
        }
    }

    /// Refreshes a pause that is still needed.
    pub fn refresh_host_pause(&mut self, moment: &mut Moment<'_>, host: HostId, priority: u8) {
        let ingress = &self.hosts[host.0 as usize].pause_generator;
        if ingress.is_stopped(priority) && ingress.refresh_at(priority) == moment.now.nanos() {
            self.request_host_pause(moment, host, priority);
        }
    }

    /// Ends a pause that lasted too long.
    pub fn run_host_watchdog(&mut self, moment: &mut Moment<'_>, host: HostId, priority: u8) {
        let port = &mut self.hosts[host.0 as usize];
        let Some(after) = port.receiver.watchdog else { return };
        let since = Instant::from_nanos(port.pause_generator.stopped_at(priority));
        if !port.pause_generator.is_stopped(priority) || since.plus(after) > moment.now {
            return;
        }
        port.pause_generator.resume(priority);
        port.watchdog_active |= 1 << priority;
        port.watchdog_fired += 1;
        let node = Node::Host(host);
        if let Some((link, _)) = port.links.first().copied() {
            moment.emit(FabricEvent::WatchdogFired { node, link, priority, dropped: 0 });
        }
        self.send_host_pause(moment, host, priority, 0);
    }

    /// Handles a pause frame at a host.
    fn receive_pause_at_host(
        &mut self,
        moment: &mut Moment<'_>,
        host: HostId,
        link: LinkId,
        slot: u32,
    ) -> Outcome {
        let node = Node::Host(host);
        let Some(pause) = self.event_queue.pool.frame(slot).as_pause() else {
            self.drop_frame(moment, node, link, slot, FrameDropReason::MalformedPause);
            return Outcome::Nothing;
        };
        self.count_delivered();
        self.event_queue.pool.release(slot);
        let rate = self.links[link.0 as usize].settings().bits_per_second;
        let pauses = &mut self.hosts[host.0 as usize].pauses;
        for (priority, quanta) in (0..8u8).zip(pause.pause) {
            let Some(quanta) = quanta else { continue };
            let for_ns = pause_ns(quanta, rate);
            let change = pauses.apply(moment.now.nanos(), priority, for_ns);
            let until_ns = moment.now.nanos() + for_ns;
            moment.emit(FabricEvent::PauseReceived { node, link, priority, quanta, until_ns });
            match change {
                PauseChange::Stopped => self.event_queue.push(until_ns, SimEvent::HostPauseExpired { host }),
                PauseChange::Resumed => {
                    let reason = PauseEndReason::Resumed;
                    moment.emit(FabricEvent::PauseEnded { node, link, priority, reason });
                }
                PauseChange::Unchanged => {}
            }
        }
        Outcome::Paused { host, frames: 1 }
    }

    /// Ends expired pauses.
    pub fn expire_host_pauses(&mut self, moment: &mut Moment<'_>, host: HostId) -> Outcome {
        let port = &mut self.hosts[host.0 as usize];
        let over = port.pauses.expire(moment.now.nanos());
        let Some((link, _)) = port.links.first().copied().filter(|_| over != 0) else {
            return Outcome::Nothing;
        };
        for priority in (0..8).filter(|priority| over >> priority & 1 == 1) {
            let (node, reason) = (Node::Host(host), PauseEndReason::Expired);
            moment.emit(FabricEvent::PauseEnded { node, link, priority, reason });
        }
        Outcome::Paused { host, frames: 0 }
    }
}
