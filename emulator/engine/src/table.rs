//! A table of numbered resources. The lower bits of a number find the slot, a tag detects stale numbers.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Numbers have 24 bits: 16 bits of slot index and an 8-bit tag that changes when a slot is reused. Slots are reused
/// oldest first, so that a stale number stays invalid as long as possible.
pub(crate) struct Table<T> {
    slots: Vec<Slot<T>>,
    free: VecDeque<u16>,
    limit: usize,
    live: usize,
    /// Numbers below are never given out.
    reserved: u16,
    /// The exclusive or of a slot index and the lower 16 bits of its number: who does not know it cannot tell which
    /// numbers are in use.
    mask: u16,
}

struct Slot<T> {
    tag: u8,
    value: Option<T>,
}

impl<T> Table<T> {
    /// Creates a table of at most `limit` entries with numbers from `reserved` on.
    pub fn new(limit: usize, reserved: u16) -> Table<T> {
        let slots = (0..reserved).map(|_| Slot { tag: 0, value: None }).collect();
        let limit = limit.min(usize::from(u16::MAX - reserved));
        Table { slots, free: VecDeque::new(), limit, live: 0, reserved, mask: 0 }
    }

    /// The same table, with numbers that start at an unpredictable one.
    pub fn with_mask(self, mask: u16) -> Table<T> {
        Table { mask, ..self }
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
                self.slots.push(Slot { tag, value: None });
                (self.slots.len() - 1) as u16
            }
        };
        let slot = &mut self.slots[usize::from(index)];
        // The multicast QPN is all ones, so that a tag must not be.
        slot.tag &= 0x7f;
        let low = index ^ self.mask;
        if slot.tag == 0 && low < self.reserved {
            slot.tag = 1;
        }
        let number = u32::from(slot.tag) << 16 | u32::from(low);
        slot.value = Some(make(number));
        self.live += 1;
        Some(number)
    }

    /// Adds an entry with a given number, if that is free. If it is the first, all numbers follow without a mask.
    pub fn insert_at(&mut self, number: u32, make: impl FnOnce(u32) -> T) -> Option<u32> {
        if self.slots.len() == usize::from(self.reserved) {
            self.mask = 0;
        }
        let (index, tag) = (number as u16 ^ self.mask, (number >> 16) as u8);
        if usize::from(index) >= self.slots.len() {
            let fresh = self.slots.len() as u16..index;
            self.free.extend(fresh);
            self.slots.resize_with(usize::from(index) + 1, || Slot { tag: 0, value: None });
        } else {
            self.free.retain(|free| *free != index);
        }
        let slot = &mut self.slots[usize::from(index)];
        if slot.value.is_some() {
            return None;
        }
        slot.tag = tag;
        slot.value = Some(make(number));
        self.live += 1;
        Some(number)
    }

    #[inline]
    fn slot(&self, number: u32) -> Option<&Slot<T>> {
        let index = number as u16 ^ self.mask;
        self.slots.get(usize::from(index)).filter(|slot| u32::from(slot.tag) == number >> 16)
    }

    #[inline]
    pub fn get(&self, number: u32) -> Option<&T> {
        self.slot(number)?.value.as_ref()
    }

    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let slot = self.slots.get_mut(usize::from(number as u16 ^ self.mask))?;
        if u32::from(slot.tag) == number >> 16 { slot.value.as_mut() } else { None }
    }

    pub fn remove(&mut self, number: u32) -> Option<T> {
        let index = number as u16 ^ self.mask;
        let slot = self.slots.get_mut(usize::from(index)).filter(|s| u32::from(s.tag) == number >> 16)?;
        let value = slot.value.take()?;
        slot.tag = slot.tag.wrapping_add(1);
        self.free.push_back(index);
        self.live -= 1;
        Some(value)
    }

    /// All entries with their numbers, in slot order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            Some((u32::from(slot.tag) << 16 | u32::from(index as u16 ^ self.mask), slot.value.as_ref()?))
        })
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
    fn a_reused_slot_has_a_new_number_and_the_old_number_is_invalid() {
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
        for mask in [0, 1, 2, 3, 0x8000, 0xabcd, 0xffff] {
            let mut table = Table::new(1000, 2).with_mask(mask);
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
