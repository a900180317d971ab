//! Conversion of queue pair attributes in both directions.

use crate::abi::*;
use crate::address;
use crate::errno::{self, Rejection};
use crate::object::Handle;
use crate::queue_pair::Qp;
use core::ffi::{c_int, c_uint};
use core::mem::{MaybeUninit, zeroed};
use softhca::{AccessFlags, ModifyQp, Mtu, Psn, QpAttributeMask, QpState, Qpn, QueueKey, RnrTimer};

const IBV_MIG_MIGRATED: c_int = 0;

fn state_of(number: c_int) -> Result<QpState, Rejection> {
    let found = usize::try_from(number).ok().and_then(|index| QpState::ALL.get(index)).copied();
    found.ok_or_else(|| Rejection::invalid(format!("{number} is not a state of a queue pair")))
}

/// The requested change.
fn change(attr: &ibv_qp_attr, mask: QpAttributeMask) -> Result<ModifyQp, Rejection> {
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
        let code = u8::try_from(attr.path_mtu).ok();
        let invalid = || Rejection::invalid(format!("path_mtu {} is not an MTU", attr.path_mtu));
        modify.path_mtu = Some(code.and_then(Mtu::from_code).ok_or_else(invalid)?);
    }
    if has(Mask::AV) {
        modify.address_vector = Some(address::address_vector(&attr.ah_attr)?);
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
    Ok(modify)
}

pub extern "C" fn modify_qp(qp: Handle<Qp>, attr: &ibv_qp_attr, mask: c_int) -> c_int {
    errno::code("ibv_modify_qp", || {
        let qp = qp.find()?;
        let known = QpAttributeMask::from_bits(mask as u32);
        let Some(mask) = known.filter(|mask| !mask.contains(QpAttributeMask::CAP)) else {
            return Err(Rejection::invalid(format!("attr_mask {mask:#x} has IBV_QP_CAP or unknown bits")));
        };
        let state = qp.pair.modify(&change(attr, mask)?)?;
        qp.update(|abi| abi.base.state = state as c_int);
        Ok(())
    })
}

pub extern "C" fn query_qp(
    qp: Handle<Qp>,
    attr: &mut MaybeUninit<ibv_qp_attr>,
    _mask: c_int,
    init: &mut MaybeUninit<ibv_qp_init_attr>,
) -> c_int {
    errno::code("ibv_query_qp", || {
        let qp = qp.find()?;
        let view = qp.pair.query()?;
        let attributes = &view.attributes;
        // SAFETY: zero is valid for every field.
        let mut result: ibv_qp_attr = unsafe { zeroed() };
        result.qp_state = view.state as c_int;
        result.cur_qp_state = view.state as c_int;
        result.path_mtu = c_int::from(attributes.path_mtu.code());
        result.path_mig_state = IBV_MIG_MIGRATED;
        result.qkey = attributes.qkey.0;
        result.rq_psn = view.expected_psn.value();
        result.sq_psn = view.next_psn.value();
        result.dest_qp_num = attributes.dest_qpn.value();
        result.qp_access_flags = attributes.access_flags.bits() as c_uint;
        result.cap = qp.init.cap;
        result.ah_attr = address::ah_attr(&attributes.address_vector);
        result.pkey_index = attributes.pkey_index;
        result.en_sqd_async_notify = u8::from(attributes.sqd_async_notify);
        result.sq_draining = u8::from(view.sq_draining);
        result.max_rd_atomic = attributes.max_rd_atomic;
        result.max_dest_rd_atomic = attributes.max_dest_rd_atomic;
        result.min_rnr_timer = attributes.min_rnr_timer.code();
        result.port_num = attributes.port;
        result.timeout = attributes.timeout;
        result.retry_cnt = attributes.retry_count;
        result.rnr_retry = attributes.rnr_retry;
        result.rate_limit = attributes.rate_limit;
        attr.write(result);
        init.write(qp.init);
        qp.update(|abi| abi.base.state = view.state as c_int);
        Ok(())
    })
}
