//! Event channels and identifiers.

use super::devices::{CmDevice, card_for, cm_devices};
use super::lookup::{socket_address, write_sockaddr};
use crate::abi::*;
use crate::address::words_of;
use crate::errno::{self, Rejection};
use crate::event_fd;
use crate::object::{self, Handle};
use crate::queue_pair::{Qp, qp_type_number};
use crate::unacknowledged::Unacknowledged;
use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, zeroed};
use parking_lot::Mutex;
use softhca::cm::{CmOption, EventChannel, Id, IdSnapshot, PeerParameters, PortSpace};
use softhca::{Error, QpType};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The state of an `rdma_event_channel`: a channel on each card of the host. A call that waits for an event shares it: rping
/// destroys the channel meanwhile, and the call then waits on, as in the kernel.
pub struct EventChannelState {
    pub channels: Vec<EventChannel>,
    /// The descriptor of the channel.
    pub descriptor: OwnedFd,
}

/// The state of an `rdma_cm_id`.
pub struct CmIdState {
    /// One on each card, until an address selects a card; the listener of a wildcard address uses all of them. The
    /// identifier of an accepted connection is on one card.
    ids: Vec<Id>,
    /// The card of the first of them.
    first_card: usize,
    /// The selected one.
    selected: AtomicUsize,
    /// It is bound to the wildcard address, on all cards.
    is_wildcard: AtomicBool,
    pub events: Unacknowledged,
    /// Its calls wait for completion: it has its own channel.
    pub is_synchronous: AtomicBool,
    /// The parameters of the peer's connection request.
    pub offer: Mutex<Option<PeerParameters>>,
    /// The path record that the route points to.
    path: Box<std::cell::UnsafeCell<ibv_sa_path_rec>>,
    /// Completion queues and channels were created for it.
    pub owns_queues: Mutex<bool>,
}

impl CmIdState {
    /// The state of identifiers on consecutive cards.
    pub(super) fn new(first_card: usize, ids: Vec<Id>) -> CmIdState {
        CmIdState {
            ids,
            first_card,
            selected: AtomicUsize::new(0),
            is_wildcard: AtomicBool::new(false),
            events: Unacknowledged::default(),
            is_synchronous: AtomicBool::new(false),
            offer: Mutex::default(),
            // SAFETY: zero is valid for every field.
            path: Box::new(std::cell::UnsafeCell::new(unsafe { zeroed() })),
            owns_queues: Mutex::new(false),
        }
    }

    /// The identifier on the selected card.
    pub fn id(&self) -> &Id {
        &self.ids[self.selected.load(Ordering::Relaxed)]
    }

    /// The selected card.
    pub(super) fn card(&self) -> usize {
        self.first_card + self.selected.load(Ordering::Relaxed)
    }

    /// Selects a card.
    fn select(&self, card: usize) {
        let index = card.saturating_sub(self.first_card);
        self.selected.store(index.min(self.ids.len() - 1), Ordering::Relaxed);
    }

    /// Binds to an address: on its card, or on all cards, whose ports are those of the host.
    pub(super) fn bind(&self, address: SocketAddr) -> Result<(), Error> {
        if !address.ip().is_unspecified() {
            self.select(card_for(Some(address.ip()), None));
            return self.id().bind(address);
        }
        self.ids[0].bind(address)?;
        if self.ids.len() == 1 {
            return Ok(());
        }
        let port = self.ids[0].query()?.local.map_or(address.port(), |local| local.port());
        self.ids[1..].iter().try_for_each(|id| id.bind(SocketAddr::new(address.ip(), port)))?;
        self.is_wildcard.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Resolves an address, on the card that leads there unless the identifier is bound to one.
    pub(super) fn resolve(&self, source: Option<SocketAddr>, destination: SocketAddr) -> Result<(), Error> {
        let is_bound = || self.id().local_address().is_some_and(|local| !local.ip().is_unspecified());
        if self.ids.len() > 1 && !is_bound() {
            self.select(card_for(source.map(|source| source.ip()), Some(destination.ip())));
        }
        self.id().resolve_address(source, destination)
    }

    pub(super) fn listen(&self, backlog: u32) -> Result<(), Error> {
        match self.is_wildcard.load(Ordering::Relaxed) {
            true => self.ids.iter().try_for_each(|id| id.listen(backlog)),
            false => self.id().listen(backlog),
        }
    }

    pub(super) fn set_option(&self, option: CmOption) -> Result<(), Error> {
        self.ids.iter().try_for_each(|id| id.set_option(option))
    }

    pub(super) fn migrate(&self, to: &EventChannelState) -> Result<(), Error> {
        let channels = to.channels.iter().skip(self.first_card);
        self.ids.iter().zip(channels).try_for_each(|(id, to)| id.migrate(to))
    }

    /// Removes the identifiers from the table of objects.
    pub(super) fn remove_objects(&self) {
        for key in (self.first_card..).zip(self.ids.iter().map(Id::handle)) {
            IDS.lock().remove(&key);
        }
    }

    /// Whether its calls wait for completion.
    pub fn is_blocking(&self) -> bool {
        self.is_synchronous.load(Ordering::Relaxed)
    }
}

// SAFETY: calls on the identifier write the path, and programs do not make them concurrently.
unsafe impl Sync for CmIdState {}
// SAFETY: no field belongs to one thread.
unsafe impl Send for CmIdState {}

object::kinds! {
    Arc<EventChannelState> = rdma_event_channel, "CM event channel", |_| None;
    CmIdState = rdma_cm_id, "CM identifier", |_| None;
}

/// The identifiers of the process, by card and HCA number.
static IDS: Mutex<BTreeMap<(usize, u32), Handle<CmIdState>>> = Mutex::new(BTreeMap::new());

/// The object of an identifier on a card.
pub fn object_of(card: usize, id: &Id) -> Option<Handle<CmIdState>> {
    IDS.lock().get(&(card, id.handle())).copied()
}

/// The object of an identifier on a card, with one more event to acknowledge. Destruction removes the identifier from the
/// table first and then waits for its events, so that it cannot be freed meanwhile.
pub fn object_with_event(card: usize, id: &Id) -> Option<Handle<CmIdState>> {
    let ids = IDS.lock();
    let object = *ids.get(&(card, id.handle()))?;
    object.get()?.events.add();
    Some(object)
}

/// Detaches a queue pair that is about to be destroyed from its identifier.
pub fn detach_queue_pair(qp: Handle<Qp>) {
    for id in IDS.lock().values() {
        // An identifier in the table is not destroyed yet: destruction first removes it.
        if let Some(id) = id.get().filter(|id| id.abi().qp == qp) {
            drop(id.id().detach_queue_pair());
            id.update(|abi| abi.qp = Handle::NULL);
        }
    }
}

/// The address that a program passes.
///
/// # Safety
/// As [`socket_address`].
pub(super) unsafe fn find_address(address: *const libc::sockaddr) -> Result<SocketAddr, Rejection> {
    // SAFETY: the caller guarantees it.
    unsafe { socket_address(address) }
        .ok_or_else(|| Rejection::invalid("the address is null, or neither IPv4 nor IPv6"))
}

/// A channel of a card, whose descriptor exists.
pub(super) fn new_channel(device: &CmDevice) -> Result<EventChannel, Rejection> {
    let channel = EventChannel::new(&device.context.find()?.context)?;
    channel.descriptor()?;
    Ok(channel)
}

/// Creates a channel on all cards of the host.
pub(super) fn new_event_channel() -> Result<Handle<Arc<EventChannelState>>, Rejection> {
    let mut channels = Vec::new();
    let mut descriptors = Vec::new();
    for device in cm_devices()?.iter() {
        let channel = new_channel(device)?;
        descriptors.push(channel.descriptor()?.as_raw_fd());
        // The descriptor is readable at first, although no event exists yet.
        channel.poll()?;
        channels.push(channel);
    }
    let fd = event_fd::create_for_any(&descriptors)?;
    // SAFETY: it was created for the channel.
    let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
    let state = EventChannelState { channels, descriptor };
    Ok(object::create(rdma_event_channel { fd, unused: 0 }, Arc::new(state)))
}

pub extern "C" fn create_event_channel() -> Handle<Arc<EventChannelState>> {
    errno::handle("rdma_create_event_channel", new_event_channel)
}

pub extern "C" fn destroy_event_channel(channel: Handle<Arc<EventChannelState>>) {
    if let Some(channel) = channel.get() {
        channel.destroy();
    }
}

fn port_space(number: c_int) -> Option<PortSpace> {
    Some(match number {
        RDMA_PS_IPOIB => PortSpace::IpOverIb,
        RDMA_PS_TCP => PortSpace::Tcp,
        RDMA_PS_UDP => PortSpace::Udp,
        RDMA_PS_IB => PortSpace::Ib,
        _ => return None,
    })
}

/// Creates the object of identifiers on consecutive cards.
pub fn new_cm_id(
    first_card: usize,
    ids: Vec<Id>,
    channel: Handle<Arc<EventChannelState>>,
    program_context: *mut c_void,
    ps: c_int,
    kind: QpType,
    is_synchronous: bool,
) -> Handle<CmIdState> {
    // SAFETY: zero is valid for every field.
    let mut abi: rdma_cm_id = unsafe { zeroed() };
    (abi.channel, abi.context, abi.ps, abi.qp_type) = (channel, program_context, ps, qp_type_number(kind));
    let numbers: Vec<u32> = ids.iter().map(Id::handle).collect();
    let state = CmIdState::new(first_card, ids);
    state.is_synchronous.store(is_synchronous, Ordering::Relaxed);
    let object = object::create(abi, state);
    let cards = first_card..;
    IDS.lock().extend(cards.zip(numbers).map(|key| (key, object)));
    object
}

/// Creates an identifier, with its own channel if none is given.
pub(super) fn create(
    channel: Handle<Arc<EventChannelState>>,
    program_context: *mut c_void,
    ps: c_int,
    kind: QpType,
) -> Result<Handle<CmIdState>, Rejection> {
    let unknown = || Rejection::invalid(format!("port space {ps:#x} is unknown"));
    let space = port_space(ps).ok_or_else(unknown)?;
    let is_synchronous = channel.is_null();
    let channel = if is_synchronous { new_event_channel()? } else { channel };
    let kind = if matches!(space, PortSpace::Udp | PortSpace::IpOverIb) { QpType::Ud } else { kind };
    let on_card = |channel: &EventChannel| channel.create_id_with_kind(space, kind);
    let ids = channel.find()?.channels.iter().map(on_card).collect::<Result<Vec<Id>, Error>>()?;
    Ok(new_cm_id(0, ids, channel, program_context, ps, kind, is_synchronous))
}

pub extern "C" fn create_id(
    channel: Handle<Arc<EventChannelState>>,
    into: &mut MaybeUninit<Handle<CmIdState>>,
    program_context: *mut c_void,
    ps: c_int,
) -> c_int {
    errno::minus_one("rdma_create_id", || {
        into.write(create(channel, program_context, ps, QpType::Rc)?);
        Ok(())
    })
}

/// Writes the addresses and the route of the identifier to the program's structure.
pub fn update_route(id: Handle<CmIdState>) {
    let Some(state) = id.get() else { return };
    if let Ok(view) = state.id().query() {
        state.update(|abi| write_route(&state, abi, &view));
    }
}

fn write_route(state: &CmIdState, abi: &mut rdma_cm_id, view: &IdSnapshot) {
    if let Some(local) = view.local {
        write_sockaddr(local, &mut abi.route.addr.src_storage);
        if !local.ip().is_unspecified()
            && let Some(device) = cm_devices().ok().and_then(|devices| devices.get(state.card()).copied())
        {
            (abi.verbs, abi.port_num) = (device.context, 1);
            if abi.pd.is_null() {
                abi.pd = device.pd;
            }
        }
    }
    let Some(peer) = view.peer else { return };
    write_sockaddr(peer, &mut abi.route.addr.dst_storage);
    let gids = rdma_ib_addr {
        sgid: words_of(view.sgid.0),
        dgid: words_of(view.address_vector.dgid.0),
        pkey: 0xffff,
    };
    abi.route.addr.addr.ibaddr = gids;
    // SAFETY: the path belongs to the identifier.
    let path = unsafe { &mut *state.path.get() };
    (path.sgid, path.dgid, path.pkey) = (gids.sgid, gids.dgid, gids.pkey);
    (path.mtu, path.hop_limit, path.numb_path) = (view.path_mtu.code(), view.address_vector.hop_limit, 1);
    (path.traffic_class, path.sl) = (view.address_vector.traffic_class, view.address_vector.service_level);
    (abi.route.path_rec, abi.route.num_paths) = (state.path.get(), 1);
}

/// Writes the current state of the identifier's queue pair to the program's structure. Another thread may detach the
/// queue pair from the identifier meanwhile, but not free it.
pub fn update_qp_state(id: Handle<CmIdState>) {
    if let Some(qp) = id.get().and_then(|id| id.abi().qp.get())
        && let Ok(now) = qp.pair.state()
    {
        qp.update(|abi| abi.base.state = now as c_int);
    }
}

fn port(id: Handle<CmIdState>, storage: impl FnOnce(&rdma_addr) -> &Storage) -> u16 {
    let Some(id) = id.get() else { return 0 };
    let storage: *const Storage = storage(&id.abi().route.addr);
    // SAFETY: there is space for the address of any family.
    let address = unsafe { socket_address(storage.cast()) };
    address.map_or(0, |address| address.port().to_be())
}

pub extern "C" fn get_src_port(id: Handle<CmIdState>) -> u16 {
    port(id, |address| &address.src_storage)
}

pub extern "C" fn get_dst_port(id: Handle<CmIdState>) -> u16 {
    port(id, |address| &address.dst_storage)
}

/// # Safety
/// `value` is null or has `length` bytes.
pub unsafe extern "C" fn set_option(
    id: Handle<CmIdState>,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: usize,
) -> c_int {
    errno::minus_one("rdma_set_option", || {
        let state = id.find()?;
        // SAFETY: the caller guarantees it.
        let number = unsafe {
            match (length, value.is_null()) {
                (1, false) => u32::from(*value.cast::<u8>()),
                (4, false) => value.cast::<u32>().read_unaligned(),
                _ => return Err(Rejection::invalid(format!("a value of {length} bytes"))),
            }
        };
        let option = match (level, name) {
            (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => CmOption::TypeOfService(number as u8),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => CmOption::ReuseAddress(number != 0),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => CmOption::AfOnly(number != 0),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => CmOption::AckTimeout(number as u8),
            _ => {
                let why = format!("option {name} of level {level} is not supported");
                return Err(Rejection::unsupported(why));
            }
        };
        Ok(state.set_option(option)?)
    })
}
