//! Completion queues: the card's side.

use crate::ClientId;
use softhca_queue::CompletionProducer;

pub(crate) struct CompletionQueue {
    pub client: ClientId,
    pub ring: CompletionProducer,
    /// Queue pairs and shared receive queues that complete here.
    pub users: u32,
    /// It overflowed: nothing is reported here any more.
    pub failed: bool,
}
