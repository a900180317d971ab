//! Completion queues, and the conversion of completions.

pub mod create;

use crate::abi::*;
use crate::errno::{self, Rejection};
use crate::faults;
use crate::object::{self, Found, Handle};
use crate::poll_cursor::PollCursor;
use crate::unacknowledged::Unacknowledged;
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

/// Finds a completion queue to poll, unless it belongs to the process that this one was forked from.
#[inline]
pub fn find_of_this_process<'a>(cq: Handle<Cq>) -> Result<Found<'a, Cq>, Rejection> {
    let cq = cq.find_on_data_path()?;
    cq.queue.check_process()?;
    Ok(cq)
}

pub extern "C" fn resize_cq(cq: Handle<Cq>, cqe: c_int) -> c_int {
    errno::code("ibv_resize_cq", || {
        let cq = cq.find()?;
        if cqe <= 0 {
            return Err(Rejection::invalid(format!("cqe is {cqe}")));
        }
        cq.queue.resize(cqe as u32)?;
        cq.update(|abi| abi.cqe = cqe);
        Ok(())
    })
}

pub extern "C" fn destroy_cq(cq: Handle<Cq>) -> c_int {
    errno::code("ibv_destroy_cq", || {
        let cq = cq.find()?;
        faults::announce(Verb::DestroyCq, cq.object())?;
        if cq.queue.is_in_use() {
            let why = "queue pairs or shared receive queues use the completion queue: destroy them first";
            return Err(Rejection::busy(why));
        }
        let number = cq.queue.handle();
        if let Some(channel) = cq.abi().channel.get() {
            channel.completion_queues.lock().remove(&number);
            channel.update(|abi| abi.refcnt -= 1);
        }
        if let Some(open) = cq.abi().context.get() {
            open.objects.lock().completion_queues.remove(&number);
        }
        cq.events.wait();
        cq.async_events.wait();
        cq.destroy();
        Ok(())
    })
}

pub fn wc_opcode(operation: CompletionOpcode) -> c_int {
    match operation {
        CompletionOpcode::Receive => IBV_WC_RECV,
        CompletionOpcode::ReceiveWriteWithImm => IBV_WC_RECV_RDMA_WITH_IMM,
        // The other opcodes have the numbers of the headers.
        operation => operation as c_int,
    }
}

/// The flags of a completion. As ibv_poll_cq(3) says, only datagrams have IBV_WC_GRH, unless the profile is that of a card that differs.
pub fn wc_flags(completion: &Completion) -> u32 {
    let bit_of = |flag, bit| if completion.flags.contains(flag) { bit } else { 0 };
    bit_of(CompletionFlags::GRH, IBV_WC_GRH)
        | bit_of(CompletionFlags::IMMEDIATE, IBV_WC_WITH_IMM)
        | bit_of(CompletionFlags::INVALIDATED, IBV_WC_WITH_INV)
}

/// Immediate data in network byte order, or the invalidated rkey in host byte order.
pub fn wc_imm_data(completion: &Completion) -> u32 {
    if completion.flags.contains(CompletionFlags::INVALIDATED) {
        completion.imm_data
    } else {
        completion.imm_data.to_be()
    }
}

/// The service level of an InfiniBand datagram. A RoCE packet has none. As on ConnectX HCAs, the field reports the encapsulation of a datagram, which
/// UCX reads: UDP, and IPv6 or IPv4.
pub fn wc_sl(completion: &Completion) -> u8 {
    const UDP: u8 = 8;
    match completion.flags {
        _ if completion.route.slid != 0 => completion.service_level,
        flags if !flags.contains(CompletionFlags::GRH) => 0,
        flags if flags.contains(CompletionFlags::IPV4) => UDP | 2,
        _ => UDP | 1,
    }
}

#[inline]
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
        slid: completion.route.slid,
        sl: wc_sl(completion),
        dlid_path_bits: completion.route.dlid_path_bits,
    }
}

pub extern "C" fn poll_cq(cq: Handle<Cq>, num_entries: c_int, into: *mut ibv_wc) -> c_int {
    match cq.get() {
        Some(cq) if cq.queue.is_of_this_process() && !faults::is_announced(Verb::PollCq) => {
            // Most polls of a program that waits.
            if cq.queue.is_idle() { 0 } else { poll_completions(&cq.queue, num_entries, into) }
        }
        _ => poll_checked(cq, num_entries, into),
    }
}

#[inline(never)]
fn poll_completions(queue: &CompletionQueue, num_entries: c_int, into: *mut ibv_wc) -> c_int {
    // SAFETY: the caller's array.
    queue.poll_each(num_entries.max(0) as u32, unsafe { write_to(into) }) as c_int
}

/// Writes completions to an array.
///
/// # Safety
/// The array has room for all of them.
unsafe fn write_to(mut into: *mut ibv_wc) -> impl FnMut(Completion) {
    move |completion| {
        // SAFETY: the caller guarantees it.
        unsafe {
            *into = work_completion(&completion);
            into = into.add(1);
        }
    }
}

/// Polls with the checks and the faults of a call.
#[cold]
fn poll_checked(cq: Handle<Cq>, num_entries: c_int, into: *mut ibv_wc) -> c_int {
    errno::negative("ibv_poll_cq", || {
        let cq = find_of_this_process(cq)?;
        let most = num_entries.max(0) as u32;
        // SAFETY: the caller's array has `num_entries` entries, and no more completions are polled.
        let take = unsafe { write_to(into) };
        Ok(match faults::is_announced(Verb::PollCq) {
            true => {
                let check = || faults::announce(Verb::PollCq, cq.object());
                cq.queue.poll_each_checked(most, check, take)? as c_int
            }
            false => cq.queue.poll_each(most, take) as c_int,
        })
    })
}

pub extern "C" fn req_notify_cq(cq: Handle<Cq>, solicited_only: c_int) -> c_int {
    errno::code("ibv_req_notify_cq", || {
        let cq = find_of_this_process(cq)?;
        faults::announce(Verb::ReqNotifyCq, cq.object())?;
        let notify = if solicited_only == 0 { CqNotify::NextCompletion } else { CqNotify::SolicitedOnly };
        cq.queue.request_notification(notify);
        Ok(())
    })
}
