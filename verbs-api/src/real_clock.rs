//! Real time.

use softhca_engine::Instant;
use std::sync::LazyLock;

/// The first time that anybody asked.
pub(crate) fn real_start() -> std::time::Instant {
    static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    *START
}

/// Time since [`real_start`].
pub(crate) fn real_now() -> Instant {
    Instant::from_nanos(real_start().elapsed().as_nanos() as u64)
}
