//! Creates completion queues.

use super::Cq;
use crate::abi::*;
use crate::channel::CompletionChannelState;
use crate::context::ContextHandle;
use crate::errno::{self, Rejection};
use crate::extended_poll;
use crate::object::{self, Handle};
use crate::poll_cursor::PollCursor;
use crate::protection::check_mask;
use crate::unacknowledged::Unacknowledged;
use core::ffi::{c_int, c_void};

/// The minimum size of a completion queue: HCAs round up, and programs that request one entry rely on it.
const MIN_CQE: u32 = 16;

/// Creates a queue of either kind.
pub fn create(
    context: ContextHandle,
    cqe: u32,
    cq_context: *mut c_void,
    channel: Handle<CompletionChannelState>,
    comp_vector: u32,
) -> Result<Handle<Cq>, Rejection> {
    let open = context.find()?;
    if cqe == 0 {
        return Err(Rejection::invalid("cqe is 0"));
    }
    if comp_vector != 0 {
        let why = format!("comp_vector is {comp_vector}: the device has one, number 0");
        return Err(Rejection::invalid(why));
    }
    let cqe = cqe.max(MIN_CQE);
    let found = if channel.is_null() { None } else { Some(channel.find_on_data_path()?) };
    let queue = match &found {
        Some(channel) => open.context.create_completion_queue_with_channel(cqe, &channel.channel)?,
        None => open.context.create_completion_queue(cqe)?,
    };
    let number = queue.handle();
    let abi = extended_poll::new_cq_ex(context, channel, cq_context, number, cqe);
    let state = Cq {
        queue,
        events: Unacknowledged::default(),
        async_events: Unacknowledged::default(),
        polling: PollCursor::default(),
    };
    let cq = object::create(abi, state);
    open.objects.lock().completion_queues.insert(number, cq);
    if let Some(channel) = found {
        channel.completion_queues.lock().insert(number, cq);
        // The counter is only for programs that read it.
        channel.update(|abi| abi.refcnt += 1);
    }
    Ok(cq)
}

pub extern "C" fn create_cq(
    context: ContextHandle,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: Handle<CompletionChannelState>,
    comp_vector: c_int,
) -> Handle<Cq> {
    errno::handle("ibv_create_cq", || {
        if cqe < 0 || comp_vector < 0 {
            return Err(Rejection::invalid("cqe or comp_vector is negative"));
        }
        create(context, cqe as u32, cq_context, channel, comp_vector as u32)
    })
}

pub extern "C" fn create_cq_ex(context: ContextHandle, attr: &ibv_cq_init_attr_ex) -> Handle<Cq> {
    const FIELDS: u64 = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
    const MASK: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    errno::handle("ibv_create_cq_ex", || {
        check_mask(attr.comp_mask, MASK)?;
        let has_flags = attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0;
        let flags = if has_flags { attr.flags & !FLAGS } else { 0 };
        for (what, unknown) in [("wc_flags", attr.wc_flags & !FIELDS), ("flags", flags.into())] {
            if unknown != 0 {
                return Err(Rejection::unsupported(format!("{what} {unknown:#x} are not supported")));
            }
        }
        create(context, attr.cqe, attr.cq_context, attr.channel, attr.comp_vector)
    })
}
