//! A link in front of the sockets: the fabric's fault rules in real time.

use softhca_engine::Instant;
use softhca_fabric::{
    Direction, EventSink, Fault, FlowTable, Frame, Link, LinkId, LinkOutput, LinkSettings, LinkState,
    NetworkEvent, Rule, Seed,
};
use softhca_queue::SharedWords;
use std::collections::BTreeMap;

/// A link, and the frames that it delays.
pub(crate) struct FaultInjector {
    pub link: Link,
    pub flows: FlowTable,
    /// The direction in which this HCA sends, as rules that name a direction call it.
    direction: Direction,
    /// While the link is down, no frame leaves.
    state: LinkState,
    /// Frames that left the link, by time and sequence number.
    output: BTreeMap<(u64, u64), Frame>,
    serial: u64,
}

struct OutputQueue<'a> {
    output: &'a mut BTreeMap<(u64, u64), Frame>,
    serial: &'a mut u64,
    now: Instant,
    sink: &'a mut dyn EventSink,
}

impl LinkOutput for OutputQueue<'_> {
    fn deliver(&mut self, at_ns: u64, _: Direction, frame: Frame) {
        *self.serial += 1;
        self.output.insert((at_ns, *self.serial), frame);
    }

    fn report(&mut self, fault: Fault) {
        self.sink.on_event(self.now, &NetworkEvent::Fault { link: LinkId(0), fault: &fault });
    }
}

impl FaultInjector {
    /// Without rules. `counters` are those of the rules that links of other processes share.
    pub fn new(seed: u64, counters: Option<SharedWords>) -> FaultInjector {
        let mut link = Link::new(Seed(seed), LinkSettings::default());
        if let Some(counters) = counters {
            link.share_counters(counters);
        }
        FaultInjector {
            link,
            flows: FlowTable::new(),
            direction: Direction::Forward,
            state: LinkState::Up,
            output: BTreeMap::new(),
            serial: 0,
        }
    }

    pub fn add_rule(&mut self, rule: Rule) {
        self.direction = rule.selector.direction.unwrap_or(self.direction);
        self.link.add_rule(rule);
    }

    /// Takes the link down or brings it up.
    pub fn set_link_state(&mut self, state: LinkState) {
        self.state = state;
        for direction in [Direction::Forward, Direction::Backward] {
            self.link.set_state(direction, state);
        }
    }

    /// Whether the link is down.
    pub fn is_down(&self) -> bool {
        self.state == LinkState::Down
    }

    /// Removes all rules and flows. Delayed frames keep their time.
    pub fn clear(&mut self) {
        let rules: Vec<_> = self.link.rules().map(|(rule, _)| rule.id).collect();
        for id in rules {
            self.link.remove_rule(id);
        }
        self.flows = FlowTable::new();
    }

    /// Whether frames pass unchanged and none is delayed.
    pub fn is_idle(&self) -> bool {
        let idle = self.link.rules().next().is_none() && self.flows.iter().next().is_none();
        idle && self.state == LinkState::Up && !self.has_packets()
    }

    /// Whether packets wait in the link.
    pub fn has_packets(&self) -> bool {
        !self.output.is_empty() || self.link.next_timeout().is_some()
    }

    /// Applies the rules to a frame. Returns whether one holds it back for a while.
    pub fn admit(&mut self, now: Instant, frame: Frame, sink: &mut dyn EventSink) -> bool {
        let FaultInjector { link, flows, direction, output, serial, .. } = self;
        link.admit(now.nanos(), *direction, frame, flows, &mut OutputQueue { output, serial, now, sink });
        output.last_key_value().is_some_and(|((at, _), _)| *at > now.nanos()) || link.next_timeout().is_some()
    }

    pub fn expire(&mut self, now: Instant, sink: &mut dyn EventSink) {
        let FaultInjector { link, output, serial, .. } = self;
        if link.next_timeout().is_some_and(|at| at <= now.nanos()) {
            link.expire(now.nanos(), &mut OutputQueue { output, serial, now, sink });
        }
    }

    /// The next frame whose time has come. It stays the next while its destination takes none.
    pub fn first_due(&self, now_ns: u64) -> Option<&Frame> {
        let ((at, _), frame) = self.output.first_key_value()?;
        (*at <= now_ns).then_some(frame)
    }

    /// Takes the next frame.
    pub fn pop_first(&mut self) -> Option<Frame> {
        self.output.pop_first().map(|(_, frame)| frame)
    }

    /// When the next frame leaves the link. A frame whose destination `is_blocked` has no time of its own.
    pub fn next_timeout(&self, is_blocked: impl Fn(&Frame) -> bool) -> Option<u64> {
        let first = self.output.iter().next().filter(|(_, frame)| !is_blocked(frame));
        [first.map(|((at, _), _)| *at), self.link.next_timeout()].into_iter().flatten().min()
    }
}
