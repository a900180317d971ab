//! Everything that will happen, ordered by time and then by the order in which it was scheduled.

use crate::{CableId, Direction, HostId, SwitchId};
use alloc::collections::BinaryHeap;
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
    /// The earlier the greater: a heap gives the greatest first.
    #[inline]
    fn cmp(&self, other: &Entry) -> Ordering {
        (other.at, other.serial).cmp(&(self.at, self.serial))
    }
}

/// The queue of happenings.
#[derive(Default)]
pub(crate) struct Agenda {
    heap: BinaryHeap<Entry>,
    serial: u64,
}

impl Agenda {
    #[inline]
    pub fn push(&mut self, at: u64, happening: Happening) {
        self.serial += 1;
        self.heap.push(Entry { at, serial: self.serial, happening });
    }

    #[inline]
    pub fn next_at(&self) -> Option<u64> {
        self.heap.peek().map(|entry| entry.at)
    }

    #[inline]
    pub fn pop(&mut self) -> Option<(u64, Happening)> {
        self.heap.pop().map(|entry| (entry.at, entry.happening))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_earlier_happens_first_and_of_one_time_what_was_scheduled_first() {
        let mut agenda = Agenda::default();
        for (at, host) in [(5, 0), (3, 1), (5, 2), (3, 3)] {
            agenda.push(at, Happening::HostLine { host: HostId(host) });
        }
        let mut order = alloc::vec::Vec::new();
        while let Some((at, Happening::HostLine { host })) = agenda.pop() {
            order.push((at, host.0));
        }
        assert_eq!(order, [(3, 1), (3, 3), (5, 0), (5, 2)]);
    }
}
