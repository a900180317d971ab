//! Extended reliable connections: one connection per host reaches many shared receive queues.

use crate::{Context, Error, QueuePair, QueuePairBuilder};
use softhca_engine::{Command, Reply, XrcdId};
use softhca_queue::reply;
use std::sync::Arc;

/// An XRC domain: senders that reach a target queue pair of the domain may name any of its shared receive
/// queues.
#[derive(Clone)]
pub struct XrcDomain {
    inner: Arc<Inner>,
}

struct Inner {
    context: Context,
    id: XrcdId,
}

impl XrcDomain {
    pub(crate) fn new(context: &Context) -> Result<XrcDomain, Error> {
        let id = reply!(context.backend.execute(Command::OpenXrcDomain)?, Reply::XrcDomain(xrcd) => xrcd);
        Ok(XrcDomain { inner: Arc::new(Inner { context: context.clone(), id }) })
    }

    /// Creates the receiving end of a connection, in RESET. Its peer, a queue pair of kind `XrcInitiator`,
    /// names a shared receive queue of this domain in every request, one-sided ones too: what it may reach is
    /// the memory of that queue's protection domain.
    pub fn create_target_queue_pair(&self) -> Result<QueuePair, Error> {
        self.target_builder().build()
    }

    /// Begins to create such a receiving end.
    pub fn target_builder(&self) -> QueuePairBuilder {
        QueuePairBuilder::xrc_target(&self.inner.context, self)
    }

    /// Whether anything else holds it: another handle, or a queue of the domain.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    pub(crate) fn id(&self) -> XrcdId {
        self.inner.id
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Every queue of the domain holds a handle: none is left.
        let _ = self.context.backend.execute(Command::CloseXrcDomain(self.id));
    }
}
