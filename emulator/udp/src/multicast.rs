//! The multicast groups of a host, with one socket each.
//!
//! A socket bound to a unicast address receives no multicast. Each group therefore has a receive socket that is bound
//! to the group. All members on the machine share its port, and all of them get every datagram. The host's own socket
//! sends to groups, and its datagrams loop back to members on this machine.

use crate::socket::{RoceSocket, SocketOptions};
use crate::{HostSockets, system::WakeSet};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

/// The groups of a host.
#[derive(Default)]
pub(crate) struct MulticastGroups {
    joined: BTreeMap<IpAddr, RoceSocket>,
    /// Why the other groups could not be joined.
    failed: BTreeMap<IpAddr, io::Error>,
}

impl MulticastGroups {
    /// Joins the new groups of `wanted` and leaves all others.
    pub fn update(&mut self, wanted: &BTreeSet<IpAddr>, host: &HostSockets, wake_set: Option<&WakeSet>) {
        self.joined.retain(|group, _| wanted.contains(group));
        self.failed.retain(|group, _| wanted.contains(group));
        for group in wanted {
            if self.joined.contains_key(group) {
                continue;
            }
            match join(*group, host, wake_set) {
                Ok(socket) => {
                    self.failed.remove(group);
                    self.joined.insert(*group, socket);
                }
                Err(error) => {
                    self.failed.insert(*group, error);
                }
            }
        }
    }

    /// Whether exactly these groups are joined or failed.
    pub fn matches(&self, wanted: impl Iterator<Item = IpAddr>) -> bool {
        let mut count = 0;
        let known = |group: &IpAddr| self.joined.contains_key(group) || self.failed.contains_key(group);
        let all = wanted.inspect(|_| count += 1).all(|group| known(&group));
        all && count == self.joined.len() + self.failed.len()
    }

    /// Why a group could not be joined, if so.
    pub fn join_error(&self, group: IpAddr) -> Option<&io::Error> {
        self.failed.get(&group)
    }

    /// The groups and their sockets.
    pub fn sockets(&self) -> impl Iterator<Item = (IpAddr, &RoceSocket)> {
        self.joined.iter().map(|(group, socket)| (*group, socket))
    }

    /// Lets a datagram for a group wake the threads that wait on `wake_set`.
    pub fn add_to_wake_set(&self, wake_set: &WakeSet) -> io::Result<()> {
        use std::os::fd::AsFd;
        self.joined.values().try_for_each(|socket| wake_set.add(socket.as_fd()))
    }
}

fn join(group: IpAddr, host: &HostSockets, wake_set: Option<&WakeSet>) -> io::Result<RoceSocket> {
    use std::os::fd::AsFd;
    let port = host.with_ip_version(group).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::Unsupported,
            format!("the host has no address of the IP version of {group}"),
        )
    })?;
    let interface = port.interface().ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("no interface has {}", port.address()))
    })?;
    let socket = RoceSocket::join_multicast(group, interface, SocketOptions::default())?;
    if let Some(wake_set) = wake_set {
        wake_set.add(socket.as_fd())?;
    }
    Ok(socket)
}
