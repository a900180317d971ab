//! Opening and closing a device.

use crate::abi::*;
use crate::device::DeviceState;
use crate::errno::{Rejection, check};
use crate::{
    completion_queue, destroyed_context, device, event_fd, extended_poll, faults, object, post, protection,
    query, queue_pair, shared_receive,
};
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
/// `context` is null, the destroyed context, or a result of [`open_device`].
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

fn fill_verbs(device: *mut ibv_device, command: c_int, events: c_int) -> verbs_context {
    let mut verbs = destroyed_context::rejecting_context();
    verbs.query_port = query::query_port_sized;
    verbs.query_device_ex = query::query_device_ex;
    verbs.alloc_parent_domain = protection::alloc_parent_domain;
    verbs.alloc_td = protection::alloc_td;
    verbs.dealloc_td = protection::dealloc_td;
    verbs.create_cq_ex = extended_poll::create_cq_ex;
    verbs.create_qp_ex = queue_pair::create_qp_ex;
    verbs.get_srq_num = shared_receive::get_srq_num;
    verbs.create_srq_ex = shared_receive::create_srq_ex;
    verbs.open_xrcd = shared_receive::open_xrcd;
    verbs.close_xrcd = shared_receive::close_xrcd;
    verbs.context.device = device;
    verbs.context.async_fd = events;
    verbs.context.cmd_fd = command;
    verbs.context.num_comp_vectors = 1;
    let ops = &mut verbs.context.ops;
    ops.alloc_mw = protection::alloc_mw;
    ops.bind_mw = post::bind_mw;
    ops.dealloc_mw = protection::dealloc_mw;
    ops.poll_cq = completion_queue::poll_cq;
    ops.req_notify_cq = completion_queue::req_notify_cq;
    ops.post_srq_recv = shared_receive::post_srq_recv;
    ops.post_send = post::post_send;
    ops.post_recv = post::post_recv;
    verbs
}

pub unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    const VERB: &str = "ibv_open_device";
    if device.is_null() {
        return Rejection::invalid("the device is null").null(VERB);
    }
    check!(VERB, null, faults::announce(Verb::OpenDevice, None));
    // SAFETY: a device of this library.
    let device_state = unsafe { device::of(device) };
    let opened = softhca::Device::daemon_host(None, Some(&device_state.host.name));
    let device_handle = check!(VERB, null, opened);
    let opened_context = device_handle.open();
    let inner = check!(VERB, null, opened_context.async_fd());
    let events = check!(VERB, null, event_fd::create(&inner));
    let open = ContextState {
        context: opened_context,
        device: device_state,
        attributes: device_handle.attributes(),
        port: device_handle.port_attributes(),
        objects: Mutex::default(),
    };
    // Programs may duplicate it and pass it on; it supports no commands.
    let command = event_fd::null_fd();
    let verbs = object::create(fill_verbs(device, command, events), open);
    // SAFETY: it was created above.
    unsafe { &raw mut (*verbs).context }
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
