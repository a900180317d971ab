//! The context of destroyed objects: every verb fails.

use crate::abi::{ibv_context, ibv_context_ops, verbs_context};
use crate::errno::Rejection;
use core::ffi::{c_int, c_void};
use core::mem::{transmute, zeroed};
use std::cell::UnsafeCell;

/// Verbs that are called through a destroyed object, by the form of their result.
macro_rules! rejecting {
    ($($name:ident = $form:ident: $result:ty;)*) => {
        $(extern "C" fn $name() -> $result {
            let verb = concat!("ibv_", stringify!($name));
            Rejection::invalid("the object was destroyed, or the device is closed").$form(verb)
        })*
    };
}

rejecting! {
    query_port = code: c_int;
    query_device_ex = code: c_int;
    alloc_parent_domain = null: *mut c_void;
    dealloc_td = code: c_int;
    alloc_td = null: *mut c_void;
    create_cq_ex = null: *mut c_void;
    create_qp_ex = null: *mut c_void;
    get_srq_num = code: c_int;
    create_srq_ex = null: *mut c_void;
    open_xrcd = null: *mut c_void;
    close_xrcd = code: c_int;
    alloc_mw = null: *mut c_void;
    bind_mw = code: c_int;
    dealloc_mw = code: c_int;
    poll_cq = negative: c_int;
    req_notify_cq = code: c_int;
    post_srq_recv = code: c_int;
    post_send = code: c_int;
    post_recv = code: c_int;
}

/// Verbs that accept any arguments and fail.
#[allow(clippy::missing_transmute_annotations, reason = "the field says which pointer it is")]
const fn rejecting_verbs() -> verbs_context {
    // SAFETY: function pointers of the C convention; callees that read no arguments may be called with any, and all
    // results are an integer or a pointer in the first result register. Zero is valid for everything else.
    unsafe {
        verbs_context {
            query_port: transmute(query_port as extern "C" fn() -> c_int),
            query_device_ex: transmute(query_device_ex as extern "C" fn() -> c_int),
            alloc_parent_domain: transmute(alloc_parent_domain as extern "C" fn() -> *mut c_void),
            dealloc_td: transmute(dealloc_td as extern "C" fn() -> c_int),
            alloc_td: transmute(alloc_td as extern "C" fn() -> *mut c_void),
            create_cq_ex: transmute(create_cq_ex as extern "C" fn() -> *mut c_void),
            create_qp_ex: transmute(create_qp_ex as extern "C" fn() -> *mut c_void),
            get_srq_num: transmute(get_srq_num as extern "C" fn() -> c_int),
            create_srq_ex: transmute(create_srq_ex as extern "C" fn() -> *mut c_void),
            open_xrcd: transmute(open_xrcd as extern "C" fn() -> *mut c_void),
            close_xrcd: transmute(close_xrcd as extern "C" fn() -> c_int),
            sz: size_of::<verbs_context>(),
            context: ibv_context {
                device: None,
                ops: ibv_context_ops {
                    unused_0: [0; 7],
                    alloc_mw: transmute(alloc_mw as extern "C" fn() -> *mut c_void),
                    bind_mw: transmute(bind_mw as extern "C" fn() -> c_int),
                    dealloc_mw: transmute(dealloc_mw as extern "C" fn() -> c_int),
                    unused_1: 0,
                    poll_cq: transmute(poll_cq as extern "C" fn() -> c_int),
                    req_notify_cq: transmute(req_notify_cq as extern "C" fn() -> c_int),
                    unused_2: [0; 7],
                    post_srq_recv: transmute(post_srq_recv as extern "C" fn() -> c_int),
                    unused_3: [0; 4],
                    post_send: transmute(post_send as extern "C" fn() -> c_int),
                    post_recv: transmute(post_recv as extern "C" fn() -> c_int),
                    unused_4: [0; 5],
                },
                cmd_fd: -1,
                async_fd: -1,
                num_comp_vectors: 0,
                mutex: zeroed(),
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
