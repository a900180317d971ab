//! One direction of a cable: when frames arrive, which are held back, and the count of them all.

use crate::{Cause, Direction, Effect, Fault, Frame, Line, Outlet, Sighting};
use alloc::vec::Vec;
use core::num::NonZeroU32;

/// What became of the frames of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
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

impl Ledger {
    /// Whether every frame is accounted for.
    pub const fn balances(&self) -> bool {
        self.admitted + self.duplicated == self.delivered + self.dropped + self.held
    }
}

/// A frame on its way through the rules.
#[derive(Clone, Debug)]
pub(crate) struct Shipment {
    pub frame: Frame,
    pub sighting: Sighting,
    pub copies: u64,
    pub delay_ns: u64,
}

impl Shipment {
    fn frames(&self) -> u64 {
        1 + self.copies
    }
}

/// A shipment that waits for others to pass.
#[derive(Clone, Debug)]
struct Held {
    shipment: Shipment,
    remaining: u32,
    deadline_ns: u64,
}

/// One direction of a cable.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    direction: Direction,
    pub ledger: Ledger,
    /// The link is down before this time.
    pub down_until_ns: u64,
    /// When the last bit of the last frame leaves the sender, and how many (bits × 10^9) modulo the rate
    /// are owed beyond that, so that rounding does not add up.
    busy_until_ns: u64,
    remainder: u64,
    /// A cable keeps order, also when it becomes shorter.
    last_arrival_ns: u64,
    held: Vec<Held>,
}

impl Lane {
    pub const fn new(direction: Direction) -> Lane {
        Lane {
            direction,
            ledger: Ledger { admitted: 0, duplicated: 0, delivered: 0, dropped: 0, held: 0 },
            down_until_ns: 0,
            busy_until_ns: 0,
            remainder: 0,
            last_arrival_ns: 0,
            held: Vec::new(),
        }
    }

    pub const fn busy_until_ns(&self) -> u64 {
        self.busy_until_ns
    }

    /// The remainder counts in parts of the rate.
    pub fn rate_changed(&mut self) {
        self.remainder = 0;
    }

    /// Why the line would not carry this frame now.
    pub fn obstacle(&self, line: &Line, now_ns: u64, frame: &Frame) -> Option<Cause> {
        if now_ns < self.down_until_ns {
            Some(Cause::LinkDown)
        } else if frame.packet_length() > line.mtu as usize {
            Some(Cause::TooBig)
        } else {
            None
        }
    }

    /// Loses a shipment.
    pub fn discard(&mut self, now_ns: u64, cause: Cause, shipment: &Shipment, outlet: &mut dyn Outlet) {
        self.ledger.dropped += shipment.frames();
        outlet.report(Fault {
            at_ns: now_ns,
            direction: self.direction,
            cause,
            effect: Effect::Dropped { copies: shipment.copies },
            sighting: shipment.sighting,
        });
    }

    /// Puts a shipment on the line and then what was waiting for it to pass.
    pub fn ship(&mut self, line: &Line, now_ns: u64, shipment: Shipment, outlet: &mut dyn Outlet) {
        if !self.carry(line, now_ns, shipment, outlet) {
            return;
        }
        self.passed(line, now_ns, outlet);
    }

    /// Puts a frame on the line to which there is no obstacle, and then what was waiting for it to pass.
    pub fn ship_unseen(&mut self, line: &Line, now_ns: u64, frame: Frame, outlet: &mut dyn Outlet) {
        let arrival_ns = self.arrival(line, now_ns, &frame);
        self.deliver(arrival_ns, frame, outlet);
        self.passed(line, now_ns, outlet);
    }

    /// Keeps a shipment back.
    pub fn hold(&mut self, shipment: Shipment, by: NonZeroU32, deadline_ns: u64) {
        self.ledger.held += shipment.frames();
        self.held.push(Held { shipment, remaining: by.get(), deadline_ns });
    }

    /// When the first held shipment has waited long enough.
    pub fn next_timeout(&self) -> Option<u64> {
        self.held.iter().map(|held| held.deadline_ns).min()
    }

    /// Lets go of everything that has waited long enough, each at the time when it had.
    pub fn expire(&mut self, line: &Line, now_ns: u64, outlet: &mut dyn Outlet) {
        while let Some(deadline_ns) = self.next_timeout().filter(|deadline_ns| *deadline_ns <= now_ns) {
            self.release(line, deadline_ns, outlet, |held| held.deadline_ns == deadline_ns);
        }
    }

    /// One frame more has passed those that are held.
    fn passed(&mut self, line: &Line, now_ns: u64, outlet: &mut dyn Outlet) {
        if self.held.is_empty() {
            return;
        }
        for held in &mut self.held {
            held.remaining = held.remaining.saturating_sub(1);
        }
        self.release(line, now_ns, outlet, |held| held.remaining == 0);
    }

    /// Lets go of the held shipments that are `ready`, in the order of their admission.
    fn release(&mut self, line: &Line, now_ns: u64, outlet: &mut dyn Outlet, ready: impl Fn(&Held) -> bool) {
        let mut index = 0;
        while index < self.held.len() {
            if ready(&self.held[index]) {
                let shipment = self.held.remove(index).shipment;
                self.ledger.held -= shipment.frames();
                self.carry(line, now_ns, shipment, outlet);
            } else {
                index += 1;
            }
        }
    }

    /// Delivers a shipment, or loses it at an obstacle; whether it was delivered.
    fn carry(&mut self, line: &Line, now_ns: u64, shipment: Shipment, outlet: &mut dyn Outlet) -> bool {
        if let Some(cause) = self.obstacle(line, now_ns, &shipment.frame) {
            self.discard(now_ns, cause, &shipment, outlet);
            return false;
        }
        let Shipment { frame, copies, delay_ns, .. } = shipment;
        let mut arrival_ns = self.arrival(line, now_ns, &frame).saturating_add(delay_ns);
        for _ in 0..copies {
            let copy = frame.clone();
            self.deliver(arrival_ns, copy, outlet);
            arrival_ns = self.arrival(line, now_ns, &frame).saturating_add(delay_ns);
        }
        self.deliver(arrival_ns, frame, outlet);
        true
    }

    fn deliver(&mut self, arrival_ns: u64, frame: Frame, outlet: &mut dyn Outlet) {
        self.ledger.delivered += 1;
        outlet.deliver(arrival_ns, self.direction, frame);
    }

    /// When a frame that is sent now, behind all that was sent before, has arrived.
    fn arrival(&mut self, line: &Line, now_ns: u64, frame: &Frame) -> u64 {
        if now_ns > self.busy_until_ns {
            self.busy_until_ns = now_ns;
            self.remainder = 0;
        }
        if let Some(rate) = line.bits_per_second {
            let bits = frame.wire_length() as u64 * 8;
            let time = bits * 1_000_000_000 + self.remainder;
            self.busy_until_ns = self.busy_until_ns.saturating_add(time / rate);
            self.remainder = time % rate;
        }
        self.last_arrival_ns = self.last_arrival_ns.max(self.busy_until_ns.saturating_add(line.delay_ns));
        self.last_arrival_ns
    }
}
