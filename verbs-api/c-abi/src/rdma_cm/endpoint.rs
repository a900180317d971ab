//! The queue pair and the queues of an identifier, and endpoints, which have all of them.

use super::call::{self, destroy_id};
use super::event;
use super::identifier::{self, CmIdState, create};
use crate::abi::*;
use crate::channel::{self, CompletionChannelState, destroy_comp_channel};
use crate::completion_queue::{self, Cq};
use crate::context::ContextState;
use crate::errno::{self, Rejection};
use crate::object::{Found, Handle};
use crate::protection::Pd;
use crate::queue_pair;
use crate::shared_receive;
use core::ffi::c_int;
use core::mem::{MaybeUninit, zeroed};
use softhca::QpType;
use softhca::cm::EventType;
use std::collections::BTreeMap;

/// Creates a completion queue with its own channel for an identifier.
fn create_cq_with_channel(
    id: &Found<'_, CmIdState>,
    slots: u32,
) -> Result<(Handle<CompletionChannelState>, Handle<Cq>), Rejection> {
    let context = id.abi().verbs;
    let channel = channel::create(context)?;
    let cq = completion_queue::create::create(context, slots.max(1), id.as_ptr().cast(), channel, 0);
    let cq = cq.inspect_err(|_| {
        destroy_comp_channel(channel);
    })?;
    Ok((channel, cq))
}

/// Creates the queues that the attributes do not name.
fn create_missing_cqs(id: &Found<'_, CmIdState>, attr: &mut ibv_qp_init_attr_ex) -> Result<(), Rejection> {
    if attr.recv_cq.is_null() && attr.qp_type != IBV_QPT_XRC_SEND {
        let (channel, cq) = create_cq_with_channel(id, attr.cap.max_recv_wr)?;
        id.update(|abi| (abi.recv_cq_channel, abi.recv_cq) = (channel, cq));
        attr.recv_cq = cq;
        *id.owns_queues.lock() = true;
    }
    if attr.send_cq.is_null() && attr.qp_type != IBV_QPT_XRC_RECV {
        let (channel, cq) = create_cq_with_channel(id, attr.cap.max_send_wr)?;
        id.update(|abi| (abi.send_cq_channel, abi.send_cq) = (channel, cq));
        attr.send_cq = cq;
        *id.owns_queues.lock() = true;
    }
    Ok(())
}

/// Destroys the queues that were created for an identifier.
fn destroy_owned_cqs(id: &Found<'_, CmIdState>) {
    if !core::mem::take(&mut *id.owns_queues.lock()) {
        return;
    }
    let abi = id.abi();
    for cq in [abi.send_cq, abi.recv_cq] {
        completion_queue::destroy_cq(cq);
    }
    for channel in [abi.send_cq_channel, abi.recv_cq_channel] {
        destroy_comp_channel(channel);
    }
    id.update(|abi| {
        (abi.send_cq, abi.recv_cq) = (Handle::NULL, Handle::NULL);
        (abi.send_cq_channel, abi.recv_cq_channel) = (Handle::NULL, Handle::NULL);
    });
}

/// The device of an identifier, which is known once its address is.
fn device_of<'a>(id: &Found<'_, CmIdState>) -> Result<Found<'a, ContextState>, Rejection> {
    let none = "the identifier is not bound to a device yet: bind or resolve an address first";
    id.abi().verbs.get().ok_or_else(|| Rejection::invalid(none))
}

pub extern "C" fn create_qp_ex(id: Handle<CmIdState>, attr: &mut ibv_qp_init_attr_ex) -> c_int {
    errno::minus_one("rdma_create_qp", || make_qp(id, attr))
}

fn make_qp(id: Handle<CmIdState>, attr: &mut ibv_qp_init_attr_ex) -> Result<(), Rejection> {
    let found = id.find()?;
    device_of(&found)?;
    if !found.abi().qp.is_null() {
        return Err(Rejection::invalid("the identifier has a queue pair already"));
    }
    let context = found.abi().verbs;
    if attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || attr.pd.is_null() {
        attr.comp_mask |= IBV_QP_INIT_ATTR_PD;
        attr.pd = found.abi().pd;
    }
    if attr.qp_type == IBV_QPT_XRC_RECV {
        attr.comp_mask &= !IBV_QP_INIT_ATTR_PD;
    } else if attr.pd.get().is_none_or(|pd| pd.abi().context != context) {
        return Err(Rejection::invalid("the protection domain is of another device context"));
    }
    let attached = create_missing_cqs(&found, attr).and_then(|()| {
        let qp = queue_pair::create::create(context, attr)?;
        let attached = qp.find()?;
        found.id().attach_queue_pair(&attached.pair).inspect_err(|_| {
            queue_pair::destroy::destroy_qp(qp);
        })?;
        Ok(qp)
    });
    let qp = attached.inspect_err(|_| destroy_owned_cqs(&found))?;
    found.update(|abi| (abi.qp, abi.pd) = (qp, attr.pd));
    identifier::update_qp_state(id);
    Ok(())
}

/// Creates a queue pair with the attributes of the first version of the call.
fn make_plain_qp(
    id: Handle<CmIdState>,
    pd: Handle<Pd>,
    attr: &mut ibv_qp_init_attr,
) -> Result<(), Rejection> {
    let mut extended = queue_pair::create::extend(attr, pd);
    make_qp(id, &mut extended)?;
    attr.cap = extended.cap;
    Ok(())
}

pub extern "C" fn create_qp(
    id: Handle<CmIdState>,
    pd: Handle<Pd>,
    attr: Option<&mut ibv_qp_init_attr>,
) -> c_int {
    errno::minus_one("rdma_create_qp", || {
        make_plain_qp(id, pd, attr.ok_or_else(|| Rejection::invalid("the attributes are null"))?)
    })
}

pub extern "C" fn destroy_qp(id: Handle<CmIdState>) {
    let Some(id) = id.get() else { return };
    drop(id.id().detach_queue_pair());
    let qp = id.abi().qp;
    id.update(|abi| abi.qp = Handle::NULL);
    if !qp.is_null() {
        queue_pair::destroy::destroy_qp(qp);
    }
    destroy_owned_cqs(&id);
}

pub extern "C" fn create_srq_ex(id: Handle<CmIdState>, attr: &mut ibv_srq_init_attr_ex) -> c_int {
    errno::minus_one("rdma_create_srq", || {
        let id = id.find()?;
        device_of(&id)?;
        if !id.abi().srq.is_null() {
            return Err(Rejection::invalid("the identifier has a shared receive queue already"));
        }
        if attr.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || attr.pd.is_null() {
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
            attr.pd = id.abi().pd;
        }
        let is_extended = attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 && attr.srq_type == IBV_SRQT_XRC;
        if is_extended && attr.comp_mask & IBV_SRQ_INIT_ATTR_CQ == 0 {
            let (channel, cq) = create_cq_with_channel(&id, attr.attr.max_wr)?;
            id.update(|abi| (abi.recv_cq_channel, abi.recv_cq) = (channel, cq));
            attr.cq = cq;
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_CQ;
        }
        let srq = shared_receive::create(id.abi().verbs, attr)?;
        id.update(|abi| (abi.srq, abi.pd) = (srq, attr.pd));
        Ok(())
    })
}

pub extern "C" fn create_srq(id: Handle<CmIdState>, pd: Handle<Pd>, attr: &mut ibv_srq_init_attr) -> c_int {
    // SAFETY: zero is valid for every field.
    let mut extended: ibv_srq_init_attr_ex = unsafe { zeroed() };
    (extended.srq_context, extended.attr) = (attr.srq_context, attr.attr);
    (extended.comp_mask, extended.pd) = (IBV_SRQ_INIT_ATTR_PD, pd);
    let code = create_srq_ex(id, &mut extended);
    attr.attr = extended.attr;
    code
}

pub extern "C" fn destroy_srq(id: Handle<CmIdState>) {
    let Some(id) = id.get() else { return };
    let srq = id.abi().srq;
    id.update(|abi| abi.srq = Handle::NULL);
    shared_receive::destroy_srq(srq);
}

/// The attributes for the queue pairs of a listening endpoint's connection requests.
static LISTENER_QP_ATTRS: parking_lot::Mutex<BTreeMap<usize, ListenerQpAttr>> =
    parking_lot::Mutex::new(BTreeMap::new());

#[derive(Clone, Copy)]
struct ListenerQpAttr {
    attr: ibv_qp_init_attr,
    pd: Handle<Pd>,
}

// SAFETY: the pointer in the attributes is only returned to the program.
unsafe impl Send for ListenerQpAttr {}

pub extern "C" fn create_ep(
    into: &mut MaybeUninit<Handle<CmIdState>>,
    info: Option<&rdma_addrinfo>,
    pd: Handle<Pd>,
    attr: Option<&mut ibv_qp_init_attr>,
) -> c_int {
    errno::minus_one("rdma_create_ep", || {
        let info = info.ok_or_else(|| Rejection::invalid("the address information is null"))?;
        let is_connected = |kind: &QpType| *kind != QpType::Ud;
        let kind = queue_pair::qp_type(info.ai_qp_type).filter(is_connected).unwrap_or(QpType::Rc);
        let id = create(Handle::NULL, core::ptr::null_mut(), info.ai_port_space, kind)?;
        prepare(id, info, pd, attr).inspect_err(|_| destroy_ep(id))?;
        into.write(id);
        Ok(())
    })
}

/// Binds a passive endpoint. Resolves the address and route of an active one, and creates its queue pair.
fn prepare(
    id: Handle<CmIdState>,
    info: &rdma_addrinfo,
    pd: Handle<Pd>,
    attr: Option<&mut ibv_qp_init_attr>,
) -> Result<(), Rejection> {
    if info.ai_flags & RAI_PASSIVE != 0 {
        // SAFETY: the caller's address.
        unsafe { call::bind(id, info.ai_src_addr) }?;
        if let Some(attr) = attr {
            LISTENER_QP_ATTRS.lock().insert(id.as_ptr() as usize, ListenerQpAttr { attr: *attr, pd });
        }
        return Ok(());
    }
    // SAFETY: the caller's addresses.
    unsafe { call::resolve(id, info.ai_src_addr, info.ai_dst_addr) }?;
    call::find_route(id)?;
    let Some(attr) = attr else { return Ok(()) };
    attr.qp_type = info.ai_qp_type;
    make_plain_qp(id, pd, attr)
}

pub extern "C" fn destroy_ep(id: Handle<CmIdState>) {
    let Some(found) = id.get() else { return };
    LISTENER_QP_ATTRS.lock().remove(&(id.as_ptr() as usize));
    destroy_qp(id);
    if !found.abi().srq.is_null() {
        destroy_srq(id);
    }
    destroy_id(id);
}

pub extern "C" fn get_request(
    listener: Handle<CmIdState>,
    into: &mut MaybeUninit<Handle<CmIdState>>,
) -> c_int {
    errno::minus_one("rdma_get_request", || {
        let state = listener.find()?;
        if !state.is_blocking() {
            let why = "the identifier has an event channel: read the request from it";
            return Err(Rejection::invalid(why));
        }
        event::wait_for_event(listener, EventType::ConnectRequest)?;
        // The new identifier keeps the event, with the private data of the request.
        let mut event = None;
        state.update(|abi| event = abi.event.take());
        let event = event.ok_or_else(Rejection::would_block)?;
        let id = event.id();
        if let Err(rejection) = call::migrate(id, Handle::NULL) {
            event::acknowledge(&event);
            destroy_id(id);
            return Err(rejection);
        }
        let new = id.find()?;
        new.update(|abi| abi.event = Some(event));
        let template = LISTENER_QP_ATTRS.lock().get(&(listener.as_ptr() as usize)).copied();
        if let Some(ListenerQpAttr { mut attr, pd }) = template {
            attr.qp_type = if new.abi().qp_type == 0 { attr.qp_type } else { new.abi().qp_type };
            make_plain_qp(id, pd, &mut attr).inspect_err(|_| {
                destroy_id(id);
            })?;
        }
        into.write(id);
        Ok(())
    })
}
