//! The event log of a daemon while a program runs: read as it grows, and kept as far as explanations need it.

use crate::terminal;
use rustix::fs::{FallocateFlags, MemfdFlags};
use serde_json::Value;
use softhca::DaemonControl;
use softhca_trace::lint::Linter;
use softhca_trace::log::{self, Header};
use softhca_trace::why::LogAnalyzer;
use std::collections::VecDeque;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often the log is read while a program runs.
pub const LOG_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The number of recent lines that are kept.
const MAX_RECENT_LINES: usize = 1 << 16;
/// The number of failures whose history is kept; later ones are only counted.
const MAX_FAILURES_KEPT: usize = 8;
/// The number of failures that are explained.
const MAX_FAILURES_EXPLAINED: usize = 4;
/// The bytes of one read.
const READ_CHUNK: usize = 1 << 20;

/// The work request of a line: host, number of the queue pair, wr_id.
type RequestId = (String, u64, u64);

/// Lines of a log, in order: the configuration of queue pairs, the history of failures, the start of work requests that
/// have not completed, and the most recent lines.
#[derive(Default)]
struct RecentLines {
    kept: BTreeMap<u64, Box<str>>,
    window: VecDeque<Box<str>>,
    /// The number of the first line in the window.
    first: u64,
    /// The kept lines in which the outstanding work requests start.
    started: BTreeMap<RequestId, VecDeque<u64>>,
    failures: usize,
}

impl RecentLines {
    fn push(&mut self, line: &str) {
        if self.window.len() == MAX_RECENT_LINES {
            self.retire_oldest();
        }
        self.window.push_back(line.into());
    }

    /// Removes the oldest line of the window, and keeps what later ones need.
    fn retire_oldest(&mut self) {
        let Some(oldest) = self.window.pop_front() else { return };
        let number = self.first;
        self.first += 1;
        match event_name(&oldest) {
            "qp:configured" | "qp:state_changed" => _ = self.kept.insert(number, oldest),
            "work:fetched" => {
                if let Some(request) = request_id(&oldest) {
                    self.started.entry(request).or_default().push_back(number);
                    self.kept.insert(number, oldest);
                }
            }
            "work:completed" | "work:unsignaled_completed" => {
                let Some(request) = request_id(&oldest) else { return };
                if let Entry::Occupied(mut started) = self.started.entry(request) {
                    self.kept.remove(&started.get_mut().pop_front().unwrap_or_default());
                    if started.get().is_empty() {
                        started.remove();
                    }
                }
            }
            _ => {}
        }
    }

    /// Keeps the recent lines, because a work request failed.
    fn keep_window(&mut self) {
        self.failures += 1;
        if self.failures <= MAX_FAILURES_KEPT {
            for line in self.window.drain(..) {
                self.kept.insert(self.first, line);
                self.first += 1;
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        self.kept.values().chain(&self.window).map(|line| &**line)
    }
}

/// The work request of a line about one.
fn request_id(line: &str) -> Option<RequestId> {
    let line: Value = serde_json::from_str(line).ok()?;
    let data = &line["data"];
    Some((line["host"].as_str()?.into(), data["qp"].as_u64()?, data["wr_id"].as_u64()?))
}

/// The event name of a line, without parsing all of it.
pub fn event_name(line: &str) -> &str {
    let name = line.split_once("\"name\":\"").and_then(|(_, rest)| rest.split_once('"'));
    name.map_or("", |(name, _)| name)
}

/// Whether a line is a failed completion other than a flushed one.
fn is_failure(line: &str) -> bool {
    event_name(line) == "work:completed"
        && !line.contains("\"status\":\"SUCCESS\"")
        && !line.contains("\"status\":\"WR_FLUSH_ERR\"")
}

/// Storage of the log.
enum LogStorage {
    /// In a file of the user.
    File(PathBuf),
    /// In memory, freed after reading.
    Memory,
    /// In a file that is removed after reading.
    Temporary,
}

/// The event log of a daemon, read while it is written.
pub struct DaemonEventLog {
    file: File,
    storage: LogStorage,
    offset: u64,
    partial_line: Vec<u8>,
    header: Option<Header>,
    recent: RecentLines,
    linter: Option<Linter>,
    findings_printed: usize,
}

impl DaemonEventLog {
    /// Creates a log in `path`, or in memory.
    pub fn create(path: Option<&Path>) -> io::Result<DaemonEventLog> {
        let (file, store) = match path {
            Some(path) => {
                let mut options = File::options();
                options.create(true).truncate(true).read(true).write(true);
                let file = options.open(path)?;
                (file, LogStorage::File(path.into()))
            }
            None => {
                let memory = rustix::fs::memfd_create("softhca-events", MemfdFlags::CLOEXEC)?;
                (File::from(memory), LogStorage::Memory)
            }
        };
        Ok(DaemonEventLog::new(file, store))
    }

    /// A log that is complete, and that its owner removes.
    pub fn read_only(file: File) -> DaemonEventLog {
        DaemonEventLog::new(file, LogStorage::Temporary)
    }

    fn new(file: File, storage: LogStorage) -> DaemonEventLog {
        DaemonEventLog {
            file,
            storage,
            offset: 0,
            partial_line: Vec::new(),
            header: None,
            recent: RecentLines::default(),
            linter: None,
            findings_printed: 0,
        }
    }

    /// Has the daemon write events to this log, and packets to `capture`, from now on.
    pub fn start(&self, connection: &mut DaemonControl, capture: Option<&File>) -> Result<(), String> {
        let capture = capture.map(|file| file.as_fd());
        connection.start_recording(capture, Some(self.file.as_fd())).map_err(|error| error.to_string())
    }

    /// Has another daemon write its events from now on. The first daemon's part of the log is complete and stays.
    pub fn start_again(&mut self, connection: &mut DaemonControl) -> Result<(), String> {
        let memory = rustix::fs::memfd_create("softhca-events", MemfdFlags::CLOEXEC);
        self.file = File::from(memory.map_err(|error| error.to_string())?);
        (self.offset, self.header) = (0, None);
        self.partial_line.clear();
        self.start(connection, None)
    }

    /// Reads the new lines and calls `on_entry` for the events that `wanted` selects. With `lint`, prints findings.
    pub fn read_new(
        &mut self,
        lint: bool,
        wanted: fn(&str) -> bool,
        on_entry: &mut dyn FnMut(&log::Entry),
    ) -> io::Result<()> {
        let mut chunk = vec![0; READ_CHUNK];
        loop {
            let count = self.file.read_at(&mut chunk, self.offset)?;
            if count == 0 {
                break;
            }
            self.partial_line.extend_from_slice(&chunk[..count]);
            self.free_memory(count as u64);
            self.offset += count as u64;
            let whole = self.partial_line.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            let lines: Vec<u8> = self.partial_line.drain(..whole).collect();
            for line in String::from_utf8_lossy(&lines).lines() {
                self.process_line(line, lint, wanted, on_entry);
            }
        }
        self.print_findings();
        Ok(())
    }

    /// Frees the memory of the lines that were read.
    fn free_memory(&self, count: u64) {
        if let LogStorage::Memory = self.storage {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&self.file, flags, self.offset, count);
        }
    }

    fn process_line(
        &mut self,
        line: &str,
        lint: bool,
        wanted: fn(&str) -> bool,
        on_entry: &mut dyn FnMut(&log::Entry),
    ) {
        let Some(header) = &self.header else {
            self.header = serde_json::from_str(line).ok();
            return;
        };
        self.recent.push(line);
        if lint || wanted(event_name(line)) {
            // The daemon has the same version, so every line parses.
            let Ok(entry) = serde_json::from_str::<log::Entry>(line) else { return };
            if lint {
                self.linter.get_or_insert_with(|| Linter::new(header)).push(&entry);
            }
            if wanted(entry.event.name()) {
                on_entry(&entry);
            }
        }
        if is_failure(line) {
            self.recent.keep_window();
        }
    }

    /// Prints the new findings.
    fn print_findings(&mut self) {
        let Some(linter) = &self.linter else { return };
        for finding in linter.findings().skip(self.findings_printed) {
            errln!("softhca lint: {finding}");
            self.findings_printed += 1;
        }
    }

    /// Whether the linter found errors.
    pub fn has_lint_errors(&self) -> bool {
        self.linter.as_ref().is_some_and(|linter| linter.counts()[0] > 0)
    }

    /// The number of findings.
    pub fn lint_summary(&self) -> String {
        let [errors, warnings, notes] = self.linter.as_ref().map_or([0; 3], Linter::counts);
        format!("softhca lint: {errors} errors, {warnings} warnings, {notes} notes")
    }

    /// Explains the problems of the run, if there are any: work requests that failed or wait for ever, and connections
    /// that could not be set up.
    pub fn explanation(&self) -> Option<String> {
        let mut analyzer = LogAnalyzer::new(self.header.as_ref()?);
        self.recent
            .iter()
            .filter_map(|line| serde_json::from_str(line).ok())
            .for_each(|entry| analyzer.push(entry));
        let mut answer = analyzer.problems()?;
        let problems = answer.explanations.len().max(self.recent.failures);
        let more = problems.saturating_sub(MAX_FAILURES_EXPLAINED);
        answer.explanations.truncate(MAX_FAILURES_EXPLAINED);
        answer.summary = match (&self.storage, more) {
            (LogStorage::File(path), 0) => format!("Run `softhca why {}` to see this again.", path.display()),
            (LogStorage::File(path), more) => {
                format!("{more} more problems: run `softhca why {}`.", path.display())
            }
            (LogStorage::Memory | LogStorage::Temporary, 0) => String::new(),
            (LogStorage::Memory, more) => {
                format!("{more} more problems: keep the log with `--log FILE` to explain them.")
            }
            (LogStorage::Temporary, more) => {
                format!("{more} more problems: keep the log with SOFTHCA_LOG=FILE to explain them.")
            }
        };
        Some(answer.text(terminal::style().width))
    }
}

#[cfg(test)]
mod tests {
    use super::{RecentLines, event_name, is_failure};

    #[test]
    fn the_history_of_a_failure_is_kept_in_order() {
        let mut recent = RecentLines::default();
        let configured = r#"{"time":1,"host":"a","name":"qp:configured","data":{}}"#;
        recent.push(configured);
        for n in 0..super::MAX_RECENT_LINES + 10 {
            recent.push(&format!(r#"{{"time":{n},"host":"a","name":"packet:sent","data":{{}}}}"#));
        }
        assert_eq!(recent.kept.len(), 1, "the configuration of a queue pair is kept longer than packets");
        let failed = r#"{"time":9,"host":"a","name":"work:completed","data":{"status":"RETRY_EXC_ERR"}}"#;
        assert!(is_failure(failed));
        recent.push(failed);
        recent.keep_window();
        assert_eq!(recent.kept.len(), super::MAX_RECENT_LINES + 1);
        assert_eq!(recent.iter().next().map(event_name), Some("qp:configured"));
        assert_eq!(recent.iter().last().map(event_name), Some("work:completed"));
        assert!(recent.window.is_empty());
    }

    #[test]
    fn the_start_of_an_outstanding_request_is_kept() {
        let mut recent = RecentLines::default();
        let line = |name: &str, wr_id: u32| {
            format!(
                r#"{{"time":1,"host":"a","name":"{name}","data":{{"qp":7,"wr_id":{wr_id},"status":"SUCCESS"}}}}"#
            )
        };
        for wr_id in [1, 1, 2, 3] {
            recent.push(&line("work:fetched", wr_id));
        }
        for (name, wr_id) in [("work:completed", 1), ("work:unsignaled_completed", 2)] {
            recent.push(&line(name, wr_id));
        }
        for _ in 0..super::MAX_RECENT_LINES {
            recent.push(r#"{"time":2,"host":"a","name":"recovery:rnr_wait_started","data":{}}"#);
        }
        let kept: Vec<&str> = recent.kept.values().map(|line| &**line).collect();
        assert_eq!(kept, [line("work:fetched", 1), line("work:fetched", 3)]);
        assert_eq!(recent.started.len(), 2);
    }
}
