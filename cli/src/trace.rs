//! `softhca trace`: the packets of a capture, or the events of a log.

use crate::time::Time;
use crate::{EXIT_BAD_INPUT, input, terminal};
use softhca_trace::log::{EntryFormatter, LogError};
use softhca_trace::{
    CaptureError, CaptureErrorKind, CaptureReader, CaptureWriter, EventLogReader, InterfaceId, LadderBuilder,
    LinkType, LiveLadder, NameTable, Packet, PacketCounts, PacketDirection, Record, RoceVersion,
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
enum TraceError {
    Input(CaptureError),
    Log(LogError),
    UnsupportedForLogs,
    Output(io::Error),
    RoceV1Output(io::Error),
}

impl From<LogError> for TraceError {
    fn from(error: LogError) -> TraceError {
        TraceError::Log(error)
    }
}

impl From<CaptureError> for TraceError {
    fn from(error: CaptureError) -> TraceError {
        TraceError::Input(error)
    }
}

impl From<io::Error> for TraceError {
    fn from(error: io::Error) -> TraceError {
        TraceError::Output(error)
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let mut output = BufWriter::new(io::stdout().lock());
    let mut tally = PacketCounts::default();
    let told = print_file(arguments, &mut tally, &mut output);
    let file = arguments.file.display();
    match told.and_then(|()| Ok(output.flush()?)) {
        Ok(()) if arguments.check && !tally.is_clean() => ExitCode::FAILURE,
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads has seen enough.
        Err(TraceError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(stop) => {
            match stop {
                TraceError::Output(error) => eprintln!("softhca trace: cannot write the output: {error}"),
                TraceError::Input(CaptureError { offset: 0, cause: CaptureErrorKind::Io(error) }) => {
                    eprintln!("softhca trace: {file}: {error}; give the path of a pcap or pcapng file");
                }
                TraceError::Input(error) => eprintln!("softhca trace: {file}: {error}"),
                TraceError::Log(error) => eprintln!("softhca trace: {file}: {error}"),
                TraceError::UnsupportedForLogs => eprintln!(
                    "softhca trace: {file} is an event log: --ladder, --check and --roce-v1 are for captures; \
                     `softhca why` explains a log"
                ),
                TraceError::RoceV1Output(error) => {
                    let file = arguments.roce_v1.as_deref().unwrap_or(&arguments.file).display();
                    eprintln!("softhca trace: cannot write {file}: {error}");
                }
            }
            ExitCode::from(EXIT_BAD_INPUT)
        }
    }
}

fn print_file(
    arguments: &Arguments,
    tally: &mut PacketCounts,
    output: &mut impl Write,
) -> Result<(), TraceError> {
    let cannot = |error| CaptureError { offset: 0, cause: CaptureErrorKind::Io(error) };
    let mut input = input::open(&arguments.file, arguments.follow).map_err(cannot)?;
    if input::is_event_log(&mut input).map_err(cannot)? {
        return print_log(arguments, input, output);
    }
    let capture = CaptureReader::new(input)?;
    if arguments.follow && arguments.ladder {
        return draw_live_ladders(arguments, capture, tally, output);
    }
    let mut ladders = LadderBuilder::default();
    let told = print_packets(arguments, capture, tally, &mut ladders, output);
    match told {
        // Also after a damaged record: what came before it was told and is counted.
        Err(TraceError::Input(_)) if tally.packets == 0 => return told,
        Ok(()) | Err(TraceError::Input(_)) => print_summary(arguments, tally, &mut ladders, output)?,
        Err(_) => {}
    }
    told
}

/// Hands on what was told so far, where somebody waits for it.
fn flush_if_following(arguments: &Arguments, output: &mut impl Write) -> io::Result<()> {
    if arguments.follow { output.flush() } else { Ok(()) }
}

fn print_log(
    arguments: &Arguments,
    input: Box<dyn BufRead>,
    output: &mut impl Write,
) -> Result<(), TraceError> {
    if arguments.ladder || arguments.check || arguments.roce_v1.is_some() {
        return Err(TraceError::UnsupportedForLogs);
    }
    let reader = EventLogReader::new(input)?;
    let mut teller = EntryFormatter::new(reader.header());
    let mut count = 0;
    for entry in reader {
        let entry = entry?;
        count += 1;
        if arguments.json {
            serde_json::to_writer(&mut *output, &entry).map_err(io::Error::from)?;
            writeln!(output)?;
        } else {
            writeln!(output, "{}", teller.format(&entry))?;
        }
        flush_if_following(arguments, output)?;
    }
    if !arguments.json {
        writeln!(output, "{count} events")?;
    }
    Ok(())
}

fn print_packets(
    arguments: &Arguments,
    capture: CaptureReader<Box<dyn BufRead>>,
    tally: &mut PacketCounts,
    ladders: &mut LadderBuilder,
    output: &mut impl Write,
) -> Result<(), TraceError> {
    let mut start_ns = None;
    let mut reframed = arguments
        .roce_v1
        .as_deref()
        .map(RoceV1Writer::create)
        .transpose()
        .map_err(TraceError::RoceV1Output)?;
    for record in capture {
        let record = record?;
        if let Some(reframed) = &mut reframed {
            reframed.add(&record).map_err(TraceError::RoceV1Output)?;
        }
        let packet = Packet::new(&record, *start_ns.get_or_insert(record.time_ns));
        tally.add(&packet);
        if arguments.ladder {
            ladders.record_packet(&packet);
        } else if arguments.json {
            serde_json::to_writer(&mut *output, &packet).map_err(io::Error::from)?;
            writeln!(output)?;
        } else {
            writeln!(output, "{packet}")?;
        }
        flush_if_following(arguments, output)?;
    }
    reframed.map_or(Ok(()), |mut reframed| reframed.writer.flush()).map_err(TraceError::RoceV1Output)
}

/// A capture of the same packets in RoCE v1 frames. Other frames, pauses among them, stay as they are.
struct RoceV1Writer {
    writer: CaptureWriter<BufWriter<File>>,
    interface: InterfaceId,
}

impl RoceV1Writer {
    fn create(path: &Path) -> io::Result<RoceV1Writer> {
        let output = BufWriter::new(File::create(path)?);
        let mut writer = CaptureWriter::with_version(output, RoceVersion::V1)?;
        let interface = writer.add_interface("roce-v1", "the same packets as RoCE v1")?;
        Ok(RoceV1Writer { writer, interface })
    }

    fn add(&mut self, record: &Record) -> io::Result<()> {
        let Record { time_ns, link_type: link, data, .. } = record;
        if let Ok(frame) = record.frame()
            && let Some(envelope) = frame.network.addressing()
        {
            return self.writer.write_packet(
                *time_ns,
                self.interface,
                PacketDirection::Inbound,
                &envelope,
                frame.packet,
                None,
            );
        }
        match link {
            LinkType::Ethernet => {
                self.writer.write_frame(*time_ns, self.interface, PacketDirection::Inbound, data, None)
            }
            // The new file is one of Ethernet.
            _ => Ok(()),
        }
    }
}

/// Draws each packet as it comes.
fn draw_live_ladders(
    arguments: &Arguments,
    capture: CaptureReader<Box<dyn BufRead>>,
    tally: &mut PacketCounts,
    output: &mut impl Write,
) -> Result<(), TraceError> {
    let mut ladders = LiveLadder::new(NameTable::new(), terminal::style());
    let (from, to) = arguments.time_range();
    let mut start_ns = None;
    for record in capture {
        let record = record?;
        let packet = Packet::new(&record, *start_ns.get_or_insert(record.time_ns));
        tally.add(&packet);
        if (from..=to).contains(&packet.time_ns) {
            output.write_all(ladders.draw_packet(&packet, arguments.qp.as_deref()).as_bytes())?;
            output.flush()?;
        }
    }
    Ok(writeln!(output, "\n{tally}")?)
}

fn print_summary(
    arguments: &Arguments,
    tally: &PacketCounts,
    ladders: &mut LadderBuilder,
    output: &mut impl Write,
) -> io::Result<()> {
    if arguments.ladder {
        draw_ladders(arguments, ladders, output)?;
    }
    if !arguments.json {
        writeln!(output, "{tally}")?;
    }
    output.flush()
}

impl Arguments {
    /// The span of time that is asked for, in nanoseconds.
    fn time_range(&self) -> (i64, i64) {
        let from = self.from.map_or(i64::MIN, Time::nanoseconds);
        (from, self.to.map_or(i64::MAX, Time::nanoseconds))
    }
}

fn draw_ladders(
    arguments: &Arguments,
    ladders: &mut LadderBuilder,
    output: &mut impl Write,
) -> io::Result<()> {
    let (from, to) = arguments.time_range();
    let style = terminal::style();
    for mut ladder in ladders.ladders() {
        ladder.retain_range(from, to);
        let is_wanted = arguments.qp.as_ref().is_none_or(|qp| ladder.involves(qp));
        if is_wanted && !ladder.steps.is_empty() {
            writeln!(output, "{}", ladder.draw(style))?;
        }
    }
    Ok(())
}
