//! A fault rule, and how often it fired.

use super::action::Action;
use super::flow_history::ObservedPacket;
use super::repetition::{DrawKey, Repeat, RepeatState};
use super::selector::Selector;
use crate::{Direction, Frame, Seed};

/// Names a rule among all rules of a run. Draws depend on it, so it should not change when other rules are
/// added or taken away.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(pub u32);

/// Which packets, how often, and what happens to them.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name.
    pub id: RuleId,
    /// Which packets.
    pub selector: Selector,
    /// How often.
    pub repeat: Repeat,
    /// What happens.
    pub action: Action,
}

impl Rule {
    /// Whether the rule asks about earlier packets of a flow.
    pub(crate) const fn needs_history(&self) -> bool {
        self.selector.needs_history() || self.repeat.choice.needs_history()
    }
}

/// How often a rule was right and how often it acted.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleCounters {
    /// Packets that it is about.
    pub matched: u64,
    /// Packets that it acted on.
    pub fired: u64,
}

/// A rule on a cable.
#[derive(Clone, Debug)]
pub(crate) struct ActiveRule {
    pub rule: Rule,
    pub counters: RuleCounters,
    repeat_state: RepeatState,
}

impl ActiveRule {
    pub fn new(rule: Rule) -> ActiveRule {
        ActiveRule { rule, counters: RuleCounters::default(), repeat_state: RepeatState::default() }
    }

    /// Takes note of a packet and tells what to do with it, if anything.
    pub fn evaluate(
        &mut self,
        now_ns: u64,
        direction: Direction,
        seed: Seed,
        frame: &Frame,
        observed: &ObservedPacket,
    ) -> Option<(Action, DrawKey)> {
        let Rule { id, selector, repeat, action } = &self.rule;
        if !selector.matches(now_ns, direction, observed) || !action.applies_to(frame, observed.opcode) {
            return None;
        }
        self.counters.matched += 1;
        let draw_key = DrawKey { rule: id.0.into(), direction, packet: *observed };
        if !self.repeat_state.next(repeat, seed, &draw_key) {
            return None;
        }
        self.counters.fired += 1;
        Some((*action, draw_key))
    }
}
