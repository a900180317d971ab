//! The event logs of devices that a program embeds: each process of the program writes one to a temporary folder.

use super::event_log::DaemonEventLog;
use crate::output;
use softhca::LOG_VARIABLE;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::PathBuf;

/// A folder for the logs of embedded devices. It is removed when this is dropped.
pub struct EmbeddedLogs {
    folder: PathBuf,
}

impl EmbeddedLogs {
    /// Creates the folder, unless the user collects the logs.
    pub fn create() -> Result<Option<EmbeddedLogs>, String> {
        if std::env::var_os(LOG_VARIABLE).is_some() {
            return Ok(None);
        }
        let folder = output::unpredictable_path("softhca-exec-", "");
        output::create_folder(&folder)
            .map_err(|error| format!("cannot create {} for event logs: {error}", folder.display()))?;
        Ok(Some(EmbeddedLogs { folder }))
    }

    /// The variable that makes embedded devices write here.
    pub fn variable(&self) -> (&'static str, OsString) {
        (LOG_VARIABLE, self.folder.join("%p.jsonl").into())
    }

    /// Explains the problems of every process, and prints findings with `lint`.
    pub fn explanations(&self, lint: bool, has_lint_errors: &mut bool) -> io::Result<Vec<String>> {
        let mut paths: Vec<PathBuf> = fs::read_dir(&self.folder)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()?;
        paths.sort();
        let mut explanations = Vec::new();
        for path in paths {
            let mut events = DaemonEventLog::read_only(fs::File::open(path)?);
            events.read_new(lint, |_| false, &mut |_| {})?;
            explanations.extend(events.explanation());
            *has_lint_errors |= events.has_lint_errors();
        }
        Ok(explanations)
    }
}

impl Drop for EmbeddedLogs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
