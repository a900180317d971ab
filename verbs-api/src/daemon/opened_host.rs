//! The daemon's reply when this process opens the device of a host.

use super::connection::ControlSocket;
use super::control::unexpected_reply;
use crate::Error;
use crate::backend::Result;
use softhca_control::{DATA_PATH_VARIABLE, DirectPath, HostDevice, Request, Response};
use softhca_types::VerbsError;
use softhca_wire::Gid;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Whether `SOFTHCA_DATA_PATH` permits the direct data path, as it does if it is not set.
fn environment_permits_direct() -> Result<bool> {
    match std::env::var_os(DATA_PATH_VARIABLE) {
        None => Ok(true),
        Some(path) if path == "direct" => Ok(true),
        Some(path) if path == "daemon" => Ok(false),
        Some(_) => {
            Err(VerbsError::Invalid { what: DATA_PATH_VARIABLE, why: "it must be direct or daemon" }.into())
        }
    }
}

/// The daemon's reply when this process opened the device of a host.
pub(super) struct OpenedHost {
    pub host: HostDevice,
    pub gids: Vec<Gid>,
    pub doorbell_slots: u32,
    pub direct: Option<DirectPath>,
    /// The socket that notifications come from.
    pub notifications: OwnedFd,
    /// The eventfd that wakes the engine thread, the page with its sleep flag and the doorbells. With a direct data
    /// path, the sockets and the page of the slot.
    pub descriptors: Vec<OwnedFd>,
}

impl OpenedHost {
    /// Connects to a daemon and opens the device of a host in one exchange.
    pub fn connect(name: &str, host: Option<String>) -> Result<(ControlSocket, Result<OpenedHost>)> {
        // Gives the daemon access to this process where the kernel would deny it.
        let memory = File::options().read(true).write(true).open("/proc/self/mem").ok();
        let passed: Vec<BorrowedFd<'_>> = memory.iter().map(|memory| memory.as_fd()).collect();
        let request = Request::Open { host, can_be_direct: environment_permits_direct()? };
        let mut socket = ControlSocket::connect_and_request(name, Some((&request, &passed)))?;
        let opened = socket.response().and_then(|(response, passed)| OpenedHost::new(response, passed));
        Ok((socket, opened))
    }

    fn new(response: Response, mut descriptors: Vec<OwnedFd>) -> Result<OpenedHost> {
        let Response::Opened { host, gids, doorbell_slots, direct } = response else {
            return Err(unexpected_reply(&response));
        };
        if descriptors.is_empty() {
            return Err(missing_descriptors());
        }
        let notifications = descriptors.remove(0);
        Ok(OpenedHost { host, gids, doorbell_slots, direct, notifications, descriptors })
    }
}

/// The error if the daemon passed fewer descriptors than its reply needs.
pub(super) fn missing_descriptors() -> Error {
    Error::DeviceGone { why: "it did not pass its descriptors".into() }
}
