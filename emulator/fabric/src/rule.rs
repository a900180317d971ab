//! A fault rule, and how often it fired.

use crate::repeat::{Progress, Question};
use crate::{Action, Direction, Frame, Repeat, Seed, Selector, Sighting};

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
    pub(crate) const fn looks_back(&self) -> bool {
        self.selector.looks_back() || self.repeat.choice.looks_back()
    }
}

/// How often a rule was right and how often it acted.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Packets that it is about.
    pub matched: u64,
    /// Packets that it acted on.
    pub fired: u64,
}

/// A rule on a cable.
#[derive(Clone, Debug)]
pub(crate) struct Armed {
    pub rule: Rule,
    pub tally: Tally,
    progress: Progress,
}

impl Armed {
    pub fn new(rule: Rule) -> Armed {
        Armed { rule, tally: Tally::default(), progress: Progress::default() }
    }

    /// Takes note of a packet and tells what to do with it, if anything.
    pub fn judge(
        &mut self,
        now_ns: u64,
        direction: Direction,
        seed: Seed,
        frame: &Frame,
        sighting: &Sighting,
    ) -> Option<(Action, Question)> {
        let Rule { id, selector, repeat, action } = &self.rule;
        if !selector.matches(now_ns, direction, sighting) || !action.applies_to(frame, sighting.opcode) {
            return None;
        }
        self.tally.matched += 1;
        let question = Question { rule: id.0.into(), direction, sighting: *sighting };
        if !self.progress.next(repeat, seed, &question) {
            return None;
        }
        self.tally.fired += 1;
        Some((*action, question))
    }
}
