//! Extended reliable connections: one connection per host reaches many shared receive queues.

use crate::backend::Backend;
use crate::{Context, Error};
use softhca_engine::XrcdId;
use std::sync::Arc;

/// An XRC domain: senders that reach a target queue pair of the domain may name any of its shared receive
/// queues.
#[derive(Clone)]
pub struct XrcDomain {
    inner: Arc<Inner>,
}

struct Inner {
    backend: Arc<dyn Backend>,
    id: XrcdId,
}

impl XrcDomain {
    pub(crate) fn new(context: &Context) -> Result<XrcDomain, Error> {
        let backend = context.backend.clone();
        let id = backend.open_xrc_domain()?;
        Ok(XrcDomain { inner: Arc::new(Inner { backend, id }) })
    }

    pub(crate) fn id(&self) -> XrcdId {
        self.inner.id
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Every queue of the domain holds a handle: none is left.
        let _ = self.backend.close_xrc_domain(self.id);
    }
}
