//! The card's clock: nanoseconds since a start that the driver chooses.

use core::fmt;
use core::time::Duration;

/// A point in time. The engine has no clock of its own: every call that needs the time is given it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(u64);

impl Instant {
    /// The start.
    pub const ZERO: Instant = Instant(0);

    /// `nanoseconds` after the start.
    #[inline]
    pub const fn from_nanos(nanoseconds: u64) -> Instant {
        Instant(nanoseconds)
    }

    /// Nanoseconds since the start.
    #[inline]
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// The time that much later.
    #[inline]
    pub const fn plus(self, duration: Duration) -> Instant {
        Instant(self.0.saturating_add(duration.as_nanos() as u64))
    }

    /// How long after `earlier`; zero if it was not.
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
