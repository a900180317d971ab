//! Draws a ladder as text.

use super::{Delivery, Emphasis, Ladder, Side, Step, StepContent};
use crate::text::wrap;
use std::fmt::Write;

/// Whether the text is coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ColorMode {
    /// Plain text.
    #[default]
    Plain,
    /// Colours of a terminal.
    Ansi,
    /// ANSI colours with this number after each escape character. The caller removes the number again. If it is
    /// unpredictable, names in the ladder cannot have colours of their own.
    Marked(u64),
}

/// How a ladder is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LadderStyle {
    /// Columns; fewer than 60 are taken for 60.
    pub width: usize,
    /// Whether it is coloured.
    pub color: ColorMode,
}

impl Default for LadderStyle {
    fn default() -> LadderStyle {
        LadderStyle { width: 100, color: ColorMode::Plain }
    }
}

const MIN_WIDTH: usize = 60;
/// Columns of the time, and of the gap behind it.
const TIME_COLUMNS: usize = 9;
const GAP_COLUMNS: usize = 2;
/// Dashes between a label and the rail that it starts from.
const LEAD_COLUMNS: usize = 2;

impl Ladder {
    /// The ladder as lines of text.
    pub fn draw(&self, style: LadderStyle) -> String {
        let times = self.steps.iter().map(|step| step.time_ns.unsigned_abs());
        let mut canvas = Canvas::new(style, TimeUnit::for_times(times.max().unwrap_or(0)));
        canvas.write_heading(&self.names);
        for step in &self.steps {
            canvas.write_step(step);
        }
        canvas.text
    }
}

/// The unit of the time column, and how many nanoseconds it has.
#[derive(Debug)]
struct TimeUnit(&'static str, u64);

impl TimeUnit {
    fn for_times(longest_ns: u64) -> TimeUnit {
        match longest_ns {
            0..10_000_000 => TimeUnit("µs", 1_000),
            10_000_000..10_000_000_000 => TimeUnit("ms", 1_000_000),
            _ => TimeUnit("s", 1_000_000_000),
        }
    }

    fn format(&self, time_ns: i64) -> String {
        let (sign, time) = (if time_ns < 0 { "-" } else { "" }, time_ns.unsigned_abs());
        format!("{sign}{}.{:03}", time / self.1, time % self.1 / (self.1 / 1_000))
    }
}

#[derive(Debug)]
pub(super) struct Canvas {
    text: String,
    /// Columns between the rails.
    inner_width: usize,
    unit: TimeUnit,
    color: ColorMode,
    /// Work requests under way, left and right.
    outstanding: [i32; 2],
    /// The time that was shown last.
    last_time_ns: Option<i64>,
}

impl Canvas {
    fn new(style: LadderStyle, unit: TimeUnit) -> Canvas {
        let inner_width = style.width.max(MIN_WIDTH) - TIME_COLUMNS - GAP_COLUMNS - 2;
        let (text, color) = (String::new(), style.color);
        Canvas { text, inner_width, unit, color, outstanding: [0; 2], last_time_ns: None }
    }

    /// A canvas for rows that come one after the other.
    pub fn live(style: LadderStyle) -> Canvas {
        Canvas::new(style, TimeUnit("ms", 1_000_000))
    }

    /// Repeats the heading.
    pub fn repeat_heading(&mut self, names: &[String; 2]) {
        self.text.push('\n');
        self.write_heading(names);
        self.last_time_ns = None;
    }

    /// Takes the text that was drawn since the last call.
    pub fn take_text(&mut self) -> String {
        std::mem::take(&mut self.text)
    }

    fn write_heading(&mut self, [left, right]: &[String; 2]) {
        let unit = self.unit.0;
        let room = (self.inner_width + 2).saturating_sub(left.chars().count());
        let gap = " ".repeat(GAP_COLUMNS);
        if right.chars().count() < room {
            let _ = writeln!(self.text, "{unit:>TIME_COLUMNS$}{gap}{left}{right:>room$}");
        } else {
            let _ = writeln!(self.text, "{unit:>TIME_COLUMNS$}{gap}{left}");
            let _ =
                writeln!(self.text, "{:TIME_COLUMNS$}{gap}{right:>width$}", "", width = self.inner_width + 2);
        }
    }

    pub fn write_step(&mut self, write_step: &Step) {
        let [left, right] = self.rails(write_step);
        match &write_step.content {
            StepContent::Note(text) => {
                for (number, line) in wrap(text, self.inner_width - 2).iter().enumerate() {
                    let rails = if number == 0 { [left, right] } else { self.idle_rails() };
                    self.write_text_row(write_step, rails, line);
                }
            }
            StepContent::Arrow { label, detail, remark, fate } => {
                let whole = if detail.is_empty() { label.clone() } else { format!("{label}, {detail}") };
                let least = 2 * LEAD_COLUMNS + 4;
                let fits = whole.chars().count() + least <= self.inner_width;
                let (line, below) = if fits { (&whole[..], "") } else { (&label[..], &detail[..]) };
                let (arrow, beside) = self.arrow_text(line, remark, write_step.side, *fate);
                self.write_row(write_step, [left, right], &arrow);
                let remark = if beside { "" } else { &remark[..] };
                for text in [below, remark].iter().filter(|text| !text.is_empty()) {
                    for line in wrap(text, self.inner_width - 6) {
                        self.write_text_row(write_step, self.idle_rails(), &format!("    {line}"));
                    }
                }
            }
        }
    }

    /// The arrow, and whether the remark is beside it.
    fn arrow_text(&self, label: &str, remark: &str, side: Side, fate: Delivery) -> (String, bool) {
        let used = label.chars().count() + 2 + LEAD_COLUMNS;
        let length = match fate {
            Delivery::Delivered => self.inner_width,
            // A lost packet does not come far.
            Delivery::Lost => (used + 4).max(self.inner_width * 3 / 5).min(self.inner_width - 2),
        };
        let room = self.inner_width - length;
        let beside = fate == Delivery::Lost && !remark.is_empty() && remark.chars().count() + 2 <= room;
        let shaft = "─".repeat(length.saturating_sub(used + 1));
        let lead = "─".repeat(LEAD_COLUMNS);
        let after = if beside { remark } else { "" };
        let (rest, padding) = (room.saturating_sub(1), if room > 0 { " " } else { "" });
        let arrow = match side {
            Side::Left => {
                let head = if fate == Delivery::Lost { "╳" } else { "▶" };
                format!("{lead} {label} {shaft}{head}{padding}{after:<rest$}")
            }
            Side::Right => {
                let head = if fate == Delivery::Lost { "╳" } else { "◀" };
                format!("{after:>rest$}{padding}{head}{shaft} {label} {lead}")
            }
        };
        (arrow, beside)
    }

    fn write_text_row(&mut self, step: &Step, rails: [char; 2], text: &str) {
        let room = self.inner_width - 2;
        let middle = match step.side {
            Side::Left => format!(" {text:<room$} "),
            Side::Right => format!(" {:>room$} ", text.trim_start()),
        };
        self.write_row(step, rails, &middle);
    }

    fn write_row(&mut self, step: &Step, [left, right]: [char; 2], middle: &str) {
        let time = if self.last_time_ns == Some(step.time_ns) {
            String::new()
        } else {
            self.unit.format(step.time_ns)
        };
        self.last_time_ns = Some(step.time_ns);
        let middle = self.colored(step.emphasis, middle);
        let _ = writeln!(self.text, "{time:>TIME_COLUMNS$}{:GAP_COLUMNS$}{left}{middle}{right}", "");
    }

    fn colored(&self, tone: Emphasis, text: &str) -> String {
        let mark = match self.color {
            ColorMode::Plain => return text.into(),
            ColorMode::Ansi => String::new(),
            ColorMode::Marked(number) => format!("{number:016x}"),
        };
        let code = match tone {
            Emphasis::Normal => return text.into(),
            Emphasis::Success => 32,
            Emphasis::Unusual => 33,
            Emphasis::Error => 31,
        };
        format!("\x1b{mark}[{code}m{text}\x1b{mark}[0m")
    }

    /// The rails where nothing begins or ends: thick while a work request is under way.
    fn idle_rails(&self) -> [char; 2] {
        self.outstanding.map(|open| if open > 0 { '┃' } else { '│' })
    }

    /// The rails at a step, after which other work requests may be under way.
    fn rails(&mut self, step: &Step) -> [char; 2] {
        let idle = self.idle_rails();
        let is_arrow = matches!(step.content, StepContent::Arrow { .. });
        std::array::from_fn(|end| {
            let change = step.outstanding_delta[end];
            let before = self.outstanding[end];
            let after = (before + change).max(0);
            self.outstanding[end] = after;
            let starts_here = is_arrow && (end == 0) == (step.side == Side::Left);
            let marks = match (change.signum(), before, after) {
                (1, 0, _) => ['┏', '┓'],
                (-1, 1.., 0) => ['┗', '┛'],
                (1 | -1, 1.., _) => ['┣', '┫'],
                _ if starts_here && before > 0 => ['┠', '┨'],
                _ if starts_here => ['├', '┤'],
                _ => [idle[end]; 2],
            };
            marks[end]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_as_wide_as_asked_for() {
        let arrow = |side, fate| Step {
            time_ns: 1_500,
            side,
            outstanding_delta: [0; 2],
            emphasis: Emphasis::Normal,
            content: StepContent::Arrow {
                label: "READ_RESPONSE_MIDDLE +12".into(),
                detail: "1024 B".into(),
                remark: "dropped by \"lose the second packet\"".into(),
                fate,
            },
        };
        let text = "all work and no play ".repeat(6);
        let note = |side| Step {
            outstanding_delta: [1, -1],
            ..Step::note(0, side, Emphasis::Error, text.trim_end().into())
        };
        let mut steps = Vec::new();
        for side in [Side::Left, Side::Right] {
            steps.extend([note(side), arrow(side, Delivery::Lost), arrow(side, Delivery::Delivered)]);
        }
        let names = ["alice.1 (10.0.0.1)".into(), "bob.1 (10.0.0.2)".into()];
        let ladder = Ladder { names, qpns: [None; 2], steps };
        for width in [60, 80, 100, 160] {
            let text = ladder.draw(LadderStyle { width, color: ColorMode::Plain });
            for line in text.lines() {
                assert_eq!(line.chars().count(), width, "{width}\n{text}");
            }
        }
        let painted = ladder.draw(LadderStyle { width: 80, color: ColorMode::Ansi });
        assert!(painted.contains("\x1b[31m"));
    }
}
