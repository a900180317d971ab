//! Fault rules and their counters.

use super::action::Action;
use super::flow_history::ObservedPacket;
use super::repetition::{DrawKey, RepeatState, draws};
use super::selector::Selector;
use super::tally::RuleTally;
use crate::{Direction, Frame, Seed};
use softhca_types::Repeat;

/// Identifies a rule within a run. Draws depend on it, so it should not change when other rules are added or
/// removed.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(pub u32);

/// A fault rule: a selector, a repetition and an action.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The rule's ID.
    pub id: RuleId,
    /// Which packets match.
    pub selector: Selector,
    /// How often the rule acts.
    pub repeat: Repeat,
    pub action: Action,
}

impl Rule {
    /// Whether the rule depends on earlier packets of a flow.
    pub(crate) const fn needs_history(&self) -> bool {
        self.selector.needs_history()
            || draws(&self.repeat.choice)
            || matches!(self.action, Action::Jitter { .. })
    }
}

#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleCounters {
    /// Packets that matched.
    pub matched: u64,
    /// Packets that the rule acted on.
    pub fired: u64,
}

/// A rule with its state on a link.
#[derive(Clone, Debug)]
pub(crate) struct ActiveRule {
    pub rule: Rule,
    /// When the last packet of each direction leaves, if the rule limits the rate or adds jitter.
    pub busy_until_ns: [u64; 2],
    /// It acts no more.
    pub is_stopped: bool,
    repeat_state: RepeatState,
}

impl ActiveRule {
    pub fn new(rule: Rule, tally: RuleTally) -> ActiveRule {
        ActiveRule { rule, busy_until_ns: [0; 2], is_stopped: false, repeat_state: RepeatState::new(tally) }
    }

    pub fn counters(&self) -> RuleCounters {
        self.repeat_state.counters()
    }

    /// Sends a packet behind the earlier ones, in this time. Returns how long it takes from now.
    pub fn send_in(&mut self, now_ns: u64, direction: Direction, ns: u64) -> u64 {
        let busy_until_ns = &mut self.busy_until_ns[direction as usize];
        *busy_until_ns = now_ns.max(*busy_until_ns).saturating_add(ns);
        *busy_until_ns - now_ns
    }

    /// Counts a packet and returns the action, if the rule fires.
    pub fn evaluate(
        &mut self,
        now_ns: u64,
        direction: Direction,
        seed: Seed,
        frame: &Frame,
        observed: &ObservedPacket,
    ) -> Option<(Action, DrawKey)> {
        let Rule { id, selector, repeat, action } = &self.rule;
        if self.is_stopped
            || !selector.matches(now_ns, direction, observed)
            || !action.applies_to(frame, observed.opcode)
        {
            return None;
        }
        let draw_key = DrawKey { rule: id.0.into(), direction, packet: *observed };
        self.repeat_state.next(repeat, seed, &draw_key).then_some((*action, draw_key))
    }
}
