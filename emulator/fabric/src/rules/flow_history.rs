//! Classification of packets and their position in a flow.
//!
//! Memory per flow is bounded. PSNs are unwrapped: positions continue beyond 2^24, so a rule for the first
//! packets does not match again sixteen million packets later.

use super::flow::{FlowId, FlowMatch, FlowTable, PacketType};
use super::packet_class::PacketClass;
use crate::{Frame, FrameContent};
use alloc::collections::{BTreeMap, VecDeque};
use softhca_wire::{Icrc, Opcode, Psn, TransportHeader, TransportPacket};

/// A packet as seen by a link before any fault.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedPacket {
    pub class: PacketClass,
    /// The opcode, unless malformed.
    pub opcode: Option<Opcode>,
    /// The PSN, unless malformed.
    pub psn: Option<Psn>,
    pub flow_id: Option<FlowId>,
    /// Request or response of that flow.
    pub packet_type: Option<PacketType>,
    /// The PSN relative to the first PSN of the flow. `None` for packets without a flow and for CNPs, whose
    /// PSN has no meaning.
    pub relative_psn: Option<i64>,
    /// How often this PSN occurred in packets of the same kind (requests, responses with data, ACKs, NAKs),
    /// including this one. Without a relative PSN: the number of such packets. Zero without a history.
    pub transmission: u64,
    /// The message that the packet belongs to or answers, counted from zero, if the link saw its start.
    pub message_index: Option<u64>,
    /// The packet's index in that message, counted from zero.
    pub packet_index: Option<u64>,
    /// The priority; for a pause frame, the first priority that it names.
    pub priority: u8,
}

impl ObservedPacket {
    /// A packet of which only the class is known.
    pub const fn new(class: PacketClass) -> ObservedPacket {
        ObservedPacket {
            class,
            opcode: None,
            psn: None,
            flow_id: None,
            packet_type: None,
            relative_psn: None,
            transmission: 0,
            message_index: None,
            packet_index: None,
            priority: 0,
        }
    }

    /// Classifies a frame without a history.
    pub fn of(frame: &Frame, flows: &FlowTable) -> ObservedPacket {
        classify(frame, flows).0
    }
}

fn classify(frame: &Frame, flows: &FlowTable) -> (ObservedPacket, Option<FlowMatch>) {
    let mut observed =
        ObservedPacket { priority: frame.priority(), ..ObservedPacket::new(PacketClass::Malformed) };
    let transport = match frame.content {
        FrameContent::Packet => {
            Icrc::split(&frame.bytes).and_then(|(transport, _)| TransportPacket::parse(transport))
        }
        FrameContent::Elided { .. } => TransportHeader::parse(&frame.bytes)
            .map(|(header, _)| TransportPacket { header, payload: &[], padding: &[] }),
        FrameContent::Pause => {
            observed.class = PacketClass::Pause;
            let first = frame.as_pause().and_then(|pause| pause.pause.iter().position(Option::is_some));
            observed.priority = first.unwrap_or(0) as u8;
            return (observed, None);
        }
    };
    let Ok(packet) = transport else { return (observed, None) };
    let bth = packet.header.bth;
    observed.class = PacketClass::of(&packet);
    observed.opcode = Some(bth.opcode);
    observed.psn = Some(bth.psn);
    let found = flows.find(&frame.addressing, &packet.header);
    if let Some(found) = found {
        observed.flow_id = Some(found.flow.id);
        observed.packet_type = Some(found.packet_type);
        let numbered = observed.class != PacketClass::Cnp;
        observed.relative_psn = numbered.then(|| bth.psn.since(found.flow.first_psn).into());
    }
    (observed, found)
}

#[derive(Clone, Debug, Default)]
pub struct FlowHistory {
    flows: BTreeMap<FlowId, FlowRecord>,
    /// Packets without a flow.
    unmatched: u64,
}

/// The history of one flow.
#[derive(Clone, Debug, Default)]
struct FlowRecord {
    serial: u64,
    requests: PsnTracker,
    responses: PsnTracker,
    acks: PsnTracker,
    naks: PsnTracker,
    messages: MessageStarts,
    cnps: u64,
}

impl FlowHistory {
    /// An empty history.
    pub const fn new() -> FlowHistory {
        FlowHistory { flows: BTreeMap::new(), unmatched: 0 }
    }

    /// Classifies a frame and records it.
    pub fn observe(&mut self, frame: &Frame, flows: &FlowTable) -> ObservedPacket {
        let (mut observed, found) = classify(frame, flows);
        let (Some(found), Some(psn), Some(opcode)) = (found, observed.psn, observed.opcode) else {
            self.unmatched += 1;
            observed.transmission = self.unmatched;
            return observed;
        };
        let past = self.flows.entry(found.flow.id).or_default();
        if past.serial != found.serial {
            *past = FlowRecord { serial: found.serial, ..FlowRecord::default() };
        }
        let track = match observed.class {
            PacketClass::Cnp => {
                past.cnps += 1;
                observed.transmission = past.cnps;
                return observed;
            }
            PacketClass::ReadResponse | PacketClass::AtomicResponse => &mut past.responses,
            PacketClass::Ack => &mut past.acks,
            PacketClass::Nak(_) | PacketClass::RnrNak => &mut past.naks,
            _ => &mut past.requests,
        };
        let position = track.unwrap_psn(psn, found.flow.first_psn);
        observed.relative_psn = Some(position);
        observed.transmission = track.count(position);
        let starts = found.packet_type == PacketType::Request && opcode.position().starts_message();
        if starts {
            past.messages.start(position);
        }
        if let Some((message, packet)) = past.messages.locate(position) {
            // A start that was dropped before this link is not part of the previous message.
            if !starts || packet == 0 {
                observed.message_index = Some(message);
                observed.packet_index = Some(packet);
            }
        }
        observed
    }
}

/// Counts per position, stored as runs of equal counts: an in-order stream is one run, and each rewind adds
/// one.
#[derive(Clone, Debug, Default)]
struct PsnTracker {
    /// The highest position.
    head: i64,
    /// Keyed by the first position; runs do not overlap.
    runs: BTreeMap<i64, PsnRun>,
}

#[derive(Clone, Copy, Debug)]
struct PsnRun {
    /// The position after the last one.
    end: i64,
    count: u64,
}

impl PsnTracker {
    /// The limit; beyond it the run with the lowest positions is discarded.
    const MAX_RUNS: usize = 1024;

    /// The position of a PSN relative to `first`: the candidate nearest to the highest position.
    ///
    /// Fewer than 2^23 PSNs are outstanding, so a distance of exactly 2^23 is forward: the request after a
    /// READ of that many packets.
    fn unwrap_psn(&mut self, psn: Psn, first: Psn) -> i64 {
        let space = i64::from(Psn::SPACE);
        let head_psn = first.plus(self.head.rem_euclid(space) as u32);
        let ahead = i64::from(psn.since(head_psn));
        let backwards = ahead > space / 2 && !self.runs.is_empty();
        let position = self.head + ahead - if backwards { space } else { 0 };
        self.head = self.head.max(position);
        position
    }

    /// Counts a packet at `position` and returns the new count.
    fn count(&mut self, position: i64) -> u64 {
        let mut count = 1;
        if let Some((&start, &run)) = self.runs.range(..=position).next_back()
            && position < run.end
        {
            count += run.count;
            self.runs.remove(&start);
            for (start, end) in [(start, position), (position + 1, run.end)] {
                if start < end {
                    self.runs.insert(start, PsnRun { end, ..run });
                }
            }
        }
        let (mut start, mut end) = (position, position + 1);
        if let Some((&before, run)) = self.runs.range(..position).next_back()
            && (run.end, run.count) == (start, count)
        {
            start = before;
        }
        if let Some(behind) = self.runs.get(&end).copied()
            && behind.count == count
        {
            self.runs.remove(&end);
            end = behind.end;
        }
        self.runs.insert(start, PsnRun { end, count });
        while self.runs.len() > Self::MAX_RUNS {
            self.runs.pop_first();
        }
        count
    }
}

/// The start positions of messages, in order.
#[derive(Clone, Debug, Default)]
struct MessageStarts {
    starts: VecDeque<i64>,
    /// The number of discarded starts.
    forgotten: u64,
}

impl MessageStarts {
    /// The limit; beyond it the oldest start is discarded.
    const MAX_STARTS: usize = 4096;

    fn start(&mut self, position: i64) {
        if self.starts.back().is_none_or(|last| *last < position) {
            self.starts.push_back(position);
        }
        if self.starts.len() > Self::MAX_STARTS {
            self.starts.pop_front();
            self.forgotten += 1;
        }
    }

    /// The message at `position`, and the index in it.
    fn locate(&self, position: i64) -> Option<(u64, u64)> {
        let index = self.starts.partition_point(|start| *start <= position).checked_sub(1)?;
        Some((self.forgotten + index as u64, position.abs_diff(self.starts[index])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ALICE, BOB, Packet, flow, host};
    use alloc::vec::Vec;
    use proptest::prelude::*;
    use softhca_wire::{NakCode, Operation, Position, Syndrome};

    /// A history of one flow from Alice to Bob.
    struct Watch(FlowHistory, FlowTable);

    impl Watch {
        fn from(first_psn: u32) -> Watch {
            let mut flows = FlowTable::new();
            flows.insert(flow(1, ALICE, BOB, first_psn));
            Watch(FlowHistory::new(), flows)
        }

        fn see(&mut self, packet: Packet) -> ObservedPacket {
            self.0.observe(&packet.frame(), &self.1)
        }

        fn write(&mut self, psn: u32) -> (i64, u64) {
            let observed = self.see(Packet::rc(Operation::Write, psn));
            (observed.relative_psn.expect("a flow"), observed.transmission)
        }

        fn answer(&mut self, operation: Operation, position: Position, psn: u32) -> ObservedPacket {
            self.see(Packet::part(operation, position, psn).between(BOB, ALICE))
        }
    }

    #[test]
    fn retransmissions_are_counted_across_the_wrap() {
        let mut watch = Watch::from(0xff_fffe);
        let psns = [0xff_fffe, 0xff_ffff, 0, 1, 0xff_ffff, 0, 1, 2, 0];
        let seen: Vec<_> = psns.into_iter().map(|psn| watch.write(psn)).collect();
        assert_eq!(seen, [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (4, 1), (2, 3)]);
    }

    #[test]
    fn positions_continue_beyond_the_psn_space() {
        let mut watch = Watch::from(100);
        let step = 1 << 20;
        for lap in 0..40 {
            assert_eq!(watch.write((100 + lap * step) & 0xff_ffff), (i64::from(lap * step), 1));
        }
    }

    #[test]
    fn request_after_a_read_of_half_the_psn_space_is_ahead() {
        let mut watch = Watch::from(0);
        assert_eq!(watch.write(0), (0, 1));
        assert_eq!(watch.write(1 << 23), (1 << 23, 1));
        assert_eq!(watch.write(1), (1, 1));
    }

    #[test]
    fn packet_dropped_before_the_link_arrives_as_first_transmission() {
        let mut watch = Watch::from(0);
        assert_eq!(watch.write(0), (0, 1));
        assert_eq!(watch.write(2), (2, 1));
        assert_eq!(watch.write(1), (1, 1));
        assert_eq!(watch.write(2), (2, 2));
    }

    #[test]
    fn in_order_stream_is_one_run_and_memory_is_bounded() {
        let mut track = PsnTracker::default();
        (0..100_000).for_each(|position| assert_eq!(track.count(position), 1));
        assert_eq!(track.runs.len(), 1);
        (0..100_000).step_by(2).for_each(|position| assert_eq!(track.count(position), 2));
        assert!(track.runs.len() <= PsnTracker::MAX_RUNS);
        assert_eq!(track.count(99_998), 3);
    }

    #[test]
    fn acks_and_naks_of_one_psn_are_counted_separately() {
        let mut watch = Watch::from(0);
        let refuse = |syndrome| Packet::rc(Operation::Acknowledge, 0).syndrome(syndrome).between(BOB, ALICE);
        assert_eq!(watch.see(refuse(Syndrome::Nak(NakCode::PsnSequenceError))).transmission, 1);
        assert_eq!(watch.see(refuse(Syndrome::Nak(NakCode::PsnSequenceError))).transmission, 2);
        assert_eq!(watch.see(refuse(Syndrome::ACK)).transmission, 1);
    }

    #[test]
    fn retransmissions_and_responses_have_their_message_index() {
        let mut watch = Watch::from(10);
        let mut place = |operation, position, psn| {
            let observed = watch.see(Packet::part(operation, position, psn));
            (observed.message_index, observed.packet_index)
        };
        assert_eq!(place(Operation::Write, Position::First, 10), (Some(0), Some(0)));
        assert_eq!(place(Operation::Write, Position::Middle, 11), (Some(0), Some(1)));
        assert_eq!(place(Operation::Write, Position::Last, 12), (Some(0), Some(2)));
        assert_eq!(place(Operation::ReadRequest, Position::Only, 13), (Some(1), Some(0)));
        assert_eq!(place(Operation::Send, Position::Only, 17), (Some(2), Some(0)));
        assert_eq!(place(Operation::Write, Position::Middle, 11), (Some(0), Some(1)));
        let response = watch.answer(Operation::ReadResponse, Position::Middle, 14);
        assert_eq!((response.message_index, response.packet_index), (Some(1), Some(1)));
        assert_eq!(watch.answer(Operation::Acknowledge, Position::Only, 17).message_index, Some(2));
    }

    #[test]
    fn message_with_a_late_start_has_no_index() {
        let mut watch = Watch::from(0);
        watch.see(Packet::rc(Operation::Send, 0));
        watch.see(Packet::rc(Operation::Send, 2));
        assert_eq!(watch.see(Packet::rc(Operation::Send, 1)).message_index, None);
        assert_eq!(watch.see(Packet::rc(Operation::Send, 2)).message_index, Some(1));
    }

    #[test]
    fn restarted_flow_has_no_history() {
        let mut watch = Watch::from(0);
        assert_eq!(watch.write(0), (0, 1));
        assert_eq!(watch.write(0), (0, 2));
        watch.1.insert(flow(1, ALICE, BOB, 0));
        assert_eq!(watch.write(0), (0, 1));
    }

    #[test]
    fn cnp_has_a_flow_but_no_position() {
        let mut watch = Watch::from(0);
        let mut notify = || watch.answer(Operation::Cnp, Position::Only, 0);
        let (first, second) = (notify(), notify());
        assert_eq!(
            (first.flow_id, first.packet_type, first.relative_psn),
            (Some(FlowId(1)), Some(PacketType::Response), None)
        );
        assert_eq!((first.transmission, second.transmission), (1, 2));
    }

    #[test]
    fn invalid_bytes_are_classified_as_malformed() {
        let mut frame = Packet::rc(Operation::Write, 0).frame();
        frame.bytes.truncate(9);
        let observed = ObservedPacket::of(&frame, &FlowTable::new());
        assert_eq!((observed.class, observed.opcode), (PacketClass::Malformed, None));
    }

    proptest! {
        #[test]
        fn runs_count_like_a_table_of_every_position(positions in prop::collection::vec(-20i64..20, 0..200)) {
            let mut table = BTreeMap::new();
            let mut track = PsnTracker::default();
            for position in positions {
                let count = table.entry(position).or_insert(0u64);
                *count += 1;
                prop_assert_eq!(track.count(position), *count);
            }
            for pair in track.runs.iter().zip(track.runs.iter().skip(1)) {
                let ((_, before), (start, behind)) = pair;
                prop_assert!(before.end < *start || (before.end == *start && before.count != behind.count));
            }
        }

        #[test]
        fn history_of_a_flow_is_independent_of_other_flows(psns in prop::collection::vec((0u32..8, any::<bool>()), 0..60)) {
            let mut alone = Watch::from(0);
            let mut crowded = Watch::from(0);
            crowded.1.insert(flow(2, host(3), BOB, 0));
            for (psn, noise) in psns {
                if noise {
                    crowded.see(Packet::rc(Operation::Write, psn).between(host(3), BOB));
                }
                prop_assert_eq!(
                    alone.see(Packet::rc(Operation::Write, psn)),
                    crowded.see(Packet::rc(Operation::Write, psn))
                );
            }
        }
    }
}
