//! ACK timeouts and their number.

use core::time::Duration;

/// Retransmissions in growing intervals before the first ACK timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveRetransmission {
    /// Their number.
    pub retransmissions: u8,
    /// The time that they take together, in thousandths of an ACK timeout. Each interval is twice the one before.
    pub per_mille: u32,
}

impl AdaptiveRetransmission {
    /// The retries that they consume: the first retransmission after them is the second retry.
    pub(crate) const RETRIES: u8 = 2;

    /// The interval before the retransmission `index`, from 0.
    pub(crate) fn interval(&self, timeout: Duration, index: u8) -> Duration {
        let parts = (1u128 << self.retransmissions) - 1;
        let nanos = timeout.as_nanos() * u128::from(self.per_mille) * (1u128 << index) / (1000 * parts);
        Duration::from_nanos(nanos as u64)
    }
}

/// ACK timeouts of a requester.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryTiming {
    /// The lowest timeout exponent that has an effect.
    pub min_exponent: u8,
    /// The timeout as a multiple of 4.096 µs · 2^T. The IBTA allows 1 to 4.
    pub factor: u32,
    /// Retransmissions before the first timeout.
    pub adaptive: Option<AdaptiveRetransmission>,
}

impl RetryTiming {
    /// The times of the IBTA: `retry_cnt` + 1 timeouts of 4.096 µs · 2^T.
    pub const IBTA: RetryTiming = RetryTiming { min_exponent: 0, factor: 1, adaptive: None };

    /// The ACK timeout for an exponent. 0 waits forever.
    pub fn timeout(&self, exponent: u8) -> Option<Duration> {
        let exponent = exponent & 0x1f;
        (exponent > 0)
            .then(|| Duration::from_nanos(u64::from(self.factor) * (4096 << exponent.max(self.min_exponent))))
    }

    /// The time from the first transmission of a packet that nobody answers to the failure of its work request.
    pub fn detection_time(&self, timeout: Duration, retry_count: u8) -> Duration {
        match self.adaptive {
            Some(adaptive) if retry_count > 0 => {
                let phase = (0..adaptive.retransmissions).map(|index| adaptive.interval(timeout, index));
                let timeouts = u32::from((retry_count + 1).saturating_sub(AdaptiveRetransmission::RETRIES));
                phase.sum::<Duration>() + timeout * timeouts.max(1)
            }
            _ => timeout * (u32::from(retry_count) + 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ibta_has_one_timeout_for_each_try() {
        let timeout = RetryTiming::IBTA.timeout(14).unwrap();
        assert_eq!(timeout.as_nanos(), 67_108_864);
        assert_eq!(RetryTiming::IBTA.detection_time(timeout, 7), timeout * 8);
        assert_eq!(RetryTiming::IBTA.timeout(0), None);
    }

    #[test]
    fn adaptive_intervals_double_and_fill_their_share_of_a_timeout() {
        let adaptive = AdaptiveRetransmission { retransmissions: 3, per_mille: 700 };
        let timeout = Duration::from_millis(10);
        let intervals = [0, 1, 2].map(|index| adaptive.interval(timeout, index).as_millis());
        assert_eq!(intervals, [1, 2, 4]);
        let timing = RetryTiming { min_exponent: 16, factor: 2, adaptive: Some(adaptive) };
        assert_eq!(timing.timeout(14), timing.timeout(16));
        assert_eq!(timing.detection_time(timeout, 7), Duration::from_millis(7 + 60));
        assert_eq!(timing.detection_time(timeout, 0), timeout, "no retry, no retransmission");
    }
}
