//! The context of destroyed objects: every verb fails.

use crate::abi::{ibv_context, ibv_context_ops, verbs_context};
use crate::errno;
use core::ffi::{c_int, c_void};
use core::mem::{transmute, zeroed};
use std::cell::UnsafeCell;

unsafe extern "C" fn code() -> c_int {
    libc::EINVAL
}

unsafe extern "C" fn minus() -> c_int {
    -libc::EINVAL
}

unsafe extern "C" fn null() -> *mut c_void {
    errno::null(libc::EINVAL)
}

/// Verbs that accept any arguments and fail.
#[allow(clippy::missing_transmute_annotations, reason = "the field says which pointer it is")]
const fn rejecting_verbs() -> verbs_context {
    const CODE: unsafe extern "C" fn() -> c_int = code;
    const MINUS: unsafe extern "C" fn() -> c_int = minus;
    const NULL: unsafe extern "C" fn() -> *mut c_void = null;
    // SAFETY: function pointers of the C convention; callees that read no arguments may be called with any, and all
    // results are an integer or a pointer in the first result register. Zero is valid for everything else.
    unsafe {
        verbs_context {
            query_port: transmute(CODE),
            query_device_ex: transmute(CODE),
            alloc_parent_domain: transmute(NULL),
            dealloc_td: transmute(CODE),
            alloc_td: transmute(NULL),
            create_cq_ex: transmute(NULL),
            create_qp_ex: transmute(NULL),
            get_srq_num: transmute(CODE),
            create_srq_ex: transmute(NULL),
            open_xrcd: transmute(NULL),
            close_xrcd: transmute(CODE),
            sz: size_of::<verbs_context>(),
            context: ibv_context {
                device: core::ptr::null_mut(),
                ops: ibv_context_ops {
                    unused_0: [0; 7],
                    alloc_mw: transmute(NULL),
                    bind_mw: transmute(CODE),
                    dealloc_mw: transmute(CODE),
                    unused_1: 0,
                    poll_cq: transmute(MINUS),
                    req_notify_cq: transmute(CODE),
                    unused_2: [0; 7],
                    post_srq_recv: transmute(CODE),
                    unused_3: [0; 4],
                    post_send: transmute(CODE),
                    post_recv: transmute(CODE),
                    unused_4: [0; 5],
                },
                cmd_fd: -1,
                async_fd: -1,
                num_comp_vectors: 0,
                mutex: [0; 5],
                abi_compat: usize::MAX as *mut c_void,
            },
            advise_mr: zeroed(),
            alloc_null_mr: zeroed(),
            read_counters: zeroed(),
            attach_counters_point_flow: zeroed(),
            create_counters: zeroed(),
            destroy_counters: zeroed(),
            reg_dm_mr: zeroed(),
            alloc_dm: zeroed(),
            free_dm: zeroed(),
            modify_flow_action_esp: zeroed(),
            destroy_flow_action: zeroed(),
            create_flow_action_esp: zeroed(),
            modify_qp_rate_limit: zeroed(),
            modify_cq: zeroed(),
            post_srq_ops: zeroed(),
            destroy_rwq_ind_table: zeroed(),
            create_rwq_ind_table: zeroed(),
            destroy_wq: zeroed(),
            modify_wq: zeroed(),
            create_wq: zeroed(),
            query_rt_values: zeroed(),
            private: zeroed(),
            ibv_destroy_flow: zeroed(),
            placeholder_2: zeroed(),
            ibv_create_flow: zeroed(),
            placeholder_1: zeroed(),
            open_qp: zeroed(),
            placeholder_3: 0,
        }
    }
}

struct DestroyedContext(UnsafeCell<verbs_context>);

// SAFETY: it is never written.
unsafe impl Sync for DestroyedContext {}

static DESTROYED: DestroyedContext = DestroyedContext(UnsafeCell::new(rejecting_verbs()));

/// The context that destroyed objects point to.
pub fn context() -> *mut ibv_context {
    // SAFETY: only the address of a field is taken.
    unsafe { &raw mut (*DESTROYED.0.get()).context }
}

/// A context whose verbs all fail, to be filled in.
pub fn rejecting_context() -> verbs_context {
    rejecting_verbs()
}
