//! Everything that will happen, ordered by time and then by the order in which it was scheduled.

use crate::{CableId, Direction, HostId, SwitchId};
use alloc::collections::BinaryHeap;
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Ordering;

/// Something that will happen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Happening {
    /// A frame comes out of a cable.
    Arrival { slot: u32, cable: CableId, direction: Direction },
    /// The line of a host is free.
    HostLine { host: HostId },
    /// A timer of a card may have run out.
    HostTimer { host: HostId },
    /// A cable held frames back for long enough.
    Held { cable: CableId },
    /// The oldest frame that a host sent to itself comes back.
    Looped,
    /// The line of a switch's port is free.
    PortLine { switch: SwitchId, port: u16 },
    /// A pause of a switch's port may be over.
    PauseOver { switch: SwitchId, port: u16 },
    /// A pause of a host may be over.
    HostPauseOver { host: HostId },
    /// A pause that a switch asked for is to be asked for again.
    Refresh { switch: SwitchId, port: u16, priority: u8 },
    /// A pause that a host asked for is to be asked for again.
    HostRefresh { host: HostId, priority: u8 },
    /// A queue may have stood still for too long, or its guard may be lifted.
    Watch { switch: SwitchId, port: u16, priority: u8 },
    /// A host may have asked for pauses for too long.
    HostWatch { host: HostId, priority: u8 },
    /// A slow receiver has done with a frame.
    Drain { host: HostId },
}

#[derive(Clone, Copy)]
struct Entry {
    at: u64,
    serial: u64,
    happening: Happening,
}

impl Entry {
    const fn tick(&self) -> u64 {
        self.at >> TICK
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        (self.at, self.serial) == (other.at, other.serial)
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    /// The earlier the greater: a heap gives the greatest first, a sorted list has it last.
    #[inline]
    fn cmp(&self, other: &Entry) -> Ordering {
        (other.at, other.serial).cmp(&(self.at, self.serial))
    }
}

/// A tick is so many nanoseconds, as a power of two.
const TICK: u32 = 4;
/// Ticks that the wheel has room for, a multiple of 64: 16 µs.
const WHEEL: usize = 1024;

/// The end of a bucket.
const NONE: u32 = u32::MAX;

/// The queue of happenings: a wheel with a bucket for each tick of the near future, and a heap for the rest.
///
/// Almost everything happens within microseconds. It goes into a bucket unsorted; only the bucket whose turn it is
/// is sorted.
pub(crate) struct Agenda {
    /// What happens in the current tick, the earliest last, and what was scheduled for it since it began.
    current: Vec<Entry>,
    late: BinaryHeap<Entry>,
    tick: u64,
    /// The first entry of each bucket, the others behind it.
    buckets: Vec<u32>,
    /// The entries of all buckets, each with the next of its bucket, and the places that are free.
    entries: Vec<(Entry, u32)>,
    free: Vec<u32>,
    /// A bit for each bucket that holds something.
    occupied: [u64; WHEEL / 64],
    /// What happens beyond the wheel.
    far: BinaryHeap<Entry>,
    serial: u64,
}

impl Default for Agenda {
    fn default() -> Agenda {
        Agenda {
            current: Vec::new(),
            late: BinaryHeap::new(),
            tick: 0,
            buckets: vec![NONE; WHEEL],
            entries: Vec::new(),
            free: Vec::new(),
            occupied: [0; WHEEL / 64],
            far: BinaryHeap::new(),
            serial: 0,
        }
    }
}

impl Agenda {
    #[inline]
    pub fn push(&mut self, at: u64, happening: Happening) {
        self.serial += 1;
        self.place(Entry { at, serial: self.serial, happening });
    }

    #[inline]
    fn place(&mut self, entry: Entry) {
        let tick = entry.tick();
        if tick <= self.tick {
            self.late.push(entry);
        } else if tick - self.tick < WHEEL as u64 {
            let index = tick as usize % WHEEL;
            let filed = (entry, self.buckets[index]);
            self.buckets[index] = match self.free.pop() {
                Some(place) => {
                    self.entries[place as usize] = filed;
                    place
                }
                None => {
                    self.entries.push(filed);
                    self.entries.len() as u32 - 1
                }
            };
            self.occupied[index / 64] |= 1 << (index % 64);
        } else {
            self.far.push(entry);
        }
    }

    /// The tick of the next bucket that holds something.
    fn next_bucket(&self) -> Option<u64> {
        let start = (self.tick as usize + 1) % WHEEL;
        let words = WHEEL / 64;
        for step in 0..=words {
            let word = (start / 64 + step) % words;
            let mut bits = self.occupied[word];
            // The first word is looked at from the start on, and once more at the end up to it.
            if step == 0 {
                bits &= u64::MAX << (start % 64);
            } else if step == words {
                bits &= !(u64::MAX << (start % 64));
            }
            if bits != 0 {
                let index = word * 64 + bits.trailing_zeros() as usize;
                let ahead = (index + WHEEL - start) % WHEEL;
                return Some(self.tick + 1 + ahead as u64);
            }
        }
        None
    }

    /// Goes to the next tick in which something happens. False if there is none.
    fn turn(&mut self) -> bool {
        let far = self.far.peek().map(Entry::tick);
        let Some(tick) = self.next_bucket().into_iter().chain(far).min() else { return false };
        self.tick = tick;
        let index = tick as usize % WHEEL;
        let mut place = core::mem::replace(&mut self.buckets[index], NONE);
        while place != NONE {
            let (entry, next) = self.entries[place as usize];
            self.current.push(entry);
            self.free.push(place);
            place = next;
        }
        self.occupied[index / 64] &= !(1 << (index % 64));
        // Serials tell equal times apart: the order of a sort that is not stable is the same.
        self.current.sort_unstable();
        while self.far.peek().is_some_and(|entry| entry.tick() - tick < WHEEL as u64) {
            if let Some(entry) = self.far.pop() {
                self.place(entry);
            }
        }
        true
    }

    /// When the next thing happens.
    pub fn next_at(&self) -> Option<u64> {
        if let Some(entry) = self.current.last().max(self.late.peek()) {
            return Some(entry.at);
        }
        let mut place = self.next_bucket().map_or(NONE, |tick| self.buckets[tick as usize % WHEEL]);
        let mut near = None;
        while place != NONE {
            let (entry, next) = &self.entries[place as usize];
            near = Some(near.map_or(entry.at, |at: u64| at.min(entry.at)));
            place = *next;
        }
        near.into_iter().chain(self.far.peek().map(|entry| entry.at)).min()
    }

    /// The next thing, if it happens by then.
    #[inline]
    pub fn pop_until(&mut self, until: u64) -> Option<(u64, Happening)> {
        if self.current.is_empty() && self.late.is_empty() && !self.turn() {
            return None;
        }
        let late = self.late.peek();
        let entry = match self.current.last() {
            Some(planned) if late.is_none_or(|late| planned > late) => {
                self.current.pop_if(|entry| entry.at <= until)
            }
            _ if late.is_some_and(|late| late.at <= until) => self.late.pop(),
            _ => None,
        };
        entry.map(|entry| (entry.at, entry.happening))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn host(happening: Happening) -> u32 {
        match happening {
            Happening::HostLine { host } => host.0,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_earlier_happens_first_and_of_one_time_what_was_scheduled_first() {
        let mut agenda = Agenda::default();
        for (at, host) in [(5, 0), (3, 1), (5, 2), (3, 3), (9_000_000, 4), (17_000, 5)] {
            agenda.push(at, Happening::HostLine { host: HostId(host) });
        }
        assert!(agenda.pop_until(2).is_none());
        let mut order = vec![];
        while let Some((at, happening)) = agenda.pop_until(u64::MAX) {
            order.push((at, host(happening)));
        }
        assert_eq!(order, [(3, 1), (3, 3), (5, 0), (5, 2), (17_000, 5), (9_000_000, 4)]);
    }

    proptest! {
        /// The same order as that of one sorted list, whatever is scheduled meanwhile.
        #[test]
        fn the_wheel_keeps_the_order_of_a_list(
            steps in prop::collection::vec((0u64..200_000, any::<bool>()), 1..300),
        ) {
            let (mut agenda, mut list) = (Agenda::default(), vec![]);
            let mut now = 0;
            for (serial, (ahead, pops)) in steps.into_iter().enumerate() {
                let ahead = if ahead % 3 == 0 { ahead } else { ahead % 2_000 };
                agenda.push(now + ahead, Happening::HostLine { host: HostId(serial as u32) });
                list.push((now + ahead, serial as u32));
                if pops {
                    list.sort();
                    let expected = list.remove(0);
                    prop_assert_eq!(agenda.next_at(), Some(expected.0));
                    let (at, happening) = agenda.pop_until(u64::MAX).expect("something was scheduled");
                    prop_assert_eq!((at, host(happening)), expected);
                    now = at;
                }
            }
            list.sort();
            for expected in list {
                let (at, happening) = agenda.pop_until(u64::MAX).expect("something is left");
                prop_assert_eq!((at, host(happening)), expected);
            }
            prop_assert!(agenda.pop_until(u64::MAX).is_none());
        }
    }
}
