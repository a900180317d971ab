//! How often a rule matched and acted, in memory that the links of several processes can share.

use super::rule::RuleCounters;
use core::sync::atomic::Ordering;
use softhca_queue::SharedWords;

/// The counters of a rule.
#[derive(Clone, Debug)]
pub(crate) enum RuleTally {
    /// Of one link.
    Own(RuleCounters),
    /// Of the links of all processes of a host: two words.
    Shared(SharedWords),
}

impl RuleTally {
    /// The words of a shared rule.
    pub const WORDS: usize = 2;

    /// Counts a packet that matches. Returns its number, from one.
    pub fn count_match(&mut self) -> u64 {
        match self {
            RuleTally::Own(counters) => {
                counters.matched += 1;
                counters.matched
            }
            RuleTally::Shared(words) => words[0].fetch_add(1, Ordering::Relaxed).wrapping_add(1),
        }
    }

    /// Counts a packet that the rule acts on. False if the rule has acted `limit` times already.
    pub fn count_hit(&mut self, limit: Option<u64>) -> bool {
        let next = |fired: u64| limit.is_none_or(|limit| fired < limit).then(|| fired.wrapping_add(1));
        match self {
            RuleTally::Own(counters) => {
                next(counters.fired).inspect(|fired| counters.fired = *fired).is_some()
            }
            RuleTally::Shared(words) => {
                words[1].fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
            }
        }
    }

    pub fn counters(&self) -> RuleCounters {
        match self {
            RuleTally::Own(counters) => *counters,
            RuleTally::Shared(words) => {
                let [matched, fired] = [0, 1].map(|word: usize| words[word].load(Ordering::Relaxed));
                RuleCounters { matched, fired }
            }
        }
    }
}

impl Default for RuleTally {
    fn default() -> RuleTally {
        RuleTally::Own(RuleCounters::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_of_several_links_acts_as_often_as_one_of_one_link() {
        let words = SharedWords::heap(RuleTally::WORDS);
        let mut links = [0; 2].map(|_| RuleTally::Shared(words.clone()));
        let numbers: [u64; 4] = core::array::from_fn(|n| links[n % 2].count_match());
        let hits: [bool; 4] = core::array::from_fn(|n| links[n % 2].count_hit(Some(3)));
        assert_eq!((numbers, hits), ([1, 2, 3, 4], [true, true, true, false]));
        assert_eq!(links[1].counters(), RuleCounters { matched: 4, fired: 3 });
    }
}
