//! Lock files that go when their lock is released.

use rustix::fs::FlockOperation;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// An exclusive lock on a file, which is removed when the lock is released. A process that is killed leaves the file
/// behind, unlocked.
#[derive(Debug)]
pub struct LockFile {
    path: PathBuf,
    _file: File,
}

impl LockFile {
    /// Waits until no other process holds the lock.
    pub fn lock(path: &Path) -> io::Result<LockFile> {
        LockFile::acquire(path, FlockOperation::LockExclusive)
    }

    /// Returns `None` if another process holds the lock.
    pub fn try_lock(path: &Path) -> io::Result<Option<LockFile>> {
        match LockFile::acquire(path, FlockOperation::NonBlockingLockExclusive) {
            Ok(lock) => Ok(Some(lock)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn acquire(path: &Path, operation: FlockOperation) -> io::Result<LockFile> {
        loop {
            let file = File::options().create(true).truncate(false).write(true).open(path)?;
            rustix::fs::flock(&file, operation)?;
            // The earlier holder has removed the file if this process opened it before that: other processes then lock
            // another file at this path.
            let opened = file.metadata()?;
            match std::fs::metadata(path) {
                Ok(found) if (found.dev(), found.ino()) == (opened.dev(), opened.ino()) => {
                    return Ok(LockFile { path: path.to_owned(), _file: file });
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for LockFile {
    /// Removes the file while the lock is held: no other process can hold the lock of this file.
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::format;

    #[test]
    fn one_holds_the_lock_and_the_last_leaves_no_file() {
        let path = std::env::temp_dir().join(format!("softhca-lock-{}", std::process::id()));
        let (is_held, turns) = (AtomicBool::new(false), AtomicU32::new(0));
        let take_turns = |wait: bool| {
            for _ in 0..500 {
                let lock = match wait {
                    true => Some(LockFile::lock(&path).unwrap()),
                    false => LockFile::try_lock(&path).unwrap(),
                };
                if lock.is_some() {
                    assert!(!is_held.swap(true, Ordering::SeqCst), "two hold the lock");
                    turns.fetch_add(1, Ordering::SeqCst);
                    is_held.store(false, Ordering::SeqCst);
                }
            }
        };
        std::thread::scope(|scope| {
            for wait in [true, true, true, false] {
                scope.spawn(move || take_turns(wait));
            }
        });
        assert!(turns.load(Ordering::SeqCst) >= 1500);
        assert!(!path.exists());
        let held = LockFile::lock(&path).unwrap();
        assert!(LockFile::try_lock(&path).unwrap().is_none());
        drop(held);
        assert!(!path.exists());
    }
}
