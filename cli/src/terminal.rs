//! The terminal: lines, width, colour and progress bars.

use clap::{ColorChoice, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use softhca_trace::{ColorMode, LadderStyle};
use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::time::Duration;

/// Writes a line to standard output, as `println!` does, and exits if the reader has closed it.
macro_rules! outln {
    ($($text:tt)*) => {
        $crate::terminal::print_line(format_args!($($text)*))
    };
}

/// Writes a line to standard error, as `eprintln!` does.
macro_rules! errln {
    ($($text:tt)*) => {
        $crate::terminal::print_error(format_args!($($text)*))
    };
}

/// Writes a message to standard error after the name of the command: `softhca run: ...`.
macro_rules! warnln {
    ($($text:tt)*) => {
        $crate::terminal::print_error(format_args!(
            "{}: {}", $crate::terminal::command_name(), format_args!($($text)*)
        ))
    };
}

/// The name that begins every message.
static COMMAND_NAME: OnceLock<String> = OnceLock::new();

/// Sets the name of the subcommand.
pub fn set_command_name(subcommand: &str) {
    let _ = COMMAND_NAME.set(format!("softhca {subcommand}"));
}

/// The command as messages name it: `softhca run`.
pub fn command_name() -> &'static str {
    COMMAND_NAME.get().map_or("softhca", String::as_str)
}

/// The function behind [`outln`]. A closed pipe, as after `head`, is not an error: the command exits with 0.
pub fn print_line(text: fmt::Arguments<'_>) {
    if let Err(error) = writeln!(io::stdout().lock(), "{}", printable(&text.to_string())) {
        if error.kind() == io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        warnln!("cannot write to standard output: {error}");
        std::process::exit(1);
    }
}

/// The function behind [`errln`]. Standard error may be closed.
pub fn print_error(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{}", printable(&text.to_string()));
}

/// The text with the characters escaped that a terminal would act on. Titles, names and comments of files, captures and
/// peers may contain them. The escapes are those of JSON, so that a line of JSON stays one. The colours of ladders in
/// [`style`] stay.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_harmful = |c: char| {
        (c.is_control() && !matches!(c, '\n' | '\t'))
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(is_harmful) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if let Some((code, after)) = split_color(rest) {
            escaped.push_str(&format!("\x1b[{code}m"));
            rest = after;
            continue;
        }
        match is_harmful(c) {
            true => escaped.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => escaped.push(c),
        }
        rest = &rest[c.len_utf8()..];
    }
    escaped.into()
}

/// Splits a colour of a ladder from the start of the text. Names and titles do not know the mark.
fn split_color(text: &str) -> Option<(&str, &str)> {
    let marked = text.strip_prefix('\x1b')?;
    let (code, after) = marked.strip_prefix(&format!("{:016x}[", color_mark()))?.split_once('m')?;
    ["0", "31", "32", "33"].contains(&code).then_some((code, after))
}

/// The number that marks the colours of ladders: unpredictable, and the same until the command ends.
fn color_mark() -> u64 {
    static MARK: OnceLock<u64> = OnceLock::new();
    *MARK.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// A writer whose text passes through [`printable`], line by line.
pub struct PrintableWriter<W: Write> {
    output: W,
    line: Vec<u8>,
}

impl<W: Write> PrintableWriter<W> {
    /// Writes to `output`.
    pub fn new(output: W) -> PrintableWriter<W> {
        PrintableWriter { output, line: Vec::new() }
    }
}

impl<W: Write> Write for PrintableWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.line.extend_from_slice(bytes);
        if let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') {
            let rest = self.line.split_off(self.line.len() - (bytes.len() - end - 1));
            let lines = std::mem::replace(&mut self.line, rest);
            self.output.write_all(printable(&String::from_utf8_lossy(&lines)).as_bytes())?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let rest = std::mem::take(&mut self.line);
        self.output.write_all(printable(&String::from_utf8_lossy(&rest)).as_bytes())?;
        self.output.flush()
    }
}

/// When output has colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    #[default]
    Auto,
    Always,
    Never,
}

impl From<Color> for ColorChoice {
    fn from(color: Color) -> ColorChoice {
        match color {
            Color::Auto => ColorChoice::Auto,
            Color::Always => ColorChoice::Always,
            Color::Never => ColorChoice::Never,
        }
    }
}

static COLOR: OnceLock<Color> = OnceLock::new();

/// Sets the colours of the command.
pub fn set_color(color: Color) {
    let _ = COLOR.set(color);
}

/// The value of `--color`, before the command line is parsed: help has colours too. The words of a program after `--`
/// have no options of ours.
pub fn color_option(words: impl Iterator<Item = OsString>) -> Color {
    let mut words = words.map_while(|word| word.into_string().ok()).take_while(|word| word != "--");
    while let Some(word) = words.next() {
        let value = match word.strip_prefix("--color") {
            Some("") => words.next(),
            Some(rest) => rest.strip_prefix('=').map(str::to_owned),
            None => None,
        };
        if let Some(color) = value.and_then(|value| Color::from_str(&value, false).ok()) {
            return color;
        }
    }
    Color::Auto
}

/// The terminal's width, and whether output has colours.
pub fn style() -> LadderStyle {
    let terminal = io::stdout().is_terminal();
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colored = match COLOR.get().copied().unwrap_or_default() {
        Color::Auto => terminal && !no_color,
        Color::Always => true,
        Color::Never => false,
    };
    let width = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    let default = LadderStyle::default();
    LadderStyle {
        width: width.filter(|_| terminal).unwrap_or(default.width),
        color: if colored { ColorMode::Marked(color_mark()) } else { ColorMode::Plain },
    }
}

/// A progress bar on standard error; invisible if that is not a terminal. It disappears when it is dropped.
pub fn progress_bar(length: u64, template: &str) -> ProgressBar {
    let bar = match io::stderr().is_terminal() {
        true => ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr()),
        false => ProgressBar::hidden(),
    };
    bar.with_style(ProgressStyle::with_template(template).expect("a valid template"))
        .with_finish(ProgressFinish::AndClear)
}

/// A progress bar of runs, or their number as long as nobody knows how many will be needed.
pub fn progress_of_runs(runs: Option<usize>) -> ProgressBar {
    let Some(runs) = runs else {
        let bar = progress_bar(0, "{pos} runs, {elapsed} elapsed");
        bar.enable_steady_tick(Duration::from_secs(1));
        return bar;
    };
    progress_bar(runs as u64, "{bar:40} {pos}/{len} runs, {elapsed} elapsed, {eta} remaining {msg}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_acts_on_nothing_but_the_colours_of_ladders() {
        let mark = format!("{:016x}", color_mark());
        assert_eq!(printable(&format!("\x1b{mark}[31mNAK\x1b{mark}[0m")), "\x1b[31mNAK\x1b[0m");
        for (text, escaped) in [
            ("plain — text\n\tand more", "plain — text\n\tand more"),
            ("\x1b]0;title\x07", "\\u001b]0;title\\u0007"),
            ("\x1b[32mPASS", "\\u001b[32mPASS"),
            ("\x1b[2J", "\\u001b[2J"),
            ("\x1b[8mhidden", "\\u001b[8mhidden"),
            ("\x1b", "\\u001b"),
            ("\u{9b}31m", "\\u009b31m"),
            ("line\r\x7f", "line\\u000d\\u007f"),
            ("a\u{202e}b", "a\\u202eb"),
        ] {
            assert_eq!(printable(text), escaped);
            // In pieces, as a formatter writes them.
            let mut writer = PrintableWriter::new(Vec::new());
            text.as_bytes().iter().for_each(|byte| writer.write_all(&[*byte]).unwrap());
            writer.flush().unwrap();
            assert_eq!(String::from_utf8(writer.output).unwrap(), escaped);
        }
        let json = serde_json::json!({"title": "\u{9b}2J"}).to_string();
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&printable(&json)).unwrap()["title"],
            "\u{9b}2J"
        );
    }
}
