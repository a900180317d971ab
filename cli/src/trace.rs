//! `softhca trace`: the packets of a capture.

use crate::BAD_INPUT;
use crate::time::Time;
use softhca_trace::{Capture, CaptureError, Cause, Ladders, Packet, Paint, Style, Tally};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// What `softhca trace` is asked for.
#[derive(clap::Args)]
#[command(
    after_help = "The last line of the text form and of the ladders counts: packets, RoCE packets, right and wrong ICRCs, \
                        malformed packets.\nExit code: 0, or with --check 1 if a packet is malformed or has \
                        a wrong ICRC; 2 if the file cannot be read."
)]
pub struct Arguments {
    /// A pcap or pcapng file
    file: PathBuf,
    /// One JSON object per packet instead of text
    #[arg(long)]
    json: bool,
    /// Draw a ladder for each connection instead
    #[arg(long, conflicts_with = "json")]
    ladder: bool,
    /// Only ladders of this queue pair: its number, decimal or with 0x
    #[arg(long, value_name = "Q", requires = "ladder")]
    qp: Option<String>,
    /// Only what happened at this time or later, counted from the first packet: 10us, 1.5ms, 2s or 2
    #[arg(long, value_name = "T", requires = "ladder")]
    from: Option<Time>,
    /// Only what happened at this time or earlier
    #[arg(long, value_name = "T", requires = "ladder")]
    to: Option<Time>,
    /// Fail if a RoCE packet is malformed or has a wrong ICRC
    #[arg(long)]
    check: bool,
}

/// Why the command stops early.
enum Stop {
    Input(CaptureError),
    Output(io::Error),
}

impl From<CaptureError> for Stop {
    fn from(error: CaptureError) -> Stop {
        Stop::Input(error)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Output(error)
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let mut output = BufWriter::new(io::stdout().lock());
    let mut tally = Tally::default();
    let mut ladders = Ladders::default();
    let told = tell(arguments, &mut tally, &mut ladders, &mut output);
    // Also after a damaged record: what came before it was told and is counted.
    let summed = match &told {
        Ok(()) => sum_up(arguments, &tally, &mut ladders, &mut output),
        Err(Stop::Input(_)) if tally.packets > 0 => sum_up(arguments, &tally, &mut ladders, &mut output),
        Err(_) => Ok(()),
    };
    let file = arguments.file.display();
    match told.and(summed.map_err(Stop::from)) {
        Ok(()) if arguments.check && !tally.is_clean() => ExitCode::FAILURE,
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads has seen enough.
        Err(Stop::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(Stop::Output(error)) => {
            eprintln!("softhca trace: cannot write the output: {error}");
            ExitCode::from(BAD_INPUT)
        }
        Err(Stop::Input(CaptureError { offset: 0, cause: Cause::Io(error) })) => {
            eprintln!("softhca trace: {file}: {error}; give the path of a pcap or pcapng file");
            ExitCode::from(BAD_INPUT)
        }
        Err(Stop::Input(error)) => {
            eprintln!("softhca trace: {file}: {error}");
            ExitCode::from(BAD_INPUT)
        }
    }
}

fn tell(
    arguments: &Arguments,
    tally: &mut Tally,
    ladders: &mut Ladders,
    output: &mut impl Write,
) -> Result<(), Stop> {
    let mut start_ns = None;
    for record in Capture::open(&arguments.file)? {
        let record = record?;
        let packet = Packet::new(&record, *start_ns.get_or_insert(record.time_ns));
        tally.count(&packet);
        if arguments.ladder {
            ladders.packet(&packet);
        } else if arguments.json {
            serde_json::to_writer(&mut *output, &packet).map_err(io::Error::from)?;
            writeln!(output)?;
        } else {
            writeln!(output, "{packet}")?;
        }
    }
    Ok(())
}

fn sum_up(
    arguments: &Arguments,
    tally: &Tally,
    ladders: &mut Ladders,
    output: &mut impl Write,
) -> io::Result<()> {
    if arguments.ladder {
        draw(arguments, ladders, output)?;
    }
    if !arguments.json {
        writeln!(output, "{tally}")?;
    }
    output.flush()
}

fn draw(arguments: &Arguments, ladders: &mut Ladders, output: &mut impl Write) -> io::Result<()> {
    let from = arguments.from.map_or(i64::MIN, Time::nanoseconds);
    let to = arguments.to.map_or(i64::MAX, Time::nanoseconds);
    let style = style();
    for mut ladder in ladders.ladders() {
        ladder.keep(from, to);
        let is_wanted = arguments.qp.as_ref().is_none_or(|qp| ladder.involves(qp));
        if is_wanted && !ladder.steps.is_empty() {
            writeln!(output, "{}", ladder.draw(style))?;
        }
    }
    Ok(())
}

/// As wide as the terminal, and in colour there unless NO_COLOR asks for none.
fn style() -> Style {
    let terminal = io::stdout().is_terminal();
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let width = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    let default = Style::default();
    Style {
        width: width.filter(|_| terminal).unwrap_or(default.width),
        paint: if terminal && !plain { Paint::Ansi } else { Paint::None },
    }
}
