//! Connection management events.

use super::identifier::{self, CmIdState, EventChannelState};
use crate::abi::*;
use crate::address::ah_attr;
use crate::errno::{self, Rejection};
use crate::object::{Found, Handle};
use crate::{event_fd, faults};
use core::ffi::{c_char, c_int, c_void};
use core::mem::{MaybeUninit, zeroed};
use parking_lot::Mutex;
use softhca::Gid;
use softhca::Verb;
use softhca::cm::{Event, EventParameters, EventType};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::{Arc, LazyLock};

/// An event that a program holds, with the targets of its pointers.
#[repr(C)]
pub struct CmEventObject {
    abi: rdma_cm_event,
    kind: EventType,
    private_data: Vec<u8>,
}

impl CmEventObject {
    pub fn id(&self) -> Handle<CmIdState> {
        self.abi.id
    }
}

/// The contexts that programs passed when they joined groups, by identifier and group.
static MULTICAST_CONTEXTS: Mutex<BTreeMap<(usize, Gid), usize>> = Mutex::new(BTreeMap::new());

/// Stores the context for the event of a group.
pub fn set_multicast_context(id: Handle<CmIdState>, group: IpAddr, program_context: *mut c_void) {
    let key = (id.as_ptr() as usize, Gid::from(group));
    MULTICAST_CONTEXTS.lock().insert(key, program_context as usize);
}

/// An event of a card in the form of librdmacm; `None` if its identifier is destroyed.
fn new_event(
    channel: Handle<Arc<EventChannelState>>,
    card: usize,
    event: Event,
) -> Option<Box<CmEventObject>> {
    let listener = event.listener.as_ref().and_then(|listener| identifier::object_of(card, listener));
    let id = match event.kind {
        EventType::ConnectRequest => {
            let found = listener?.get()?;
            let (context, ps) = (found.abi().context, found.abi().ps);
            let kind = event.id.query().ok()?.qp_type;
            let id = identifier::new_cm_id(card, vec![event.id.clone()], channel, context, ps, kind, false);
            if let Some(state) = id.get() {
                *state.offer.lock() = event.offer();
                state.events.add();
            }
            id
        }
        _ => identifier::object_with_event(card, &event.id)?,
    };
    identifier::update_route(id);
    identifier::update_qp_state(id);
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
            let group = (id.as_ptr() as usize, target.address_vector.dgid);
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
        listen_id: listener.unwrap_or(Handle::NULL),
        event: event.kind as c_int,
        status: event.status,
        param,
    };
    Some(Box::new(CmEventObject { abi, kind: event.kind, private_data }))
}

/// Waits for the next event of a channel.
fn next_event(channel: Handle<Arc<EventChannelState>>) -> Result<Box<CmEventObject>, Rejection> {
    let found = channel.find()?;
    // A program may destroy the channel meanwhile.
    let state = Arc::clone(&found);
    faults::announce(Verb::RdmaGetCmEvent, None)?;
    event_fd::wait(state.descriptor.as_raw_fd(), || {
        for (card, inner) in state.channels.iter().enumerate() {
            loop {
                match inner.poll() {
                    Err(error) => return Some(Err(Rejection::from(error))),
                    Ok(None) => break,
                    Ok(Some(event)) => {
                        if let Some(event) = new_event(channel, card, event) {
                            return Some(Ok(event));
                        }
                    }
                }
            }
        }
        None
    })?
}

pub extern "C" fn get_cm_event(
    channel: Handle<Arc<EventChannelState>>,
    into: &mut MaybeUninit<Box<CmEventObject>>,
) -> c_int {
    errno::minus_one("rdma_get_cm_event", || {
        into.write(next_event(channel)?);
        Ok(())
    })
}

/// Acknowledges an event. A new identifier that a program does not keep is destroyed with its listener's event.
pub(super) fn acknowledge(event: &CmEventObject) {
    if let Some(state) = event.abi.id.get() {
        state.events.acknowledge(1);
    }
}

pub extern "C" fn ack_cm_event(event: Option<Box<CmEventObject>>) -> c_int {
    errno::minus_one("rdma_ack_cm_event", || {
        let event = event.ok_or_else(|| Rejection::invalid("the event is null"))?;
        acknowledge(&event);
        Ok(())
    })
}

/// Acknowledges the event that a synchronous identifier keeps.
pub(super) fn ack_pending_event(id: &Found<'_, CmIdState>) {
    let mut event = None;
    id.update(|abi| event = abi.event.take());
    if let Some(event) = event {
        acknowledge(&event);
    }
}

/// Waits for the event that completes a call of a synchronous identifier, and keeps it for the program.
pub(super) fn wait_for_event(id: Handle<CmIdState>, kind: EventType) -> Result<(), Rejection> {
    let id = id.find()?;
    ack_pending_event(&id);
    let event = next_event(id.abi().channel)?;
    let (seen, status) = (event.kind, event.abi.status);
    id.update(|abi| abi.event = Some(event));
    if seen == kind && status == 0 {
        return Ok(());
    }
    let errno = match status {
        _ if seen == EventType::Rejected => libc::ECONNREFUSED,
        status if status < 0 => -status,
        _ => libc::ECONNREFUSED,
    };
    Err(Rejection::new(errno, format!("{}, status {status}", seen.name())))
}

pub extern "C" fn event_str(event: c_int) -> *const c_char {
    static NAMES: LazyLock<Vec<CString>> = LazyLock::new(|| {
        let name = |event: &EventType| CString::new(event.name()).expect("a name has no null byte");
        EventType::ALL.iter().map(name).collect()
    });
    let index = EventType::ALL.iter().position(|known| *known as c_int == event);
    index.map_or(c"UNKNOWN EVENT", |index| NAMES[index].as_c_str()).as_ptr()
}
