//! The path of this executable.

use std::path::PathBuf;

/// The path of this executable.
pub fn own_path() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|error| format!("cannot find the path of the executable: {error}"))
}
