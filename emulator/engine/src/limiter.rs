//! The rate of one queue pair after its first congestion notification (DCQCN's reaction point).
//!
//! Nothing here has a timer of its own: when the queue pair wants to send, everything that time would have
//! done since is done first, in order. Only waiting for the next packet's turn needs a wake-up.

use crate::congestion::{Dcqcn, RateCause};
use crate::{Event, Instant};
use softhca_wire::Qpn;

/// One, in the unit of `alpha`.
const ONE: u64 = 1 << 32;

/// The rate of a queue pair, and how it got there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limiter {
    current: u64,
    target: u64,
    /// The estimate of how bad congestion is, in parts of [`ONE`].
    alpha: u64,
    alpha_falls_at: Instant,
    rises_at: Instant,
    bytes_left: u64,
    rises_by_time: u32,
    rises_by_bytes: u32,
    /// When the next packet may go, and how many (bits × 10^9) modulo the rate are owed beyond that.
    next_at: Instant,
    remainder: u64,
}

impl Limiter {
    /// At the rate of the port, and as careful as can be.
    pub fn new(settings: &Dcqcn, now: Instant) -> Limiter {
        Limiter {
            current: settings.line_rate,
            target: settings.line_rate,
            alpha: ONE,
            alpha_falls_at: now.plus(settings.alpha_interval),
            rises_at: now.plus(settings.rate_interval),
            bytes_left: settings.byte_counter,
            rises_by_time: 0,
            rises_by_bytes: 0,
            next_at: now,
            remainder: 0,
        }
    }

    pub fn rate(&self) -> u64 {
        self.current
    }

    /// Whether the rate is below that of the port.
    pub fn is_active(&self, settings: &Dcqcn) -> bool {
        self.current < settings.line_rate
    }

    /// When the next packet may go.
    pub fn next_at(&self) -> Instant {
        self.next_at
    }

    /// Whether nothing happens now: the next packet waits, and the rate does not rise.
    pub fn is_quiet(&self, now: Instant) -> bool {
        self.next_at > now && self.rises_at > now
    }

    /// The change as an event.
    pub fn event(&self, qp: Qpn, cause: RateCause) -> Event {
        let alpha_millionths = ((self.alpha * 1_000_000) >> 32) as u32;
        let (bits_per_second, target) = (self.current, self.target);
        Event::RateChanged { qp, bits_per_second, target, alpha_millionths, cause }
    }

    /// Starts anew from a rate of the caller's choice.
    pub fn set(&mut self, settings: &Dcqcn, now: Instant, rate: u64) {
        let rate = rate.clamp(settings.least_rate, settings.line_rate);
        *self = Limiter { current: rate, target: rate, ..Limiter::new(settings, now) };
    }

    /// A notification came: the rate falls with `alpha`, and `alpha` rises.
    pub fn notified(&mut self, settings: &Dcqcn, now: Instant) {
        self.catch_up(settings, now);
        self.lower_alpha(settings, now);
        self.target = self.current;
        let cut = ((u128::from(self.current) * u128::from(self.alpha)) >> 33) as u64;
        self.current = (self.current - cut).max(settings.least_rate);
        let divisor = u64::from(settings.gain_divisor);
        self.alpha = (self.alpha - self.alpha / divisor + ONE / divisor).min(ONE);
        self.alpha_falls_at = now.plus(settings.alpha_interval);
        self.rises_at = now.plus(settings.rate_interval);
        self.bytes_left = settings.byte_counter;
        self.rises_by_time = 0;
        self.rises_by_bytes = 0;
        self.remainder = 0;
    }

    fn lower_alpha(&mut self, settings: &Dcqcn, now: Instant) {
        let divisor = u64::from(settings.gain_divisor);
        while self.alpha_falls_at <= now && self.alpha >= divisor {
            self.alpha -= self.alpha / divisor;
            self.alpha_falls_at = self.alpha_falls_at.plus(settings.alpha_interval);
        }
        if self.alpha_falls_at <= now {
            self.alpha_falls_at = now.plus(settings.alpha_interval);
        }
    }

    /// Does what time has done since the last look. Says whether the rate changed.
    pub fn catch_up(&mut self, settings: &Dcqcn, now: Instant) -> bool {
        if self.rises_at > now || !self.is_active(settings) {
            return false;
        }
        while self.rises_at <= now && self.is_active(settings) {
            self.rises_by_time += 1;
            self.rises_at = self.rises_at.plus(settings.rate_interval);
            self.rise(settings);
        }
        self.lower_alpha(settings, now);
        true
    }

    /// A packet of so many bytes left. Says whether the rate changed.
    pub fn sent(&mut self, settings: &Dcqcn, now: Instant, bytes: u64) -> bool {
        if !self.is_active(settings) {
            self.next_at = now;
            return false;
        }
        let time = bytes * 8 * 1_000_000_000 + self.remainder;
        let earliest = Instant::from_nanos(now.nanos().saturating_sub(settings.slack.as_nanos() as u64));
        let start = self.next_at.max(earliest);
        self.next_at = Instant::from_nanos(start.nanos() + time / self.current);
        self.remainder = time % self.current;
        if bytes < self.bytes_left {
            self.bytes_left -= bytes;
            return false;
        }
        self.bytes_left = settings.byte_counter;
        self.rises_by_bytes += 1;
        self.rise(settings);
        true
    }

    /// One step of fast recovery, additive or hyper increase.
    fn rise(&mut self, settings: &Dcqcn) {
        let (time, bytes) = (self.rises_by_time, self.rises_by_bytes);
        let beyond = time.min(bytes).saturating_sub(settings.fast_recovery);
        if beyond > 0 {
            self.target += settings.hyper_increase * u64::from(beyond);
        } else if time.max(bytes) >= settings.fast_recovery {
            self.target += settings.additive_increase;
        }
        self.target = self.target.min(settings.line_rate);
        // Rounded up, so that the port's rate is reached.
        self.current = (self.target + self.current).div_ceil(2);
        self.remainder = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAPER: Dcqcn = Dcqcn::PAPER;

    fn at(microseconds: u64) -> Instant {
        Instant::from_nanos(microseconds * 1_000)
    }

    #[test]
    fn the_first_notification_halves_the_rate() {
        let mut limiter = Limiter::new(&PAPER, at(0));
        limiter.notified(&PAPER, at(0));
        assert_eq!((limiter.current, limiter.target), (50_000_000_000, 100_000_000_000));
        assert_eq!(limiter.alpha, ONE);
    }

    #[test]
    fn alpha_falls_by_one_part_in_256_for_every_interval_without_notification() {
        let mut limiter = Limiter::new(&PAPER, at(0));
        limiter.notified(&PAPER, at(0));
        limiter.catch_up(&PAPER, at(55 * 10));
        let expected = (0..10).fold(1.0, |alpha: f64, _| alpha * 255.0 / 256.0);
        assert!((limiter.alpha as f64 / ONE as f64 - expected).abs() < 1e-6);
    }

    #[test]
    fn five_steps_of_fast_recovery_come_before_the_target_rises() {
        let mut limiter = Limiter::new(&PAPER, at(0));
        limiter.set(&PAPER, at(0), 8_000_000_000);
        limiter.notified(&PAPER, at(0));
        assert_eq!((limiter.current, limiter.target), (4_000_000_000, 8_000_000_000));
        for (steps, rate) in [(1, 6_000_000_000), (2, 7_000_000_000), (3, 7_500_000_000), (4, 7_750_000_000)]
        {
            limiter.catch_up(&PAPER, at(55 * steps));
            assert_eq!((limiter.current, limiter.target), (rate, 8_000_000_000));
        }
        limiter.catch_up(&PAPER, at(55 * 5));
        assert_eq!((limiter.current, limiter.target), (7_895_000_000, 8_040_000_000));
    }

    #[test]
    fn hyper_increase_needs_time_and_bytes() {
        let mut limiter = Limiter::new(&PAPER, at(0));
        limiter.set(&PAPER, at(0), 8_000_000_000);
        limiter.notified(&PAPER, at(0));
        limiter.catch_up(&PAPER, at(55 * 6));
        assert_eq!(limiter.target, 8_080_000_000);
        for _ in 0..5 {
            assert!(limiter.sent(&PAPER, at(55 * 6), PAPER.byte_counter));
        }
        assert_eq!(limiter.target, 8_280_000_000);
        limiter.sent(&PAPER, at(55 * 6), PAPER.byte_counter);
        assert_eq!(limiter.target, 8_680_000_000);
    }

    #[test]
    fn packets_leave_at_the_rate_to_the_nanosecond() {
        let mut limiter = Limiter::new(&PAPER, at(0));
        limiter.set(&PAPER, at(0), 30_000_000_000);
        let mut now = at(0);
        for _ in 0..3_000 {
            limiter.sent(&PAPER, now, 1_000);
            now = limiter.next_at();
        }
        // 3,000,000 bytes at 30 Gb/s.
        assert_eq!(now.nanos(), 800_000);
    }

    #[test]
    fn a_rate_recovers_to_that_of_the_port_and_limits_nothing_then() {
        let mut limiter = Limiter::new(&PAPER, at(0));
        limiter.notified(&PAPER, at(0));
        limiter.catch_up(&PAPER, at(1_000_000));
        assert!(!limiter.is_active(&PAPER));
        limiter.sent(&PAPER, at(1_000_000), 4_096);
        assert_eq!(limiter.next_at(), at(1_000_000));
    }
}
