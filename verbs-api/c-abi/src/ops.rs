//! Opens a device, whose context has a table of verbs.

use crate::abi::*;
use crate::context::{ContextHandle, ContextState};
use crate::device::DeviceState;
use crate::errno::Rejection;
use crate::{
    completion_queue, destroyed_context, event_fd, faults, object, post, protection, query, queue_pair,
    shared_receive,
};
use core::ffi::c_int;
use parking_lot::Mutex;
use softhca::{DaemonControl, Verb};

fn fill_verbs(device: &'static DeviceState, command: c_int, events: c_int) -> verbs_context {
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
    verbs.context.device = Some(device);
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

pub extern "C" fn open_device(device: Option<&'static DeviceState>) -> ContextHandle {
    open_device_over(None, device).unwrap_or_else(|rejection| {
        rejection.code("ibv_open_device");
        ContextHandle::NULL
    })
}

/// Opens a device over this connection to the daemon, or a new one.
pub fn open_device_over(
    control: Option<DaemonControl>,
    device: Option<&'static DeviceState>,
) -> Result<ContextHandle, Rejection> {
    let device = device.ok_or_else(|| Rejection::invalid("the device is null"))?;
    faults::announce(Verb::OpenDevice, None)?;
    let host = &device.host.name;
    let device_handle = match control {
        Some(control) => control.open_device(host)?,
        None => softhca::Device::daemon_host(None, Some(host))?,
    };
    let context = device_handle.open();
    let events = event_fd::create(&context.async_fd()?)?;
    let (attributes, port) = (device_handle.attributes(), device_handle.port_attributes());
    let open = ContextState { context, device, attributes, port, objects: Mutex::default() };
    // Programs may duplicate it and pass it on; it supports no commands.
    let command = event_fd::null_fd();
    Ok(ContextHandle::new(object::create(fill_verbs(device, command, events), open)))
}
