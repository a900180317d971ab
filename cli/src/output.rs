//! Output files of a command.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

/// Who may read a new file or folder. Captures and logs contain payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The user named the path: the umask decides, as for every other tool.
    Umask,
    /// The command chose the path: only the owner.
    Owner,
}

impl Access {
    /// Creates or truncates a file.
    pub fn create(self, path: &Path) -> std::io::Result<File> {
        match self {
            Access::Umask => File::create(path),
            Access::Owner => private().create(true).truncate(true).open(path),
        }
    }

    /// Creates a folder and its parents.
    pub fn create_folder(self, path: &Path) -> std::io::Result<()> {
        match self {
            Access::Umask => std::fs::create_dir_all(path),
            Access::Owner => create_folder(path),
        }
    }
}

/// Creates or truncates the file that an option names. The error says how to fix it.
pub fn create(option: &str, path: &Path) -> Result<File, String> {
    File::create(path).map_err(|error| write_error(option, path, &error))
}

/// Creates a file that does not exist yet. Never follows a symbolic link.
pub fn create_new(path: &Path) -> std::io::Result<File> {
    private().create_new(true).open(path)
}

/// Creates a folder and its parents. New folders are accessible to their owner only.
pub fn create_folder(path: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

/// Options to write a file that only its owner may access.
fn private() -> OpenOptions {
    let mut options = File::options();
    options.write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// A folder in the temporary directory that goes with this value.
#[cfg(unix)]
pub struct ScratchFolder(pub PathBuf);

#[cfg(unix)]
impl ScratchFolder {
    /// Creates a folder that only its owner can access.
    pub fn new(prefix: &str) -> Result<ScratchFolder, String> {
        let folder = unpredictable_path(prefix, "");
        create_folder(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(ScratchFolder(folder))
    }
}

#[cfg(unix)]
impl Drop for ScratchFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A path in the temporary directory that other users cannot predict: other users may create files there.
pub fn unpredictable_path(prefix: &str, suffix: &str) -> PathBuf {
    let [random, _] = softhca_udp::random_words();
    std::env::temp_dir().join(format!("{prefix}{random:016x}{suffix}"))
}

/// Opens or creates the file that an option names, and keeps its contents: see [`truncate`].
pub fn open(option: &str, path: &Path) -> Result<File, String> {
    let opened = File::options().write(true).create(true).truncate(false).open(path);
    opened.map_err(|error| write_error(option, path, &error))
}

/// Reserves the file that an option names for this command, until the command exits: two writers would garble it.
#[cfg(target_os = "linux")]
pub fn reserve(option: &str, path: &Path) -> Result<(), String> {
    use rustix::fs::{FlockOperation, flock};
    let file = open(option, path)?;
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    // Not every file system has locks.
    let locked = if is_file { flock(&file, FlockOperation::NonBlockingLockExclusive) } else { Ok(()) };
    if locked == Err(rustix::io::Errno::WOULDBLOCK) {
        let path = path.display();
        return Err(format!("another command writes {path} ({option}): give each command a file of its own"));
    }
    // The lock ends with the process.
    std::mem::forget(file);
    Ok(())
}

/// Truncates a file once its writer has started. Pipes and other special files have nothing to truncate.
pub fn truncate(file: &File) -> std::io::Result<()> {
    if file.metadata()?.is_file() { file.set_len(0) } else { Ok(()) }
}

/// The message for a file that cannot be written: option, cause and fix.
pub fn write_error(option: &str, path: &Path, error: &Error) -> String {
    let advice = match error.kind() {
        ErrorKind::IsADirectory => "give a file in that folder",
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            "create the folder first, or give a file in an existing folder"
        }
        _ => "give a file that you may write",
    };
    format!("cannot write {} ({option}): {error}; {advice}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_errors_name_the_file_the_option_the_cause_and_the_fix() {
        let text = create("--capture", Path::new("/no/such/folder/x.pcapng")).unwrap_err();
        assert!(text.starts_with("cannot write /no/such/folder/x.pcapng (--capture): "), "{text}");
        assert!(text.ends_with("create the folder first, or give a file in an existing folder"), "{text}");
        let folder = std::env::temp_dir();
        let text = create("--log", &folder).unwrap_err();
        assert!(text.contains(" (--log): ") && text.ends_with("; give a file in that folder"), "{text}");
        #[cfg(target_os = "linux")]
        {
            let shared = unpredictable_path("softhca-output-", ".jsonl");
            reserve("--log", &shared).unwrap();
            std::fs::write(&shared, "events").unwrap();
            let text = reserve("--log", &shared).unwrap_err();
            assert!(text.starts_with("another command writes ") && text.contains("(--log)"), "{text}");
            assert_eq!(std::fs::read_to_string(&shared).unwrap(), "events", "its contents are kept");
            std::fs::remove_file(&shared).unwrap();
            reserve("--log", Path::new("/dev/null"))
                .and_then(|()| reserve("--log", Path::new("/dev/null")))
                .unwrap();
        }
        let denied = ErrorKind::PermissionDenied.into();
        assert!(write_error("--log", &folder, &denied).ends_with("; give a file that you may write"));
    }
}
