//! The directory with the sockets of a user's daemons.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The default name of a daemon.
pub const DEFAULT_NAME: &str = "default";

/// The environment variable that selects the daemon.
pub const NAME_VARIABLE: &str = "SOFTHCA_DAEMON";

/// The directory of the user's sockets, with mode 0700.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDir {
    path: PathBuf,
}

impl RuntimeDir {
    /// `$XDG_RUNTIME_DIR/softhca`, or else a directory of the user under the temporary directory.
    pub fn for_user() -> RuntimeDir {
        let path = match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(runtime) if !runtime.is_empty() => PathBuf::from(runtime).join("softhca"),
            _ => std::env::temp_dir().join(format!("softhca-{}", rustix::process::geteuid().as_raw())),
        };
        RuntimeDir { path }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the directory if it does not exist, and checks its owner and mode, and that it can be written.
    pub fn create(&self) -> io::Result<()> {
        let parent = self.path.parent();
        match std::fs::DirBuilder::new().mode(0o700).create(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                let parent = parent.unwrap_or(Path::new("/")).display();
                let text = format!(
                    "cannot create {}: {error} (do you own {parent}? \
                     XDG_RUNTIME_DIR can name a folder of your own)",
                    self.path.display()
                );
                return Err(io::Error::new(error.kind(), text));
            }
            Ok(()) => {}
        }
        self.check()?;
        rustix::fs::access(&self.path, rustix::fs::Access::WRITE_OK).map_err(|errno| {
            let error = io::Error::from(errno);
            let path = self.path.display();
            let text =
                format!("cannot write to {path}: {error}; XDG_RUNTIME_DIR can name a folder of your own");
            io::Error::new(error.kind(), text)
        })
    }

    /// Checks that the path is a directory of the user that no other user can access.
    pub fn check(&self) -> io::Result<()> {
        let found = std::fs::symlink_metadata(&self.path)?;
        let denied = |reason: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        let path = self.path.display();
        if !found.is_dir() {
            return denied(format!(
                "{path} is not a directory: remove it, or set XDG_RUNTIME_DIR to a folder of your own"
            ));
        }
        let user = rustix::process::geteuid().as_raw();
        if found.uid() != user {
            return denied(format!(
                "{path} belongs to user {}, not to user {user}: set XDG_RUNTIME_DIR to a folder of your own",
                found.uid()
            ));
        }
        let mode = found.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return denied(format!("other users can access {path} (mode {mode:o}): run `chmod 700 {path}`"));
        }
        Ok(())
    }

    /// The control socket of a daemon.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.sock"))
    }

    /// The file that a running daemon keeps locked.
    pub fn lock(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.lock"))
    }

    /// The file that a client keeps locked while it connects to the daemon or starts it. An idle daemon exits under
    /// this lock.
    pub fn start_lock(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.start"))
    }

    /// The standard error of a daemon that `softhca exec` started.
    pub fn log(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.log"))
    }

    /// The root of what a host's programs see of `/sys` and `/dev`, as far as it concerns the devices of a daemon.
    pub fn view(&self, name: &str, host: &str) -> PathBuf {
        self.views(name).join(host)
    }

    /// The folder with the views of all hosts of a daemon.
    pub fn views(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.view"))
    }

    /// The names of all sockets in the directory, sorted. Some daemons may no longer run.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".sock")?.into()))
            .collect();
        names.sort();
        names
    }

    /// Whether a daemon may have this name, which becomes part of a file name.
    pub fn is_valid_name(name: &str) -> bool {
        !name.is_empty()
            && name.len() <= 64
            && !name.starts_with('.')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    }
}
