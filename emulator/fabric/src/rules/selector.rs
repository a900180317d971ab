//! Packet selection.

use super::flow::{FlowId, PacketType};
use super::flow_history::ObservedPacket;
use super::packet_class::{PacketClass, PacketClasses};
use crate::Direction;
use alloc::vec::Vec;
use softhca_wire::Opcode;

/// Integers from `first` to `last`, inclusive.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InclusiveRange {
    /// The smallest.
    pub first: u64,
    /// The largest.
    pub last: u64,
}

impl InclusiveRange {
    pub const fn exactly(number: u64) -> InclusiveRange {
        InclusiveRange { first: number, last: number }
    }

    /// This number and all larger ones.
    pub const fn at_least(first: u64) -> InclusiveRange {
        InclusiveRange { first, last: u64::MAX }
    }

    /// Whether the range includes `number`.
    pub const fn contains(self, number: u64) -> bool {
        self.first <= number && number <= self.last
    }
}

/// Conditions on a packet; all must hold. The default matches every packet.
///
/// A condition on an absent property (the message of a CNP, the relative PSN of an unknown queue pair) does
/// not hold.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    pub direction: Option<Direction>,
    /// The class.
    pub classes: Option<PacketClasses>,
    /// The opcodes; empty for all.
    pub opcodes: Vec<Opcode>,
    pub flow_id: Option<FlowId>,
    /// Request or response of the flow.
    pub packet_type: Option<PacketType>,
    /// The PSN relative to the first PSN of the flow, continued beyond 2^24.
    pub psn: Option<InclusiveRange>,
    /// The PSN in the packet.
    pub absolute_psn: Option<InclusiveRange>,
    /// The message, counted from zero among the flow's requests on this link; a response has the message of
    /// its request.
    pub message: Option<InclusiveRange>,
    /// The index in the message, counted from zero.
    pub packet: Option<InclusiveRange>,
    /// The occurrence of this PSN on the link: 1 is the first transmission.
    pub transmission: Option<InclusiveRange>,
    /// The priority: the upper three bits of the DSCP.
    pub priority: Option<u8>,
    /// The admission time in nanoseconds.
    pub time_ns: Option<InclusiveRange>,
}

impl Selector {
    /// Whether a packet seen at `now_ns` in `direction` matches.
    pub fn matches(&self, now_ns: u64, direction: Direction, observed: &ObservedPacket) -> bool {
        fn is<T: PartialEq>(wanted: Option<T>, found: Option<T>) -> bool {
            wanted.is_none() || wanted == found
        }
        fn within(wanted: Option<InclusiveRange>, found: Option<u64>) -> bool {
            wanted.is_none_or(|span| found.is_some_and(|number| span.contains(number)))
        }
        is(self.direction, Some(direction))
            && match self.classes {
                Some(classes) => classes.contains(observed.class),
                None => observed.class != PacketClass::Pause,
            }
            && (self.opcodes.is_empty()
                || observed.opcode.is_some_and(|opcode| self.opcodes.contains(&opcode)))
            && is(self.flow_id, observed.flow_id)
            && is(self.packet_type, observed.packet_type)
            && within(self.psn, observed.relative_psn.and_then(|psn| psn.try_into().ok()))
            && within(self.absolute_psn, observed.psn.map(|psn| psn.value().into()))
            && within(self.message, observed.message_index)
            && within(self.packet, observed.packet_index)
            && within(self.transmission, observed.relative_psn.map(|_| observed.transmission))
            && is(self.priority, Some(observed.priority))
            && within(self.time_ns, Some(now_ns))
    }

    /// Whether the conditions depend on earlier packets of the flow.
    pub(crate) const fn needs_history(&self) -> bool {
        self.psn.is_some() || self.message.is_some() || self.packet.is_some() || self.transmission.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ALICE, BOB, Packet, flow};
    use crate::{FlowHistory, FlowTable};
    use alloc::vec;
    use softhca_wire::Operation;

    /// The second transmission of a WRITE with relative PSN 1 on priority 3.
    fn observed() -> ObservedPacket {
        let mut flows = FlowTable::new();
        flows.insert(flow(1, ALICE, BOB, 0xff_ffff));
        let mut history = FlowHistory::new();
        let packet = |psn| Packet::rc(Operation::Write, psn).traffic_class(0b0110_1010).frame();
        history.observe(&packet(0xff_ffff), &flows);
        history.observe(&packet(0), &flows);
        history.observe(&packet(0), &flows)
    }

    #[test]
    fn default_matches_every_packet() {
        assert!(Selector::default().matches(0, Direction::Backward, &observed()));
    }

    #[test]
    fn each_condition_applies_alone() {
        let write = Packet::rc(Operation::Write, 0).opcode;
        let read = Packet::rc(Operation::ReadRequest, 0).opcode;
        let any = Selector::default;
        let cases = [
            (Selector { direction: Some(Direction::Forward), ..any() }, true),
            (Selector { direction: Some(Direction::Backward), ..any() }, false),
            (Selector { classes: Some(PacketClasses::Data), ..any() }, true),
            (Selector { classes: Some(PacketClasses::Only(PacketClass::Ack)), ..any() }, false),
            (Selector { opcodes: vec![read, write], ..any() }, true),
            (Selector { opcodes: vec![read], ..any() }, false),
            (Selector { flow_id: Some(FlowId(1)), ..any() }, true),
            (Selector { flow_id: Some(FlowId(2)), ..any() }, false),
            (Selector { packet_type: Some(PacketType::Request), ..any() }, true),
            (Selector { packet_type: Some(PacketType::Response), ..any() }, false),
            (Selector { psn: Some(InclusiveRange::exactly(1)), ..any() }, true),
            (Selector { psn: Some(InclusiveRange::at_least(2)), ..any() }, false),
            (Selector { absolute_psn: Some(InclusiveRange::exactly(0)), ..any() }, true),
            (Selector { absolute_psn: Some(InclusiveRange::exactly(1)), ..any() }, false),
            (Selector { message: Some(InclusiveRange::exactly(1)), ..any() }, true),
            (Selector { message: Some(InclusiveRange::exactly(0)), ..any() }, false),
            (Selector { packet: Some(InclusiveRange::exactly(0)), ..any() }, true),
            (Selector { packet: Some(InclusiveRange::exactly(1)), ..any() }, false),
            (Selector { transmission: Some(InclusiveRange::exactly(2)), ..any() }, true),
            (Selector { transmission: Some(InclusiveRange::exactly(1)), ..any() }, false),
            (Selector { priority: Some(3), ..any() }, true),
            (Selector { priority: Some(0), ..any() }, false),
            (Selector { time_ns: Some(InclusiveRange { first: 5, last: 10 }), ..any() }, true),
            (Selector { time_ns: Some(InclusiveRange { first: 5, last: 9 }), ..any() }, false),
        ];
        for (selector, expected) in cases {
            assert_eq!(selector.matches(10, Direction::Forward, &observed()), expected, "{selector:?}");
        }
    }

    #[test]
    fn all_conditions_must_hold() {
        let selector = Selector {
            classes: Some(PacketClasses::Data),
            psn: Some(InclusiveRange::exactly(2)),
            flow_id: Some(FlowId(1)),
            ..Selector::default()
        };
        assert!(!selector.matches(0, Direction::Forward, &observed()));
    }

    #[test]
    fn condition_on_an_absent_property_does_not_hold() {
        let stranger = ObservedPacket::of(&Packet::rc(Operation::Write, 0).frame(), &FlowTable::new());
        let span = Some(InclusiveRange::at_least(0));
        let any = Selector::default;
        assert!(!Selector { psn: span, ..any() }.matches(0, Direction::Forward, &stranger));
        assert!(!Selector { message: span, ..any() }.matches(0, Direction::Forward, &stranger));
        assert!(!Selector { transmission: span, ..any() }.matches(0, Direction::Forward, &stranger));
        assert!(Selector { absolute_psn: span, ..any() }.matches(0, Direction::Forward, &stranger));
    }
}
