//! A table of numbered resources, which detects stale numbers.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use softhca_wire::QpnSlot;

/// Entries are reused oldest first, so that a stale number stays invalid as long as possible.
pub(crate) struct Table<T> {
    entries: Vec<Entry<T>>,
    free: VecDeque<u16>,
    limit: usize,
    live: usize,
    /// Numbers below are never given out.
    reserved: u16,
    numbering: Numbering,
}

/// How numbers, of 24 bits, are given out and found.
enum Numbering {
    /// 16 bits of index and an 8-bit tag that changes when an entry is reused. The mask is the exclusive or of an index
    /// and the lower 16 bits of its number: without it, the numbers in use cannot be guessed.
    Tagged { mask: u16 },
    /// The numbers of a slot in turn, so that each is used again as late as possible.
    Cyclic {
        /// The first number of the slot.
        base: u32,
        /// The number that was given out last, less `base`.
        last: u32,
        /// The entry of each number, or [`UNUSED`].
        indices: Vec<u16>,
    },
}

/// A reserved entry, which has no value. Zero, so that pages of a table that are never used take no memory.
const UNUSED: u16 = 0;
/// Allocators map this many zeroed numbers, and do not write them.
const MAPPED_NUMBERS: usize = 128 << 10;

struct Entry<T> {
    /// The number of the value, or the next tag in its upper bits.
    number: u32,
    value: Option<T>,
}

impl<T> Table<T> {
    /// Creates a table of at most `limit` entries with numbers from `reserved` on.
    pub fn new(limit: u32, reserved: u16) -> Table<T> {
        let entries = (0..reserved).map(|_| Entry { number: 0, value: None }).collect();
        let limit = limit.min(u32::from(u16::MAX - reserved)) as usize;
        let numbering = Numbering::Tagged { mask: 0 };
        Table { entries, free: VecDeque::new(), limit, live: 0, reserved, numbering }
    }

    /// Gives this table the numbers of a slot. It must have a reserved entry.
    pub fn with_slot(self, slot: QpnSlot) -> Table<T> {
        debug_assert!(self.reserved > UNUSED);
        let size = 1 << (24 - slot.bits);
        let mut indices = vec![UNUSED; MAPPED_NUMBERS.max(size as usize)];
        indices.truncate(size as usize);
        let numbering = Numbering::Cyclic { base: u32::from(slot.number) * size, last: 0, indices };
        Table { numbering, limit: self.limit.min(size as usize - usize::from(self.reserved)), ..self }
    }

    /// The first number follows from `start`, which should be unpredictable. The table has no entries yet.
    pub fn start_at(&mut self, start: u64) {
        match &mut self.numbering {
            Numbering::Tagged { mask } => *mask = start as u16,
            Numbering::Cyclic { last, indices, .. } => *last = start as u32 % indices.len() as u32,
        }
    }

    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether the table has room for another entry.
    pub fn has_room(&self) -> bool {
        self.live < self.limit
    }

    /// Adds the entry that `make` builds for its number, if the table has room. `tag` comes from the seed.
    pub fn insert(&mut self, tag: u8, make: impl FnOnce(u32) -> T) -> Option<u32> {
        if !self.has_room() {
            return None;
        }
        let index = match self.free.pop_front() {
            Some(index) => index,
            None => {
                self.entries.push(Entry { number: u32::from(tag) << 16, value: None });
                (self.entries.len() - 1) as u16
            }
        };
        let entry = &mut self.entries[usize::from(index)];
        entry.number = match &mut self.numbering {
            Numbering::Tagged { mask } => {
                // The multicast QPN is all ones, so that a tag must not be.
                let (mut tag, low) = (entry.number >> 16 & 0x7f, index ^ *mask);
                if tag == 0 && low < self.reserved {
                    tag = 1;
                }
                tag << 16 | u32::from(low)
            }
            Numbering::Cyclic { base, last, indices } => {
                let size = indices.len() as u32;
                let mut next = (*last + 1) % size;
                while *base + next < self.reserved.into() || indices[next as usize] != UNUSED {
                    next = (next + 1) % size;
                }
                *last = next;
                indices[next as usize] = index;
                *base + next
            }
        };
        entry.value = Some(make(entry.number));
        self.live += 1;
        Some(entry.number)
    }

    /// Adds an entry with a given number, if that is free. If it is the first, all numbers follow without a mask. A
    /// table with the numbers of a slot does not support it.
    pub fn insert_at(&mut self, number: u32, make: impl FnOnce(u32) -> T) -> Option<u32> {
        let Numbering::Tagged { mask } = &mut self.numbering else { return None };
        if self.entries.len() == usize::from(self.reserved) {
            *mask = 0;
        }
        let index = number as u16 ^ *mask;
        if usize::from(index) >= self.entries.len() {
            let fresh = self.entries.len() as u16..index;
            self.free.extend(fresh);
            self.entries.resize_with(usize::from(index) + 1, || Entry { number: 0, value: None });
        } else {
            self.free.retain(|free| *free != index);
        }
        let entry = &mut self.entries[usize::from(index)];
        if entry.value.is_some() {
            return None;
        }
        entry.number = number;
        entry.value = Some(make(number));
        self.live += 1;
        Some(number)
    }

    /// The index of the entry that may have this number.
    #[inline]
    fn index(&self, number: u32) -> usize {
        match &self.numbering {
            Numbering::Tagged { mask } => usize::from(number as u16 ^ mask),
            Numbering::Cyclic { base, indices, .. } => {
                let number = number.wrapping_sub(*base) as usize;
                indices.get(number).copied().unwrap_or(UNUSED).into()
            }
        }
    }

    #[inline]
    pub fn get(&self, number: u32) -> Option<&T> {
        let entry = self.entries.get(self.index(number))?;
        if entry.number == number { entry.value.as_ref() } else { None }
    }

    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let index = self.index(number);
        let entry = self.entries.get_mut(index)?;
        if entry.number == number { entry.value.as_mut() } else { None }
    }

    pub fn remove(&mut self, number: u32) -> Option<T> {
        let index = self.index(number);
        let entry = self.entries.get_mut(index).filter(|entry| entry.number == number)?;
        let value = entry.value.take()?;
        match &mut self.numbering {
            Numbering::Tagged { .. } => entry.number = entry.number.wrapping_add(1 << 16) & 0xff_ffff,
            Numbering::Cyclic { base, indices, .. } => indices[(number - *base) as usize] = UNUSED,
        }
        self.free.push_back(index as u16);
        self.live -= 1;
        Some(value)
    }

    /// All entries with their numbers, in the order of entries.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.entries.iter().filter_map(|entry| Some((entry.number, entry.value.as_ref()?)))
    }

    /// The numbers of the entries that match `wanted`.
    pub fn numbers(&self, mut wanted: impl FnMut(&T) -> bool) -> Vec<u32> {
        self.iter().filter(|(_, value)| wanted(value)).map(|(number, _)| number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_entry_has_a_new_number_and_the_old_number_is_invalid() {
        let mut table = Table::new(2, 2);
        let a = table.insert(5, |number| number).unwrap();
        assert_eq!(table.get(a), Some(&a));
        table.remove(a).unwrap();
        let b = table.insert(9, |number| number).unwrap();
        assert_ne!(a, b);
        assert_eq!(a as u16, b as u16);
        assert_eq!(table.get(a), None);
        assert_eq!(table.remove(a), None);
        assert_eq!(table.get_mut(b), Some(&mut b.clone()));
        table.insert(0, |_| 0).unwrap();
        assert_eq!(table.insert(0, |_| 0), None);
    }

    #[test]
    fn masked_numbers_are_found_again_and_never_reserved() {
        for mask in [0u16, 1, 2, 3, 0x8000, 0xabcd, 0xffff] {
            let mut table = Table::new(1000, 2);
            table.start_at(u64::from(mask));
            let numbers: Vec<u32> = (0..1000).map(|_| table.insert(0, |number| number).unwrap()).collect();
            assert_eq!(numbers[0] as u16, 2 ^ mask, "the first number is as unpredictable as the mask");
            assert!(numbers.iter().all(|number| *number >= 2 && table.get(*number) == Some(number)));
            assert!(table.iter().all(|(number, value)| number == *value));
            assert_eq!(table.get(numbers[7] ^ 0x1_0000), None);
            for number in numbers {
                assert_eq!(table.remove(number), Some(number));
            }
            assert_eq!((table.len(), table.iter().count()), (0, 0));
        }
    }

    #[test]
    fn the_numbers_of_a_slot_are_used_in_turn_and_wrap() {
        for number in [0, 1, 300] {
            let slot = QpnSlot { number, bits: QpnSlot::BITS };
            let mut table = Table::new(40_000, 2).with_slot(slot);
            table.start_at(0x7ffd);
            let kept = table.insert(0, |number| number).unwrap();
            assert_eq!(kept, u32::from(number) << 15 | 0x7ffe);
            let mut seen = Vec::new();
            for _ in 0..40_000 {
                let next = table.insert(0, |number| number).unwrap();
                assert!(next >= 2 && slot.contains(softhca_wire::Qpn::new(next)) && next != kept);
                assert_eq!(table.get(next), Some(&next));
                assert_eq!(table.remove(next), Some(next));
                assert!(table.get(next).is_none() && table.remove(next).is_none());
                seen.push(next);
            }
            let size = seen.iter().skip(1).position(|next| *next == seen[0]).unwrap() + 1;
            assert_eq!(size, if number == 0 { 32_765 } else { 32_767 }, "every other number comes first");
            assert_eq!(table.get(kept), Some(&kept));
            while table.insert(0, |number| number).is_some() {}
            assert_eq!(table.len(), 32_766);
            assert_eq!(table.get(kept ^ 0x10_0000), None);
        }
    }

    #[test]
    fn a_given_number_can_be_inserted_once() {
        let mut table = Table::new(100, 2);
        assert_eq!(table.insert_at(0x11_0005, |_| 'a'), Some(0x11_0005));
        assert_eq!(table.insert_at(0x11_0005, |_| 'b'), None);
        assert_eq!(table.get(0x11_0005), Some(&'a'));
        for _ in 0..10 {
            let number = table.insert(0, |_| 'c').unwrap();
            assert_ne!(number as u16, 5);
        }
    }
}
