//! Shared receive queues.

use crate::{CompletionQueue, Error, ProtectionDomain, ReceiveRequest, Resource, Verb, XrcDomain};
use parking_lot::Mutex;
use softhca_engine::{Command, Reply, SrqId, SrqInitAttributes};
use softhca_queue::ReceiveProducer;
use softhca_types::{SrqAttributes, reply};
use std::sync::Arc;

impl ProtectionDomain {
    /// Creates a shared receive queue.
    pub fn create_shared_receive_queue(
        &self,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SharedReceiveQueue, Error> {
        SharedReceiveQueue::new(self, max_wr, max_sge, None)
    }

    /// Creates a shared receive queue that XRC senders name by its number; its receives complete to `queue`.
    pub fn create_xrc_shared_receive_queue(
        &self,
        xrc_domain: &XrcDomain,
        queue: &CompletionQueue,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SharedReceiveQueue, Error> {
        SharedReceiveQueue::new(self, max_wr, max_sge, Some((xrc_domain, queue)))
    }
}

/// Receives that several queue pairs take from.
#[derive(Clone)]
pub struct SharedReceiveQueue {
    inner: Arc<Inner>,
}

struct Inner {
    domain: ProtectionDomain,
    id: SrqId,
    max_sge: u32,
    ring: Mutex<ReceiveProducer>,
    /// Objects that a queue of XRC needs. They live at least as long.
    _xrc: Option<(XrcDomain, CompletionQueue)>,
}

impl SharedReceiveQueue {
    fn new(
        domain: &ProtectionDomain,
        max_wr: u32,
        max_sge: u32,
        extended: Option<(&XrcDomain, &CompletionQueue)>,
    ) -> Result<SharedReceiveQueue, Error> {
        let ids = extended.map(|(xrc_domain, queue)| (queue.id(), xrc_domain.id()));
        let init = SrqInitAttributes { pd: domain.inner.id, srq_limit: 0, xrc: ids };
        let command = Command::CreateSharedReceiveQueue { init, max_wr, max_sge };
        let (reply, rings) = domain.inner.backend.execute_with_rings(command)?;
        let id = reply!(reply, Reply::SharedReceiveQueue(srq) => srq);
        let ring = ReceiveProducer::new(rings, max_wr, max_sge as usize);
        let extended = extended.map(|(xrc_domain, queue)| (xrc_domain.clone(), queue.clone()));
        let inner = Inner { domain: domain.clone(), id, max_sge, ring: Mutex::new(ring), _xrc: extended };
        Ok(SharedReceiveQueue { inner: Arc::new(inner) })
    }

    pub(crate) fn id(&self) -> SrqId {
        self.inner.id
    }

    /// Its number, which XRC senders put into their work requests.
    pub fn srqn(&self) -> u32 {
        self.inner.id.0
    }

    /// Whether another handle exists or a queue pair uses it.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// The maximum numbers of receives and of SGEs, and the armed limit (0: none).
    pub fn query(&self) -> Result<SrqAttributes, Error> {
        let command = Command::QuerySharedReceiveQueue(self.inner.id);
        let reply = self.inner.domain.inner.backend.execute(command)?;
        Ok(reply!(reply, Reply::SrqAttributes(attributes) => attributes))
    }

    /// Posts a receive.
    pub fn post_recv(&self, request: &ReceiveRequest<'_>) -> Result<(), Error> {
        self.inner.domain.inner.backend.check_process()?;
        let object = Some((Resource::SharedReceiveQueue, self.inner.id.0));
        self.inner.domain.inner.context.announce_call(Verb::PostSrqRecv, object)?;
        let mut ring = self.inner.ring.lock();
        ring.enqueue(request).map_err(|why| Error::from_post("shared receive", why))?;
        let _ = ring.publish();
        Ok(())
    }

    /// Raises an event when fewer than `srq_limit` receives wait; zero for never.
    pub fn set_limit(&self, srq_limit: u32) -> Result<(), Error> {
        self.modify(None, Some(srq_limit))
    }

    /// Changes the maximum number of receives. Posted receives stay.
    pub fn resize(&self, max_wr: u32) -> Result<(), Error> {
        self.modify(Some(max_wr), None)
    }

    /// Does what [`SharedReceiveQueue::resize`] and [`SharedReceiveQueue::set_limit`] do, or neither.
    pub fn modify(&self, max_wr: Option<u32>, srq_limit: Option<u32>) -> Result<(), Error> {
        let Inner { domain, id, max_sge, ring, .. } = &*self.inner;
        let command = Command::ModifySharedReceiveQueue { srq: *id, max_wr, max_sge: *max_sge, srq_limit };
        let mut ring = ring.lock();
        let (_, rings) = domain.inner.backend.execute_with_rings(command)?;
        if let Some(max_wr) = max_wr {
            *ring = ReceiveProducer::resume(rings, max_wr, *max_sge as usize);
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.domain.inner.backend.execute(Command::DestroySharedReceiveQueue(self.id));
    }
}
