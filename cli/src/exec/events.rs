//! The events of a run: received from the daemon, and kept as far as explanations need them.

use crate::terminal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use softhca::{CompletionStatus, DaemonControl, EventStream, Instant};
use softhca_fabric::NetworkEvent;
use softhca_trace::lint::Linter;
use softhca_trace::log::{Entry, EntryBuilder, Header, LogEvent};
use softhca_trace::why::LogAnalyzer;
use softhca_trace::{NameTable, StreamItem};
use std::collections::VecDeque;
use std::collections::btree_map::{self, BTreeMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// The number of recent entries that are kept.
const MAX_RECENT: usize = 1 << 16;
/// The number of failures whose history is kept; later ones are only counted.
const MAX_FAILURES_KEPT: usize = 8;
/// The number of failures that are explained.
const MAX_FAILURES_EXPLAINED: usize = 4;

/// The number of items that are read at once: faults that are due do not wait for more.
const MAX_READ: usize = 4096;

/// A work request: host, number of the queue pair, wr_id.
type RequestId = (String, u32, u64);

/// Entries in order: the configuration of queue pairs, the history of failures, the start of work requests that have
/// not completed, and the most recent entries.
#[derive(Default)]
struct RecentEntries {
    kept: BTreeMap<u64, Entry>,
    window: VecDeque<Entry>,
    /// The number of the first entry in the window.
    first: u64,
    /// The kept entries in which the outstanding work requests start.
    started: BTreeMap<RequestId, VecDeque<u64>>,
    failures: usize,
}

impl RecentEntries {
    fn push(&mut self, entry: Entry) {
        if self.window.len() == MAX_RECENT {
            self.retire_oldest();
        }
        let failed = matches!(
            &entry.event,
            LogEvent::Completed { completion, .. }
                if ![CompletionStatus::Success, CompletionStatus::WrFlushError]
                    .iter()
                    .any(|status| completion.status == status.name())
        );
        self.window.push_back(entry);
        if failed {
            self.keep_window();
        }
    }

    /// Removes the oldest entry of the window, and keeps what later ones need.
    fn retire_oldest(&mut self) {
        let Some(oldest) = self.window.pop_front() else { return };
        let number = self.first;
        self.first += 1;
        let request = match oldest.event {
            LogEvent::QpConfigured { .. } | LogEvent::QpStateChanged { .. } => {
                self.kept.insert(number, oldest);
                return;
            }
            LogEvent::WqeFetched { qp, wr_id, .. } => {
                self.started.entry((oldest.host.clone(), qp, wr_id)).or_default().push_back(number);
                self.kept.insert(number, oldest);
                return;
            }
            LogEvent::Completed { completion, .. } => (oldest.host, completion.qp, completion.wr_id),
            LogEvent::UnsignaledCompleted { qp, wr_id } => (oldest.host, qp, wr_id),
            _ => return,
        };
        if let btree_map::Entry::Occupied(mut started) = self.started.entry(request) {
            self.kept.remove(&started.get_mut().pop_front().unwrap_or_default());
            if started.get().is_empty() {
                started.remove();
            }
        }
    }

    /// Keeps the recent entries, because a work request failed.
    fn keep_window(&mut self) {
        self.failures += 1;
        if self.failures <= MAX_FAILURES_KEPT {
            for entry in self.window.drain(..) {
                self.kept.insert(self.first, entry);
                self.first += 1;
            }
        }
    }
}

/// Explains the problems of a run.
pub struct RunAnalysis {
    header: Header,
    recent: RecentEntries,
    linter: Option<Linter>,
    findings_printed: usize,
}

impl RunAnalysis {
    /// An analysis without entries.
    pub fn new(header: Header, lint: bool) -> RunAnalysis {
        let linter = lint.then(|| Linter::new(&header));
        RunAnalysis { header, recent: RecentEntries::default(), linter, findings_printed: 0 }
    }

    /// Adds the next entry.
    pub fn push(&mut self, entry: Entry) {
        if let Some(linter) = &mut self.linter {
            linter.push(&entry);
        }
        self.recent.push(entry);
    }

    /// Prints the new findings of the linter.
    pub fn print_findings(&mut self) {
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
    /// that could not be set up. `all` says how to see all of them, and `again` how to see them again.
    pub fn explanation(&mut self, all: &str, again: &str) -> Option<String> {
        let RecentEntries { kept, window, failures, .. } = std::mem::take(&mut self.recent);
        let mut analyzer = LogAnalyzer::new(&self.header);
        kept.into_values().chain(window).for_each(|entry| analyzer.push(entry));
        let mut answer = analyzer.problems()?;
        let problems = answer.explanations.len().max(failures);
        answer.explanations.truncate(MAX_FAILURES_EXPLAINED);
        answer.summary = match problems.saturating_sub(MAX_FAILURES_EXPLAINED) {
            0 => again.into(),
            more => format!("{more} more problems: {all}."),
        };
        Some(answer.text(terminal::style().width))
    }
}

/// Receives the events of a daemon, with the names of its hosts and rules.
pub type OnEvent<'a> = dyn FnMut(Instant, &NameTable, &NetworkEvent<'_>) + 'a;

/// The events of a daemon while programs run.
pub struct DaemonEvents {
    stream: EventStream,
    /// Has the names, and makes entries for the analysis.
    entries: EntryBuilder,
    /// Whether the run is analyzed, and with the linter.
    analyzes: Option<bool>,
    analysis: Option<RunAnalysis>,
    count: u64,
    missed: u64,
}

impl DaemonEvents {
    /// Has the daemon send its events from now on, and write an event log and a capture. `analyzes` says whether the run
    /// is analyzed, and with the linter.
    pub fn start(
        connection: &mut DaemonControl,
        capture: Option<BorrowedFd<'_>>,
        log: Option<BorrowedFd<'_>>,
        analyzes: Option<bool>,
    ) -> Result<DaemonEvents, String> {
        let stream = connection.start_recording_events(capture, log).map_err(|error| error.to_string())?;
        let (entries, analysis) = (EntryBuilder::default(), None);
        Ok(DaemonEvents { stream, entries, analyzes, analysis, count: 0, missed: 0 })
    }

    /// Has another daemon send its events from now on. Only the first daemon writes files.
    pub fn start_again(&mut self, connection: &mut DaemonControl) -> Result<(), String> {
        self.stream = connection.start_recording_events(None, None).map_err(|error| error.to_string())?;
        Ok(())
    }

    /// Ends the recording. The last events can be read then.
    pub fn stop(&mut self, connection: &mut DaemonControl) -> Result<(), softhca::Error> {
        connection.stop_recording_events(&mut self.stream)
    }

    /// Gives new events to `on_event`. Returns whether there are more.
    pub fn read_new(&mut self, on_event: &mut OnEvent<'_>) -> io::Result<bool> {
        for _ in 0..MAX_READ {
            let Some(item) = self.stream.next_item()? else {
                if let Some(analysis) = &mut self.analysis {
                    analysis.print_findings();
                }
                return Ok(false);
            };
            match item {
                StreamItem::Names(names) => {
                    self.entries.set_names(names);
                    if let (Some(lint), None) = (self.analyzes, &self.analysis) {
                        self.analysis = Some(RunAnalysis::new(self.entries.header("softhca daemon"), lint));
                    }
                }
                StreamItem::Event(at, event) => {
                    self.count += 1;
                    let event = event.as_event();
                    on_event(at, self.entries.names(), &event);
                    if let Some(analysis) = &mut self.analysis
                        && let Some(entry) = self.entries.entry(at, &event)
                    {
                        analysis.push(entry);
                    }
                }
                StreamItem::Missed(count) => self.missed += count,
            }
        }
        Ok(true)
    }

    /// The number of events so far.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Why the events are incomplete, if they are.
    pub fn gap(&self) -> Option<String> {
        (self.missed > 0)
            .then(|| format!("{} events are missing: this command did not read them in time", self.missed))
    }

    /// The analysis of the run.
    pub const fn analysis(&mut self) -> Option<&mut RunAnalysis> {
        self.analysis.as_mut()
    }

    /// A descriptor that is readable when there are new events; `None` if the daemon sends no more.
    pub fn readable(&self) -> Option<OwnedFd> {
        if self.stream.is_complete() { None } else { self.stream.as_fd().try_clone_to_owned().ok() }
    }

    /// Waits for events, at most for `timeout`.
    pub fn wait(&self, timeout: Duration) {
        if self.stream.is_complete() {
            return std::thread::sleep(timeout);
        }
        let timeout = Timespec::try_from(timeout).ok();
        let _ = poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], timeout.as_ref());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, data: &str) -> Entry {
        let text = format!(r#"{{"time":1,"host":"a","name":"{name}","data":{data}}}"#);
        serde_json::from_str(&text).unwrap()
    }

    const STATE: &str = r#"{"qp":7,"from":"INIT","to":"RTR","reason":"requested"}"#;

    fn completed(wr_id: u64, status: &str) -> Entry {
        let data = r#""operation":"write","bytes":0,"cq":1,"reason":"none","vendor_err":0"#;
        entry("work:completed", &format!(r#"{{"qp":7,"wr_id":{wr_id},"status":"{status}",{data}}}"#))
    }

    #[test]
    fn the_history_of_a_failure_is_kept_in_order() {
        let mut recent = RecentEntries::default();
        let notified = entry("cq:notified", r#"{"cq":1}"#);
        recent.push(entry("qp:state_changed", STATE));
        (0..MAX_RECENT + 10).for_each(|_| recent.push(notified.clone()));
        assert_eq!(recent.kept.len(), 1, "the state of a queue pair is kept longer than notifications");
        recent.push(completed(1, "WR_FLUSH_ERR"));
        assert_eq!(recent.failures, 0);
        recent.push(completed(1, "RETRY_EXC_ERR"));
        assert_eq!((recent.failures, recent.kept.len()), (1, MAX_RECENT + 1));
        let [first, last] = [recent.kept.first_key_value(), recent.kept.last_key_value()];
        assert_eq!(first.map(|(_, entry)| entry.event.name()), Some("qp:state_changed"));
        assert_eq!(last.map(|(_, entry)| entry.event.name()), Some("work:completed"));
        assert!(recent.window.is_empty());
    }

    #[test]
    fn the_start_of_an_outstanding_request_is_kept() {
        let mut recent = RecentEntries::default();
        let fetched = |wr_id: u64| {
            let data = r#""operation":"write","bytes":0,"first_psn":0,"packets":1"#;
            entry("work:fetched", &format!(r#"{{"qp":7,"wr_id":{wr_id},{data}}}"#))
        };
        [1, 1, 2, 3].into_iter().for_each(|wr_id| recent.push(fetched(wr_id)));
        recent.push(completed(1, "SUCCESS"));
        recent.push(entry("work:unsignaled_completed", r#"{"qp":7,"wr_id":2}"#));
        (0..MAX_RECENT).for_each(|_| recent.push(entry("cq:notified", r#"{"cq":1}"#)));
        let kept: Vec<&Entry> = recent.kept.values().collect();
        assert_eq!(kept, [&fetched(1), &fetched(3)]);
        assert_eq!(recent.started.len(), 2);
    }
}
