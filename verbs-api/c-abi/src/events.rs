//! Asynchronous events.

use crate::abi::*;
use crate::context::{ContextHandle, ContextState};
use crate::errno;
use crate::unacknowledged::Unacknowledged;
use crate::{event_fd, faults};
use core::ffi::c_int;
use core::mem::MaybeUninit;
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
const SM_CHANGE: c_int = 13;
const CLIENT_REREGISTER: c_int = 17;

/// The event in the form of libibverbs; `None` if its object is destroyed.
fn async_event(open: &ContextState, event: AsyncEvent) -> Option<ibv_async_event> {
    use AsyncEvent::*;
    // An object in the table is not destroyed: destruction first removes it, under this lock.
    let named = open.objects.lock();
    let cq = |number| Some(Element { cq: *named.completion_queues.get(&number)? });
    let qp = |number| Some(Element { qp: *named.queue_pairs.get(&number)? });
    let srq = |number| Some(Element { srq: *named.shared_receive_queues.get(&number)? });
    let port = Element { port_num: 1 };
    let (event_type, element) = match event {
        CompletionQueueError(id) => (CQ_ERR, cq(id.0)?),
        QueuePairFatal(qpn) => (QP_FATAL, qp(qpn.value())?),
        QueuePairRequestError(qpn) => (QP_REQ_ERR, qp(qpn.value())?),
        QueuePairAccessError(qpn) => (QP_ACCESS_ERR, qp(qpn.value())?),
        CommunicationEstablished(qpn) => (COMM_EST, qp(qpn.value())?),
        SendQueueDrained(qpn) => (SQ_DRAINED, qp(qpn.value())?),
        LastWorkRequestReached(qpn) => (QP_LAST_WQE_REACHED, qp(qpn.value())?),
        SharedReceiveQueueError(id) => (SRQ_ERR, srq(id.0)?),
        SharedReceiveQueueLimit(id) => (SRQ_LIMIT_REACHED, srq(id.0)?),
        PortActive => (PORT_ACTIVE, port),
        PortDown => (PORT_ERR, port),
        GidChange => (GID_CHANGE, port),
        DeviceFatal => (DEVICE_FATAL, port),
        LidChange => (LID_CHANGE, port),
        PkeyChange => (PKEY_CHANGE, port),
        SmChange => (SM_CHANGE, port),
        ClientReregister => (CLIENT_REREGISTER, port),
    };
    let event = ibv_async_event { element, event_type };
    with_unacknowledged(&event, Unacknowledged::add);
    Some(event)
}

/// Calls `act` with the unacknowledged events of an event's object, which must be acknowledged before it is destroyed.
fn with_unacknowledged(event: &ibv_async_event, act: impl FnOnce(&Unacknowledged)) {
    let element = event.element;
    match event.event_type {
        // SAFETY: the type determines the union member.
        CQ_ERR => unsafe { element.cq }.get().map(|cq| act(&cq.async_events)),
        QP_FATAL | QP_REQ_ERR | QP_ACCESS_ERR | COMM_EST | SQ_DRAINED | QP_LAST_WQE_REACHED => {
            // SAFETY: as above.
            unsafe { element.qp }.get().map(|qp| act(&qp.events))
        }
        // SAFETY: as above.
        SRQ_ERR | SRQ_LIMIT_REACHED => unsafe { element.srq }.get().map(|srq| act(&srq.events)),
        _ => None,
    };
}

pub extern "C" fn get_async_event(context: ContextHandle, into: &mut MaybeUninit<ibv_async_event>) -> c_int {
    errno::minus_one("ibv_get_async_event", || {
        let open = context.find()?;
        open.context.check_process()?;
        faults::announce(Verb::GetAsyncEvent, None)?;
        let event = event_fd::wait(open.abi().context.async_fd, || {
            loop {
                if let Some(event) = async_event(&open, open.context.poll_async_event()?) {
                    return Some(event);
                }
            }
        })?;
        into.write(event);
        Ok(())
    })
}

pub extern "C" fn ack_async_event(event: &ibv_async_event) {
    with_unacknowledged(event, |events| events.acknowledge(1));
}
