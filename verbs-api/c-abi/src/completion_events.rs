//! Completion events, which programs read from a channel and acknowledge.

use crate::channel::CompletionChannelState;
use crate::completion_queue::Cq;
use crate::errno;
use crate::object::Handle;
use crate::{event_fd, faults};
use core::ffi::{c_int, c_uint, c_void};
use core::mem::MaybeUninit;
use softhca::Verb;
use std::os::fd::BorrowedFd;

pub extern "C" fn get_cq_event(
    channel: Handle<CompletionChannelState>,
    cq: &mut MaybeUninit<Handle<Cq>>,
    cq_context: &mut MaybeUninit<*mut c_void>,
) -> c_int {
    errno::minus_one("ibv_get_cq_event", || {
        let channel = channel.find()?;
        channel.abi().context.find()?.context.check_process()?;
        faults::announce(Verb::GetCqEvent, None)?;
        let block = |descriptor: BorrowedFd<'_>| channel.channel.wait_readable(descriptor);
        let (handle, found) = event_fd::wait_with(channel.abi().fd, block, || {
            let queue = channel.channel.poll()?;
            // A queue on the channel is not destroyed yet: it is first removed from the channel, under this lock.
            let queues = channel.completion_queues.lock();
            let handle = *queues.get(&queue.handle())?;
            let found = handle.get()?;
            found.events.add();
            Some((handle, found))
        })?;
        cq.write(handle);
        cq_context.write(found.abi().cq_context);
        Ok(())
    })
}

pub extern "C" fn ack_cq_events(cq: Handle<Cq>, events: c_uint) {
    if let Some(cq) = cq.get() {
        cq.events.acknowledge(events);
        // The counter is only for programs that read it.
        cq.update(|abi| abi.comp_events_completed += events);
    }
}
