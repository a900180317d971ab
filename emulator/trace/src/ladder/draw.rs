//! Draws a ladder as text.

use super::{Fate, Ladder, Side, Sight, Step, Tone};
use crate::text::wrap;
use std::fmt::Write;

/// Whether the text is coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Paint {
    /// Plain text.
    #[default]
    None,
    /// Colours of a terminal.
    Ansi,
}

/// How a ladder is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Columns; fewer than 60 are taken for 60.
    pub width: usize,
    /// Whether it is coloured.
    pub paint: Paint,
}

impl Default for Style {
    fn default() -> Style {
        Style { width: 100, paint: Paint::None }
    }
}

const LEAST_WIDTH: usize = 60;
/// Columns of the time, and of the gap behind it.
const TIME: usize = 9;
const GAP: usize = 2;
/// Dashes between a label and the rail that it starts from.
const LEAD: usize = 2;

impl Ladder {
    /// The ladder as lines of text.
    pub fn draw(&self, style: Style) -> String {
        let width = style.width.max(LEAST_WIDTH);
        let times = self.steps.iter().map(|step| step.time_ns.unsigned_abs());
        let mut canvas = Canvas {
            text: String::new(),
            inner: width - TIME - GAP - 2,
            unit: Unit::for_times(times.max().unwrap_or(0)),
            paint: style.paint,
            open: [0; 2],
            time: None,
        };
        canvas.heading(&self.names);
        for step in &self.steps {
            canvas.step(step);
        }
        canvas.text
    }
}

/// The unit of the time column, and how many nanoseconds it has.
#[derive(Debug)]
struct Unit(&'static str, u64);

impl Unit {
    fn for_times(longest_ns: u64) -> Unit {
        match longest_ns {
            0..10_000_000 => Unit("µs", 1_000),
            10_000_000..10_000_000_000 => Unit("ms", 1_000_000),
            _ => Unit("s", 1_000_000_000),
        }
    }

    fn show(&self, time_ns: i64) -> String {
        let (sign, time) = (if time_ns < 0 { "-" } else { "" }, time_ns.unsigned_abs());
        format!("{sign}{}.{:03}", time / self.1, time % self.1 / (self.1 / 1_000))
    }
}

#[derive(Debug)]
pub(super) struct Canvas {
    text: String,
    /// Columns between the rails.
    inner: usize,
    unit: Unit,
    paint: Paint,
    /// Work requests under way, left and right.
    open: [i32; 2],
    /// The time that was shown last.
    time: Option<i64>,
}

impl Canvas {
    /// A canvas for rows that come one after the other, for as long as somebody looks.
    pub fn live(style: Style) -> Canvas {
        Canvas {
            text: String::new(),
            inner: style.width.max(LEAST_WIDTH) - TIME - GAP - 2,
            unit: Unit("ms", 1_000_000),
            paint: style.paint,
            open: [0; 2],
            time: None,
        }
    }

    /// Says again who is who.
    pub fn head(&mut self, names: &[String; 2]) {
        self.text.push('\n');
        self.heading(names);
        self.time = None;
    }

    /// What was drawn since it was last taken.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.text)
    }

    fn heading(&mut self, [left, right]: &[String; 2]) {
        let unit = self.unit.0;
        let room = (self.inner + 2).saturating_sub(left.chars().count());
        let gap = " ".repeat(GAP);
        if right.chars().count() < room {
            let _ = writeln!(self.text, "{unit:>TIME$}{gap}{left}{right:>room$}");
        } else {
            let _ = writeln!(self.text, "{unit:>TIME$}{gap}{left}");
            let _ = writeln!(self.text, "{:TIME$}{gap}{right:>width$}", "", width = self.inner + 2);
        }
    }

    pub fn step(&mut self, step: &Step) {
        let [left, right] = self.rails(step);
        match &step.sight {
            Sight::Note(text) => {
                for (number, line) in wrap(text, self.inner - 2).iter().enumerate() {
                    let rails = if number == 0 { [left, right] } else { self.idle() };
                    self.text_row(step, rails, line);
                }
            }
            Sight::Arrow { label, detail, remark, fate } => {
                let whole = if detail.is_empty() { label.clone() } else { format!("{label}, {detail}") };
                let least = 2 * LEAD + 4;
                let fits = whole.chars().count() + least <= self.inner;
                let (line, below) = if fits { (&whole[..], "") } else { (&label[..], &detail[..]) };
                let (arrow, beside) = self.arrow(line, remark, step.side, *fate);
                self.row(step, [left, right], &arrow);
                let remark = if beside { "" } else { &remark[..] };
                for text in [below, remark].iter().filter(|text| !text.is_empty()) {
                    for line in wrap(text, self.inner - 6) {
                        self.text_row(step, self.idle(), &format!("    {line}"));
                    }
                }
            }
        }
    }

    /// The arrow, and whether the remark stands beside it.
    fn arrow(&self, label: &str, remark: &str, side: Side, fate: Fate) -> (String, bool) {
        let used = label.chars().count() + 2 + LEAD;
        let length = match fate {
            Fate::Arrives => self.inner,
            // A lost packet does not come far.
            Fate::Lost => (used + 4).max(self.inner * 3 / 5).min(self.inner - 2),
        };
        let room = self.inner - length;
        let beside = fate == Fate::Lost && !remark.is_empty() && remark.chars().count() + 2 <= room;
        let shaft = "─".repeat(length.saturating_sub(used + 1));
        let lead = "─".repeat(LEAD);
        let after = if beside { remark } else { "" };
        let (rest, padding) = (room.saturating_sub(1), if room > 0 { " " } else { "" });
        let arrow = match side {
            Side::Left => {
                let head = if fate == Fate::Lost { "╳" } else { "▶" };
                format!("{lead} {label} {shaft}{head}{padding}{after:<rest$}")
            }
            Side::Right => {
                let head = if fate == Fate::Lost { "╳" } else { "◀" };
                format!("{after:>rest$}{padding}{head}{shaft} {label} {lead}")
            }
        };
        (arrow, beside)
    }

    fn text_row(&mut self, step: &Step, rails: [char; 2], text: &str) {
        let room = self.inner - 2;
        let middle = match step.side {
            Side::Left => format!(" {text:<room$} "),
            Side::Right => format!(" {:>room$} ", text.trim_start()),
        };
        self.row(step, rails, &middle);
    }

    fn row(&mut self, step: &Step, [left, right]: [char; 2], middle: &str) {
        let time = if self.time == Some(step.time_ns) { String::new() } else { self.unit.show(step.time_ns) };
        self.time = Some(step.time_ns);
        let middle = self.coloured(step.tone, middle);
        let _ = writeln!(self.text, "{time:>TIME$}{:GAP$}{left}{middle}{right}", "");
    }

    fn coloured(&self, tone: Tone, text: &str) -> String {
        let code = match tone {
            _ if self.paint == Paint::None => return text.into(),
            Tone::Plain => return text.into(),
            Tone::Good => 32,
            Tone::Odd => 33,
            Tone::Bad => 31,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    /// The rails where nothing begins or ends: thick while a work request is under way.
    fn idle(&self) -> [char; 2] {
        self.open.map(|open| if open > 0 { '┃' } else { '│' })
    }

    /// The rails at a step, after which other work requests may be under way.
    fn rails(&mut self, step: &Step) -> [char; 2] {
        let idle = self.idle();
        let is_arrow = matches!(step.sight, Sight::Arrow { .. });
        std::array::from_fn(|end| {
            let change = step.bars[end];
            let before = self.open[end];
            let after = (before + change).max(0);
            self.open[end] = after;
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
            bars: [0; 2],
            tone: Tone::Plain,
            sight: Sight::Arrow {
                label: "READ_RESPONSE_MIDDLE +12".into(),
                detail: "1024 B".into(),
                remark: "dropped by \"lose the second packet\"".into(),
                fate,
            },
        };
        let note = |side| Step {
            time_ns: 0,
            side,
            bars: [1, -1],
            tone: Tone::Bad,
            sight: Sight::Note("all work and no play ".repeat(6).trim_end().into()),
        };
        let mut steps = Vec::new();
        for side in [Side::Left, Side::Right] {
            steps.extend([note(side), arrow(side, Fate::Lost), arrow(side, Fate::Arrives)]);
        }
        let names = ["alice.1 (10.0.0.1)".into(), "bob.1 (10.0.0.2)".into()];
        let ladder = Ladder { names, numbers: [None; 2], steps };
        for width in [60, 80, 100, 160] {
            let text = ladder.draw(Style { width, paint: Paint::None });
            for line in text.lines() {
                assert_eq!(line.chars().count(), width, "{width}\n{text}");
            }
        }
        let painted = ladder.draw(Style { width: 80, paint: Paint::Ansi });
        assert!(painted.contains("\x1b[31m"));
    }
}
