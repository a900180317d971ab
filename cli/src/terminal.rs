//! What the terminal is like, and lines for it.

use softhca_trace::{ColorMode, LadderStyle};
use std::fmt;
use std::io::{self, IsTerminal, Write};

/// Writes a line to standard output, as `println!` does, and ends the command when nobody reads it any more.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::terminal::print_line(format_args!($($text)*))
    };
}

/// What [`say`] writes. A reader that has gone, as `head` does, is no error: there is nobody left to work for.
pub fn print_line(text: fmt::Arguments<'_>) {
    if let Err(error) = writeln!(io::stdout().lock(), "{text}") {
        if error.kind() == io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        eprintln!("softhca: cannot write to standard output: {error}");
        std::process::exit(1);
    }
}

/// As wide as the terminal, and in colour there unless NO_COLOR asks for none.
pub fn style() -> LadderStyle {
    let terminal = io::stdout().is_terminal();
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let width = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    let default = LadderStyle::default();
    LadderStyle {
        width: width.filter(|_| terminal).unwrap_or(default.width),
        color: if terminal && !plain { ColorMode::Ansi } else { ColorMode::Plain },
    }
}
