//! The queue pair and the queues of an identifier, and endpoints, which have all of them.

use super::call::{self, destroy_id};
use super::devices::return_code;
use super::event;
use super::identifier::{self, create};
use crate::abi::*;
use crate::errno::{Rejection, check, keep};
use crate::{channel, completion_queue, queue_pair, shared_receive};
use core::ffi::{c_int, c_void};
use core::mem::zeroed;
use core::ptr::null_mut;
use softhca::QpType;
use softhca::cm::EventType;

fn to_init_attr_ex(attr: &ibv_qp_init_attr) -> ibv_qp_init_attr_ex {
    ibv_qp_init_attr_ex {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: 0,
        pd: null_mut(),
        xrcd: null_mut(),
        create_flags: 0,
        max_tso_header: 0,
        rwq_ind_tbl: null_mut(),
        rx_hash: [0; 3],
        source_qpn: 0,
        send_ops_flags: 0,
    }
}

/// Creates a completion queue with its own channel for an identifier.
unsafe fn create_cq_with_channel(
    id: *mut rdma_cm_id,
    slots: u32,
) -> Option<(*mut ibv_comp_channel, *mut ibv_cq)> {
    // SAFETY: the identifier has a device.
    unsafe {
        let channel = channel::create_comp_channel((*id).verbs);
        if channel.is_null() {
            return None;
        }
        let slots = slots.max(1) as c_int;
        let cq = completion_queue::create::create_cq((*id).verbs, slots, id.cast::<c_void>(), channel, 0);
        if cq.is_null() {
            channel::destroy_comp_channel(channel);
            return None;
        }
        Some((channel, cq))
    }
}

/// Creates the queues that the attributes do not name.
unsafe fn create_missing_cqs(id: *mut rdma_cm_id, attr: &mut ibv_qp_init_attr_ex) -> bool {
    // SAFETY: the caller guarantees it.
    unsafe {
        let Some(state) = identifier::of(id) else { return false };
        if attr.recv_cq.is_null() && attr.qp_type != IBV_QPT_XRC_SEND {
            let Some((channel, cq)) = create_cq_with_channel(id, attr.cap.max_recv_wr) else { return false };
            ((*id).recv_cq_channel, (*id).recv_cq, attr.recv_cq) = (channel, cq, cq);
            *state.owns_queues.lock() = true;
        }
        if attr.send_cq.is_null() && attr.qp_type != IBV_QPT_XRC_RECV {
            let Some((channel, cq)) = create_cq_with_channel(id, attr.cap.max_send_wr) else { return false };
            ((*id).send_cq_channel, (*id).send_cq, attr.send_cq) = (channel, cq, cq);
            *state.owns_queues.lock() = true;
        }
    }
    true
}

/// Destroys the queues that were created for an identifier.
unsafe fn destroy_owned_cqs(id: *mut rdma_cm_id) {
    // SAFETY: the caller guarantees it: everything belongs to the identifier.
    unsafe {
        let Some(state) = identifier::of(id) else { return };
        if !core::mem::take(&mut *state.owns_queues.lock()) {
            return;
        }
        for cq in [(*id).send_cq, (*id).recv_cq] {
            completion_queue::destroy_cq(cq);
        }
        for channel in [(*id).send_cq_channel, (*id).recv_cq_channel] {
            channel::destroy_comp_channel(channel);
        }
        ((*id).send_cq, (*id).recv_cq) = (null_mut(), null_mut());
        ((*id).send_cq_channel, (*id).recv_cq_channel) = (null_mut(), null_mut());
    }
}

/// An identifier whose address is not resolved yet.
fn no_device_yet() -> Rejection {
    Rejection::invalid("the identifier is not bound to a device yet: bind or resolve an address first")
}

pub unsafe extern "C" fn create_qp_ex(id: *mut rdma_cm_id, attr: *mut ibv_qp_init_attr_ex) -> c_int {
    const VERB: &str = "rdma_create_qp";
    // SAFETY: an identifier of this library.
    let state = check!(VERB, minus_one, unsafe { identifier::find(id) });
    // SAFETY: the caller's attributes.
    let attr = unsafe { &mut *attr };
    // SAFETY: as above.
    unsafe {
        if identifier::device_of(id).is_none() {
            return no_device_yet().minus_one(VERB);
        }
        if !(*id).qp.is_null() {
            return Rejection::invalid("the identifier has a queue pair already").minus_one(VERB);
        }
        if attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
            attr.comp_mask |= IBV_QP_INIT_ATTR_PD;
            attr.pd = (*id).pd;
        } else if attr.pd.is_null() {
            attr.pd = (*id).pd;
        }
        if attr.qp_type == IBV_QPT_XRC_RECV {
            attr.comp_mask &= !IBV_QP_INIT_ATTR_PD;
        } else if attr.pd.is_null() || (*attr.pd).context != (*id).verbs {
            return Rejection::invalid("the protection domain is of another device context").minus_one(VERB);
        }
        if !create_missing_cqs(id, attr) {
            keep(|| destroy_owned_cqs(id));
            return -1;
        }
        let qp = queue_pair::create::create_qp_ex((*id).verbs, attr);
        let Some(pair) = queue_pair::of(qp) else {
            keep(|| destroy_owned_cqs(id));
            return -1;
        };
        let code = return_code(VERB, state.id().attach_queue_pair(&pair.pair));
        if code != 0 {
            keep(|| {
                queue_pair::destroy::destroy_qp(qp);
                destroy_owned_cqs(id);
            });
            return code;
        }
        ((*id).qp, (*id).pd) = (qp, attr.pd);
        identifier::update_qp_state(id);
    }
    0
}

pub unsafe extern "C" fn create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller's attributes.
    let mut extended = to_init_attr_ex(unsafe { &*attr });
    (extended.comp_mask, extended.pd) = (IBV_QP_INIT_ATTR_PD, pd);
    // SAFETY: the caller guarantees it.
    unsafe {
        let code = create_qp_ex(id, &mut extended);
        if code == 0 {
            (*attr).cap = extended.cap;
        }
        code
    }
}

pub unsafe extern "C" fn destroy_qp(id: *mut rdma_cm_id) {
    // SAFETY: an identifier of this library.
    let Some(state) = (unsafe { identifier::of(id) }) else { return };
    drop(state.id().detach_queue_pair());
    // SAFETY: as above; the queue pair is the identifier's.
    unsafe {
        let qp = core::mem::replace(&mut (*id).qp, null_mut());
        if !qp.is_null() {
            queue_pair::destroy::destroy_qp(qp);
        }
        destroy_owned_cqs(id);
    }
}

pub unsafe extern "C" fn create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> c_int {
    const VERB: &str = "rdma_create_srq";
    // SAFETY: an identifier of this library, and the caller's attributes.
    unsafe {
        check!(VERB, minus_one, identifier::find(id));
        if identifier::device_of(id).is_none() {
            return no_device_yet().minus_one(VERB);
        }
        if !(*id).srq.is_null() {
            return Rejection::invalid("the identifier has a shared receive queue already").minus_one(VERB);
        }
        let attr = &mut *attr;
        if attr.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || attr.pd.is_null() {
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
            attr.pd = (*id).pd;
        }
        let is_extended = attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 && attr.srq_type == IBV_SRQT_XRC;
        if is_extended && attr.comp_mask & IBV_SRQ_INIT_ATTR_CQ == 0 {
            let Some((channel, cq)) = create_cq_with_channel(id, attr.attr.max_wr) else { return -1 };
            ((*id).recv_cq_channel, (*id).recv_cq, attr.cq) = (channel, cq, cq);
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_CQ;
        }
        let srq = shared_receive::create_srq_ex((*id).verbs, attr);
        if srq.is_null() {
            return -1;
        }
        ((*id).srq, (*id).pd) = (srq, attr.pd);
    }
    0
}

pub unsafe extern "C" fn create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> c_int {
    // SAFETY: zero is valid for every field; the attributes are the caller's.
    unsafe {
        let mut extended: ibv_srq_init_attr_ex = zeroed();
        (extended.srq_context, extended.attr) = ((*attr).srq_context, (*attr).attr);
        (extended.comp_mask, extended.pd) = (IBV_SRQ_INIT_ATTR_PD, pd);
        let code = create_srq_ex(id, &mut extended);
        (*attr).attr = extended.attr;
        code
    }
}

pub unsafe extern "C" fn destroy_srq(id: *mut rdma_cm_id) {
    // SAFETY: an identifier of this library.
    unsafe {
        if let Some(id) = id.as_mut() {
            shared_receive::destroy_srq(core::mem::replace(&mut id.srq, null_mut()));
        }
    }
}

/// The attributes for the queue pairs of a listening endpoint's connection requests.
static LISTENER_QP_ATTRS: parking_lot::Mutex<std::collections::BTreeMap<usize, ListenerQpAttr>> =
    parking_lot::Mutex::new(std::collections::BTreeMap::new());

#[derive(Clone, Copy)]
struct ListenerQpAttr {
    attr: ibv_qp_init_attr,
    pd: *mut ibv_pd,
}

// SAFETY: the pointers are only passed to verbs.
unsafe impl Send for ListenerQpAttr {}

pub unsafe extern "C" fn create_ep(
    into: *mut *mut rdma_cm_id,
    info: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: a valid pointer of the caller.
    let Some(info) = (unsafe { info.as_ref() }) else {
        return Rejection::invalid("the address information is null").minus_one("rdma_create_ep");
    };
    let kind = match info.ai_qp_type {
        IBV_QPT_UC => QpType::Uc,
        IBV_QPT_XRC_SEND => QpType::XrcInitiator,
        IBV_QPT_XRC_RECV => QpType::XrcTarget,
        _ => QpType::Rc,
    };
    let mut id = null_mut();
    // SAFETY: the caller guarantees it.
    unsafe {
        if create(null_mut(), &mut id, null_mut(), info.ai_port_space, kind) != 0 {
            return -1;
        }
        let failed = |id| {
            keep(|| destroy_ep(id));
            -1
        };
        if info.ai_flags & RAI_PASSIVE != 0 {
            if call::bind_addr(id, info.ai_src_addr) != 0 {
                return failed(id);
            }
            if let Some(attr) = attr.as_ref() {
                LISTENER_QP_ATTRS.lock().insert(id as usize, ListenerQpAttr { attr: *attr, pd });
            }
            *into = id;
            return 0;
        }
        let is_reached = call::resolve_addr(id, info.ai_src_addr, info.ai_dst_addr, 2000) == 0
            && call::resolve_route(id, 2000) == 0;
        if !is_reached {
            return failed(id);
        }
        if let Some(attr) = attr.as_mut() {
            attr.qp_type = info.ai_qp_type;
            if create_qp(id, pd, attr) != 0 {
                return failed(id);
            }
        }
        *into = id;
    }
    0
}

pub unsafe extern "C" fn destroy_ep(id: *mut rdma_cm_id) {
    if id.is_null() {
        return;
    }
    LISTENER_QP_ATTRS.lock().remove(&(id as usize));
    // SAFETY: an identifier of this library, with what belongs to it.
    unsafe {
        destroy_qp(id);
        if !(*id).srq.is_null() {
            destroy_srq(id);
        }
        destroy_id(id);
    }
}

pub unsafe extern "C" fn get_request(listener: *mut rdma_cm_id, into: *mut *mut rdma_cm_id) -> c_int {
    const VERB: &str = "rdma_get_request";
    // SAFETY: an identifier of this library.
    let state = check!(VERB, minus_one, unsafe { identifier::find(listener) });
    if !state.is_blocking() {
        return Rejection::invalid("the identifier has an event channel: read the request from it")
            .minus_one(VERB);
    }
    // SAFETY: as above.
    unsafe {
        if event::wait_for_event(listener, EventType::ConnectRequest) != 0 {
            return -1;
        }
        // The new identifier keeps the event, with the private data of the request.
        let event = core::mem::replace(&mut (*listener).event, null_mut());
        let id = (*event).id;
        if call::migrate_id(id, null_mut()) != 0 {
            keep(|| {
                event::ack_cm_event(event);
                destroy_id(id);
            });
            return -1;
        }
        (*id).event = event;
        let template = LISTENER_QP_ATTRS.lock().get(&(listener as usize)).copied();
        if let Some(ListenerQpAttr { mut attr, pd }) = template {
            attr.qp_type = if (*id).qp_type == 0 { attr.qp_type } else { (*id).qp_type };
            if create_qp(id, pd, &mut attr) != 0 {
                keep(|| {
                    destroy_id(id);
                });
                return -1;
            }
        }
        *into = id;
    }
    0
}
