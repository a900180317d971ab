//! Who is at the other end of a connection.

use rustix::process::PidfdFlags;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// A process that has connected.
#[derive(Debug)]
pub(crate) struct ClientProcess {
    pub pid: u32,
    pub uid: u32,
    pub name: String,
    pidfd: OwnedFd,
}

impl ClientProcess {
    pub fn from_stream(stream: &UnixStream) -> io::Result<ClientProcess> {
        let credentials = rustix::net::sockopt::socket_peercred(stream)?;
        let pid = credentials.pid;
        let process = pid.as_raw_nonzero().get() as u32;
        let name = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        let watch = match peer_pidfd(stream.as_fd()) {
            Some(watch) => watch,
            None => rustix::process::pidfd_open(pid, PidfdFlags::empty())?,
        };
        Ok(ClientProcess {
            pid: process,
            uid: credentials.uid.as_raw(),
            name: name.trim().into(),
            pidfd: watch,
        })
    }
}

/// Becomes readable when the process is gone, whatever its number is used for later.
impl AsFd for ClientProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// The process that connected, straight from the socket: its number cannot have been used again (Linux 6.5).
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
    // SAFETY: the descriptor is new and belongs to nobody else.
    (result == 0 && descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
}
