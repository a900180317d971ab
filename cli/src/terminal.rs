//! What the terminal is like.

use softhca_trace::{Paint, Style};
use std::io::{self, IsTerminal};

/// As wide as the terminal, and in colour there unless NO_COLOR asks for none.
pub fn style() -> Style {
    let terminal = io::stdout().is_terminal();
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let width = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    let default = Style::default();
    Style {
        width: width.filter(|_| terminal).unwrap_or(default.width),
        paint: if terminal && !plain { Paint::Ansi } else { Paint::None },
    }
}
