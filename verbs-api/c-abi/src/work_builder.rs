//! The extended interface for posting: one call starts a work request, further calls complete it.

use crate::abi::*;
use crate::address::Ah;
use crate::call_site;
use crate::errno::{self, Rejection};
use crate::object::Handle;
use crate::post;
use crate::protection::Mw;
use crate::queue_pair::{self, Qp};
use crate::started_requests::{StartedRequest, StartedRequests};
use core::ffi::{c_int, c_void};
use core::mem::zeroed;
use core::ptr::null;
use parking_lot::lock_api::RawMutex as _;
use softhca::{QpState, SendFlags};

/// The structure of a new queue pair.
pub fn new_qp_ex(base: ibv_qp) -> ibv_qp_ex {
    ibv_qp_ex {
        base,
        comp_mask: 0,
        wr_id: 0,
        wr_flags: 0,
        wr_atomic_cmp_swp,
        wr_atomic_fetch_add,
        wr_bind_mw,
        wr_local_inv,
        wr_rdma_read,
        wr_rdma_write,
        wr_rdma_write_imm,
        wr_send,
        wr_send_imm,
        wr_send_inv,
        wr_send_tso: null(),
        wr_set_ud_addr,
        wr_set_xrc_srqn,
        wr_set_inline_data,
        wr_set_inline_data_list,
        wr_set_sge,
        wr_set_sge_list,
        wr_start,
        wr_complete,
        wr_abort,
        wr_atomic_write: null(),
    }
}

extern "C" fn wr_start(qp: Handle<Qp>) {
    let Some(qp) = qp.get() else { return };
    qp.builder.lock.lock();
    // SAFETY: this function holds the lock.
    let requests = unsafe { &mut *qp.builder.batch.get() };
    requests.started.clear();
    requests.error = None;
}

extern "C" fn wr_complete(qp: Handle<Qp>) -> c_int {
    errno::code("ibv_wr_complete", || {
        let found = qp.find_on_data_path()?;
        // SAFETY: the caller holds the lock since `wr_start`.
        let requests = unsafe { &mut *found.builder.batch.get() };
        let ready = queue_pair::find_after(qp, QpState::ReadyToReceive);
        let result = match requests.error.take() {
            Some(rejection) => ready.and(Err(rejection)),
            None => ready.and_then(|qp| post_all(&qp, &mut requests.started)),
        };
        requests.started.clear();
        // SAFETY: as above; it is given back.
        unsafe { found.builder.lock.unlock() };
        result
    })
}

extern "C" fn wr_abort(qp: Handle<Qp>) {
    let Some(qp) = qp.get() else { return };
    // SAFETY: the caller holds the lock since `wr_start`, and releases it.
    unsafe {
        (*qp.builder.batch.get()).started.clear();
        qp.builder.lock.unlock();
    }
}

/// Posts all work requests or none.
fn post_all(qp: &Qp, requests: &mut [StartedRequest]) -> Result<(), Rejection> {
    let call_site = call_site::of_post(&qp.pair);
    let mut batch = qp.pair.send_batch()?;
    for StartedRequest { wr, sg_list, inline } in requests {
        if let Some(bytes) = inline {
            wr.send_flags |= u32::from(SendFlags::INLINE.bits());
            *sg_list = vec![ibv_sge {
                addr: bytes.as_ptr() as u64,
                length: bytes.len().try_into().unwrap_or(u32::MAX),
                lkey: 0,
            }];
        }
        (wr.sg_list, wr.num_sge) = (sg_list.as_mut_ptr(), sg_list.len().try_into().unwrap_or(c_int::MAX));
        // SAFETY: the list belongs to the request, and inline data too.
        unsafe { post::add_to_batch(qp, &mut batch, wr, call_site) }?;
    }
    batch.post();
    Ok(())
}

/// The work requests of the holder of the lock.
fn change(qp: Handle<Qp>, act: impl FnOnce(&ibv_qp_ex, &mut StartedRequests)) {
    let Some(qp) = qp.get() else { return };
    // SAFETY: the caller holds the lock since `wr_start`.
    act(qp.abi(), unsafe { &mut *qp.builder.batch.get() });
}

/// Starts a work request with the fields that `fill` sets.
fn start(qp: Handle<Qp>, opcode: c_int, fill: impl FnOnce(&mut ibv_send_wr)) {
    change(qp, |abi, requests| {
        // SAFETY: zero is valid for every field.
        let mut wr: ibv_send_wr = unsafe { zeroed() };
        (wr.wr_id, wr.opcode) = (abi.wr_id, opcode);
        // `wr_set_inline_data` says whether there is inline data.
        wr.send_flags = abi.wr_flags & !u32::from(SendFlags::INLINE.bits());
        fill(&mut wr);
        requests.started.push(StartedRequest { wr, sg_list: Vec::new(), inline: None });
    });
}

/// Changes the last work request, or records that there is none.
fn change_last(qp: Handle<Qp>, act: impl FnOnce(&mut StartedRequest)) {
    change(qp, |_, requests| match requests.started.last_mut() {
        Some(request) => act(request),
        None => {
            let none = || Rejection::invalid("ibv_wr_set_* without a work request");
            requests.error.get_or_insert_with(none);
        }
    });
}

/// Functions that start a work request.
macro_rules! starts {
    ($($name:ident($($operand:ident: $kind:ty),*) = $opcode:ident $(, $($field:ident).+ = $value:expr)*;)*) => {
        $(extern "C" fn $name(qp: Handle<Qp>, $($operand: $kind),*) {
            start(qp, $opcode, |_wr| { $(_wr.$($field).+ = $value;)* });
        })*
    };
}

starts! {
    wr_atomic_cmp_swp(rkey: u32, remote_addr: u64, compare_add: u64, swap: u64) = IBV_WR_ATOMIC_CMP_AND_SWP,
        wr.atomic = Atomic { remote_addr, compare_add, swap, rkey };
    wr_atomic_fetch_add(rkey: u32, remote_addr: u64, compare_add: u64) = IBV_WR_ATOMIC_FETCH_AND_ADD,
        wr.atomic = Atomic { remote_addr, compare_add, swap: 0, rkey };
    wr_bind_mw(mw: Handle<Mw>, rkey: u32, bind_info: &ibv_mw_bind_info) = IBV_WR_BIND_MW,
        bind_mw = BindMw { mw, rkey, bind_info: *bind_info };
    wr_local_inv(rkey: u32) = IBV_WR_LOCAL_INV, imm_data = rkey;
    wr_rdma_read(rkey: u32, remote_addr: u64) = IBV_WR_RDMA_READ, wr.rdma = Rdma { remote_addr, rkey };
    wr_rdma_write(rkey: u32, remote_addr: u64) = IBV_WR_RDMA_WRITE, wr.rdma = Rdma { remote_addr, rkey };
    wr_rdma_write_imm(rkey: u32, remote_addr: u64, immediate: u32) = IBV_WR_RDMA_WRITE_WITH_IMM,
        wr.rdma = Rdma { remote_addr, rkey }, imm_data = immediate;
    wr_send() = IBV_WR_SEND;
    wr_send_imm(immediate: u32) = IBV_WR_SEND_WITH_IMM, imm_data = immediate;
    wr_send_inv(rkey: u32) = IBV_WR_SEND_WITH_INV, imm_data = rkey;
}

extern "C" fn wr_set_ud_addr(qp: Handle<Qp>, ah: Handle<Ah>, remote_qpn: u32, remote_qkey: u32) {
    change_last(qp, |request| request.wr.wr.ud = Ud { ah, remote_qpn, remote_qkey });
}

extern "C" fn wr_set_xrc_srqn(qp: Handle<Qp>, remote_srqn: u32) {
    change_last(qp, |request| request.wr.qp_type.xrc = Xrc { remote_srqn });
}

extern "C" fn wr_set_inline_data(qp: Handle<Qp>, addr: *mut c_void, length: usize) {
    // SAFETY: one entry.
    unsafe { wr_set_inline_data_list(qp, 1, &ibv_data_buf { addr, length }) };
}

unsafe extern "C" fn wr_set_inline_data_list(qp: Handle<Qp>, count: usize, list: *const ibv_data_buf) {
    change_last(qp, |request| {
        let bytes = request.inline.insert(Vec::new());
        for index in 0..count {
            // SAFETY: the caller's list has `count` entries with valid memory.
            unsafe {
                let ibv_data_buf { addr, length } = *list.add(index);
                if length > 0 {
                    bytes.extend(core::slice::from_raw_parts(addr.cast::<u8>(), length));
                }
            }
        }
    });
}

extern "C" fn wr_set_sge(qp: Handle<Qp>, lkey: u32, addr: u64, length: u32) {
    change_last(qp, |request| request.sg_list = vec![ibv_sge { addr, length, lkey }]);
}

unsafe extern "C" fn wr_set_sge_list(qp: Handle<Qp>, count: usize, list: *const ibv_sge) {
    // SAFETY: the caller's list has `count` entries.
    let entries = (0..count).map(|index| unsafe { list.add(index).read_unaligned() });
    change_last(qp, |request| request.sg_list = entries.collect());
}
