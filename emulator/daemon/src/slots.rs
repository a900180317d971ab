//! The slots of a host: each process with a direct data path has the sockets of one, and the QPNs that lead to it.

use crate::client_memory::{AccessMonitor, ClientMemories};
use crate::command_error::CommandError;
use crate::messages::report;
use crate::network_namespace::within;
use crate::notification_queue::NotificationQueue;
use crate::recording::Recordings;
use parking_lot::{Condvar, Mutex};
use softhca_engine::{Counters, Settings};
use softhca_fabric::{HostId, RuleCounters, RuleId};
use softhca_queue::control::{Notification, QueuePairStatus};
use softhca_queue::{SharedWords, SleepFlag};
use softhca_udp::{
    DrivePolicy, Driver, DriverOptions, HostSockets, RingPair, SharedDriver, SlotGroup, SlotPage, SlotState,
    SocketOptions,
};
use softhca_wire::QpnSlot;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Slots are reused, the one that was free for longest first, once this many exist.
const FRESH_SLOTS: usize = 8;

/// How long a process may take to report its resources, or to apply a change of the fault rules.
const REPORT_TIMEOUT: Duration = Duration::from_millis(500);
/// How often the daemon looks whether a process has applied a change.
const APPLY_INTERVAL: Duration = Duration::from_micros(50);

/// The slots of a host.
pub(crate) struct HostSlots {
    settings: Settings,
    host: HostId,
    /// The network namespace of the host, unless it is that of the daemon.
    namespace: Option<PathBuf>,
    recordings: Arc<Recordings>,
    table: Mutex<SlotTable>,
    /// A report has arrived, or a process is gone.
    reported: Condvar,
}

/// The resources of a process.
pub(crate) struct SlotReport {
    pub pid: u32,
    pub queue_pairs: Vec<QueuePairStatus>,
    pub resources: Vec<(String, u32)>,
}

struct SlotOwner {
    pid: u32,
    notifications: Arc<NotificationQueue>,
    /// `None` while the process is asked for it.
    report: Option<SlotReport>,
    state: SlotState,
    /// The changes of fault rules that the process was notified of.
    changes: u64,
}

struct SlotTable {
    group: SlotGroup,
    free: VecDeque<u16>,
    /// Free slots that had a process: a port without queue pairs, which informs peers that the process is gone and
    /// discards what they still send.
    vacant: BTreeMap<u16, SharedDriver<ClientMemories>>,
    /// The processes, by slot.
    owners: BTreeMap<u16, SlotOwner>,
    /// The rings between two processes, by their slots, the lower first.
    rings: BTreeMap<[u16; 2], RingPair>,
    /// The counters of processes that are gone, and of their fault rules.
    past_counters: Counters,
    past_rules: Vec<(RuleId, RuleCounters)>,
}

impl HostSlots {
    /// Lets processes share the addresses of a host. `sockets` are those of slot 0, the daemon's.
    pub fn new(
        sockets: &HostSockets,
        settings: Settings,
        host: HostId,
        namespace: Option<&Path>,
        recordings: &Arc<Recordings>,
    ) -> io::Result<Arc<HostSlots>> {
        let group = SlotGroup::new(sockets, SocketOptions::default())?;
        let table = SlotTable {
            group,
            free: VecDeque::from([1]),
            vacant: BTreeMap::new(),
            owners: BTreeMap::new(),
            rings: BTreeMap::new(),
            past_counters: Counters::default(),
            past_rules: Vec::new(),
        };
        let (recordings, table) = (recordings.clone(), Mutex::new(table));
        let (namespace, reported) = (namespace.map(PathBuf::from), Condvar::new());
        Ok(Arc::new(HostSlots { settings, host, namespace, recordings, table, reported }))
    }

    /// Notifies every process of a change of the fault rules, and waits until they have applied it.
    pub fn change_rules(&self, change: &Notification) {
        if *change == Notification::FaultRulesCleared {
            self.table.lock().past_rules.clear();
        }
        let deadline = std::time::Instant::now() + REPORT_TIMEOUT;
        let notify = |(slot, owner): (&u16, &mut SlotOwner)| {
            owner.changes += 1;
            owner.notifications.push(change.clone());
            (*slot, owner.changes)
        };
        let pending: Vec<(u16, u64)> = self.table.lock().owners.iter_mut().map(notify).collect();
        let is_applied = |(slot, changes): &(u16, u64)| {
            self.table.lock().owners.get(slot).is_none_or(|owner| owner.state.applied() >= *changes)
        };
        while !pending.iter().all(is_applied) && std::time::Instant::now() < deadline {
            std::thread::sleep(APPLY_INTERVAL);
        }
    }

    /// Says whether queue pairs of any host wait for roles or have them.
    pub fn set_has_roles(&self, has_roles: bool) {
        self.table.lock().owners.values().for_each(|owner| owner.state.set_has_roles(has_roles));
    }

    /// The counters of all processes, present and past.
    pub fn counters(&self) -> Counters {
        let table = self.table.lock();
        let mut counters = table.past_counters;
        counters.add(&self.recordings.slot_counters(self.host));
        counters
    }

    /// The counters of the fault rules of all processes, present and past.
    pub fn rules(&self) -> Vec<(RuleId, RuleCounters)> {
        let table = self.table.lock();
        let mut rules = table.past_rules.clone();
        rules.extend(self.recordings.slot_rules(self.host));
        rules
    }

    /// The resources of the processes that report them in time.
    pub fn reports(&self) -> Vec<SlotReport> {
        let deadline = std::time::Instant::now() + REPORT_TIMEOUT;
        let mut table = self.table.lock();
        for owner in table.owners.values_mut() {
            owner.report = None;
            owner.notifications.push(Notification::ReportRequested);
        }
        while table.owners.values().any(|owner| owner.report.is_none()) {
            if self.reported.wait_until(&mut table, deadline).timed_out() {
                break;
            }
        }
        table.owners.values_mut().filter_map(|owner| owner.report.take()).collect()
    }

    /// Gives a process a slot.
    pub fn assign(
        self: &Arc<HostSlots>,
        notifications: &Arc<NotificationQueue>,
        pid: u32,
    ) -> Result<(SlotLease, OwnedFd), CommandError> {
        let (page, descriptor) = SlotPage::create()?;
        let mut table = self.table.lock();
        let has_fresh = table.vacant.len() < table.free.len();
        let may_add = !has_fresh && (table.free.is_empty() || table.group.slots() <= FRESH_SLOTS);
        let slot = if may_add && table.group.slots() < SlotGroup::MAX_SLOTS {
            let group = &mut table.group;
            self.within_namespace(|| group.add_slot())?.map_err(io::Error::other)?
        } else {
            let message = format!("all {} slots of the host are in use", SlotGroup::MAX_SLOTS);
            table.free.pop_front().ok_or_else(|| CommandError::new(libc::EMFILE, message))?
        };
        let vacant = table.vacant.remove(&slot);
        let (notifications, state) = (notifications.clone(), page.state());
        table.owners.insert(slot, SlotOwner { pid, notifications, report: None, state, changes: 0 });
        self.recordings.add_slot(self.host, slot, pid, page);
        drop(table);
        // Sends what is pending, which takes time.
        drop(vacant);
        let slot = QpnSlot { number: slot, bits: QpnSlot::BITS };
        Ok((SlotLease { slots: self.clone(), slot }, descriptor))
    }

    /// Calls `act` in the network namespace of the host.
    pub fn within_namespace<T: Send>(&self, act: impl FnOnce() -> T + Send) -> io::Result<T> {
        within(self.namespace.as_deref(), act)
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
        let Some(owner) = table.owners.get(&peer).filter(|_| peer != own) else {
            return Err(CommandError::new(libc::ENOENT, format!("no process has slot {peer} of the host")));
        };
        let notifications = owner.notifications.clone();
        let key = [own.min(peer), own.max(peer)];
        if let Entry::Vacant(entry) = table.rings.entry(key) {
            entry.insert(RingPair::create()?);
            notifications.push(Notification::RingsOpened { slot: own });
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

    /// The resources of the process.
    pub fn report(&self, mut queue_pairs: Vec<QueuePairStatus>, resources: Vec<(String, u32)>) {
        if let Some(owner) = self.slots.table.lock().owners.get_mut(&self.slot.number) {
            let pid = owner.pid;
            queue_pairs.iter_mut().for_each(|qp| qp.pid = Some(pid));
            owner.report = Some(SlotReport { pid, queue_pairs, resources });
        }
        self.slots.reported.notify_all();
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
        let SlotTable { owners, rings, past_counters, past_rules, .. } = &mut *table;
        owners.remove(&own);
        self.slots.reported.notify_all();
        if let Some(page) = self.slots.recordings.remove_slot(self.slots.host, own) {
            past_counters.add(&page.counters());
            past_rules.extend(page.rules());
        }
        rings.retain(|slots, _| {
            let is_own = slots.contains(&own);
            let peer = if slots[0] == own { slots[1] } else { slots[0] };
            if let Some(peer) = owners.get(&peer).filter(|_| is_own) {
                peer.notifications.push(Notification::ProcessGone { slot: own });
            }
            !is_own
        });
        drop(table);
        let vacant =
            self.slots.within_namespace(|| self.slots.start_vacant(self.slot)).and_then(|vacant| vacant);
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
