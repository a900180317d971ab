//! Real time.

use softhca_engine::Instant;
use std::sync::LazyLock;

/// Time since the first time that anybody asked.
pub(crate) fn real_now() -> Instant {
    static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    Instant::from_nanos(START.elapsed().as_nanos() as u64)
}
