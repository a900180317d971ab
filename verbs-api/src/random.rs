//! Random numbers: from the seed in a [`World`](crate::sim::World), from the operating system elsewhere.

use crate::executor::Executor;
use softhca_fabric::Seed;
use std::hash::{BuildHasher, RandomState};

/// A generator of random numbers. Not for secrets.
#[derive(Clone, Debug)]
pub struct Rng {
    seed: Seed,
    drawn: u64,
}

/// Creates a generator. In the code of a `World`, the seed and the host determine its numbers.
///
/// ```
/// let die = 1 + softhca::rng().below(6);
/// assert!((1..=6).contains(&die));
/// ```
pub fn rng() -> Rng {
    let seed = match Executor::current() {
        Some(executor) => {
            let [seed, group, count] = executor.next_rng_stream();
            Seed(seed).draw(&[0x726e_6773, group, count])
        }
        None => RandomState::new().hash_one(0),
    };
    Rng { seed: Seed(seed), drawn: 0 }
}

impl Rng {
    /// The next number, uniformly distributed.
    pub fn next_u64(&mut self) -> u64 {
        self.drawn += 1;
        self.seed.draw(&[self.drawn])
    }

    /// A number below `bound`, uniformly distributed; zero if `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.drawn += 1;
        self.seed.below(bound, &[self.drawn])
    }

    /// Fills a slice with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let number = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&number[..chunk.len()]);
        }
    }
}
