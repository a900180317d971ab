//! Completion channels, and the events that programs read and acknowledge.

use crate::abi::*;
use crate::completion_queue::Cq;
use crate::errno::{Rejection, check};
use crate::faults;
use crate::{context, event_fd, object};
use core::ffi::{c_int, c_uint, c_void};
use parking_lot::{Condvar, Mutex};
use softhca::CompletionChannel;
use softhca::Verb;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

/// The state of an `ibv_comp_channel`.
pub struct CompletionChannelState {
    pub channel: CompletionChannel,
    /// Its completion queues, by number.
    pub completion_queues: Mutex<BTreeMap<u32, usize>>,
}

object::kinds! {
    CompletionChannelState = ibv_comp_channel, "completion channel", |channel| Some((channel.context, 0));
}

/// Events that the program has read and not yet acknowledged. The object of an event is not destroyed before that.
#[derive(Default)]
pub struct Unacknowledged {
    count: Mutex<u32>,
    changed: Condvar,
}

impl Unacknowledged {
    pub fn add(&self) {
        *self.count.lock() += 1;
    }

    pub fn acknowledge(&self, events: u32) {
        let mut count = self.count.lock();
        *count = count.saturating_sub(events);
        self.changed.notify_all();
    }

    /// Waits until all events are acknowledged.
    pub fn wait(&self) {
        let mut count = self.count.lock();
        while *count > 0 {
            self.changed.wait(&mut count);
        }
    }
}

pub unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    const VERB: &str = "ibv_create_comp_channel";
    // SAFETY: a context of this library.
    let open = check!(VERB, null, unsafe { context::find(context) });
    check!(VERB, null, faults::announce(Verb::CreateCompChannel, None));
    let channel = check!(VERB, null, open.context.create_completion_channel());
    let fd = check!(VERB, null, event_fd::create(&std::os::fd::AsFd::as_fd(&channel)));
    object::create(
        ibv_comp_channel { context, fd, refcnt: 0 },
        CompletionChannelState { channel, completion_queues: Mutex::default() },
    )
}

pub unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    const VERB: &str = "ibv_destroy_comp_channel";
    // SAFETY: a channel of this library.
    let state = check!(VERB, code, unsafe { object::find::<CompletionChannelState>(channel) });
    let users = state.completion_queues.lock().len();
    if users > 0 {
        return Rejection::busy(format!("{users} completion queues use the channel")).code(VERB);
    }
    // SAFETY: as above.
    let fd = unsafe { (*channel).fd };
    // SAFETY: as above.
    drop(unsafe { object::destroy::<CompletionChannelState>(channel) });
    event_fd::close(fd);
    0
}

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
