//! The event log and the capture of embedded devices: `SOFTHCA_LOG`, `SOFTHCA_CAPTURE` and the options of the same
//! names.

use crate::Error;
use crate::real_clock::real_start;
use parking_lot::Mutex;
use softhca_fabric::{EventSink, HostId, IdOffsets, RuleId};
use softhca_trace::{CapturePoints, CardRecorder, NameTable, Recording};
use softhca_udp::HostNetwork;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{self, BufWriter};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// Where the environment asks for the event log of all embedded devices.
pub const LOG_VARIABLE: &str = "SOFTHCA_LOG";
/// Where the environment asks for the capture of all embedded devices.
pub const CAPTURE_VARIABLE: &str = "SOFTHCA_CAPTURE";

/// The numbers that each device of a file has for itself, the ports and the links of its switch.
const IDS_PER_DEVICE: u32 = 1 << 11;

type Output = BufWriter<File>;

/// A file that several devices of the process write.
struct SharedFile {
    recording: Arc<std::sync::Mutex<Recording<Output>>>,
    devices: u32,
}

/// The files of the process. They stay open until it ends, because a later device continues them.
type Files = Mutex<BTreeMap<PathBuf, SharedFile>>;
static LOGS: Files = Mutex::new(BTreeMap::new());
static CAPTURES: Files = Mutex::new(BTreeMap::new());

/// The path of a recording: `%p` stands for the number of the process.
fn recording_path(option: Option<PathBuf>, variable: &str) -> Option<PathBuf> {
    let path = option.or_else(|| std::env::var_os(variable).map(PathBuf::from))?;
    match path.to_str() {
        Some(text) if text.contains("%p") => Some(text.replace("%p", &std::process::id().to_string()).into()),
        _ => Some(path),
    }
}

fn start_log(output: Output) -> io::Result<Recording<Output>> {
    let title = std::env::args().next().unwrap_or_default();
    Ok(Recording::new(NameTable::new()).with_log(output, &title))
}

fn start_capture(output: Output) -> io::Result<Recording<Output>> {
    Recording::new(NameTable::new()).with_capture(output, CapturePoints::HostPorts)
}

/// Adds a device to a file, which the first device creates.
fn open(
    files: &Files,
    path: PathBuf,
    address: IpAddr,
    what: &'static str,
    start: impl FnOnce(Output) -> io::Result<Recording<Output>>,
) -> Result<CardRecorder<Output>, Error> {
    let mut files = files.lock();
    let file = match files.entry(path) {
        Entry::Occupied(file) => file.into_mut(),
        Entry::Vacant(place) => {
            let failed = |source: io::Error| {
                let message = format!("{}: {source}", place.key().display());
                Error::System { what, source: io::Error::new(source.kind(), message) }
            };
            let recording = File::create(place.key()).map(BufWriter::new).and_then(start).map_err(failed)?;
            let recording = Arc::new(std::sync::Mutex::new(recording));
            place.insert(SharedFile { recording, devices: 0 })
        }
    };
    let host = HostId(file.devices * IDS_PER_DEVICE);
    file.devices += 1;
    let card = CardRecorder::new(file.recording.clone(), IdOffsets::of_card(host), real_start());
    // A log names an embedded device by its address: readers find the peers of connections by it.
    card.lock().name(|names| names.add_card(host, &address.to_string(), address));
    Ok(card)
}

type BoxedSink = Box<dyn EventSink + Send>;

/// The files of a device.
#[derive(Default)]
pub(crate) struct DeviceRecordings {
    cards: Vec<CardRecorder<Output>>,
}

impl DeviceRecordings {
    /// Opens the files that options and environment ask for.
    pub fn open(
        log: Option<PathBuf>,
        capture: Option<PathBuf>,
        address: IpAddr,
    ) -> Result<DeviceRecordings, Error> {
        let log = recording_path(log, LOG_VARIABLE)
            .map(|path| open(&LOGS, path, address, "creating the event log", start_log));
        let capture = recording_path(capture, CAPTURE_VARIABLE)
            .map(|path| open(&CAPTURES, path, address, "creating the capture", start_capture));
        let cards = [log, capture].into_iter().flatten().collect::<Result<_, _>>()?;
        Ok(DeviceRecordings { cards })
    }

    /// Names a fault rule.
    pub fn name_rule(&self, rule: RuleId, name: &str) {
        self.cards.iter().for_each(|card| card.lock().name(|names| names.add_rule(rule, name)));
    }

    /// A sink for the events of the device, which passes them on.
    pub fn sink(&self, forward_to: BoxedSink) -> BoxedSink {
        if self.cards.is_empty() {
            return forward_to;
        }
        let cards = self.cards.iter().map(|card| Box::new(card.clone()) as BoxedSink);
        Box::new(cards.chain([forward_to]).collect::<Vec<_>>())
    }

    /// A sink for the events of the device's switch.
    pub fn switch_sink(&self) -> BoxedSink {
        Box::new(self.cards.iter().map(CardRecorder::of_network).collect::<Vec<_>>())
    }

    /// Names the switch of the device and its links.
    pub fn name_network(&self, network: &HostNetwork) {
        network.with_fabric(|fabric| {
            for card in self.cards.iter().map(CardRecorder::of_network) {
                card.lock().name(|names| names.add_fabric(fabric, network.topology(), card.offsets()));
            }
        });
    }
}
