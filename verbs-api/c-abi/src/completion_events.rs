//! Completion events, which programs read from a channel and acknowledge.

use crate::abi::*;
use crate::channel::CompletionChannelState;
use crate::completion_queue::Cq;
use crate::errno::check;
use crate::faults;
use crate::{context, event_fd, object};
use core::ffi::{c_int, c_uint, c_void};
use softhca::Verb;
use std::os::fd::BorrowedFd;

pub unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    const VERB: &str = "ibv_get_cq_event";
    // SAFETY: a channel of this library.
    let state = check!(VERB, minus_one, unsafe { object::find::<CompletionChannelState>(channel) });
    // SAFETY: as above.
    let fd = unsafe { (*channel).fd };
    // SAFETY: a channel of ours has a context of this library.
    let open = check!(VERB, minus_one, unsafe { context::find((*channel).context) });
    check!(VERB, minus_one, open.context.check_process());
    check!(VERB, minus_one, faults::announce(Verb::GetCqEvent, None));
    let block = |descriptor: BorrowedFd<'_>| state.channel.wait_readable(descriptor);
    let found = event_fd::wait_with(fd, block, || {
        let queue = state.channel.poll()?;
        let queues = state.completion_queues.lock();
        let found = *queues.get(&queue.handle())? as *mut ibv_cq;
        // SAFETY: a queue on the channel is not destroyed yet: it is first removed from the channel, under this lock.
        unsafe { object::state::<Cq>(found.cast()) }?.events.add();
        Some(found)
    });
    match found {
        Ok(found) => {
            // SAFETY: valid pointers of the caller; the unacknowledged event keeps the queue alive.
            unsafe {
                *cq = found;
                *cq_context = (*found).cq_context;
            }
            0
        }
        Err(rejection) => rejection.minus_one(VERB),
    }
}

pub unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, events: c_uint) {
    // SAFETY: a queue of this library.
    if let Some(state) = unsafe { object::state::<Cq>(cq.cast()) } {
        state.events.acknowledge(events);
        // SAFETY: as above; the counter is only for programs that read it.
        unsafe { (*cq).comp_events_completed += events };
    }
}
