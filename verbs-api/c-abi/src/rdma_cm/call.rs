//! Calls on identifiers. On a synchronous identifier they wait for their event.

use super::event::{ack_pending_event, wait_for_event};
use super::identifier::{
    CmIdState, EventChannelState, destroy_event_channel, find_address, new_event_channel, update_qp_state,
    update_route,
};
use super::lookup::socket_address;
use crate::errno::{self, Rejection};
use crate::faults;
use crate::object::Handle;
use core::ffi::c_int;
use libc::sockaddr;
use softhca::cm::EventType;
use softhca::{Resource, Verb};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Executes a call, writes its changes to the program's structure, and waits for the event of a synchronous
/// identifier.
fn execute(
    id: Handle<CmIdState>,
    act: impl FnOnce(&CmIdState) -> Result<(), Rejection>,
    wait_for: Option<EventType>,
) -> Result<(), Rejection> {
    let state = id.find()?;
    act(&state)?;
    update_route(id);
    update_qp_state(id);
    match wait_for {
        Some(kind) if state.is_blocking() => wait_for_event(id, kind),
        _ => Ok(()),
    }
}

/// A call of the C interface.
pub(super) fn call(
    name: &str,
    id: Handle<CmIdState>,
    act: impl FnOnce(&CmIdState) -> Result<(), Rejection>,
    wait_for: Option<EventType>,
) -> c_int {
    errno::minus_one(name, || execute(id, act, wait_for))
}

/// # Safety
/// `address` is null or as long as its family requires.
pub(super) unsafe fn bind(id: Handle<CmIdState>, address: *const sockaddr) -> Result<(), Rejection> {
    // SAFETY: the caller guarantees it.
    let address = unsafe { find_address(address) }?;
    execute(id, |state| Ok(state.bind(address)?), None)
}

/// # Safety
/// As [`bind`].
pub unsafe extern "C" fn bind_addr(id: Handle<CmIdState>, address: *const sockaddr) -> c_int {
    // SAFETY: the caller guarantees it.
    errno::minus_one("rdma_bind_addr", || unsafe { bind(id, address) })
}

/// # Safety
/// The addresses are null or as long as their families require.
pub(super) unsafe fn resolve(
    id: Handle<CmIdState>,
    source: *const sockaddr,
    destination: *const sockaddr,
) -> Result<(), Rejection> {
    // SAFETY: the caller guarantees it.
    let (source, destination) = unsafe { (socket_address(source), find_address(destination)?) };
    let act = |state: &CmIdState| Ok(state.resolve(source, destination)?);
    execute(id, act, Some(EventType::AddressResolved))
}

/// # Safety
/// As [`resolve`].
pub unsafe extern "C" fn resolve_addr(
    id: Handle<CmIdState>,
    source: *const sockaddr,
    destination: *const sockaddr,
    _timeout: c_int,
) -> c_int {
    // SAFETY: the caller guarantees it.
    errno::minus_one("rdma_resolve_addr", || unsafe { resolve(id, source, destination) })
}

pub(super) fn find_route(id: Handle<CmIdState>) -> Result<(), Rejection> {
    execute(id, |state| Ok(state.id().resolve_route()?), Some(EventType::RouteResolved))
}

pub extern "C" fn resolve_route(id: Handle<CmIdState>, _timeout: c_int) -> c_int {
    errno::minus_one("rdma_resolve_route", || find_route(id))
}

pub extern "C" fn listen(id: Handle<CmIdState>, backlog: c_int) -> c_int {
    call("rdma_listen", id, |state| Ok(state.listen(backlog.max(0) as u32)?), None)
}

pub extern "C" fn destroy_id(id: Handle<CmIdState>) -> c_int {
    errno::minus_one("rdma_destroy_id", || {
        let state = id.find()?;
        faults::announce(Verb::RdmaDestroyId, Some((Resource::CmIdentifier, state.id().handle())))?;
        ack_pending_event(&state);
        state.remove_objects();
        state.events.wait();
        let own_channel = state.is_blocking().then_some(state.abi().channel);
        state.destroy();
        if let Some(channel) = own_channel {
            destroy_event_channel(channel);
        }
        Ok(())
    })
}

/// Sends events to another channel from now on. Without a channel, calls wait for completion, as for an identifier
/// created without one; with one, they do not.
pub extern "C" fn migrate_id(id: Handle<CmIdState>, channel: Handle<Arc<EventChannelState>>) -> c_int {
    errno::minus_one("rdma_migrate_id", || migrate(id, channel))
}

pub(super) fn migrate(
    id: Handle<CmIdState>,
    channel: Handle<Arc<EventChannelState>>,
) -> Result<(), Rejection> {
    let state = id.find()?;
    let becomes_synchronous = channel.is_null();
    let channel = if becomes_synchronous { new_event_channel()? } else { channel };
    let to = channel.find()?;
    ack_pending_event(&state);
    let result = state.migrate(&to);
    let (unused, was_synchronous) = match result {
        Ok(()) => {
            let before = state.abi().channel;
            state.update(|abi| abi.channel = channel);
            (before, state.is_synchronous.swap(becomes_synchronous, Ordering::Relaxed))
        }
        Err(_) => (channel, becomes_synchronous),
    };
    if was_synchronous {
        // It was made for the identifier, and nothing uses it any more.
        destroy_event_channel(unused);
    }
    Ok(result?)
}
