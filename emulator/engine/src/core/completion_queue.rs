//! The HCA's side of a completion queue.

use crate::ClientId;
use softhca_queue::CompletionProducer;

pub(crate) struct CompletionQueue {
    pub client: ClientId,
    pub ring: CompletionProducer,
    /// The number of queue pairs and shared receive queues that use it.
    pub users: u32,
    /// The queue overflowed and accepts no more completions.
    pub failed: bool,
}
