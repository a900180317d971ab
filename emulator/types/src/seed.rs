//! Stateless randomness: every draw is a hash of the seed and its subject.
//!
//! Two runs draw the same value for the same packet, regardless of other draws. Stored scenarios depend on
//! the hash: its values never change.

/// Probability 1 in parts per billion.
pub const PER_BILLION: u32 = 1_000_000_000;

/// The seed of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Seed(pub u64);

impl Seed {
    /// A number that depends on the seed and on every word, uniformly distributed over `u64`.
    ///
    /// Each word is mixed in with one step of splitmix64, so order and count matter.
    ///
    /// ```
    /// use softhca_types::Seed;
    /// assert_eq!(Seed(7).draw(&[1, 2]), Seed(7).draw(&[1, 2]));
    /// assert_ne!(Seed(7).draw(&[1, 2]), Seed(7).draw(&[2, 1]));
    /// ```
    pub const fn draw(self, words: &[u64]) -> u64 {
        let mut state = splitmix64(self.0);
        let mut at = 0;
        while at < words.len() {
            state = splitmix64(state ^ words[at]);
            at += 1;
        }
        state
    }

    /// A number below `bound` for these words; zero if `bound` is zero.
    pub const fn below(self, bound: u64, words: &[u64]) -> u64 {
        ((self.draw(words) as u128 * bound as u128) >> 64) as u64
    }

    /// Whether an event with a probability of `per_billion` occurs for these words.
    pub const fn happens(self, per_billion: u32, words: &[u64]) -> bool {
        self.below(PER_BILLION as u64, words) < per_billion as u64
    }
}

/// One step of splitmix64 (Steele, Lea and Flood): add the golden ratio, then mix.
const fn splitmix64(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_matches_the_published_splitmix64() {
        // The first outputs of splitmix64 from state 0 in the authors' reference code.
        assert_eq!(splitmix64(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(splitmix64(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn draws_never_change_between_versions() {
        assert_eq!(Seed(0).draw(&[]), 0xe220_a839_7b1d_cdaf);
        assert_eq!(Seed(0).draw(&[0]), 0xa706_dd2f_4d19_7e6f);
        assert_eq!(Seed(42).draw(&[1, 2, 3]), 0x3fb9_6077_da58_07fd);
        assert_eq!(Seed(u64::MAX).draw(&[u64::MAX; 6]), 0xe87c_5e83_9dcd_fb92);
        assert_eq!(Seed(1).below(1000, &[5]), 692);
    }

    #[test]
    fn draws_match_their_probability() {
        for per_billion in [1_000_000, 10_000_000, 500_000_000] {
            let hits = (0..1_000_000).filter(|n| Seed(3).happens(per_billion, &[1, *n])).count() as i64;
            let expected = i64::from(per_billion) / 1000;
            assert!((hits - expected).abs() < 4 * (expected as f64).sqrt() as i64, "{hits} of {expected}");
        }
    }

    #[test]
    fn probability_one_always_and_zero_never_occurs() {
        assert!((0..1000).all(|n| Seed(3).happens(PER_BILLION, &[n])));
        assert!((0..1000).all(|n| !Seed(3).happens(0, &[n])));
    }
}
