//! How often a rule acts on matching packets.

use super::flow::FlowId;
use super::flow_history::ObservedPacket;
use super::rule::RuleCounters;
use super::tally::RuleTally;
use crate::{Direction, Seed};
use alloc::collections::{BTreeMap, BTreeSet};
use softhca_types::{Choice, GilbertElliott, HitCounter, Repeat, Scope};

/// The input of a draw, without the seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrawKey {
    pub rule: u64,
    pub direction: Direction,
    pub packet: ObservedPacket,
}

/// The purposes of draws for one rule and packet.
#[derive(Clone, Copy)]
pub(crate) enum DrawPurpose {
    Chance,
    BurstState,
    BurstHit,
    BitPosition,
    Jitter,
}

impl DrawKey {
    /// The words of a draw: rule, direction, flow, PSN, transmission, purpose.
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

/// The state of a rule's repetition.
#[derive(Clone, Debug, Default)]
pub(crate) struct RepeatState {
    /// Matches and hits of the whole rule.
    tally: RuleTally,
    /// The counters of each flow, if the repetition counts flows separately.
    by_flow: BTreeMap<(Direction, Option<FlowId>), HitCounter>,
    /// The flows in the bad state.
    bad: BTreeSet<(Direction, Option<FlowId>)>,
}

impl RepeatState {
    pub fn new(tally: RuleTally) -> RepeatState {
        RepeatState { tally, ..RepeatState::default() }
    }

    pub fn counters(&self) -> RuleCounters {
        self.tally.counters()
    }

    /// Counts a matching packet and returns whether it is hit.
    pub fn next(&mut self, repeat: &Repeat, seed: Seed, draw_key: &DrawKey) -> bool {
        let RepeatState { tally, by_flow, bad } = self;
        let draw = |_| match repeat.choice {
            Choice::Probability { per_billion } => {
                seed.happens(per_billion, &draw_key.words(DrawPurpose::Chance))
            }
            Choice::Burst(burst) => next_in_burst(&burst, bad, seed, draw_key),
            _ => true,
        };
        let matched = tally.count_match();
        match repeat.scope {
            Scope::Rule => repeat.selects(matched, draw) && tally.count_hit(repeat.times),
            Scope::Flow => {
                by_flow.entry(draw_key.flow()).or_default().next_drawn(repeat, draw) && tally.count_hit(None)
            }
        }
    }
}

/// The next state of a flow in the Gilbert-Elliott model, and whether the packet is hit.
fn next_in_burst(
    burst: &GilbertElliott,
    bad: &mut BTreeSet<(Direction, Option<FlowId>)>,
    seed: Seed,
    draw_key: &DrawKey,
) -> bool {
    let flow = draw_key.flow();
    let was_bad = bad.contains(&flow);
    let change = if was_bad { burst.bad_to_good } else { burst.good_to_bad };
    let is_bad = was_bad ^ seed.happens(change, &draw_key.words(DrawPurpose::BurstState));
    if is_bad != was_bad {
        if is_bad {
            bad.insert(flow)
        } else {
            bad.remove(&flow)
        };
    }
    let hit = if is_bad { burst.hit_in_bad } else { burst.hit_in_good };
    seed.happens(hit, &draw_key.words(DrawPurpose::BurstHit))
}

/// Whether a choice draws, which requires the transmission count.
pub(crate) const fn draws(choice: &Choice) -> bool {
    matches!(choice, Choice::Probability { .. } | Choice::Burst(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ALICE, BOB, Packet, flow};
    use crate::{FlowTable, PER_BILLION};
    use alloc::string::String;
    use alloc::vec::Vec;
    use core::num::NonZeroU64;
    use softhca_types::{Pattern, PatternError};
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
    fn skip_times_every_and_pattern_select_packets() {
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
    fn pattern_parses_or_reports_its_error() {
        assert_eq!(Pattern::parse(""), Err(PatternError::Empty));
        assert_eq!(Pattern::parse("XO X"), Err(PatternError::InvalidChar(' ')));
        let long = "X".repeat(64);
        assert!(Pattern::parse(&long).expect("64 letters").hits(63));
        assert_eq!(Pattern::parse(&(long + "X")), Err(PatternError::TooLong));
        assert!(Pattern::parse("OO").expect("a pattern").never_hits());
    }

    #[test]
    fn flow_scope_counts_each_flow_separately() {
        let both = |scope| {
            let repeat = Repeat { scope, ..Repeat::times(1) };
            let mut progress = RepeatState::default();
            [1, 2, 1, 2].map(|flow_id| progress.next(&repeat, Seed(1), &draw_key(flow_id, 0)))
        };
        assert_eq!(both(Scope::Rule), [true, false, false, false]);
        assert_eq!(both(Scope::Flow), [true, true, false, false]);
    }

    #[test]
    fn probability_depends_on_every_word_of_the_draw_key() {
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
    fn probability_does_not_depend_on_the_first_psn() {
        let mut other = draw_key(1, 5);
        other.packet.psn = other.packet.psn.map(|psn| psn.plus(77));
        assert_eq!(other.words(DrawPurpose::Chance), draw_key(1, 5).words(DrawPurpose::Chance));
    }

    #[test]
    fn burst_length_and_frequency_match_the_probabilities() {
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
