//! What a sweep needs from `softhca exec`: a daemon of its own for each worker, and the libraries.

use super::daemon::{self, DaemonLifetime, DaemonRequirements};
use super::library;
pub use super::live_scenario::{DaemonScenario, RequiredSettings, required_settings};
pub use super::sysfs::View;
use softhca::{DaemonControl, Recovery};
use softhca_queue::control::RuntimeDir;
use std::ffi::OsString;

/// The name of a daemon that only one worker uses.
pub struct DaemonName(String);

impl DaemonName {
    pub fn new(name: &str) -> DaemonName {
        DaemonName(name.into())
    }

    pub fn name(&self) -> &str {
        &self.0
    }
}

/// Starts the daemon with these hosts. It ends with the connection.
pub fn connect(
    name: &DaemonName,
    hosts: &[String],
    recovery: Option<Recovery>,
) -> Result<DaemonControl, String> {
    let requirements = DaemonRequirements {
        name: Some(name.name()),
        host: None,
        address: None,
        hosts,
        recovery,
        loopback: None,
        cards: None,
    };
    daemon::connect_or_start(&requirements, DaemonLifetime::WhileUsed)
}

/// The ways in which a program of a host can see its devices in `/sys` and `/dev`, the best one first.
pub fn views(name: &DaemonName, host: &str) -> Result<Vec<View>, String> {
    let root = RuntimeDir::for_user().view(name.name(), host);
    let folder = library::library_folder()?;
    Ok(if root.is_dir() { View::choices(&root, None, &folder) } else { Vec::new() })
}

/// The value of `LD_LIBRARY_PATH` for programs.
pub fn library_path() -> Result<OsString, String> {
    Ok(library::search_path(&library::library_folder()?))
}
