//! Reads an event log, a capture, or a folder with the files of a run.

use crate::section::Section;
use crate::why::{Analysis, WhyReport};
use softhca_trace::log::{CaptureConverter, Entry, Header, LogError, LogEvent};
use softhca_trace::{
    CaptureError, CaptureReader, EventLogReader, LinkType, Packet, PacketContents, PacketCounts, Record,
};
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The name of a run's event log in its folder.
const EVENTS: &str = "events.jsonl";
/// The name of its verdict.
const RESULT: &str = "result.json";
/// A longer result is not read.
const MAX_RESULT_BYTES: u64 = 4 << 20;
/// The most events that a page contains. A longer log is shown up to here.
const MAX_EVENTS: u64 = 4_000_000;
/// The bytes of a frame that a page contains: every header, and a whole management datagram.
const MAX_FRAME_PREFIX: usize = 384;
/// The most bytes of all frames together.
const MAX_FRAME_BYTES: usize = 256 << 20;

/// Why a run cannot be read at all.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The operating system reports an error.
    #[error("{}: {cause}; give an event log, a folder that `softhca run --out` wrote, or a pcap or pcapng file", path.display())]
    Io {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    /// A folder without an event log or capture.
    #[error("{}: there is no events.jsonl and no capture in this folder; `softhca run --out` writes them", path.display())]
    EmptyFolder { path: PathBuf },
    /// A folder with several captures and no log.
    #[error("{}: there is no events.jsonl and more than one capture in this folder; name one of them", path.display())]
    AmbiguousCaptures { path: PathBuf },
    /// A log whose first line cannot be read.
    #[error("{}: {cause}", path.display())]
    Log {
        path: PathBuf,
        #[source]
        cause: LogError,
    },
    /// A capture whose start cannot be read.
    #[error("{}: {cause}", path.display())]
    Capture {
        path: PathBuf,
        #[source]
        cause: CaptureError,
    },
}

/// Receives the stage and its progress from 0 to 1.
pub(crate) type ReportProgress<'a> = &'a dyn Fn(&'static str, f64);

const READING_LOG: &str = "reading the event log";
const READING_CAPTURE: &str = "reading the capture";
const CONVERTING: &str = "converting packets";
/// The number of packets between two reports.
const REPORT_INTERVAL: u64 = 1000;

/// A file that reports how much of it has been read.
struct ProgressReader<'a> {
    file: File,
    read: u64,
    total: u64,
    stage: &'static str,
    report: ReportProgress<'a>,
}

impl<'a> ProgressReader<'a> {
    fn open(path: &Path, stage: &'static str, report: ReportProgress<'a>) -> io::Result<Self> {
        let file = File::open(path)?;
        let total = file.metadata()?.len();
        Ok(ProgressReader { file, read: 0, total, stage, report })
    }
}

impl Read for ProgressReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.read += count as u64;
        // A pipe has no length.
        (self.report)(self.stage, (self.read as f64 / self.total.max(self.read).max(1) as f64).min(1.0));
        Ok(count)
    }
}

/// The kind of file that a run was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Log,
    Capture,
}

impl Source {
    pub const fn name(self) -> &'static str {
        match self {
            Source::Log => "log",
            Source::Capture => "capture",
        }
    }
}

/// A run, read and packed for a page.
pub struct Run {
    pub(crate) name: String,
    pub(crate) source: Source,
    /// The event log, line by line.
    pub(crate) lines: Section,
    /// The bytes of packets: see [`RunBuilder::add_frame`].
    pub(crate) frames: Vec<u8>,
    pub(crate) frame_count: u64,
    pub(crate) events: u64,
    /// The verdict and its expectations, as `softhca run --json` prints them; only for a folder of a run.
    pub(crate) result: Option<serde_json::Value>,
    /// The explanation of failures; none for a capture.
    pub(crate) why: Option<WhyReport>,
    /// Notes about omitted and damaged parts.
    pub(crate) notes: Vec<String>,
}

impl Run {
    /// Reads a log, a capture or a folder. A damaged file is read up to the damage, with a note.
    pub fn open(path: &Path) -> Result<Run, OpenError> {
        Run::open_with_progress(path, &|_, _| ())
    }

    /// As [`Run::open`]; calls `report` with the stage and its progress from 0 to 1.
    pub fn open_with_progress(path: &Path, report: ReportProgress) -> Result<Run, OpenError> {
        if path.is_dir() {
            return Run::open_folder(path, report);
        }
        let io = |cause| OpenError::Io { path: path.into(), cause };
        let mut file = BufReader::new(File::open(path).map_err(io)?);
        if file.fill_buf().map_err(io)?.first() == Some(&b'{') {
            Run::open_log(path, None, report)
        } else {
            Run::open_capture(path, report)
        }
    }

    /// The notes: what the page omits and what is damaged.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The explanation of failures.
    pub fn why(&self) -> Option<&WhyReport> {
        self.why.as_ref()
    }

    /// The bytes of packets, as the page reads them.
    pub fn frames(&self) -> &[u8] {
        &self.frames
    }

    fn open_folder(path: &Path, report: ReportProgress) -> Result<Run, OpenError> {
        let io = |cause| OpenError::Io { path: path.into(), cause };
        let mut captures = Vec::new();
        for entry in std::fs::read_dir(path).map_err(io)? {
            let file = entry.map_err(io)?.path();
            let extension = file.extension().and_then(|extension| extension.to_str());
            if matches!(extension, Some("pcap" | "pcapng")) {
                captures.push(file);
            }
        }
        captures.sort();
        let events = path.join(EVENTS);
        let mut run = match (events.is_file(), &captures[..]) {
            (true, [capture]) => Run::open_log(&events, Some(capture), report),
            (true, []) => Run::open_log(&events, None, report),
            (true, _) => {
                let mut run = Run::open_log(&events, None, report)?;
                run.notes.push(
                    "The folder has more than one capture, so packets are shown without their bytes.".into(),
                );
                Ok(run)
            }
            (false, [capture]) => Run::open_capture(capture, report),
            (false, []) => Err(OpenError::EmptyFolder { path: path.into() }),
            (false, _) => Err(OpenError::AmbiguousCaptures { path: path.into() }),
        }?;
        run.read_result(&path.join(RESULT));
        Ok(run)
    }

    /// Takes the verdict of the run from its file. Without one, or with a damaged one, the page has the events only.
    fn read_result(&mut self, path: &Path) {
        let Ok(file) = File::open(path) else { return };
        match serde_json::from_reader(BufReader::new(file.take(MAX_RESULT_BYTES))) {
            Ok(result) => self.result = Some(result),
            Err(error) => {
                self.notes.push(format!("The verdict of the run cannot be read: {RESULT}: {error}."))
            }
        }
    }

    fn open_log(path: &Path, capture: Option<&Path>, report: ReportProgress) -> Result<Run, OpenError> {
        let open = |path: &Path, stage| {
            let file = ProgressReader::open(path, stage, report);
            Ok(BufReader::new(file.map_err(|cause| OpenError::Io { path: path.into(), cause })?))
        };
        let capture = capture.map(|capture| open(capture, READING_CAPTURE)).transpose()?;
        Run::from_log(&file_name(path), open(path, READING_LOG)?, capture)
            .map_err(|cause| OpenError::Log { path: path.into(), cause })
    }

    /// Reads an event log, and takes the bytes of its packets from a capture of the same run.
    pub fn from_log(name: &str, log: impl BufRead, capture: Option<impl Read>) -> Result<Run, LogError> {
        let reader = EventLogReader::new(log)?;
        let mut packer = RunBuilder::new(name, Source::Log, reader.header());
        let mut bytes = capture.map(FrameIndex::read);
        let mut asked = Analysis::new(reader.header());
        for entry in reader {
            match entry {
                Ok(_) if packer.is_full() => break,
                Ok(entry) => {
                    if let Some(record) = bytes.as_mut().and_then(|bytes| bytes.take_frame(&entry)) {
                        packer.add_frame(&record);
                    }
                    packer.add_entry(&entry);
                    asked.push(entry);
                }
                Err(error) => {
                    packer.notes.push(format!(
                        "The log cannot be read beyond {error}. Later events are not shown; was the run or the file cut off?"
                    ));
                    break;
                }
            }
        }
        packer.notes.extend(bytes.and_then(|bytes| bytes.note));
        packer.run.why = Some(asked.finish());
        Ok(packer.finish())
    }

    fn open_capture(path: &Path, report: ReportProgress) -> Result<Run, OpenError> {
        let wrong = |cause| OpenError::Capture { path: path.into(), cause };
        let file = ProgressReader::open(path, READING_CAPTURE, report)
            .map_err(|cause| OpenError::Io { path: path.into(), cause })?;
        let mut conversion = CaptureConverter::default();
        let mut records = BTreeMap::new();
        let (mut counts, mut start_ns, mut kept) = (PacketCounts::default(), None, 0);
        let (mut others, mut notes) = (BTreeMap::<String, u64>::new(), Vec::new());
        for record in CaptureReader::new(BufReader::new(file)).map_err(wrong)? {
            let mut record = match record {
                Ok(record) => record,
                Err(error) => {
                    notes.push(format!(
                        "The capture cannot be read beyond {error}. Later packets are not shown."
                    ));
                    break;
                }
            };
            let packet = Packet::new(&record, *start_ns.get_or_insert(record.time_ns));
            match &packet.contents {
                PacketContents::Other(what) => *others.entry(what.to_string()).or_default() += 1,
                PacketContents::Pause(_) => *others.entry("pause frames".into()).or_default() += 1,
                _ => {}
            }
            let is_shown = matches!(packet.contents, PacketContents::Roce(_) | PacketContents::Malformed(..));
            let is_intact = matches!(&packet.contents, PacketContents::Roce(roce) if roce.icrc_ok);
            conversion.push(&packet);
            counts.add(&packet);
            if is_shown && kept < MAX_FRAME_BYTES {
                record.data.truncate(MAX_FRAME_PREFIX);
                kept += record.data.len();
                records.insert(counts.packets - 1, (record, is_intact));
            }
            if counts.roce() >= MAX_EVENTS / 4 {
                notes.push(format!(
                    "The capture is longer: the first {} RoCE packets are shown.",
                    counts.roce()
                ));
                break;
            }
        }
        notes.extend(other_protocols_note(&counts, &others));
        let (header, entries) = conversion.finish(&file_name(path));
        let mut packer = RunBuilder::new(&file_name(path), Source::Capture, &header);
        packer.notes = notes;
        // A packet has several entries; most are of a sent packet.
        let expected = counts.roce().max(1) as f64;
        let mut sent = 0;
        let mut asked = Analysis::new(&header);
        for (number, entry) in entries {
            if number.is_some() {
                sent += 1;
                if sent % REPORT_INTERVAL == 0 {
                    report(CONVERTING, (sent as f64 / expected).min(1.0));
                }
            }
            if let Some(number) = number
                && let Some((record, is_intact)) = records.remove(&number)
            {
                packer.add_frame(&FramePrefix::new(&record, number, is_intact));
            }
            packer.add_entry(&entry);
            asked.push_converted((number, entry));
        }
        packer.run.why = Some(asked.finish());
        Ok(packer.finish())
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// A sentence about the other packets of a capture.
fn other_protocols_note(counts: &PacketCounts, others: &BTreeMap<String, u64>) -> Option<String> {
    let count: u64 = others.values().sum();
    if counts.roce() == 0 {
        let packets = counts.packets;
        return Some(format!(
            "The capture has no RoCE packet ({packets} packets read). RoCEv2 is UDP to port 4791; was it captured on the right interface?"
        ));
    }
    let mut kinds: Vec<(&String, &u64)> = others.iter().collect();
    kinds.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let named: Vec<String> = kinds.iter().take(3).map(|(what, count)| format!("{count} × {what}")).collect();
    let more = if kinds.len() > 3 { ", …" } else { "" };
    (count > 0).then(|| {
        format!(
            "{count} of {} packets belong to other protocols and are not shown: {}{more}.",
            counts.packets,
            named.join(", ")
        )
    })
}

/// The part of a frame that the page contains.
struct FramePrefix {
    /// The number of the packet in its file, from 1.
    number: u32,
    link_type: LinkType,
    icrc_ok: bool,
    original_length: u32,
    data: Vec<u8>,
}

impl FramePrefix {
    fn new(record: &Record, index: u64, is_intact: bool) -> FramePrefix {
        let data = record.data[..record.data.len().min(MAX_FRAME_PREFIX)].to_vec();
        FramePrefix {
            number: index as u32 + 1,
            link_type: record.link_type,
            icrc_ok: is_intact,
            original_length: record.original_len as u32,
            data,
        }
    }
}

/// Writes the sections of a run.
struct RunBuilder {
    run: Run,
    notes: Vec<String>,
}

impl RunBuilder {
    fn new(name: &str, source: Source, header: &Header) -> RunBuilder {
        let (lines, frames) = (Section::new(), Vec::new());
        let name = name.into();
        let run = Run {
            name,
            source,
            lines,
            frames,
            frame_count: 0,
            events: 0,
            result: None,
            why: None,
            notes: Vec::new(),
        };
        let mut packer = RunBuilder { run, notes: Vec::new() };
        packer.write_line(header);
        packer
    }

    fn write_line(&mut self, object: &impl serde::Serialize) {
        serde_json::to_writer(&mut self.run.lines, object).expect("a vector grows");
        self.run.lines.write_all(b"\n").expect("a vector grows");
    }

    fn is_full(&mut self) -> bool {
        let is_full = self.run.events >= MAX_EVENTS;
        if is_full {
            self.notes.push(format!("The log is longer: its first {MAX_EVENTS} events are shown."));
        }
        is_full
    }

    fn add_entry(&mut self, entry: &Entry) {
        self.write_line(entry);
        self.run.events += 1;
    }

    /// Adds the bytes of the packet of the next entry. Three words of 32 bits come first: the number of its event, its
    /// original length, and its number in the file from 1. Then come the number of bytes kept (16 bits), its link type
    /// (8) and whether its ICRC is right (8). All are little-endian, and the bytes follow.
    fn add_frame(&mut self, kept: &FramePrefix) {
        let link: u8 = match kept.link_type {
            LinkType::Ethernet => 0,
            LinkType::Ip => 1,
            LinkType::Loopback => 2,
            LinkType::LinuxSll => 3,
            LinkType::LinuxSll2 => 4,
        };
        let bytes = &mut self.run.frames;
        bytes.extend((self.run.events as u32).to_le_bytes());
        bytes.extend(kept.original_length.to_le_bytes());
        bytes.extend(kept.number.to_le_bytes());
        bytes.extend((kept.data.len() as u16).to_le_bytes());
        bytes.extend([link, u8::from(kept.icrc_ok)]);
        bytes.extend(&kept.data);
        self.run.frame_count += 1;
    }

    fn finish(self) -> Run {
        Run { notes: self.notes, ..self.run }
    }
}

/// The fields that identify a packet in both a log and a capture.
type FrameKey = (IpAddr, u32, u32, String);

/// The frames of a capture, by the fields that the log has too. A packet that was sent twice was captured twice, in the
/// same order.
struct FrameIndex {
    frames: BTreeMap<FrameKey, VecDeque<FramePrefix>>,
    note: Option<String>,
}

impl FrameIndex {
    fn read(capture: impl Read) -> FrameIndex {
        let mut bytes = FrameIndex { frames: BTreeMap::new(), note: None };
        if let Err(error) = bytes.fill(capture) {
            bytes.note =
                Some(format!("The capture cannot be read beyond {error}; later packets have no bytes."));
        }
        bytes
    }

    fn fill(&mut self, capture: impl Read) -> Result<(), CaptureError> {
        let mut kept = 0;
        for (index, record) in CaptureReader::new(capture)?.enumerate() {
            let record = record?;
            let packet = Packet::new(&record, 0);
            let PacketContents::Roce(roce) = &packet.contents else { continue };
            let bth = &roce.transport.header.bth;
            let key = (
                roce.frame.network.destination(),
                bth.destination_qp.value(),
                bth.psn.value(),
                bth.opcode.to_string(),
            );
            let frame = FramePrefix::new(&record, index as u64, roce.icrc_ok);
            kept += frame.data.len();
            if kept > MAX_FRAME_BYTES {
                self.note = Some(
                    "The capture is too long: only its first packets are shown with their bytes.".into(),
                );
                break;
            }
            self.frames.entry(key).or_default().push_back(frame);
        }
        Ok(())
    }

    fn take_frame(&mut self, entry: &Entry) -> Option<FramePrefix> {
        let LogEvent::PacketSent { packet, .. } = &entry.event else { return None };
        let key = (packet.peer, packet.dest_qp, packet.psn, packet.opcode.to_string());
        self.frames.get_mut(&key)?.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn progress_grows_in_every_stage_and_reaches_its_end() {
        let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/captures");
        let seen = RefCell::new(Vec::new());
        let report = |stage, share| seen.borrow_mut().push((stage, share));
        for (file, stage) in [("ud-multicast.jsonl", READING_LOG), ("ud-multicast.pcapng", READING_CAPTURE)] {
            seen.borrow_mut().clear();
            Run::open_with_progress(&captures.join(file), &report).expect("a run");
            let seen = seen.borrow();
            let shares: Vec<f64> =
                seen.iter().filter(|(name, _)| *name == stage).map(|(_, share)| *share).collect();
            assert!(shares.is_sorted() && shares.last() == Some(&1.0), "{file}: {seen:?}");
        }
    }
}
