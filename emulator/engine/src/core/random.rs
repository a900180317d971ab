//! The generators of queue pair numbers, keys, communication IDs and initial PSNs.

/// A sequence of numbers.
pub(crate) enum Random {
    /// Numbers that a seed determines (SplitMix64), for runs that can be repeated.
    Seeded(u64),
    /// Numbers that only the owner of the key can predict, whatever was seen before (SipHash-2-4 of a counter).
    Keyed { key: [u64; 2], count: u64 },
}

impl Random {
    pub fn keyed(key: [u64; 2]) -> Random {
        Random::Keyed { key, count: 0 }
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        match self {
            Random::Seeded(state) => next_random(state),
            Random::Keyed { key, count } => {
                *count += 1;
                hash(*key, *count)
            }
        }
    }

    /// The tag of a new table slot and the variant of its key.
    pub fn key_tag(&mut self) -> [u8; 2] {
        let [tag, variant, ..] = self.draw().to_le_bytes();
        match self {
            Random::Seeded(_) => [tag, tag],
            Random::Keyed { .. } => [tag, variant],
        }
    }
}

#[expect(deprecated, reason = "the library's SipHash-2-4 with a key; its successors choose their own key")]
fn hash(key: [u64; 2], count: u64) -> u64 {
    use core::hash::{Hasher, SipHasher};
    let mut hasher = SipHasher::new_with_keys(key[0], key[1]);
    hasher.write(&count.to_le_bytes());
    hasher.finish()
}

/// The next number after `state`, which advances.
pub(crate) fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use crate::{Hca, MemoryId, MemoryRegion, Settings};
    use alloc::vec::Vec;
    use softhca_queue::{DoorbellConsumer, DoorbellProducer, SharedWords};
    use softhca_types::AccessFlags;

    /// The keys of the first `count` regions.
    fn keys(secret: Option<[u64; 2]>, count: usize) -> Vec<u32> {
        let hca = Hca::new(Settings::default(), Vec::new());
        let mut hca = match secret {
            Some(secret) => hca.with_secret(secret),
            None => hca,
        };
        let words = SharedWords::heap(DoorbellProducer::words(8));
        let client = hca.open_client(DoorbellConsumer::new(words, 8)).unwrap();
        let pd = hca.allocate_protection_domain(client).unwrap();
        let access_flags = AccessFlags::empty();
        let region = MemoryRegion { client, pd, iova: 0, length: 1, access_flags, memory: MemoryId(1) };
        (0..count).map(|_| hca.register_memory_region(region).unwrap().0).collect()
    }

    #[test]
    fn a_secret_decides_all_bits_of_a_key() {
        assert_eq!(keys(Some([1, 2]), 9), keys(Some([1, 2]), 9));
        assert_eq!(keys(None, 9), keys(None, 9));
        // A bit that is the same for 64 secrets is not decided by them. The highest is that of multicast QPNs.
        let first = |secret: u64| keys(Some([secret, 0]), 1)[0];
        let differing = (1..64).fold(0, |bits, secret| bits | (first(secret) ^ first(0)));
        assert_eq!(differing, 0x7fff_ffff);
    }

    #[test]
    fn keys_of_one_secret_do_not_follow_from_each_other() {
        let keys = keys(Some([7, 7]), 64);
        let tag = |key: u32| key >> 24 << 8 | key & 0xff;
        let mut steps: Vec<u32> =
            keys.windows(2).map(|pair| tag(pair[1]).wrapping_sub(tag(pair[0]))).collect();
        steps.sort_unstable();
        steps.dedup();
        assert!(steps.len() > 60, "{} different steps from key to key", steps.len());
    }
}
