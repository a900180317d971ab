//! The event log and the capture of embedded devices: `SOFTHCA_LOG`, `SOFTHCA_CAPTURE` and the options of the same
//! names.

use crate::Error;
use crate::real_clock::real_now;
use parking_lot::Mutex;
use softhca_engine::Instant;
use softhca_fabric::{EventSink, HostId, LinkId, NetworkEvent, Stage};
use softhca_trace::{CaptureWriter, EventLog, NameTable, PortTap};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, LineWriter};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the environment asks for the event log of all embedded devices.
pub const LOG_VARIABLE: &str = "SOFTHCA_LOG";
/// Where the environment asks for the capture of all embedded devices.
pub const CAPTURE_VARIABLE: &str = "SOFTHCA_CAPTURE";

/// A file that several devices of the process write.
struct SharedFile<W> {
    output: W,
    devices: u32,
}

type SharedLog = Arc<Mutex<SharedFile<EventLog<LineWriter<File>>>>>;
type SharedCapture = Arc<Mutex<SharedFile<CaptureWriter<BufWriter<File>>>>>;

/// The files of the process. They stay open until it ends, because a later device continues them.
static LOGS: Mutex<BTreeMap<PathBuf, SharedLog>> = Mutex::new(BTreeMap::new());
static CAPTURES: Mutex<BTreeMap<PathBuf, SharedCapture>> = Mutex::new(BTreeMap::new());

/// The path of a recording: `%p` stands for the number of the process.
fn recording_path(option: Option<PathBuf>, variable: &str) -> Option<PathBuf> {
    let path = option.or_else(|| std::env::var_os(variable).map(PathBuf::from))?;
    match path.to_str() {
        Some(text) if text.contains("%p") => Some(text.replace("%p", &std::process::id().to_string()).into()),
        _ => Some(path),
    }
}

fn open<W>(
    files: &Mutex<BTreeMap<PathBuf, Arc<Mutex<SharedFile<W>>>>>,
    path: &Path,
    what: &'static str,
    start: impl FnOnce(File) -> std::io::Result<W>,
) -> Result<Arc<Mutex<SharedFile<W>>>, Error> {
    let mut files = files.lock();
    if let Some(file) = files.get(path) {
        return Ok(file.clone());
    }
    let failed = |source: std::io::Error| {
        let message = format!("{}: {source}", path.display());
        Error::System { what, source: std::io::Error::new(source.kind(), message) }
    };
    let output = File::create(path).and_then(start).map_err(failed)?;
    let file = Arc::new(Mutex::new(SharedFile { output, devices: 0 }));
    files.insert(path.into(), file.clone());
    Ok(file)
}

/// Writes the events and packets of one device, and passes them on.
struct RecordingSink {
    log: Option<(SharedLog, HostId)>,
    capture: Option<(SharedCapture, PortTap)>,
    forward_to: Box<dyn EventSink + Send>,
}

/// Adds what options and environment ask for to the sink of a device.
pub(crate) fn record(
    log: Option<PathBuf>,
    capture: Option<PathBuf>,
    address: IpAddr,
    forward_to: Box<dyn EventSink + Send>,
) -> Result<Box<dyn EventSink + Send>, Error> {
    let (log, capture) = (recording_path(log, LOG_VARIABLE), recording_path(capture, CAPTURE_VARIABLE));
    if log.is_none() && capture.is_none() {
        return Ok(forward_to);
    }
    let log = log
        .map(|path| {
            let title = std::env::args().next().unwrap_or_default();
            let start = |file| Ok(EventLog::new(LineWriter::new(file), &title, NameTable::new()));
            let shared = open(&LOGS, &path, "creating the event log", start)?;
            let mut file = shared.lock();
            let host = HostId(file.devices);
            file.devices += 1;
            // A log names an embedded device by its address: readers find the peers of connections by it.
            file.output.names_mut().add_host(host, &address.to_string(), address);
            file.output.names_mut().add_link(LinkId(host.0), [host, host]);
            drop(file);
            Ok::<_, Error>((shared, host))
        })
        .transpose()?;
    let capture = capture
        .map(|path| {
            let failed = |source| Error::System { what: "writing the capture", source };
            let start = |file| CaptureWriter::new(BufWriter::new(file));
            let shared = open(&CAPTURES, &path, "creating the capture", start)?;
            let mut file = shared.lock();
            file.devices += 1;
            let interface = file.output.add_interface(&address.to_string(), "SoftHCA").map_err(failed)?;
            file.output.flush().map_err(failed)?;
            drop(file);
            Ok::<_, Error>((shared, PortTap::new(interface)))
        })
        .transpose()?;
    Ok(Box::new(RecordingSink { log, capture, forward_to }))
}

impl EventSink for RecordingSink {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        // Devices have clocks of their own; a recording has that of the process. A failed write must not stop the
        // device: `EventLog` stops writing then.
        let at = real_now();
        if let Some((log, host)) = &self.log {
            match *event {
                NetworkEvent::Hca { event, .. } => log.lock().output.record_event(at, *host, event),
                NetworkEvent::Fault { fault, .. } => {
                    log.lock().output.record_fault(at, LinkId(host.0), fault);
                }
                _ => {}
            }
        }
        if let Some((capture, tap)) = &mut self.capture {
            let file = &mut *capture.lock();
            let _ = match *event {
                NetworkEvent::Hca { .. } => tap.flush_pending(&mut file.output),
                NetworkEvent::Frame { stage: Stage::Admitted, addressing, packet, .. } => {
                    tap.packet_sent(&mut file.output, at.nanos(), addressing, packet)
                }
                NetworkEvent::Fault { fault, .. } => {
                    tap.add_fault(fault, &NameTable::new());
                    Ok(())
                }
                _ => Ok(()),
            }
            .and_then(|()| file.output.flush());
        }
        self.forward_to.on_event(now, event);
    }
}

impl Drop for RecordingSink {
    fn drop(&mut self) {
        if let Some((capture, tap)) = &mut self.capture {
            let file = &mut *capture.lock();
            let _ = tap.flush_pending(&mut file.output).and_then(|()| file.output.flush());
        }
    }
}
