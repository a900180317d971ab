//! The files `issm0`, `issm1`, …: a port has the capability IsSM while a program has its file open. Linux lets one program at
//! a time open the device, so the last event decides. inotify joins equal events, and cannot count programs.

use super::SubnetServer;
use crate::readable_fd::register;
use parking_lot::Mutex;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use softhca_subnet::PortId;
use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches the files.
pub(super) struct SmDevices {
    events: Arc<AsyncFd<OwnedFd>>,
    /// The port of each watch descriptor.
    watched: Mutex<BTreeMap<i32, PortId>>,
}

impl SmDevices {
    /// Must be called on the runtime.
    pub fn new() -> io::Result<SmDevices> {
        let descriptor = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let events = Arc::new(register(descriptor, Interest::READABLE)?);
        Ok(SmDevices { events, watched: Mutex::default() })
    }

    /// The descriptor with the events of the files.
    pub fn events(&self) -> Arc<AsyncFd<OwnedFd>> {
        self.events.clone()
    }

    /// Watches the file of a port.
    pub fn add(&self, port: PortId, path: &Path) -> io::Result<()> {
        let flags = WatchFlags::OPEN | WatchFlags::CLOSE;
        let watch = inotify::add_watch(self.events.get_ref(), path, flags)?;
        self.watched.lock().insert(watch, port);
        Ok(())
    }

    /// Reads events; returns the ports at which a manager has started or ended.
    fn read(&self) -> Vec<(PortId, bool)> {
        let mut changes = Vec::new();
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(self.events.get_ref(), &mut buffer);
        let watched = self.watched.lock();
        while let Ok(event) = reader.next() {
            let is_opened = event.events().contains(ReadFlags::OPEN);
            let is_closed = event.events().intersects(ReadFlags::CLOSE_WRITE | ReadFlags::CLOSE_NOWRITE);
            if is_opened || is_closed {
                changes.extend(watched.get(&event.wd()).map(|port| (*port, is_opened)));
            }
        }
        changes
    }
}

/// Follows the events for as long as the subnet exists.
pub(super) async fn watch(server: Weak<SubnetServer>, events: Arc<AsyncFd<OwnedFd>>) {
    while let Ok(mut ready) = events.readable().await {
        let Some(server) = server.upgrade() else { return };
        let changes = server.devices.read();
        server.with_clients(|clients| {
            changes.into_iter().for_each(|(port, is_sm)| clients.set_is_sm(port, is_sm))
        });
        ready.clear_ready();
    }
}
