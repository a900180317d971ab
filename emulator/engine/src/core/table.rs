//! A table of numbered resources, which detects stale numbers.

use crate::core::random::next_random;
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
    /// 16 bits that encode the index, and an 8-bit tag that changes when an entry is reused.
    Tagged { code: IndexCode },
    /// All numbers of a slot in a secret order, so that each is used again as late as possible.
    Shuffled {
        /// The first number of the slot.
        base: u32,
        /// Which number of the order was given out last.
        last: u32,
        order: SecretOrder,
        /// The entry of each number, or [`UNUSED`].
        indices: Vec<u16>,
    },
}

/// A one-to-one mapping of indices to the lower 16 bits of numbers: without it, the numbers in use can be computed.
struct IndexCode {
    mask: u16,
    /// Odd, with their inverses.
    factors: [u16; 2],
    inverses: [u16; 2],
    /// 8 if numbers are secret, else 16: then only the mask has an effect.
    shift: u32,
}

impl Default for IndexCode {
    fn default() -> IndexCode {
        IndexCode { mask: 0, factors: [1; 2], inverses: [1; 2], shift: 16 }
    }
}

impl IndexCode {
    fn from_secret(secret: u64) -> IndexCode {
        let [mask, factors @ .., _] = [0, 16, 32, 48].map(|shift| (secret >> shift) as u16);
        let factors = factors.map(|factor| factor | 1);
        // Newton's method: each step doubles the correct bits, of which there are three at first.
        let invert = |factor: u16| {
            (0..3).fold(factor, |inverse: u16, _| {
                inverse.wrapping_mul(2u16.wrapping_sub(factor.wrapping_mul(inverse)))
            })
        };
        IndexCode { mask, factors, inverses: factors.map(invert), shift: 8 }
    }

    /// Its own inverse.
    #[inline]
    fn fold(&self, value: u16) -> u16 {
        value ^ (u32::from(value) >> self.shift) as u16
    }

    fn encode(&self, index: u16) -> u16 {
        self.fold((index ^ self.mask).wrapping_mul(self.factors[0])).wrapping_mul(self.factors[1])
    }

    #[inline]
    fn decode(&self, number: u16) -> u16 {
        self.fold(number.wrapping_mul(self.inverses[1])).wrapping_mul(self.inverses[0]) ^ self.mask
    }
}

/// A secret order of the numbers below a power of two of at most 2^24: a Feistel network.
struct SecretOrder {
    keys: [u64; 4],
    /// The bits of each half. If the size has an odd number of bits, the network has one more.
    half_bits: u32,
    size: u32,
}

impl SecretOrder {
    fn new(mut secret: u64, size: u32) -> SecretOrder {
        let half_bits = size.trailing_zeros().div_ceil(2);
        SecretOrder { keys: [(); 4].map(|()| next_random(&mut secret)), half_bits, size }
    }

    /// The number at a position.
    fn number(&self, position: u32) -> u32 {
        let mask = (1 << self.half_bits) - 1;
        let mut value = position;
        loop {
            let (mut left, mut right) = (value >> self.half_bits, value & mask);
            for key in self.keys {
                (left, right) = (right, left ^ next_random(&mut (key ^ u64::from(right))) as u32 & mask);
            }
            value = left << self.half_bits | right;
            // A number outside of the order follows another one, until one inside does.
            if value < self.size {
                return value;
            }
        }
    }
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
        let numbering = Numbering::Tagged { code: IndexCode::default() };
        Table { entries, free: VecDeque::new(), limit, live: 0, reserved, numbering }
    }

    /// Gives this table the numbers of a slot. It must have a reserved entry.
    pub fn with_slot(self, slot: QpnSlot) -> Table<T> {
        debug_assert!(self.reserved > UNUSED);
        let size = 1 << (24 - slot.bits);
        let mut indices = vec![UNUSED; MAPPED_NUMBERS.max(size as usize)];
        indices.truncate(size as usize);
        let numbering = Numbering::Shuffled {
            base: u32::from(slot.number) * size,
            last: 0,
            order: SecretOrder::new(0, size),
            indices,
        };
        Table { numbering, limit: self.limit.min(size as usize - usize::from(self.reserved)), ..self }
    }

    /// The numbers follow from a seed, for runs that can be repeated. The table has no entries yet.
    pub fn set_seed(&mut self, seed: u64) {
        match &mut self.numbering {
            Numbering::Tagged { code } => *code = IndexCode { mask: seed as u16, ..IndexCode::default() },
            Numbering::Shuffled { order, indices, .. } => {
                *order = SecretOrder::new(seed, indices.len() as u32)
            }
        }
    }

    /// The numbers follow from a secret, and not from each other. The table has no entries yet.
    pub fn set_secret(&mut self, secret: u64) {
        match &mut self.numbering {
            Numbering::Tagged { code } => *code = IndexCode::from_secret(secret),
            Numbering::Shuffled { .. } => self.set_seed(secret),
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
            Numbering::Tagged { code } => {
                // The multicast QPN is all ones, so that a tag must not be.
                let (mut tag, low) = (entry.number >> 16 & 0x7f, code.encode(index));
                if tag == 0 && low < self.reserved {
                    tag = 1;
                }
                tag << 16 | u32::from(low)
            }
            Numbering::Shuffled { base, last, order, indices } => loop {
                *last = (*last + 1) % indices.len() as u32;
                let next = order.number(*last);
                if *base + next >= self.reserved.into() && indices[next as usize] == UNUSED {
                    indices[next as usize] = index;
                    break *base + next;
                }
            },
        };
        entry.value = Some(make(entry.number));
        self.live += 1;
        Some(entry.number)
    }

    /// Adds an entry with a given number, if that is free. If it is the first, indices are not encoded. A
    /// table with the numbers of a slot does not support it.
    pub fn insert_at(&mut self, number: u32, make: impl FnOnce(u32) -> T) -> Option<u32> {
        let Numbering::Tagged { code } = &mut self.numbering else { return None };
        if self.entries.len() == usize::from(self.reserved) {
            *code = IndexCode::default();
        }
        let index = code.decode(number as u16);
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
            Numbering::Tagged { code } => code.decode(number as u16).into(),
            Numbering::Shuffled { base, indices, .. } => {
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
            Numbering::Shuffled { base, indices, .. } => indices[(number - *base) as usize] = UNUSED,
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
            table.set_seed(u64::from(mask));
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
    fn secret_numbers_are_found_again_and_do_not_follow_from_each_other() {
        let mut seen = alloc::collections::BTreeSet::new();
        for secret in (0..40).map(|index: u64| next_random(&mut index.clone())) {
            let tables = [0, 3]
                .map(|slot| Table::new(40_000, 2).with_slot(QpnSlot { number: slot, bits: QpnSlot::BITS }));
            for mut table in tables.into_iter().chain([Table::new(40_000, 2)]) {
                table.set_secret(secret);
                let numbers: Vec<u32> = (0..600).map(|_| table.insert(0, |number| number).unwrap()).collect();
                assert!(numbers.iter().all(|number| *number >= 2 && table.get(*number) == Some(number)));
                if matches!(table.numbering, Numbering::Shuffled { .. }) {
                    // The distances between successive numbers do not repeat: two do not give away a third.
                    let distances: alloc::collections::BTreeSet<_> =
                        numbers.windows(2).map(|pair| pair[1].wrapping_sub(pair[0]) as u16).collect();
                    assert!(distances.len() > 550, "{}", distances.len());
                }
                seen.insert(numbers[0]);
                for number in numbers {
                    assert_eq!(table.remove(number), Some(number));
                }
            }
        }
        assert!(seen.len() > 110, "{}", seen.len());
    }

    #[test]
    fn the_numbers_of_a_slot_are_used_in_turn_and_wrap() {
        for number in [0, 1, 300] {
            let slot = QpnSlot { number, bits: QpnSlot::BITS };
            let mut table = Table::new(40_000, 2).with_slot(slot);
            table.set_secret(0x7ffd);
            let kept = table.insert(0, |number| number).unwrap();
            assert_eq!(kept >> 15, u32::from(number));
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
