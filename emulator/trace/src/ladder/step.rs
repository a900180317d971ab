//! A ladder and its steps.

use crate::log::Emphasis;

/// The left or the right of a ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// The side that appears first.
    Left,
    /// The other.
    Right,
}

impl Side {
    /// The side across.
    pub const fn opposite(self) -> Side {
        match self {
            Side::Left => Side::Right,
            Side::Right => Side::Left,
        }
    }
}

/// Whether a packet reaches the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It does, as far as is known.
    Delivered,
    /// It is lost on the way.
    Lost,
}

/// The contents of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepContent {
    /// A packet, or several alike.
    Arrow {
        /// Its label: `WRITE_FIRST +0`.
        label: String,
        /// Its contents: `1024 B`. May be empty.
        detail: String,
        /// Remarks about its way. May be empty.
        remark: String,
        /// Whether it arrives.
        fate: Delivery,
    },
    /// Something that happened at one side.
    Note(String),
}

/// One step of a ladder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// When, in nanoseconds.
    pub time_ns: i64,
    /// The side at which it starts.
    pub side: Side,
    /// How many work requests begin (above zero) or end (below) with it, left and right.
    pub outstanding_delta: [i32; 2],
    /// Whether the line reports a success or a failure.
    pub emphasis: Emphasis,
    /// Its contents.
    pub content: StepContent,
}

impl Step {
    pub(super) fn note(time_ns: i64, side: Side, emphasis: Emphasis, text: String) -> Step {
        Step { time_ns, side, outstanding_delta: [0; 2], emphasis, content: StepContent::Note(text) }
    }
}

/// Everything that was seen of one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ladder {
    /// The names of the two sides.
    pub names: [String; 2],
    /// The queue pair numbers of the two sides, where known.
    pub qpns: [Option<softhca_wire::Qpn>; 2],
    /// Its steps, in order.
    pub steps: Vec<Step>,
}

impl Ladder {
    /// Whether one side is this queue pair: its number, decimal or with `0x`, or its name.
    pub fn involves(&self, queue_pair: &str) -> bool {
        let named = |name: &String| name.split(' ').next() == Some(queue_pair);
        matches_qpn(queue_pair, &self.qpns) || self.names.iter().any(named)
    }

    /// Leaves out what happened before `from` and after `to`, in nanoseconds.
    pub fn retain_range(&mut self, from: i64, to: i64) {
        self.steps.retain(|step| (from..=to).contains(&step.time_ns));
    }
}

/// Whether a number, decimal or with `0x`, is that of one of these queue pairs.
pub(super) fn matches_qpn(number: &str, queue_pairs: &[Option<softhca_wire::Qpn>]) -> bool {
    let number = match number.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => number.parse(),
    };
    number.is_ok_and(|number| queue_pairs.iter().flatten().any(|qpn| qpn.value() == number))
}
