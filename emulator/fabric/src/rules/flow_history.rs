//! What a cable knows about a packet: what it is, and what it is in the course of its flow.
//!
//! Memory is bounded per flow. PSNs are unwrapped: positions count on beyond 2^24, so that nothing that a
//! rule said about the first packets happens again sixteen million packets later.

use super::flow::{FlowId, FlowMatch, FlowTable, PacketType};
use super::packet_class::PacketClass;
use crate::{Frame, FrameContent};
use alloc::collections::{BTreeMap, VecDeque};
use softhca_wire::{Icrc, Opcode, Psn, TransportHeader, TransportPacket};

/// A packet as a cable saw it, before any fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedPacket {
    /// What it is for.
    pub class: PacketClass,
    /// Its opcode, unless it is malformed.
    pub opcode: Option<Opcode>,
    /// Its PSN, unless it is malformed.
    pub psn: Option<Psn>,
    /// The flow that it belongs to.
    pub flow_id: Option<FlowId>,
    /// Its sense in that flow.
    pub packet_type: Option<PacketType>,
    /// How far behind the first PSN of the flow it is. None for a packet of no flow, and for a CNP, whose
    /// PSN means nothing.
    pub relative_psn: Option<i64>,
    /// How often this PSN was seen in packets of the same kind (requests, responses with data, ACKs, NAKs),
    /// this time included. Without a relative PSN: how many such packets were seen. Zero if nobody counts.
    pub transmission: u64,
    /// Which message of the flow it belongs to or answers, counted from zero, if the cable saw it start.
    pub message_index: Option<u64>,
    /// Its place in that message, counted from zero.
    pub packet_index: Option<u64>,
    /// The priority that switches queue it in; of a pause frame the first that it speaks of.
    pub priority: u8,
}

impl ObservedPacket {
    /// What can be said of a frame without a memory of earlier ones.
    pub fn of(frame: &Frame, flows: &FlowTable) -> ObservedPacket {
        classify(frame, flows).0
    }
}

fn classify(frame: &Frame, flows: &FlowTable) -> (ObservedPacket, Option<FlowMatch>) {
    let mut observed = ObservedPacket {
        class: PacketClass::Malformed,
        opcode: None,
        psn: None,
        flow_id: None,
        packet_type: None,
        relative_psn: None,
        transmission: 0,
        message_index: None,
        packet_index: None,
        priority: frame.priority(),
    };
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

/// What was seen of every flow.
#[derive(Clone, Debug, Default)]
pub struct FlowHistory {
    flows: BTreeMap<FlowId, FlowRecord>,
    /// Packets that belong to no flow.
    unmatched: u64,
}

/// What was seen of one flow.
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
    /// An empty memory.
    pub const fn new() -> FlowHistory {
        FlowHistory { flows: BTreeMap::new(), unmatched: 0 }
    }

    /// Looks at a frame and remembers it.
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
            // The start of a message that was lost before it came here is not a part of the one before it.
            if !starts || packet == 0 {
                observed.message_index = Some(message);
                observed.packet_index = Some(packet);
            }
        }
        observed
    }
}

/// How often each position of a stream was seen, as runs of equal counts: a stream in order is one run, and
/// going back adds one for each place gone back to.
#[derive(Clone, Debug, Default)]
struct PsnTracker {
    /// The furthest position.
    head: i64,
    /// By the first position. They do not overlap.
    runs: BTreeMap<i64, PsnRun>,
}

#[derive(Clone, Copy, Debug)]
struct PsnRun {
    /// The position behind the last one.
    end: i64,
    count: u64,
}

impl PsnTracker {
    /// When there are more, the one with the lowest positions is forgotten.
    const MAX_RUNS: usize = 1024;

    /// How far behind `first` this PSN is, as near to the furthest one as the 24 bits allow.
    ///
    /// Fewer than 2^23 PSNs are outstanding, so a distance of just 2^23 leads forward: to the request
    /// behind a READ of that many packets.
    fn unwrap_psn(&mut self, psn: Psn, first: Psn) -> i64 {
        let space = i64::from(Psn::SPACE);
        let head_psn = first.plus(self.head.rem_euclid(space) as u32);
        let ahead = i64::from(psn.since(head_psn));
        let backwards = ahead > space / 2 && !self.runs.is_empty();
        let position = self.head + ahead - if backwards { space } else { 0 };
        self.head = self.head.max(position);
        position
    }

    /// Counts one more packet at `position` and returns how many there were.
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

/// Where the messages of a flow start, in order.
#[derive(Clone, Debug, Default)]
struct MessageStarts {
    starts: VecDeque<i64>,
    /// How many starts before the first of these are forgotten.
    forgotten: u64,
}

impl MessageStarts {
    /// When there are more, the oldest is forgotten.
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

    /// The message at `position`, and the place in it.
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
    fn positions_count_on_when_all_psns_are_used_up() {
        let mut watch = Watch::from(100);
        let step = 1 << 20;
        for lap in 0..40 {
            assert_eq!(watch.write((100 + lap * step) & 0xff_ffff), (i64::from(lap * step), 1));
        }
    }

    #[test]
    fn the_request_behind_a_read_of_half_the_psns_is_ahead() {
        let mut watch = Watch::from(0);
        assert_eq!(watch.write(0), (0, 1));
        assert_eq!(watch.write(1 << 23), (1 << 23, 1));
        assert_eq!(watch.write(1), (1, 1));
    }

    #[test]
    fn a_packet_that_was_lost_before_is_at_its_first_transmission_when_it_comes() {
        let mut watch = Watch::from(0);
        assert_eq!(watch.write(0), (0, 1));
        assert_eq!(watch.write(2), (2, 1));
        assert_eq!(watch.write(1), (1, 1));
        assert_eq!(watch.write(2), (2, 2));
    }

    #[test]
    fn a_stream_in_order_takes_one_run_and_losses_cannot_fill_the_memory() {
        let mut track = PsnTracker::default();
        (0..100_000).for_each(|position| assert_eq!(track.count(position), 1));
        assert_eq!(track.runs.len(), 1);
        (0..100_000).step_by(2).for_each(|position| assert_eq!(track.count(position), 2));
        assert!(track.runs.len() <= PsnTracker::MAX_RUNS);
        assert_eq!(track.count(99_998), 3);
    }

    #[test]
    fn acknowledgements_and_refusals_of_one_psn_are_counted_apart() {
        let mut watch = Watch::from(0);
        let refuse = |syndrome| Packet::rc(Operation::Acknowledge, 0).syndrome(syndrome).between(BOB, ALICE);
        assert_eq!(watch.see(refuse(Syndrome::Nak(NakCode::PsnSequenceError))).transmission, 1);
        assert_eq!(watch.see(refuse(Syndrome::Nak(NakCode::PsnSequenceError))).transmission, 2);
        assert_eq!(watch.see(refuse(Syndrome::ACK)).transmission, 1);
    }

    #[test]
    fn packets_know_their_message_also_when_sent_again_and_when_answered() {
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
    fn a_message_whose_start_comes_late_has_no_number() {
        let mut watch = Watch::from(0);
        watch.see(Packet::rc(Operation::Send, 0));
        watch.see(Packet::rc(Operation::Send, 2));
        assert_eq!(watch.see(Packet::rc(Operation::Send, 1)).message_index, None);
        assert_eq!(watch.see(Packet::rc(Operation::Send, 2)).message_index, Some(1));
    }

    #[test]
    fn a_flow_that_starts_anew_is_forgotten() {
        let mut watch = Watch::from(0);
        assert_eq!(watch.write(0), (0, 1));
        assert_eq!(watch.write(0), (0, 2));
        watch.1.insert(flow(1, ALICE, BOB, 0));
        assert_eq!(watch.write(0), (0, 1));
    }

    #[test]
    fn a_notification_has_a_flow_but_no_position() {
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
    fn bytes_that_are_no_packet_are_seen_as_malformed() {
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
        fn other_flows_do_not_change_what_is_seen_of_one(psns in prop::collection::vec((0u32..8, any::<bool>()), 0..60)) {
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
