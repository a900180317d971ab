//! `softhca trace`: the packets of a capture.

use crate::BAD_INPUT;
use softhca_trace::{Capture, CaptureError, Cause, Packet, Tally};
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// What `softhca trace` is asked for.
#[derive(clap::Args)]
#[command(
    after_help = "The last line of the text form counts: packets, RoCE packets, right and wrong ICRCs, \
                        malformed packets.\nExit code: 0, or with --check 1 if a packet is malformed or has \
                        a wrong ICRC; 2 if the file cannot be read."
)]
pub struct Arguments {
    /// A pcap or pcapng file
    file: PathBuf,
    /// One JSON object per packet instead of text
    #[arg(long)]
    json: bool,
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
    let told = tell(arguments, &mut tally, &mut output);
    // Also after a damaged record: what came before it was told and is counted.
    let summed = match &told {
        Ok(()) => sum_up(arguments, &tally, &mut output),
        Err(Stop::Input(_)) if tally.packets > 0 => sum_up(arguments, &tally, &mut output),
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

fn tell(arguments: &Arguments, tally: &mut Tally, output: &mut impl Write) -> Result<(), Stop> {
    let mut start_ns = None;
    for record in Capture::open(&arguments.file)? {
        let record = record?;
        let packet = Packet::new(&record, *start_ns.get_or_insert(record.time_ns));
        tally.count(&packet);
        if arguments.json {
            serde_json::to_writer(&mut *output, &packet).map_err(io::Error::from)?;
            writeln!(output)?;
        } else {
            writeln!(output, "{packet}")?;
        }
    }
    Ok(())
}

fn sum_up(arguments: &Arguments, tally: &Tally, output: &mut impl Write) -> io::Result<()> {
    if !arguments.json {
        writeln!(output, "{tally}")?;
    }
    output.flush()
}
