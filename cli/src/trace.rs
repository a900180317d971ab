//! `softhca trace`: prints the packets in a capture or the events in a log.

use crate::exit_code::{CommandResult, bad_input};
use crate::explain::{print, read_any};
use crate::terminal::PrintableWriter;
use crate::{input, terminal};
use serde::Serialize;
use softhca_scenarios::quantity::parse_nanoseconds;
use softhca_trace::filter::{FILTER_FIELDS, FILTER_FLAGS, Filter, FilterError, PacketFilter};
use softhca_trace::join::{self, Fate, JoinError};
use softhca_trace::log::{EntryFormatter, LogError};
use softhca_trace::{
    CaptureError, CaptureErrorKind, CaptureReader, CaptureWriter, EventLogReader, InterfaceId, LadderBuilder,
    LinkType, LiveLadder, NameTable, Packet, PacketCounts, PacketDirection, Record, RoceVersion,
};
use std::fs::File;
use std::io::{self, BufRead, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const AFTER_HELP: &str = "The last line of text and ladder output counts all packets, RoCE packets, good and bad ICRCs, and malformed \
                        packets.\nWith --follow, prints packets as they are captured, until interrupted or standard input \
                        ends.\nExit code: 0; with --check, 1 if a RoCE packet is malformed or has a bad ICRC; 2 if the file \
                        cannot be read.";

/// Arguments of `softhca trace`.
#[derive(clap::Args)]
#[command(
    after_help = AFTER_HELP
)]
pub struct Arguments {
    /// pcap or pcapng file, or event log; - for standard input
    file: PathBuf,
    /// A second capture of the same traffic, taken at the other end: shows delays, and what was lost in between
    #[arg(conflicts_with_all = ["follow", "roce_v1", "perfetto", "summary"])]
    other: Option<PathBuf>,
    /// Only packets that match, such as 'qp == 0x12 && psn > +100 && nak'
    #[arg(long, value_name = "EXPRESSION", value_parser = parse_filter)]
    filter: Option<Filter>,
    /// Print hosts, connections, causes of trouble, latencies and sizes; with --json or --csv as data
    #[arg(long, conflicts_with_all = ["ladder", "follow", "filter"])]
    summary: bool,
    /// Print the summary as comma-separated values: table, name, key, value
    #[arg(long, requires = "summary", conflicts_with = "json")]
    csv: bool,
    /// Write a trace for the Perfetto UI: a track for each queue pair, and arrows from post to completion
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ladder", "follow", "filter", "summary"])]
    perfetto: Option<PathBuf>,
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
    #[arg(long, value_name = "T", requires = "ladder", value_parser = parse_time)]
    from: Option<i64>,
    /// Only packets at or before this time
    #[arg(long, value_name = "T", requires = "ladder", value_parser = parse_time)]
    to: Option<i64>,
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

/// Parses a time with a unit, or in seconds, to nanoseconds.
fn parse_time(text: &str) -> Result<i64, String> {
    let is_plain = text.ends_with(|last: char| last.is_ascii_digit());
    parse_nanoseconds(&format!("{text}{}", if is_plain { "s" } else { "" }))
        .and_then(|ns| i64::try_from(ns).map_err(|_| "the number is too large".into()))
        .map_err(|why| format!("`{text}` is not a time: {why}; examples: 10us, 1.5ms, 2s"))
}

/// Parses a filter; the error shows where it is wrong.
pub fn parse_filter(text: &str) -> Result<Filter, String> {
    text.parse().map_err(|error: FilterError| {
        let FilterError { column, message } = error;
        let fields: Vec<&str> = FILTER_FIELDS.iter().map(|field| field.name).collect();
        let words: Vec<&str> = FILTER_FLAGS.iter().map(|(name, _)| *name).collect();
        let (fields, words) = (fields.join(" "), words.join(" "));
        format!("{message}\n  {text}\n  {}^\nfields: {fields}\nwords: {words}", " ".repeat(column - 1))
    })
}

/// Parses a filter for packets that are looked at one by one.
#[cfg(target_os = "linux")]
pub fn parse_packet_filter(text: &str) -> Result<Filter, String> {
    let filter = parse_filter(text)?;
    if filter.uses("lost") { Err(LOST_IN_ONE_CAPTURE.into()) } else { Ok(filter) }
}

/// Removes the packets of a capture that do not match. The file is replaced when the new one is complete.
#[cfg(target_os = "linux")]
pub fn filter_file(path: &Path, filter: &Filter) -> io::Result<()> {
    let mut new_path = path.as_os_str().to_owned();
    new_path.push(".filtered");
    let new_path = PathBuf::from(new_path);
    let mut writer = CaptureWriter::new(BufWriter::new(File::create(&new_path)?))?;
    let interface = writer.add_interface("filtered", "packets that match a filter")?;
    let mut filter = PacketFilter::new(filter.clone());
    let mut start_ns = None;
    for record in CaptureReader::open(path).map_err(io::Error::other)? {
        let record = record.map_err(io::Error::other)?;
        let packet = Packet::new(&record, *start_ns.get_or_insert(record.time_ns));
        if filter.matches(&packet) {
            let direction = record.direction().unwrap_or(PacketDirection::Outbound);
            writer.write_frame(record.time_ns, interface, direction, &record.data, None)?;
        }
    }
    writer.flush()?;
    std::fs::rename(new_path, path)
}

/// The error for a filter by `lost` on packets that are looked at one by one.
const LOST_IN_ONE_CAPTURE: &str = "`lost` needs what happens later: join two captures of the same traffic \
                                       (`softhca trace A B --filter lost`), use the search box of a report, or see \
                                       `softhca why`";

/// Why the command stops early.
enum TraceError {
    LostInOneCapture,
    Join(JoinError),
    OtherInput(CaptureError),
    Input(CaptureError),
    Log(LogError),
    UnsupportedForLogs,
    Output(io::Error),
    RoceV1Output(io::Error),
}

impl TraceError {
    fn message(self, arguments: &Arguments) -> String {
        let file = arguments.file.display();
        let given = |path: &Option<PathBuf>| path.as_ref().unwrap_or(&arguments.file).display().to_string();
        let advice = "give the path of a pcap or pcapng file";
        match self {
            TraceError::Output(error) => format!("cannot write the output: {error}"),
            TraceError::Input(CaptureError { offset: 0, cause: CaptureErrorKind::Io(error) }) => {
                format!("{file}: {error}; {advice}")
            }
            TraceError::Join(error) => error.to_string(),
            TraceError::LostInOneCapture => format!("--filter: {LOST_IN_ONE_CAPTURE}"),
            TraceError::OtherInput(error) => format!("{}: {error}; {advice}", given(&arguments.other)),
            TraceError::Input(error) => format!("{file}: {error}"),
            TraceError::Log(error) => format!("{file}: {error}"),
            TraceError::UnsupportedForLogs => format!(
                "{file} is an event log: --ladder, --check, --filter, --roce-v1 and a second file apply to captures only; \
                 use `softhca why` to explain a log"
            ),
            TraceError::RoceV1Output(error) => format!("cannot write {}: {error}", given(&arguments.roce_v1)),
        }
    }
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
pub fn run(arguments: &Arguments) -> CommandResult {
    if arguments.summary || arguments.perfetto.is_some() {
        return analyze(arguments);
    }
    let mut printer = Printer {
        arguments,
        output: BufWriter::new(PrintableWriter::new(io::stdout().lock())),
        filter: arguments.filter.clone().map(PacketFilter::new),
        counts: PacketCounts::default(),
        ladders: LadderBuilder::default(),
    };
    let printed = printer.print_file();
    match printed.and_then(|()| Ok(printer.output.flush()?)) {
        Ok(()) if arguments.check && !printer.counts.is_clean() => Ok(ExitCode::FAILURE),
        Ok(()) => Ok(ExitCode::SUCCESS),
        // The reader has closed the pipe.
        Err(TraceError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        Err(error) => Err(bad_input(error.message(arguments))),
    }
}

/// Prints a capture or a log, and counts its packets.
struct Printer<'a, W> {
    arguments: &'a Arguments,
    output: W,
    filter: Option<PacketFilter>,
    counts: PacketCounts,
    ladders: LadderBuilder,
}

impl<W: Write> Printer<'_, W> {
    fn print_file(&mut self) -> Result<(), TraceError> {
        let arguments = self.arguments;
        let io_error = |error| CaptureError { offset: 0, cause: CaptureErrorKind::Io(error) };
        let mut input = input::open(&arguments.file, arguments.follow).map_err(io_error)?;
        if input::is_event_log(&mut input).map_err(io_error)? {
            return self.print_log(input);
        }
        let capture = CaptureReader::new(input)?;
        if let Some(other) = &arguments.other {
            return self.print_joined(capture, other);
        }
        if arguments.filter.as_ref().is_some_and(|filter| filter.uses("lost")) {
            return Err(TraceError::LostInOneCapture);
        }
        if arguments.follow && arguments.ladder {
            return self.draw_live_ladders(capture);
        }
        let printed = self.print_packets(capture);
        match printed {
            // Also after a damaged record: the packets before it were printed.
            Err(TraceError::Input(_)) if self.counts.packets == 0 => return printed,
            Ok(()) | Err(TraceError::Input(_)) => self.print_summary()?,
            Err(_) => {}
        }
        printed
    }

    /// Flushes the output while following a file.
    fn flush_if_following(&mut self) -> io::Result<()> {
        if self.arguments.follow { self.output.flush() } else { Ok(()) }
    }

    fn print_json(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.output, value)?;
        writeln!(self.output)
    }

    fn print_log(&mut self, input: Box<dyn BufRead>) -> Result<(), TraceError> {
        let Arguments { ladder, check, roce_v1, filter, other, json, .. } = self.arguments;
        if *ladder || *check || roce_v1.is_some() || filter.is_some() || other.is_some() {
            return Err(TraceError::UnsupportedForLogs);
        }
        let reader = EventLogReader::new(input)?;
        let mut formatter = EntryFormatter::new(reader.header());
        let mut count = 0;
        for entry in reader {
            let entry = entry?;
            count += 1;
            match json {
                true => self.print_json(&entry)?,
                false => writeln!(self.output, "{}", formatter.format(&entry))?,
            }
            self.flush_if_following()?;
        }
        if !json {
            writeln!(self.output, "{count} events")?;
        }
        Ok(())
    }

    /// Calls `act` with each packet of a capture that matches the filter, and counts it.
    fn for_each_packet(
        &mut self,
        capture: CaptureReader<Box<dyn BufRead>>,
        mut act: impl FnMut(&mut Self, &Record, Packet<'_>) -> Result<(), TraceError>,
    ) -> Result<(), TraceError> {
        let mut start_ns = None;
        for record in capture {
            let record = record?;
            let packet = Packet::new(&record, *start_ns.get_or_insert(record.time_ns));
            if self.filter.as_mut().is_none_or(|filter| filter.matches(&packet)) {
                self.counts.add(&packet);
                act(self, &record, packet)?;
            }
        }
        Ok(())
    }

    fn print_packets(&mut self, capture: CaptureReader<Box<dyn BufRead>>) -> Result<(), TraceError> {
        let Arguments { ladder, json, roce_v1, .. } = self.arguments;
        let mut reframed =
            roce_v1.as_deref().map(RoceV1Writer::create).transpose().map_err(TraceError::RoceV1Output)?;
        self.for_each_packet(capture, |this, record, packet| {
            if let Some(reframed) = &mut reframed {
                reframed.add(record).map_err(TraceError::RoceV1Output)?;
            }
            match (ladder, json) {
                (true, _) => this.ladders.record_packet(&packet),
                (false, true) => this.print_json(&packet)?,
                (false, false) => writeln!(this.output, "{packet}")?,
            }
            Ok(this.flush_if_following()?)
        })?;
        reframed.map_or(Ok(()), |mut reframed| reframed.writer.flush()).map_err(TraceError::RoceV1Output)
    }

    /// Prints the packets of two captures as one, with what became of each.
    fn print_joined(
        &mut self,
        first: CaptureReader<Box<dyn BufRead>>,
        other: &Path,
    ) -> Result<(), TraceError> {
        let arguments = self.arguments;
        let first: Vec<Record> = first.collect::<Result<_, _>>()?;
        let second: Vec<Record> =
            CaptureReader::open(other).and_then(Iterator::collect).map_err(TraceError::OtherInput)?;
        let joined = join::join(&first, &second).map_err(TraceError::Join)?;
        for joined_packet in &joined.packets {
            let record = if joined_packet.is_second { &second } else { &first }.get(joined_packet.index);
            let Some(record) = record else { continue };
            let packet = Packet { time_ns: joined_packet.time_ns, ..Packet::new(record, 0) };
            let lost = joined_packet.fate == Fate::Lost;
            if self.filter.as_mut().is_some_and(|filter| !filter.matches_joined(&packet, lost)) {
                continue;
            }
            self.counts.add(&packet);
            let fate = match joined_packet.fate {
                Fate::Arrived { delay_ns } => format!("{:+.3} µs", delay_ns as f64 / 1000.0),
                Fate::Lost => "lost".into(),
                Fate::NotCapturedAtReceiver => "missed".into(),
                Fate::NotCapturedAtSender => "arrived".into(),
                Fate::Outside => "alone".into(),
            };
            if arguments.ladder {
                self.ladders.record_joined(
                    &packet,
                    lost,
                    if lost { "lost between the captures" } else { "" },
                );
            } else if arguments.json {
                let mut object = serde_json::to_value(&packet).map_err(io::Error::from)?;
                object["joined"] = serde_json::to_value(joined_packet.fate).map_err(io::Error::from)?;
                writeln!(self.output, "{object}")?;
            } else {
                writeln!(self.output, "{fate:>14}  {packet}")?;
            }
        }
        self.draw_ladders()?;
        if arguments.json {
            for direction in &joined.directions {
                self.print_json(direction)?;
            }
            return Ok(());
        }
        writeln!(self.output, "\n{joined}")?;
        Ok(writeln!(self.output, "{}", self.counts)?)
    }

    /// Draws each packet as it is captured.
    fn draw_live_ladders(&mut self, capture: CaptureReader<Box<dyn BufRead>>) -> Result<(), TraceError> {
        let mut ladders = LiveLadder::new(NameTable::new(), terminal::style());
        let (from, to) = self.arguments.time_range();
        self.for_each_packet(capture, |this, _, packet| {
            if (from..=to).contains(&packet.time_ns) {
                let lines = ladders.draw_packet(&packet, this.arguments.qp.as_deref());
                this.output.write_all(lines.as_bytes())?;
                this.output.flush()?;
            }
            Ok(())
        })?;
        Ok(writeln!(self.output, "\n{}", self.counts)?)
    }

    fn print_summary(&mut self) -> io::Result<()> {
        self.draw_ladders()?;
        if !self.arguments.json {
            writeln!(self.output, "{}", self.counts)?;
        }
        self.output.flush()
    }

    fn draw_ladders(&mut self) -> io::Result<()> {
        let (from, to) = self.arguments.time_range();
        let style = terminal::style();
        for mut ladder in self.ladders.ladders() {
            ladder.retain_range(from, to);
            let is_selected = self.arguments.qp.as_ref().is_none_or(|qp| ladder.involves(qp));
            if is_selected && !ladder.steps.is_empty() {
                writeln!(self.output, "{}", ladder.draw(style))?;
            }
        }
        Ok(())
    }
}

/// Writes a capture of the same packets in RoCE v1 frames. Other frames, such as PFC pauses, are copied.
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
            && let Some(addressing) = frame.network.addressing()
        {
            return self.writer.write_packet(
                *time_ns,
                self.interface,
                PacketDirection::Inbound,
                &addressing,
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

/// Prints a summary, or writes a trace for Perfetto.
fn analyze(arguments: &Arguments) -> CommandResult {
    let analyzer = read_any(&arguments.file)?;
    if let Some(path) = &arguments.perfetto {
        let written = File::create(path).map(BufWriter::new).and_then(|mut file| {
            serde_json::to_writer(&mut file, &analyzer.perfetto()).map_err(io::Error::from)?;
            file.flush()
        });
        written.map_err(|error| {
            let text = format!("cannot write {}: {error}; choose another file", path.display());
            bad_input(text)
        })?;
        outln!("trace: {}", path.display());
        return Ok(ExitCode::SUCCESS);
    }
    let summary = analyzer.summary();
    let text = match () {
        () if arguments.json => serde_json::to_string(&summary).expect("plain fields make an object") + "\n",
        () if arguments.csv => summary.csv(),
        () => summary.to_string(),
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

impl Arguments {
    /// The range of `--from` and `--to` in nanoseconds.
    fn time_range(&self) -> (i64, i64) {
        (self.from.unwrap_or(i64::MIN), self.to.unwrap_or(i64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_or_are_seconds() {
        for (text, nanoseconds) in [
            ("0", 0),
            ("2", 2_000_000_000),
            ("0.000001", 1_000),
            ("7ns", 7),
            ("10us", 10_000),
            ("10 µs", 10_000),
            ("1.5ms", 1_500_000),
            ("2s", 2_000_000_000),
        ] {
            assert_eq!(parse_time(text), Ok(nanoseconds), "{text}");
        }
        for text in ["", "us", "-1s", "1e3", "1 minute", "99999999999999s", "9999999999"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }
}
