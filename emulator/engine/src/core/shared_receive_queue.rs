//! Shared receive queues.

use crate::{ClientId, CqId, PdId, XrcdId};
use softhca_queue::ReceiveConsumer;
use softhca_types::{CorruptRing, Sge};

pub(crate) struct SharedReceiveQueue {
    pub client: ClientId,
    pub pd: PdId,
    pub ring: ReceiveConsumer,
    /// The number of posted receives below which an event is raised; zero disarms it.
    pub limit: u32,
    /// The completion queue and the XRC domain of an XRC SRQ.
    pub xrc: Option<(CqId, XrcdId)>,
    /// The number of queue pairs that use it.
    pub users: u32,
}

impl SharedReceiveQueue {
    /// Fetches a receive. The flag says whether the limit was reached, which disarms it.
    pub fn pop_wqe(
        &mut self,
        scatter: &mut alloc::vec::Vec<Sge>,
    ) -> Result<Option<(u64, bool)>, CorruptRing> {
        let Some(id) = self.ring.dequeue(scatter)? else { return Ok(None) };
        let passed = self.limit > 0 && self.ring.pending()? < self.limit;
        if passed {
            self.limit = 0;
        }
        Ok(Some((id, passed)))
    }
}
