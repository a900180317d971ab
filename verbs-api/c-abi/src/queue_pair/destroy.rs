//! Destroys queue pairs.

use super::{Qp, find};
use crate::abi::*;
use crate::errno::check;
use crate::{context, faults, object, rdma_cm};
use core::ffi::c_int;
use softhca::{Resource, Verb};

pub unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: a queue pair of this library.
    let state = check!("ibv_destroy_qp", code, unsafe { find(qp) });
    let object = Some((Resource::QueuePair, state.pair.qpn().value()));
    check!("ibv_destroy_qp", code, faults::announce(Verb::DestroyQp, object));
    // SAFETY: as above.
    if let Some(open) = unsafe { context::of((*qp).context) } {
        open.objects.lock().queue_pairs.remove(&state.pair.qpn().value());
    }
    state.events.wait();
    // SAFETY: as above.
    unsafe { rdma_cm::detach_queue_pair(qp) };
    // SAFETY: as above.
    drop(unsafe { object::destroy::<Qp>(qp.cast()) });
    0
}
