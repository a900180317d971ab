//! Event channels and identifiers.

use super::event::{self, complete};
use super::lookup::{put, socket_address};
use super::{home, outcome};
use crate::abi::*;
use crate::address::{attribute, words_of};
use crate::channel::Unacknowledged;
use crate::{context, descriptor, errno, object, queue_pair};
use core::ffi::{c_int, c_void};
use core::mem::zeroed;
use parking_lot::Mutex;
use softhca::rdma_cm::{CmOption, EventChannel, EventKind, Id, Offer, Parameters, PortSpace};
use softhca::{AttributeMask, Error, Modify, QpKind, Qpn, State};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is behind an `rdma_event_channel`.
pub struct Channel {
    pub channel: EventChannel,
}

/// What is behind an `rdma_cm_id`.
pub struct Identifier {
    pub id: Id,
    pub events: Unacknowledged,
    /// Its calls wait until they are done: it has a channel of its own.
    pub is_synchronous: AtomicBool,
    /// What the peer offered with its request.
    pub offer: Mutex<Option<Offer>>,
    /// The path that the route points to.
    path: Box<std::cell::UnsafeCell<ibv_sa_path_rec>>,
    /// Completion queues and channels were made for it.
    pub owns_queues: Mutex<bool>,
}

impl Identifier {
    /// Whether its calls wait until they are done.
    pub fn waits(&self) -> bool {
        self.is_synchronous.load(Ordering::Relaxed)
    }
}

// SAFETY: the path is written by calls on the identifier, which programs do not make at the same time.
unsafe impl Sync for Identifier {}
// SAFETY: nothing in it is of one thread.
unsafe impl Send for Identifier {}

object::kinds! {
    Channel = rdma_event_channel;
    Identifier = rdma_cm_id;
}

/// The identifiers of the process, by the card's number.
static KNOWN: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// The object of an identifier.
pub fn object_of(id: &Id) -> Option<*mut rdma_cm_id> {
    KNOWN.lock().get(&id.number()).map(|address| *address as *mut rdma_cm_id)
}

/// Has the identifier of a queue pair that is about to be destroyed let go of it.
///
/// # Safety
/// `qp` is a queue pair of ours.
pub unsafe fn forget_queue_pair(qp: *mut ibv_qp) {
    for address in KNOWN.lock().values() {
        let id = *address as *mut rdma_cm_id;
        // SAFETY: a known identifier is not destroyed yet: that takes it off the list first.
        unsafe {
            if (*id).qp == qp
                && let Some(state) = of(id)
            {
                drop(state.id.detach());
                (*id).qp = core::ptr::null_mut();
            }
        }
    }
}

/// The identifier behind a pointer.
///
/// # Safety
/// `id` is null or an identifier of ours.
pub unsafe fn of<'a>(id: *mut rdma_cm_id) -> Option<&'a Identifier> {
    // SAFETY: as the caller says.
    unsafe { object::state::<Identifier>(id) }
}

pub unsafe extern "C" fn create_event_channel() -> *mut rdma_event_channel {
    let home = match home() {
        Ok(home) => home,
        Err(code) => return errno::null(code),
    };
    let Some(open) = home.open() else { return errno::null(libc::ENODEV) };
    let made = EventChannel::new(&open.card).and_then(|channel| {
        channel.descriptor()?;
        // It is readable at first; nothing is there yet.
        channel.poll()?;
        Ok(channel)
    });
    let channel = match made {
        Ok(channel) => channel,
        Err(error) => return errno::null(errno::of("rdma_create_event_channel", &error)),
    };
    let fd = match channel.descriptor() {
        Ok(inner) => descriptor::watching(&inner),
        Err(error) => Err(error.errno()),
    };
    match fd {
        Ok(fd) => object::create(rdma_event_channel { fd, unused: 0 }, Channel { channel }),
        Err(code) => errno::null(code),
    }
}

pub unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    if channel.is_null() {
        return;
    }
    // SAFETY: a channel of ours.
    let fd = unsafe { (*channel).fd };
    // SAFETY: as above.
    if unsafe { object::destroy::<Channel>(channel) }.is_some() {
        descriptor::close(fd);
    }
}

fn space_of(number: c_int) -> Option<PortSpace> {
    Some(match number {
        RDMA_PS_IPOIB => PortSpace::IpOverIb,
        RDMA_PS_TCP => PortSpace::Tcp,
        RDMA_PS_UDP => PortSpace::Udp,
        RDMA_PS_IB => PortSpace::Ib,
        _ => return None,
    })
}

fn type_of(kind: QpKind) -> c_int {
    match kind {
        QpKind::Uc => IBV_QPT_UC,
        QpKind::Ud | QpKind::Gsi => IBV_QPT_UD,
        QpKind::XrcInitiator => IBV_QPT_XRC_SEND,
        QpKind::XrcTarget => IBV_QPT_XRC_RECV,
        QpKind::Rc => IBV_QPT_RC,
    }
}

/// Makes the object of an identifier.
pub fn give(
    id: Id,
    channel: *mut rdma_event_channel,
    program_context: *mut c_void,
    ps: c_int,
    kind: QpKind,
    is_synchronous: bool,
) -> *mut rdma_cm_id {
    // SAFETY: zero is valid for every field.
    let mut abi: rdma_cm_id = unsafe { zeroed() };
    (abi.channel, abi.context, abi.ps, abi.qp_type) = (channel, program_context, ps, type_of(kind));
    let number = id.number();
    let state = Identifier {
        id,
        events: Unacknowledged::default(),
        is_synchronous: AtomicBool::new(is_synchronous),
        offer: Mutex::default(),
        // SAFETY: zero is valid for every field.
        path: Box::new(std::cell::UnsafeCell::new(unsafe { zeroed() })),
        owns_queues: Mutex::new(false),
    };
    let object = object::create(abi, state);
    KNOWN.lock().insert(number, object as usize);
    object
}

/// Creates an identifier, with a channel of its own if it is given none.
pub unsafe fn create(
    channel: *mut rdma_event_channel,
    into: *mut *mut rdma_cm_id,
    program_context: *mut c_void,
    ps: c_int,
    kind: QpKind,
) -> c_int {
    let Some(space) = space_of(ps) else { return errno::minus(libc::EINVAL) };
    let is_synchronous = channel.is_null();
    // SAFETY: nothing is asked of the caller.
    let channel = if is_synchronous { unsafe { create_event_channel() } } else { channel };
    // SAFETY: a channel of ours.
    let Some(state) = (unsafe { object::state::<Channel>(channel) }) else { return -1 };
    let kind = if matches!(space, PortSpace::Udp | PortSpace::IpOverIb) { QpKind::Ud } else { kind };
    match state.channel.create_id_of(space, kind) {
        Ok(id) => {
            // SAFETY: the caller's own.
            unsafe { *into = give(id, channel, program_context, ps, kind, is_synchronous) };
            0
        }
        Err(error) => errno::minus(errno::of("rdma_create_id", &error)),
    }
}

pub unsafe extern "C" fn create_id(
    channel: *mut rdma_event_channel,
    into: *mut *mut rdma_cm_id,
    program_context: *mut c_void,
    ps: c_int,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe { create(channel, into, program_context, ps, QpKind::Rc) }
}

pub unsafe extern "C" fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: an identifier of ours.
    let Some(state) = (unsafe { of(id) }) else { return errno::minus(libc::EINVAL) };
    // SAFETY: as above.
    unsafe { event::let_go(id) };
    KNOWN.lock().remove(&state.id.number());
    state.events.wait();
    let own = state.waits();
    // SAFETY: as above.
    let channel = unsafe { (*id).channel };
    // SAFETY: as above.
    drop(unsafe { object::destroy::<Identifier>(id) });
    if own {
        // SAFETY: it was made with the identifier.
        unsafe { destroy_event_channel(channel) };
    }
    0
}

/// Tells the program where the identifier is and where it goes to.
///
/// # Safety
/// `id` is an identifier of ours.
pub unsafe fn refresh(id: *mut rdma_cm_id) {
    // SAFETY: as the caller says.
    let Some(state) = (unsafe { of(id) }) else { return };
    let Ok(view) = state.id.view() else { return };
    // SAFETY: as the caller says.
    let abi = unsafe { &mut *id };
    if let Some(local) = view.local {
        put(local, &mut abi.route.addr.src_storage);
        if !local.ip().is_unspecified()
            && let Ok(home) = home()
        {
            (abi.verbs, abi.port_num) = (home.context(), 1);
            if abi.pd.is_null() {
                abi.pd = home.domain();
            }
        }
    }
    let Some(peer) = view.peer else { return };
    put(peer, &mut abi.route.addr.dst_storage);
    let gids = rdma_ib_addr {
        sgid: words_of(view.source_gid.0),
        dgid: words_of(view.path.destination.0),
        pkey: 0xffff,
    };
    abi.route.addr.addr.ibaddr = gids;
    // SAFETY: the path is the identifier's own.
    let path = unsafe { &mut *state.path.get() };
    (path.sgid, path.dgid, path.pkey) = (gids.sgid, gids.dgid, gids.pkey);
    (path.mtu, path.hop_limit, path.numb_path) = (view.mtu.code(), view.path.hop_limit, 1);
    (path.traffic_class, path.sl) = (view.path.traffic_class, view.path.service_level);
    (abi.route.path_rec, abi.route.num_paths) = (state.path.get(), 1);
}

/// Notes the state that the queue pair of an identifier is in now.
///
/// # Safety
/// `id` is an identifier of ours.
pub unsafe fn refresh_queue_pair(id: *mut rdma_cm_id) {
    // SAFETY: as the caller says; the queue pair is ours. Another thread may take it from the identifier meanwhile, but
    // not out of memory.
    unsafe {
        let queue_pair = (*id).qp;
        if let Some(qp) = queue_pair::of(queue_pair)
            && let Ok(now) = qp.pair.state()
        {
            (*queue_pair).state = now as c_int;
        }
    }
}

/// Carries a call out, tells the program what it changed, and waits for the event of a synchronous identifier.
unsafe fn call(
    name: &str,
    id: *mut rdma_cm_id,
    act: impl FnOnce(&Identifier) -> Result<(), Error>,
    wait_for: Option<EventKind>,
) -> c_int {
    // SAFETY: as the caller says.
    let Some(state) = (unsafe { of(id) }) else { return errno::minus(libc::EINVAL) };
    let code = outcome(name, act(state));
    if code != 0 {
        return code;
    }
    // SAFETY: as the caller says.
    unsafe {
        refresh(id);
        refresh_queue_pair(id);
        match wait_for {
            Some(kind) if state.waits() => complete(id, kind),
            _ => 0,
        }
    }
}

pub unsafe extern "C" fn bind_addr(id: *mut rdma_cm_id, address: *mut libc::sockaddr) -> c_int {
    // SAFETY: the caller's address.
    let Some(address) = (unsafe { socket_address(address) }) else { return errno::minus(libc::EINVAL) };
    // SAFETY: as the caller says.
    unsafe { call("rdma_bind_addr", id, |state| state.id.bind(address), None) }
}

pub unsafe extern "C" fn resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut libc::sockaddr,
    destination: *mut libc::sockaddr,
    _timeout: c_int,
) -> c_int {
    // SAFETY: the caller's addresses.
    let (source, destination) = unsafe { (socket_address(source), socket_address(destination)) };
    let Some(destination) = destination else { return errno::minus(libc::EINVAL) };
    let act = |state: &Identifier| state.id.resolve_address(source, destination);
    // SAFETY: as the caller says.
    unsafe { call("rdma_resolve_addr", id, act, Some(EventKind::AddressResolved)) }
}

pub unsafe extern "C" fn resolve_route(id: *mut rdma_cm_id, _timeout: c_int) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        call("rdma_resolve_route", id, |state| state.id.resolve_route(), Some(EventKind::RouteResolved))
    }
}

pub unsafe extern "C" fn listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: as the caller says.
    unsafe { call("rdma_listen", id, |state| state.id.listen(backlog.max(0) as u32), None) }
}

/// What the program offers and asks for; without parameters, what it was offered.
unsafe fn parameters(state: &Identifier, given: *const rdma_conn_param) -> Parameters {
    let mut parameters = Parameters::default();
    // SAFETY: the caller's own.
    match unsafe { given.as_ref() } {
        Some(given) => {
            if !given.private_data.is_null() {
                let length = usize::from(given.private_data_len);
                // SAFETY: the caller's data is as long as it says.
                parameters.private_data =
                    unsafe { core::slice::from_raw_parts(given.private_data.cast::<u8>(), length) }.to_vec();
            }
            parameters.responder_resources = given.responder_resources;
            parameters.initiator_depth = given.initiator_depth;
            parameters.flow_control = given.flow_control != 0;
            parameters.retry_count = given.retry_count & 7;
            parameters.rnr_retry_count = given.rnr_retry_count & 7;
            parameters.shared_receive_queue = given.srq != 0;
            parameters.queue_pair = Qpn::new(given.qp_num);
        }
        None => {
            if let Some(offer) = *state.offer.lock() {
                parameters.responder_resources = offer.responder_resources;
                parameters.initiator_depth = offer.initiator_depth;
            }
        }
    }
    parameters
}

pub unsafe extern "C" fn connect(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller's own.
    let act = |state: &Identifier| state.id.connect(&unsafe { parameters(state, given) });
    // SAFETY: as the caller says.
    unsafe { call("rdma_connect", id, act, Some(EventKind::Established)) }
}

pub unsafe extern "C" fn accept(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller's own.
    let act = |state: &Identifier| state.id.accept(&unsafe { parameters(state, given) });
    // SAFETY: as the caller says; an answer to a request of datagrams has no event.
    unsafe {
        let waits = id.as_ref().is_some_and(|id| id.qp_type != IBV_QPT_UD);
        call("rdma_accept", id, act, waits.then_some(EventKind::Established))
    }
}

pub unsafe extern "C" fn reject(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int {
    // SAFETY: the caller's data is as long as it says.
    let data = unsafe {
        if data.is_null() { &[][..] } else { core::slice::from_raw_parts(data.cast::<u8>(), length.into()) }
    };
    // SAFETY: as the caller says.
    unsafe { call("rdma_reject", id, |state| state.id.reject(data), None) }
}

pub unsafe extern "C" fn establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: as the caller says.
    unsafe { call("rdma_establish", id, |state| state.id.establish(), None) }
}

pub unsafe extern "C" fn notify(id: *mut rdma_cm_id, _event: c_int) -> c_int {
    // SAFETY: as the caller says.
    unsafe { call("rdma_notify", id, |state| state.id.establish(), None) }
}

pub unsafe extern "C" fn disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: as the caller says.
    unsafe { call("rdma_disconnect", id, |state| state.id.disconnect(), Some(EventKind::Disconnected)) }
}

unsafe fn port(id: *mut rdma_cm_id, of_peer: bool) -> u16 {
    // SAFETY: an identifier of ours, whose addresses are as long as their families say.
    let address = unsafe {
        let Some(id) = id.as_ref() else { return 0 };
        let storage = if of_peer { &id.route.addr.dst_storage } else { &id.route.addr.src_storage };
        socket_address((&raw const *storage).cast_mut().cast())
    };
    address.map_or(0, |address| address.port().to_be())
}

pub unsafe extern "C" fn get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: as the caller says.
    unsafe { port(id, false) }
}

pub unsafe extern "C" fn get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: as the caller says.
    unsafe { port(id, true) }
}

pub unsafe extern "C" fn set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: usize,
) -> c_int {
    // SAFETY: an identifier of ours.
    let Some(state) = (unsafe { of(id) }) else { return errno::minus(libc::EINVAL) };
    // SAFETY: the caller's value is as long as it says.
    let number = unsafe {
        match (length, value.is_null()) {
            (1, false) => u32::from(*value.cast::<u8>()),
            (4, false) => value.cast::<u32>().read_unaligned(),
            _ => return errno::minus(libc::EINVAL),
        }
    };
    let option = match (level, name) {
        (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => CmOption::TypeOfService(number as u8),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => CmOption::ReuseAddress(number != 0),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => CmOption::OnlyIpv6(number != 0),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => CmOption::AckTimeout(number as u8),
        _ => return errno::minus(libc::EOPNOTSUPP),
    };
    outcome("rdma_set_option", state.id.set_option(option))
}

/// Events go to another channel from now on. Without one, calls wait from now on, as for an identifier that was
/// created so; with one, they no longer do.
pub unsafe extern "C" fn migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    // SAFETY: an identifier of ours.
    let Some(state) = (unsafe { of(id) }) else { return errno::minus(libc::EINVAL) };
    let becomes_synchronous = channel.is_null();
    // SAFETY: the call makes a channel of its own.
    let channel = if becomes_synchronous { unsafe { create_event_channel() } } else { channel };
    if channel.is_null() {
        return -1;
    }
    // SAFETY: a channel of ours.
    let Some(to) = (unsafe { object::state::<Channel>(channel) }) else { return errno::minus(libc::EINVAL) };
    // SAFETY: an identifier of ours.
    unsafe { event::let_go(id) };
    let code = outcome("rdma_migrate_id", state.id.migrate(&to.channel));
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
        unsafe { destroy_event_channel(unused) };
    }
    code
}

unsafe fn join(id: *mut rdma_cm_id, group: *mut libc::sockaddr, program_context: *mut c_void) -> c_int {
    // SAFETY: the caller's address.
    let Some(group) = (unsafe { socket_address(group) }) else { return errno::minus(libc::EINVAL) };
    event::remember_group(id, group.ip(), program_context);
    // SAFETY: as the caller says.
    unsafe {
        call(
            "rdma_join_multicast",
            id,
            |state| state.id.join_multicast(group.ip()),
            Some(EventKind::MulticastJoin),
        )
    }
}

pub unsafe extern "C" fn join_multicast(
    id: *mut rdma_cm_id,
    group: *mut libc::sockaddr,
    program_context: *mut c_void,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe { join(id, group, program_context) }
}

pub unsafe extern "C" fn join_multicast_ex(
    id: *mut rdma_cm_id,
    attr: *mut rdma_cm_join_mc_attr_ex,
    program_context: *mut c_void,
) -> c_int {
    /// Full membership: the only kind that there is without a subnet manager.
    const FULL: u32 = 0;
    // SAFETY: the caller's attributes.
    let Some(attr) = (unsafe { attr.as_ref() }) else { return errno::minus(libc::EINVAL) };
    if attr.comp_mask & 1 == 0 {
        return errno::minus(libc::EINVAL);
    }
    if attr.comp_mask & 2 != 0 && attr.join_flags != FULL {
        return errno::minus(libc::EOPNOTSUPP);
    }
    // SAFETY: as the caller says.
    unsafe { join(id, attr.addr, program_context) }
}

pub unsafe extern "C" fn leave_multicast(id: *mut rdma_cm_id, group: *mut libc::sockaddr) -> c_int {
    // SAFETY: the caller's address.
    let Some(group) = (unsafe { socket_address(group) }) else { return errno::minus(libc::EINVAL) };
    // SAFETY: as the caller says.
    unsafe { call("rdma_leave_multicast", id, |state| state.id.leave_multicast(group.ip()), None) }
}

/// The attributes that take the caller's queue pair to the state in `attr`.
pub unsafe extern "C" fn init_qp_attr(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: an identifier of ours, and the caller's attributes.
    let (Some(state), attr) = (unsafe { of(id) }, unsafe { &mut *attr }) else {
        return errno::minus(libc::EINVAL);
    };
    let wanted = usize::try_from(attr.qp_state).ok().and_then(|index| State::ALL.get(index));
    let Some(wanted) = wanted else { return errno::minus(libc::EINVAL) };
    match state.id.attributes(*wanted) {
        Ok(modify) => {
            fill(attr, &modify);
            // SAFETY: the caller's own.
            unsafe { *mask = modify.mask().bits() as c_int };
            0
        }
        Err(error) => errno::minus(errno::of("rdma_init_qp_attr", &error)),
    }
}

fn fill(attr: &mut ibv_qp_attr, modify: &Modify) {
    let mask = modify.mask();
    if let Some(state) = modify.state {
        attr.qp_state = state as c_int;
    }
    if let Some(path) = &modify.path {
        attr.ah_attr = attribute(path);
    }
    if let Some(mtu) = modify.mtu {
        attr.path_mtu = mtu.code().into();
    }
    if mask.contains(AttributeMask::PORT) {
        attr.port_num = 1;
    }
    attr.pkey_index = modify.partition_index.unwrap_or(attr.pkey_index);
    attr.qp_access_flags = modify.access.map_or(attr.qp_access_flags, |access| access.bits());
    attr.qkey = modify.queue_key.map_or(attr.qkey, |key| key.0);
    attr.rq_psn = modify.receive_psn.map_or(attr.rq_psn, |psn| psn.value());
    attr.sq_psn = modify.send_psn.map_or(attr.sq_psn, |psn| psn.value());
    attr.dest_qp_num = modify.destination.map_or(attr.dest_qp_num, |number| number.value());
    attr.max_rd_atomic = modify.max_reads_out.unwrap_or(attr.max_rd_atomic);
    attr.max_dest_rd_atomic = modify.max_reads_in.unwrap_or(attr.max_dest_rd_atomic);
    attr.min_rnr_timer = modify.min_rnr_timer.map_or(attr.min_rnr_timer, |timer| timer.code());
    attr.timeout = modify.timeout.unwrap_or(attr.timeout);
    attr.retry_cnt = modify.retry_count.unwrap_or(attr.retry_cnt);
    attr.rnr_retry = modify.rnr_retry.unwrap_or(attr.rnr_retry);
}

/// The context of an identifier, if its device is known.
///
/// # Safety
/// `id` is an identifier of ours.
pub unsafe fn device_of<'a>(id: *mut rdma_cm_id) -> Option<&'a context::Open> {
    // SAFETY: as the caller says.
    unsafe { if (*id).verbs.is_null() { None } else { context::of((*id).verbs) } }
}
