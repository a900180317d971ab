//! Signals as a descriptor.

#![allow(unsafe_code)]

use rustix::event::{PollFd, PollFlags, Timespec};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// A signalfd and the signal mask before it.
pub struct Signals {
    descriptor: OwnedFd,
    previous_mask: libc::sigset_t,
}

/// A received signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// The signal number.
    pub number: i32,
    /// Whether a process sent it. The kernel sends a signal to the whole process group.
    pub from_process: bool,
}

impl Signals {
    /// Blocks SIGINT and SIGTERM in the whole process. Call it before any thread starts.
    pub fn block_termination() -> io::Result<Signals> {
        Signals::block(&[libc::SIGINT, libc::SIGTERM])
    }

    /// A write beyond the limit of file sizes (`ulimit -f`) fails, and does not end the process. Memory that is shared
    /// with clients counts as a file.
    pub fn ignore_file_size_limit() {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }

    /// Blocks the signals that a program receives from its user or parent, and SIGCHLD. Call it before any thread starts.
    pub fn block_all() -> io::Result<Signals> {
        let numbers =
            [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];
        Signals::block(&[&numbers[..], &[libc::SIGCHLD, libc::SIGALRM, libc::SIGWINCH]].concat())
    }

    fn block(numbers: &[i32]) -> io::Result<Signals> {
        // SAFETY: an all-zero set is valid memory for `sigemptyset` to fill.
        let [mut set, mut before]: [libc::sigset_t; 2] = unsafe { std::mem::zeroed() };
        // SAFETY: `set` outlives the calls; the numbers are signals.
        let descriptor = unsafe {
            libc::sigemptyset(&mut set);
            for number in numbers {
                libc::sigaddset(&mut set, *number);
            }
            if libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nothing else owns it.
        Ok(Signals { descriptor: unsafe { OwnedFd::from_raw_fd(descriptor) }, previous_mask: before })
    }

    /// Kills a program that is started when the calling thread ends, even if SIGKILL ended it. The kernel does not kill
    /// the program's own children, and forgets the setting when the program is setuid.
    pub fn kill_with_parent(command: &mut Command) {
        let parent = rustix::process::getpid();
        // SAFETY: the closure makes two system calls and does not allocate.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
                // The parent may have ended before the call.
                match rustix::process::getppid() == Some(parent) {
                    true => Ok(()),
                    false => Err(io::Error::from_raw_os_error(libc::ESRCH)),
                }
            });
        }
    }

    /// Restores the previous signal mask in a program that is started.
    pub fn unblock_in_child(&self, command: &mut Command) {
        let before = self.previous_mask;
        // SAFETY: the closure makes one call, which may be made between fork and exec.
        unsafe {
            command.pre_exec(move || {
                match libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) {
                    0 => Ok(()),
                    code => Err(io::Error::from_raw_os_error(code)),
                }
            });
        }
    }

    /// Waits for the next signal, at most for `timeout` and until `other` is readable. Returns `None` without a signal.
    pub fn wait(
        &self,
        timeout: Option<Duration>,
        other: Option<BorrowedFd<'_>>,
    ) -> io::Result<Option<Signal>> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        loop {
            let descriptors = [Some(self.descriptor.as_fd()), other].into_iter().flatten();
            let mut polled: Vec<PollFd<'_>> =
                descriptors.map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN)).collect();
            match rustix::event::poll(&mut polled, timeout.as_ref()) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result?,
            };
            if polled[0].revents().is_empty() {
                return Ok(None);
            }
            // SAFETY: all zeros are a valid record.
            let mut record: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
            let size = size_of_val(&record);
            // SAFETY: the record has room for what is read.
            let read = unsafe { libc::read(self.descriptor.as_raw_fd(), (&raw mut record).cast(), size) };
            if read == size as isize {
                // The codes of signals from the kernel are positive.
                let (number, from_process) = (record.ssi_signo as i32, record.ssi_code <= 0);
                return Ok(Some(Signal { number, from_process }));
            }
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
