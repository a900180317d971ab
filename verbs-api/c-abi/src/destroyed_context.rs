//! The context of destroyed objects: every verb fails.

use crate::abi::{ibv_context, verbs_context};
use crate::errno::Rejection;
use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, transmute};
use std::cell::UnsafeCell;

/// Verbs that are called through a destroyed object, by their table and the form of their result.
macro_rules! rejecting {
    (
        verbs_context { $($verb:ident = $verb_form:ident: $verb_result:ty;)* }
        ibv_context_ops { $($op:ident = $op_form:ident: $op_result:ty;)* }
    ) => {
        rejecting! { $($verb = $verb_form: $verb_result;)* $($op = $op_form: $op_result;)* }

        /// A context whose verbs accept any arguments and fail. Other fields are zero: absent verbs, no device.
        #[allow(clippy::missing_transmute_annotations, reason = "the field says which pointer it is")]
        pub const fn rejecting_context() -> verbs_context {
            let mut verbs = MaybeUninit::<verbs_context>::zeroed();
            let fields = verbs.as_mut_ptr();
            // SAFETY: function pointers of the C convention; callees that read no arguments may be called with any, and
            // all results are an integer or a pointer in the first result register. They are the only fields for which
            // zero is not valid.
            unsafe {
                $((&raw mut (*fields).$verb).write(transmute($verb as extern "C" fn() -> $verb_result));)*
                $((&raw mut (*fields).context.ops.$op).write(transmute($op as extern "C" fn() -> $op_result));)*
                (*fields).sz = size_of::<verbs_context>();
                ((*fields).context.cmd_fd, (*fields).context.async_fd) = (-1, -1);
                (*fields).context.abi_compat = usize::MAX as *mut c_void;
                verbs.assume_init()
            }
        }
    };
    ($($name:ident = $form:ident: $result:ty;)*) => {
        $(extern "C" fn $name() -> $result {
            let verb = concat!("ibv_", stringify!($name));
            Rejection::invalid("the object was destroyed, or the device is closed").$form(verb)
        })*
    };
}

rejecting! {
    verbs_context {
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
    }
    ibv_context_ops {
        alloc_mw = null: *mut c_void;
        bind_mw = code: c_int;
        dealloc_mw = code: c_int;
        poll_cq = negative: c_int;
        req_notify_cq = code: c_int;
        post_srq_recv = code: c_int;
        post_send = code: c_int;
        post_recv = code: c_int;
    }
}

struct DestroyedContext(UnsafeCell<verbs_context>);

// SAFETY: it is never written.
unsafe impl Sync for DestroyedContext {}

static DESTROYED: DestroyedContext = DestroyedContext(UnsafeCell::new(rejecting_context()));

/// The context that destroyed objects point to.
pub fn context() -> *mut ibv_context {
    // SAFETY: only the address of a field is taken.
    unsafe { &raw mut (*DESTROYED.0.get()).context }
}
