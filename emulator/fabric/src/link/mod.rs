//! A link: two directions with common settings, and the fault rules.

mod direction;

pub use direction::{LinkCounters, LinkSettings};

use crate::rules::{ActiveRule, DrawPurpose, RuleTally};
use crate::{
    Action, Direction, DownDirections, Fault, FaultCause, FaultEffect, FlowHistory, FlowTable, Frame,
    LinkOutput, ObservedPacket, Rule, RuleCounters, RuleId, Seed,
};
use alloc::vec::Vec;
use direction::{AdmittedFrame, LinkDirection};
use softhca_queue::SharedWords;

/// Whether one direction of a link carries frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// The direction carries frames.
    Up,
    /// The direction drops every frame until it is brought up.
    Down,
}

/// A link between two ports.
///
/// Each frame passes through the rules in the order in which they were added, until one drops it or holds it
/// back. All rules see the frame as it was admitted. The link then transmits the frame.
#[derive(Clone, Debug)]
pub struct Link {
    directions: [LinkDirection; 2],
    seed: Seed,
    rules: Vec<ActiveRule>,
    /// The counters of the rules, in order, if links of other processes share them.
    shared_counters: Option<SharedWords>,
    /// Present only if a rule needs it.
    history: Option<FlowHistory>,
}

impl Link {
    /// A link without rules. The seed determines all draws; links may share it.
    pub const fn new(seed: Seed, settings: LinkSettings) -> Link {
        let directions = [
            LinkDirection::new(Direction::Forward, settings),
            LinkDirection::new(Direction::Backward, settings),
        ];
        Link { directions, seed, rules: Vec::new(), shared_counters: None, history: None }
    }

    /// Lets links of other processes count for the rules of this one, and this link for theirs. Rules that were added in the
    /// same order share their counters, [`Link::COUNTER_WORDS`] each.
    pub fn share_counters(&mut self, counters: SharedWords) {
        self.shared_counters = Some(counters);
    }

    /// The words of the counters of a rule that links share.
    pub const COUNTER_WORDS: usize = RuleTally::WORDS;

    /// Appends a rule.
    pub fn add_rule(&mut self, rule: Rule) {
        if rule.needs_history() {
            self.history.get_or_insert_default();
        }
        let first = self.rules.len() * RuleTally::WORDS;
        let range = first..first + RuleTally::WORDS;
        let shared = self.shared_counters.as_ref().filter(|words| range.end <= words.len());
        let tally = shared.map_or_else(RuleTally::default, |words| RuleTally::Shared(words.part(range)));
        self.rules.push(ActiveRule::new(rule, tally));
        self.update_fast_path();
    }

    /// Recomputes which directions can use the fast path.
    fn update_fast_path(&mut self) {
        let has_rules = !self.rules.is_empty();
        self.directions.iter_mut().for_each(|half| half.update_fast_path(has_rules));
    }

    /// Removes a rule and returns its counters. Frames that it holds back are still delivered.
    pub fn remove_rule(&mut self, id: RuleId) -> Option<RuleCounters> {
        let index = self.rules.iter().position(|armed| armed.rule.id == id)?;
        let counters = self.rules.remove(index).counters();
        if !self.rules.iter().any(|armed| armed.rule.needs_history()) {
            self.history = None;
        }
        self.update_fast_path();
        Some(counters)
    }

    /// Stops rules: they keep their counters and act no more.
    pub fn stop_rules(&mut self, stops: impl Fn(&Rule) -> bool) {
        for armed in &mut self.rules {
            armed.is_stopped |= stops(&armed.rule);
        }
    }

    /// Changes the seed of all further draws.
    pub fn set_seed(&mut self, seed: Seed) {
        self.seed = seed;
    }

    /// The rules in order, with their counters.
    pub fn rules(&self) -> impl Iterator<Item = (&Rule, RuleCounters)> {
        self.rules.iter().map(|armed| (&armed.rule, armed.counters()))
    }

    /// Whether a rule can reorder frames.
    pub fn may_reorder(&self) -> bool {
        let overtakes = |action| matches!(action, Action::Reorder { .. } | Action::Delay { .. });
        self.rules.iter().any(|armed| overtakes(armed.rule.action))
    }

    pub const fn settings(&self) -> &LinkSettings {
        self.directions[0].settings()
    }

    /// Changes the settings for frames admitted from now on.
    pub fn set_settings(&mut self, settings: LinkSettings) {
        self.directions.iter_mut().for_each(|half| half.set_settings(settings));
    }

    /// Takes one direction down or up. Frames that already left the sender still arrive.
    pub fn set_state(&mut self, direction: Direction, state: LinkState) {
        self.directions[direction as usize].down_until_ns = match state {
            LinkState::Up => 0,
            LinkState::Down => u64::MAX,
        };
        self.update_fast_path();
    }

    pub const fn state(&self, now_ns: u64, direction: Direction) -> LinkState {
        match now_ns < self.directions[direction as usize].down_until_ns {
            true => LinkState::Down,
            false => LinkState::Up,
        }
    }

    /// When the last bit of all admitted frames has left the sender. A port that waits until then keeps its
    /// frames in its own queue.
    pub const fn free_at_ns(&self, direction: Direction) -> u64 {
        self.directions[direction as usize].busy_until_ns()
    }

    pub const fn counters(&self, direction: Direction) -> LinkCounters {
        self.directions[direction as usize].total_counters()
    }

    /// When [`Link::expire`] has work to do, if nothing is admitted before.
    pub fn next_timeout(&self) -> Option<u64> {
        self.directions.iter().filter_map(LinkDirection::next_timeout).min()
    }

    /// Releases held frames whose deadline has passed.
    pub fn expire(&mut self, now_ns: u64, output: &mut dyn LinkOutput) {
        for half in &mut self.directions {
            half.expire(now_ns, output);
        }
        self.update_fast_path();
    }

    /// Transmits a frame on the fast path and returns its arrival time. The fast path requires that the
    /// direction is up, has no rules and holds no frames; otherwise the caller must use [`Link::admit`].
    /// `bytes` is the frame's length in a buffer.
    #[inline]
    pub(crate) fn fast_transmit(
        &mut self,
        now_ns: u64,
        direction: Direction,
        bytes: usize,
        is_pause: bool,
    ) -> Option<u64> {
        let packet_length = if is_pause { 0 } else { bytes - Frame::ETHERNET_LEN };
        self.directions[direction as usize].fast_transmit(
            now_ns,
            packet_length,
            bytes + Frame::PREAMBLE_AND_GAP_LEN,
        )
    }

    /// Accepts a frame at the end where `direction` starts. `now_ns` must not decrease.
    pub fn admit(
        &mut self,
        now_ns: u64,
        direction: Direction,
        frame: Frame,
        flows: &FlowTable,
        output: &mut dyn LinkOutput,
    ) {
        self.apply_rules(now_ns, direction, frame, flows, output);
        self.update_fast_path();
    }

    /// Applies the rules to a frame.
    fn apply_rules(
        &mut self,
        now_ns: u64,
        direction: Direction,
        frame: Frame,
        flows: &FlowTable,
        output: &mut dyn LinkOutput,
    ) {
        let Link { directions, seed, rules, history, .. } = self;
        let half = &mut directions[direction as usize];
        half.expire(now_ns, output);
        half.counters.admitted += 1;
        if rules.is_empty() && half.drop_cause(now_ns, &frame).is_none() {
            return half.transmit_unfiltered(now_ns, frame, output);
        }
        let observed = match history {
            Some(history) => history.observe(&frame, flows),
            None => ObservedPacket::of(&frame, flows),
        };
        let mut admitted = AdmittedFrame { frame, observed, copies: 0, delay_ns: 0 };
        for armed in rules {
            let id = armed.rule.id;
            let action = armed.evaluate(now_ns, direction, *seed, &admitted.frame, &observed);
            let Some((action, draw_key)) = action else { continue };
            let mut report = |effect| {
                output.report(Fault {
                    at_ns: now_ns,
                    direction,
                    cause: FaultCause::Rule(id),
                    effect,
                    packet: observed,
                });
            };
            let half = &mut directions[direction as usize];
            match action {
                Action::Count => {}
                Action::Drop => return half.drop_frame(now_ns, FaultCause::Rule(id), &admitted, output),
                Action::Duplicate { copies } => {
                    report(FaultEffect::Duplicated { copies });
                    half.counters.duplicated += u64::from(copies);
                    admitted.copies += u64::from(copies);
                }
                Action::Reorder { by, within_ns } => {
                    report(FaultEffect::Reordered { by });
                    return half.hold(admitted, by, now_ns.saturating_add(within_ns));
                }
                Action::Delay { ns } => {
                    report(FaultEffect::Delayed { ns });
                    admitted.delay_ns = admitted.delay_ns.saturating_add(ns);
                }
                Action::LimitRate { bits_per_second } => {
                    let bits = 8 * admitted.frame.wire_length() as u64;
                    let delay_ns = armed.send_in(now_ns, direction, bits * 1_000_000_000 / bits_per_second);
                    admitted.delay_ns = admitted.delay_ns.saturating_add(delay_ns);
                }
                Action::PacketTime { ns } => {
                    let delay_ns = armed.send_in(now_ns, direction, ns);
                    admitted.delay_ns = admitted.delay_ns.saturating_add(delay_ns);
                }
                Action::Jitter { up_to_ns } => {
                    let words = draw_key.words(DrawPurpose::Jitter);
                    let leaves_ns = now_ns.saturating_add(seed.below(up_to_ns.saturating_add(1), &words));
                    let busy_until_ns = &mut armed.busy_until_ns[direction as usize];
                    *busy_until_ns = leaves_ns.max(*busy_until_ns);
                    admitted.delay_ns = admitted.delay_ns.saturating_add(*busy_until_ns - now_ns);
                }
                Action::Hold { ns } if armed.counters().fired == 1 => {
                    half.hold_all(now_ns.saturating_add(ns))
                }
                Action::Hold { .. } => {}
                Action::LinkDown { directions: cut, for_ns } => {
                    let until_ns = now_ns.saturating_add(for_ns);
                    report(FaultEffect::LinkTakenDown { directions: cut, until_ns });
                    half.down_until_ns = half.down_until_ns.max(until_ns);
                    if cut == DownDirections::BothWays {
                        let other = &mut directions[direction.reverse() as usize];
                        other.down_until_ns = other.down_until_ns.max(until_ns);
                    }
                }
                Action::Corrupt { .. } | Action::MarkCe | Action::Rewrite { .. } => {
                    let effect = action.apply(&mut admitted.frame, observed.opcode, *seed, &draw_key);
                    effect.into_iter().for_each(report);
                }
            }
        }
        directions[direction as usize].transmit(now_ns, admitted, output);
    }
}

#[cfg(test)]
mod tests;
