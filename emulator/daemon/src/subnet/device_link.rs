//! The port of a verbs device on the subnet.

use super::SubnetServer;
use softhca_subnet::{PortId, Subnet};
use softhca_types::InfiniBandPort;
use softhca_udp::{SubnetLink, Waker};
use softhca_wire::smp::{KeyViolation, TrapNumber};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Tells the thread of a device that something has happened at its port.
pub(super) struct ReadySignal {
    is_ready: AtomicBool,
    /// The attributes of the port have changed.
    has_changed: AtomicBool,
    waker: Waker,
}

impl ReadySignal {
    /// The attributes of the port have changed.
    pub fn raise_changed(&self) {
        self.has_changed.store(true, Ordering::Release);
        self.raise();
    }

    /// Packets or room.
    pub fn raise(&self) {
        if !self.is_ready.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }
}

/// The link of a device to the subnet.
pub(crate) struct DeviceLink {
    server: Weak<SubnetServer>,
    port: PortId,
    signal: Arc<ReadySignal>,
}

impl DeviceLink {
    /// Attaches a device to a port.
    pub fn open(server: &Arc<SubnetServer>, port: PortId) -> std::io::Result<DeviceLink> {
        let (is_ready, has_changed) = (AtomicBool::new(true), AtomicBool::new(true));
        let signal = Arc::new(ReadySignal { is_ready, has_changed, waker: Waker::new()? });
        let mut state = server.state.lock();
        state.devices.insert(port, signal.clone());
        state.clients.pass_data(|subnet| subnet.attach_device(port));
        drop(state);
        Ok(DeviceLink { server: Arc::downgrade(server), port, signal })
    }

    /// Becomes readable when something happens at the port.
    pub fn wake_descriptor(&self) -> BorrowedFd<'_> {
        self.signal.waker.as_fd()
    }

    fn pass<R>(&self, pass: impl FnOnce(&mut Subnet) -> R) -> Option<R> {
        Some(self.server.upgrade()?.with_clients(|clients| clients.pass_data(pass)))
    }
}

/// The attributes of a port.
pub(super) fn infiniband_port(subnet: &Subnet, port: PortId) -> InfiniBandPort {
    let node_guid = subnet.topology().nodes[port.node].guid;
    let (info, guids, p_keys) = (subnet.port_info(port), subnet.port_guids(port), subnet.p_keys(port));
    InfiniBandPort::new(node_guid, info, guids, p_keys, subnet.reregistrations(port))
}

impl SubnetLink for DeviceLink {
    fn take_ready(&mut self) -> bool {
        self.signal.is_ready.load(Ordering::Relaxed) && self.signal.is_ready.swap(false, Ordering::AcqRel)
    }

    fn has_room(&mut self) -> bool {
        self.pass(|subnet| subnet.has_room(self.port)).unwrap_or(false)
    }

    fn send(&mut self, packets: &[Vec<u8>]) {
        self.pass(|subnet| packets.iter().for_each(|packet| subnet.send_data(self.port, packet)));
    }

    fn receive(&mut self, most: usize) -> Vec<Vec<u8>> {
        let receive = |subnet: &mut Subnet| {
            std::iter::from_fn(|| subnet.receive_data(self.port)).take(most).collect::<Vec<_>>()
        };
        self.pass(receive).unwrap_or_default()
    }

    fn changed_port(&mut self) -> Option<InfiniBandPort> {
        match self.signal.has_changed.swap(false, Ordering::AcqRel) {
            true => self.pass(|subnet| infiniband_port(subnet, self.port)),
            false => None,
        }
    }

    fn report(&mut self, trap: TrapNumber, violation: KeyViolation) {
        if let Some(server) = self.server.upgrade() {
            server.with_clients(|clients| {
                clients.change(|subnet| subnet.report_bad_key(self.port, trap, violation));
            });
        }
    }
}
