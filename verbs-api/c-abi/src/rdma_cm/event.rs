//! Connection management events.

use super::identifier::{self, EventChannelState};
use crate::abi::*;
use crate::address::ah_attr;
use crate::errno::{Rejection, check};
use crate::faults;
use crate::{event_fd, object};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::zeroed;
use core::ptr::null_mut;
use parking_lot::Mutex;
use softhca::Gid;
use softhca::Verb;
use softhca::cm::{Event, EventParameters, EventType};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// An event that a program holds, with the targets of its pointers.
#[repr(C)]
struct CmEventObject {
    abi: rdma_cm_event,
    private_data: Vec<u8>,
}

/// The contexts that programs passed when they joined groups, by identifier and group.
static MULTICAST_CONTEXTS: Mutex<BTreeMap<(usize, Gid), usize>> = Mutex::new(BTreeMap::new());

/// Stores the context for the event of a group.
pub fn set_multicast_context(id: *mut rdma_cm_id, group: IpAddr, program_context: *mut c_void) {
    MULTICAST_CONTEXTS.lock().insert((id as usize, Gid::from(group)), program_context as usize);
}

/// An event of a card in the form of librdmacm; `None` if its identifier is destroyed.
unsafe fn new_event(
    channel: *mut rdma_event_channel,
    card: usize,
    event: Event,
) -> Option<*mut CmEventObject> {
    let listener = event.listener.as_ref().and_then(|listener| identifier::object_of(card, listener));
    let id = match event.kind {
        EventType::ConnectRequest => {
            // SAFETY: a listener of this library.
            let (context, ps) =
                unsafe { listener?.as_ref() }.map(|listener| (listener.context, listener.ps))?;
            let kind = event.id.query().ok()?.qp_type;
            let id = identifier::new_cm_id(card, vec![event.id.clone()], channel, context, ps, kind, false);
            // SAFETY: it was created above.
            if let Some(state) = unsafe { identifier::of(id) } {
                *state.offer.lock() = event.offer();
                state.events.add();
            }
            id
        }
        _ => identifier::object_with_event(card, &event.id)?,
    };
    // SAFETY: an identifier of this library.
    unsafe {
        identifier::update_route(id);
        identifier::update_qp_state(id);
    }
    // SAFETY: zero is valid for every field.
    let mut param: EventParam = unsafe { zeroed() };
    let private_data = event.private_data;
    let (data, length) = (private_data.as_ptr().cast::<c_void>(), private_data.len().min(255) as u8);
    let data = if length == 0 { core::ptr::null() } else { data };
    match event.detail {
        EventParameters::Connection(offer) => {
            param.conn = rdma_conn_param {
                private_data: data,
                private_data_len: length,
                responder_resources: offer.responder_resources,
                initiator_depth: offer.initiator_depth,
                flow_control: u8::from(offer.flow_control),
                retry_count: offer.retry_count,
                rnr_retry_count: offer.rnr_retry_count,
                srq: u8::from(offer.srq),
                qp_num: offer.qpn.value(),
            };
        }
        EventParameters::Ud(target) => {
            let is_group = matches!(event.kind, EventType::MulticastJoin | EventType::MulticastError);
            let group = (id as usize, target.address_vector.dgid);
            let multicast_context =
                MULTICAST_CONTEXTS.lock().get(&group).map_or(0, |multicast_context| *multicast_context);
            param.ud = rdma_ud_param {
                private_data: if is_group { multicast_context as *const c_void } else { data },
                private_data_len: length,
                ah_attr: ah_attr(&target.address_vector),
                qp_num: target.qpn.value(),
                qkey: target.qkey.0,
            };
        }
        // Both structures begin with the private data.
        EventParameters::None => {
            param.conn.private_data = data;
            param.conn.private_data_len = length;
        }
    }
    let abi = rdma_cm_event {
        id,
        listen_id: listener.unwrap_or(null_mut()),
        event: event.kind as c_int,
        status: event.status,
        param,
    };
    Some(Box::into_raw(Box::new(CmEventObject { abi, private_data })))
}

pub unsafe extern "C" fn get_cm_event(
    channel: *mut rdma_event_channel,
    into: *mut *mut rdma_cm_event,
) -> c_int {
    const VERB: &str = "rdma_get_cm_event";
    // SAFETY: a channel of this library.
    let state = check!(VERB, minus_one, unsafe { object::find::<Arc<EventChannelState>>(channel) }).clone();
    check!(VERB, minus_one, faults::announce(Verb::RdmaGetCmEvent, None));
    let found = event_fd::wait(state.descriptor.as_raw_fd(), || {
        for (card, inner) in state.channels.iter().enumerate() {
            loop {
                match inner.poll() {
                    Err(error) => return Some(Err(Rejection::from(error))),
                    Ok(None) => break,
                    Ok(Some(event)) => {
                        // SAFETY: the caller guarantees it.
                        if let Some(event_object) = unsafe { new_event(channel, card, event) } {
                            return Some(Ok(event_object));
                        }
                    }
                }
            }
        }
        None
    });
    match found.and_then(|found| found) {
        Ok(event_object) => {
            // SAFETY: a valid pointer of the caller.
            unsafe { *into = event_object.cast() };
            0
        }
        Err(rejection) => rejection.minus_one(VERB),
    }
}

pub unsafe extern "C" fn ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return Rejection::invalid("the event is null").minus_one("rdma_ack_cm_event");
    }
    // SAFETY: an event of this library, which is acknowledged once.
    let event_object = unsafe { Box::from_raw(event.cast::<CmEventObject>()) };
    // A new identifier that a program does not keep is destroyed with its listener's event.
    // SAFETY: an identifier of this library, which is not destroyed before its events are acknowledged.
    if let Some(state) = unsafe { identifier::of(event_object.abi.id) } {
        state.events.acknowledge(1);
    }
    0
}

/// Acknowledges the event that a synchronous identifier keeps.
///
/// # Safety
/// `id` is an identifier of this library.
pub unsafe fn ack_pending_event(id: *mut rdma_cm_id) {
    // SAFETY: the caller guarantees it.
    unsafe {
        let event = core::mem::replace(&mut (*id).event, null_mut());
        if !event.is_null() {
            ack_cm_event(event);
        }
    }
}

/// Waits for the event that completes a call of a synchronous identifier, and keeps it for the program.
///
/// # Safety
/// `id` is an identifier of this library with its own channel.
pub unsafe fn wait_for_event(id: *mut rdma_cm_id, kind: EventType) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe {
        ack_pending_event(id);
        let mut event = null_mut();
        if get_cm_event((*id).channel, &mut event) != 0 {
            return -1;
        }
        (*id).event = event;
        let (event_type, status) = ((*event).event, (*event).status);
        if event_type == kind as c_int && status == 0 {
            return 0;
        }
        let errno = match status {
            _ if event_type == EventType::Rejected as c_int => libc::ECONNREFUSED,
            status if status < 0 => -status,
            _ => libc::ECONNREFUSED,
        };
        let name = CStr::from_ptr(event_str(event_type)).to_string_lossy();
        Rejection::new(errno, format!("{name}, status {status}"))
            .minus_one("a call of a synchronous identifier")
    }
}

pub unsafe extern "C" fn event_str(event: c_int) -> *const c_char {
    const NAMES: [&CStr; 16] = [
        c"RDMA_CM_EVENT_ADDR_RESOLVED",
        c"RDMA_CM_EVENT_ADDR_ERROR",
        c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        c"RDMA_CM_EVENT_ROUTE_ERROR",
        c"RDMA_CM_EVENT_CONNECT_REQUEST",
        c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        c"RDMA_CM_EVENT_CONNECT_ERROR",
        c"RDMA_CM_EVENT_UNREACHABLE",
        c"RDMA_CM_EVENT_REJECTED",
        c"RDMA_CM_EVENT_ESTABLISHED",
        c"RDMA_CM_EVENT_DISCONNECTED",
        c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        c"RDMA_CM_EVENT_MULTICAST_JOIN",
        c"RDMA_CM_EVENT_MULTICAST_ERROR",
        c"RDMA_CM_EVENT_ADDR_CHANGE",
        c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
    ];
    let name = usize::try_from(event).ok().and_then(|index| NAMES.get(index));
    name.unwrap_or(&c"UNKNOWN EVENT").as_ptr()
}
