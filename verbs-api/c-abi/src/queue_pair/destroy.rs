//! Destroys queue pairs.

use super::Qp;
use crate::errno;
use crate::object::Handle;
use crate::{faults, rdma_cm};
use core::ffi::c_int;
use softhca::{Resource, Verb};

pub extern "C" fn destroy_qp(qp: Handle<Qp>) -> c_int {
    errno::code("ibv_destroy_qp", || {
        let found = qp.find()?;
        let number = found.pair.qpn().value();
        faults::announce(Verb::DestroyQp, Some((Resource::QueuePair, number)))?;
        if let Some(open) = found.abi().base.context.get() {
            open.objects.lock().queue_pairs.remove(&number);
        }
        found.events.wait();
        rdma_cm::detach_queue_pair(qp);
        found.destroy();
        Ok(())
    })
}
