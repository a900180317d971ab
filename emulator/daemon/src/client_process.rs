//! The process at the other end of a control connection.

use crate::messages::printable;
use crate::readable_fd::ReadableFd;
use rustix::process::PidfdFlags;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// A process that has connected.
pub(crate) struct ClientProcess {
    pub pid: u32,
    pub uid: u32,
    pub name: String,
    pidfd: ReadableFd,
}

impl ClientProcess {
    /// Must be called on the runtime.
    pub fn from_stream(stream: &UnixStream) -> io::Result<ClientProcess> {
        let credentials = rustix::net::sockopt::socket_peercred(stream)?;
        let pid = credentials.pid.as_raw_nonzero().get() as u32;
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let pidfd = match peer_pidfd(stream.as_fd()) {
            Some(pidfd) => pidfd,
            None => rustix::process::pidfd_open(credentials.pid, PidfdFlags::empty())?,
        };
        let pidfd = ReadableFd::new(pidfd)?;
        Ok(ClientProcess { pid, uid: credentials.uid.as_raw(), name: printable(name.trim()), pidfd })
    }

    /// Waits until the process has exited, even if its number is reused.
    pub async fn exited(&self) {
        self.pidfd.readable().await;
    }
}

/// The pidfd of the process that connected, from the socket itself: its number cannot have been reused (Linux 6.5).
#[allow(unsafe_code)]
fn peer_pidfd(stream: BorrowedFd<'_>) -> Option<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut descriptor: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `descriptor` and `length` outlive the call, and the length is that of `descriptor`.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut descriptor).cast(),
            &raw mut length,
        )
    };
    // SAFETY: the descriptor is new and nothing else owns it.
    (result == 0 && descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
}
