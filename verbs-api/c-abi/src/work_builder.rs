//! The extended interface for posting: one call starts a work request, further calls complete it.

use crate::abi::*;
use crate::address::Ah;
use crate::errno::{Rejection, check};
use crate::queue_pair::{self, Qp};
use crate::started_requests::{StartedRequests, WorkRequest};
use crate::{object, post};
use core::ffi::{c_int, c_void};
use core::ptr::null;
use parking_lot::lock_api::RawMutex as _;
use softhca::{
    LocalKey, Operation, QpState, Qpn, QueueKey, RemoteAddress, RemoteKey, SendFlags, SendImmOrInvalidate,
    SendRequest, Sge,
};

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

/// The work requests of the holder of the lock.
unsafe fn requests<'a>(qp: *mut ibv_qp_ex) -> Option<&'a mut StartedRequests> {
    // SAFETY: a queue pair of this library, whose lock the caller holds since `wr_start`.
    unsafe { object::state::<Qp>(qp).map(|state| &mut *state.builder.batch.get()) }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: a queue pair of this library.
    let Some(state) = (unsafe { object::state::<Qp>(qp) }) else { return };
    state.builder.lock.lock();
    // SAFETY: this function holds the lock.
    let requests = unsafe { &mut *state.builder.batch.get() };
    requests.started.clear();
    requests.error = None;
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    const VERB: &str = "ibv_wr_complete";
    // SAFETY: a queue pair of this library.
    let state = check!(VERB, code, unsafe { object::find_on_data_path::<Qp>(qp) });
    // SAFETY: the caller holds the lock since `wr_start`.
    let requests = unsafe { &mut *state.builder.batch.get() };
    // SAFETY: a queue pair of this library.
    let ready = unsafe { queue_pair::find_after(qp.cast(), QpState::ReadyToReceive) };
    let result = match (ready, requests.error.take()) {
        (Err(rejection), _) | (_, Some(rejection)) => Err(rejection),
        (Ok(state), None) => post_all(state, &requests.started),
    };
    requests.started.clear();
    // SAFETY: as above; it is given back.
    unsafe { state.builder.lock.unlock() };
    check!(VERB, code, result);
    0
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: a queue pair of this library.
    let Some(state) = (unsafe { object::state::<Qp>(qp) }) else { return };
    // SAFETY: the caller holds the lock since `wr_start`, and releases it.
    unsafe {
        (*state.builder.batch.get()).started.clear();
        state.builder.lock.unlock();
    }
}

/// Posts all work requests or none.
fn post_all(state: &Qp, requests: &[WorkRequest]) -> Result<(), Rejection> {
    let mut batch = state.pair.send_batch()?;
    for request in requests {
        let mut made = SendRequest::new(request.id, request.operation, &request.gather)
            .flags(request.flags)
            .xrc_srqn(request.shared_receive_queue);
        if let Some(bytes) = &request.inline {
            made = made.inline_data(bytes);
        }
        if let Some((handle, queue_pair, key)) = &request.datagram {
            made = made.ud_address(handle, *queue_pair, *key);
        }
        batch.add(&made)?;
    }
    batch.post();
    Ok(())
}

/// Starts a work request.
unsafe fn start_request(qp: *mut ibv_qp_ex, operation: Operation) {
    // SAFETY: the caller guarantees it.
    let (Some(requests), qp) = (unsafe { requests(qp) }, unsafe { &*qp }) else { return };
    let flags = post::send_flags(qp.wr_flags).unwrap_or_else(|rejection| {
        requests.error.get_or_insert(rejection);
        SendFlags::empty()
    });
    requests.started.push(WorkRequest {
        id: qp.wr_id,
        flags: flags - SendFlags::INLINE,
        operation,
        gather: Vec::new(),
        inline: None,
        datagram: None,
        shared_receive_queue: 0,
    });
}

/// Changes the last work request, or records the error.
unsafe fn change_last(qp: *mut ibv_qp_ex, act: impl FnOnce(&mut WorkRequest) -> Result<(), Rejection>) {
    // SAFETY: the caller guarantees it.
    let Some(requests) = (unsafe { requests(qp) }) else { return };
    let none = || Rejection::invalid("ibv_wr_set_* without a work request");
    let result = requests.started.last_mut().ok_or_else(none).and_then(act);
    if let Err(rejection) = result {
        requests.error.get_or_insert(rejection);
    }
}

fn remote(key: u32, address: u64) -> RemoteAddress {
    RemoteAddress { address, rkey: RemoteKey(key) }
}

/// Functions that start a work request.
macro_rules! starts {
    ($($name:ident($($operand:ident: $kind:ty),*) = $operation:expr;)*) => {
        $(unsafe extern "C" fn $name(qp: *mut ibv_qp_ex, $($operand: $kind),*) {
            // SAFETY: the caller guarantees it.
            unsafe { start_request(qp, $operation) };
        })*
    };
}

starts! {
    wr_atomic_cmp_swp(key: u32, address: u64, compare: u64, swap: u64) =
        Operation::CompareSwap { remote: remote(key, address), compare, swap };
    wr_atomic_fetch_add(key: u32, address: u64, add: u64) =
        Operation::FetchAdd { remote: remote(key, address), add };
    wr_local_inv(key: u32) = Operation::LocalInvalidate { rkey: RemoteKey(key) };
    wr_rdma_read(key: u32, address: u64) = Operation::Read { remote: remote(key, address) };
    wr_rdma_write(key: u32, address: u64) =
        Operation::Write { remote: remote(key, address), imm_data: None };
    wr_rdma_write_imm(key: u32, address: u64, immediate: u32) =
        Operation::Write { remote: remote(key, address), imm_data: Some(u32::from_be(immediate)) };
    wr_send() = Operation::Send(SendImmOrInvalidate::None);
    wr_send_imm(immediate: u32) = Operation::Send(SendImmOrInvalidate::Immediate(u32::from_be(immediate)));
    wr_send_inv(key: u32) = Operation::Send(SendImmOrInvalidate::Invalidate(RemoteKey(key)));
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    key: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: the caller guarantees it.
    match unsafe { post::bind_operation(mw, key, &*info) } {
        // SAFETY: the caller guarantees it.
        Some(operation) => unsafe { start_request(qp, operation) },
        None => {
            // SAFETY: the caller guarantees it.
            if let Some(requests) = unsafe { requests(qp) } {
                requests.error.get_or_insert(post::invalid_bind());
            }
        }
    }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, number: u32, key: u32) {
    // SAFETY: the caller guarantees it.
    unsafe {
        change_last(qp, |request| {
            let ah = object::find_on_data_path::<Ah>(ah)?;
            request.datagram = Some((ah.handle.clone(), Qpn::new(number), QueueKey(key)));
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, number: u32) {
    // SAFETY: the caller guarantees it.
    unsafe {
        change_last(qp, |request| {
            request.shared_receive_queue = number;
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, at: *mut c_void, length: usize) {
    let buffer = ibv_data_buf { addr: at, length };
    // SAFETY: the caller guarantees it.
    unsafe { wr_set_inline_data_list(qp, 1, &buffer) };
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    // SAFETY: the caller guarantees it.
    unsafe {
        change_last(qp, |request| {
            let mut bytes = Vec::new();
            for index in 0..count {
                let ibv_data_buf { addr, length } = *list.add(index);
                let start = bytes.len();
                bytes.resize(start + length, 0);
                core::ptr::copy_nonoverlapping(addr.cast::<u8>(), bytes[start..].as_mut_ptr(), length);
            }
            request.inline = Some(bytes);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, key: u32, address: u64, length: u32) {
    // SAFETY: the caller guarantees it.
    unsafe {
        change_last(qp, |request| {
            request.gather = vec![Sge { address, length, lkey: LocalKey(key) }];
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: the caller guarantees it.
    unsafe {
        change_last(qp, |request| {
            let mut gather = [Sge::default(); post::MAX_SGE];
            let count = c_int::try_from(count).unwrap_or(c_int::MAX);
            request.gather = post::read_sge_list(list, count, &mut gather)?.to_vec();
            Ok(())
        });
    }
}
