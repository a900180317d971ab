//! The reorder buffer: undoes reordering by the network stacks of two machines.
//!
//! A sender that is polled on several processors, or a receive path spread over them, lets a frame overtake another.
//! An HCA would treat that as a loss. The driver therefore holds an early frame until the missing frames arrive, for
//! at most a millisecond or 64 frames. No I/O, no clock.

use softhca_wire::{AddressHeaders, Bth, Qpn};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

/// How long a frame waits for its predecessors.
const REORDER_TIMEOUT: u64 = 1_000_000;
/// The most frames of a flow that wait.
const MAX_FRAMES_PER_FLOW: usize = 64;

/// The unit of ordering: frames of one peer to one queue pair, requests and responses apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FlowKey {
    pub peer: IpAddr,
    pub destination_qp: Qpn,
    pub is_request: bool,
}

impl FlowKey {
    pub fn of(peer: IpAddr, bth: &Bth) -> FlowKey {
        let is_request = bth.opcode.operation().is_request();
        FlowKey { peer, destination_qp: bth.destination_qp, is_request }
    }
}

/// A frame in the buffer.
#[derive(Debug)]
pub(crate) struct EarlyFrame {
    pub bth: Bth,
    pub addressing: AddressHeaders,
    /// From the BTH to the pad bytes.
    pub transport: Vec<u8>,
    /// It arrived before its predecessors.
    pub is_early: bool,
}

#[derive(Debug)]
struct FlowQueue {
    /// In PSN order, equal PSNs in order of arrival.
    frames: VecDeque<EarlyFrame>,
    waiting_since: u64,
}

/// The waiting frames, by flow.
#[derive(Debug, Default)]
pub(crate) struct ReorderBuffer {
    flows: BTreeMap<FlowKey, FlowQueue>,
}

impl ReorderBuffer {
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// Whether frames of this flow wait, so that a new frame has to be ordered among them.
    pub fn contains(&self, key: FlowKey) -> bool {
        self.flows.contains_key(&key)
    }

    /// Inserts a frame in PSN order.
    pub fn insert(&mut self, key: FlowKey, frame: EarlyFrame, now: u64) {
        let flow = self.flows.entry(key).or_insert(FlowQueue { frames: VecDeque::new(), waiting_since: now });
        let position = flow.frames.iter().rposition(|other| !frame.bth.psn.is_before(other.bth.psn));
        flow.frames.insert(position.map_or(0, |position| position + 1), frame);
    }

    /// The next frame of a flow that is in sequence or has waited too long, and whether the buffer reordered it.
    /// `is_out_of_sequence` reports whether a frame is still early.
    pub fn pop_ready(
        &mut self,
        key: FlowKey,
        now: u64,
        is_out_of_sequence: impl Fn(&Bth) -> bool,
    ) -> Option<(EarlyFrame, bool)> {
        let flow = self.flows.get_mut(&key)?;
        let is_early = is_out_of_sequence(&flow.frames.front()?.bth);
        let is_expired =
            now >= flow.waiting_since + REORDER_TIMEOUT || flow.frames.len() > MAX_FRAMES_PER_FLOW;
        if is_early && !is_expired {
            return None;
        }
        let frame = flow.frames.pop_front()?;
        if is_early {
            // A frame is lost: its successors were in order.
            flow.frames.iter_mut().for_each(|frame| frame.is_early = false);
        }
        if flow.frames.is_empty() {
            self.flows.remove(&key);
        } else if !is_early {
            // The remaining frames wait for a different frame.
            flow.waiting_since = now;
        }
        let was_reordered = frame.is_early && !is_early;
        Some((frame, was_reordered))
    }

    /// A flow that has waited too long.
    pub fn expired_flow(&self, now: u64) -> Option<FlowKey> {
        self.flows.iter().find(|(_, flow)| now >= flow.waiting_since + REORDER_TIMEOUT).map(|(key, _)| *key)
    }

    /// Restarts the timeout of peers with frames in flight: the missing frames may be among them.
    pub fn restart_timeout(&mut self, now: u64, is_in_flight: impl Fn(IpAddr) -> bool) {
        for (_, flow) in self.flows.iter_mut().filter(|(key, _)| is_in_flight(key.peer)) {
            flow.waiting_since = now;
        }
    }

    #[inline]
    pub fn next_timeout(&self) -> Option<u64> {
        if self.flows.is_empty() { None } else { self.first_timeout() }
    }

    fn first_timeout(&self) -> Option<u64> {
        self.flows.values().map(|flow| flow.waiting_since + REORDER_TIMEOUT).min()
    }

    /// Drops the frames of a dead peer: those that came from its address and port.
    pub fn remove_peer(&mut self, is_peer: impl Fn(SocketAddr) -> bool) {
        self.flows.retain(|_, flow| {
            let first = flow.frames.front().map(|frame| &frame.addressing);
            !first
                .is_some_and(|addressing| is_peer(SocketAddr::new(addressing.source, addressing.source_port)))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_wire::{Opcode, PartitionKey, Psn};
    use std::cell::Cell;
    use std::net::Ipv4Addr;

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

    fn frame(psn: u32, is_early: bool) -> EarlyFrame {
        let opcode = Opcode::all().find(|opcode| opcode.to_string() == "RC WRITE_MIDDLE").unwrap();
        let bth = Bth {
            opcode,
            solicited_event: false,
            migration_request: false,
            pad: 0,
            pkey: PartitionKey::DEFAULT,
            reserved_byte: 0,
            destination_qp: Qpn::new(5),
            ack_request: false,
            reserved_bits: 0,
            psn: Psn::new(psn),
        };
        EarlyFrame { bth, addressing: AddressHeaders::between(PEER, PEER), transport: Vec::new(), is_early }
    }

    /// A receiver that accepts PSNs in sequence and holds early ones.
    #[derive(Default)]
    struct Receiver {
        reorder_buffer: ReorderBuffer,
        expected: Cell<u32>,
        delivered: Vec<u32>,
        gaps: Vec<u32>,
        reordered: u32,
    }

    impl Receiver {
        fn is_out_of_sequence(&self, psn: u32) -> bool {
            Psn::new(psn).distance(Psn::new(self.expected.get())) > 0
        }

        fn arrive(&mut self, psn: u32, now: u64) {
            let is_early = self.is_out_of_sequence(psn);
            let frame = frame(psn, is_early);
            let key = FlowKey::of(PEER, &frame.bth);
            self.reorder_buffer.insert(key, frame, now);
            self.release(key, now);
        }

        fn release(&mut self, key: FlowKey, now: u64) {
            loop {
                let expected = self.expected.get();
                let is_out_of_sequence = |bth: &Bth| bth.psn.distance(Psn::new(expected)) > 0;
                let Some((frame, was_reordered)) =
                    self.reorder_buffer.pop_ready(key, now, is_out_of_sequence)
                else {
                    break;
                };
                let psn = frame.bth.psn.value();
                if self.is_out_of_sequence(psn) {
                    self.gaps.push(psn);
                }
                self.expected.set(Psn::new(psn).plus(1).value());
                self.delivered.push(psn);
                self.reordered += u32::from(was_reordered);
            }
        }

        fn expire(&mut self, now: u64) {
            while let Some(key) = self.reorder_buffer.expired_flow(now) {
                self.release(key, now);
            }
        }
    }

    #[test]
    fn early_frames_are_delivered_in_psn_order() {
        let mut receiver = Receiver::default();
        for psn in [0, 2, 4, 3, 1, 5] {
            receiver.arrive(psn, 0);
        }
        assert_eq!(receiver.delivered, [0, 1, 2, 3, 4, 5]);
        assert_eq!((receiver.reordered, receiver.gaps.len()), (3, 0));
        assert!(receiver.reorder_buffer.is_empty());
        assert_eq!(receiver.reorder_buffer.next_timeout(), None);
    }

    #[test]
    fn order_continues_across_psn_wraparound() {
        let mut receiver = Receiver::default();
        receiver.expected.set(0xff_fffe);
        for psn in [0, 0xff_ffff, 0xff_fffe, 1] {
            receiver.arrive(psn, 0);
        }
        assert_eq!(receiver.delivered, [0xff_fffe, 0xff_ffff, 0, 1]);
    }

    #[test]
    fn missing_frame_is_lost_after_a_millisecond() {
        let mut receiver = Receiver::default();
        receiver.arrive(1, 100);
        receiver.arrive(2, 500_000);
        assert_eq!(receiver.reorder_buffer.next_timeout(), Some(100 + REORDER_TIMEOUT));
        receiver.expire(99 + REORDER_TIMEOUT);
        assert!(receiver.delivered.is_empty());
        receiver.expire(100 + REORDER_TIMEOUT);
        assert_eq!((receiver.delivered, receiver.gaps, receiver.reordered), (vec![1, 2], vec![1], 0));
        assert!(receiver.reorder_buffer.is_empty());
    }

    #[test]
    fn missing_frame_is_lost_after_64_others() {
        let mut receiver = Receiver::default();
        (1..=64).for_each(|psn| receiver.arrive(psn, 0));
        assert!(receiver.delivered.is_empty());
        receiver.arrive(65, 0);
        assert_eq!(receiver.gaps, [1]);
        assert_eq!(receiver.delivered, (1..=65).collect::<Vec<_>>());
    }

    #[test]
    fn duplicate_does_not_wait() {
        let mut receiver = Receiver::default();
        for psn in [0, 1, 3, 0, 2] {
            receiver.arrive(psn, 0);
            if psn == 0 {
                receiver.expected.set(receiver.delivered.len().min(2) as u32);
            }
        }
        assert_eq!(receiver.delivered, [0, 1, 0, 2, 3]);
    }

    #[test]
    fn frames_of_a_dead_peer_are_dropped() {
        let mut receiver = Receiver::default();
        receiver.arrive(7, 0);
        receiver.reorder_buffer.remove_peer(|source| source.ip() == PEER);
        assert!(receiver.reorder_buffer.is_empty());
    }

    #[test]
    fn timeout_restarts_while_frames_are_in_flight() {
        let mut buffer = ReorderBuffer::default();
        let early = frame(1, true);
        let key = FlowKey::of(PEER, &early.bth);
        buffer.insert(key, early, 0);
        buffer.restart_timeout(REORDER_TIMEOUT, |peer| peer == PEER);
        assert_eq!(
            (buffer.expired_flow(REORDER_TIMEOUT), buffer.next_timeout()),
            (None, Some(2 * REORDER_TIMEOUT))
        );
        buffer.restart_timeout(2 * REORDER_TIMEOUT, |_| false);
        assert_eq!(buffer.expired_flow(2 * REORDER_TIMEOUT), Some(key));
    }
}
