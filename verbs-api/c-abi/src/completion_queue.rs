//! Completion queues, and the conversion of completions.

pub mod create;

use crate::abi::*;
use crate::channel::CompletionChannelState;
use crate::errno::{Rejection, check};
use crate::faults;
use crate::poll_cursor::PollCursor;
use crate::unacknowledged::Unacknowledged;
use crate::{context, errno, object};
use core::ffi::c_int;
use softhca::{Completion, CompletionFlags, CompletionOpcode, CompletionQueue, CqNotify};
use softhca::{Resource, Verb};

/// The state of an `ibv_cq`, extended or not.
pub struct Cq {
    pub queue: CompletionQueue,
    pub events: Unacknowledged,
    pub async_events: Unacknowledged,
    pub polling: PollCursor,
}

impl Cq {
    /// The queue as the object of a call.
    pub fn object(&self) -> Option<(Resource, u32)> {
        Some((Resource::CompletionQueue, self.queue.handle()))
    }
}

object::kinds! {
    Cq = ibv_cq_ex, "completion queue", |cq| Some((cq.context, cq.handle));
}

/// The queue behind a pointer, or why it cannot be used.
///
/// # Safety
/// `cq` is null or a queue of this library.
#[inline]
pub unsafe fn find<'a>(cq: *mut ibv_cq) -> Result<&'a Cq, Rejection> {
    // SAFETY: the caller guarantees it; every queue is extended.
    unsafe { object::find::<Cq>(cq.cast()) }
}

/// Finds a completion queue to poll, unless it belongs to the process that this one was forked from.
///
/// # Safety
/// As [`find`].
#[inline]
pub unsafe fn find_of_this_process<'a>(cq: *mut ibv_cq) -> Result<&'a Cq, Rejection> {
    // SAFETY: the caller guarantees it; every queue is extended.
    let state = unsafe { object::find_on_data_path::<Cq>(cq.cast()) }?;
    state.queue.check_process()?;
    Ok(state)
}

pub unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: a queue of this library.
    let state = check!("ibv_resize_cq", code, unsafe { find(cq) });
    if cqe <= 0 {
        return Rejection::invalid(format!("cqe is {cqe}")).code("ibv_resize_cq");
    }
    let code = errno::from_result("ibv_resize_cq", state.queue.resize(cqe as u32));
    if code == 0 {
        // SAFETY: as above.
        unsafe { (*cq).cqe = cqe };
    }
    code
}

pub unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    const VERB: &str = "ibv_destroy_cq";
    // SAFETY: a queue of this library.
    let state = check!(VERB, code, unsafe { find(cq) });
    check!(VERB, code, faults::announce(Verb::DestroyCq, state.object()));
    if state.queue.is_in_use() {
        let why = "queue pairs or shared receive queues use the completion queue: destroy them first";
        return Rejection::busy(why).code(VERB);
    }
    let number = state.queue.handle();
    // SAFETY: as above.
    let (context, channel) = unsafe { ((*cq).context, (*cq).channel) };
    // SAFETY: objects of this library.
    if let Some(channel_state) = unsafe { object::state::<CompletionChannelState>(channel) } {
        channel_state.completion_queues.lock().remove(&number);
        // SAFETY: as above.
        unsafe { (*channel).refcnt -= 1 };
    }
    // SAFETY: a context of this library.
    if let Some(open) = unsafe { context::of(context) } {
        open.objects.lock().completion_queues.remove(&number);
    }
    state.events.wait();
    state.async_events.wait();
    // SAFETY: as above.
    drop(unsafe { object::destroy::<Cq>(cq.cast()) });
    0
}

pub fn wc_opcode(operation: CompletionOpcode) -> c_int {
    match operation {
        CompletionOpcode::Receive => IBV_WC_RECV,
        CompletionOpcode::ReceiveWriteWithImm => IBV_WC_RECV_RDMA_WITH_IMM,
        // The other opcodes have the numbers of the headers.
        operation => operation as c_int,
    }
}

/// The flags of a completion. As ibv_poll_cq(3) says, only datagrams have IBV_WC_GRH.
pub fn wc_flags(completion: &Completion) -> u32 {
    let bit_of = |(flag, bit)| if completion.flags.contains(flag) { bit } else { 0 };
    [
        (CompletionFlags::GRH, IBV_WC_GRH),
        (CompletionFlags::IMMEDIATE, IBV_WC_WITH_IMM),
        (CompletionFlags::INVALIDATED, IBV_WC_WITH_INV),
    ]
    .map(bit_of)
    .iter()
    .sum()
}

/// Immediate data in network byte order, or the invalidated rkey in host byte order.
pub fn wc_imm_data(completion: &Completion) -> u32 {
    if completion.flags.contains(CompletionFlags::INVALIDATED) {
        completion.imm_data
    } else {
        completion.imm_data.to_be()
    }
}

/// A RoCE packet has no service level. As on ConnectX HCAs, the field reports the encapsulation of a datagram, which
/// UCX reads: UDP, and IPv6 or IPv4.
pub fn wc_sl(completion: &Completion) -> u8 {
    const UDP: u8 = 8;
    match completion.flags {
        flags if !flags.contains(CompletionFlags::GRH) => 0,
        flags if flags.contains(CompletionFlags::IPV4) => UDP | 2,
        _ => UDP | 1,
    }
}

fn work_completion(completion: &Completion) -> ibv_wc {
    ibv_wc {
        wr_id: completion.wr_id,
        status: completion.status as c_int,
        opcode: wc_opcode(completion.opcode),
        vendor_err: completion.vendor_error,
        byte_len: completion.byte_len,
        imm_data: wc_imm_data(completion),
        qp_num: completion.qpn.value(),
        src_qp: completion.src_qp.value(),
        wc_flags: wc_flags(completion),
        pkey_index: 0,
        slid: 0,
        sl: wc_sl(completion),
        dlid_path_bits: 0,
    }
}

pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, mut into: *mut ibv_wc) -> c_int {
    // SAFETY: a queue of this library.
    let state = check!("ibv_poll_cq", negative, unsafe { find_of_this_process(cq) });
    let most = num_entries.max(0) as u32;
    let take = |completion| {
        // SAFETY: the caller's array has `num_entries` entries, and no more completions are polled.
        unsafe {
            *into = work_completion(&completion);
            into = into.add(1);
        }
    };
    if faults::is_announced(Verb::PollCq) {
        let check = || faults::announce(Verb::PollCq, state.object());
        return check!("ibv_poll_cq", negative, state.queue.poll_each_checked(most, check, take)) as c_int;
    }
    state.queue.poll_each(most, take) as c_int
}

pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: a queue of this library.
    let state = check!("ibv_req_notify_cq", code, unsafe { find_of_this_process(cq) });
    check!("ibv_req_notify_cq", code, faults::announce(Verb::ReqNotifyCq, state.object()));
    let notify = if solicited_only == 0 { CqNotify::NextCompletion } else { CqNotify::SolicitedOnly };
    state.queue.request_notification(notify);
    0
}
