//! Being told something by signals.

#![allow(unsafe_code)]

use rustix::event::Timespec;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// Signals as a descriptor that becomes readable.
pub struct Signals {
    descriptor: OwnedFd,
    previous_mask: libc::sigset_t,
}

/// A signal that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Its number.
    pub number: i32,
    /// A process sent it; otherwise the kernel did, to everybody who is concerned.
    pub from_process: bool,
}

impl Signals {
    /// Takes SIGINT and SIGTERM for the whole process: call it before any thread starts.
    pub fn block_termination() -> io::Result<Signals> {
        Signals::block(&[libc::SIGINT, libc::SIGTERM])
    }

    /// Takes those signals that end or tell something, and the end of a child: call it before any thread starts.
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
        // SAFETY: the descriptor is new and belongs to nobody else.
        Ok(Signals { descriptor: unsafe { OwnedFd::from_raw_fd(descriptor) }, previous_mask: before })
    }

    /// Has a program that is to be started take the signals that were taken from this one.
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

    /// Waits for the next signal; for so long at most, if something is said. `None` if none came.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Option<Signal>> {
        let patience = timeout.and_then(|patience| Timespec::try_from(patience).ok());
        loop {
            let mut polled = [rustix::event::PollFd::new(&self.descriptor, rustix::event::PollFlags::IN)];
            match rustix::event::poll(&mut polled, patience.as_ref()) {
                Err(rustix::io::Errno::INTR) => continue,
                Ok(0) => return Ok(None),
                result => result?,
            };
            // SAFETY: all zeroes are a valid record.
            let mut record: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
            let size = size_of_val(&record);
            // SAFETY: the record has room for what is read.
            let read = unsafe { libc::read(self.descriptor.as_raw_fd(), (&raw mut record).cast(), size) };
            if read == size as isize {
                // Codes of the kernel's own are positive.
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
