//! The event logs of devices that a program embeds: each process of the program writes one to a temporary folder.

use super::events::RunAnalysis;
use crate::output;
use softhca::LOG_VARIABLE;
use softhca_trace::EventLogReader;
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
            let log = EventLogReader::new(io::BufReader::new(fs::File::open(path)?));
            // A process that ended before it wrote a line, or while it wrote one.
            let Ok(log) = log else { continue };
            let mut analysis = RunAnalysis::new(log.header().clone(), lint);
            log.map_while(Result::ok).for_each(|entry| analysis.push(entry));
            analysis.print_findings();
            explanations
                .extend(analysis.explanation("keep the log with SOFTHCA_LOG=FILE to explain them", ""));
            *has_lint_errors |= analysis.has_lint_errors();
        }
        Ok(explanations)
    }
}

impl Drop for EmbeddedLogs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
