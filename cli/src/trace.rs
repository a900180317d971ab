//! `softhca trace`: prints the packets in a capture or the events in a log.

use crate::terminal::PrintableWriter;
use crate::time::Time;
use crate::{exit_code, input, output, terminal};
use softhca_trace::log::{EntryFormatter, LogError};
use softhca_trace::{
    CaptureError, CaptureErrorKind, CaptureReader, CaptureWriter, EventLogReader, InterfaceId, LadderBuilder,
    LinkType, LiveLadder, NameTable, Packet, PacketCounts, PacketDirection, Record, RoceVersion,
};
use std::fs::File;
use std::io::{self, BufRead, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `softhca trace`.
#[derive(clap::Args)]
#[command(
    after_help = "The last line of text and ladder output counts all packets, RoCE packets, good and bad ICRCs, and malformed \
                        packets.\nWith --follow, prints packets as they are captured, until interrupted or standard input \
                        ends.\nExit code: 0; with --check, 1 if a RoCE packet is malformed or has a bad ICRC; 2 if the file \
                        cannot be read."
)]
pub struct Arguments {
    /// pcap or pcapng file, or event log; - for standard input
    file: PathBuf,
    /// Print one JSON object per packet or event
    #[arg(long)]
    json: bool,
    /// Draw a ladder diagram for each connection
    #[arg(long, conflicts_with = "json")]
    ladder: bool,
    /// Only ladders of this queue pair: its QPN, decimal or with 0x
    #[arg(long, value_name = "Q", requires = "ladder")]
    qp: Option<String>,
    /// Only packets at or after this time since the first packet: 10us, 1.5ms, 2s or 2
    #[arg(long, value_name = "T", requires = "ladder")]
    from: Option<Time>,
    /// Only packets at or before this time
    #[arg(long, value_name = "T", requires = "ladder")]
    to: Option<Time>,
    /// Wait for more data at the end of the file
    #[arg(long)]
    follow: bool,
    /// Exit with 1 if a RoCE packet is malformed or has a bad ICRC
    #[arg(long)]
    check: bool,
    /// Also write the packets to a pcapng file in RoCE v1 frames, with a GRH in place of IP and UDP
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
    let mut output = BufWriter::new(PrintableWriter::new(io::stdout().lock()));
    let mut tally = PacketCounts::default();
    let printed = print_file(arguments, &mut tally, &mut output);
    let file = arguments.file.display();
    match printed.and_then(|()| Ok(output.flush()?)) {
        Ok(()) if arguments.check && !tally.is_clean() => ExitCode::FAILURE,
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe.
        Err(TraceError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            match error {
                TraceError::Output(error) => errln!("softhca trace: cannot write the output: {error}"),
                TraceError::Input(CaptureError { offset: 0, cause: CaptureErrorKind::Io(error) }) => {
                    errln!("softhca trace: {file}: {error}; give the path of a pcap or pcapng file");
                }
                TraceError::Input(error) => errln!("softhca trace: {file}: {error}"),
                TraceError::Log(error) => errln!("softhca trace: {file}: {error}"),
                TraceError::UnsupportedForLogs => errln!(
                    "softhca trace: {file} is an event log: --ladder, --check and --roce-v1 apply to captures only; \
                     use `softhca why` to explain a log"
                ),
                TraceError::RoceV1Output(error) => {
                    let file = arguments.roce_v1.as_deref().unwrap_or(&arguments.file).display();
                    errln!("softhca trace: cannot write {file}: {error}");
                }
            }
            ExitCode::from(exit_code::BAD_INPUT)
        }
    }
}

fn print_file(
    arguments: &Arguments,
    tally: &mut PacketCounts,
    output: &mut impl Write,
) -> Result<(), TraceError> {
    let io_error = |error| CaptureError { offset: 0, cause: CaptureErrorKind::Io(error) };
    let mut input = input::open(&arguments.file, arguments.follow).map_err(io_error)?;
    if input::is_event_log(&mut input).map_err(io_error)? {
        return print_log(arguments, input, output);
    }
    let capture = CaptureReader::new(input)?;
    if arguments.follow && arguments.ladder {
        return draw_live_ladders(arguments, capture, tally, output);
    }
    let mut ladders = LadderBuilder::default();
    let printed = print_packets(arguments, capture, tally, &mut ladders, output);
    match printed {
        // Also after a damaged record: the packets before it were printed.
        Err(TraceError::Input(_)) if tally.packets == 0 => return printed,
        Ok(()) | Err(TraceError::Input(_)) => print_summary(arguments, tally, &mut ladders, output)?,
        Err(_) => {}
    }
    printed
}

/// Flushes the output while following a file.
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
    let mut formatter = EntryFormatter::new(reader.header());
    let mut count = 0;
    for entry in reader {
        let entry = entry?;
        count += 1;
        if arguments.json {
            serde_json::to_writer(&mut *output, &entry).map_err(io::Error::from)?;
            writeln!(output)?;
        } else {
            writeln!(output, "{}", formatter.format(&entry))?;
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

/// Writes a capture of the same packets in RoCE v1 frames. Other frames, such as PFC pauses, are copied.
struct RoceV1Writer {
    writer: CaptureWriter<BufWriter<File>>,
    interface: InterfaceId,
}

impl RoceV1Writer {
    fn create(path: &Path) -> io::Result<RoceV1Writer> {
        let output = BufWriter::new(output::create_private(path)?);
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
            // The new file has Ethernet framing only.
            _ => Ok(()),
        }
    }
}

/// Draws each packet as it is captured.
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
    /// The range of `--from` and `--to` in nanoseconds.
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
        let is_selected = arguments.qp.as_ref().is_none_or(|qp| ladder.involves(qp));
        if is_selected && !ladder.steps.is_empty() {
            writeln!(output, "{}", ladder.draw(style))?;
        }
    }
    Ok(())
}
