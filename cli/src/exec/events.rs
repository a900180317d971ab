//! What the daemon's cards tell while a program runs: read as it comes, and kept as far as an explanation needs it.

use crate::terminal;
use rustix::fs::{FallocateFlags, MemfdFlags};
use softhca::DaemonControl;
use softhca_trace::lint::{Linter, Severity};
use softhca_trace::log::{Entry, Header};
use softhca_trace::why::{Inquiry, Question};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// So many of the last lines are kept.
const RECENT: usize = 1 << 16;
/// What led to so many failures is kept, of more only that they happened.
const MOST_FAILURES: usize = 8;
/// So many of them are explained.
const MOST_EXPLAINED: usize = 4;
/// Bytes that are read at once.
const PIECE: usize = 1 << 20;

/// Lines of a log, in order: what queue pairs were told, what led to failures, and the last of everything else.
#[derive(Default)]
struct Recent {
    kept: Vec<Box<str>>,
    window: VecDeque<Box<str>>,
    failures: usize,
}

impl Recent {
    fn push(&mut self, line: &str) {
        if self.window.len() == RECENT
            && let Some(oldest) = self.window.pop_front()
            && matches!(name_of(&oldest), "qp:configured" | "qp:state_changed")
        {
            self.kept.push(oldest);
        }
        self.window.push_back(line.into());
    }

    /// A work request failed by itself: everything that led to it stays.
    fn failed(&mut self) {
        self.failures += 1;
        if self.failures <= MOST_FAILURES {
            self.kept.extend(self.window.drain(..));
        }
    }
}

/// The name of an entry, without reading all of it.
fn name_of(line: &str) -> &str {
    let name = line.split_once("\"name\":\"").and_then(|(_, rest)| rest.split_once('"'));
    name.map_or("", |(name, _)| name)
}

/// Whether a completion tells of a failure that is not the consequence of another.
fn is_failure(line: &str) -> bool {
    name_of(line) == "work:completed"
        && !line.contains("\"status\":\"success\"")
        && !line.contains("\"status\":\"flushed\"")
}

/// Where the log goes.
enum Store {
    /// To a file that somebody wants.
    Kept(PathBuf),
    /// To memory, as long as it is not read.
    Passing,
}

/// The event log of a daemon, being read while it is written.
pub struct Events {
    file: File,
    store: Store,
    position: u64,
    rest: Vec<u8>,
    header: Option<Header>,
    recent: Recent,
    linter: Option<Linter>,
    warned: usize,
}

impl Events {
    /// A log in `path`, or in no file. Give its descriptor to the daemon.
    pub fn create(path: Option<&Path>) -> io::Result<Events> {
        let (file, store) = match path {
            Some(path) => {
                let file = File::options().create(true).truncate(true).read(true).write(true).open(path)?;
                (file, Store::Kept(path.into()))
            }
            None => {
                let memory = rustix::fs::memfd_create("softhca-events", MemfdFlags::CLOEXEC)?;
                (File::from(memory), Store::Passing)
            }
        };
        Ok(Events {
            file,
            store,
            position: 0,
            rest: Vec::new(),
            header: None,
            recent: Recent::default(),
            linter: None,
            warned: 0,
        })
    }

    /// Has the daemon write to it, and packets to `capture`, from now on.
    pub fn begin(&self, connection: &mut DaemonControl, capture: Option<&File>) -> Result<(), String> {
        let capture = capture.map(|file| file.as_fd());
        connection.record(capture, Some(self.file.as_fd())).map_err(|error| error.to_string())
    }

    /// Reads what was written since, and hands entries on whose names are wanted. With `lint`, tells of pitfalls.
    pub fn take(
        &mut self,
        lint: bool,
        wanted: fn(&str) -> bool,
        hear: &mut dyn FnMut(&Entry),
    ) -> io::Result<()> {
        let mut piece = vec![0; PIECE];
        loop {
            let count = self.file.read_at(&mut piece, self.position)?;
            if count == 0 {
                break;
            }
            self.rest.extend_from_slice(&piece[..count]);
            self.forget(count as u64);
            self.position += count as u64;
            let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            let lines: Vec<u8> = self.rest.drain(..whole).collect();
            for line in String::from_utf8_lossy(&lines).lines() {
                self.line(line, lint, wanted, hear);
            }
        }
        self.warn();
        Ok(())
    }

    /// Gives the memory of what was read back.
    fn forget(&self, count: u64) {
        if let Store::Passing = self.store {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&self.file, flags, self.position, count);
        }
    }

    fn line(&mut self, line: &str, lint: bool, wanted: fn(&str) -> bool, hear: &mut dyn FnMut(&Entry)) {
        let Some(header) = &self.header else {
            self.header = serde_json::from_str(line).ok();
            return;
        };
        self.recent.push(line);
        if lint || wanted(name_of(line)) {
            // A line of another version is of no use, and the daemon checked that there are none.
            let Ok(entry) = serde_json::from_str::<Entry>(line) else { return };
            if lint {
                self.linter.get_or_insert_with(|| Linter::new(header)).push(&entry);
            }
            if wanted(entry.what.name()) {
                hear(&entry);
            }
        }
        if is_failure(line) {
            self.recent.failed();
        }
    }

    /// Tells of pitfalls that were found since.
    fn warn(&mut self) {
        let Some(linter) = &self.linter else { return };
        for finding in linter.findings().skip(self.warned) {
            eprintln!("softhca lint: {finding}");
            self.warned += 1;
        }
    }

    /// How many pitfalls were found.
    pub fn lint_summary(&self) -> String {
        let findings = || self.linter.iter().flat_map(Linter::findings);
        let of = |severity| findings().filter(|finding| finding.pitfall.severity == severity).count();
        let counts = [of(Severity::Error), of(Severity::Warning), of(Severity::Note)];
        format!("softhca lint: {} errors, {} warnings, {} notes", counts[0], counts[1], counts[2])
    }

    /// Why work requests failed, if some did.
    pub fn explanation(&self) -> Option<String> {
        let header = self.header.as_ref().filter(|_| self.recent.failures > 0)?;
        let mut inquiry = Inquiry::new(header);
        for line in self.recent.kept.iter().chain(&self.recent.window) {
            if let Ok(entry) = serde_json::from_str(line) {
                inquiry.push(entry);
            }
        }
        let mut answer = inquiry.answer(&Question::default()).ok()?;
        let more = self.recent.failures.saturating_sub(MOST_EXPLAINED);
        answer.explanations.truncate(MOST_EXPLAINED);
        answer.remark = match (&self.store, more) {
            (Store::Kept(path), 0) => format!("`softhca why {}` tells it again.", path.display()),
            (Store::Kept(path), more) => format!("{more} more failed: `softhca why {}`.", path.display()),
            (Store::Passing, 0) => String::new(),
            (Store::Passing, more) => format!("{more} more failed: `--log FILE` keeps what happened."),
        };
        Some(answer.text(terminal::style().width))
    }
}

#[cfg(test)]
mod tests {
    use super::{Recent, is_failure, name_of};

    #[test]
    fn what_led_to_a_failure_is_kept_in_order() {
        let mut recent = Recent::default();
        let told = r#"{"time":1,"host":"a","name":"qp:configured","data":{}}"#;
        recent.push(told);
        for n in 0..super::RECENT + 10 {
            recent.push(&format!(r#"{{"time":{n},"host":"a","name":"packet:sent","data":{{}}}}"#));
        }
        assert_eq!(recent.kept.len(), 1, "what a queue pair was told outlives the packets");
        let failed = r#"{"time":9,"host":"a","name":"work:completed","data":{"status":"retry-exceeded"}}"#;
        assert!(is_failure(failed));
        recent.push(failed);
        recent.failed();
        assert_eq!(recent.kept.len(), super::RECENT + 1);
        assert_eq!(name_of(&recent.kept[0]), "qp:configured");
        assert_eq!(name_of(recent.kept.last().unwrap()), "work:completed");
        assert!(recent.window.is_empty());
    }
}
