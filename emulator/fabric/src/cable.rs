//! A cable: two directions, a line that both share, and the fault rules.

use crate::lane::{Lane, Shipment};
use crate::rule::Armed;
use crate::{
    Action, Cause, Cut, Direction, Effect, Fault, Flows, Frame, History, Ledger, Line, Outlet, Rule, RuleId,
    Seed, Sighting, Tally,
};
use alloc::vec::Vec;

/// Whether one direction of a link carries frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// It does.
    Up,
    /// Every frame is lost until the link is told to be up.
    Down,
}

/// A cable between two ports.
///
/// Every frame admitted goes through the rules in the order in which they were added, until one drops it or
/// holds it back; all of them see it as it was admitted. What is left is put on the line.
#[derive(Clone, Debug)]
pub struct Cable {
    lanes: [Lane; 2],
    seed: Seed,
    rules: Vec<Armed>,
    /// Kept only if a rule looks back.
    history: Option<History>,
}

impl Cable {
    /// A cable without rules. The seed decides every draw; cables may share it.
    pub const fn new(seed: Seed, line: Line) -> Cable {
        let lanes = [Lane::new(Direction::Forward, line), Lane::new(Direction::Backward, line)];
        Cable { lanes, seed, rules: Vec::new(), history: None }
    }

    /// Adds a rule behind the others.
    pub fn add_rule(&mut self, rule: Rule) {
        if rule.looks_back() {
            self.history.get_or_insert_default();
        }
        self.rules.push(Armed::new(rule));
        self.look();
    }

    /// Sees again where frames pass unhindered.
    fn look(&mut self) {
        let has_rules = !self.rules.is_empty();
        self.lanes.iter_mut().for_each(|lane| lane.look(has_rules));
    }

    /// Takes a rule away and returns how often it fired. Frames that it held back still go their way.
    pub fn remove_rule(&mut self, id: RuleId) -> Option<Tally> {
        let index = self.rules.iter().position(|armed| armed.rule.id == id)?;
        let tally = self.rules.remove(index).tally;
        if !self.rules.iter().any(|armed| armed.rule.looks_back()) {
            self.history = None;
        }
        self.look();
        Some(tally)
    }

    /// The rules in their order, and how often each fired.
    pub fn rules(&self) -> impl Iterator<Item = (&Rule, Tally)> {
        self.rules.iter().map(|armed| (&armed.rule, armed.tally))
    }

    /// Whether a rule may let frames overtake each other.
    pub fn reorders(&self) -> bool {
        let overtakes = |action| matches!(action, Action::Reorder { .. } | Action::Delay { .. });
        self.rules.iter().any(|armed| overtakes(armed.rule.action))
    }

    /// The line.
    pub const fn line(&self) -> &Line {
        self.lanes[0].line()
    }

    /// Changes the line for frames that are admitted from now on.
    pub fn set_line(&mut self, line: Line) {
        self.lanes.iter_mut().for_each(|lane| lane.set_line(line));
    }

    /// Takes one direction down or brings it up. Frames that already left the sender arrive.
    pub fn set_link(&mut self, direction: Direction, state: LinkState) {
        self.lanes[direction as usize].down_until_ns = match state {
            LinkState::Up => 0,
            LinkState::Down => u64::MAX,
        };
        self.look();
    }

    /// Whether one direction carries frames.
    pub const fn link(&self, now_ns: u64, direction: Direction) -> LinkState {
        match now_ns < self.lanes[direction as usize].down_until_ns {
            true => LinkState::Down,
            false => LinkState::Up,
        }
    }

    /// When the last bit of everything admitted has left the sender: a port that waits for this time keeps
    /// its queue to itself.
    pub const fn free_at_ns(&self, direction: Direction) -> u64 {
        self.lanes[direction as usize].busy_until_ns()
    }

    /// What became of the frames of one direction.
    pub const fn ledger(&self, direction: Direction) -> Ledger {
        self.lanes[direction as usize].account()
    }

    /// When [`Cable::expire`] has something to do, if nothing is admitted before.
    pub fn next_timeout(&self) -> Option<u64> {
        self.lanes.iter().filter_map(Lane::next_timeout).min()
    }

    /// Lets go of frames that were held back for long enough.
    pub fn expire(&mut self, now_ns: u64, outlet: &mut dyn Outlet) {
        for lane in &mut self.lanes {
            lane.expire(now_ns, outlet);
        }
        self.look();
    }

    /// Takes a frame that nothing can happen to, and tells when it arrives: no rule is there to look at it, the
    /// line carries it and nothing waits for it to pass. Otherwise it is to be admitted. Its bytes are those that it
    /// takes in a buffer.
    #[inline]
    pub(crate) fn pass(
        &mut self,
        now_ns: u64,
        direction: Direction,
        bytes: usize,
        is_pause: bool,
    ) -> Option<u64> {
        let packet_length = if is_pause { 0 } else { bytes - Frame::ETHERNET };
        self.lanes[direction as usize].pass(now_ns, packet_length, bytes + Frame::BETWEEN)
    }

    /// Takes a frame at the end where `direction` starts. `now_ns` never goes back.
    pub fn admit(
        &mut self,
        now_ns: u64,
        direction: Direction,
        frame: Frame,
        flows: &Flows,
        outlet: &mut dyn Outlet,
    ) {
        self.judge(now_ns, direction, frame, flows, outlet);
        self.look();
    }

    /// Takes a frame through the rules.
    fn judge(
        &mut self,
        now_ns: u64,
        direction: Direction,
        frame: Frame,
        flows: &Flows,
        outlet: &mut dyn Outlet,
    ) {
        let Cable { lanes, seed, rules, history } = self;
        let lane = &mut lanes[direction as usize];
        lane.expire(now_ns, outlet);
        lane.ledger.admitted += 1;
        if rules.is_empty() && lane.obstacle(now_ns, &frame).is_none() {
            return lane.ship_unseen(now_ns, frame, outlet);
        }
        let sighting = match history {
            Some(history) => history.observe(&frame, flows),
            None => Sighting::of(&frame, flows),
        };
        let mut shipment = Shipment { frame, sighting, copies: 0, delay_ns: 0 };
        for armed in rules {
            let id = armed.rule.id;
            let verdict = armed.judge(now_ns, direction, *seed, &shipment.frame, &sighting);
            let Some((action, question)) = verdict else { continue };
            let mut report = |effect| {
                outlet.report(Fault { at_ns: now_ns, direction, cause: Cause::Rule(id), effect, sighting });
            };
            let lane = &mut lanes[direction as usize];
            match action {
                Action::Count => {}
                Action::Drop => return lane.discard(now_ns, Cause::Rule(id), &shipment, outlet),
                Action::Duplicate { copies } => {
                    report(Effect::Duplicated { copies });
                    lane.ledger.duplicated += u64::from(copies);
                    shipment.copies += u64::from(copies);
                }
                Action::Reorder { by, within_ns } => {
                    report(Effect::HeldBack { by });
                    return lane.hold(shipment, by, now_ns.saturating_add(within_ns));
                }
                Action::Delay { ns } => {
                    report(Effect::Delayed { ns });
                    shipment.delay_ns = shipment.delay_ns.saturating_add(ns);
                }
                Action::LinkDown { cut, for_ns } => {
                    let until_ns = now_ns.saturating_add(for_ns);
                    report(Effect::LinkCut { cut, until_ns });
                    lane.down_until_ns = lane.down_until_ns.max(until_ns);
                    if cut == Cut::BothWays {
                        let other = &mut lanes[direction.reverse() as usize];
                        other.down_until_ns = other.down_until_ns.max(until_ns);
                    }
                }
                Action::Corrupt { .. } | Action::MarkCe | Action::Rewrite { .. } => {
                    let effect = action.alter(&mut shipment.frame, sighting.opcode, *seed, &question);
                    effect.into_iter().for_each(report);
                }
            }
        }
        lanes[direction as usize].ship(now_ns, shipment, outlet);
    }
}

#[cfg(test)]
mod tests;
