//! The slots of a host: each process with a direct data path has the sockets of one, and the QPNs that lead to it.

use crate::command_error::CommandError;
use crate::host_driver::HostDriver;
use crate::host_rules::{HostRules, RuleChange};
use crate::messages::report;
use crate::network_namespace::within;
use crate::notification_queue::NotificationQueue;
use crate::recording::Recordings;
use parking_lot::{Condvar, Mutex};
use softhca_control::{HandedOverPacket, MAX_RULES, Notification, QueuePairStatus};
use softhca_engine::{Counters, Instant, Settings};
use softhca_fabric::{EventSink, HostId, Link, NetworkEvent};
use softhca_queue::{MapMode, RecordedAck, RecordedConnection, SharedMemory, SharedWords, SleepFlag};
use softhca_udp::{
    DrivePolicy, Driver, DriverOptions, HostSockets, Loopback, RingPair, SharedDriver, SlotGroup, SlotPage,
    SlotState, SocketOptions,
};
use softhca_wire::cm::{Datagram, Message, PacketTarget};
use softhca_wire::{Gid, Icrc, QpnSlot, ROCE_PORT, TransportPacket};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Slots are reused, the one that was free for longest first, once this many exist.
const FRESH_SLOTS: usize = 8;

/// The share of the slots that one process may have. Further devices of the process use the data path of the daemon.
const PROCESS_SLOTS: usize = SlotGroup::MAX_SLOTS / 4;

/// How long a vacant port answers the heartbeats of other hosts: each sends one a second.
const VACANT_TIME: Duration = Duration::from_secs(2);

/// How long a process may take to report its resources, or to apply a change of the fault rules.
const REPORT_TIMEOUT: Duration = Duration::from_millis(500);
/// How often the daemon looks whether a process has applied a change.
const APPLY_INTERVAL: Duration = Duration::from_micros(50);

/// The slots of a host.
pub(crate) struct HostSlots {
    settings: Settings,
    loopback: Loopback,
    host: HostId,
    /// The addresses of the host.
    gids: Vec<Gid>,
    /// The network namespace of the host, unless it is that of the daemon.
    namespace: Option<PathBuf>,
    recordings: Arc<Recordings>,
    table: Mutex<SlotTable>,
    /// A report has arrived, or a process is gone.
    reported: Condvar,
    /// The counters of the host's fault rules, which all its drivers share, and the descriptor of their memory.
    rule_counters: SharedWords,
    rule_counters_descriptor: OwnedFd,
    /// The driver of the host's card, which has slot 0.
    slot_0: OnceLock<Weak<HostDriver>>,
}

/// A port without queue pairs, for a slot whose process is gone.
struct VacantPort {
    /// Its thread runs until it is dropped.
    driver: Arc<SharedDriver>,
    /// Its drops.
    counters: Arc<Mutex<Counters>>,
    /// Until then, other hosts find out by it that the process is gone. It ends soon after.
    needed_until: std::time::Instant,
}

/// Records what a vacant port drops and sends as events of its host.
struct VacantPortEvents {
    recordings: Arc<Recordings>,
    host: HostId,
}

impl EventSink for VacantPortEvents {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        self.recordings.on_host_event(self.host, now, event);
    }
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
    /// The changes of fault rules and of the device that the process was notified of.
    changes: u64,
}

/// A slot for the next process, and its page.
struct PreparedSlot {
    number: u16,
    page: SlotPage,
    descriptor: OwnedFd,
}

struct SlotTable {
    group: SlotGroup,
    free: VecDeque<u16>,
    prepared: Option<PreparedSlot>,
    /// Rings for the two processes that need some next.
    spare_rings: Option<RingPair>,
    /// Free slots that had a process: a port without queue pairs, which informs peers that the process is gone, sends its
    /// last ACKs, and drops what peers still send.
    vacant: BTreeMap<u16, VacantPort>,
    /// The processes, by slot.
    owners: BTreeMap<u16, SlotOwner>,
    /// The rings between two processes, by their slots, the lower first.
    rings: BTreeMap<[u16; 2], RingPair>,
    /// The counters of processes that are gone, and of earlier vacant ports.
    past_counters: Counters,
    /// The fault rules and flows of the host, for processes that come later.
    rules: HostRules,
    /// Queue pairs of any host wait for roles or have them.
    has_roles: bool,
}

impl SlotTable {
    /// Opens rings between two processes. False if they exist.
    fn open_rings(&mut self, own: u16, peer: u16) -> Result<bool, CommandError> {
        if peer == own || !self.owners.contains_key(&peer) {
            return Err(CommandError::new(libc::ENOENT, format!("no process has slot {peer} of the host")));
        }
        match self.rings.entry([own.min(peer), own.max(peer)]) {
            Entry::Occupied(_) => Ok(false),
            Entry::Vacant(entry) => {
                let spare = self.spare_rings.take();
                entry.insert(spare.map_or_else(RingPair::create, Ok)?);
                Ok(true)
            }
        }
    }

    /// Gives the process in a slot its rings to another.
    fn notify_of_rings(&self, slot: u16, peer: u16) {
        let rings = self.rings.get(&[slot.min(peer), slot.max(peer)]);
        if let (Some(rings), Some(owner)) = (rings, self.owners.get(&slot)) {
            owner.notifications.push_with(Notification::RingsOpened { slot: peer }, &rings.as_fds());
        }
    }

    /// Notifies every process of a change, but the one in the slot `except`. Returns how many changes each, by slot, has
    /// been notified of.
    fn notify_all(&mut self, notification: &Notification, except: Option<u16>) -> Vec<(u16, u64)> {
        let notify = |(slot, owner): (&u16, &mut SlotOwner)| {
            owner.changes += 1;
            owner.notifications.push(notification.clone());
            (*slot, owner.changes)
        };
        self.owners.iter_mut().filter(|(slot, _)| Some(**slot) != except).map(notify).collect()
    }

    /// Notifies the process in a slot, if there is one.
    fn notify(&self, slot: u16, notification: Notification) {
        if let Some(owner) = self.owners.get(&slot) {
            owner.notifications.push(notification);
        }
    }
}

/// The CM message in a packet.
fn parse(packet: &HandedOverPacket) -> Option<Message> {
    let (transport, _) = Icrc::split(&packet.bytes).ok()?;
    Some(Datagram::parse(TransportPacket::parse(transport).ok()?.payload).ok()?.message)
}

impl HostSlots {
    /// Lets processes share the addresses of a host. `sockets` are those of slot 0, the daemon's.
    pub fn new(
        sockets: &HostSockets,
        settings: Settings,
        loopback: Loopback,
        host: HostId,
        namespace: Option<&Path>,
        recordings: &Arc<Recordings>,
    ) -> io::Result<Arc<HostSlots>> {
        let group = SlotGroup::new(sockets, SocketOptions::default())?;
        let table = SlotTable {
            group,
            free: VecDeque::from([1]),
            prepared: None,
            spare_rings: None,
            vacant: BTreeMap::new(),
            owners: BTreeMap::new(),
            rings: BTreeMap::new(),
            past_counters: Counters::default(),
            rules: HostRules::default(),
            has_roles: false,
        };
        let bytes = MAX_RULES * Link::COUNTER_WORDS * 8;
        let memory = Arc::new(SharedMemory::create("softhca-rules", bytes, MapMode::ReadWrite)?);
        let rule_counters_descriptor = memory.take_descriptor().ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(HostSlots {
            rule_counters: memory.words(0, bytes / 8),
            rule_counters_descriptor,
            settings,
            loopback,
            host,
            gids: sockets.gids(),
            namespace: namespace.map(PathBuf::from),
            recordings: recordings.clone(),
            table: Mutex::new(table),
            reported: Condvar::new(),
            slot_0: OnceLock::new(),
        }))
    }

    /// The counters of the host's fault rules, which all its drivers share.
    pub fn rule_counters(&self) -> SharedWords {
        self.rule_counters.clone()
    }

    /// The driver of the host that the slots belong to.
    pub fn set_slot_0(&self, driver: &Arc<HostDriver>) {
        let _ = self.slot_0.set(Arc::downgrade(driver));
    }

    /// Gives packets to the processes in the slots that they are for. Returns those for slot 0, for slots without a
    /// process, and for a process that does not read.
    pub fn hand_over(&self, packets: Vec<HandedOverPacket>) -> Vec<HandedOverPacket> {
        let mut table = self.table.lock();
        let (mut by_slot, mut rest) = (BTreeMap::<u16, Vec<HandedOverPacket>>::new(), Vec::new());
        for mut packet in packets {
            // A client may send any.
            if packet.bytes.len() > HandedOverPacket::MAX_BYTES {
                continue;
            }
            if packet.slot == HandedOverPacket::UNKNOWN_SLOT
                && let Some(slot) = self.slot_of_request(&packet)
            {
                packet.slot = slot;
            }
            let slot = packet.slot;
            match table.owners.get(&slot).is_some_and(|owner| owner.notifications.has_room()) {
                true => by_slot.entry(slot).or_default().push(packet),
                false => rest.push(packet),
            }
        }
        for (slot, packets) in by_slot {
            // The reply needs rings. If they cannot be opened now, the process asks for them.
            let mut requesters: Vec<u16> =
                packets.iter().filter_map(|packet| self.requester(packet)).collect();
            requesters.retain(|peer| matches!(table.open_rings(slot, *peer), Ok(true)));
            requesters.iter().for_each(|peer| table.notify_of_rings(slot, *peer));
            let mut packets = packets.into_iter().peekable();
            while packets.peek().is_some() {
                let packets = packets.by_ref().take(HandedOverPacket::MAX_IN_MESSAGE).collect();
                table.notify(slot, Notification::PacketsHandedOver { packets });
            }
            // They wait for the reply, so the listener goes first.
            requesters.iter().for_each(|peer| table.notify_of_rings(*peer, slot));
        }
        rest
    }

    /// The slot of a process of this host that sent a REQ or SIDR_REQ without a link.
    fn requester(&self, packet: &HandedOverPacket) -> Option<u16> {
        let is_own = packet.source.port() == ROCE_PORT && self.gids.contains(&packet.source.ip().into());
        let is_request = matches!(PacketTarget::of(&packet.bytes), PacketTarget::Listener(_));
        let sender = (is_own && is_request).then(|| parse(packet))??.sender_id();
        Some(QpnSlot::of(sender.qpn(), QpnSlot::BITS).number)
    }

    /// The slot of the process that has received the request which a peer repeats or withdraws.
    fn slot_of_request(&self, packet: &HandedOverPacket) -> Option<u16> {
        self.recordings.slot_of_connection(self.host, packet.source.ip(), parse(packet)?.sender_id())
    }

    /// Gives packets of a vacant slot's port to the processes in the slots that they are for.
    fn hand_over_from_vacant(&self, packets: Vec<HandedOverPacket>) -> Vec<HandedOverPacket> {
        let (own, rest): (Vec<_>, Vec<_>) =
            self.hand_over(packets).into_iter().partition(|packet| packet.slot == 0);
        if let Some(driver) = self.slot_0.get().and_then(Weak::upgrade).filter(|_| !own.is_empty()) {
            driver.control(|driver| driver.receive_handed_over(&own));
        }
        rest
    }

    /// Changes the fault rules of every process, present and future.
    pub fn change_rules(&self, change: &RuleChange) {
        let mut table = self.table.lock();
        table.rules.apply(change);
        let pending = table.notify_all(&change.notification(), None);
        drop(table);
        self.wait_until_applied(&pending);
        if *change == RuleChange::Clear {
            let vacant: Vec<_> = self.table.lock().vacant.values().map(|port| port.driver.clone()).collect();
            vacant.iter().for_each(|driver| driver.control(Driver::clear_rules));
            self.rule_counters.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
    }

    /// Notifies every process of a change, but the one in the slot `except`. Waits until they have applied it.
    pub fn notify_all(&self, notification: &Notification, except: Option<u16>) {
        let pending = self.table.lock().notify_all(notification, except);
        self.wait_until_applied(&pending);
    }

    /// Waits until processes, by slot, have applied so many changes. One that does not run may be late.
    fn wait_until_applied(&self, pending: &[(u16, u64)]) {
        let deadline = std::time::Instant::now() + REPORT_TIMEOUT;
        let is_applied = |(slot, changes): &(u16, u64)| {
            self.table.lock().owners.get(slot).is_none_or(|owner| owner.state.applied() >= *changes)
        };
        while !pending.iter().all(is_applied) && std::time::Instant::now() < deadline {
            std::thread::sleep(APPLY_INTERVAL);
        }
    }

    /// Says whether queue pairs of any host wait for roles or have them.
    pub fn set_has_roles(&self, has_roles: bool) {
        let mut table = self.table.lock();
        table.has_roles = has_roles;
        table.owners.values().for_each(|owner| owner.state.set_has_roles(has_roles));
    }

    /// The counters of all processes, present and past.
    pub fn counters(&self) -> Counters {
        let table = self.table.lock();
        let mut counters = table.past_counters;
        table.vacant.values().for_each(|vacant| counters.add(&vacant.counters.lock()));
        counters.add(&self.recordings.slot_counters(self.host));
        counters
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

    /// Gives a process a slot, with the fault rules and flows of the host, and the changes of its device. `None` if all are in use, or those that one
    /// process may have.
    pub fn assign(
        self: &Arc<HostSlots>,
        notifications: &Arc<NotificationQueue>,
        pid: u32,
    ) -> Result<Option<AssignedSlot>, CommandError> {
        let owned = self.table.lock().owners.values().filter(|owner| owner.pid == pid).count();
        if owned >= PROCESS_SLOTS {
            return Ok(None);
        }
        let prepared = self.table.lock().prepared.take();
        let prepared = match prepared {
            None => self.prepare(|_| true)?,
            prepared => prepared,
        };
        let Some(PreparedSlot { number, page, descriptor }) = prepared else { return Ok(None) };
        if let Some(sockets) = self.table.lock().group.slot(number) {
            sockets.discard_received();
        }
        let (notifications, state) = (notifications.clone(), page.state());
        let mut table = self.table.lock();
        let rule_changes = table.rules.notifications();
        state.set_has_roles(table.has_roles);
        let owner = SlotOwner { pid, notifications, report: None, state, changes: 0 };
        table.owners.insert(number, owner);
        drop(table);
        self.recordings.add_slot(self.host, number, pid, page);
        let slot = QpnSlot { number, bits: QpnSlot::BITS };
        let lease = SlotLease { slots: self.clone(), slot, has_sent_to_hosts: false };
        let rule_counters = self.rule_counters_descriptor.try_clone()?;
        Ok(Some(AssignedSlot { lease, page: descriptor, rule_counters, rule_changes }))
    }

    /// Prepares a slot and rings for the process that comes next, which then need not wait for them.
    pub fn prepare_next(&self) {
        if self.table.lock().spare_rings.is_none() {
            let rings = RingPair::create().ok();
            self.table.lock().spare_rings = rings;
        }
        if self.table.lock().prepared.is_some() {
            return;
        }
        // If there is none, the process that comes next waits, or uses the data path of the daemon.
        let now = std::time::Instant::now();
        let Ok(Some(slot)) = self.prepare(|vacant| vacant.needed_until <= now) else { return };
        let mut table = self.table.lock();
        match &table.prepared {
            None => table.prepared = Some(slot),
            Some(_) => table.free.push_front(slot.number),
        }
    }

    /// Ends the vacant ports that other hosts need no longer: slot 0 gets what is still sent to them.
    pub fn end_vacant(&self) {
        let now = std::time::Instant::now();
        let mut table = self.table.lock();
        let SlotTable { vacant, group, past_counters, .. } = &mut *table;
        let mut ended = Vec::new();
        while let Some(slot) = vacant.iter().find(|(_, port)| port.needed_until <= now).map(|(slot, _)| *slot)
        {
            if let Err(error) = group.set_open(slot, false) {
                report!("the port of slot {slot} does not end: {error}");
                break;
            }
            let port = vacant.remove(&slot);
            port.iter().for_each(|port| past_counters.add(&port.counters.lock()));
            ended.extend(port);
        }
        let is_last = vacant.is_empty() && !ended.is_empty();
        drop(table);
        // Sends what is pending, which takes time.
        drop(ended);
        if is_last {
            give_memory_back();
        }
    }

    /// Takes a free slot, and ends its vacant port, which `may_end` must permit. `None` if there is none.
    fn prepare(&self, may_end: impl Fn(&VacantPort) -> bool) -> Result<Option<PreparedSlot>, CommandError> {
        let (page, descriptor) = SlotPage::create()?;
        let mut table = self.table.lock();
        let has_fresh = table.vacant.len() < table.free.len();
        let may_add = !has_fresh && (table.free.is_empty() || table.group.slots() <= FRESH_SLOTS);
        let number = if may_add && table.group.slots() < SlotGroup::MAX_SLOTS {
            let group = &mut table.group;
            self.within_namespace(|| group.add_slot())?.map_err(io::Error::other)?
        } else {
            let SlotTable { free, vacant, .. } = &mut *table;
            let index = free.iter().position(|slot| vacant.get(slot).is_none_or(&may_end));
            let Some(number) = index.and_then(|index| free.remove(index)) else { return Ok(None) };
            number
        };
        if let Err(error) = table.group.set_open(number, true) {
            table.free.push_front(number);
            return Err(error.into());
        }
        let vacant = table.vacant.remove(&number);
        if let Some(vacant) = &vacant {
            table.past_counters.add(&vacant.counters.lock());
        }
        drop(table);
        // Sends what is pending, which takes time.
        drop(vacant);
        Ok(Some(PreparedSlot { number, page, descriptor }))
    }

    /// Calls `act` in the network namespace of the host.
    pub fn within_namespace<T: Send>(&self, act: impl FnOnce() -> T + Send) -> io::Result<T> {
        within(self.namespace.as_deref(), act)
    }

    fn descriptors(&self, slot: u16) -> io::Result<Vec<OwnedFd>> {
        let table = self.table.lock();
        table.group.slot(slot).ok_or(io::ErrorKind::NotFound)?.descriptors()
    }

    /// A port without queue pairs for a slot whose process is gone. It has sent the last ACKs of the process, and the ends of
    /// its connections, to those that have rings to it.
    fn create_vacant(
        self: &Arc<HostSlots>,
        slot: QpnSlot,
        acks: Vec<RecordedAck>,
        connections: &[RecordedConnection],
        rings: Vec<(u16, RingPair)>,
    ) -> io::Result<(Driver, Arc<Mutex<Counters>>)> {
        let sockets = HostSockets::adopt(self.descriptors(slot.number)?)?;
        let settings = Settings { qpn_slot: slot, ..self.settings };
        let options = DriverOptions { settings, loopback: self.loopback, ..DriverOptions::default() };
        let events = VacantPortEvents { recordings: self.recordings.clone(), host: self.host };
        let mut driver = Driver::new(sockets, options, Box::new(events));
        let slots = Arc::downgrade(self);
        driver.set_hand_over(Box::new(move |packets| match slots.upgrade() {
            Some(slots) => slots.hand_over_from_vacant(packets),
            None => packets,
        }));
        driver.share_rule_counters(self.rule_counters());
        let rules = self.table.lock().rules.clone();
        rules.add_to(&mut driver);
        let counters = Arc::new(Mutex::new(Counters::default()));
        let published = counters.clone();
        driver.set_publish_counters(Box::new(move |counters| *published.lock() = *counters));
        driver.send_recorded(acks.into_iter(), connections, rings.into_iter())?;
        Ok((driver, counters))
    }
}

fn start_vacant(
    (driver, counters): (Driver, Arc<Mutex<Counters>>),
    needed_for: Duration,
) -> io::Result<VacantPort> {
    let sleep_flag = SleepFlag::new(SharedWords::heap(SleepFlag::WORDS));
    let policy = DrivePolicy::Thread { busy_poll: Duration::ZERO };
    let driver = SharedDriver::start(driver, policy, sleep_flag)?;
    Ok(VacantPort {
        driver: Arc::new(driver),
        counters,
        needed_until: std::time::Instant::now() + needed_for,
    })
}

/// A new slot: its lease, and the descriptors and fault rules for its process.
pub(crate) struct AssignedSlot {
    pub lease: SlotLease,
    pub page: OwnedFd,
    /// The memory with the counters of the fault rules.
    pub rule_counters: OwnedFd,
    /// The fault rules and flows of the host.
    pub rule_changes: Vec<Notification>,
}

/// The slot of a process, until it is gone.
pub(crate) struct SlotLease {
    slots: Arc<HostSlots>,
    pub slot: QpnSlot,
    /// The process has sent to other hosts, which have links to it.
    pub has_sent_to_hosts: bool,
}

impl SlotLease {
    /// Opens rings to the process in another slot, which is notified. Both may ask for them.
    pub fn open_rings(&self, peer: u16) -> Result<Vec<OwnedFd>, CommandError> {
        let own = self.slot.number;
        let mut table = self.slots.table.lock();
        if table.open_rings(own, peer)? {
            table.notify_of_rings(peer, own);
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

    /// Gives packets that arrived here to the slots that they are for. Returns the others.
    pub fn hand_over(&self, packets: Vec<HandedOverPacket>) -> Vec<HandedOverPacket> {
        self.slots.hand_over(packets)
    }

    /// Copies of the sockets.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        self.slots.descriptors(self.slot.number)
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        let own = self.slot.number;
        let peer_of = |slots: &[u16; 2]| if slots[0] == own { slots[1] } else { slots[0] };
        let mut table = self.slots.table.lock();
        let SlotTable { owners, rings, past_counters, .. } = &mut *table;
        owners.remove(&own);
        self.slots.reported.notify_all();
        let (mut acks, mut connections) = (Vec::new(), Vec::new());
        if let Some(page) = self.slots.recordings.remove_slot(self.slots.host, own) {
            past_counters.add(&page.counters());
            acks.extend(page.acks());
            connections.extend(page.connections());
        }
        let (mut peers, mut own_rings) = (Vec::new(), Vec::new());
        rings.retain(|slots, pair| {
            let is_own = slots.contains(&own);
            if is_own {
                peers.push(peer_of(slots));
                let pair = pair.descriptors().and_then(RingPair::adopt);
                own_rings.extend(pair.map(|pair| (peer_of(slots), pair)));
            }
            !is_own
        });
        drop(table);
        let needed_for = if self.has_sent_to_hosts { VACANT_TIME } else { Duration::ZERO };
        let create = || self.slots.create_vacant(self.slot, acks, &connections, own_rings);
        let created = self.slots.within_namespace(create).and_then(|created| created);
        // After the last ACKs, which are in the rings.
        let table = self.slots.table.lock();
        peers.iter().for_each(|peer| table.notify(*peer, Notification::ProcessGone { slot: own }));
        drop(table);
        let started = created
            .and_then(|created| self.slots.within_namespace(|| start_vacant(created, needed_for)))
            .and_then(|started| started);
        let mut table = self.slots.table.lock();
        match started {
            Ok(vacant) => drop(table.vacant.insert(self.slot.number, vacant)),
            Err(error) => {
                report!("peers of slot {} find out late that it is free: {error}", self.slot.number)
            }
        }
        table.free.push_back(self.slot.number);
    }
}

/// The memory of many short-lived threads stays in the arenas of the allocator.
#[allow(unsafe_code)]
fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim releases free memory only, and may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests;
