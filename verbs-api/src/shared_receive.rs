//! Shared receive queues.

use crate::{Error, ProtectionDomain, ReceiveRequest};
use parking_lot::Mutex;
use softhca_engine::{SrqId, SrqInit};
use softhca_queue::ReceiveProducer;
use std::sync::Arc;

/// Receives that several queue pairs take from.
#[derive(Clone)]
pub struct SharedReceiveQueue {
    inner: Arc<Inner>,
}

struct Inner {
    domain: ProtectionDomain,
    id: SrqId,
    ring: Mutex<ReceiveProducer>,
}

impl SharedReceiveQueue {
    pub(crate) fn new(
        domain: &ProtectionDomain,
        receives: u32,
        entries: usize,
    ) -> Result<SharedReceiveQueue, Error> {
        let init = SrqInit { domain: domain.inner.id, limit: 0, extended: None };
        let (id, ring) = domain.inner.backend.create_shared_receive_queue(init, receives, entries)?;
        let inner = Inner { domain: domain.clone(), id, ring: Mutex::new(ring) };
        Ok(SharedReceiveQueue { inner: Arc::new(inner) })
    }

    pub(crate) fn id(&self) -> SrqId {
        self.inner.id
    }

    /// Posts a receive.
    pub fn post(&self, request: &ReceiveRequest<'_>) -> Result<(), Error> {
        let mut ring = self.inner.ring.lock();
        ring.place(request)?;
        let _ = ring.publish();
        Ok(())
    }

    /// Raises an event when fewer than `limit` receives wait; zero for never.
    pub fn arm(&self, limit: u32) -> Result<(), Error> {
        self.inner.domain.inner.backend.arm_shared_receive_queue(self.inner.id, limit)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.domain.inner.backend.destroy_shared_receive_queue(self.id);
    }
}
