//! How often a fault rule acts on what it matches: packets, calls or completions.

use crate::Seed;
use core::fmt;
use core::num::NonZeroU64;
use thiserror::Error;

/// How often a rule acts on matching packets; by default always.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeat {
    /// The number of packets to skip first.
    pub skip: u64,
    /// The maximum number of hits; `None` for no limit.
    pub times: Option<u64>,
    /// Which of the remaining packets are hit.
    pub choice: Choice,
    /// The scope of the counts.
    pub scope: Scope,
}

impl Repeat {
    /// The first `times` packets.
    pub fn times(times: u64) -> Repeat {
        Repeat { times: Some(times), ..Repeat::default() }
    }

    /// A choice without a limit.
    pub fn choice(choice: Choice) -> Repeat {
        Repeat { choice, ..Repeat::default() }
    }
}

/// Which packets share a count.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All matching packets. With several flows, their order determines which is hit.
    #[default]
    Rule,
    /// Each flow and direction separately.
    Flow,
}

/// Which matching packets are hit.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// All packets.
    #[default]
    All,
    /// Every n-th packet.
    Every(NonZeroU64),
    /// The packets at an `X` of a repeated pattern.
    Pattern(Pattern),
    /// Each packet with this probability, independently.
    Probability {
        /// The probability in parts per billion.
        per_billion: u32,
    },
    /// Bursts.
    Burst(GilbertElliott),
}

/// A sequence of hits and misses such as `XOO`, at most 64.
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "alloc::string::String", into = "alloc::string::String")
)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    /// Bit n is set if packet n is a hit.
    hits: u64,
    length: u8,
}

impl Pattern {
    /// Parses a pattern of `X` (hit) and `O` (miss) in either case.
    ///
    /// ```
    /// use softhca_types::{Pattern, PatternError};
    /// assert_eq!(Pattern::parse("XOO").unwrap().to_string(), "XOO");
    /// assert_eq!(Pattern::parse("X-O"), Err(PatternError::InvalidChar('-')));
    /// ```
    pub fn parse(text: &str) -> Result<Pattern, PatternError> {
        let mut pattern = Pattern { hits: 0, length: 0 };
        for letter in text.chars() {
            if pattern.length == 64 {
                return Err(PatternError::TooLong);
            }
            let hit = match letter {
                'X' | 'x' => 1,
                'O' | 'o' => 0,
                other => return Err(PatternError::InvalidChar(other)),
            };
            pattern.hits |= hit << pattern.length;
            pattern.length += 1;
        }
        if pattern.length == 0 { Err(PatternError::Empty) } else { Ok(pattern) }
    }

    /// Whether the packet with this index is hit when the pattern repeats.
    pub const fn hits(self, index: u64) -> bool {
        self.hits >> (index % self.length as u64) & 1 == 1
    }

    /// Whether the pattern has no hit.
    pub const fn never_hits(self) -> bool {
        self.hits == 0
    }
}

#[cfg(feature = "serde")]
impl TryFrom<alloc::string::String> for Pattern {
    type Error = PatternError;

    fn try_from(text: alloc::string::String) -> Result<Pattern, PatternError> {
        Pattern::parse(&text)
    }
}

#[cfg(feature = "serde")]
impl From<Pattern> for alloc::string::String {
    fn from(pattern: Pattern) -> alloc::string::String {
        alloc::format!("{pattern}")
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (0..self.length).try_for_each(|n| f.write_str(if self.hits(n.into()) { "X" } else { "O" }))
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pattern({self})")
    }
}

/// Why text is not a valid [`Pattern`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages say what each means")]
pub enum PatternError {
    #[error("the pattern is empty")]
    Empty,
    #[error("the pattern has more than 64 letters")]
    TooLong,
    #[error("the pattern has {0:?}; only X and O are valid")]
    InvalidChar(char),
}

/// The Gilbert-Elliott model. Each flow is in a good or a bad state, and may change state with each packet. It starts
/// in the good state. All values are parts per billion.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GilbertElliott {
    /// Probability of a change from good to bad.
    pub good_to_bad: u32,
    /// Probability of a change from bad to good.
    pub bad_to_good: u32,
    /// Probability of a hit in the good state.
    pub hit_in_good: u32,
    /// Probability of a hit in the bad state.
    pub hit_in_bad: u32,
}

/// Counts what matches a rule, and its hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HitCounter {
    matched: u64,
    hit: u64,
}

impl HitCounter {
    /// Counts a call or completion that matches a rule and returns whether it is hit. It has no flow, and so no bursts.
    pub fn next(&mut self, repeat: &Repeat, seed: Seed, rule: u32) -> bool {
        self.next_drawn(repeat, |ordinal| match repeat.choice {
            Choice::Probability { per_billion } => seed.happens(per_billion, &[rule.into(), ordinal]),
            _ => true,
        })
    }

    /// Counts a match and returns whether it is hit. `draw` decides random choices, given the number of the match after
    /// the skipped ones.
    pub fn next_drawn(&mut self, repeat: &Repeat, draw: impl FnOnce(u64) -> bool) -> bool {
        self.matched += 1;
        let hit = repeat.selects(self.matched, draw) && repeat.times.is_none_or(|times| self.hit < times);
        self.hit += u64::from(hit);
        hit
    }
}

impl Repeat {
    /// Whether the match with this number, from one, is hit as long as `times` permits. `draw` decides random choices,
    /// given the number of the match after the skipped ones.
    pub fn selects(&self, matched: u64, draw: impl FnOnce(u64) -> bool) -> bool {
        let Some(ordinal @ 1..) = matched.checked_sub(self.skip) else { return false };
        match self.choice {
            Choice::All => true,
            Choice::Every(n) => ordinal.is_multiple_of(n.get()),
            Choice::Pattern(pattern) => pattern.hits(ordinal - 1),
            Choice::Probability { .. } | Choice::Burst(_) => draw(ordinal),
        }
    }
}
