//! Which packets a rule is about.

use crate::{Class, Classes, Direction, Role, Sense, Sighting};
use alloc::vec::Vec;
use softhca_wire::Opcode;

/// Whole numbers from `first` to `last`, both included.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The smallest.
    pub first: u64,
    /// The largest.
    pub last: u64,
}

impl Span {
    /// One number.
    pub const fn exactly(number: u64) -> Span {
        Span { first: number, last: number }
    }

    /// This number and every larger one.
    pub const fn starting(first: u64) -> Span {
        Span { first, last: u64::MAX }
    }

    /// Whether `number` is one of them.
    pub const fn contains(self, number: u64) -> bool {
        self.first <= number && number <= self.last
    }
}

/// What a packet must be like: every condition that is given has to hold. The default takes every packet.
///
/// A condition about something that a packet does not have (the message of a CNP, the relative PSN of an
/// unknown queue pair) does not hold.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// Which end of the cable sends it.
    pub direction: Option<Direction>,
    /// What it is for.
    pub classes: Option<Classes>,
    /// Its opcode: any of these; empty for all.
    pub opcodes: Vec<Opcode>,
    /// The queue pair that asks or is answered.
    pub role: Option<Role>,
    /// Whether that queue pair asks or is answered.
    pub sense: Option<Sense>,
    /// Its PSN, counted from the first of the flow and on beyond 2^24.
    pub psn: Option<Span>,
    /// The PSN as it stands in the packet.
    pub absolute_psn: Option<Span>,
    /// Its message, counted from zero among the requests that the cable saw of the flow; an answer has the
    /// message that it answers.
    pub message: Option<Span>,
    /// Its place in that message, counted from zero.
    pub packet: Option<Span>,
    /// How often the cable saw this PSN, this time included: 1 is the first transmission.
    pub transmission: Option<Span>,
    /// The upper three bits of its DSCP.
    pub priority: Option<u8>,
    /// The time of its admission in nanoseconds.
    pub time_ns: Option<Span>,
}

impl Selector {
    /// Whether the packet seen at `now_ns` on its way in `direction` is one of those meant.
    pub fn matches(&self, now_ns: u64, direction: Direction, sighting: &Sighting) -> bool {
        fn is<T: PartialEq>(wanted: Option<T>, found: Option<T>) -> bool {
            wanted.is_none() || wanted == found
        }
        fn within(wanted: Option<Span>, found: Option<u64>) -> bool {
            wanted.is_none_or(|span| found.is_some_and(|number| span.contains(number)))
        }
        is(self.direction, Some(direction))
            && match self.classes {
                Some(classes) => classes.contains(sighting.class),
                None => sighting.class != Class::Pause,
            }
            && (self.opcodes.is_empty()
                || sighting.opcode.is_some_and(|opcode| self.opcodes.contains(&opcode)))
            && is(self.role, sighting.role)
            && is(self.sense, sighting.sense)
            && within(self.psn, sighting.relative_psn.and_then(|psn| psn.try_into().ok()))
            && within(self.absolute_psn, sighting.psn.map(|psn| psn.value().into()))
            && within(self.message, sighting.message)
            && within(self.packet, sighting.packet)
            && within(self.transmission, sighting.relative_psn.map(|_| sighting.transmission))
            && is(self.priority, Some(sighting.priority))
            && within(self.time_ns, Some(now_ns))
    }

    /// Whether the conditions ask about earlier packets of the flow.
    pub(crate) const fn looks_back(&self) -> bool {
        self.psn.is_some() || self.message.is_some() || self.packet.is_some() || self.transmission.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ALICE, BOB, Packet, flow};
    use crate::{Flows, History};
    use alloc::vec;
    use softhca_wire::Operation;

    /// The second transmission of a WRITE with relative PSN 1 on priority 3.
    fn sighting() -> Sighting {
        let mut flows = Flows::new();
        flows.insert(flow(1, ALICE, BOB, 0xff_ffff));
        let mut history = History::new();
        let packet = |psn| Packet::rc(Operation::Write, psn).traffic_class(0b0110_1010).frame();
        history.observe(&packet(0xff_ffff), &flows);
        history.observe(&packet(0), &flows);
        history.observe(&packet(0), &flows)
    }

    #[test]
    fn the_default_takes_every_packet() {
        assert!(Selector::default().matches(0, Direction::Backward, &sighting()));
    }

    #[test]
    fn each_condition_decides_alone() {
        let write = Packet::rc(Operation::Write, 0).opcode;
        let read = Packet::rc(Operation::ReadRequest, 0).opcode;
        let any = Selector::default;
        let cases = [
            (Selector { direction: Some(Direction::Forward), ..any() }, true),
            (Selector { direction: Some(Direction::Backward), ..any() }, false),
            (Selector { classes: Some(Classes::Data), ..any() }, true),
            (Selector { classes: Some(Classes::Only(Class::Ack)), ..any() }, false),
            (Selector { opcodes: vec![read, write], ..any() }, true),
            (Selector { opcodes: vec![read], ..any() }, false),
            (Selector { role: Some(Role(1)), ..any() }, true),
            (Selector { role: Some(Role(2)), ..any() }, false),
            (Selector { sense: Some(Sense::Request), ..any() }, true),
            (Selector { sense: Some(Sense::Response), ..any() }, false),
            (Selector { psn: Some(Span::exactly(1)), ..any() }, true),
            (Selector { psn: Some(Span::starting(2)), ..any() }, false),
            (Selector { absolute_psn: Some(Span::exactly(0)), ..any() }, true),
            (Selector { absolute_psn: Some(Span::exactly(1)), ..any() }, false),
            (Selector { message: Some(Span::exactly(1)), ..any() }, true),
            (Selector { message: Some(Span::exactly(0)), ..any() }, false),
            (Selector { packet: Some(Span::exactly(0)), ..any() }, true),
            (Selector { packet: Some(Span::exactly(1)), ..any() }, false),
            (Selector { transmission: Some(Span::exactly(2)), ..any() }, true),
            (Selector { transmission: Some(Span::exactly(1)), ..any() }, false),
            (Selector { priority: Some(3), ..any() }, true),
            (Selector { priority: Some(0), ..any() }, false),
            (Selector { time_ns: Some(Span { first: 5, last: 10 }), ..any() }, true),
            (Selector { time_ns: Some(Span { first: 5, last: 9 }), ..any() }, false),
        ];
        for (selector, expected) in cases {
            assert_eq!(selector.matches(10, Direction::Forward, &sighting()), expected, "{selector:?}");
        }
    }

    #[test]
    fn all_conditions_have_to_hold() {
        let selector = Selector {
            classes: Some(Classes::Data),
            psn: Some(Span::exactly(2)),
            role: Some(Role(1)),
            ..Selector::default()
        };
        assert!(!selector.matches(0, Direction::Forward, &sighting()));
    }

    #[test]
    fn a_condition_about_what_a_packet_lacks_does_not_hold() {
        let stranger = Sighting::of(&Packet::rc(Operation::Write, 0).frame(), &Flows::new());
        let span = Some(Span::starting(0));
        let any = Selector::default;
        assert!(!Selector { psn: span, ..any() }.matches(0, Direction::Forward, &stranger));
        assert!(!Selector { message: span, ..any() }.matches(0, Direction::Forward, &stranger));
        assert!(!Selector { transmission: span, ..any() }.matches(0, Direction::Forward, &stranger));
        assert!(Selector { absolute_psn: span, ..any() }.matches(0, Direction::Forward, &stranger));
    }
}
