//! Holding frames back that a host mixed up.
//!
//! A sender whose turns run on several processors, or a receive path that is spread over them, lets a frame
//! overtake another. A card would take that for a loss. So the driver keeps a frame that comes early until the
//! ones before it have come, for at most a millisecond or 64 frames; after that it is a loss. No I/O, no clock.

use softhca_wire::{Bth, Envelope, Qpn};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

/// How long a frame waits for those before it.
const LONGEST: u64 = 1_000_000;
/// How many frames of a flow wait.
const MOST: usize = 64;

/// Frames of one peer to one queue pair, requests and responses apart: what has an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FlowKey {
    pub peer: IpAddr,
    pub queue_pair: Qpn,
    pub is_request: bool,
}

impl FlowKey {
    pub fn of(peer: IpAddr, bth: &Bth) -> FlowKey {
        let is_request = bth.opcode.operation().is_request();
        FlowKey { peer, queue_pair: bth.destination, is_request }
    }
}

/// A frame that waits.
#[derive(Debug)]
pub(crate) struct Held {
    pub bth: Bth,
    pub envelope: Envelope,
    /// From the BTH to the pad bytes.
    pub transport: Vec<u8>,
    /// It came before its turn.
    pub is_early: bool,
}

#[derive(Debug)]
struct Flow {
    /// In the order of PSNs, equal ones as they came.
    frames: VecDeque<Held>,
    since: u64,
}

/// The frames that wait, by flow.
#[derive(Debug, Default)]
pub(crate) struct HoldBack {
    flows: BTreeMap<FlowKey, Flow>,
}

impl HoldBack {
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// Whether frames of this flow wait: those that come now go behind or before them.
    pub fn holds(&self, key: FlowKey) -> bool {
        self.flows.contains_key(&key)
    }

    /// Keeps a frame.
    pub fn hold(&mut self, key: FlowKey, frame: Held, now: u64) {
        let flow = self.flows.entry(key).or_insert(Flow { frames: VecDeque::new(), since: now });
        let place = flow.frames.iter().rposition(|other| !frame.bth.psn.is_before(other.bth.psn));
        flow.frames.insert(place.map_or(0, |place| place + 1), frame);
    }

    /// The next frame of a flow whose turn has come, or that has waited for too long, and whether it was put in
    /// order. `skips` tells whether a frame still comes too early.
    pub fn next(&mut self, key: FlowKey, now: u64, skips: impl Fn(&Bth) -> bool) -> Option<(Held, bool)> {
        let flow = self.flows.get_mut(&key)?;
        let too_early = skips(&flow.frames.front()?.bth);
        let too_long = now >= flow.since + LONGEST || flow.frames.len() > MOST;
        if too_early && !too_long {
            return None;
        }
        let frame = flow.frames.pop_front()?;
        if too_early {
            // A frame is missing: what came behind it was in order.
            flow.frames.iter_mut().for_each(|frame| frame.is_early = false);
        }
        if flow.frames.is_empty() {
            self.flows.remove(&key);
        } else if !too_early {
            // What waits now waits for another frame.
            flow.since = now;
        }
        let in_order = frame.is_early && !too_early;
        Some((frame, in_order))
    }

    /// The flows that have waited for too long.
    pub fn overdue(&self, now: u64) -> Option<FlowKey> {
        self.flows.iter().find(|(_, flow)| now >= flow.since + LONGEST).map(|(key, _)| *key)
    }

    /// Frames of some peers are still on their way, and those that are missing may be among them: the time starts anew.
    pub fn postpone(&mut self, now: u64, is_under_way: impl Fn(IpAddr) -> bool) {
        for (_, flow) in self.flows.iter_mut().filter(|(key, _)| is_under_way(key.peer)) {
            flow.since = now;
        }
    }

    pub fn next_timeout(&self) -> Option<u64> {
        self.flows.values().map(|flow| flow.since + LONGEST).min()
    }

    /// Forgets what waits of a peer: it is dead.
    pub fn forget(&mut self, peer: IpAddr) {
        self.flows.retain(|key, _| key.peer != peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_wire::{Opcode, PartitionKey, Psn};
    use std::cell::Cell;
    use std::net::Ipv4Addr;

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

    fn frame(psn: u32, is_early: bool) -> Held {
        let opcode = Opcode::all().find(|opcode| opcode.to_string() == "RC WRITE_MIDDLE").unwrap();
        let bth = Bth {
            opcode,
            solicited: false,
            migration: false,
            pad: 0,
            partition: PartitionKey::DEFAULT,
            reserved: 0,
            destination: Qpn::new(5),
            ack_request: false,
            reserved_psn: 0,
            psn: Psn::new(psn),
        };
        Held { bth, envelope: Envelope::between(PEER, PEER), transport: Vec::new(), is_early }
    }

    /// A receiver that takes one PSN after the other, and holds what comes before its turn.
    #[derive(Default)]
    struct Receiver {
        held: HoldBack,
        expected: Cell<u32>,
        taken: Vec<u32>,
        gaps: Vec<u32>,
        reordered: u32,
    }

    impl Receiver {
        fn skips(&self, psn: u32) -> bool {
            Psn::new(psn).distance(Psn::new(self.expected.get())) > 0
        }

        fn arrive(&mut self, psn: u32, now: u64) {
            let is_early = self.skips(psn);
            let frame = frame(psn, is_early);
            let key = FlowKey::of(PEER, &frame.bth);
            self.held.hold(key, frame, now);
            self.release(key, now);
        }

        fn release(&mut self, key: FlowKey, now: u64) {
            loop {
                let expected = self.expected.get();
                let skips = |bth: &Bth| bth.psn.distance(Psn::new(expected)) > 0;
                let Some((frame, in_order)) = self.held.next(key, now, skips) else { break };
                let psn = frame.bth.psn.value();
                if self.skips(psn) {
                    self.gaps.push(psn);
                }
                self.expected.set(Psn::new(psn).plus(1).value());
                self.taken.push(psn);
                self.reordered += u32::from(in_order);
            }
        }

        fn expire(&mut self, now: u64) {
            while let Some(key) = self.held.overdue(now) {
                self.release(key, now);
            }
        }
    }

    #[test]
    fn frames_that_overtook_others_are_put_in_order() {
        let mut receiver = Receiver::default();
        for psn in [0, 2, 4, 3, 1, 5] {
            receiver.arrive(psn, 0);
        }
        assert_eq!(receiver.taken, [0, 1, 2, 3, 4, 5]);
        assert_eq!((receiver.reordered, receiver.gaps.len()), (3, 0));
        assert!(receiver.held.is_empty());
        assert_eq!(receiver.held.next_timeout(), None);
    }

    #[test]
    fn the_order_goes_on_behind_the_largest_number() {
        let mut receiver = Receiver::default();
        receiver.expected.set(0xff_fffe);
        for psn in [0, 0xff_ffff, 0xff_fffe, 1] {
            receiver.arrive(psn, 0);
        }
        assert_eq!(receiver.taken, [0xff_fffe, 0xff_ffff, 0, 1]);
    }

    #[test]
    fn a_frame_that_does_not_come_is_missed_after_a_millisecond() {
        let mut receiver = Receiver::default();
        receiver.arrive(1, 100);
        receiver.arrive(2, 500_000);
        assert_eq!(receiver.held.next_timeout(), Some(100 + LONGEST));
        receiver.expire(99 + LONGEST);
        assert!(receiver.taken.is_empty());
        receiver.expire(100 + LONGEST);
        assert_eq!((receiver.taken, receiver.gaps, receiver.reordered), (vec![1, 2], vec![1], 0));
        assert!(receiver.held.is_empty());
    }

    #[test]
    fn a_frame_that_does_not_come_is_missed_after_64_others() {
        let mut receiver = Receiver::default();
        (1..=64).for_each(|psn| receiver.arrive(psn, 0));
        assert!(receiver.taken.is_empty());
        receiver.arrive(65, 0);
        assert_eq!(receiver.gaps, [1]);
        assert_eq!(receiver.taken, (1..=65).collect::<Vec<_>>());
    }

    #[test]
    fn a_duplicate_does_not_wait() {
        let mut receiver = Receiver::default();
        for psn in [0, 1, 3, 0, 2] {
            receiver.arrive(psn, 0);
            if psn == 0 {
                receiver.expected.set(receiver.taken.len().min(2) as u32);
            }
        }
        assert_eq!(receiver.taken, [0, 1, 0, 2, 3]);
    }

    #[test]
    fn what_a_dead_peer_left_is_forgotten() {
        let mut receiver = Receiver::default();
        receiver.arrive(7, 0);
        receiver.held.forget(PEER);
        assert!(receiver.held.is_empty());
    }

    #[test]
    fn time_does_not_run_while_more_is_on_its_way() {
        let mut held = HoldBack::default();
        let early = frame(1, true);
        let key = FlowKey::of(PEER, &early.bth);
        held.hold(key, early, 0);
        held.postpone(LONGEST, |peer| peer == PEER);
        assert_eq!((held.overdue(LONGEST), held.next_timeout()), (None, Some(2 * LONGEST)));
        held.postpone(2 * LONGEST, |_| false);
        assert_eq!(held.overdue(2 * LONGEST), Some(key));
    }
}
