//! The sockets of processes that share the address of their host.
//!
//! All bind the same port in one SO_REUSEPORT group, and the kernel gives each datagram to the socket of the slot that
//! it is for. Its position in the group is the slot: sockets are only ever added, and none is closed before the group.

use crate::host::LINK_CONTROL_RECEIVE_BUFFER;
use crate::slot_field::{SlotField, SlotSet};
use crate::socket::{RoceSocket, SocketOptions};
use crate::{BindError, HostSockets, Interface, system};
use softhca_wire::QpnSlot;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

/// The sockets of all slots of an address.
pub struct SlotGroup {
    addresses: Vec<SlotAddress>,
    /// Copies of those of slot 0: through the sockets of others, filters are rejected.
    slot_0: HostSockets,
    /// The sockets of slot 1, 2, …
    slots: Vec<HostSockets>,
    /// The slots whose sockets are read. Slot 0 gets what is for others.
    open: SlotSet,
    options: SocketOptions,
}

/// An address of a host.
struct SlotAddress {
    /// With the RoCE and the link control port.
    ports: [SocketAddr; 2],
    interface: Option<Interface>,
}

impl SlotGroup {
    /// The most slots: the last QPN of slot 511 is the multicast QPN.
    pub const MAX_SLOTS: usize = (1 << QpnSlot::BITS) - 1;

    /// Lets other slots share the addresses of slot 0, and opens slot 1: a group has at least two sockets. Only sockets
    /// of this user can join, and only once slot 0 has the port.
    pub fn new(slot_0: &HostSockets, options: SocketOptions) -> io::Result<SlotGroup> {
        for sockets in slot_0.by_address() {
            sockets.roce.share_port()?;
            sockets.link.share_port()?;
            // Merged messages would all go to the slot of the first.
            sockets.link.disable_gro();
        }
        let address = |sockets: &HostSockets| SlotAddress {
            ports: [&sockets.roce, &sockets.link].map(RoceSocket::local_address),
            interface: sockets.interface().cloned(),
        };
        let addresses = slot_0.by_address().map(address).collect();
        let slot_0 = HostSockets::adopt(slot_0.descriptors()?)?;
        let mut group = SlotGroup { addresses, slot_0, slots: Vec::new(), open: SlotSet::default(), options };
        group.add_slot().map_err(io::Error::other)?;
        Ok(group)
    }

    /// How many slots have sockets, slot 0 included.
    pub fn slots(&self) -> usize {
        self.slots.len() + 1
    }

    /// Opens the sockets of the next slot. Returns its number.
    pub fn add_slot(&mut self) -> Result<u16, BindError> {
        self.slots.push(HostSockets::bind_slot(&self.addresses, self.options)?);
        let slot = (self.slots() - 1) as u16;
        self.set_open(slot, true)
            .map_err(|source| BindError::Other { address: self.slot_0.roce.local_address(), source })?;
        Ok(slot)
    }

    /// Gives the datagrams for a slot to its sockets, or to those of slot 0: nothing reads the sockets of a closed slot.
    pub fn set_open(&mut self, slot: u16, is_open: bool) -> io::Result<()> {
        if self.open.set(slot, is_open) {
            for sockets in self.slot_0.by_address() {
                system::steer_by_slot(sockets.roce.as_fd(), SlotField::Target, &self.open)?;
                system::steer_by_slot(sockets.link.as_fd(), SlotField::LinkControl, &self.open)?;
            }
        }
        Ok(())
    }

    /// The sockets of a slot.
    pub fn slot(&self, slot: u16) -> Option<&HostSockets> {
        self.slots.get(usize::from(slot).checked_sub(1)?)
    }
}

/// No slot has this number.
const ASKING: u16 = u16::MAX;

/// Opens a socket that sends from a port of an address which the kernel chooses.
pub type OpenSendSocket = Box<dyn FnMut(IpAddr) -> io::Result<OwnedFd> + Send>;

/// The sockets that send to processes which share an address. The kernel of a receiver merges datagrams from one port
/// before it looks at their slots. Each slot therefore has a port of its own.
///
/// One more socket asks unknown ports for link control. The kernel gives an ICMP error about the shared port to any socket of
/// the group, and the process that asked would not see the answer of a foreign peer.
#[derive(Default)]
pub(crate) struct SendSockets {
    /// By source address and destination slot; `None` if it could not be opened.
    sockets: BTreeMap<(IpAddr, u16), Option<RoceSocket>>,
    /// How to open one in the network namespace of the host; without it, in that of this process.
    pub open: Option<OpenSendSocket>,
}

impl SendSockets {
    /// The socket that sends from `source` to slots of this number.
    pub fn socket(&mut self, source: IpAddr, slot: u16) -> Option<&mut RoceSocket> {
        let SendSockets { sockets, open } = self;
        let socket = sockets.entry((source, slot)).or_insert_with(|| {
            // No reader: the smallest buffer is sufficient.
            let options = SocketOptions { receive_buffer: 0, ..SocketOptions::default() };
            match open {
                Some(open) => open(source).and_then(RoceSocket::adopt).ok(),
                None => RoceSocket::bind(SocketAddr::new(source, 0), options).ok(),
            }
        });
        socket.as_mut()
    }

    /// The socket that asks from `source` whether a port has link control.
    pub fn asking_socket(&mut self, source: IpAddr) -> Option<&mut RoceSocket> {
        self.socket(source, ASKING)
    }

    /// All sockets, with the slot that each sends to; `None` for those that ask for link control.
    pub fn iter(&self) -> impl Iterator<Item = (Option<u16>, &RoceSocket)> {
        let is_asking = |slot: u16| slot == ASKING;
        self.sockets.iter().filter_map(move |((_, slot), socket)| {
            Some(((!is_asking(*slot)).then_some(*slot), socket.as_ref()?))
        })
    }
}

impl HostSockets {
    /// The sockets of another slot of a host with these addresses.
    fn bind_slot(addresses: &[SlotAddress], options: SocketOptions) -> Result<HostSockets, BindError> {
        let (SlotAddress { ports: [roce, link], interface }, rest) =
            addresses.split_first().expect("a host has an address");
        let link_options = SocketOptions { receive_buffer: LINK_CONTROL_RECEIVE_BUFFER, ..options };
        let link = RoceSocket::bind_shared(*link, link_options)?;
        link.disable_gro();
        let roce = RoceSocket::bind_shared(*roce, options)?;
        for socket in [&roce, &link] {
            let address = socket.local_address();
            socket.lock_filter().map_err(|source| BindError::Other { address, source })?;
        }
        let ipv6 = if rest.is_empty() { None } else { Some(HostSockets::bind_slot(rest, options)?) };
        Ok(HostSockets::from_parts(roce, link, ipv6).with_interface(interface.clone()))
    }

    /// The sockets of a slot that another process has opened: the RoCE socket and the link control socket of the first
    /// address, then of the second.
    pub fn adopt(descriptors: Vec<OwnedFd>) -> io::Result<HostSockets> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || {
            let missing = || io::Error::other("a slot has two sockets for each address");
            RoceSocket::adopt(descriptors.next().ok_or_else(missing)?)
        };
        let (roce, link) = (next()?, next()?);
        let rest: Vec<OwnedFd> = descriptors.collect();
        let ipv6 = if rest.is_empty() { None } else { Some(HostSockets::adopt(rest)?) };
        Ok(HostSockets::from_parts(roce, link, ipv6))
    }

    /// Discards the datagrams that wait in the sockets.
    pub fn discard_received(&self) {
        self.by_address()
            .flat_map(|sockets| [&sockets.roce, &sockets.link])
            .for_each(RoceSocket::discard_received);
    }

    /// Copies of the descriptors, in the order that [`HostSockets::adopt`] takes them.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let sockets = self.by_address().flat_map(|sockets| [&sockets.roce, &sockets.link]);
        sockets.map(|socket| socket.as_fd().try_clone_to_owned()).collect()
    }
}
