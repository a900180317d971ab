//! Open devices.

use crate::abi::*;
use crate::completion_queue::Cq;
use crate::destroyed_context;
use crate::device::DeviceState;
use crate::errno::{self, Rejection};
use crate::object::{self, Handle};
use crate::queue_pair::Qp;
use crate::shared_receive::Srq;
use crate::{event_fd, faults};
use core::ffi::{c_int, c_void};
use parking_lot::Mutex;
use softhca::{DeviceAttributes, PortAttributes, Verb};
use std::collections::BTreeMap;

/// The state of an `ibv_context`.
pub struct ContextState {
    pub context: softhca::Context,
    pub device: &'static DeviceState,
    pub attributes: DeviceAttributes,
    pub port: PortAttributes,
    /// The objects that asynchronous events refer to, by number.
    pub objects: Mutex<ObjectTable>,
}

/// Objects by their HCA numbers.
#[derive(Default)]
pub struct ObjectTable {
    pub completion_queues: BTreeMap<u32, Handle<Cq>>,
    pub queue_pairs: BTreeMap<u32, Handle<Qp>>,
    pub shared_receive_queues: BTreeMap<u32, Handle<Srq>>,
}

object::kinds! {
    ContextState = verbs_context, "device context", |_| None;
}

/// A pointer to an open device, as programs pass it: null, the destroyed context, or a result of `ibv_open_device`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq)]
pub struct ContextHandle(*mut ibv_context);

// SAFETY: the state of a context is that of a Rust object that threads share.
unsafe impl Send for ContextHandle {}
// SAFETY: as above.
unsafe impl Sync for ContextHandle {}

impl ContextHandle {
    pub const NULL: ContextHandle = ContextHandle(core::ptr::null_mut());

    /// The handle of an object: programs hold a pointer into its structure.
    pub fn new(verbs: Handle<ContextState>) -> ContextHandle {
        ContextHandle(verbs.as_ptr().wrapping_byte_add(core::mem::offset_of!(verbs_context, context)).cast())
    }

    /// The context of destroyed objects.
    pub fn destroyed() -> ContextHandle {
        ContextHandle(destroyed_context::context())
    }

    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The state; `None` if the device is closed.
    pub fn get<'a>(self) -> Option<object::Found<'a, ContextState>> {
        if self.is_null() || self == ContextHandle::destroyed() {
            return None;
        }
        let verbs = self.0.wrapping_byte_sub(core::mem::offset_of!(verbs_context, context));
        // SAFETY: the pointer lies in an object of this kind.
        unsafe { Handle::from_ptr(verbs.cast()) }.get()
    }

    /// The state, or why it cannot be used.
    pub fn find<'a>(self) -> Result<object::Found<'a, ContextState>, Rejection> {
        self.get().ok_or_else(|| match self.is_null() {
            true => Rejection::invalid("the device context is null"),
            false => Rejection::invalid("the device is closed"),
        })
    }
}

pub extern "C" fn close_device(context: ContextHandle) -> c_int {
    errno::minus_one("ibv_close_device", || {
        let open = context.find()?;
        faults::announce(Verb::CloseDevice, None)?;
        let ibv_context { async_fd, cmd_fd, .. } = open.abi().context;
        let verbs = open.as_ptr();
        let state = open.destroy();
        // SAFETY: a closed context stays in memory. From now on its verbs fail.
        unsafe { verbs.write(destroyed_context::rejecting_context()) };
        state.ok_or_else(|| Rejection::invalid("the device is closed"))?;
        [async_fd, cmd_fd].into_iter().for_each(event_fd::close);
        Ok(())
    })
}

/// No file stands behind a context that another process could open.
pub extern "C" fn import_device(_: c_int) -> ContextHandle {
    Rejection::unsupported("a device of another process cannot be imported").code("ibv_import_device");
    ContextHandle::NULL
}

pub extern "C" fn import_none(_: *mut c_void, _: u32) -> *mut c_void {
    Rejection::unsupported("an object of another process cannot be imported").null("ibv_import_*")
}

pub extern "C" fn unimport(_: *mut c_void) {}
