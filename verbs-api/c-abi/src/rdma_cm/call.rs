//! Calls on identifiers. On a synchronous identifier they wait for their event.

use super::devices::return_code;
use super::event::{ack_pending_event, wait_for_event};
use super::identifier::{
    CmIdState, EventChannelState, create_event_channel, destroy_event_channel, find, find_address,
    update_qp_state, update_route,
};
use super::lookup::socket_address;
use crate::abi::*;
use crate::errno::{check, keep};
use crate::{faults, object};
use core::ffi::c_int;
use softhca::cm::EventType;
use softhca::{Error, Resource, Verb};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Executes a call, writes its changes to the program's structure, and waits for the event of a synchronous
/// identifier.
pub(super) unsafe fn call(
    name: &str,
    id: *mut rdma_cm_id,
    act: impl FnOnce(&CmIdState) -> Result<(), Error>,
    wait_for: Option<EventType>,
) -> c_int {
    // SAFETY: the caller guarantees it.
    let state = check!(name, minus_one, unsafe { find(id) });
    let code = return_code(name, act(state));
    if code != 0 {
        return code;
    }
    // SAFETY: the caller guarantees it.
    unsafe {
        update_route(id);
        update_qp_state(id);
        match wait_for {
            Some(kind) if state.is_blocking() => wait_for_event(id, kind),
            _ => 0,
        }
    }
}

pub unsafe extern "C" fn bind_addr(id: *mut rdma_cm_id, address: *mut libc::sockaddr) -> c_int {
    // SAFETY: the caller's address.
    let address = check!("rdma_bind_addr", minus_one, unsafe { find_address(address) });
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_bind_addr", id, |state| state.bind(address), None) }
}

pub unsafe extern "C" fn resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut libc::sockaddr,
    destination: *mut libc::sockaddr,
    _timeout: c_int,
) -> c_int {
    // SAFETY: the caller's addresses.
    let (source, destination) = unsafe { (socket_address(source), find_address(destination)) };
    let destination = check!("rdma_resolve_addr", minus_one, destination);
    let act = |state: &CmIdState| state.resolve(source, destination);
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_resolve_addr", id, act, Some(EventType::AddressResolved)) }
}

pub unsafe extern "C" fn resolve_route(id: *mut rdma_cm_id, _timeout: c_int) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe {
        call("rdma_resolve_route", id, |state| state.id().resolve_route(), Some(EventType::RouteResolved))
    }
}

pub unsafe extern "C" fn listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_listen", id, |state| state.listen(backlog.max(0) as u32), None) }
}

pub unsafe extern "C" fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: an identifier of this library.
    let state = check!("rdma_destroy_id", minus_one, unsafe { find(id) });
    let object = Some((Resource::CmIdentifier, state.id().handle()));
    check!("rdma_destroy_id", minus_one, faults::announce(Verb::RdmaDestroyId, object));
    // SAFETY: as above.
    unsafe { ack_pending_event(id) };
    state.remove_objects();
    state.events.wait();
    let own = state.is_blocking();
    // SAFETY: as above.
    let channel = unsafe { (*id).channel };
    // SAFETY: as above.
    drop(unsafe { object::destroy::<CmIdState>(id) });
    if own {
        // SAFETY: it was made with the identifier.
        unsafe { destroy_event_channel(channel) };
    }
    0
}

/// Sends events to another channel from now on. Without a channel, calls wait for completion, as for an identifier
/// created without one; with one, they do not.
pub unsafe extern "C" fn migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    const VERB: &str = "rdma_migrate_id";
    // SAFETY: an identifier of this library.
    let state = check!(VERB, minus_one, unsafe { find(id) });
    let becomes_synchronous = channel.is_null();
    // SAFETY: the call creates its own channel.
    let channel = if becomes_synchronous { unsafe { create_event_channel() } } else { channel };
    if channel.is_null() {
        return -1;
    }
    // SAFETY: a channel of this library.
    let to = check!(VERB, minus_one, unsafe { object::find::<Arc<EventChannelState>>(channel) });
    // SAFETY: an identifier of this library.
    unsafe { ack_pending_event(id) };
    let code = return_code(VERB, state.migrate(to));
    // SAFETY: as above.
    let before = unsafe { (*id).channel };
    let (unused, was_synchronous) = match code {
        0 => {
            // SAFETY: as above.
            unsafe { (*id).channel = channel };
            (before, state.is_synchronous.swap(becomes_synchronous, Ordering::Relaxed))
        }
        _ => (channel, becomes_synchronous),
    };
    if was_synchronous {
        // SAFETY: it was made for the identifier, and nothing uses it any more.
        keep(|| unsafe { destroy_event_channel(unused) });
    }
    code
}
