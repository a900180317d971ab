//! The terminal: lines, width, colour and progress bars.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use softhca_trace::{ColorMode, LadderStyle};
use std::fmt;
use std::io::{self, IsTerminal, Write};

/// Writes a line to standard output, as `println!` does, and exits if the reader has closed it.
macro_rules! outln {
    ($($text:tt)*) => {
        $crate::terminal::print_line(format_args!($($text)*))
    };
}

/// The function behind [`outln`]. A closed pipe, as after `head`, is not an error: the command exits with 0.
pub fn print_line(text: fmt::Arguments<'_>) {
    if let Err(error) = writeln!(io::stdout().lock(), "{text}") {
        if error.kind() == io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        eprintln!("softhca: cannot write to standard output: {error}");
        std::process::exit(1);
    }
}

/// The terminal's width, and colour on a terminal unless NO_COLOR is set.
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

/// A progress bar on standard error; invisible if that is not a terminal.
pub fn progress_bar(length: u64, template: &str) -> ProgressBar {
    let bar = match io::stderr().is_terminal() {
        true => ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr()),
        false => ProgressBar::hidden(),
    };
    bar.with_style(ProgressStyle::with_template(template).expect("a valid template"))
}
