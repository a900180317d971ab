//! Completion channels.

use crate::abi::*;
use crate::errno::{Rejection, check};
use crate::faults;
use crate::{context, event_fd, object};
use core::ffi::c_int;
use parking_lot::Mutex;
use softhca::CompletionChannel;
use softhca::Verb;
use std::collections::BTreeMap;

/// The state of an `ibv_comp_channel`.
pub struct CompletionChannelState {
    pub channel: CompletionChannel,
    /// Its completion queues, by number.
    pub completion_queues: Mutex<BTreeMap<u32, usize>>,
}

object::kinds! {
    CompletionChannelState = ibv_comp_channel, "completion channel", |channel| Some((channel.context, 0));
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
