//! `softhca trace`: the packets of a capture, or the events of a log.

use crate::time::Time;
use crate::{BAD_INPUT, input, terminal};
use softhca_trace::log::{LogError, Teller};
use softhca_trace::{
    Capture, CaptureError, CaptureWriter, Cast, Cause, EventLogReader, Framing, Heading, InterfaceId,
    Ladders, LinkType, LiveLadders, Packet, Record, Tally,
};
use std::fs::File;
use std::io::{self, BufRead, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What `softhca trace` is asked for.
#[derive(clap::Args)]
#[command(
    after_help = "The last line of the text form and of the ladders counts: packets, RoCE packets, right and wrong ICRCs, \
                        malformed packets.\nWith --follow everything is told as it comes, until the command is interrupted or standard \
                        input ends.\nExit code: 0, or with --check 1 if a packet is malformed or has \
                        a wrong ICRC; 2 if the file cannot be read."
)]
pub struct Arguments {
    /// A pcap or pcapng file, or an event log; - for standard input
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
    /// Go on when the file ends, and tell what is added to it
    #[arg(long)]
    follow: bool,
    /// Fail if a RoCE packet is malformed or has a wrong ICRC
    #[arg(long)]
    check: bool,
    /// Write the packets to a pcapng file as RoCE v1 would frame them, too: a GRH in place of IP and UDP
    #[arg(long, value_name = "FILE", conflicts_with = "follow")]
    roce_v1: Option<PathBuf>,
}

/// Why the command stops early.
enum Stop {
    Input(CaptureError),
    Log(LogError),
    NotForLogs,
    Output(io::Error),
    Reframing(io::Error),
}

impl From<LogError> for Stop {
    fn from(error: LogError) -> Stop {
        Stop::Log(error)
    }
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
    let file = arguments.file.display();
    match told.and_then(|()| Ok(output.flush()?)) {
        Ok(()) if arguments.check && !tally.is_clean() => ExitCode::FAILURE,
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads has seen enough.
        Err(Stop::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(stop) => {
            match stop {
                Stop::Output(error) => eprintln!("softhca trace: cannot write the output: {error}"),
                Stop::Input(CaptureError { offset: 0, cause: Cause::Io(error) }) => {
                    eprintln!("softhca trace: {file}: {error}; give the path of a pcap or pcapng file");
                }
                Stop::Input(error) => eprintln!("softhca trace: {file}: {error}"),
                Stop::Log(error) => eprintln!("softhca trace: {file}: {error}"),
                Stop::NotForLogs => eprintln!(
                    "softhca trace: {file} is an event log: --ladder, --check and --roce-v1 are for captures; \
                     `softhca why` explains a log"
                ),
                Stop::Reframing(error) => {
                    let file = arguments.roce_v1.as_deref().unwrap_or(&arguments.file).display();
                    eprintln!("softhca trace: cannot write {file}: {error}");
                }
            }
            ExitCode::from(BAD_INPUT)
        }
    }
}

fn tell(arguments: &Arguments, tally: &mut Tally, output: &mut impl Write) -> Result<(), Stop> {
    let cannot = |error| CaptureError { offset: 0, cause: Cause::Io(error) };
    let mut input = input::open(&arguments.file, arguments.follow).map_err(cannot)?;
    if input::is_event_log(&mut input).map_err(cannot)? {
        return tell_log(arguments, input, output);
    }
    let capture = Capture::new(input)?;
    if arguments.follow && arguments.ladder {
        return draw_live(arguments, capture, tally, output);
    }
    let mut ladders = Ladders::default();
    let told = tell_packets(arguments, capture, tally, &mut ladders, output);
    match told {
        // Also after a damaged record: what came before it was told and is counted.
        Err(Stop::Input(_)) if tally.packets == 0 => return told,
        Ok(()) | Err(Stop::Input(_)) => sum_up(arguments, tally, &mut ladders, output)?,
        Err(_) => {}
    }
    told
}

/// Hands on what was told so far, where somebody waits for it.
fn pass_on(arguments: &Arguments, output: &mut impl Write) -> io::Result<()> {
    if arguments.follow { output.flush() } else { Ok(()) }
}

fn tell_log(arguments: &Arguments, input: Box<dyn BufRead>, output: &mut impl Write) -> Result<(), Stop> {
    if arguments.ladder || arguments.check || arguments.roce_v1.is_some() {
        return Err(Stop::NotForLogs);
    }
    let reader = EventLogReader::new(input)?;
    let mut teller = Teller::new(reader.header());
    let mut count = 0;
    for entry in reader {
        let entry = entry?;
        count += 1;
        if arguments.json {
            serde_json::to_writer(&mut *output, &entry).map_err(io::Error::from)?;
            writeln!(output)?;
        } else {
            writeln!(output, "{}", teller.tell(&entry))?;
        }
        pass_on(arguments, output)?;
    }
    if !arguments.json {
        writeln!(output, "{count} events")?;
    }
    Ok(())
}

fn tell_packets(
    arguments: &Arguments,
    capture: Capture<Box<dyn BufRead>>,
    tally: &mut Tally,
    ladders: &mut Ladders,
    output: &mut impl Write,
) -> Result<(), Stop> {
    let mut start_ns = None;
    let mut reframed =
        arguments.roce_v1.as_deref().map(Reframed::create).transpose().map_err(Stop::Reframing)?;
    for record in capture {
        let record = record?;
        if let Some(reframed) = &mut reframed {
            reframed.add(&record).map_err(Stop::Reframing)?;
        }
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
        pass_on(arguments, output)?;
    }
    reframed.map_or(Ok(()), |mut reframed| reframed.writer.flush()).map_err(Stop::Reframing)
}

/// A capture of the same packets in RoCE v1 frames. Other frames, pauses among them, stay as they are.
struct Reframed {
    writer: CaptureWriter<BufWriter<File>>,
    interface: InterfaceId,
}

impl Reframed {
    fn create(path: &Path) -> io::Result<Reframed> {
        let output = BufWriter::new(File::create(path)?);
        let mut writer = CaptureWriter::with_framing(output, Framing::V1)?;
        let interface = writer.add_interface("roce-v1", "the same packets as RoCE v1")?;
        Ok(Reframed { writer, interface })
    }

    fn add(&mut self, record: &Record) -> io::Result<()> {
        let Record { time_ns, link, data, .. } = record;
        if let Ok(frame) = record.frame()
            && let Some(envelope) = frame.network.envelope()
        {
            return self.writer.packet(*time_ns, self.interface, Heading::In, &envelope, frame.packet, None);
        }
        match link {
            LinkType::Ethernet => self.writer.frame(*time_ns, self.interface, Heading::In, data, None),
            // The new file is one of Ethernet.
            _ => Ok(()),
        }
    }
}

/// Draws each packet as it comes.
fn draw_live(
    arguments: &Arguments,
    capture: Capture<Box<dyn BufRead>>,
    tally: &mut Tally,
    output: &mut impl Write,
) -> Result<(), Stop> {
    let mut ladders = LiveLadders::new(Cast::new(), terminal::style());
    let (from, to) = arguments.span();
    let mut start_ns = None;
    for record in capture {
        let record = record?;
        let packet = Packet::new(&record, *start_ns.get_or_insert(record.time_ns));
        tally.count(&packet);
        if (from..=to).contains(&packet.time_ns) {
            output.write_all(ladders.packet(&packet, arguments.qp.as_deref()).as_bytes())?;
            output.flush()?;
        }
    }
    Ok(writeln!(output, "\n{tally}")?)
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

impl Arguments {
    /// The span of time that is asked for, in nanoseconds.
    fn span(&self) -> (i64, i64) {
        let from = self.from.map_or(i64::MIN, Time::nanoseconds);
        (from, self.to.map_or(i64::MAX, Time::nanoseconds))
    }
}

fn draw(arguments: &Arguments, ladders: &mut Ladders, output: &mut impl Write) -> io::Result<()> {
    let (from, to) = arguments.span();
    let style = terminal::style();
    for mut ladder in ladders.ladders() {
        ladder.keep(from, to);
        let is_wanted = arguments.qp.as_ref().is_none_or(|qp| ladder.involves(qp));
        if is_wanted && !ladder.steps.is_empty() {
            writeln!(output, "{}", ladder.draw(style))?;
        }
    }
    Ok(())
}
