//! The slots of a host: each process with a direct data path has the sockets of one, and the QPNs that lead to it.

use crate::client_memory::{AccessMonitor, ClientMemories};
use crate::command_error::CommandError;
use crate::messages::report;
use crate::notification_queue::NotificationQueue;
use parking_lot::Mutex;
use softhca_engine::Settings;
use softhca_queue::control::Notification;
use softhca_queue::{SharedWords, SleepFlag};
use softhca_udp::{
    DrivePolicy, Driver, DriverOptions, HostSockets, RingPair, SharedDriver, SlotGroup, SocketOptions,
};
use softhca_wire::QpnSlot;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Slots are reused, the one that was free for longest first, once this many exist.
const FRESH_SLOTS: usize = 32;

/// The slots of a host.
pub(crate) struct HostSlots {
    settings: Settings,
    table: Mutex<SlotTable>,
}

struct SlotTable {
    group: SlotGroup,
    free: VecDeque<u16>,
    /// Free slots that had a process: a port without queue pairs, which tells peers that the process is gone and
    /// discards what they still send.
    vacant: BTreeMap<u16, SharedDriver<ClientMemories>>,
    /// The processes, by slot.
    owners: BTreeMap<u16, Arc<NotificationQueue>>,
    /// The rings between two processes, by their slots, the lower first.
    rings: BTreeMap<[u16; 2], RingPair>,
}

impl HostSlots {
    /// Lets processes share the addresses of a host. `sockets` are those of slot 0, the daemon's.
    pub fn new(sockets: &HostSockets, settings: Settings) -> io::Result<Arc<HostSlots>> {
        let group = SlotGroup::new(sockets, SocketOptions::default())?;
        let table = SlotTable {
            group,
            free: VecDeque::from([1]),
            vacant: BTreeMap::new(),
            owners: BTreeMap::new(),
            rings: BTreeMap::new(),
        };
        Ok(Arc::new(HostSlots { settings, table: Mutex::new(table) }))
    }

    /// Gives a process a slot.
    pub fn assign(
        self: &Arc<HostSlots>,
        notifications: &Arc<NotificationQueue>,
    ) -> Result<SlotLease, CommandError> {
        let mut table = self.table.lock();
        let has_fresh = table.vacant.len() < table.free.len();
        let may_add = !has_fresh && (table.free.is_empty() || table.group.slots() <= FRESH_SLOTS);
        let slot = if may_add && table.group.slots() < SlotGroup::MAX_SLOTS {
            table.group.add_slot().map_err(io::Error::other)?
        } else {
            let message = format!("all {} slots of the host are in use", SlotGroup::MAX_SLOTS);
            table.free.pop_front().ok_or_else(|| CommandError::new(libc::EMFILE, message))?
        };
        let vacant = table.vacant.remove(&slot);
        table.owners.insert(slot, notifications.clone());
        drop(table);
        // Sends what is pending, which takes time.
        drop(vacant);
        Ok(SlotLease { slots: self.clone(), slot: QpnSlot { number: slot, bits: QpnSlot::BITS } })
    }

    fn descriptors(&self, slot: u16) -> io::Result<Vec<OwnedFd>> {
        let table = self.table.lock();
        table.group.slot(slot).ok_or(io::ErrorKind::NotFound)?.descriptors()
    }

    /// A port without queue pairs for a slot whose process is gone.
    fn start_vacant(&self, slot: QpnSlot) -> io::Result<SharedDriver<ClientMemories>> {
        let sockets = HostSockets::adopt(self.descriptors(slot.number)?)?;
        let settings = Settings { qpn_slot: slot, ..self.settings };
        let options = DriverOptions { settings, ..DriverOptions::default() };
        let memories = ClientMemories::new(Arc::new(AccessMonitor::default()));
        let driver = Driver::new(sockets, options, memories, Box::new(()));
        let sleep_flag = SleepFlag::new(SharedWords::heap(SleepFlag::WORDS));
        SharedDriver::start(driver, DrivePolicy::Thread { busy_poll: Duration::ZERO }, sleep_flag)
    }
}

/// The slot of a process, until it is gone.
pub(crate) struct SlotLease {
    slots: Arc<HostSlots>,
    pub slot: QpnSlot,
}

impl SlotLease {
    /// Opens rings to the process in another slot, which is notified. Both may ask for them.
    pub fn open_rings(&self, peer: u16) -> Result<Vec<OwnedFd>, CommandError> {
        let own = self.slot.number;
        let mut table = self.slots.table.lock();
        let Some(owner) = table.owners.get(&peer).filter(|_| peer != own).cloned() else {
            return Err(CommandError::new(libc::ENOENT, format!("no process has slot {peer} of the host")));
        };
        let key = [own.min(peer), own.max(peer)];
        if let Entry::Vacant(entry) = table.rings.entry(key) {
            entry.insert(RingPair::create()?);
            owner.push(Notification::RingsOpened { slot: own });
        }
        self.ring_descriptors(&table, peer)
    }

    /// Copies of the descriptors of the rings to the process in another slot.
    pub fn rings(&self, peer: u16) -> Result<Vec<OwnedFd>, CommandError> {
        self.ring_descriptors(&self.slots.table.lock(), peer)
    }

    fn ring_descriptors(&self, table: &SlotTable, peer: u16) -> Result<Vec<OwnedFd>, CommandError> {
        let own = self.slot.number;
        let rings = table.rings.get(&[own.min(peer), own.max(peer)]);
        let gone = || CommandError::new(libc::ENOENT, format!("the process in slot {peer} is gone"));
        Ok(rings.ok_or_else(gone)?.descriptors()?)
    }

    /// Copies of the sockets.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        self.slots.descriptors(self.slot.number)
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        let own = self.slot.number;
        let mut table = self.slots.table.lock();
        let SlotTable { owners, rings, .. } = &mut *table;
        owners.remove(&own);
        rings.retain(|slots, _| {
            let is_own = slots.contains(&own);
            let peer = if slots[0] == own { slots[1] } else { slots[0] };
            if let Some(peer) = owners.get(&peer).filter(|_| is_own) {
                peer.push(Notification::ProcessGone { slot: own });
            }
            !is_own
        });
        drop(table);
        let vacant = self.slots.start_vacant(self.slot);
        let mut table = self.slots.table.lock();
        match vacant {
            Ok(vacant) => drop(table.vacant.insert(self.slot.number, vacant)),
            Err(error) => {
                report!("peers of slot {} find out late that it is free: {error}", self.slot.number)
            }
        }
        table.free.push_back(self.slot.number);
    }
}
