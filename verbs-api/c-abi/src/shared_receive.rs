//! Shared receive queues and XRC domains.

use crate::abi::*;
use crate::channel::Unacknowledged;
use crate::protection::{self, Pd, UseCount};
use crate::{completion_queue, context, errno, object, post};
use core::ffi::{c_int, c_void};
use softhca::{Error, SharedReceiveQueue, XrcDomain};

/// The state of an `ibv_srq`.
pub struct Srq {
    pub queue: SharedReceiveQueue,
    pub events: Unacknowledged,
    is_extended: bool,
    _domain: UseCount,
}

/// The state of an `ibv_xrcd`.
pub struct Xrcd {
    domain: XrcDomain,
}

object::kinds! {
    Srq = ibv_srq;
    Xrcd = ibv_xrcd;
}

/// The queue behind a pointer that may be null.
///
/// # Safety
/// `srq` is null or a queue of this library.
pub unsafe fn of<'a>(srq: *mut ibv_srq) -> Option<&'a Srq> {
    // SAFETY: the caller guarantees it.
    unsafe { object::state::<Srq>(srq) }
}

/// The domain behind a pointer that may be null.
///
/// # Safety
/// `xrcd` is null or a domain of this library.
pub unsafe fn xrc_domain_of<'a>(xrcd: *mut ibv_xrcd) -> Option<&'a XrcDomain> {
    // SAFETY: the caller guarantees it.
    unsafe { object::state::<Xrcd>(xrcd) }.map(|state| &state.domain)
}

/// Creates the object of a new queue.
fn new_srq(
    context: *mut ibv_context,
    srq_context: *mut c_void,
    pd: *mut ibv_pd,
    domain: &Pd,
    is_extended: bool,
    result: Result<SharedReceiveQueue, Error>,
) -> *mut ibv_srq {
    let queue = match result {
        Ok(queue) => queue,
        Err(error) => return errno::null(errno::report("ibv_create_srq", &error)),
    };
    let number = queue.srqn();
    let abi = ibv_srq {
        context,
        srq_context,
        pd,
        handle: number,
        mutex: [0; 5],
        cond: [0; 6],
        events_completed: 0,
    };
    let srq = object::create(
        abi,
        Srq { queue, events: Unacknowledged::default(), is_extended, _domain: domain.add_user() },
    );
    // SAFETY: a context of this library.
    if let Some(open) = unsafe { context::of(context) } {
        open.objects.lock().shared_receive_queues.insert(number, srq as usize);
    }
    srq
}

fn is_within_limits(open: &context::ContextState, attr: &ibv_srq_attr) -> bool {
    let limits = &open.attributes.limits;
    attr.max_wr > 0 && attr.max_wr <= limits.max_qp_wr && attr.max_sge as usize <= limits.max_sge
}

pub unsafe extern "C" fn create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: a domain of this library.
    let Some(domain) = (unsafe { protection::of(pd) }) else { return errno::null(libc::EINVAL) };
    // SAFETY: as above.
    let context = unsafe { (*pd).context };
    // SAFETY: the caller's attributes.
    let attr = unsafe { &mut *attr };
    // SAFETY: a context of this library.
    let Some(open) = (unsafe { context::of(context) }) else { return errno::null(libc::EINVAL) };
    if !is_within_limits(open, &attr.attr) {
        return errno::null(libc::EINVAL);
    }
    attr.attr.max_sge = attr.attr.max_sge.max(1);
    let result = domain.domain.create_shared_receive_queue(attr.attr.max_wr, attr.attr.max_sge);
    new_srq(context, attr.srq_context, pd, domain, false, result)
}

pub unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    const KNOWN: u32 =
        IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    // SAFETY: a context of this library.
    let Some(open) = (unsafe { context::of(context) }) else { return errno::null(libc::EINVAL) };
    // SAFETY: the caller's attributes.
    let attr = unsafe { &mut *attr };
    if attr.comp_mask & !KNOWN != 0 {
        return errno::null(libc::EOPNOTSUPP);
    }
    let has = |bit| attr.comp_mask & bit != 0;
    let kind = if has(IBV_SRQ_INIT_ATTR_TYPE) { attr.srq_type } else { IBV_SRQT_BASIC };
    // SAFETY: a domain of this library.
    let domain = unsafe { protection::of(attr.pd) }.filter(|_| has(IBV_SRQ_INIT_ATTR_PD));
    let Some(domain) = domain.filter(|_| is_within_limits(open, &attr.attr)) else {
        return errno::null(libc::EINVAL);
    };
    let (receives, entries) = (attr.attr.max_wr, attr.attr.max_sge.max(1));
    match kind {
        IBV_SRQT_BASIC => {
            let result = domain.domain.create_shared_receive_queue(receives, entries);
            attr.attr.max_sge = entries;
            new_srq(context, attr.srq_context, attr.pd, domain, false, result)
        }
        IBV_SRQT_XRC => {
            // SAFETY: objects of this library.
            let needed = unsafe { (xrc_domain_of(attr.xrcd), completion_queue::of(attr.cq)) };
            let (Some(xrc_domain), Some(cq), true, true) =
                (needed.0, needed.1, has(IBV_SRQ_INIT_ATTR_XRCD), has(IBV_SRQ_INIT_ATTR_CQ))
            else {
                return errno::null(libc::EINVAL);
            };
            let result =
                domain.domain.create_xrc_shared_receive_queue(xrc_domain, &cq.queue, receives, entries);
            attr.attr.max_sge = entries;
            new_srq(context, attr.srq_context, attr.pd, domain, true, result)
        }
        _ => errno::null(libc::EOPNOTSUPP),
    }
}

pub unsafe extern "C" fn modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    // SAFETY: a queue of this library.
    let Some(state) = (unsafe { of(srq) }).filter(|_| mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) == 0) else {
        return libc::EINVAL;
    };
    if mask & IBV_SRQ_MAX_WR != 0 {
        return libc::EOPNOTSUPP;
    }
    // SAFETY: the caller's attributes.
    let limit = unsafe { (*attr).srq_limit };
    if mask & IBV_SRQ_LIMIT != 0 {
        errno::from_result("ibv_modify_srq", state.queue.set_limit(limit))
    } else {
        0
    }
}

pub unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: a queue of this library.
    let Some(state) = (unsafe { of(srq) }) else { return libc::EINVAL };
    match state.queue.query() {
        Ok(view) => {
            let result =
                ibv_srq_attr { max_wr: view.max_wr, max_sge: view.max_sge, srq_limit: view.srq_limit };
            // SAFETY: a valid pointer of the caller.
            unsafe { *attr = result };
            0
        }
        Err(error) => errno::from_result("ibv_query_srq", Err(error)),
    }
}

pub unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, into: *mut u32) -> c_int {
    // SAFETY: a queue of this library.
    let Some(state) = (unsafe { of(srq) }).filter(|state| state.is_extended) else { return libc::EINVAL };
    // SAFETY: a valid pointer of the caller.
    unsafe { *into = state.queue.srqn() };
    0
}

pub unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: a queue of this library.
    let Some(state) = (unsafe { of(srq) }) else { return libc::EINVAL };
    if state.queue.is_in_use() {
        return libc::EBUSY;
    }
    // SAFETY: as above.
    if let Some(open) = unsafe { context::of((*srq).context) } {
        open.objects.lock().shared_receive_queues.remove(&state.queue.srqn());
    }
    state.events.wait();
    // SAFETY: as above.
    drop(unsafe { object::destroy::<Srq>(srq) });
    0
}

pub unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a queue of this library.
    let Some(state) = (unsafe { of(srq) }) else {
        // SAFETY: a valid pointer of the caller.
        unsafe { *bad = wr };
        return libc::EINVAL;
    };
    // SAFETY: the caller guarantees it.
    unsafe { post::post_recv_list(wr, bad, |receive| state.queue.post_recv(receive)) }
}

/// An XRC domain belongs to one open device: a file does not share it.
pub unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    const NEEDED: u32 = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    // SAFETY: a context of this library.
    let Some(open) = (unsafe { context::of(context) }) else { return errno::null(libc::EINVAL) };
    // SAFETY: the caller's attributes.
    if unsafe { (*attr).comp_mask } != NEEDED {
        return errno::null(libc::EINVAL);
    }
    match open.context.open_xrc_domain() {
        Ok(domain) => object::create(ibv_xrcd { context }, Xrcd { domain }),
        Err(error) => errno::null(errno::report("ibv_open_xrcd", &error)),
    }
}

pub unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: a domain of this library.
    match unsafe { object::state::<Xrcd>(xrcd) } {
        None => libc::EINVAL,
        Some(state) if state.domain.is_in_use() => libc::EBUSY,
        Some(_) => {
            // SAFETY: as above.
            drop(unsafe { object::destroy::<Xrcd>(xrcd) });
            0
        }
    }
}
