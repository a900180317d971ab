//! A mount namespace for one program and its children.
//!
//! No other process sees the mounts, and they end with the program. It needs no privileges: for a user other than root
//! the mount namespace is inside a user namespace that maps the user to itself.

#![allow(unsafe_code)]

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// The mounts and files that are created before a program starts, in this order.
#[derive(Clone, Debug, Default)]
pub struct MountNamespace {
    steps: Vec<Step>,
}

/// One system call. Its arguments are prepared, because nothing may be allocated between fork and exec.
#[derive(Clone, Debug)]
enum Step {
    Tmpfs(CString),
    Mkdir(CString),
    File(CString, Vec<u8>),
    Symlink { at: CString, target: CString },
    Bind { from: CString, at: CString },
    Unmount(CString),
}

impl MountNamespace {
    /// A namespace without changes.
    pub fn new() -> MountNamespace {
        MountNamespace::default()
    }

    /// Mounts an empty tmpfs on a directory.
    pub fn tmpfs(&mut self, at: &Path) {
        self.steps.push(Step::Tmpfs(c_path(at)));
    }

    /// Creates a directory.
    pub fn mkdir(&mut self, at: &Path) {
        self.steps.push(Step::Mkdir(c_path(at)));
    }

    /// Creates a file with mode 0444.
    pub fn file(&mut self, at: &Path, text: &str) {
        self.steps.push(Step::File(c_path(at), text.into()));
    }

    /// Creates a symbolic link.
    pub fn symlink(&mut self, at: &Path, target: &Path) {
        self.steps.push(Step::Symlink { at: c_path(at), target: c_path(target) });
    }

    /// Bind-mounts `from`, with all mounts below it, on `at`.
    pub fn bind(&mut self, from: &Path, at: &Path) {
        self.steps.push(Step::Bind { from: c_path(from), at: c_path(at) });
    }

    /// Unmounts a directory. Bind mounts of it stay.
    pub fn unmount(&mut self, at: &Path) {
        self.steps.push(Step::Unmount(c_path(at)));
    }

    /// Starts a program in this namespace. Starting it fails if the kernel denies the namespace.
    pub fn apply_to(self, command: &mut Command) {
        let [user, group] = [rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()]
            .map(|id| format!("{id} {id} 1"));
        // SAFETY: the closure only makes system calls with prepared arguments; it does not allocate or take a lock.
        unsafe {
            command.pre_exec(move || {
                enter(user.as_bytes(), group.as_bytes())?;
                self.steps.iter().try_for_each(|step| step.run().map_err(io::Error::from))
            });
        }
    }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("a path has no zero byte")
}

/// Enters a new mount namespace. `user` and `group` are lines of `/proc/PID/uid_map` and `gid_map`.
fn enter(user: &[u8], group: &[u8]) -> io::Result<()> {
    // SAFETY: descriptors stay shared.
    if unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.is_err() {
        // SAFETY: as above.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWUSER)? };
        // The kernel requires this before the groups are mapped.
        write(c"/proc/self/setgroups", OFlags::empty(), b"deny")?;
        write(c"/proc/self/uid_map", OFlags::empty(), user)?;
        write(c"/proc/self/gid_map", OFlags::empty(), group)?;
    }
    // Mounts do not propagate to other namespaces.
    let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    Ok(rustix::mount::mount_change(c"/", flags)?)
}

fn write(at: &std::ffi::CStr, flags: OFlags, bytes: &[u8]) -> rustix::io::Result<()> {
    let flags = flags | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, at, flags, Mode::from_raw_mode(0o444))?;
    match rustix::io::write(&file, bytes)? {
        written if written == bytes.len() => Ok(()),
        _ => Err(rustix::io::Errno::NOSPC),
    }
}

impl Step {
    fn run(&self) -> rustix::io::Result<()> {
        match self {
            Step::Tmpfs(at) => {
                let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
                rustix::mount::mount(c"softhca", at.as_c_str(), c"tmpfs", flags, c"mode=755")
            }
            Step::Mkdir(at) => rustix::fs::mkdirat(CWD, at.as_c_str(), Mode::from_raw_mode(0o755)),
            Step::File(at, bytes) => write(at, OFlags::CREATE | OFlags::EXCL, bytes),
            Step::Symlink { at, target } => rustix::fs::symlinkat(target.as_c_str(), CWD, at.as_c_str()),
            Step::Bind { from, at } => rustix::mount::mount_bind_recursive(from.as_c_str(), at.as_c_str()),
            Step::Unmount(at) => rustix::mount::unmount(at.as_c_str(), UnmountFlags::DETACH),
        }
    }
}
