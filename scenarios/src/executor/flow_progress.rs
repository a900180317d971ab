//! How far a flow is.

#[derive(Clone, Copy, Debug, Default)]
pub struct FlowProgress {
    /// Number of posted messages.
    pub posted: u64,
    /// Number of successful messages.
    pub done: u64,
    pub(super) outstanding: u32,
    pub(super) next_at_ns: u64,
    pub(super) is_scheduled: bool,
    /// Nothing more is posted: a message failed, or its time is over.
    pub is_finished: bool,
}
