//! Opens a device, whose context has a table of verbs.

use crate::abi::*;
use crate::context::ContextState;
use crate::errno::{Rejection, check};
use crate::{
    completion_queue, destroyed_context, device, event_fd, faults, object, post, protection, query,
    queue_pair, shared_receive,
};
use core::ffi::c_int;
use parking_lot::Mutex;
use softhca::{DaemonControl, Verb};

fn fill_verbs(device: *mut ibv_device, command: c_int, events: c_int) -> verbs_context {
    let mut verbs = destroyed_context::rejecting_context();
    verbs.query_port = query::query_port_sized;
    verbs.query_device_ex = query::query_device_ex;
    verbs.alloc_parent_domain = protection::alloc_parent_domain;
    verbs.alloc_td = protection::alloc_td;
    verbs.dealloc_td = protection::dealloc_td;
    verbs.create_cq_ex = completion_queue::create::create_cq_ex;
    verbs.create_qp_ex = queue_pair::create::create_qp_ex;
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
    // SAFETY: as for the caller.
    unsafe { open_device_over(None, device) }
}

/// Opens a device over this connection to the daemon, or a new one.
///
/// # Safety
/// `device` is one of this library, or null.
pub unsafe fn open_device_over(control: Option<DaemonControl>, device: *mut ibv_device) -> *mut ibv_context {
    const VERB: &str = "ibv_open_device";
    if device.is_null() {
        return Rejection::invalid("the device is null").null(VERB);
    }
    check!(VERB, null, faults::announce(Verb::OpenDevice, None));
    // SAFETY: a device of this library.
    let device_state = unsafe { device::of(device) };
    let host = &device_state.host.name;
    let opened = match control {
        Some(control) => control.open_device(host),
        None => softhca::Device::daemon_host(None, Some(host)),
    };
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
