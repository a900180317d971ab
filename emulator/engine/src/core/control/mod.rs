//! The control verbs: creating, changing and destroying resources.

mod address;
mod client;
mod execute;
mod limits;
mod memory;
mod queue_pair;
mod queues;

pub use execute::Attachments;
pub use queue_pair::QpRings;
