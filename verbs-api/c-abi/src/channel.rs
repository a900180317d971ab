//! Completion channels.

use crate::abi::*;
use crate::completion_queue::Cq;
use crate::context::ContextHandle;
use crate::errno::{self, Rejection};
use crate::object::{self, Handle};
use crate::{event_fd, faults};
use core::ffi::c_int;
use parking_lot::Mutex;
use softhca::CompletionChannel;
use softhca::Verb;
use std::collections::BTreeMap;

/// The state of an `ibv_comp_channel`.
pub struct CompletionChannelState {
    pub channel: CompletionChannel,
    /// Its completion queues, by number.
    pub completion_queues: Mutex<BTreeMap<u32, Handle<Cq>>>,
}

object::kinds! {
    CompletionChannelState = ibv_comp_channel, "completion channel", |channel| Some((channel.context, 0));
}

pub fn create(context: ContextHandle) -> Result<Handle<CompletionChannelState>, Rejection> {
    let open = context.find()?;
    faults::announce(Verb::CreateCompChannel, None)?;
    let channel = open.context.create_completion_channel()?;
    let fd = event_fd::create(&std::os::fd::AsFd::as_fd(&channel))?;
    let state = CompletionChannelState { channel, completion_queues: Mutex::default() };
    Ok(object::create(ibv_comp_channel { context, fd, refcnt: 0 }, state))
}

pub extern "C" fn create_comp_channel(context: ContextHandle) -> Handle<CompletionChannelState> {
    errno::handle("ibv_create_comp_channel", || create(context))
}

pub extern "C" fn destroy_comp_channel(channel: Handle<CompletionChannelState>) -> c_int {
    errno::code("ibv_destroy_comp_channel", || {
        let channel = channel.find()?;
        let users = channel.completion_queues.lock().len();
        if users > 0 {
            return Err(Rejection::busy(format!("{users} completion queues use the channel")));
        }
        let fd = channel.abi().fd;
        channel.destroy();
        event_fd::close(fd);
        Ok(())
    })
}
