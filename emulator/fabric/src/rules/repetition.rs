//! How often a rule acts on the packets that it is about.

use super::flow::FlowId;
use super::flow_history::ObservedPacket;
use crate::{Direction, Seed};
use alloc::collections::{BTreeMap, BTreeSet};
use core::fmt;
use core::num::NonZeroU64;

/// How often, among the packets that match. The default is every time.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeat {
    /// The first so many are left alone.
    pub skip: u64,
    /// At most so many are hit; none for no limit.
    pub times: Option<u64>,
    /// Which of the others are hit.
    pub choice: Choice,
    /// What `skip`, `times` and `choice` count.
    pub scope: Scope,
}

impl Repeat {
    /// The first `times` packets.
    pub fn times(times: u64) -> Repeat {
        Repeat { times: Some(times), ..Repeat::default() }
    }

    /// A choice among all packets, without a limit.
    pub fn choice(choice: Choice) -> Repeat {
        Repeat { choice, ..Repeat::default() }
    }
}

/// Whose packets are counted together.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All that match. With several flows, which of them is hit depends on their order.
    #[default]
    Rule,
    /// Those of each flow and direction by themselves.
    Flow,
}

/// Which of the packets that match are hit.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// All.
    #[default]
    All,
    /// The n-th, the 2n-th and so on.
    Every(NonZeroU64),
    /// Those at an `X`, over and over.
    Pattern(Pattern),
    /// So many in a billion, each for itself.
    Probability {
        /// The probability.
        per_billion: u32,
    },
    /// In bursts.
    Burst(GilbertElliott),
}

/// Hits and misses in order, such as `XOO`: at most 64.
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "alloc::string::String", into = "alloc::string::String")
)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    /// Bit n is set if the n-th is a hit.
    hits: u64,
    length: u8,
}

impl Pattern {
    /// Reads a pattern of `X` (hit) and `O` (miss), in either case.
    ///
    /// ```
    /// use softhca_fabric::{BadPattern, Pattern};
    /// assert_eq!(Pattern::parse("XOO").unwrap().to_string(), "XOO");
    /// assert_eq!(Pattern::parse("X-O"), Err(BadPattern::Letter('-')));
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

    /// Whether the packet with this index is hit, when the pattern is repeated for ever.
    pub const fn hits(self, index: u64) -> bool {
        self.hits >> (index % self.length as u64) & 1 == 1
    }

    /// Whether no packet is ever hit.
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

/// Why text is not a [`Pattern`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatternError {
    /// It has no letters.
    Empty,
    /// It has more than 64.
    TooLong,
    /// This one is neither `X` nor `O`.
    InvalidChar(char),
}

impl fmt::Display for PatternError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PatternError::Empty => f.write_str("a pattern has at least one letter"),
            PatternError::TooLong => f.write_str("a pattern has at most 64 letters"),
            PatternError::InvalidChar(letter) => write!(f, "a pattern has only X and O, not {letter:?}"),
        }
    }
}

impl core::error::Error for PatternError {}

/// The Gilbert-Elliott model: every flow is in a good or in a bad state and may change it with each packet;
/// it starts in the good one. All in parts per billion.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GilbertElliott {
    /// From good to bad.
    pub good_to_bad: u32,
    /// From bad to good.
    pub bad_to_good: u32,
    /// A hit in the good state.
    pub hit_in_good: u32,
    /// A hit in the bad state.
    pub hit_in_bad: u32,
}

/// What a draw is about: the words of the hash that decides it, without the seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrawKey {
    pub rule: u64,
    pub direction: Direction,
    pub packet: ObservedPacket,
}

/// The draws that one rule makes about one packet.
#[derive(Clone, Copy)]
pub(crate) enum DrawPurpose {
    Chance,
    BurstState,
    BurstHit,
    BitPosition,
}

impl DrawKey {
    /// The words for one draw: rule, direction, role, PSN, n-th transmission, and which draw it is.
    pub fn words(&self, draw: DrawPurpose) -> [u64; 6] {
        let ObservedPacket { flow_id, packet_type, psn, relative_psn, transmission, .. } = self.packet;
        let flow_id = match (flow_id, packet_type) {
            (Some(flow_id), Some(packet_type)) => (u64::from(flow_id.0) << 1 | packet_type as u64) + 1,
            _ => 0,
        };
        let psn = match relative_psn {
            Some(relative) => relative as u64,
            None => psn.map_or(0, |psn| psn.value().into()),
        };
        [self.rule, self.direction as u64, flow_id, psn, transmission, draw as u64]
    }

    fn flow(&self) -> (Direction, Option<FlowId>) {
        (self.direction, self.packet.flow_id)
    }
}

/// How far a rule's repetition has come.
#[derive(Clone, Debug, Default)]
pub(crate) struct RepeatState {
    /// Matches and hits, by what the scope counts; the key is `None` for the whole rule.
    counts: BTreeMap<Option<(Direction, Option<FlowId>)>, Count>,
    /// The flows in the bad state.
    bad: BTreeSet<(Direction, Option<FlowId>)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    matched: u64,
    hit: u64,
}

impl RepeatState {
    /// Takes note of one more packet that matches and tells whether it is hit.
    pub fn next(&mut self, repeat: &Repeat, seed: Seed, draw_key: &DrawKey) -> bool {
        let scope = (repeat.scope == Scope::Flow).then(|| draw_key.flow());
        let count = self.counts.entry(scope).or_default();
        count.matched += 1;
        // From here on the count starts at one behind the skipped packets.
        let Some(ordinal @ 1..) = count.matched.checked_sub(repeat.skip) else { return false };
        let hit = match repeat.choice {
            Choice::All => true,
            Choice::Every(n) => ordinal.is_multiple_of(n.get()),
            Choice::Pattern(pattern) => pattern.hits(ordinal - 1),
            Choice::Probability { per_billion } => {
                seed.happens(per_billion, &draw_key.words(DrawPurpose::Chance))
            }
            Choice::Burst(burst) => burst.next(&mut self.bad, seed, draw_key),
        };
        let hit = hit && repeat.times.is_none_or(|times| count.hit < times);
        count.hit += u64::from(hit);
        hit
    }
}

impl GilbertElliott {
    fn next(&self, bad: &mut BTreeSet<(Direction, Option<FlowId>)>, seed: Seed, draw_key: &DrawKey) -> bool {
        let flow = draw_key.flow();
        let was_bad = bad.contains(&flow);
        let change = if was_bad { self.bad_to_good } else { self.good_to_bad };
        let is_bad = was_bad ^ seed.happens(change, &draw_key.words(DrawPurpose::BurstState));
        if is_bad != was_bad {
            if is_bad {
                bad.insert(flow)
            } else {
                bad.remove(&flow)
            };
        }
        let hit = if is_bad { self.hit_in_bad } else { self.hit_in_good };
        seed.happens(hit, &draw_key.words(DrawPurpose::BurstHit))
    }
}

impl Choice {
    /// Whether the choice is a draw, which asks for the n-th transmission.
    pub(crate) const fn needs_history(&self) -> bool {
        matches!(self, Choice::Probability { .. } | Choice::Burst(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ALICE, BOB, Packet, flow};
    use crate::{FlowTable, PER_BILLION};
    use alloc::string::String;
    use alloc::vec::Vec;
    use softhca_wire::Operation;

    fn draw_key(flow_id: u32, position: i64) -> DrawKey {
        let mut flows = FlowTable::new();
        flows.insert(flow(flow_id, ALICE, BOB, 0));
        let mut observed = ObservedPacket::of(&Packet::rc(Operation::Write, 0).frame(), &flows);
        observed.relative_psn = Some(position);
        observed.transmission = 1;
        DrawKey { rule: 0, direction: Direction::Forward, packet: observed }
    }

    /// The hits among the first packets of one flow.
    fn hits(repeat: Repeat, packets: i64) -> String {
        let mut progress = RepeatState::default();
        let hit = |position| progress.next(&repeat, Seed(1), &draw_key(1, position));
        (0..packets).map(hit).map(|hit| if hit { 'X' } else { 'O' }).collect()
    }

    #[test]
    fn counts_patterns_and_their_limits() {
        let every = |n| Choice::Every(NonZeroU64::new(n).expect("not zero"));
        let pattern = |text| Choice::Pattern(Pattern::parse(text).expect("a pattern"));
        assert_eq!(hits(Repeat::default(), 4), "XXXX");
        assert_eq!(hits(Repeat::times(2), 4), "XXOO");
        assert_eq!(hits(Repeat { skip: 1, ..Repeat::times(2) }, 4), "OXXO");
        assert_eq!(hits(Repeat::choice(every(3)), 7), "OOXOOXO");
        assert_eq!(hits(Repeat { skip: 1, ..Repeat::choice(every(2)) }, 6), "OOXOXO");
        assert_eq!(hits(Repeat::choice(pattern("XOO")), 7), "XOOXOOX");
        assert_eq!(hits(Repeat { times: Some(2), ..Repeat::choice(pattern("xo")) }, 6), "XOXOOO");
        assert_eq!(hits(Repeat { skip: u64::MAX, ..Repeat::default() }, 2), "OO");
        assert_eq!(hits(Repeat::times(0), 2), "OO");
    }

    #[test]
    fn a_pattern_is_read_or_refused_with_a_reason() {
        assert_eq!(Pattern::parse(""), Err(PatternError::Empty));
        assert_eq!(Pattern::parse("XO X"), Err(PatternError::InvalidChar(' ')));
        let long = "X".repeat(64);
        assert!(Pattern::parse(&long).expect("64 letters").hits(63));
        assert_eq!(Pattern::parse(&(long + "X")), Err(PatternError::TooLong));
        assert!(Pattern::parse("OO").expect("a pattern").never_hits());
    }

    #[test]
    fn a_flow_counts_by_itself_if_the_rule_says_so() {
        let both = |scope| {
            let repeat = Repeat { scope, ..Repeat::times(1) };
            let mut progress = RepeatState::default();
            [1, 2, 1, 2].map(|flow_id| progress.next(&repeat, Seed(1), &draw_key(flow_id, 0)))
        };
        assert_eq!(both(Scope::Rule), [true, false, false, false]);
        assert_eq!(both(Scope::Flow), [true, true, false, false]);
    }

    #[test]
    fn chance_depends_on_every_word_of_the_question() {
        let repeat = Repeat::choice(Choice::Probability { per_billion: PER_BILLION / 2 });
        let hits = |seed, change: fn(&mut DrawKey)| -> Vec<bool> {
            let ask = |position| {
                let mut draw_key = draw_key(1, position);
                change(&mut draw_key);
                RepeatState::default().next(&repeat, seed, &draw_key)
            };
            (0..64).map(ask).collect()
        };
        let usual = hits(Seed(1), |_| ());
        assert_eq!(hits(Seed(1), |_| ()), usual);
        assert_ne!(hits(Seed(2), |_| ()), usual);
        assert_ne!(hits(Seed(1), |draw_key| draw_key.rule = 1), usual);
        assert_ne!(hits(Seed(1), |draw_key| draw_key.direction = Direction::Backward), usual);
        assert_ne!(hits(Seed(1), |draw_key| draw_key.packet.flow_id = Some(FlowId(2))), usual);
        assert_ne!(hits(Seed(1), |draw_key| draw_key.packet.transmission = 2), usual);
    }

    #[test]
    fn chance_does_not_depend_on_the_first_psn_that_a_run_happened_to_get() {
        let mut other = draw_key(1, 5);
        other.packet.psn = other.packet.psn.map(|psn| psn.plus(77));
        assert_eq!(other.words(DrawPurpose::Chance), draw_key(1, 5).words(DrawPurpose::Chance));
    }

    #[test]
    fn bursts_are_as_long_and_as_frequent_as_their_probabilities_say() {
        // Bad for 10 packets, good for 90 on average.
        let burst = GilbertElliott {
            good_to_bad: PER_BILLION / 90,
            bad_to_good: PER_BILLION / 10,
            hit_in_good: 0,
            hit_in_bad: PER_BILLION,
        };
        let hits = hits(Repeat::choice(Choice::Burst(burst)), 100_000);
        let total = hits.matches('X').count();
        let bursts = hits.split('O').filter(|run| !run.is_empty()).count();
        assert!((9_000..11_000).contains(&total), "{total} hits");
        assert!((9..=11).contains(&(total / bursts)), "{bursts} bursts");
    }
}
