//! What there is to see: an event log, a capture, or a folder with the files of a run.

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
/// More events than a browser holds with ease. A longer log is shown up to here.
const MAX_EVENTS: u64 = 4_000_000;
/// How much of a frame is kept: every header, and a whole management datagram.
const MAX_FRAME_PREFIX: usize = 384;
/// How much of all frames is kept.
const MAX_FRAME_BYTES: usize = 256 << 20;

/// Why there is nothing to show at all.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The operating system says no.
    #[error("{}: {cause}; give an event log, a folder that `softhca run --out` wrote, or a pcap or pcapng file", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it says.
        #[source]
        cause: io::Error,
    },
    /// A folder without an event log or capture.
    #[error("{}: there is no events.jsonl and no capture in this folder; `softhca run --out` writes them", path.display())]
    EmptyFolder {
        /// The folder.
        path: PathBuf,
    },
    /// A folder with several captures and no log.
    #[error("{}: there is no events.jsonl and more than one capture in this folder; name one of them", path.display())]
    AmbiguousCaptures {
        /// The folder.
        path: PathBuf,
    },
    /// A log whose first line cannot be read.
    #[error("{}: {cause}", path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        cause: LogError,
    },
    /// A capture whose start cannot be read.
    #[error("{}: {cause}", path.display())]
    Capture {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        cause: CaptureError,
    },
}

/// What a run was read from.
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
    /// The bytes of packets: see [`Packer::frame`].
    pub(crate) frames: Vec<u8>,
    pub(crate) frame_count: u64,
    pub(crate) events: u64,
    /// Why things failed, if somebody asked.
    pub(crate) why: Option<WhyReport>,
    /// What the reader of the page should know: what was left out, what is broken.
    pub(crate) notes: Vec<String>,
}

impl Run {
    /// Reads a log, a capture or a folder. What is broken half way is shown up to there, and noted.
    pub fn open(path: &Path) -> Result<Run, OpenError> {
        if path.is_dir() {
            return Run::open_folder(path);
        }
        let io = |cause| OpenError::Io { path: path.into(), cause };
        let mut file = BufReader::new(File::open(path).map_err(io)?);
        if file.fill_buf().map_err(io)?.first() == Some(&b'{') {
            Run::open_log(path, None)
        } else {
            Run::open_capture(path)
        }
    }

    /// The notes: what was left out, what is broken.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Why things failed.
    pub fn why(&self) -> Option<&WhyReport> {
        self.why.as_ref()
    }

    /// The bytes of packets, as the page reads them.
    pub fn frames(&self) -> &[u8] {
        &self.frames
    }

    fn open_folder(path: &Path) -> Result<Run, OpenError> {
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
        match (events.is_file(), &captures[..]) {
            (true, [capture]) => Run::open_log(&events, Some(capture)),
            (true, []) => Run::open_log(&events, None),
            (true, _) => {
                let mut run = Run::open_log(&events, None)?;
                run.notes.push(
                    "The folder has more than one capture, so packets are shown without their bytes.".into(),
                );
                Ok(run)
            }
            (false, [capture]) => Run::open_capture(capture),
            (false, []) => Err(OpenError::EmptyFolder { path: path.into() }),
            (false, _) => Err(OpenError::AmbiguousCaptures { path: path.into() }),
        }
    }

    fn open_log(path: &Path, capture: Option<&Path>) -> Result<Run, OpenError> {
        let open = |path: &Path| File::open(path).map_err(|cause| OpenError::Io { path: path.into(), cause });
        let capture = capture.map(open).transpose()?.map(BufReader::new);
        Run::from_log(&file_name(path), BufReader::new(open(path)?), capture)
            .map_err(|cause| OpenError::Log { path: path.into(), cause })
    }

    /// Reads an event log, and the bytes of its packets from a capture of the same run.
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
                        "The log cannot be read beyond {error}. What is shown ends there; was the run or the file cut off?"
                    ));
                    break;
                }
            }
        }
        packer.notes.extend(bytes.and_then(|bytes| bytes.note));
        packer.run.why = Some(asked.finish());
        Ok(packer.finish())
    }

    fn open_capture(path: &Path) -> Result<Run, OpenError> {
        let wrong = |cause| OpenError::Capture { path: path.into(), cause };
        let mut conversion = CaptureConverter::default();
        let mut records = BTreeMap::new();
        let (mut tally, mut start_ns, mut kept) = (PacketCounts::default(), None, 0);
        let (mut others, mut notes) = (BTreeMap::<String, u64>::new(), Vec::new());
        for record in CaptureReader::open(path).map_err(wrong)? {
            let mut record = match record {
                Ok(record) => record,
                Err(error) => {
                    notes
                        .push(format!("What is shown is not all: The capture cannot be read beyond {error}"));
                    break;
                }
            };
            let packet = Packet::new(&record, *start_ns.get_or_insert(record.time_ns));
            match &packet.contents {
                PacketContents::Other(what) => *others.entry(what.to_string()).or_default() += 1,
                PacketContents::Pause(_) => *others.entry("pause frames".into()).or_default() += 1,
                _ => {}
            }
            let is_told = matches!(packet.contents, PacketContents::Roce(_) | PacketContents::Malformed(..));
            let is_intact = matches!(&packet.contents, PacketContents::Roce(roce) if roce.icrc_ok);
            conversion.push(&packet);
            tally.add(&packet);
            if is_told && kept < MAX_FRAME_BYTES {
                record.data.truncate(MAX_FRAME_PREFIX);
                kept += record.data.len();
                records.insert(tally.packets - 1, (record, is_intact));
            }
            if tally.roce() >= MAX_EVENTS / 4 {
                notes.push(format!(
                    "The capture is longer: the first {} RoCE packets are shown.",
                    tally.roce()
                ));
                break;
            }
        }
        notes.extend(other_protocols_note(&tally, &others));
        let (header, entries) = conversion.finish(&file_name(path));
        let mut packer = RunBuilder::new(&file_name(path), Source::Capture, &header);
        packer.notes = notes;
        for (number, entry) in entries {
            if let Some((record, is_intact)) = number.and_then(|number| records.remove(&number)) {
                packer.add_frame(&FramePrefix::new(&record, is_intact));
            }
            packer.add_entry(&entry);
        }
        Ok(packer.finish())
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// A sentence about what else is in a capture.
fn other_protocols_note(tally: &PacketCounts, others: &BTreeMap<String, u64>) -> Option<String> {
    let count: u64 = others.values().sum();
    if tally.roce() == 0 {
        let packets = tally.packets;
        return Some(format!(
            "There is no RoCE packet among the {packets} of this capture. RoCEv2 is UDP to port 4791; was it captured on the right interface?"
        ));
    }
    let mut kinds: Vec<(&String, &u64)> = others.iter().collect();
    kinds.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let named: Vec<String> = kinds.iter().take(3).map(|(what, count)| format!("{count} × {what}")).collect();
    let more = if kinds.len() > 3 { ", …" } else { "" };
    (count > 0).then(|| {
        format!(
            "{count} of {} packets are of other protocols and left out: {}{more}.",
            tally.packets,
            named.join(", ")
        )
    })
}

/// A frame as the page gets it.
struct FramePrefix {
    link_type: LinkType,
    icrc_ok: bool,
    original_length: u32,
    data: Vec<u8>,
}

impl FramePrefix {
    fn new(record: &Record, is_intact: bool) -> FramePrefix {
        let data = record.data[..record.data.len().min(MAX_FRAME_PREFIX)].to_vec();
        FramePrefix {
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
        let run =
            Run { name, source, lines, frames, frame_count: 0, events: 0, why: None, notes: Vec::new() };
        let mut packer = RunBuilder { run, notes: Vec::new() };
        packer.write_line(header);
        packer
    }

    fn write_line(&mut self, object: &impl serde::Serialize) {
        serde_json::to_writer(&mut self.run.lines, object).expect("a vector takes everything");
        self.run.lines.write_all(b"\n").expect("a vector takes everything");
    }

    fn is_full(&mut self) -> bool {
        let is_full = self.run.events >= MAX_EVENTS;
        if is_full {
            self.notes.push(format!("The log is longer: its first {MAX_EVENTS} events are shown."));
        }
        is_full
    }

    fn add_entry(&mut self, add_entry: &Entry) {
        self.write_line(add_entry);
        self.run.events += 1;
    }

    /// The bytes of the packet that the next entry is about: the number of its event, its original length (both 32
    /// bits), the bytes kept (16), its link (8), whether its ICRC is right (8), all little-endian, then the bytes.
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
        bytes.extend((kept.data.len() as u16).to_le_bytes());
        bytes.extend([link, u8::from(kept.icrc_ok)]);
        bytes.extend(&kept.data);
        self.run.frame_count += 1;
    }

    fn finish(self) -> Run {
        Run { notes: self.notes, ..self.run }
    }
}

/// What a packet is known by in both a log and a capture.
type FrameKey = (IpAddr, u32, u32, String);

/// The frames of a capture, to be found by what the log says of them. A packet that went twice was captured twice, in
/// the same order.
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
        for record in CaptureReader::new(capture)? {
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
            let frame = FramePrefix::new(&record, roce.icrc_ok);
            kept += frame.data.len();
            if kept > MAX_FRAME_BYTES {
                self.note = Some("The capture is long: only its first packets have their bytes here.".into());
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
