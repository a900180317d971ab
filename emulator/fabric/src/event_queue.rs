//! The event queue: ordered by time, then by the order of scheduling.

use crate::frame_pool::{FramePool, NO_SLOT};
use crate::sim_event::SimEvent;
use alloc::collections::BinaryHeap;
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Ordering;

/// A heap entry for a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry {
    at: u64,
    serial: u64,
    slot: u32,
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    /// Reversed order: `BinaryHeap` pops the greatest entry first.
    #[inline]
    fn cmp(&self, other: &Entry) -> Ordering {
        (other.at, other.serial).cmp(&(self.at, self.serial))
    }
}

/// 64-bit words in the occupancy bitmap of the wheel; `occupied_words` has a bit for each.
const WHEEL_WORDS: usize = 128;
/// Nanoseconds that the wheel covers. A 4 KiB frame on a 100 Gb/s link with 1 µs delay arrives after 1.4 µs. The next
/// frame of a queue pair at a sixteenth of that rate follows after 5.4 µs.
const WHEEL_SIZE: usize = 64 * WHEEL_WORDS;

/// The event queue: a timing wheel with one bucket per nanosecond for the near future, and a heap for later
/// events.
///
/// Almost all events are due within microseconds, and events of one nanosecond run in the order of
/// scheduling, so nothing is sorted. An event that moves from the heap to a bucket was scheduled before any
/// event added to that bucket directly, and precedes it.
pub(crate) struct EventQueue {
    /// The first remaining slot of the current bucket.
    current: u32,
    /// Events scheduled for the current nanosecond after it began, or for an earlier one.
    late: BinaryHeap<Entry>,
    /// The current nanosecond.
    tick: u64,
    /// The first and the last slot of each bucket; slots link to the next.
    buckets: Vec<(u32, u32)>,
    pub pool: FramePool,
    /// A bit for each non-empty bucket, and a bit for each non-zero word.
    occupied: [u64; WHEEL_WORDS],
    occupied_words: u128,
    /// Events beyond the wheel.
    overflow: BinaryHeap<Entry>,
    serial: u64,
}

impl Default for EventQueue {
    fn default() -> EventQueue {
        EventQueue {
            current: NO_SLOT,
            late: BinaryHeap::new(),
            tick: 0,
            buckets: vec![(NO_SLOT, NO_SLOT); WHEEL_SIZE],
            pool: FramePool::default(),
            occupied: [0; WHEEL_WORDS],
            occupied_words: 0,
            overflow: BinaryHeap::new(),
            serial: 0,
        }
    }
}

impl EventQueue {
    /// Schedules an event. An arriving frame keeps its slot.
    #[inline]
    pub fn push(&mut self, at: u64, event: SimEvent) {
        self.serial += 1;
        let slot = match event {
            SimEvent::Arrival { slot, .. } => slot,
            _ => self.pool.reserve(),
        };
        let this = self.pool.slot_mut(slot);
        (this.serial, this.event, this.next) = (self.serial, event, NO_SLOT);
        if at > self.tick && at - self.tick < WHEEL_SIZE as u64 {
            return self.append(at, slot);
        }
        let entry = Entry { at, serial: self.serial, slot };
        match at <= self.tick {
            true => self.late.push(entry),
            false => self.overflow.push(entry),
        }
    }

    /// Appends a slot to its bucket.
    #[inline]
    fn append(&mut self, at: u64, slot: u32) {
        let index = at as usize % WHEEL_SIZE;
        let (first, last) = &mut self.buckets[index];
        if *first == NO_SLOT {
            *first = slot;
            self.occupied[index / 64] |= 1 << (index % 64);
            self.occupied_words |= 1 << (index / 64);
        } else {
            self.pool.slot_mut(*last).next = slot;
        }
        *last = slot;
    }

    /// The time of the next non-empty bucket.
    #[inline]
    fn next_bucket(&self) -> Option<u64> {
        let start = (self.tick as usize + 1) % WHEEL_SIZE;
        let (word, bit) = (start / 64, start % 64);
        // Checks the first word from `bit` on, and its lower bits last.
        let bits = self.occupied[word] & u64::MAX << bit;
        let index = if bits != 0 {
            word * 64 + bits.trailing_zeros() as usize
        } else {
            let turned = self.occupied_words.rotate_right(word as u32 + 1);
            if turned == 0 {
                return None;
            }
            let word = (word + 1 + turned.trailing_zeros() as usize) % WHEEL_WORDS;
            word * 64 + self.occupied[word].trailing_zeros() as usize
        };
        Some(self.tick + 1 + ((index + WHEEL_SIZE - start) % WHEEL_SIZE) as u64)
    }

    /// Advances to the next nanosecond with an event. Returns false if none is due by `until`.
    fn advance(&mut self, until: u64) -> bool {
        let far = self.overflow.peek().map(|entry| entry.at);
        let tick = match (self.next_bucket(), far) {
            (Some(near), Some(far)) => near.min(far),
            (near, far) => match near.or(far) {
                Some(tick) => tick,
                None => return false,
            },
        };
        if tick > until {
            return false;
        }
        self.tick = tick;
        let index = tick as usize % WHEEL_SIZE;
        self.current = core::mem::replace(&mut self.buckets[index], (NO_SLOT, NO_SLOT)).0;
        self.occupied[index / 64] &= !(1 << (index % 64));
        if self.occupied[index / 64] == 0 {
            self.occupied_words &= !(1 << (index / 64));
        }
        if far.is_some_and(|far| far - tick < WHEEL_SIZE as u64) {
            self.refill_wheel();
        }
        true
    }

    /// Moves events that are now within the wheel from the heap to buckets.
    fn refill_wheel(&mut self) {
        while self.overflow.peek().is_some_and(|entry| entry.at - self.tick < WHEEL_SIZE as u64) {
            let Some(entry) = self.overflow.pop() else { return };
            match entry.at > self.tick {
                true => self.append(entry.at, entry.slot),
                false => self.late.push(entry),
            }
        }
    }

    /// The next slot of the current bucket.
    #[inline]
    pub fn next_slot(&self) -> Option<u32> {
        Some(self.current).filter(|slot| *slot != NO_SLOT)
    }

    /// The time of the next event.
    pub fn next_at(&self) -> Option<u64> {
        let current = (self.current != NO_SLOT).then_some(self.tick);
        let late = self.late.peek().map(|entry| entry.at);
        let now = current.into_iter().chain(late).min();
        now.or_else(|| self.next_bucket().into_iter().chain(self.overflow.peek().map(|entry| entry.at)).min())
    }

    /// Removes the next event, if it is due by `until`.
    #[inline]
    pub fn pop_until(&mut self, until: u64) -> Option<(u64, SimEvent)> {
        if self.current == NO_SLOT && self.late.is_empty() && !self.advance(until) {
            return None;
        }
        if let Some(late) = self.late.peek()
            && (self.current == NO_SLOT
                || (late.at, late.serial) < (self.tick, self.pool.slot_mut(self.current).serial))
        {
            if late.at > until {
                return None;
            }
            let Entry { at, slot, .. } = self.late.pop()?;
            return Some((at, self.take_event(slot)));
        }
        if self.tick > until {
            return None;
        }
        let slot = self.current;
        self.current = self.pool.slot_mut(slot).next;
        Some((self.tick, self.take_event(slot)))
    }

    /// Takes the event out of a slot. Frees the slot unless it holds a frame.
    #[inline]
    fn take_event(&mut self, slot: u32) -> SimEvent {
        let event = self.pool.slot_mut(slot).event;
        if !matches!(event, SimEvent::Arrival { .. }) {
            self.pool.free(slot);
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostId;
    use alloc::vec;
    use proptest::prelude::*;

    fn host(event: SimEvent) -> u32 {
        match event {
            SimEvent::HostLinkFree { host } => host.0,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn events_run_by_time_then_by_order_of_scheduling() {
        let mut event_queue = EventQueue::default();
        for (at, host) in [(5, 0), (3, 1), (5, 2), (3, 3), (9_000_000, 4), (17_000, 5)] {
            event_queue.push(at, SimEvent::HostLinkFree { host: HostId(host) });
        }
        assert!(event_queue.pop_until(2).is_none());
        let mut order = vec![];
        while let Some((at, event)) = event_queue.pop_until(u64::MAX) {
            order.push((at, host(event)));
        }
        assert_eq!(order, [(3, 1), (3, 3), (5, 0), (5, 2), (17_000, 5), (9_000_000, 4)]);
    }

    proptest! {
        /// The wheel returns events in the same order as a sorted list.
        #[test]
        fn wheel_returns_events_in_the_order_of_a_sorted_list(
            steps in prop::collection::vec((0u64..200_000, any::<bool>()), 1..300),
        ) {
            let (mut event_queue, mut list) = (EventQueue::default(), vec![]);
            let mut now = 0;
            for (serial, (ahead, pops)) in steps.into_iter().enumerate() {
                let ahead = if ahead % 3 == 0 { ahead } else { ahead % 2_000 };
                event_queue.push(now + ahead, SimEvent::HostLinkFree { host: HostId(serial as u32) });
                list.push((now + ahead, serial as u32));
                if pops {
                    list.sort();
                    let expected = list.remove(0);
                    prop_assert_eq!(event_queue.next_at(), Some(expected.0));
                    let (at, event) = event_queue.pop_until(u64::MAX).expect("something was scheduled");
                    prop_assert_eq!((at, host(event)), expected);
                    now = at;
                }
            }
            list.sort();
            for expected in list {
                let (at, event) = event_queue.pop_until(u64::MAX).expect("something is left");
                prop_assert_eq!((at, host(event)), expected);
            }
            prop_assert!(event_queue.pop_until(u64::MAX).is_none());
        }
    }
}
