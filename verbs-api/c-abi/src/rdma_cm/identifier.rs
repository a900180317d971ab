//! Event channels and identifiers.

use super::devices::{card_for, cm_devices, return_code};
use super::lookup::{socket_address, write_sockaddr};
use crate::abi::*;
use crate::address::words_of;
use crate::errno::{Rejection, check};
use crate::unacknowledged::Unacknowledged;
use crate::{context, event_fd, object, queue_pair};
use core::ffi::{c_int, c_void};
use core::mem::zeroed;
use parking_lot::Mutex;
use softhca::cm::{CmOption, EventChannel, Id, PeerParameters, PortSpace};
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
static IDS: Mutex<BTreeMap<(usize, u32), usize>> = Mutex::new(BTreeMap::new());

/// The object of an identifier on a card.
pub fn object_of(card: usize, id: &Id) -> Option<*mut rdma_cm_id> {
    IDS.lock().get(&(card, id.handle())).map(|address| *address as *mut rdma_cm_id)
}

/// The object of an identifier on a card, with one more event to acknowledge. Destruction removes the identifier from the
/// table first and then waits for its events, so that it cannot be freed meanwhile.
pub fn object_with_event(card: usize, id: &Id) -> Option<*mut rdma_cm_id> {
    let ids = IDS.lock();
    let object = *ids.get(&(card, id.handle()))? as *mut rdma_cm_id;
    // SAFETY: an identifier in the table is not destroyed yet.
    unsafe { of(object) }?.events.add();
    Some(object)
}

/// Detaches a queue pair that is about to be destroyed from its identifier.
///
/// # Safety
/// `qp` is a queue pair of this library.
pub unsafe fn detach_queue_pair(qp: *mut ibv_qp) {
    for address in IDS.lock().values() {
        let id = *address as *mut rdma_cm_id;
        // SAFETY: an identifier in the table is not destroyed yet: destruction first removes it.
        unsafe {
            if (*id).qp == qp
                && let Some(state) = of(id)
            {
                drop(state.id().detach_queue_pair());
                (*id).qp = core::ptr::null_mut();
            }
        }
    }
}

/// The identifier behind a pointer, or why it cannot be used.
///
/// # Safety
/// As [`of`].
pub unsafe fn find<'a>(id: *mut rdma_cm_id) -> Result<&'a CmIdState, Rejection> {
    // SAFETY: the caller guarantees it.
    unsafe { object::find::<CmIdState>(id) }
}

/// The address that a program passes.
///
/// # Safety
/// As [`socket_address`].
pub(super) unsafe fn find_address(address: *mut libc::sockaddr) -> Result<std::net::SocketAddr, Rejection> {
    // SAFETY: the caller guarantees it.
    unsafe { socket_address(address) }
        .ok_or_else(|| Rejection::invalid("the address is null, or neither IPv4 nor IPv6"))
}

/// The identifier behind a pointer.
///
/// # Safety
/// `id` is null or an identifier of this library.
pub unsafe fn of<'a>(id: *mut rdma_cm_id) -> Option<&'a CmIdState> {
    // SAFETY: the caller guarantees it.
    unsafe { object::state::<CmIdState>(id) }
}

pub unsafe extern "C" fn create_event_channel() -> *mut rdma_event_channel {
    const VERB: &str = "rdma_create_event_channel";
    let devices = check!(VERB, null, cm_devices());
    let mut channels = Vec::new();
    for device in devices.iter() {
        // SAFETY: a context of the process.
        let open = check!(VERB, null, unsafe { context::find(device.context()) });
        let made = EventChannel::new(&open.context).and_then(|channel| {
            channel.descriptor()?;
            // The descriptor is readable at first, although no event exists yet.
            channel.poll()?;
            Ok(channel)
        });
        channels.push(check!(VERB, null, made));
    }
    let inner: Result<Vec<c_int>, Error> =
        channels.iter().map(|channel| Ok(channel.descriptor()?.as_raw_fd())).collect();
    let fd = check!(VERB, null, event_fd::create_for_any(&check!(VERB, null, inner)));
    // SAFETY: it was created for the channel.
    let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
    let state = EventChannelState { channels, descriptor };
    object::create(rdma_event_channel { fd, unused: 0 }, Arc::new(state))
}

pub unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: null or a channel of this library.
    drop(unsafe { object::destroy::<Arc<EventChannelState>>(channel) });
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

fn qp_type(kind: QpType) -> c_int {
    match kind {
        QpType::Uc => IBV_QPT_UC,
        QpType::Ud | QpType::Gsi => IBV_QPT_UD,
        QpType::XrcInitiator => IBV_QPT_XRC_SEND,
        QpType::XrcTarget => IBV_QPT_XRC_RECV,
        QpType::Rc => IBV_QPT_RC,
    }
}

/// Creates the object of identifiers on consecutive cards.
pub fn new_cm_id(
    first_card: usize,
    ids: Vec<Id>,
    channel: *mut rdma_event_channel,
    program_context: *mut c_void,
    ps: c_int,
    kind: QpType,
    is_synchronous: bool,
) -> *mut rdma_cm_id {
    // SAFETY: zero is valid for every field.
    let mut abi: rdma_cm_id = unsafe { zeroed() };
    (abi.channel, abi.context, abi.ps, abi.qp_type) = (channel, program_context, ps, qp_type(kind));
    let numbers: Vec<u32> = ids.iter().map(Id::handle).collect();
    let state = CmIdState::new(first_card, ids);
    state.is_synchronous.store(is_synchronous, Ordering::Relaxed);
    let object = object::create(abi, state);
    let cards = first_card..;
    IDS.lock().extend(cards.zip(numbers).map(|key| (key, object as usize)));
    object
}

/// Creates an identifier, with its own channel if none is given.
pub unsafe fn create(
    channel: *mut rdma_event_channel,
    into: *mut *mut rdma_cm_id,
    program_context: *mut c_void,
    ps: c_int,
    kind: QpType,
) -> c_int {
    const VERB: &str = "rdma_create_id";
    let Some(space) = port_space(ps) else {
        return Rejection::invalid(format!("port space {ps:#x} is unknown")).minus_one(VERB);
    };
    let is_synchronous = channel.is_null();
    // SAFETY: nothing is asked of the caller.
    let channel = if is_synchronous { unsafe { create_event_channel() } } else { channel };
    if channel.is_null() {
        return -1;
    }
    // SAFETY: a channel of this library.
    let state = check!(VERB, minus_one, unsafe { object::find::<Arc<EventChannelState>>(channel) });
    let kind = if matches!(space, PortSpace::Udp | PortSpace::IpOverIb) { QpType::Ud } else { kind };
    let created: Result<Vec<Id>, Error> =
        state.channels.iter().map(|channel| channel.create_id_with_kind(space, kind)).collect();
    match created {
        Ok(ids) => {
            // SAFETY: a valid pointer of the caller.
            unsafe { *into = new_cm_id(0, ids, channel, program_context, ps, kind, is_synchronous) };
            0
        }
        Err(error) => Rejection::from(error).minus_one(VERB),
    }
}

pub unsafe extern "C" fn create_id(
    channel: *mut rdma_event_channel,
    into: *mut *mut rdma_cm_id,
    program_context: *mut c_void,
    ps: c_int,
) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { create(channel, into, program_context, ps, QpType::Rc) }
}

/// Writes the addresses and the route of the identifier to the program's structure.
///
/// # Safety
/// `id` is an identifier of this library.
pub unsafe fn update_route(id: *mut rdma_cm_id) {
    // SAFETY: the caller guarantees it.
    let Some(state) = (unsafe { of(id) }) else { return };
    let Ok(view) = state.id().query() else { return };
    // SAFETY: the caller guarantees it.
    let abi = unsafe { &mut *id };
    if let Some(local) = view.local {
        write_sockaddr(local, &mut abi.route.addr.src_storage);
        if !local.ip().is_unspecified()
            && let Some(device) = cm_devices().ok().and_then(|devices| devices.get(state.card()).copied())
        {
            (abi.verbs, abi.port_num) = (device.context(), 1);
            if abi.pd.is_null() {
                abi.pd = device.pd();
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

/// Writes the current state of the identifier's queue pair to the program's structure.
///
/// # Safety
/// `id` is an identifier of this library.
pub unsafe fn update_qp_state(id: *mut rdma_cm_id) {
    // SAFETY: the caller guarantees it; the queue pair belongs to this library. Another thread may detach it from the
    // identifier meanwhile, but not free it.
    unsafe {
        let queue_pair = (*id).qp;
        if let Some(qp) = queue_pair::of(queue_pair)
            && let Ok(now) = qp.pair.state()
        {
            (*queue_pair).state = now as c_int;
        }
    }
}

unsafe fn port(id: *mut rdma_cm_id, of_peer: bool) -> u16 {
    // SAFETY: an identifier of this library, whose addresses are as long as their families require.
    let address = unsafe {
        let Some(id) = id.as_ref() else { return 0 };
        let storage = if of_peer { &id.route.addr.dst_storage } else { &id.route.addr.src_storage };
        socket_address((&raw const *storage).cast_mut().cast())
    };
    address.map_or(0, |address| address.port().to_be())
}

pub unsafe extern "C" fn get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the caller guarantees it.
    unsafe { port(id, false) }
}

pub unsafe extern "C" fn get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the caller guarantees it.
    unsafe { port(id, true) }
}

pub unsafe extern "C" fn set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: usize,
) -> c_int {
    const VERB: &str = "rdma_set_option";
    // SAFETY: an identifier of this library.
    let state = check!(VERB, minus_one, unsafe { find(id) });
    // SAFETY: the caller's value has the given length.
    let number = unsafe {
        match (length, value.is_null()) {
            (1, false) => u32::from(*value.cast::<u8>()),
            (4, false) => value.cast::<u32>().read_unaligned(),
            _ => return Rejection::invalid(format!("a value of {length} bytes")).minus_one(VERB),
        }
    };
    let option = match (level, name) {
        (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => CmOption::TypeOfService(number as u8),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => CmOption::ReuseAddress(number != 0),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => CmOption::AfOnly(number != 0),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => CmOption::AckTimeout(number as u8),
        _ => {
            let why = format!("option {name} of level {level} is not supported");
            return Rejection::unsupported(why).minus_one(VERB);
        }
    };
    return_code(VERB, state.set_option(option))
}

/// The context of an identifier, if its device is known.
///
/// # Safety
/// `id` is an identifier of this library.
pub unsafe fn device_of<'a>(id: *mut rdma_cm_id) -> Option<&'a context::ContextState> {
    // SAFETY: the caller guarantees it.
    unsafe { if (*id).verbs.is_null() { None } else { context::of((*id).verbs) } }
}
