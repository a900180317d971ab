//! One direction of a link: serialization, propagation delay, reordered frames and counters.

use crate::{Direction, Fault, FaultCause, FaultEffect, Frame, LinkOutput, ObservedPacket};
use alloc::vec::Vec;
use core::num::{NonZeroU32, NonZeroU64};

/// Link parameters, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSettings {
    /// The line rate; `None` for unlimited.
    pub bits_per_second: Option<NonZeroU64>,
    /// The propagation delay.
    pub delay_ns: u64,
    /// The largest IP packet; larger ones are dropped.
    pub mtu: u32,
}

impl Default for LinkSettings {
    /// Unlimited rate, no delay, no MTU limit.
    fn default() -> LinkSettings {
        LinkSettings { bits_per_second: None, delay_ns: 0, mtu: u32::MAX }
    }
}

/// Frame counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Accepted from the sender.
    pub admitted: u64,
    /// Copies that rules made.
    pub duplicated: u64,
    /// Delivered with an arrival time.
    pub delivered: u64,
    pub dropped: u64,
    /// Currently held for reordering.
    pub held: u64,
}

impl LinkCounters {
    /// Whether every frame is accounted for.
    pub const fn is_balanced(&self) -> bool {
        self.admitted + self.duplicated == self.delivered + self.dropped + self.held
    }
}

/// An accepted frame and the effects that rules added.
#[derive(Clone, Debug)]
pub(crate) struct AdmittedFrame {
    pub frame: Frame,
    pub observed: ObservedPacket,
    pub copies: u64,
    pub delay_ns: u64,
}

impl AdmittedFrame {
    fn frames(&self) -> u64 {
        1 + self.copies
    }
}

/// A frame that waits for others to pass it.
#[derive(Clone, Debug)]
struct HeldFrame {
    frame: AdmittedFrame,
    remaining: u32,
    deadline_ns: u64,
}

/// One direction of a link. The fast path touches one cache line.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct LinkDirection {
    /// The time at which the last bit of the last frame leaves the sender. With the remainder of (bits × 10^9) modulo
    /// the rate, rounding errors do not accumulate.
    busy_until_ns: u64,
    remainder: u64,
    /// A link keeps frames in order, also when its delay decreases.
    last_arrival_ns: u64,
    /// Frames that took the fast path.
    fast_frames: u64,
    settings: LinkSettings,
    /// The direction has no rules and no held frames, and is up: frames take the fast path.
    fast_path: bool,
    direction: Direction,
    /// Counters of all other frames.
    pub counters: LinkCounters,
    /// The direction is down before this time.
    pub down_until_ns: u64,
    held: Vec<HeldFrame>,
}

impl LinkDirection {
    pub const fn new(direction: Direction, settings: LinkSettings) -> LinkDirection {
        LinkDirection {
            busy_until_ns: 0,
            remainder: 0,
            last_arrival_ns: 0,
            fast_frames: 0,
            settings,
            fast_path: true,
            direction,
            counters: LinkCounters { admitted: 0, duplicated: 0, delivered: 0, dropped: 0, held: 0 },
            down_until_ns: 0,
            held: Vec::new(),
        }
    }

    pub const fn busy_until_ns(&self) -> u64 {
        self.busy_until_ns
    }

    pub const fn settings(&self) -> &LinkSettings {
        &self.settings
    }

    /// Counters of all frames.
    pub const fn total_counters(&self) -> LinkCounters {
        let LinkCounters { admitted, duplicated, delivered, dropped, held } = self.counters;
        let (admitted, delivered) = (admitted + self.fast_frames, delivered + self.fast_frames);
        LinkCounters { admitted, duplicated, delivered, dropped, held }
    }

    /// The remainder is relative to the old rate.
    pub fn set_settings(&mut self, settings: LinkSettings) {
        self.settings = settings;
        self.remainder = 0;
    }

    /// Recomputes whether frames can take the fast path.
    pub fn update_fast_path(&mut self, has_rules: bool) {
        self.fast_path = !has_rules && self.held.is_empty() && self.down_until_ns == 0;
    }

    /// Why the link drops this frame now, if it does.
    pub fn drop_cause(&self, now_ns: u64, frame: &Frame) -> Option<FaultCause> {
        if now_ns < self.down_until_ns {
            Some(FaultCause::LinkDown)
        } else if frame.packet_length() > self.settings.mtu as usize {
            Some(FaultCause::ExceedsMtu)
        } else {
            None
        }
    }

    /// Drops a frame and its copies.
    pub fn drop_frame(
        &mut self,
        now_ns: u64,
        cause: FaultCause,
        admitted: &AdmittedFrame,
        output: &mut dyn LinkOutput,
    ) {
        self.counters.dropped += admitted.frames();
        output.report(Fault {
            at_ns: now_ns,
            direction: self.direction,
            cause,
            effect: FaultEffect::Dropped { copies: admitted.copies },
            packet: admitted.observed,
        });
    }

    /// Transmits a frame, then the held frames that waited for it.
    pub fn transmit(&mut self, now_ns: u64, admitted: AdmittedFrame, output: &mut dyn LinkOutput) {
        let delay_ns = admitted.delay_ns;
        if !self.transmit_or_drop(now_ns, admitted, output) {
            return;
        }
        self.on_frame_passed(now_ns, delay_ns, output);
    }

    /// Transmits a frame that [`LinkDirection::drop_cause`] accepts, then the held frames that waited for it.
    pub fn transmit_unfiltered(&mut self, now_ns: u64, frame: Frame, output: &mut dyn LinkOutput) {
        let arrival_ns = self.arrival(now_ns, frame.wire_length());
        self.deliver(arrival_ns, frame, output);
        self.on_frame_passed(now_ns, 0, output);
    }

    /// Transmits a frame on the fast path, if possible. Returns its arrival time.
    #[inline]
    pub fn fast_transmit(&mut self, now_ns: u64, packet_length: usize, wire_length: usize) -> Option<u64> {
        if !self.fast_path || packet_length > self.settings.mtu as usize {
            return None;
        }
        self.fast_frames += 1;
        Some(self.arrival(now_ns, wire_length))
    }

    /// Holds a frame back.
    pub fn hold(&mut self, admitted: AdmittedFrame, by: NonZeroU32, deadline_ns: u64) {
        self.counters.held += admitted.frames();
        self.held.push(HeldFrame { frame: admitted, remaining: by.get(), deadline_ns });
    }

    /// No frame that is sent from now on arrives before this time.
    pub fn hold_all(&mut self, until_ns: u64) {
        self.last_arrival_ns = self.last_arrival_ns.max(until_ns);
    }

    /// When the next held frame times out.
    pub fn next_timeout(&self) -> Option<u64> {
        self.held.iter().map(|held| held.deadline_ns).min()
    }

    /// Releases frames whose deadline has passed, each at its deadline.
    pub fn expire(&mut self, now_ns: u64, output: &mut dyn LinkOutput) {
        while let Some(deadline_ns) = self.next_timeout().filter(|deadline_ns| *deadline_ns <= now_ns) {
            self.release(deadline_ns, output, |held| held.deadline_ns == deadline_ns);
        }
    }

    /// Counts a frame that passed the held ones. A rule may delay it by `delay_ns`: those that waited for it arrive after
    /// it nevertheless.
    fn on_frame_passed(&mut self, now_ns: u64, delay_ns: u64, output: &mut dyn LinkOutput) {
        if self.held.is_empty() {
            return;
        }
        for held in &mut self.held {
            held.remaining = held.remaining.saturating_sub(1);
            held.frame.delay_ns = held.frame.delay_ns.max(delay_ns);
        }
        self.release(now_ns, output, |held| held.remaining == 0);
    }

    /// Releases the held frames that are `ready`, in the order of admission.
    fn release(&mut self, now_ns: u64, output: &mut dyn LinkOutput, ready: impl Fn(&HeldFrame) -> bool) {
        let mut index = 0;
        while index < self.held.len() {
            if ready(&self.held[index]) {
                let admitted = self.held.remove(index).frame;
                self.counters.held -= admitted.frames();
                self.transmit_or_drop(now_ns, admitted, output);
            } else {
                index += 1;
            }
        }
    }

    /// Delivers or drops a frame. Returns whether it was delivered.
    fn transmit_or_drop(
        &mut self,
        now_ns: u64,
        admitted: AdmittedFrame,
        output: &mut dyn LinkOutput,
    ) -> bool {
        if let Some(cause) = self.drop_cause(now_ns, &admitted.frame) {
            self.drop_frame(now_ns, cause, &admitted, output);
            return false;
        }
        let AdmittedFrame { frame, copies, delay_ns, .. } = admitted;
        let mut arrival_ns = self.arrival(now_ns, frame.wire_length()).saturating_add(delay_ns);
        for _ in 0..copies {
            let copy = frame.clone();
            self.deliver(arrival_ns, copy, output);
            arrival_ns = self.arrival(now_ns, frame.wire_length()).saturating_add(delay_ns);
        }
        self.deliver(arrival_ns, frame, output);
        true
    }

    fn deliver(&mut self, arrival_ns: u64, frame: Frame, output: &mut dyn LinkOutput) {
        self.counters.delivered += 1;
        output.deliver(arrival_ns, self.direction, frame);
    }

    /// The arrival time of a frame sent now, after all earlier ones.
    fn arrival(&mut self, now_ns: u64, wire_length: usize) -> u64 {
        if now_ns > self.busy_until_ns {
            self.busy_until_ns = now_ns;
            self.remainder = 0;
        }
        if let Some(rate) = self.settings.bits_per_second {
            let bits = wire_length as u64 * 8;
            let time = bits * 1_000_000_000 + self.remainder;
            self.busy_until_ns = self.busy_until_ns.saturating_add(time / rate);
            self.remainder = time % rate;
        }
        self.last_arrival_ns =
            self.last_arrival_ns.max(self.busy_until_ns.saturating_add(self.settings.delay_ns));
        self.last_arrival_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FlowTable;
    use crate::testing::{Collected, Packet};
    use softhca_wire::Operation;

    fn admitted(frame: Frame) -> AdmittedFrame {
        let observed = ObservedPacket::of(&frame, &FlowTable::new());
        AdmittedFrame { frame, observed, copies: 0, delay_ns: 0 }
    }

    fn send(psn: u32, payload: usize) -> Frame {
        Packet::rc(Operation::Send, psn).payload(payload).frame()
    }

    #[test]
    fn rate_is_exact_to_the_nanosecond_over_many_small_frames() {
        // 36 bytes BTH to ICRC, 28 bytes IP and UDP, 38 bytes Ethernet: 816 bits take 2.04 ns at 400 Gb/s.
        let rate = NonZeroU64::new(400_000_000_000);
        let settings = LinkSettings { bits_per_second: rate, delay_ns: 1000, ..LinkSettings::default() };
        let (mut half, mut out) = (LinkDirection::new(Direction::Forward, settings), Collected::default());
        assert_eq!(send(0, 20).wire_length() * 8, 816);
        for psn in 0..1000 {
            half.transmit_unfiltered(0, send(psn, 20), &mut out);
        }
        assert_eq!(out.times()[..3], [1002, 1004, 1006]);
        assert_eq!(out.times()[999], 1000 + 2040);
        assert_eq!(half.busy_until_ns(), 2040);
        half.transmit_unfiltered(5000, send(1000, 20), &mut out);
        assert_eq!(out.times()[1000], 6002);
    }

    #[test]
    fn duplicates_take_transmission_time() {
        let settings =
            LinkSettings { bits_per_second: NonZeroU64::new(816_000_000), ..LinkSettings::default() };
        let (mut half, mut out) = (LinkDirection::new(Direction::Forward, settings), Collected::default());
        half.transmit(0, AdmittedFrame { copies: 2, ..admitted(send(0, 20)) }, &mut out);
        assert_eq!(out.times(), [1000, 2000, 3000]);
    }

    #[test]
    fn decreasing_delay_does_not_reorder() {
        let settings = LinkSettings { delay_ns: 1000, ..LinkSettings::default() };
        let (mut half, mut out) = (LinkDirection::new(Direction::Forward, settings), Collected::default());
        half.transmit_unfiltered(0, send(0, 4), &mut out);
        half.set_settings(LinkSettings::default());
        half.transmit_unfiltered(1, send(1, 4), &mut out);
        assert_eq!(out.times(), [1000, 1000]);
    }

    #[test]
    fn packet_larger_than_the_mtu_is_dropped() {
        let settings = LinkSettings { mtu: 500, ..LinkSettings::default() };
        let (mut half, mut out) = (LinkDirection::new(Direction::Forward, settings), Collected::default());
        for (psn, payload) in [(0, 456), (1, 460)] {
            half.transmit(0, admitted(send(psn, payload)), &mut out);
        }
        assert_eq!(out.psns(), [0]);
        assert_eq!(out.faults[0].cause, FaultCause::ExceedsMtu);
    }

    #[test]
    fn held_frame_is_dropped_if_the_link_is_down_at_its_release() {
        let mut half = LinkDirection::new(Direction::Forward, LinkSettings::default());
        let mut out = Collected::default();
        half.hold(admitted(send(0, 4)), NonZeroU32::MIN, 50);
        half.down_until_ns = 60;
        half.expire(100, &mut out);
        assert_eq!(
            (out.psns().len(), out.faults[0].cause, out.faults[0].at_ns),
            (0, FaultCause::LinkDown, 50)
        );
        assert_eq!((half.counters.held, half.counters.dropped), (0, 1));
    }
}
