//! Creates queue pairs.

use super::Qp;
use crate::abi::*;
use crate::context::ContextHandle;
use crate::errno::{self, Rejection};
use crate::object::{self, Handle};
use crate::protection::Pd;
use crate::started_requests::WorkRequestBuilder;
use crate::unacknowledged::Unacknowledged;
use crate::work_builder;
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

/// The attributes of the extended call.
pub fn extend(attr: &ibv_qp_init_attr, pd: Handle<Pd>) -> ibv_qp_init_attr_ex {
    ibv_qp_init_attr_ex {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: IBV_QP_INIT_ATTR_PD,
        pd,
        xrcd: Handle::NULL,
        create_flags: 0,
        max_tso_header: 0,
        rwq_ind_tbl: core::ptr::null_mut(),
        rx_hash: [0; 3],
        source_qpn: 0,
        send_ops_flags: 0,
    }
}

pub extern "C" fn create_qp(pd: Handle<Pd>, attr: &mut ibv_qp_init_attr) -> Handle<Qp> {
    errno::handle("ibv_create_qp", || {
        let mut extended = extend(attr, pd);
        let qp = create(pd.find()?.abi().context, &mut extended)?;
        attr.cap = extended.cap;
        Ok(qp)
    })
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
fn builder(attr: &ibv_qp_init_attr_ex, kind: QpType) -> Result<QueuePairBuilder, Rejection> {
    let cap = &attr.cap;
    if kind == QpType::XrcTarget {
        if attr.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 {
            return Err(Rejection::invalid("comp_mask lacks IBV_QP_INIT_ATTR_XRCD"));
        }
        return Ok(attr.xrcd.find()?.domain.target_builder());
    }
    let domain = attr.pd.find()?;
    let mut builder = domain
        .domain
        .create_queue_pair(kind, &attr.send_cq.find()?.queue)
        .max_send_wr(cap.max_send_wr.max(1))
        .max_recv_wr(cap.max_recv_wr.max(1))
        .max_send_sge(max_sge(cap))
        .max_recv_sge(max_sge(cap))
        .max_inline_data(max_inline_data(cap));
    if kind != QpType::XrcInitiator {
        builder = builder.recv_cq(&attr.recv_cq.find()?.queue);
    }
    if !attr.srq.is_null() {
        builder = builder.shared_receive_queue(&attr.srq.find()?.queue);
    }
    if attr.sq_sig_all != 0 {
        builder = builder.sq_sig_all();
    }
    Ok(builder)
}

pub extern "C" fn create_qp_ex(context: ContextHandle, attr: &mut ibv_qp_init_attr_ex) -> Handle<Qp> {
    errno::handle("ibv_create_qp", || create(context, attr))
}

pub fn create(context: ContextHandle, attr: &mut ibv_qp_init_attr_ex) -> Result<Handle<Qp>, Rejection> {
    const KNOWN: u32 = IBV_QP_INIT_ATTR_PD
        | IBV_QP_INIT_ATTR_XRCD
        | IBV_QP_INIT_ATTR_CREATE_FLAGS
        | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let open = context.find()?;
    let kind = super::qp_type(attr.qp_type).ok_or_else(|| {
        let number = attr.qp_type;
        Rejection::unsupported(format!("queue pair type {number} is not supported: RC, UC, UD and XRC are"))
    })?;
    let has = |bit| attr.comp_mask & bit != 0;
    let operations = if has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) { attr.send_ops_flags } else { 0 };
    let create_flags = if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) { attr.create_flags } else { 0 };
    for (what, unknown) in [
        ("comp_mask bits", u64::from(attr.comp_mask & !KNOWN)),
        ("create_flags", create_flags.into()),
        ("send_ops_flags of this queue pair type", operations & !send_ops(kind)),
    ] {
        if unknown != 0 {
            return Err(Rejection::unsupported(format!("{what} {unknown:#x} are not supported")));
        }
    }
    let pair = builder(attr, kind)?.build()?;
    report_capabilities(&mut attr.cap, kind, !attr.srq.is_null());
    let number = pair.qpn().value();
    let is_target = kind == QpType::XrcTarget;
    let qp = ibv_qp {
        context,
        qp_context: attr.qp_context,
        pd: if is_target { Handle::NULL } else { attr.pd },
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        handle: number,
        qp_num: number,
        state: 0,
        qp_type: attr.qp_type,
        mutex: Default::default(),
        cond: Default::default(),
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
    let state = Qp {
        pair,
        kind,
        init,
        events: Unacknowledged::default(),
        operations,
        builder: WorkRequestBuilder::default(),
        _domain: qp.pd.get().map(|pd| pd.add_user()),
    };
    let qp = object::create(work_builder::new_qp_ex(qp), state);
    open.objects.lock().queue_pairs.insert(number, qp);
    Ok(qp)
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
