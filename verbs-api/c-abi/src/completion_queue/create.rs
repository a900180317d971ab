//! Creates completion queues.

use super::Cq;
use crate::abi::*;
use crate::channel::CompletionChannelState;
use crate::errno::{Rejection, check};
use crate::poll_cursor::PollCursor;
use crate::unacknowledged::Unacknowledged;
use crate::{context, extended_poll, object};
use core::ffi::{c_int, c_void};

/// The minimum size of a completion queue: HCAs round up, and programs that request one entry rely on it.
const MIN_CQE: u32 = 16;

/// Creates a queue of either kind.
///
/// # Safety
/// The pointers are objects of this library; `channel` may be null.
unsafe fn create(
    verb: &str,
    context: *mut ibv_context,
    cqe: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: u32,
) -> *mut ibv_cq_ex {
    // SAFETY: a context of this library.
    let open = check!(verb, null, unsafe { context::find(context) });
    let limit = open.attributes.limits.max_cqe;
    if cqe == 0 {
        return Rejection::invalid("cqe is 0").null(verb);
    }
    if cqe > limit {
        return Rejection::too_large("cqe", cqe, limit).null(verb);
    }
    if comp_vector != 0 {
        return Rejection::invalid(format!("comp_vector is {comp_vector}: the device has one, number 0"))
            .null(verb);
    }
    let cqe = cqe.max(MIN_CQE);
    // SAFETY: a channel of this library, or null.
    let channel_state = unsafe { object::state::<CompletionChannelState>(channel) };
    if channel_state.is_none() && !channel.is_null() {
        return Rejection::invalid("the completion channel was destroyed").null(verb);
    }
    let result = match channel_state {
        Some(channel_state) => open.context.create_completion_queue_with_channel(cqe, &channel_state.channel),
        None => open.context.create_completion_queue(cqe),
    };
    let queue = check!(verb, null, result);
    let number = queue.handle();
    let abi = extended_poll::new_cq_ex(context, channel, cq_context, number, cqe);
    let state = Cq {
        queue,
        events: Unacknowledged::default(),
        async_events: Unacknowledged::default(),
        polling: PollCursor::default(),
    };
    let cq = object::create(abi, state);
    open.objects.lock().completion_queues.insert(number, cq as usize);
    if let Some(channel_state) = channel_state {
        channel_state.completion_queues.lock().insert(number, cq as usize);
        // SAFETY: as above; the counter is only for programs that read it.
        unsafe { (*channel).refcnt += 1 };
    }
    cq
}

pub unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    if cqe < 0 || comp_vector < 0 {
        return Rejection::invalid("cqe or comp_vector is negative").null("ibv_create_cq");
    }
    // SAFETY: the caller guarantees it.
    unsafe { create("ibv_create_cq", context, cqe as u32, cq_context, channel, comp_vector as u32) }.cast()
}

pub unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    const FIELDS: u64 = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
    const MASK: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    // SAFETY: the caller's attributes.
    let attr = unsafe { &*attr };
    let has_flags = attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0;
    const VERB: &str = "ibv_create_cq_ex";
    let unknown = attr.comp_mask & !MASK;
    if unknown != 0 {
        return Rejection::invalid(format!("comp_mask has unknown bits {unknown:#x}")).null(VERB);
    }
    let unknown = attr.wc_flags & !FIELDS;
    if unknown != 0 {
        return Rejection::unsupported(format!("wc_flags {unknown:#x} are not supported")).null(VERB);
    }
    if has_flags && attr.flags & !FLAGS != 0 {
        return Rejection::unsupported(format!("flags {:#x} are not supported", attr.flags & !FLAGS))
            .null(VERB);
    }
    // SAFETY: the caller guarantees it.
    unsafe { create(VERB, context, attr.cqe, attr.cq_context, attr.channel, attr.comp_vector) }
}
