//! The time of the engine: nanoseconds since an epoch that the driver chooses.

use core::fmt;
use core::time::Duration;

/// A point in time. The engine has no clock; callers pass the time.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(u64);

impl Instant {
    /// The epoch.
    pub const ZERO: Instant = Instant(0);

    /// `nanoseconds` after the epoch.
    #[inline]
    pub const fn from_nanos(nanoseconds: u64) -> Instant {
        Instant(nanoseconds)
    }

    /// Nanoseconds since the epoch.
    #[inline]
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// The time `duration` later.
    #[inline]
    pub const fn plus(self, duration: Duration) -> Instant {
        Instant(self.0.saturating_add(duration.as_nanos() as u64))
    }

    /// The time since `earlier`; zero if that is in the future.
    #[inline]
    pub const fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}ns", self.0)
    }
}
