//! Forwarding of frames in switches.

use super::{Moment, Network, PortId};
use crate::fabric_event::PacketId;
use crate::frame_pool::Slot;
use crate::pfc::{PauseChange, pause_frame, pause_ns};
use crate::sim_event::SimEvent;
use crate::sink::Stage;
use crate::switch::WatchdogAction;
use crate::{FabricEvent, FrameDropReason, LinkId, Node, PauseEndReason};
use softhca_engine::Instant;
use softhca_wire::{Ecn, MacAddress};

/// Domain of the draws for ECN marks.
const MARK: u64 = 0x6d61_726b;

/// The source MAC address of a switch port: synthetic, locally administered.
fn port_mac(PortId { switch, port }: PortId) -> MacAddress {
    let ([_, _, a, b], [c, d]) = (switch.0.to_be_bytes(), port.to_be_bytes());
    MacAddress([0x02, 0x53, a, b, c, d])
}

impl Network {
    pub fn arrive_at_switch(&mut self, moment: &mut Moment<'_>, at: PortId, slot: u32) {
        let PortId { switch, port } = at;
        let frame = self.event_queue.pool.slot_mut(slot);
        if frame.is_pause {
            return self.receive_pause_at_switch(moment, at, slot);
        }
        let (host, flow) = (frame.host, frame.flow);
        frame.hop_limit = frame.hop_limit.saturating_sub(1);
        let is_old = frame.hop_limit == 0;
        let this = &mut self.switches[switch.0 as usize];
        let entry = &mut this.ports[usize::from(port)];
        entry.received_frames += 1;
        let link = entry.link;
        if is_old {
            return self.drop_at_switch(moment, at, link, slot, FrameDropReason::HopLimitExceeded);
        }
        if host == Slot::MULTICAST {
            return self.flood(moment, at, slot);
        }
        match this.egress_port(host, flow) {
            Some(egress) => self.enqueue(moment, at, egress, slot),
            None => self.drop_at_switch(moment, at, link, slot, FrameDropReason::NoRoute),
        }
    }

    fn drop_at_switch(
        &mut self,
        moment: &mut Moment<'_>,
        at: PortId,
        link: LinkId,
        slot: u32,
        cause: FrameDropReason,
    ) {
        let PortId { switch, port } = at;
        self.switches[switch.0 as usize].ports[usize::from(port)].dropped_frames += 1;
        self.drop_frame(moment, Node::Switch(switch), link, slot, cause);
    }

    /// Forwards a multicast frame along the tree.
    fn flood(&mut self, moment: &mut Moment<'_>, at: PortId, slot: u32) {
        let PortId { switch, port } = at;
        let this = &self.switches[switch.0 as usize];
        let ports: alloc::vec::Vec<u16> =
            this.routes.flood.iter().copied().filter(|egress| *egress != port).collect();
        let Some((last, others)) = ports.split_last() else {
            let link = this.ports[usize::from(port)].link;
            return self.drop_at_switch(moment, at, link, slot, FrameDropReason::NoRoute);
        };
        self.count_copies(others.len() as u64);
        for egress in others {
            let Slot { host, flow, .. } = *self.event_queue.pool.slot_mut(slot);
            let copy = self.event_queue.pool.frame(slot).clone();
            let copy = self.event_queue.pool.insert(copy, host, flow);
            self.enqueue(moment, at, *egress, copy);
        }
        self.enqueue(moment, at, *last, slot);
    }

    /// Queues a frame at its egress port, or drops it.
    fn enqueue(&mut self, moment: &mut Moment<'_>, at: PortId, egress: u16, slot: u32) {
        let PortId { switch, port: ingress } = at;
        let frame = self.event_queue.pool.slot_mut(slot);
        frame.ingress = ingress;
        let Slot { priority, bytes, flow, packet, traffic_class, .. } = *frame;
        let this = &mut self.switches[switch.0 as usize];
        let link = this.ports[usize::from(egress)].link;
        if let Err(cause) = this.admit(ingress, egress, priority, bytes.into()) {
            return self.drop_at_switch(moment, at, link, slot, cause);
        }
        let port = &mut this.ports[usize::from(egress)];
        let depth = port.queues[usize::from(priority)].depth;
        if let Some(marking) = &this.settings.ecn_marking
            && depth > marking.kmin
            && matches!(Ecn::of(traffic_class), Ecn::Ect0 | Ecn::Ect1)
        {
            let words = [MARK, switch.0.into(), egress.into(), flow, packet];
            if self.seed.happens(marking.probability(depth), &words) {
                frame.traffic_class |= Ecn::CongestionExperienced as u8;
                port.marked += 1;
                if moment.sink.is_enabled() {
                    let packet = PacketId::of(self.event_queue.pool.frame(slot));
                    moment.emit(FabricEvent::EcnMarked {
                        node: Node::Switch(switch),
                        link,
                        priority,
                        depth,
                        packet,
                    });
                }
            }
        }
        let stops = this.enqueue(moment.now.nanos(), egress, priority, slot, &mut self.event_queue.pool);
        let step = this.settings.sample_step;
        if step > 0 && depth / step != (depth + u64::from(bytes)) / step {
            let depth = depth + u64::from(bytes);
            moment.emit(FabricEvent::QueueSampled { node: Node::Switch(switch), link, priority, depth });
        }
        if stops {
            self.request_switch_pause(moment, at, priority);
        }
        let egress = PortId { switch, port: egress };
        self.arm_watchdog(moment.now, egress, priority);
        self.serve(moment, egress);
    }

    /// Transmits frames while the link is free.
    pub fn serve(&mut self, moment: &mut Moment<'_>, at: PortId) {
        let PortId { switch, port } = at;
        loop {
            let this = &mut self.switches[switch.0 as usize];
            let scheduling = this.settings.scheduling;
            let step = this.settings.sample_step;
            let egress = &mut this.ports[usize::from(port)];
            let Some(priority) = egress.next_priority(scheduling) else { return };
            let (link, direction) = (egress.link, egress.direction);
            let free_at = self.links[link.0 as usize].free_at_ns(direction);
            if free_at > moment.now.nanos() {
                if !egress.waiting_for_link {
                    egress.waiting_for_link = true;
                    self.event_queue.push(free_at, SimEvent::SwitchLinkFree { switch, port });
                }
                return;
            }
            let before = egress.queues[usize::from(priority)].depth;
            let Some(slot) = egress.dequeue(priority, &mut self.event_queue.pool) else { return };
            let Slot { bytes, ingress, .. } = *self.event_queue.pool.slot_mut(slot);
            let depth = egress.queues[usize::from(priority)].depth;
            egress.sent_frames += 1;
            egress.sent_bytes += u64::from(bytes);
            if this.settings.watchdog.is_some()
                && let Some(guard) = &mut egress.watchdog
            {
                guard.stalled_since[usize::from(priority)] = u64::MAX;
            }
            let resumes = this.release(priority, ingress, bytes);
            if step > 0 && before / step != depth / step {
                moment.emit(FabricEvent::QueueSampled { node: Node::Switch(switch), link, priority, depth });
            }
            self.count_forwarded();
            self.transmit(moment, (link, direction), slot, Stage::Forwarded);
            if resumes {
                self.send_switch_pause(moment, PortId { switch, port: ingress }, priority, 0);
            }
        }
    }

    /// Pauses the sender at a port and schedules the refresh.
    fn request_switch_pause(&mut self, moment: &mut Moment<'_>, at: PortId, priority: u8) {
        let PortId { switch, port } = at;
        let this = &mut self.switches[switch.0 as usize];
        let Some(flow) = this.settings.pfc else { return };
        let entry = &mut this.ports[usize::from(port)];
        let rate = self.links[entry.link.0 as usize].settings().bits_per_second;
        let again = moment.now.nanos() + (pause_ns(flow.quanta, rate) / 2).max(1);
        entry.pause_generator.schedule_refresh(priority, again);
        self.event_queue.push(again, SimEvent::SwitchPauseRefresh { switch, port, priority });
        self.send_switch_pause(moment, at, priority, flow.quanta);
    }

    fn send_switch_pause(&mut self, moment: &mut Moment<'_>, at: PortId, priority: u8, quanta: u16) {
        let PortId { switch, port } = at;
        let entry = &mut self.switches[switch.0 as usize].ports[usize::from(port)];
        entry.pause_generator.count_sent(priority);
        let (link, direction) = (entry.link, entry.direction);
        let ingress_bytes = entry.queues[usize::from(priority)].ingress_bytes;
        let node = Node::Switch(switch);
        moment.emit(FabricEvent::PauseSent { node, link, priority, quanta, ingress_bytes });
        let pause = pause_frame(port_mac(at), priority, quanta);
        self.send_pause(moment, (link, direction), &pause);
    }

    /// Refreshes a pause that is still needed.
    pub fn refresh_switch_pause(&mut self, moment: &mut Moment<'_>, at: PortId, priority: u8) {
        let PortId { switch, port } = at;
        let ingress = &self.switches[switch.0 as usize].ports[usize::from(port)].pause_generator;
        if ingress.is_stopped(priority) && ingress.refresh_at(priority) == moment.now.nanos() {
            self.request_switch_pause(moment, at, priority);
        }
    }

    /// Handles a pause frame at a switch.
    fn receive_pause_at_switch(&mut self, moment: &mut Moment<'_>, at: PortId, slot: u32) {
        let PortId { switch, port } = at;
        let node = Node::Switch(switch);
        let link = self.switches[switch.0 as usize].ports[usize::from(port)].link;
        let Some(pause) = self.event_queue.pool.frame(slot).as_pause() else {
            return self.drop_frame(moment, node, link, slot, FrameDropReason::MalformedPause);
        };
        self.count_delivered();
        self.event_queue.pool.release(slot);
        let rate = self.links[link.0 as usize].settings().bits_per_second;
        for (priority, quanta) in (0..8u8).zip(pause.pause) {
            let Some(quanta) = quanta else { continue };
            let egress = &mut self.switches[switch.0 as usize].ports[usize::from(port)];
            let mut for_ns = pause_ns(quanta, rate);
            if let Some(guard) = &mut egress.watchdog {
                guard.last_pause[usize::from(priority)] = moment.now.nanos();
                if guard.active >> priority & 1 == 1 {
                    for_ns = 0;
                }
            }
            let change = egress.pause_state.apply(moment.now.nanos(), priority, for_ns);
            let until_ns = moment.now.nanos() + for_ns;
            moment.emit(FabricEvent::PauseReceived { node, link, priority, quanta, until_ns });
            match change {
                PauseChange::Stopped => {
                    self.event_queue.push(until_ns, SimEvent::SwitchPauseExpired { switch, port });
                    self.arm_watchdog(moment.now, at, priority);
                }
                PauseChange::Resumed => {
                    self.disarm_watchdog(at, priority);
                    let reason = PauseEndReason::Resumed;
                    moment.emit(FabricEvent::PauseEnded { node, link, priority, reason });
                }
                PauseChange::Unchanged => {}
            }
        }
        self.serve(moment, at);
    }

    /// Ends expired pauses.
    pub fn expire_switch_pauses(&mut self, moment: &mut Moment<'_>, at: PortId) {
        let PortId { switch, port } = at;
        let egress = &mut self.switches[switch.0 as usize].ports[usize::from(port)];
        let (link, over) = (egress.link, egress.pause_state.expire(moment.now.nanos()));
        for priority in (0..8).filter(|priority| over >> priority & 1 == 1) {
            self.disarm_watchdog(at, priority);
            let (node, reason) = (Node::Switch(switch), PauseEndReason::Expired);
            moment.emit(FabricEvent::PauseEnded { node, link, priority, reason });
        }
        if over != 0 {
            self.serve(moment, at);
        }
    }

    /// Starts the watchdog timer of a queue that a pause stalls.
    fn arm_watchdog(&mut self, now: Instant, at: PortId, priority: u8) {
        let PortId { switch, port } = at;
        let this = &mut self.switches[switch.0 as usize];
        let Some(watchdog) = this.settings.watchdog else { return };
        let egress = &mut this.ports[usize::from(port)];
        let Some(guard) = &mut egress.watchdog else { return };
        let stands = egress.occupied & egress.pause_state.mask() & !guard.active;
        if stands >> priority & 1 == 1 && guard.stalled_since[usize::from(priority)] == u64::MAX {
            guard.stalled_since[usize::from(priority)] = now.nanos();
            let at = now.plus(watchdog.detection_time).nanos();
            self.event_queue.push(at, SimEvent::SwitchWatchdog { switch, port, priority });
        }
    }

    fn disarm_watchdog(&mut self, at: PortId, priority: u8) {
        let PortId { switch, port } = at;
        if let Some(guard) = &mut self.switches[switch.0 as usize].ports[usize::from(port)].watchdog {
            guard.stalled_since[usize::from(priority)] = u64::MAX;
        }
    }

    /// Checks a queue for a stall or for its restoration.
    pub fn run_switch_watchdog(&mut self, moment: &mut Moment<'_>, at: PortId, priority: u8) {
        let PortId { switch, port } = at;
        let node = Node::Switch(switch);
        let this = &mut self.switches[switch.0 as usize];
        let Some(watchdog) = this.settings.watchdog else { return };
        let egress = &mut this.ports[usize::from(port)];
        let link = egress.link;
        let Some(guard) = &mut egress.watchdog else { return };
        let again = SimEvent::SwitchWatchdog { switch, port, priority };
        if guard.active >> priority & 1 == 1 {
            let trusted_at =
                Instant::from_nanos(guard.last_pause[usize::from(priority)]).plus(watchdog.restoration_time);
            if trusted_at > moment.now {
                return self.event_queue.push(trusted_at.nanos(), again);
            }
            guard.active &= !(1 << priority);
            return moment.emit(FabricEvent::WatchdogRestored { node, link, priority });
        }
        let since = guard.stalled_since[usize::from(priority)];
        if since == u64::MAX || Instant::from_nanos(since).plus(watchdog.detection_time) > moment.now {
            return;
        }
        guard.stalled_since[usize::from(priority)] = u64::MAX;
        guard.active |= 1 << priority;
        egress.watchdog_fired += 1;
        egress.pause_state.end(moment.now.nanos(), priority);
        let waiting = egress.queues[usize::from(priority)].len(&mut self.event_queue.pool);
        let lost = if watchdog.action == WatchdogAction::Drop { waiting } else { 0 };
        moment.emit(FabricEvent::WatchdogFired { node, link, priority, dropped: lost });
        let reason = PauseEndReason::WatchdogFired;
        moment.emit(FabricEvent::PauseEnded { node, link, priority, reason });
        for _ in 0..lost {
            let this = &mut self.switches[switch.0 as usize];
            let port = &mut this.ports[usize::from(port)];
            let Some(slot) = port.dequeue(priority, &mut self.event_queue.pool) else { break };
            let Slot { bytes, ingress, .. } = *self.event_queue.pool.slot_mut(slot);
            let resumes = this.release(priority, ingress, bytes);
            let from = PortId { switch, port: ingress };
            self.drop_at_switch(moment, from, link, slot, FrameDropReason::Watchdog);
            if resumes {
                self.send_switch_pause(moment, from, priority, 0);
            }
        }
        self.event_queue.push(moment.now.plus(watchdog.restoration_time).nanos(), again);
        self.serve(moment, at);
    }
}
