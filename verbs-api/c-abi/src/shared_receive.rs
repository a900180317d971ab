//! Shared receive queues and XRC domains.

use crate::abi::*;
use crate::context::ContextHandle;
use crate::errno::{self, Rejection};
use crate::object::{self, Handle};
use crate::protection::{Pd, UseCount};
use crate::unacknowledged::Unacknowledged;
use crate::{faults, post};
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
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
    pub domain: XrcDomain,
}

object::kinds! {
    Srq = ibv_srq, "shared receive queue", |srq| Some((srq.context, srq.handle));
    Xrcd = ibv_xrcd, "XRC domain", |xrcd| Some((xrcd.context, 0));
}

/// Creates the object of a new queue.
fn new_srq(
    context: ContextHandle,
    srq_context: *mut c_void,
    pd: Handle<Pd>,
    domain: &Pd,
    is_extended: bool,
    queue: SharedReceiveQueue,
) -> Handle<Srq> {
    let number = queue.srqn();
    let abi = ibv_srq {
        context,
        srq_context,
        pd,
        handle: number,
        mutex: Default::default(),
        cond: Default::default(),
        events_completed: 0,
    };
    let events = Unacknowledged::default();
    let srq = object::create(abi, Srq { queue, events, is_extended, _domain: domain.add_user() });
    if let Some(open) = context.get() {
        open.objects.lock().shared_receive_queues.insert(number, srq);
    }
    srq
}

pub extern "C" fn create_srq(pd: Handle<Pd>, attr: &mut ibv_srq_init_attr) -> Handle<Srq> {
    errno::handle("ibv_create_srq", || {
        let domain = pd.find()?;
        let context = domain.abi().context;
        attr.attr.max_sge = attr.attr.max_sge.max(1);
        let queue = domain.domain.create_shared_receive_queue(attr.attr.max_wr, attr.attr.max_sge)?;
        Ok(new_srq(context, attr.srq_context, pd, &domain, false, queue))
    })
}

/// Creates a queue of either kind.
pub fn create(context: ContextHandle, attr: &mut ibv_srq_init_attr_ex) -> Result<Handle<Srq>, Rejection> {
    const KNOWN: u32 =
        IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    context.find()?;
    let unknown = attr.comp_mask & !KNOWN;
    if unknown != 0 {
        return Err(Rejection::unsupported(format!("comp_mask bits {unknown:#x} are not supported")));
    }
    let has = |bit| attr.comp_mask & bit != 0;
    let kind = if has(IBV_SRQ_INIT_ATTR_TYPE) { attr.srq_type } else { IBV_SRQT_BASIC };
    if !has(IBV_SRQ_INIT_ATTR_PD) {
        return Err(Rejection::invalid("comp_mask lacks IBV_SRQ_INIT_ATTR_PD"));
    }
    let domain = attr.pd.find()?;
    let (receives, entries) = (attr.attr.max_wr, attr.attr.max_sge.max(1));
    let queue = match kind {
        IBV_SRQT_BASIC => domain.domain.create_shared_receive_queue(receives, entries)?,
        IBV_SRQT_XRC if !has(IBV_SRQ_INIT_ATTR_XRCD) || !has(IBV_SRQ_INIT_ATTR_CQ) => {
            let why = "comp_mask lacks IBV_SRQ_INIT_ATTR_XRCD or IBV_SRQ_INIT_ATTR_CQ";
            return Err(Rejection::invalid(why));
        }
        IBV_SRQT_XRC => {
            let (xrcd, cq) = (attr.xrcd.find()?, attr.cq.find()?);
            let (xrcd, cq) = (&xrcd.domain, &cq.queue);
            domain.domain.create_xrc_shared_receive_queue(xrcd, cq, receives, entries)?
        }
        _ => {
            let why = format!("srq_type {kind} is not supported: basic and XRC are");
            return Err(Rejection::unsupported(why));
        }
    };
    attr.attr.max_sge = entries;
    Ok(new_srq(context, attr.srq_context, attr.pd, &domain, kind == IBV_SRQT_XRC, queue))
}

pub extern "C" fn create_srq_ex(context: ContextHandle, attr: &mut ibv_srq_init_attr_ex) -> Handle<Srq> {
    errno::handle("ibv_create_srq_ex", || create(context, attr))
}

pub extern "C" fn modify_srq(srq: Handle<Srq>, attr: &ibv_srq_attr, mask: c_int) -> c_int {
    errno::code("ibv_modify_srq", || {
        let srq = srq.find()?;
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(Rejection::invalid(format!("srq_attr_mask {mask:#x} has unknown bits")));
        }
        let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
        let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
        Ok(srq.queue.modify(max_wr, limit)?)
    })
}

pub extern "C" fn query_srq(srq: Handle<Srq>, attr: &mut MaybeUninit<ibv_srq_attr>) -> c_int {
    errno::code("ibv_query_srq", || {
        let view = srq.find()?.queue.query()?;
        attr.write(ibv_srq_attr { max_wr: view.max_wr, max_sge: view.max_sge, srq_limit: view.srq_limit });
        Ok(())
    })
}

pub extern "C" fn get_srq_num(srq: Handle<Srq>, into: &mut MaybeUninit<u32>) -> c_int {
    errno::code("ibv_get_srq_num", || {
        let srq = srq.find()?;
        if !srq.is_extended {
            return Err(Rejection::invalid("the shared receive queue is not an XRC one"));
        }
        into.write(srq.queue.srqn());
        Ok(())
    })
}

pub extern "C" fn destroy_srq(srq: Handle<Srq>) -> c_int {
    errno::code("ibv_destroy_srq", || {
        let srq = srq.find()?;
        let number = srq.queue.srqn();
        faults::announce(Verb::DestroySrq, Some((Resource::SharedReceiveQueue, number)))?;
        if srq.queue.is_in_use() {
            return Err(Rejection::busy("queue pairs use the shared receive queue: destroy them first"));
        }
        if let Some(open) = srq.abi().context.get() {
            open.objects.lock().shared_receive_queues.remove(&number);
        }
        srq.events.wait();
        srq.destroy();
        Ok(())
    })
}

pub extern "C" fn post_srq_recv(
    srq: Handle<Srq>,
    wr: *mut ibv_recv_wr,
    bad: Option<&mut *mut ibv_recv_wr>,
) -> c_int {
    post::post_list("ibv_post_srq_recv", wr, bad, |next| {
        let srq = srq.find_on_data_path()?;
        // SAFETY: the caller's list.
        unsafe { post::post_recv_list(next, |receive| srq.queue.post_recv(receive)) }
    })
}

/// An XRC domain belongs to one open device: a file does not share it.
pub extern "C" fn open_xrcd(context: ContextHandle, attr: &ibv_xrcd_init_attr) -> Handle<Xrcd> {
    const NEEDED: u32 = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    errno::handle("ibv_open_xrcd", || {
        let open = context.find()?;
        if attr.comp_mask != NEEDED {
            let why = "comp_mask is not IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS";
            return Err(Rejection::invalid(why));
        }
        let domain = open.context.open_xrc_domain()?;
        Ok(object::create(ibv_xrcd { context }, Xrcd { domain }))
    })
}

pub extern "C" fn close_xrcd(xrcd: Handle<Xrcd>) -> c_int {
    errno::code("ibv_close_xrcd", || {
        let xrcd = xrcd.find()?;
        faults::announce(Verb::CloseXrcd, None)?;
        if xrcd.domain.is_in_use() {
            return Err(Rejection::busy("queue pairs or shared receive queues use the XRC domain"));
        }
        xrcd.destroy();
        Ok(())
    })
}
