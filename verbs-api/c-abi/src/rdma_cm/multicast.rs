//! Multicast groups.

use super::call::call;
use super::event;
use super::identifier::{CmIdState, find_address};
use crate::abi::*;
use crate::errno::Rejection;
use crate::object::Handle;
use core::ffi::{c_int, c_void};
use libc::sockaddr;
use softhca::cm::EventType;

/// # Safety
/// `group` is null or as long as its family requires.
pub unsafe extern "C" fn join_multicast(
    id: Handle<CmIdState>,
    group: *const sockaddr,
    program_context: *mut c_void,
) -> c_int {
    let join = |state: &CmIdState| {
        // SAFETY: the caller guarantees it.
        let group = unsafe { find_address(group) }?.ip();
        event::set_multicast_context(id, group, program_context);
        Ok(state.id().join_multicast(group)?)
    };
    call("rdma_join_multicast", id, join, Some(EventType::MulticastJoin))
}

pub extern "C" fn join_multicast_ex(
    id: Handle<CmIdState>,
    attr: Option<&rdma_cm_join_mc_attr_ex>,
    program_context: *mut c_void,
) -> c_int {
    /// Full membership: the only kind without a subnet manager.
    const FULL: u32 = 0;
    const VERB: &str = "rdma_join_multicast_ex";
    let Some(attr) = attr.filter(|attr| attr.comp_mask & 1 != 0) else {
        return Rejection::invalid("the attributes have no address").minus_one(VERB);
    };
    if attr.comp_mask & 2 != 0 && attr.join_flags != FULL {
        return Rejection::unsupported("only full members can join").minus_one(VERB);
    }
    // SAFETY: the caller's address.
    unsafe { join_multicast(id, attr.addr, program_context) }
}

/// # Safety
/// `group` is null or as long as its family requires.
pub unsafe extern "C" fn leave_multicast(id: Handle<CmIdState>, group: *const sockaddr) -> c_int {
    // SAFETY: the caller guarantees it.
    let group = unsafe { find_address(group) };
    call("rdma_leave_multicast", id, |state| Ok(state.id().leave_multicast(group?.ip())?), None)
}
