//! Connections: parameters, request, acceptance, rejection and end.

use super::call::call;
use super::identifier::{CmIdState, find};
use crate::abi::*;
use crate::address::ah_attr;
use crate::errno::{Rejection, check};
use core::ffi::{c_int, c_void};
use softhca::cm::{ConnectionParameters, EventType};
use softhca::{ModifyQp, QpAttributeMask, QpState, Qpn};

/// The program's connection parameters; without any, those of the peer's request.
unsafe fn connection_parameters(
    state: &CmIdState,
    conn_param: *const rdma_conn_param,
) -> ConnectionParameters {
    let mut parameters = ConnectionParameters::default();
    // SAFETY: a valid pointer of the caller.
    match unsafe { conn_param.as_ref() } {
        Some(conn_param) => {
            if !conn_param.private_data.is_null() {
                let length = usize::from(conn_param.private_data_len);
                // SAFETY: the caller's data has the given length.
                parameters.private_data =
                    unsafe { core::slice::from_raw_parts(conn_param.private_data.cast::<u8>(), length) }
                        .to_vec();
            }
            parameters.responder_resources = conn_param.responder_resources;
            parameters.initiator_depth = conn_param.initiator_depth;
            parameters.flow_control = conn_param.flow_control != 0;
            parameters.retry_count = conn_param.retry_count.min(7);
            parameters.rnr_retry_count = conn_param.rnr_retry_count.min(7);
            parameters.srq = conn_param.srq != 0;
            parameters.qpn = Qpn::new(conn_param.qp_num);
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

pub unsafe extern "C" fn connect(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int {
    // SAFETY: a valid pointer of the caller.
    let act = |state: &CmIdState| state.id().connect(&unsafe { connection_parameters(state, conn_param) });
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_connect", id, act, Some(EventType::Established)) }
}

pub unsafe extern "C" fn accept(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int {
    // SAFETY: a valid pointer of the caller.
    let act = |state: &CmIdState| state.id().accept(&unsafe { connection_parameters(state, conn_param) });
    // SAFETY: the caller guarantees it; a SIDR response has no event.
    unsafe {
        let waits = id.as_ref().is_some_and(|id| id.qp_type != IBV_QPT_UD);
        call("rdma_accept", id, act, waits.then_some(EventType::Established))
    }
}

pub unsafe extern "C" fn reject(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int {
    // SAFETY: the caller's data has the given length.
    let data = unsafe {
        if data.is_null() { &[][..] } else { core::slice::from_raw_parts(data.cast::<u8>(), length.into()) }
    };
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_reject", id, |state| state.id().reject(data), None) }
}

pub unsafe extern "C" fn establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_establish", id, |state| state.id().establish(), None) }
}

pub unsafe extern "C" fn notify(id: *mut rdma_cm_id, _event: c_int) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_notify", id, |state| state.id().establish(), None) }
}

pub unsafe extern "C" fn disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_disconnect", id, |state| state.id().disconnect(), Some(EventType::Disconnected)) }
}

/// The attributes that move the caller's queue pair to the state in `attr`.
pub unsafe extern "C" fn init_qp_attr(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    const VERB: &str = "rdma_init_qp_attr";
    // SAFETY: an identifier of this library.
    let state = check!(VERB, minus_one, unsafe { find(id) });
    // SAFETY: the caller's attributes.
    let attr = unsafe { &mut *attr };
    let wanted = usize::try_from(attr.qp_state).ok().and_then(|index| QpState::ALL.get(index));
    let Some(wanted) = wanted else {
        return Rejection::invalid(format!("{} is not a state of a queue pair", attr.qp_state))
            .minus_one(VERB);
    };
    match state.id().qp_attributes(*wanted) {
        Ok(modify) => {
            fill_qp_attr(attr, &modify);
            // SAFETY: a valid pointer of the caller.
            unsafe { *mask = modify.mask().bits() as c_int };
            0
        }
        Err(error) => Rejection::from(error).minus_one(VERB),
    }
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
