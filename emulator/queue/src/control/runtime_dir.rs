//! Where the sockets of a user's daemons are.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The name of a daemon that was given none.
pub const DEFAULT_NAME: &str = "default";

/// The environment variable that names the daemon to use.
pub const NAME_VARIABLE: &str = "SOFTHCA_DAEMON";

/// The folder of the user's sockets, which nobody else can enter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDir {
    path: PathBuf,
}

impl RuntimeDir {
    /// `$XDG_RUNTIME_DIR/softhca`, or a folder of the user's under the temporary directory.
    pub fn for_user() -> RuntimeDir {
        let path = match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(runtime) if !runtime.is_empty() => PathBuf::from(runtime).join("softhca"),
            _ => std::env::temp_dir().join(format!("softhca-{}", rustix::process::geteuid().as_raw())),
        };
        RuntimeDir { path }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it, if it is not there, and checks that it is the user's alone.
    pub fn create(&self) -> io::Result<()> {
        let parent = self.path.parent();
        match std::fs::DirBuilder::new().mode(0o700).create(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                let parent = parent.unwrap_or(Path::new("/")).display();
                let text = format!("cannot make {}: {error} (is {parent} yours?)", self.path.display());
                return Err(io::Error::new(error.kind(), text));
            }
            Ok(()) => {}
        }
        self.check()
    }

    /// Checks that it is a folder of the user's, closed to everybody else.
    pub fn check(&self) -> io::Result<()> {
        let found = std::fs::symlink_metadata(&self.path)?;
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        let path = self.path.display();
        if !found.is_dir() {
            return refuse(format!("{path} is not a folder: remove it"));
        }
        let user = rustix::process::geteuid().as_raw();
        if found.uid() != user {
            return refuse(format!("{path} belongs to user {}, not to {user}: remove it", found.uid()));
        }
        let mode = found.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return refuse(format!("{path} is open to others (mode {mode:o}): chmod 700 {path}"));
        }
        Ok(())
    }

    /// The socket of the daemon with this name.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.sock"))
    }

    /// The file that the daemon with this name keeps locked.
    pub fn lock(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.lock"))
    }

    /// The file that whoever connects to the daemon with this name, or starts it, keeps locked meanwhile. A daemon
    /// that leaves because nobody needs it does so under this lock.
    pub fn start_lock(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.door"))
    }

    /// What a daemon that was started for programs writes to stderr.
    pub fn log(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.log"))
    }

    /// The names that have a socket here, in order. Some may have no daemon any more.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".sock")?.into()))
            .collect();
        names.sort();
        names
    }

    /// Whether a name can be a daemon's: it becomes a part of a file's name.
    pub fn is_valid_name(name: &str) -> bool {
        !name.is_empty()
            && name.len() <= 64
            && !name.starts_with('.')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    }
}
