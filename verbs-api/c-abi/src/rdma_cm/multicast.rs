//! Multicast groups.

use super::call::call;
use super::event;
use super::identifier::find_address;
use crate::abi::*;
use crate::errno::{Rejection, check};
use core::ffi::{c_int, c_void};
use softhca::cm::EventType;

unsafe fn join(id: *mut rdma_cm_id, group: *mut libc::sockaddr, program_context: *mut c_void) -> c_int {
    // SAFETY: the caller's address.
    let group = check!("rdma_join_multicast", minus_one, unsafe { find_address(group) });
    event::set_multicast_context(id, group.ip(), program_context);
    // SAFETY: the caller guarantees it.
    unsafe {
        call(
            "rdma_join_multicast",
            id,
            |state| state.id().join_multicast(group.ip()),
            Some(EventType::MulticastJoin),
        )
    }
}

pub unsafe extern "C" fn join_multicast(
    id: *mut rdma_cm_id,
    group: *mut libc::sockaddr,
    program_context: *mut c_void,
) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { join(id, group, program_context) }
}

pub unsafe extern "C" fn join_multicast_ex(
    id: *mut rdma_cm_id,
    attr: *mut rdma_cm_join_mc_attr_ex,
    program_context: *mut c_void,
) -> c_int {
    /// Full membership: the only kind without a subnet manager.
    const FULL: u32 = 0;
    // SAFETY: the caller's attributes.
    let address = unsafe { attr.as_ref() }.filter(|attr| attr.comp_mask & 1 != 0);
    let Some(attr) = address else {
        return Rejection::invalid("the attributes have no address").minus_one("rdma_join_multicast_ex");
    };
    if attr.comp_mask & 2 != 0 && attr.join_flags != FULL {
        return Rejection::unsupported("only full members can join").minus_one("rdma_join_multicast_ex");
    }
    // SAFETY: the caller guarantees it.
    unsafe { join(id, attr.addr, program_context) }
}

pub unsafe extern "C" fn leave_multicast(id: *mut rdma_cm_id, group: *mut libc::sockaddr) -> c_int {
    // SAFETY: the caller's address.
    let group = check!("rdma_leave_multicast", minus_one, unsafe { find_address(group) });
    // SAFETY: the caller guarantees it.
    unsafe { call("rdma_leave_multicast", id, |state| state.id().leave_multicast(group.ip()), None) }
}
