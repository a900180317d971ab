//! Asynchronous events.

use crate::abi::*;
use crate::completion_queue::Cq;
use crate::context::{self, ContextState};
use crate::errno::check;
use crate::faults;
use crate::queue_pair::Qp;
use crate::shared_receive::Srq;
use crate::unacknowledged::Unacknowledged;
use crate::{event_fd, object};
use core::ffi::c_int;
use softhca::AsyncEvent;
use softhca::Verb;

const CQ_ERR: c_int = 0;
const QP_FATAL: c_int = 1;
const QP_REQ_ERR: c_int = 2;
const QP_ACCESS_ERR: c_int = 3;
const COMM_EST: c_int = 4;
const SQ_DRAINED: c_int = 5;
const DEVICE_FATAL: c_int = 8;
const PORT_ACTIVE: c_int = 9;
const PORT_ERR: c_int = 10;
const SRQ_ERR: c_int = 14;
const SRQ_LIMIT_REACHED: c_int = 15;
const QP_LAST_WQE_REACHED: c_int = 16;
const GID_CHANGE: c_int = 18;
const LID_CHANGE: c_int = 11;
const PKEY_CHANGE: c_int = 12;

/// The object of an event: its kind and its number.
enum EventElement {
    CompletionQueue(u32),
    QueuePair(u32),
    SharedReceiveQueue(u32),
    Port,
}

fn event_type(event: AsyncEvent) -> (c_int, EventElement) {
    use AsyncEvent::*;
    match event {
        CompletionQueueError(cq) => (CQ_ERR, EventElement::CompletionQueue(cq.0)),
        QueuePairFatal(qp) => (QP_FATAL, EventElement::QueuePair(qp.value())),
        QueuePairRequestError(qp) => (QP_REQ_ERR, EventElement::QueuePair(qp.value())),
        QueuePairAccessError(qp) => (QP_ACCESS_ERR, EventElement::QueuePair(qp.value())),
        CommunicationEstablished(qp) => (COMM_EST, EventElement::QueuePair(qp.value())),
        SendQueueDrained(qp) => (SQ_DRAINED, EventElement::QueuePair(qp.value())),
        LastWorkRequestReached(qp) => (QP_LAST_WQE_REACHED, EventElement::QueuePair(qp.value())),
        SharedReceiveQueueError(srq) => (SRQ_ERR, EventElement::SharedReceiveQueue(srq.0)),
        SharedReceiveQueueLimit(srq) => (SRQ_LIMIT_REACHED, EventElement::SharedReceiveQueue(srq.0)),
        PortActive => (PORT_ACTIVE, EventElement::Port),
        PortDown => (PORT_ERR, EventElement::Port),
        GidChange => (GID_CHANGE, EventElement::Port),
        DeviceFatal => (DEVICE_FATAL, EventElement::Port),
        LidChange => (LID_CHANGE, EventElement::Port),
        PkeyChange => (PKEY_CHANGE, EventElement::Port),
    }
}

/// The event in the form of libibverbs; `None` if its object is destroyed.
fn async_event(open: &ContextState, event: AsyncEvent) -> Option<ibv_async_event> {
    let (event_type, about) = event_type(event);
    let named = open.objects.lock();
    let element = match about {
        EventElement::CompletionQueue(number) => {
            Element { cq: *named.completion_queues.get(&number)? as *mut ibv_cq }
        }
        EventElement::QueuePair(number) => Element { qp: *named.queue_pairs.get(&number)? as *mut ibv_qp },
        EventElement::SharedReceiveQueue(number) => {
            Element { srq: *named.shared_receive_queues.get(&number)? as *mut ibv_srq }
        }
        EventElement::Port => Element { port_num: 1 },
    };
    let event = ibv_async_event { element, event_type };
    // SAFETY: the object is in the table, so it is not destroyed: destruction first removes it, under this lock.
    if let Some(events) = unsafe { unacknowledged(&event) } {
        events.add();
    }
    Some(event)
}

/// The unacknowledged events of the object of an event, which must be acknowledged before it is destroyed.
///
/// # Safety
/// The program has read the event, and its object is not destroyed.
unsafe fn unacknowledged<'a>(event: &ibv_async_event) -> Option<&'a Unacknowledged> {
    // SAFETY: the type determines the union member.
    unsafe {
        match event.event_type {
            CQ_ERR => object::state::<Cq>(event.element.cq.cast()).map(|cq| &cq.async_events),
            QP_FATAL | QP_REQ_ERR | QP_ACCESS_ERR | COMM_EST | SQ_DRAINED | QP_LAST_WQE_REACHED => {
                object::state::<Qp>(event.element.qp.cast()).map(|qp| &qp.events)
            }
            SRQ_ERR | SRQ_LIMIT_REACHED => object::state::<Srq>(event.element.srq).map(|srq| &srq.events),
            _ => None,
        }
    }
}

pub unsafe extern "C" fn get_async_event(context: *mut ibv_context, into: *mut ibv_async_event) -> c_int {
    const VERB: &str = "ibv_get_async_event";
    // SAFETY: a context of this library.
    let open = check!(VERB, minus_one, unsafe { context::find(context) });
    check!(VERB, minus_one, open.context.check_process());
    check!(VERB, minus_one, faults::announce(Verb::GetAsyncEvent, None));
    // SAFETY: as above.
    let fd = unsafe { (*context).async_fd };
    let found = event_fd::wait(fd, || {
        loop {
            if let Some(event) = async_event(open, open.context.poll_async_event()?) {
                return Some(event);
            }
        }
    });
    match found {
        Ok(event) => {
            // SAFETY: a valid pointer of the caller.
            unsafe { *into = event };
            0
        }
        Err(rejection) => rejection.minus_one(VERB),
    }
}

pub unsafe extern "C" fn ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: an event of this library, which keeps its object alive.
    if let Some(events) = unsafe { unacknowledged(&*event) } {
        events.acknowledge(1);
    }
}
