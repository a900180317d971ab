//! Connections: parameters, request, acceptance, rejection and end.

use super::call::call;
use super::identifier::CmIdState;
use crate::abi::*;
use crate::address::ah_attr;
use crate::errno::{self, Rejection};
use crate::object::Handle;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use softhca::cm::{ConnectionParameters, EventType};
use softhca::{ModifyQp, QpAttributeMask, QpState, Qpn};

/// The private data of a program.
///
/// # Safety
/// `data` is null or has `length` bytes.
unsafe fn private_data<'a>(data: *const c_void, length: u8) -> &'a [u8] {
    // SAFETY: the caller guarantees it.
    if data.is_null() { &[] } else { unsafe { core::slice::from_raw_parts(data.cast(), length.into()) } }
}

/// The program's connection parameters; without any, those of the peer's request.
fn connection_parameters(state: &CmIdState, conn_param: Option<&rdma_conn_param>) -> ConnectionParameters {
    match (conn_param, *state.offer.lock()) {
        (Some(conn_param), _) => ConnectionParameters {
            // SAFETY: the caller's data has the given length.
            private_data: unsafe { private_data(conn_param.private_data, conn_param.private_data_len) }
                .to_vec(),
            responder_resources: conn_param.responder_resources,
            initiator_depth: conn_param.initiator_depth,
            flow_control: conn_param.flow_control != 0,
            retry_count: conn_param.retry_count.min(7),
            rnr_retry_count: conn_param.rnr_retry_count.min(7),
            srq: conn_param.srq != 0,
            qpn: Qpn::new(conn_param.qp_num),
            ..ConnectionParameters::default()
        },
        (None, Some(offer)) => ConnectionParameters {
            responder_resources: offer.responder_resources,
            initiator_depth: offer.initiator_depth,
            ..ConnectionParameters::default()
        },
        (None, None) => ConnectionParameters::default(),
    }
}

pub extern "C" fn connect(id: Handle<CmIdState>, conn_param: Option<&rdma_conn_param>) -> c_int {
    let act = |state: &CmIdState| Ok(state.id().connect(&connection_parameters(state, conn_param))?);
    call("rdma_connect", id, act, Some(EventType::Established))
}

pub extern "C" fn accept(id: Handle<CmIdState>, conn_param: Option<&rdma_conn_param>) -> c_int {
    let act = |state: &CmIdState| Ok(state.id().accept(&connection_parameters(state, conn_param))?);
    // A SIDR response has no event.
    let waits = id.get().is_some_and(|id| id.abi().qp_type != IBV_QPT_UD);
    call("rdma_accept", id, act, waits.then_some(EventType::Established))
}

/// # Safety
/// `data` is null or has `length` bytes.
pub unsafe extern "C" fn reject(id: Handle<CmIdState>, data: *const c_void, length: u8) -> c_int {
    // SAFETY: the caller guarantees it.
    let data = unsafe { private_data(data, length) };
    call("rdma_reject", id, |state| Ok(state.id().reject(data)?), None)
}

pub extern "C" fn establish(id: Handle<CmIdState>) -> c_int {
    call("rdma_establish", id, |state| Ok(state.id().establish()?), None)
}

pub extern "C" fn notify(id: Handle<CmIdState>, _event: c_int) -> c_int {
    call("rdma_notify", id, |state| Ok(state.id().establish()?), None)
}

pub extern "C" fn disconnect(id: Handle<CmIdState>) -> c_int {
    let act = |state: &CmIdState| Ok(state.id().disconnect()?);
    call("rdma_disconnect", id, act, Some(EventType::Disconnected))
}

/// The attributes that move the caller's queue pair to the state in `attr`.
pub extern "C" fn init_qp_attr(
    id: Handle<CmIdState>,
    attr: &mut ibv_qp_attr,
    mask: &mut MaybeUninit<c_int>,
) -> c_int {
    errno::minus_one("rdma_init_qp_attr", || {
        let state = id.find()?;
        let wanted = usize::try_from(attr.qp_state).ok().and_then(|index| QpState::ALL.get(index));
        let wanted = wanted
            .ok_or_else(|| Rejection::invalid(format!("{} is not a state of a queue pair", attr.qp_state)))?;
        let modify = state.id().qp_attributes(*wanted)?;
        fill_qp_attr(attr, &modify);
        mask.write(modify.mask().bits() as c_int);
        Ok(())
    })
}

fn fill_qp_attr(attr: &mut ibv_qp_attr, modify: &ModifyQp) {
    let mask = modify.mask();
    if let Some(state) = modify.state {
        attr.qp_state = state as c_int;
    }
    if let Some(path) = &modify.address_vector {
        attr.ah_attr = ah_attr(path);
    }
    if let Some(mtu) = modify.path_mtu {
        attr.path_mtu = mtu.code().into();
    }
    if mask.contains(QpAttributeMask::PORT) {
        attr.port_num = 1;
    }
    attr.pkey_index = modify.pkey_index.unwrap_or(attr.pkey_index);
    attr.qp_access_flags = modify.access_flags.map_or(attr.qp_access_flags, |access| access.bits());
    attr.qkey = modify.qkey.map_or(attr.qkey, |key| key.0);
    attr.rq_psn = modify.rq_psn.map_or(attr.rq_psn, |psn| psn.value());
    attr.sq_psn = modify.sq_psn.map_or(attr.sq_psn, |psn| psn.value());
    attr.dest_qp_num = modify.dest_qpn.map_or(attr.dest_qp_num, |number| number.value());
    attr.max_rd_atomic = modify.max_rd_atomic.unwrap_or(attr.max_rd_atomic);
    attr.max_dest_rd_atomic = modify.max_dest_rd_atomic.unwrap_or(attr.max_dest_rd_atomic);
    attr.min_rnr_timer = modify.min_rnr_timer.map_or(attr.min_rnr_timer, |timer| timer.code());
    attr.timeout = modify.timeout.unwrap_or(attr.timeout);
    attr.retry_cnt = modify.retry_count.unwrap_or(attr.retry_cnt);
    attr.rnr_retry = modify.rnr_retry.unwrap_or(attr.rnr_retry);
}
