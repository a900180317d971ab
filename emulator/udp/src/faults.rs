//! The cable before a socket: the fabric's fault rules in real time.

use crate::Witness;
use softhca_engine::Instant;
use softhca_fabric::{Cable, Direction, Fault, Flows, Frame, Line, LinkState, Outlet, Rule, Seed};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// A cable, and the frames that it holds until their time has come.
pub(crate) struct Faults {
    pub cable: Cable,
    pub flows: Flows,
    /// Which way this card's end of the cable sends: a rule that names a direction says so.
    direction: Direction,
    /// Whether the port is down: nothing leaves.
    state: LinkState,
    /// Frames that came out of the cable, by time and order.
    out: BTreeMap<(u64, u64), Frame>,
    serial: u64,
}

struct Exit<'a> {
    out: &'a mut BTreeMap<(u64, u64), Frame>,
    serial: &'a mut u64,
    now: Instant,
    witness: &'a mut dyn Witness,
}

impl Outlet for Exit<'_> {
    fn deliver(&mut self, at_ns: u64, _: Direction, frame: Frame) {
        *self.serial += 1;
        self.out.insert((at_ns, *self.serial), frame);
    }

    fn report(&mut self, fault: Fault) {
        self.witness.fault(self.now, &fault);
    }
}

impl Faults {
    pub fn new(seed: u64) -> Faults {
        Faults {
            cable: Cable::new(Seed(seed), Line::default()),
            flows: Flows::new(),
            direction: Direction::Forward,
            state: LinkState::Up,
            out: BTreeMap::new(),
            serial: 0,
        }
    }

    pub fn add_rule(&mut self, rule: Rule) {
        self.direction = rule.selector.direction.unwrap_or(self.direction);
        self.cable.add_rule(rule);
    }

    /// Takes the cable down or brings it up.
    pub fn set_link(&mut self, state: LinkState) {
        self.state = state;
        for direction in [Direction::Forward, Direction::Backward] {
            self.cable.set_link(direction, state);
        }
    }

    /// Takes all rules and flows away. What is held back stays until its time.
    pub fn clear(&mut self) {
        let rules: Vec<_> = self.cable.rules().map(|(rule, _)| rule.id).collect();
        for id in rules {
            self.cable.remove_rule(id);
        }
        self.flows = Flows::new();
    }

    /// Whether there is nothing that a frame would have to pass.
    pub fn is_done(&self) -> bool {
        let idle = self.cable.rules().next().is_none() && self.flows.iter().next().is_none();
        idle && self.state == LinkState::Up && self.out.is_empty() && self.cable.next_timeout().is_none()
    }

    pub fn admit(&mut self, now: Instant, frame: Frame, witness: &mut dyn Witness) {
        let Faults { cable, flows, direction, out, serial, .. } = self;
        cable.admit(now.nanos(), *direction, frame, flows, &mut Exit { out, serial, now, witness });
    }

    pub fn expire(&mut self, now: Instant, witness: &mut dyn Witness) {
        let Faults { cable, out, serial, .. } = self;
        if cable.next_timeout().is_some_and(|at| at <= now.nanos()) {
            cable.expire(now.nanos(), &mut Exit { out, serial, now, witness });
        }
    }

    /// The next frame whose time has come.
    pub fn due(&mut self, now_ns: u64) -> Option<Frame> {
        let entry = self.out.first_entry()?;
        if entry.key().0 > now_ns { None } else { Some(entry.remove()) }
    }

    /// Keeps a frame that could not be sent: it goes first at the next try.
    pub fn put_back(&mut self, now_ns: u64, frame: Frame) {
        self.out.insert((now_ns, 0), frame);
    }

    /// When the next frame leaves or is let go. One whose destination `waits` for a grant has no time of its own.
    pub fn next_timeout(&self, waits: impl Fn(IpAddr) -> bool) -> Option<u64> {
        let first = self.out.iter().next().filter(|(_, frame)| !waits(frame.envelope.destination));
        [first.map(|((at, _), _)| *at), self.cable.next_timeout()].into_iter().flatten().min()
    }
}
