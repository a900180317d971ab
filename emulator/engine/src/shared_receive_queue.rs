//! Shared receive queues.

use crate::{ClientId, CqId, PdId, XrcdId};
use softhca_queue::{CorruptRing, ReceiveConsumer, Sge};

pub(crate) struct SharedReceiveQueue {
    pub client: ClientId,
    pub pd: PdId,
    pub ring: ReceiveConsumer,
    /// Raise an event when fewer than this many receives wait; zero is disarmed.
    pub limit: u32,
    /// Of XRC: where receives complete, and the domain that lets senders in.
    pub xrc: Option<(CqId, XrcdId)>,
    /// Queue pairs that take from it.
    pub users: u32,
}

impl SharedReceiveQueue {
    /// Takes a receive; also says whether the limit was passed, which disarms it.
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
