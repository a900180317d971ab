//! Extended reliable connections: one connection per host reaches many shared receive queues.

use crate::{Context, Error};
use softhca_engine::{Command, Reply, XrcdId};
use softhca_types::reply;
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

impl Context {
    /// Opens an XRC domain, which XRC targets and their shared receive queues belong to.
    pub fn open_xrc_domain(&self) -> Result<XrcDomain, Error> {
        XrcDomain::new(self)
    }
}

impl XrcDomain {
    fn new(context: &Context) -> Result<XrcDomain, Error> {
        let id = reply!(context.backend.execute(Command::OpenXrcDomain)?, Reply::XrcDomain(xrcd) => xrcd);
        Ok(XrcDomain { inner: Arc::new(Inner { context: context.clone(), id }) })
    }

    /// Whether anything else holds it: another handle, or a queue of the domain.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
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
