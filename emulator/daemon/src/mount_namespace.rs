//! A view of the file system for one program: mounts that only it and its children see.
//!
//! Nothing is changed for anybody else, and nothing stays when the program ends. Whoever may have it needs no
//! rights: root gets a mount namespace, anybody else a user namespace around it, with the user's own number in it.

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

/// What is mounted and written before a program starts, in this order.
#[derive(Clone, Debug, Default)]
pub struct MountNamespace {
    steps: Vec<Step>,
}

/// One call. Everything is ready to be passed to the kernel: between fork and exec nothing is allocated.
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
    /// A view in which everything is as it is.
    pub fn new() -> MountNamespace {
        MountNamespace::default()
    }

    /// An empty file system in memory at a folder.
    pub fn tmpfs(&mut self, at: &Path) {
        self.steps.push(Step::Tmpfs(c_path(at)));
    }

    /// A folder.
    pub fn mkdir(&mut self, at: &Path) {
        self.steps.push(Step::Mkdir(c_path(at)));
    }

    /// A file that everybody may read.
    pub fn file(&mut self, at: &Path, text: &str) {
        self.steps.push(Step::File(c_path(at), text.into()));
    }

    /// A symbolic link.
    pub fn symlink(&mut self, at: &Path, target: &Path) {
        self.steps.push(Step::Symlink { at: c_path(at), target: c_path(target) });
    }

    /// What is at `from`, with everything that is mounted below, at `at` too.
    pub fn bind(&mut self, from: &Path, at: &Path) {
        self.steps.push(Step::Bind { from: c_path(from), at: c_path(at) });
    }

    /// Takes the mount at a folder away. What was bound from it elsewhere stays.
    pub fn unmount(&mut self, at: &Path) {
        self.steps.push(Step::Unmount(c_path(at)));
    }

    /// Has a program that is to be started see this view. If the kernel refuses, starting it fails.
    pub fn apply_to(self, command: &mut Command) {
        let [user, group] = [rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()]
            .map(|id| format!("{id} {id} 1"));
        // SAFETY: the closure makes system calls alone, with what was made ready before; none of them allocates
        // or takes a lock.
        unsafe {
            command.pre_exec(move || {
                enter(user.as_bytes(), group.as_bytes())?;
                self.steps.iter().try_for_each(|step| step.run().map_err(io::Error::from))
            });
        }
    }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("a path of the file system has no zero byte")
}

/// Leaves the mounts of everybody else. Maps are lines of `/proc/PID/uid_map`.
fn enter(user: &[u8], group: &[u8]) -> io::Result<()> {
    // SAFETY: descriptors stay shared.
    if unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.is_err() {
        // SAFETY: as above.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWUSER)? };
        // The kernel wants the groups settled before they are mapped.
        write(c"/proc/self/setgroups", OFlags::empty(), b"deny")?;
        write(c"/proc/self/uid_map", OFlags::empty(), user)?;
        write(c"/proc/self/gid_map", OFlags::empty(), group)?;
    }
    // What is mounted here stays here.
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
