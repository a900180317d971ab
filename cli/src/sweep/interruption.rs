//! An interruption of a sweep, such as Ctrl-C: the programs end, and the results so far remain.

use softhca_daemon::Signals;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Receives SIGINT and SIGTERM.
pub struct Interruption {
    signals: Signals,
    requested: AtomicBool,
}

impl Interruption {
    /// Receives the signals from now on. Call it before any thread starts.
    pub fn watch() -> Result<Interruption, String> {
        let signals =
            Signals::block_termination().map_err(|error| format!("cannot block signals: {error}"))?;
        Ok(Interruption { signals, requested: AtomicBool::new(false) })
    }

    /// Whether a signal came.
    pub fn is_requested(&self) -> bool {
        if !self.requested.load(Ordering::Relaxed)
            && matches!(self.signals.wait(Some(Duration::ZERO), None), Ok(Some(_)))
        {
            self.requested.store(true, Ordering::Relaxed);
        }
        self.requested.load(Ordering::Relaxed)
    }

    /// The program receives signals as usual, and ends with this thread.
    pub fn prepare(&self, command: &mut Command) {
        self.signals.unblock_in_child(command);
        Signals::kill_with_parent(command);
    }
}
