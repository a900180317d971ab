//! Open devices.

use crate::abi::*;
use crate::device::DeviceState;
use crate::errno::{Rejection, check};
use crate::{destroyed_context, event_fd, faults, object};
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
    pub completion_queues: BTreeMap<u32, usize>,
    pub queue_pairs: BTreeMap<u32, usize>,
    pub shared_receive_queues: BTreeMap<u32, usize>,
}

object::kinds! {
    ContextState = verbs_context, "device context", |_| None;
}

/// The start of a context's object.
fn verbs_context_of(context: *mut ibv_context) -> *mut verbs_context {
    if context.is_null() {
        return core::ptr::null_mut();
    }
    context.wrapping_byte_sub(core::mem::offset_of!(verbs_context, context)).cast()
}

/// The state of a context; `None` if it is closed.
///
/// # Safety
/// `context` is null, the destroyed context, or a result of `ibv_open_device`.
pub unsafe fn of<'a>(context: *mut ibv_context) -> Option<&'a ContextState> {
    if context == destroyed_context::context() {
        return None;
    }
    // SAFETY: the caller guarantees it.
    unsafe { object::state::<ContextState>(verbs_context_of(context)) }
}

/// The state of a context, or why it cannot be used.
///
/// # Safety
/// As [`of`].
pub unsafe fn find<'a>(context: *mut ibv_context) -> Result<&'a ContextState, Rejection> {
    // SAFETY: the caller guarantees it.
    unsafe { of(context) }.ok_or_else(|| match context.is_null() {
        true => Rejection::invalid("the device context is null"),
        false => Rejection::invalid("the device is closed"),
    })
}

pub unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    const VERB: &str = "ibv_close_device";
    // SAFETY: a context of this library, as the caller says.
    check!(VERB, minus_one, unsafe { find(context) });
    check!(VERB, minus_one, faults::announce(Verb::CloseDevice, None));
    let verbs = verbs_context_of(context);
    // SAFETY: the context is open, so it exists.
    let descriptors = unsafe { [(*context).async_fd, (*context).cmd_fd] };
    // SAFETY: as above; from now on the verbs of the context fail.
    let Some(open) = (unsafe {
        let open = object::destroy::<ContextState>(verbs);
        verbs.write(destroyed_context::rejecting_context());
        open
    }) else {
        return Rejection::invalid("the device is closed").minus_one(VERB);
    };
    descriptors.into_iter().for_each(event_fd::close);
    drop(open);
    0
}

/// No file stands behind a context that another process could open.
pub unsafe extern "C" fn import_device(_: c_int) -> *mut ibv_context {
    Rejection::unsupported("a device of another process cannot be imported").null("ibv_import_device")
}

pub unsafe extern "C" fn import_none(_: *mut c_void, _: u32) -> *mut c_void {
    Rejection::unsupported("an object of another process cannot be imported").null("ibv_import_*")
}

pub unsafe extern "C" fn unimport(_: *mut c_void) {}
