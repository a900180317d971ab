//! Extended completion queues: completions are read field by field.

use crate::abi::*;
use crate::channel::CompletionChannelState;
use crate::completion_queue::{self, Cq};
use crate::context::ContextHandle;
use crate::errno::{self, Rejection};
use crate::faults;
use crate::object::{Found, Handle};
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::null;
use parking_lot::lock_api::RawMutex as _;
use softhca::Verb;
use softhca::{Completion, CompletionStatus};

/// The structure of a new queue.
pub fn new_cq_ex(
    context: ContextHandle,
    channel: Handle<CompletionChannelState>,
    cq_context: *mut c_void,
    handle: u32,
    cqe: u32,
) -> ibv_cq_ex {
    ibv_cq_ex {
        context,
        channel,
        cq_context,
        handle,
        cqe: cqe as c_int,
        mutex: Default::default(),
        cond: Default::default(),
        comp_events_completed: 0,
        async_events_completed: 0,
        comp_mask: 0,
        status: 0,
        wr_id: 0,
        start_poll,
        next_poll,
        end_poll,
        read_opcode,
        read_vendor_err,
        read_byte_len,
        read_imm_data,
        read_qp_num,
        read_src_qp,
        read_wc_flags,
        read_slid,
        read_sl,
        read_dlid_path_bits,
        read_completion_ts,
        read_cvlan: null(),
        read_flow_tag: null(),
        read_tm_info: null(),
        read_completion_wallclock_ns: null(),
    }
}

/// Polls the next completion for the holder of the lock.
fn next_completion(cq: &Found<'_, Cq>) -> c_int {
    let mut next = None;
    let code = errno::code("ibv_start_poll", || {
        let check = || faults::announce(Verb::PollCq, cq.object());
        cq.queue.poll_each_checked(1, check, |completion| next = Some(completion))?;
        Ok(())
    });
    let Some(completion) = next.filter(|_| code == 0) else {
        // No completion is no error.
        return if code == 0 { libc::ENOENT } else { code };
    };
    // SAFETY: the caller holds the lock.
    unsafe { *cq.polling.current.get() = Some(completion) };
    cq.update(|abi| (abi.status, abi.wr_id) = (completion.status as c_int, completion.wr_id));
    0
}

extern "C" fn start_poll(cq: Handle<Cq>, attr: &ibv_poll_cq_attr) -> c_int {
    let find = || {
        let cq = completion_queue::find_of_this_process(cq)?;
        match attr.comp_mask {
            0 => Ok(cq),
            _ => Err(Rejection::invalid("comp_mask is not 0")),
        }
    };
    let cq = match find() {
        Ok(cq) => cq,
        Err(rejection) => return rejection.code("ibv_start_poll"),
    };
    cq.polling.lock.lock();
    let code = next_completion(&cq);
    if code != 0 {
        // SAFETY: it was locked above.
        unsafe { cq.polling.lock.unlock() };
    }
    code
}

extern "C" fn next_poll(cq: Handle<Cq>) -> c_int {
    match cq.find_on_data_path() {
        Ok(cq) => next_completion(&cq),
        Err(rejection) => rejection.code("ibv_next_poll"),
    }
}

extern "C" fn end_poll(cq: Handle<Cq>) {
    let Some(cq) = cq.get() else { return };
    // SAFETY: the caller holds the lock since `start_poll`, and releases it.
    unsafe {
        *cq.polling.current.get() = None;
        if cq.polling.lock.is_locked() {
            cq.polling.lock.unlock();
        }
    }
}

/// The completion that is being read.
fn current_completion(cq: Handle<Cq>) -> Completion {
    const NOTHING: Completion = Completion {
        wr_id: 0,
        status: CompletionStatus::GeneralError,
        opcode: softhca::CompletionOpcode::Send,
        flags: softhca::CompletionFlags::empty(),
        byte_len: 0,
        imm_data: 0,
        qpn: softhca::Qpn::new(0),
        src_qp: softhca::Qpn::new(0),
        service_level: 0,
        route: softhca::ReceivedRoute { slid: 0, dlid_path_bits: 0 },
        vendor_error: 0,
        timestamp: 0,
    };
    // SAFETY: the caller holds the lock since `start_poll`.
    cq.get().and_then(|cq| unsafe { *cq.polling.current.get() }).unwrap_or(NOTHING)
}

/// Readers of one field each.
macro_rules! readers {
    ($($name:ident: $kind:ty = |$completion:ident| $value:expr;)*) => {
        $(extern "C" fn $name(cq: Handle<Cq>) -> $kind {
            let $completion = current_completion(cq);
            $value
        })*
    };
}

readers! {
    read_opcode: c_int = |completion| completion_queue::wc_opcode(completion.opcode);
    read_vendor_err: u32 = |completion| completion.vendor_error;
    read_byte_len: u32 = |completion| completion.byte_len;
    read_imm_data: u32 = |completion| completion_queue::wc_imm_data(&completion);
    read_qp_num: u32 = |completion| completion.qpn.value();
    read_src_qp: u32 = |completion| completion.src_qp.value();
    read_wc_flags: c_uint = |completion| completion_queue::wc_flags(&completion);
    read_slid: u32 = |completion| completion.route.slid.into();
    read_sl: u8 = |completion| completion_queue::wc_sl(&completion);
    read_dlid_path_bits: u8 = |completion| completion.route.dlid_path_bits;
    read_completion_ts: u64 = |completion| completion.timestamp;
}
