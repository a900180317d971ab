//! One direction of a cable: when frames arrive, which are held back, and the count of them all.

use crate::{Direction, Fault, FaultCause, FaultEffect, Frame, LinkOutput, ObservedPacket};
use alloc::vec::Vec;
use core::num::{NonZeroU32, NonZeroU64};

/// The physics of a cable, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSettings {
    /// How fast bits leave the sender; none for at once.
    pub bits_per_second: Option<NonZeroU64>,
    /// How long a bit takes from end to end.
    pub delay_ns: u64,
    /// The most bytes of an IP packet; larger ones are lost.
    pub mtu: u32,
}

impl Default for LinkSettings {
    /// Takes no time and carries everything.
    fn default() -> LinkSettings {
        LinkSettings { bits_per_second: None, delay_ns: 0, mtu: u32::MAX }
    }
}

/// What became of the frames of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Put in at the sending end.
    pub admitted: u64,
    /// Made of others by rules.
    pub duplicated: u64,
    /// Handed over with a time of arrival.
    pub delivered: u64,
    /// Lost.
    pub dropped: u64,
    /// Held back at present.
    pub held: u64,
}

impl LinkCounters {
    /// Whether every frame is accounted for.
    pub const fn is_balanced(&self) -> bool {
        self.admitted + self.duplicated == self.delivered + self.dropped + self.held
    }
}

/// A frame on its way through the rules.
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

/// A shipment that waits for others to pass.
#[derive(Clone, Debug)]
struct HeldFrame {
    frame: AdmittedFrame,
    remaining: u32,
    deadline_ns: u64,
}

/// One direction of a cable. What a frame touches that passes unhindered is one line of the cache.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct LinkDirection {
    /// When the last bit of the last frame leaves the sender, and how many (bits × 10^9) modulo the rate
    /// are owed beyond that, so that rounding does not add up.
    busy_until_ns: u64,
    remainder: u64,
    /// A cable keeps order, also when it becomes shorter.
    last_arrival_ns: u64,
    /// Frames that passed unhindered.
    fast_frames: u64,
    settings: LinkSettings,
    /// No rule looks at frames, none is held back, and the link is up: frames pass unhindered.
    fast_path: bool,
    direction: Direction,
    /// What became of the other frames.
    pub counters: LinkCounters,
    /// The link is down before this time.
    pub down_until_ns: u64,
    held: Vec<HeldFrame>,
}

impl LinkDirection {
    pub const fn new(direction: Direction, line: LinkSettings) -> LinkDirection {
        LinkDirection {
            busy_until_ns: 0,
            remainder: 0,
            last_arrival_ns: 0,
            fast_frames: 0,
            settings: line,
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

    /// What became of all frames.
    pub const fn total_counters(&self) -> LinkCounters {
        let LinkCounters { admitted, duplicated, delivered, dropped, held } = self.counters;
        let (admitted, delivered) = (admitted + self.fast_frames, delivered + self.fast_frames);
        LinkCounters { admitted, duplicated, delivered, dropped, held }
    }

    /// The remainder counts in parts of the rate.
    pub fn set_settings(&mut self, line: LinkSettings) {
        self.settings = line;
        self.remainder = 0;
    }

    /// Sees again whether frames pass unhindered.
    pub fn update_fast_path(&mut self, has_rules: bool) {
        self.fast_path = !has_rules && self.held.is_empty() && self.down_until_ns == 0;
    }

    /// Why the line would not carry this frame now.
    pub fn drop_cause(&self, now_ns: u64, frame: &Frame) -> Option<FaultCause> {
        if now_ns < self.down_until_ns {
            Some(FaultCause::LinkDown)
        } else if frame.packet_length() > self.settings.mtu as usize {
            Some(FaultCause::ExceedsMtu)
        } else {
            None
        }
    }

    /// Loses a shipment.
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

    /// Puts a shipment on the line and then what was waiting for it to pass.
    pub fn transmit(&mut self, now_ns: u64, admitted: AdmittedFrame, output: &mut dyn LinkOutput) {
        if !self.transmit_or_drop(now_ns, admitted, output) {
            return;
        }
        self.on_frame_passed(now_ns, output);
    }

    /// Puts a frame on the line to which there is no obstacle, and then what was waiting for it to pass.
    pub fn transmit_unfiltered(&mut self, now_ns: u64, frame: Frame, output: &mut dyn LinkOutput) {
        let arrival_ns = self.arrival(now_ns, frame.wire_length());
        self.deliver(arrival_ns, frame, output);
        self.on_frame_passed(now_ns, output);
    }

    /// Puts a frame on the line if nothing hinders it; tells when it arrives.
    #[inline]
    pub fn fast_transmit(&mut self, now_ns: u64, packet_length: usize, wire_length: usize) -> Option<u64> {
        if !self.fast_path || packet_length > self.settings.mtu as usize {
            return None;
        }
        self.fast_frames += 1;
        Some(self.arrival(now_ns, wire_length))
    }

    /// Keeps a shipment back.
    pub fn hold(&mut self, admitted: AdmittedFrame, by: NonZeroU32, deadline_ns: u64) {
        self.counters.held += admitted.frames();
        self.held.push(HeldFrame { frame: admitted, remaining: by.get(), deadline_ns });
    }

    /// When the first held shipment has waited long enough.
    pub fn next_timeout(&self) -> Option<u64> {
        self.held.iter().map(|held| held.deadline_ns).min()
    }

    /// Lets go of everything that has waited long enough, each at the time when it had.
    pub fn expire(&mut self, now_ns: u64, output: &mut dyn LinkOutput) {
        while let Some(deadline_ns) = self.next_timeout().filter(|deadline_ns| *deadline_ns <= now_ns) {
            self.release(deadline_ns, output, |held| held.deadline_ns == deadline_ns);
        }
    }

    /// One frame more has passed those that are held.
    fn on_frame_passed(&mut self, now_ns: u64, output: &mut dyn LinkOutput) {
        if self.held.is_empty() {
            return;
        }
        for held in &mut self.held {
            held.remaining = held.remaining.saturating_sub(1);
        }
        self.release(now_ns, output, |held| held.remaining == 0);
    }

    /// Lets go of the held shipments that are `ready`, in the order of their admission.
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

    /// Delivers a shipment, or loses it at an obstacle; whether it was delivered.
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

    /// When a frame that is sent now, behind all that was sent before, has arrived.
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
    fn a_rate_is_kept_to_the_nanosecond_over_many_small_frames() {
        // 36 bytes from BTH to ICRC, 28 of IP and UDP, 38 of Ethernet: 816 bits at 400 Gb/s take 2.04 ns.
        let rate = NonZeroU64::new(400_000_000_000);
        let line = LinkSettings { bits_per_second: rate, delay_ns: 1000, ..LinkSettings::default() };
        let (mut half, mut out) = (LinkDirection::new(Direction::Forward, line), Collected::default());
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
    fn duplicates_take_their_time_on_the_line() {
        let line = LinkSettings { bits_per_second: NonZeroU64::new(816_000_000), ..LinkSettings::default() };
        let (mut half, mut out) = (LinkDirection::new(Direction::Forward, line), Collected::default());
        half.transmit(0, AdmittedFrame { copies: 2, ..admitted(send(0, 20)) }, &mut out);
        assert_eq!(out.times(), [1000, 2000, 3000]);
    }

    #[test]
    fn a_line_that_becomes_shorter_does_not_reorder() {
        let line = LinkSettings { delay_ns: 1000, ..LinkSettings::default() };
        let (mut half, mut out) = (LinkDirection::new(Direction::Forward, line), Collected::default());
        half.transmit_unfiltered(0, send(0, 4), &mut out);
        half.set_settings(LinkSettings::default());
        half.transmit_unfiltered(1, send(1, 4), &mut out);
        assert_eq!(out.times(), [1000, 1000]);
    }

    #[test]
    fn a_packet_larger_than_the_mtu_is_lost() {
        let line = LinkSettings { mtu: 500, ..LinkSettings::default() };
        let (mut half, mut out) = (LinkDirection::new(Direction::Forward, line), Collected::default());
        for (psn, payload) in [(0, 456), (1, 460)] {
            half.transmit(0, admitted(send(psn, payload)), &mut out);
        }
        assert_eq!(out.psns(), [0]);
        assert_eq!(out.faults[0].cause, FaultCause::ExceedsMtu);
    }

    #[test]
    fn a_frame_that_was_held_back_is_lost_if_the_link_is_down_when_it_is_let_go() {
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
