//! The attributes of queue pairs, both ways.

use crate::abi::*;
use crate::address;
use crate::{errno, queue_pair};
use core::ffi::{c_int, c_uint};
use core::mem::zeroed;
use softhca::{AccessFlags, ModifyQp, Mtu, Psn, QpAttributeMask, QpState, Qpn, QueueKey, RnrTimer};

const IBV_MIG_MIGRATED: c_int = 0;

fn state_of(number: c_int) -> Option<QpState> {
    usize::try_from(number).ok().and_then(|index| QpState::ALL.get(index)).copied()
}

/// What the caller asks for, or `None` if something of it makes no sense.
fn change(attr: &ibv_qp_attr, mask: QpAttributeMask) -> Option<ModifyQp> {
    use QpAttributeMask as Mask;
    let mut modify = ModifyQp::default();
    let has = |flag| mask.contains(flag);
    if has(Mask::STATE) {
        modify.state = Some(state_of(attr.qp_state)?);
    }
    if has(Mask::CUR_STATE) {
        modify.current_state = Some(state_of(attr.cur_qp_state)?);
    }
    if has(Mask::PATH_MTU) {
        modify.path_mtu = Some(Mtu::from_code(u8::try_from(attr.path_mtu).ok()?)?);
    }
    if has(Mask::AV) {
        modify.address_vector = Some(address::address_vector(&attr.ah_attr)?);
    }
    if has(Mask::PORT) && attr.port_num != 1 || has(Mask::PKEY_INDEX) && attr.pkey_index != 0 {
        return None;
    }
    let set = |flag, value| has(flag).then_some(value);
    modify.sqd_async_notify = has(Mask::EN_SQD_ASYNC_NOTIFY).then_some(attr.en_sqd_async_notify != 0);
    modify.access_flags =
        has(Mask::ACCESS_FLAGS).then(|| AccessFlags::from_bits_truncate(attr.qp_access_flags));
    modify.pkey_index = has(Mask::PKEY_INDEX).then_some(attr.pkey_index);
    modify.port = set(Mask::PORT, attr.port_num);
    modify.qkey = has(Mask::QKEY).then_some(QueueKey(attr.qkey));
    modify.timeout = set(Mask::TIMEOUT, attr.timeout);
    modify.retry_count = set(Mask::RETRY_CNT, attr.retry_cnt);
    modify.rnr_retry = set(Mask::RNR_RETRY, attr.rnr_retry);
    modify.rq_psn = has(Mask::RQ_PSN).then(|| Psn::new(attr.rq_psn));
    modify.max_rd_atomic = set(Mask::MAX_QP_RD_ATOMIC, attr.max_rd_atomic);
    modify.min_rnr_timer = has(Mask::MIN_RNR_TIMER).then(|| RnrTimer::new(attr.min_rnr_timer));
    modify.sq_psn = has(Mask::SQ_PSN).then(|| Psn::new(attr.sq_psn));
    modify.max_dest_rd_atomic = set(Mask::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic);
    modify.dest_qpn = has(Mask::DEST_QPN).then(|| Qpn::new(attr.dest_qp_num));
    modify.rate_limit = has(Mask::RATE_LIMIT).then_some(attr.rate_limit);
    modify.alt_path = has(Mask::ALT_PATH).then_some(());
    modify.path_mig_state = has(Mask::PATH_MIG_STATE).then_some(());
    Some(modify)
}

pub unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: a queue pair of ours.
    let Some(state) = (unsafe { queue_pair::of(qp) }) else { return libc::EINVAL };
    let Some(mask) =
        QpAttributeMask::from_bits(mask as u32).filter(|mask| !mask.contains(QpAttributeMask::CAP))
    else {
        return libc::EINVAL;
    };
    // SAFETY: the caller's attributes.
    let Some(modify) = change(unsafe { &*attr }, mask) else { return libc::EINVAL };
    match state.pair.modify(&modify) {
        Ok(new) => {
            // SAFETY: a queue pair of ours.
            unsafe { (*qp).state = new as c_int };
            0
        }
        Err(error) => errno::from_result("ibv_modify_qp", Err(error)),
    }
}

pub unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: a queue pair of ours.
    let Some(state) = (unsafe { queue_pair::of(qp) }) else { return libc::EINVAL };
    let view = match state.pair.query() {
        Ok(view) => view,
        Err(error) => return errno::from_result("ibv_query_qp", Err(error)),
    };
    let known = &view.attributes;
    // SAFETY: zero is valid for every field.
    let mut told: ibv_qp_attr = unsafe { zeroed() };
    told.qp_state = view.state as c_int;
    told.cur_qp_state = view.state as c_int;
    told.path_mtu = c_int::from(known.path_mtu.code());
    told.path_mig_state = IBV_MIG_MIGRATED;
    told.qkey = known.qkey.0;
    told.rq_psn = view.expected_psn.value();
    told.sq_psn = view.next_psn.value();
    told.dest_qp_num = known.dest_qpn.value();
    told.qp_access_flags = known.access_flags.bits() as c_uint;
    told.cap = state.init.cap;
    told.ah_attr = address::ah_attr(&known.address_vector);
    told.pkey_index = known.pkey_index;
    told.en_sqd_async_notify = u8::from(known.sqd_async_notify);
    told.sq_draining = u8::from(view.sq_draining);
    told.max_rd_atomic = known.max_rd_atomic;
    told.max_dest_rd_atomic = known.max_dest_rd_atomic;
    told.min_rnr_timer = known.min_rnr_timer.code();
    told.port_num = known.port;
    told.timeout = known.timeout;
    told.retry_cnt = known.retry_count;
    told.rnr_retry = known.rnr_retry;
    told.rate_limit = known.rate_limit;
    // SAFETY: the caller's own, and a queue pair of ours.
    unsafe {
        *attr = told;
        *init = state.init;
        (*qp).state = view.state as c_int;
    }
    0
}
