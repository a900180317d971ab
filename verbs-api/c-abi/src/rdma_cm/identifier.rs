//! Event channels and identifiers.

use super::event::{self, wait_for_event};
use super::lookup::{socket_address, write_sockaddr};
use super::{default_device, return_code};
use crate::abi::*;
use crate::address::words_of;
use crate::channel::Unacknowledged;
use crate::errno::{Rejection, check, keep};
use crate::{context, event_fd, object, queue_pair};
use core::ffi::{c_int, c_void};
use core::mem::zeroed;
use parking_lot::Mutex;
use softhca::cm::{CmOption, EventChannel, EventType, Id, PeerParameters, PortSpace};
use softhca::{Error, QpType};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// The state of an `rdma_event_channel`.
pub struct EventChannelState {
    pub channel: EventChannel,
}

/// The state of an `rdma_cm_id`.
pub struct CmIdState {
    pub id: Id,
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
    EventChannelState = rdma_event_channel, "CM event channel", |_| None;
    CmIdState = rdma_cm_id, "CM identifier", |_| None;
}

/// The identifiers of the process, by HCA number.
static IDS: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// The object of an identifier.
pub fn object_of(id: &Id) -> Option<*mut rdma_cm_id> {
    IDS.lock().get(&id.handle()).map(|address| *address as *mut rdma_cm_id)
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
                drop(state.id.detach_queue_pair());
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
    let default = check!(VERB, null, default_device());
    // SAFETY: the context of the process.
    let open = check!(VERB, null, unsafe { context::find(default.context()) });
    let made = EventChannel::new(&open.context).and_then(|channel| {
        channel.descriptor()?;
        // The descriptor is readable at first, although no event exists yet.
        channel.poll()?;
        Ok(channel)
    });
    let channel = check!(VERB, null, made);
    let inner = check!(VERB, null, channel.descriptor());
    let fd = check!(VERB, null, event_fd::create(&inner));
    object::create(rdma_event_channel { fd, unused: 0 }, EventChannelState { channel })
}

pub unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    if channel.is_null() {
        return;
    }
    // SAFETY: a channel of this library.
    let fd = unsafe { (*channel).fd };
    // SAFETY: as above.
    if unsafe { object::destroy::<EventChannelState>(channel) }.is_some() {
        event_fd::close(fd);
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

fn qp_type(kind: QpType) -> c_int {
    match kind {
        QpType::Uc => IBV_QPT_UC,
        QpType::Ud | QpType::Gsi => IBV_QPT_UD,
        QpType::XrcInitiator => IBV_QPT_XRC_SEND,
        QpType::XrcTarget => IBV_QPT_XRC_RECV,
        QpType::Rc => IBV_QPT_RC,
    }
}

/// Creates the object of an identifier.
pub fn new_cm_id(
    id: Id,
    channel: *mut rdma_event_channel,
    program_context: *mut c_void,
    ps: c_int,
    kind: QpType,
    is_synchronous: bool,
) -> *mut rdma_cm_id {
    // SAFETY: zero is valid for every field.
    let mut abi: rdma_cm_id = unsafe { zeroed() };
    (abi.channel, abi.context, abi.ps, abi.qp_type) = (channel, program_context, ps, qp_type(kind));
    let number = id.handle();
    let state = CmIdState {
        id,
        events: Unacknowledged::default(),
        is_synchronous: AtomicBool::new(is_synchronous),
        offer: Mutex::default(),
        // SAFETY: zero is valid for every field.
        path: Box::new(std::cell::UnsafeCell::new(unsafe { zeroed() })),
        owns_queues: Mutex::new(false),
    };
    let object = object::create(abi, state);
    IDS.lock().insert(number, object as usize);
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
    let state = check!(VERB, minus_one, unsafe { object::find::<EventChannelState>(channel) });
    let kind = if matches!(space, PortSpace::Udp | PortSpace::IpOverIb) { QpType::Ud } else { kind };
    match state.channel.create_id_with_kind(space, kind) {
        Ok(id) => {
            // SAFETY: a valid pointer of the caller.
            unsafe { *into = new_cm_id(id, channel, program_context, ps, kind, is_synchronous) };
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

pub unsafe extern "C" fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: an identifier of this library.
    let state = check!("rdma_destroy_id", minus_one, unsafe { find(id) });
    // SAFETY: as above.
    unsafe { event::ack_pending_event(id) };
    IDS.lock().remove(&state.id.handle());
    state.events.wait();
    let own = state.is_blocking();
    // SAFETY: as above.
    let channel = unsafe { (*id).channel };
    // SAFETY: as above.
    drop(unsafe { object::destroy::<CmIdState>(id) });
    if own {
        // SAFETY: it was made with the identifier.
        unsafe { destroy_event_channel(channel) };
    }
    0
}

/// Writes the addresses and the route of the identifier to the program's structure.
///
/// # Safety
/// `id` is an identifier of this library.
pub unsafe fn update_route(id: *mut rdma_cm_id) {
    // SAFETY: the caller guarantees it.
    let Some(state) = (unsafe { of(id) }) else { return };
    let Ok(view) = state.id.query() else { return };
    // SAFETY: the caller guarantees it.
    let abi = unsafe { &mut *id };
    if let Some(local) = view.local {
        write_sockaddr(local, &mut abi.route.addr.src_storage);
        if !local.ip().is_unspecified()
            && let Ok(default) = default_device()
        {
            (abi.verbs, abi.port_num) = (default.context(), 1);
            if abi.pd.is_null() {
                abi.pd = default.pd();
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

/// Executes a call, writes its changes to the program's structure, and waits for the event of a synchronous
/// identifier.
pub(super) unsafe fn call(
    name: &str,
    id: *mut rdma_cm_id,
    act: impl FnOnce(&CmIdState) -> Result<(), Error>,
    wait_for: Option<EventType>,
) -> c_int {
    // SAFETY: the caller guarantees it.
    let state = check!(name, minus_one, unsafe { find(id) });
    let code = return_code(name, act(state));
    if code != 0 {
        return code;
    }
    // SAFETY: the caller guarantees it.
    unsafe {
        update_route(id);
        update_qp_state(id);
        match wait_for {
            Some(kind) if state.is_blocking() => wait_for_event(id, kind),
            _ => 0,
        }
    }
}

pub unsafe extern "C" fn bind_addr(id: *mut rdma_cm_id, address: *mut libc::sockaddr) -> c_int {
    // SAFETY: the caller's address.
    let address = check!("rdma_bind_addr", minus_one, unsafe { find_address(address) });
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_bind_addr", id, |state| state.id.bind(address), None) }
}

pub unsafe extern "C" fn resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut libc::sockaddr,
    destination: *mut libc::sockaddr,
    _timeout: c_int,
) -> c_int {
    // SAFETY: the caller's addresses.
    let (source, destination) = unsafe { (socket_address(source), find_address(destination)) };
    let destination = check!("rdma_resolve_addr", minus_one, destination);
    let act = |state: &CmIdState| state.id.resolve_address(source, destination);
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_resolve_addr", id, act, Some(EventType::AddressResolved)) }
}

pub unsafe extern "C" fn resolve_route(id: *mut rdma_cm_id, _timeout: c_int) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe {
        call("rdma_resolve_route", id, |state| state.id.resolve_route(), Some(EventType::RouteResolved))
    }
}

pub unsafe extern "C" fn listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_listen", id, |state| state.id.listen(backlog.max(0) as u32), None) }
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
    return_code(VERB, state.id.set_option(option))
}

/// Sends events to another channel from now on. Without a channel, calls wait for completion, as for an identifier
/// created without one; with one, they do not.
pub unsafe extern "C" fn migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    const VERB: &str = "rdma_migrate_id";
    // SAFETY: an identifier of this library.
    let state = check!(VERB, minus_one, unsafe { find(id) });
    let becomes_synchronous = channel.is_null();
    // SAFETY: the call creates its own channel.
    let channel = if becomes_synchronous { unsafe { create_event_channel() } } else { channel };
    if channel.is_null() {
        return -1;
    }
    // SAFETY: a channel of this library.
    let to = check!(VERB, minus_one, unsafe { object::find::<EventChannelState>(channel) });
    // SAFETY: an identifier of this library.
    unsafe { event::ack_pending_event(id) };
    let code = return_code(VERB, state.id.migrate(&to.channel));
    // SAFETY: as above.
    let before = unsafe { (*id).channel };
    let (unused, was_synchronous) = match code {
        0 => {
            // SAFETY: as above.
            unsafe { (*id).channel = channel };
            (before, state.is_synchronous.swap(becomes_synchronous, Ordering::Relaxed))
        }
        _ => (channel, becomes_synchronous),
    };
    if was_synchronous {
        // SAFETY: it was made for the identifier, and nothing uses it any more.
        keep(|| unsafe { destroy_event_channel(unused) });
    }
    code
}

/// The context of an identifier, if its device is known.
///
/// # Safety
/// `id` is an identifier of this library.
pub unsafe fn device_of<'a>(id: *mut rdma_cm_id) -> Option<&'a context::ContextState> {
    // SAFETY: the caller guarantees it.
    unsafe { if (*id).verbs.is_null() { None } else { context::of((*id).verbs) } }
}
