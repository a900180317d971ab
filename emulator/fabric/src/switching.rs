//! What switches do with the frames of a network.

use crate::agenda::Happening;
use crate::fabric_event::Culprit;
use crate::network::Network;
use crate::observer::{Observer, Stage};
use crate::pause::{PauseChange, pause_ns};
use crate::slots::Slot;
use crate::switch::Remedy;
use crate::{CableId, FabricEvent, LossCause, Node, PauseEnd, SwitchId};
use softhca_engine::Instant;
use softhca_wire::{Ecn, MacAddress, Pfc};

/// The words of a draw that say that it is about a mark.
const MARK: u64 = 0x6d61_726b;

/// The address that pause frames of a switch's port come from: made up, and marked as such.
fn mac_of(switch: SwitchId, port: u16) -> MacAddress {
    let ([_, _, a, b], [c, d]) = (switch.0.to_be_bytes(), port.to_be_bytes());
    MacAddress([0x02, 0x53, a, b, c, d])
}

/// A frame that changes one priority.
pub(crate) fn pause_frame(source: MacAddress, priority: u8, quanta: u16) -> Pfc {
    let mut pause = [None; 8];
    pause[usize::from(priority)] = Some(quanta);
    Pfc { source, pause }
}

impl Network {
    pub fn arrive_at_switch(
        &mut self,
        now: Instant,
        switch: SwitchId,
        port: u16,
        slot: u32,
        observer: &mut dyn Observer,
    ) {
        let frame = self.agenda.slots.at(slot);
        if frame.is_pause {
            return self.pause_switch(now, switch, port, slot, observer);
        }
        let (host, flow) = (frame.host, frame.flow);
        frame.hop_limit = frame.hop_limit.saturating_sub(1);
        let is_old = frame.hop_limit == 0;
        let this = &mut self.switches[switch.0 as usize];
        let entry = &mut this.ports[usize::from(port)];
        entry.received_frames += 1;
        let cable = entry.cable;
        if is_old {
            return self.lose_at_switch(now, switch, port, cable, slot, LossCause::HopLimit, observer);
        }
        if host == Slot::EVERYBODY {
            return self.flood(now, switch, port, slot, observer);
        }
        match this.egress(host, flow) {
            Some(egress) => self.enqueue(now, switch, port, egress, slot, observer),
            None => self.lose_at_switch(now, switch, port, cable, slot, LossCause::NoRoute, observer),
        }
    }

    fn lose_at_switch(
        &mut self,
        now: Instant,
        switch: SwitchId,
        port: u16,
        cable: CableId,
        slot: u32,
        cause: LossCause,
        observer: &mut dyn Observer,
    ) {
        self.switches[switch.0 as usize].ports[usize::from(port)].lost_frames += 1;
        self.lose(now, Node::Switch(switch), cable, slot, cause, observer);
    }

    /// Sends a datagram for a group along the tree.
    fn flood(&mut self, now: Instant, switch: SwitchId, port: u16, slot: u32, observer: &mut dyn Observer) {
        let this = &self.switches[switch.0 as usize];
        let ports: alloc::vec::Vec<u16> =
            this.routes.flood.iter().copied().filter(|egress| *egress != port).collect();
        let Some((last, others)) = ports.split_last() else {
            let cable = this.ports[usize::from(port)].cable;
            return self.lose_at_switch(now, switch, port, cable, slot, LossCause::NoRoute, observer);
        };
        self.note_copied(others.len() as u64);
        for egress in others {
            let Slot { host, flow, .. } = *self.agenda.slots.at(slot);
            let copy = self.agenda.slots.frame(slot).clone();
            let copy = self.agenda.slots.insert(copy, host, flow);
            self.enqueue(now, switch, port, *egress, copy, observer);
        }
        self.enqueue(now, switch, port, *last, slot, observer);
    }

    /// Takes a frame into the queue of the port that it leaves by, or loses it.
    fn enqueue(
        &mut self,
        now: Instant,
        switch: SwitchId,
        ingress: u16,
        egress: u16,
        slot: u32,
        observer: &mut dyn Observer,
    ) {
        let frame = self.agenda.slots.at(slot);
        frame.ingress = ingress;
        let Slot { priority, bytes, flow, packet, traffic_class, .. } = *frame;
        let this = &mut self.switches[switch.0 as usize];
        let cable = this.ports[usize::from(egress)].cable;
        if let Err(cause) = this.admits(ingress, egress, priority, bytes.into()) {
            return self.lose_at_switch(now, switch, ingress, cable, slot, cause, observer);
        }
        let port = &mut this.ports[usize::from(egress)];
        let depth = port.queues[usize::from(priority)].depth;
        if let Some(marking) = &this.settings.marking
            && depth > marking.least
            && matches!(Ecn::of(traffic_class), Ecn::Capable0 | Ecn::Capable1)
        {
            let words = [MARK, switch.0.into(), egress.into(), flow, packet];
            if self.seed.happens(marking.chance(depth), &words) {
                frame.traffic_class |= Ecn::CongestionExperienced as u8;
                port.marked += 1;
                if observer.looks() {
                    let culprit = Culprit::of(self.agenda.slots.frame(slot));
                    observer.fabric(now, &FabricEvent::Marked { switch, cable, priority, depth, culprit });
                }
            }
        }
        let stops = this.enqueue(now.nanos(), egress, priority, slot, &mut self.agenda.slots);
        let step = this.settings.sample_step;
        if step > 0 && depth / step != (depth + u64::from(bytes)) / step {
            let depth = depth + u64::from(bytes);
            observer.fabric(now, &FabricEvent::QueueSampled { switch, cable, priority, depth });
        }
        if stops {
            self.ask_for_pause(now, switch, ingress, priority, observer);
        }
        self.note_stillness(now, switch, egress, priority);
        self.serve(now, switch, egress, observer);
    }

    /// Sends what the port may send now.
    pub fn serve(&mut self, now: Instant, switch: SwitchId, port: u16, observer: &mut dyn Observer) {
        loop {
            let this = &mut self.switches[switch.0 as usize];
            let scheduling = this.settings.scheduling;
            let step = this.settings.sample_step;
            let egress = &mut this.ports[usize::from(port)];
            let Some(priority) = egress.next_priority(scheduling) else { return };
            let (cable, direction) = (egress.cable, egress.direction);
            let free_at = self.cables[cable.0 as usize].free_at_ns(direction);
            if free_at > now.nanos() {
                if !egress.waits {
                    egress.waits = true;
                    self.agenda.push(free_at, Happening::PortLine { switch, port });
                }
                return;
            }
            let before = egress.queues[usize::from(priority)].depth;
            let Some(slot) = egress.pop(priority, &mut self.agenda.slots) else { return };
            let Slot { bytes, ingress, .. } = *self.agenda.slots.at(slot);
            let depth = egress.queues[usize::from(priority)].depth;
            egress.sent_frames += 1;
            egress.sent_bytes += u64::from(bytes);
            if this.settings.watchdog.is_some()
                && let Some(guard) = &mut egress.guard
            {
                guard.since[usize::from(priority)] = u64::MAX;
            }
            let resumes = this.release(priority, ingress, bytes);
            if step > 0 && before / step != depth / step {
                observer.fabric(now, &FabricEvent::QueueSampled { switch, cable, priority, depth });
            }
            self.note_forwarded();
            self.put(now, cable, direction, slot, Stage::Forwarded, observer);
            if resumes {
                self.send_switch_pause(now, switch, ingress, priority, 0, observer);
            }
        }
    }

    /// Tells the sender at a port to stop, and sees to it that it is told again.
    fn ask_for_pause(
        &mut self,
        now: Instant,
        switch: SwitchId,
        port: u16,
        priority: u8,
        observer: &mut dyn Observer,
    ) {
        let this = &mut self.switches[switch.0 as usize];
        let Some(flow) = this.settings.flow_control else { return };
        let entry = &mut this.ports[usize::from(port)];
        let rate = self.cables[entry.cable.0 as usize].line().bits_per_second;
        let again = now.nanos() + (pause_ns(flow.quanta, rate) / 2).max(1);
        entry.ingress.ask_again(priority, again);
        self.agenda.push(again, Happening::Refresh { switch, port, priority });
        self.send_switch_pause(now, switch, port, priority, flow.quanta, observer);
    }

    fn send_switch_pause(
        &mut self,
        now: Instant,
        switch: SwitchId,
        port: u16,
        priority: u8,
        quanta: u16,
        observer: &mut dyn Observer,
    ) {
        let entry = &mut self.switches[switch.0 as usize].ports[usize::from(port)];
        entry.ingress.note_sent(priority);
        let (cable, direction) = (entry.cable, entry.direction);
        let held = entry.queues[usize::from(priority)].held;
        let at = Node::Switch(switch);
        observer.fabric(now, &FabricEvent::PauseSent { at, cable, priority, quanta, held });
        let pause = pause_frame(mac_of(switch, port), priority, quanta);
        self.send_pause(now, cable, direction, &pause, observer);
    }

    /// A pause that was asked for may have to be asked for again.
    pub fn refresh(
        &mut self,
        now: Instant,
        switch: SwitchId,
        port: u16,
        priority: u8,
        observer: &mut dyn Observer,
    ) {
        let ingress = &self.switches[switch.0 as usize].ports[usize::from(port)].ingress;
        if ingress.is_stopped(priority) && ingress.refresh_at(priority) == now.nanos() {
            self.ask_for_pause(now, switch, port, priority, observer);
        }
    }

    /// A pause frame came to a switch.
    fn pause_switch(
        &mut self,
        now: Instant,
        switch: SwitchId,
        port: u16,
        slot: u32,
        observer: &mut dyn Observer,
    ) {
        let at = Node::Switch(switch);
        let cable = self.switches[switch.0 as usize].ports[usize::from(port)].cable;
        let Some(pause) = self.agenda.slots.frame(slot).as_pause() else {
            return self.lose(now, at, cable, slot, LossCause::Unreadable, observer);
        };
        self.note_arrived();
        self.agenda.slots.release(slot);
        let rate = self.cables[cable.0 as usize].line().bits_per_second;
        for (priority, quanta) in (0..8u8).zip(pause.pause) {
            let Some(quanta) = quanta else { continue };
            let egress = &mut self.switches[switch.0 as usize].ports[usize::from(port)];
            let mut for_ns = pause_ns(quanta, rate);
            if let Some(guard) = &mut egress.guard {
                guard.paused_at[usize::from(priority)] = now.nanos();
                if guard.active >> priority & 1 == 1 {
                    for_ns = 0;
                }
            }
            let change = egress.pauses.apply(now.nanos(), priority, for_ns);
            let until_ns = now.nanos() + for_ns;
            observer.fabric(now, &FabricEvent::PauseReceived { at, cable, priority, quanta, until_ns });
            match change {
                PauseChange::Stopped => {
                    self.agenda.push(until_ns, Happening::PauseOver { switch, port });
                    self.note_stillness(now, switch, port, priority);
                }
                PauseChange::Resumed => {
                    self.note_moving(switch, port, priority);
                    let how = PauseEnd::Resumed;
                    observer.fabric(now, &FabricEvent::PauseEnded { at, cable, priority, how });
                }
                PauseChange::Nothing => {}
            }
        }
        self.serve(now, switch, port, observer);
    }

    /// A pause may be over.
    pub fn end_pauses(&mut self, now: Instant, switch: SwitchId, port: u16, observer: &mut dyn Observer) {
        let egress = &mut self.switches[switch.0 as usize].ports[usize::from(port)];
        let (cable, over) = (egress.cable, egress.pauses.expire(now.nanos()));
        for priority in (0..8).filter(|priority| over >> priority & 1 == 1) {
            self.note_moving(switch, port, priority);
            let (at, how) = (Node::Switch(switch), PauseEnd::Expired);
            observer.fabric(now, &FabricEvent::PauseEnded { at, cable, priority, how });
        }
        if over != 0 {
            self.serve(now, switch, port, observer);
        }
    }

    /// Takes note of a queue that a pause keeps from moving.
    fn note_stillness(&mut self, now: Instant, switch: SwitchId, port: u16, priority: u8) {
        let this = &mut self.switches[switch.0 as usize];
        let Some(watchdog) = this.settings.watchdog else { return };
        let egress = &mut this.ports[usize::from(port)];
        let Some(guard) = &mut egress.guard else { return };
        let stands = egress.occupied & egress.pauses.mask() & !guard.active;
        if stands >> priority & 1 == 1 && guard.since[usize::from(priority)] == u64::MAX {
            guard.since[usize::from(priority)] = now.nanos();
            let at = now.plus(watchdog.after).nanos();
            self.agenda.push(at, Happening::Watch { switch, port, priority });
        }
    }

    fn note_moving(&mut self, switch: SwitchId, port: u16, priority: u8) {
        if let Some(guard) = &mut self.switches[switch.0 as usize].ports[usize::from(port)].guard {
            guard.since[usize::from(priority)] = u64::MAX;
        }
    }

    /// A queue may have stood still for too long, or may be trusted again.
    pub fn watch(
        &mut self,
        now: Instant,
        switch: SwitchId,
        port: u16,
        priority: u8,
        observer: &mut dyn Observer,
    ) {
        let at = Node::Switch(switch);
        let this = &mut self.switches[switch.0 as usize];
        let Some(watchdog) = this.settings.watchdog else { return };
        let egress = &mut this.ports[usize::from(port)];
        let cable = egress.cable;
        let Some(guard) = &mut egress.guard else { return };
        let again = Happening::Watch { switch, port, priority };
        if guard.active >> priority & 1 == 1 {
            let trusted_at =
                Instant::from_nanos(guard.paused_at[usize::from(priority)]).plus(watchdog.restore);
            if trusted_at > now {
                return self.agenda.push(trusted_at.nanos(), again);
            }
            guard.active &= !(1 << priority);
            return observer.fabric(now, &FabricEvent::WatchdogRestored { at, cable, priority });
        }
        let since = guard.since[usize::from(priority)];
        if since == u64::MAX || Instant::from_nanos(since).plus(watchdog.after) > now {
            return;
        }
        guard.since[usize::from(priority)] = u64::MAX;
        guard.active |= 1 << priority;
        egress.watchdog_fired += 1;
        egress.pauses.end(now.nanos(), priority);
        let waiting = egress.queues[usize::from(priority)].len(&mut self.agenda.slots);
        let lost = if watchdog.remedy == Remedy::Drop { waiting } else { 0 };
        observer.fabric(now, &FabricEvent::WatchdogFired { at, cable, priority, lost });
        let how = PauseEnd::Overruled;
        observer.fabric(now, &FabricEvent::PauseEnded { at, cable, priority, how });
        for _ in 0..lost {
            let this = &mut self.switches[switch.0 as usize];
            let port = &mut this.ports[usize::from(port)];
            let Some(slot) = port.pop(priority, &mut self.agenda.slots) else { break };
            let Slot { bytes, ingress, .. } = *self.agenda.slots.at(slot);
            let resumes = this.release(priority, ingress, bytes);
            self.lose_at_switch(now, switch, ingress, cable, slot, LossCause::Watchdog, observer);
            if resumes {
                self.send_switch_pause(now, switch, ingress, priority, 0, observer);
            }
        }
        self.agenda.push(now.plus(watchdog.restore).nanos(), again);
        self.serve(now, switch, port, observer);
    }
}
