//! Parts of `softhca exec` that a sweep uses: a daemon of its own for each worker, and the libraries.

use super::daemon::{self, DaemonLifetime, DaemonRequirements};
pub use super::events::DaemonEvents;
use super::library;
pub use super::live_scenario::{DaemonScenario, RequiredSettings, required_settings};
pub use super::readiness::{free_tcp_port, host_listens, listens_on};
pub use super::scenario_programs::substitute_addresses;
pub use super::sysfs::View;
use softhca::DaemonControl;
use softhca_control::RuntimeDir;
use std::ffi::OsString;

/// Starts the daemon with these hosts. It ends with the connection.
pub fn connect(name: &str, hosts: &[String], settings: &RequiredSettings) -> Result<DaemonControl, String> {
    let RequiredSettings { profile, recovery, .. } = *settings;
    let requirements =
        DaemonRequirements { name: Some(name), hosts, profile, recovery, ..Default::default() };
    daemon::connect_or_start(&requirements, DaemonLifetime::WhileUsed)
}

/// The ways in which a program of a host can see its devices in `/sys` and `/dev`, the best one first.
pub fn views(name: &str, host: &str) -> Result<Vec<View>, String> {
    let root = RuntimeDir::for_user().view(name, host);
    let folder = library::library_folder()?;
    Ok(if root.is_dir() { View::choices(&root, None, &folder) } else { Vec::new() })
}

/// The value of `LD_LIBRARY_PATH` for programs.
pub fn library_path() -> Result<OsString, String> {
    Ok(library::search_path(&library::library_folder()?))
}
