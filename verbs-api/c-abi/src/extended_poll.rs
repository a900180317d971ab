//! Extended completion queues: completions are read field by field.

use crate::abi::*;
use crate::completion_queue::{self, Cq};
use crate::errno::{Rejection, check};
use crate::faults;
use crate::object;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::null;
use parking_lot::lock_api::RawMutex as _;
use softhca::Verb;
use softhca::{Completion, CompletionStatus};

/// The structure of a new queue.
pub fn new_cq_ex(
    context: *mut ibv_context,
    channel: *mut ibv_comp_channel,
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
        mutex: [0; 5],
        cond: [0; 6],
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
unsafe fn next_completion(cq: *mut ibv_cq_ex, state: &Cq) -> c_int {
    let mut next = None;
    let polled = state.queue.poll_each_checked(
        1,
        || faults::announce(Verb::PollCq, state.object()),
        |completion| next = Some(completion),
    );
    check!("ibv_start_poll", code, polled);
    let Some(completion) = next else { return libc::ENOENT };
    // SAFETY: the caller holds the lock; the structure belongs to the queue.
    unsafe {
        *state.polling.current.get() = Some(completion);
        (*cq).status = completion.status as c_int;
        (*cq).wr_id = completion.wr_id;
    }
    0
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    const VERB: &str = "ibv_start_poll";
    // SAFETY: a queue of this library.
    let state = check!(VERB, code, unsafe { completion_queue::find_of_this_process(cq.cast()) });
    // SAFETY: valid attributes of the caller.
    if unsafe { (*attr).comp_mask } != 0 {
        return Rejection::invalid("comp_mask is not 0").code(VERB);
    }
    state.polling.lock.lock();
    // SAFETY: this function holds the lock.
    let code = unsafe { next_completion(cq, state) };
    if code != 0 {
        // SAFETY: it was locked above.
        unsafe { state.polling.lock.unlock() };
    }
    code
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: a queue of this library.
    let state = check!("ibv_next_poll", code, unsafe { object::find_on_data_path::<Cq>(cq) });
    // SAFETY: the caller holds the lock since `start_poll`.
    unsafe { next_completion(cq, state) }
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: a queue of this library.
    let Some(state) = (unsafe { object::state::<Cq>(cq) }) else { return };
    // SAFETY: the caller holds the lock since `start_poll`, and releases it.
    unsafe {
        *state.polling.current.get() = None;
        if state.polling.lock.is_locked() {
            state.polling.lock.unlock();
        }
    }
}

/// The completion that is being read.
unsafe fn current_completion(cq: *mut ibv_cq_ex) -> Completion {
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
        vendor_error: 0,
        timestamp: 0,
    };
    // SAFETY: a queue of this library, whose turn the caller has.
    unsafe { object::state::<Cq>(cq).and_then(|state| *state.polling.current.get()) }.unwrap_or(NOTHING)
}

/// Readers of one field each.
macro_rules! readers {
    ($($name:ident: $kind:ty = |$completion:ident| $value:expr;)*) => {
        $(unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $kind {
            // SAFETY: the caller guarantees it.
            let $completion = unsafe { current_completion(cq) };
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
    read_slid: u32 = |_completion| 0;
    read_sl: u8 = |completion| completion_queue::wc_sl(&completion);
    read_dlid_path_bits: u8 = |_completion| 0;
    read_completion_ts: u64 = |completion| completion.timestamp;
}
