//! Work requests that the extended interface has started and not yet posted.

use crate::abi::*;
use crate::errno::Rejection;
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;
use std::cell::UnsafeCell;

/// Work requests between `wr_start` and `wr_complete`.
pub struct WorkRequestBuilder {
    /// Held in between.
    pub lock: RawMutex,
    pub batch: UnsafeCell<StartedRequests>,
}

impl Default for WorkRequestBuilder {
    fn default() -> WorkRequestBuilder {
        WorkRequestBuilder { lock: RawMutex::INIT, batch: UnsafeCell::default() }
    }
}

// SAFETY: only the holder of the lock accesses the work requests.
unsafe impl Sync for WorkRequestBuilder {}
// SAFETY: no field belongs to one thread.
unsafe impl Send for WorkRequestBuilder {}

#[derive(Default)]
pub struct StartedRequests {
    pub started: Vec<StartedRequest>,
    /// The first error.
    pub error: Option<Rejection>,
}

/// A work request under construction, with its list of entries, or its inline data, which is copied at once.
pub struct StartedRequest {
    pub wr: ibv_send_wr,
    pub sg_list: Vec<ibv_sge>,
    pub inline: Option<Vec<u8>>,
}
