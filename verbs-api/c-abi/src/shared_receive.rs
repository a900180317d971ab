//! Shared receive queues and XRC domains.

use crate::abi::*;
use crate::errno::{Rejection, check};
use crate::faults;
use crate::protection::{self, Pd, UseCount};
use crate::unacknowledged::Unacknowledged;
use crate::{completion_queue, context, errno, object, post};
use core::ffi::{c_int, c_void};
use softhca::{Resource, Verb};
use softhca::{SharedReceiveQueue, XrcDomain};

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
    Srq = ibv_srq, "shared receive queue", |srq| Some((srq.context, srq.handle));
    Xrcd = ibv_xrcd, "XRC domain", |xrcd| Some((xrcd.context, 0));
}

/// The queue behind a pointer, or why it cannot be used.
///
/// # Safety
/// `srq` is null or a queue of this library.
#[inline]
pub unsafe fn find<'a>(srq: *mut ibv_srq) -> Result<&'a Srq, Rejection> {
    // SAFETY: the caller guarantees it.
    unsafe { object::find::<Srq>(srq) }
}

/// The domain behind a pointer, or why it cannot be used.
///
/// # Safety
/// `xrcd` is null or a domain of this library.
pub unsafe fn find_xrc_domain<'a>(xrcd: *mut ibv_xrcd) -> Result<&'a XrcDomain, Rejection> {
    // SAFETY: the caller guarantees it.
    unsafe { object::find::<Xrcd>(xrcd) }.map(|state| &state.domain)
}

/// Creates the object of a new queue.
fn new_srq(
    context: *mut ibv_context,
    srq_context: *mut c_void,
    pd: *mut ibv_pd,
    domain: &Pd,
    is_extended: bool,
    queue: SharedReceiveQueue,
) -> *mut ibv_srq {
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

fn check_limits(open: &context::ContextState, attr: &ibv_srq_attr) -> Result<(), Rejection> {
    let limits = &open.attributes.limits;
    if attr.max_wr == 0 {
        return Err(Rejection::invalid("max_wr is 0"));
    }
    for (what, value, limit) in
        [("max_wr", attr.max_wr, limits.max_qp_wr), ("max_sge", attr.max_sge, limits.max_sge)]
    {
        if value > limit {
            return Err(Rejection::too_large(what, value, limit));
        }
    }
    Ok(())
}

pub unsafe extern "C" fn create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    const VERB: &str = "ibv_create_srq";
    // SAFETY: a domain of this library.
    let domain = check!(VERB, null, unsafe { protection::find(pd) });
    // SAFETY: as above.
    let context = unsafe { (*pd).context };
    // SAFETY: the caller's attributes.
    let attr = unsafe { &mut *attr };
    // SAFETY: a context of this library.
    let open = check!(VERB, null, unsafe { context::find(context) });
    check!(VERB, null, check_limits(open, &attr.attr));
    attr.attr.max_sge = attr.attr.max_sge.max(1);
    let result = domain.domain.create_shared_receive_queue(attr.attr.max_wr, attr.attr.max_sge);
    new_srq(context, attr.srq_context, pd, domain, false, check!(VERB, null, result))
}

pub unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    const KNOWN: u32 =
        IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    const VERB: &str = "ibv_create_srq_ex";
    // SAFETY: a context of this library.
    let open = check!(VERB, null, unsafe { context::find(context) });
    // SAFETY: the caller's attributes.
    let attr = unsafe { &mut *attr };
    let unknown = attr.comp_mask & !KNOWN;
    if unknown != 0 {
        return Rejection::unsupported(format!("comp_mask bits {unknown:#x} are not supported")).null(VERB);
    }
    let has = |bit| attr.comp_mask & bit != 0;
    let kind = if has(IBV_SRQ_INIT_ATTR_TYPE) { attr.srq_type } else { IBV_SRQT_BASIC };
    if !has(IBV_SRQ_INIT_ATTR_PD) {
        return Rejection::invalid("comp_mask lacks IBV_SRQ_INIT_ATTR_PD").null(VERB);
    }
    // SAFETY: a domain of this library.
    let domain = check!(VERB, null, unsafe { protection::find(attr.pd) });
    check!(VERB, null, check_limits(open, &attr.attr));
    let (receives, entries) = (attr.attr.max_wr, attr.attr.max_sge.max(1));
    match kind {
        IBV_SRQT_BASIC => {
            let result = domain.domain.create_shared_receive_queue(receives, entries);
            attr.attr.max_sge = entries;
            new_srq(context, attr.srq_context, attr.pd, domain, false, check!(VERB, null, result))
        }
        IBV_SRQT_XRC => {
            if !has(IBV_SRQ_INIT_ATTR_XRCD) || !has(IBV_SRQ_INIT_ATTR_CQ) {
                let why = "comp_mask lacks IBV_SRQ_INIT_ATTR_XRCD or IBV_SRQ_INIT_ATTR_CQ";
                return Rejection::invalid(why).null(VERB);
            }
            // SAFETY: objects of this library.
            let xrc_domain = check!(VERB, null, unsafe { find_xrc_domain(attr.xrcd) });
            // SAFETY: as above.
            let cq = check!(VERB, null, unsafe { completion_queue::find(attr.cq) });
            let result =
                domain.domain.create_xrc_shared_receive_queue(xrc_domain, &cq.queue, receives, entries);
            attr.attr.max_sge = entries;
            new_srq(context, attr.srq_context, attr.pd, domain, true, check!(VERB, null, result))
        }
        _ => {
            Rejection::unsupported(format!("srq_type {kind} is not supported: basic and XRC are")).null(VERB)
        }
    }
}

pub unsafe extern "C" fn modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    const VERB: &str = "ibv_modify_srq";
    // SAFETY: a queue of this library.
    let state = check!(VERB, code, unsafe { find(srq) });
    if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
        return Rejection::invalid(format!("srq_attr_mask {mask:#x} has unknown bits")).code(VERB);
    }
    // SAFETY: the caller's attributes.
    let attr = unsafe { &*attr };
    let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
    let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
    errno::from_result(VERB, state.queue.modify(max_wr, limit))
}

pub unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: a queue of this library.
    let state = check!("ibv_query_srq", code, unsafe { find(srq) });
    let view = check!("ibv_query_srq", code, state.queue.query());
    let result = ibv_srq_attr { max_wr: view.max_wr, max_sge: view.max_sge, srq_limit: view.srq_limit };
    // SAFETY: a valid pointer of the caller.
    unsafe { *attr = result };
    0
}

pub unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, into: *mut u32) -> c_int {
    // SAFETY: a queue of this library.
    let state = check!("ibv_get_srq_num", code, unsafe { find(srq) });
    if !state.is_extended {
        return Rejection::invalid("the shared receive queue is not an XRC one").code("ibv_get_srq_num");
    }
    // SAFETY: a valid pointer of the caller.
    unsafe { *into = state.queue.srqn() };
    0
}

pub unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    const VERB: &str = "ibv_destroy_srq";
    // SAFETY: a queue of this library.
    let state = check!(VERB, code, unsafe { find(srq) });
    let object = Some((Resource::SharedReceiveQueue, state.queue.srqn()));
    check!(VERB, code, faults::announce(Verb::DestroySrq, object));
    if state.queue.is_in_use() {
        return Rejection::busy("queue pairs use the shared receive queue: destroy them first").code(VERB);
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
    let state = match unsafe { object::find_on_data_path::<Srq>(srq) } {
        Ok(state) => state,
        Err(rejection) => {
            // SAFETY: a valid pointer of the caller.
            unsafe { *bad = wr };
            return rejection.code("ibv_post_srq_recv");
        }
    };
    // SAFETY: the caller guarantees it.
    unsafe { post::post_recv_list("ibv_post_srq_recv", wr, bad, |receive| state.queue.post_recv(receive)) }
}

/// An XRC domain belongs to one open device: a file does not share it.
pub unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    const NEEDED: u32 = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    const VERB: &str = "ibv_open_xrcd";
    // SAFETY: a context of this library.
    let open = check!(VERB, null, unsafe { context::find(context) });
    // SAFETY: the caller's attributes.
    if unsafe { (*attr).comp_mask } != NEEDED {
        let why = "comp_mask is not IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS";
        return Rejection::invalid(why).null(VERB);
    }
    let domain = check!(VERB, null, open.context.open_xrc_domain());
    object::create(ibv_xrcd { context }, Xrcd { domain })
}

pub unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    const VERB: &str = "ibv_close_xrcd";
    // SAFETY: a domain of this library.
    let state = check!(VERB, code, unsafe { object::find::<Xrcd>(xrcd) });
    check!(VERB, code, faults::announce(Verb::CloseXrcd, None));
    if state.domain.is_in_use() {
        return Rejection::busy("queue pairs or shared receive queues use the XRC domain").code(VERB);
    }
    // SAFETY: as above.
    drop(unsafe { object::destroy::<Xrcd>(xrcd) });
    0
}
