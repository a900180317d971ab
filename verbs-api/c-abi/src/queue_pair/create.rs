//! Creates queue pairs.

use super::Qp;
use crate::abi::*;
use crate::errno::{Rejection, check};
use crate::started_requests::WorkRequestBuilder;
use crate::unacknowledged::Unacknowledged;
use crate::{completion_queue, context, object, protection, shared_receive, work_builder};
use softhca::{QpType, QueuePairBuilder};

/// The send operations of a transport, as a mask of the extended interface.
fn send_ops(kind: QpType) -> u64 {
    const SENDS: u64 = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    const WRITES: u64 = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    const WINDOWS: u64 = IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW;
    match kind {
        QpType::Ud | QpType::Gsi => SENDS,
        QpType::Uc => SENDS | WRITES | WINDOWS,
        QpType::XrcTarget => 0,
        QpType::Rc | QpType::XrcInitiator => {
            SENDS
                | WRITES
                | WINDOWS
                | IBV_QP_EX_WITH_SEND_WITH_INV
                | IBV_QP_EX_WITH_RDMA_READ
                | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
                | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        }
    }
}

pub unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's attributes.
    let plain = unsafe { *attr };
    // SAFETY: a domain of this library.
    check!("ibv_create_qp", null, unsafe { protection::find(pd) });
    let mut extended = ibv_qp_init_attr_ex {
        qp_context: plain.qp_context,
        send_cq: plain.send_cq,
        recv_cq: plain.recv_cq,
        srq: plain.srq,
        cap: plain.cap,
        qp_type: plain.qp_type,
        sq_sig_all: plain.sq_sig_all,
        comp_mask: IBV_QP_INIT_ATTR_PD,
        pd,
        xrcd: core::ptr::null_mut(),
        create_flags: 0,
        max_tso_header: 0,
        rwq_ind_tbl: core::ptr::null_mut(),
        rx_hash: [0; 3],
        source_qpn: 0,
        send_ops_flags: 0,
    };
    // SAFETY: a domain of ours has a context of this library.
    let qp = unsafe { create_qp_ex((*pd).context, &mut extended) };
    if !qp.is_null() {
        // SAFETY: the caller's attributes.
        unsafe { (*attr).cap = extended.cap };
    }
    qp
}

/// The scatter/gather entries of a queue pair, at least one.
fn max_sge(cap: &ibv_qp_cap) -> u32 {
    cap.max_send_sge.max(cap.max_recv_sge).max(1)
}

/// The inline data size of a queue pair: like most HCAs, it supports some even if none is requested.
fn max_inline_data(cap: &ibv_qp_cap) -> u32 {
    cap.max_inline_data.max(64)
}

/// Starts to create a queue pair.
///
/// # Safety
/// The pointers are objects of this library or null.
unsafe fn builder(
    open: &context::ContextState,
    attr: &ibv_qp_init_attr_ex,
    kind: QpType,
) -> Result<QueuePairBuilder, Rejection> {
    let cap = &attr.cap;
    let limits = &open.attributes.limits;
    for (what, value, limit) in [
        ("max_send_wr", cap.max_send_wr, limits.max_qp_wr),
        ("max_recv_wr", cap.max_recv_wr, limits.max_qp_wr),
        ("max_send_sge", cap.max_send_sge, limits.max_sge),
        ("max_recv_sge", cap.max_recv_sge, limits.max_sge),
        ("max_inline_data", cap.max_inline_data, limits.max_inline_data),
    ] {
        if value > limit {
            return Err(Rejection::too_large(what, value, limit));
        }
    }
    if kind == QpType::XrcTarget {
        if attr.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 {
            return Err(Rejection::invalid("comp_mask lacks IBV_QP_INIT_ATTR_XRCD"));
        }
        // SAFETY: the caller guarantees it.
        let domain = unsafe { shared_receive::find_xrc_domain(attr.xrcd) }?;
        return Ok(domain.target_builder());
    }
    // SAFETY: the caller guarantees it.
    let domain = unsafe { protection::find(attr.pd) }?;
    // SAFETY: the caller guarantees it.
    let sends = unsafe { completion_queue::find(attr.send_cq) }?;
    let mut builder = domain
        .domain
        .create_queue_pair(kind, &sends.queue)
        .max_send_wr(cap.max_send_wr.max(1))
        .max_recv_wr(cap.max_recv_wr.max(1))
        .max_send_sge(max_sge(cap))
        .max_recv_sge(max_sge(cap))
        .max_inline_data(max_inline_data(cap));
    if kind != QpType::XrcInitiator {
        // SAFETY: the caller guarantees it.
        let receives = unsafe { completion_queue::find(attr.recv_cq) }?;
        builder = builder.recv_cq(&receives.queue);
    }
    if !attr.srq.is_null() {
        // SAFETY: the caller guarantees it.
        let shared = unsafe { shared_receive::find(attr.srq) }?;
        builder = builder.shared_receive_queue(&shared.queue);
    }
    if attr.sq_sig_all != 0 {
        builder = builder.sq_sig_all();
    }
    Ok(builder)
}

pub unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    const KNOWN: u32 = IBV_QP_INIT_ATTR_PD
        | IBV_QP_INIT_ATTR_XRCD
        | IBV_QP_INIT_ATTR_CREATE_FLAGS
        | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    const VERB: &str = "ibv_create_qp";
    // SAFETY: a context of this library.
    let open = check!(VERB, null, unsafe { context::find(context) });
    // SAFETY: the caller's attributes.
    let attr = unsafe { &mut *attr };
    let kind = match attr.qp_type {
        IBV_QPT_RC => QpType::Rc,
        IBV_QPT_UC => QpType::Uc,
        IBV_QPT_UD => QpType::Ud,
        IBV_QPT_XRC_SEND => QpType::XrcInitiator,
        IBV_QPT_XRC_RECV => QpType::XrcTarget,
        other => {
            let why = format!("queue pair type {other} is not supported: RC, UC, UD and XRC are");
            return Rejection::unsupported(why).null(VERB);
        }
    };
    let has = |bit| attr.comp_mask & bit != 0;
    let operations = if has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) { attr.send_ops_flags } else { 0 };
    let create_flags = if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) { attr.create_flags } else { 0 };
    for (what, unknown) in [
        ("comp_mask bits", u64::from(attr.comp_mask & !KNOWN)),
        ("create_flags", create_flags.into()),
        ("send_ops_flags of this queue pair type", operations & !send_ops(kind)),
    ] {
        if unknown != 0 {
            return Rejection::unsupported(format!("{what} {unknown:#x} are not supported")).null(VERB);
        }
    }
    // SAFETY: the caller guarantees it.
    let builder = check!(VERB, null, unsafe { builder(open, attr, kind) });
    let pair = check!(VERB, null, builder.build());
    report_capabilities(&mut attr.cap, kind, !attr.srq.is_null());
    let number = pair.qpn().value();
    let is_target = kind == QpType::XrcTarget;
    let qp = ibv_qp {
        context,
        qp_context: attr.qp_context,
        pd: if is_target { core::ptr::null_mut() } else { attr.pd },
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        handle: number,
        qp_num: number,
        state: 0,
        qp_type: attr.qp_type,
        mutex: [0; 5],
        cond: [0; 6],
        events_completed: 0,
    };
    let init = ibv_qp_init_attr {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
    };
    let builder = WorkRequestBuilder::default();
    // SAFETY: the caller guarantees it.
    let domain = unsafe { protection::find(qp.pd) }.ok().map(protection::Pd::add_user);
    let state =
        Qp { pair, kind, init, events: Unacknowledged::default(), operations, builder, _domain: domain };
    let qp = object::create(work_builder::new_qp_ex(qp), state);
    open.objects.lock().queue_pairs.insert(number, qp as usize);
    qp.cast()
}

/// Writes the capabilities of a new queue pair where they exceed the request.
fn report_capabilities(cap: &mut ibv_qp_cap, kind: QpType, has_shared: bool) {
    match kind {
        QpType::XrcTarget => {
            *cap = ibv_qp_cap {
                max_send_wr: 0,
                max_recv_wr: 0,
                max_send_sge: 0,
                max_recv_sge: 0,
                max_inline_data: 0,
            };
        }
        _ => {
            let entries = max_sge(cap);
            (cap.max_send_wr, cap.max_send_sge) = (cap.max_send_wr.max(1), entries);
            cap.max_inline_data = max_inline_data(cap);
            if kind == QpType::XrcInitiator || has_shared {
                (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
            } else {
                (cap.max_recv_wr, cap.max_recv_sge) = (cap.max_recv_wr.max(1), entries);
            }
        }
    }
}
