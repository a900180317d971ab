//! The rate of one queue pair after its first congestion notification (DCQCN's reaction point).
//!
//! Nothing here has a timer of its own: when the queue pair wants to send, everything that time would have
//! done since is done first, in order. Only waiting for the next packet's turn needs a wake-up.

use super::{DcqcnParameters, RateCause};
use crate::{Event, Instant};
use softhca_wire::Qpn;

/// One, in the unit of `alpha`.
const ONE: u64 = 1 << 32;

/// The rate of a queue pair, and how it got there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dcqcn {
    current_rate: u64,
    target_rate: u64,
    /// The estimate of how bad congestion is, in parts of [`ONE`].
    alpha: u64,
    alpha_update_at: Instant,
    rate_increase_at: Instant,
    bytes_until_increase: u64,
    timer_increases: u32,
    byte_increases: u32,
    /// When the next packet may go, and how many (bits × 10^9) modulo the rate are owed beyond that.
    next_send_at: Instant,
    remainder: u64,
}

impl Dcqcn {
    /// At the rate of the port, and as careful as can be.
    pub fn new(settings: &DcqcnParameters, now: Instant) -> Dcqcn {
        Dcqcn {
            current_rate: settings.line_rate,
            target_rate: settings.line_rate,
            alpha: ONE,
            alpha_update_at: now.plus(settings.alpha_interval),
            rate_increase_at: now.plus(settings.rate_increase_interval),
            bytes_until_increase: settings.byte_counter,
            timer_increases: 0,
            byte_increases: 0,
            next_send_at: now,
            remainder: 0,
        }
    }

    pub fn rate(&self) -> u64 {
        self.current_rate
    }

    /// Whether the rate is below that of the port.
    pub fn is_active(&self, settings: &DcqcnParameters) -> bool {
        self.current_rate < settings.line_rate
    }

    /// When the next packet may go.
    pub fn next_send_at(&self) -> Instant {
        self.next_send_at
    }

    /// Whether nothing happens now: the next packet waits, and the rate does not rise.
    pub fn is_waiting(&self, now: Instant) -> bool {
        self.next_send_at > now && self.rate_increase_at > now
    }

    /// The change as an event.
    pub fn rate_changed_event(&self, qp: Qpn, cause: RateCause) -> Event {
        let alpha_millionths = ((self.alpha * 1_000_000) >> 32) as u32;
        let (bits_per_second, target) = (self.current_rate, self.target_rate);
        Event::RateChanged { qp, bits_per_second, target, alpha_millionths, cause }
    }

    /// Starts anew from a rate of the caller's choice.
    pub fn set_rate(&mut self, settings: &DcqcnParameters, now: Instant, rate: u64) {
        let rate = rate.clamp(settings.min_rate, settings.line_rate);
        *self = Dcqcn { current_rate: rate, target_rate: rate, ..Dcqcn::new(settings, now) };
    }

    /// A notification came: the rate falls with `alpha`, and `alpha` rises.
    pub fn on_cnp(&mut self, settings: &DcqcnParameters, now: Instant) {
        self.apply_elapsed_time(settings, now);
        self.decay_alpha(settings, now);
        self.target_rate = self.current_rate;
        let cut = ((u128::from(self.current_rate) * u128::from(self.alpha)) >> 33) as u64;
        self.current_rate = (self.current_rate - cut).max(settings.min_rate);
        let divisor = u64::from(settings.gain_divisor);
        self.alpha = (self.alpha - self.alpha / divisor + ONE / divisor).min(ONE);
        self.alpha_update_at = now.plus(settings.alpha_interval);
        self.rate_increase_at = now.plus(settings.rate_increase_interval);
        self.bytes_until_increase = settings.byte_counter;
        self.timer_increases = 0;
        self.byte_increases = 0;
        self.remainder = 0;
    }

    fn decay_alpha(&mut self, settings: &DcqcnParameters, now: Instant) {
        let divisor = u64::from(settings.gain_divisor);
        while self.alpha_update_at <= now && self.alpha >= divisor {
            self.alpha -= self.alpha / divisor;
            self.alpha_update_at = self.alpha_update_at.plus(settings.alpha_interval);
        }
        if self.alpha_update_at <= now {
            self.alpha_update_at = now.plus(settings.alpha_interval);
        }
    }

    /// Does what time has done since the last look. Says whether the rate changed.
    pub fn apply_elapsed_time(&mut self, settings: &DcqcnParameters, now: Instant) -> bool {
        if self.rate_increase_at > now || !self.is_active(settings) {
            return false;
        }
        while self.rate_increase_at <= now && self.is_active(settings) {
            self.timer_increases += 1;
            self.rate_increase_at = self.rate_increase_at.plus(settings.rate_increase_interval);
            self.increase_rate(settings);
        }
        self.decay_alpha(settings, now);
        true
    }

    /// A packet of so many bytes left. Says whether the rate changed.
    pub fn on_packet_sent(&mut self, settings: &DcqcnParameters, now: Instant, bytes: u64) -> bool {
        if !self.is_active(settings) {
            self.next_send_at = now;
            return false;
        }
        let time = bytes * 8 * 1_000_000_000 + self.remainder;
        let earliest = Instant::from_nanos(now.nanos().saturating_sub(settings.slack.as_nanos() as u64));
        let start = self.next_send_at.max(earliest);
        self.next_send_at = Instant::from_nanos(start.nanos() + time / self.current_rate);
        self.remainder = time % self.current_rate;
        if bytes < self.bytes_until_increase {
            self.bytes_until_increase -= bytes;
            return false;
        }
        self.bytes_until_increase = settings.byte_counter;
        self.byte_increases += 1;
        self.increase_rate(settings);
        true
    }

    /// One step of fast recovery, additive or hyper increase.
    fn increase_rate(&mut self, settings: &DcqcnParameters) {
        let (time, bytes) = (self.timer_increases, self.byte_increases);
        let beyond = time.min(bytes).saturating_sub(settings.fast_recovery_steps);
        if beyond > 0 {
            self.target_rate += settings.hyper_increase * u64::from(beyond);
        } else if time.max(bytes) >= settings.fast_recovery_steps {
            self.target_rate += settings.additive_increase;
        }
        self.target_rate = self.target_rate.min(settings.line_rate);
        // Rounded up, so that the port's rate is reached.
        self.current_rate = (self.target_rate + self.current_rate).div_ceil(2);
        self.remainder = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAPER: DcqcnParameters = DcqcnParameters::PAPER;

    fn at(microseconds: u64) -> Instant {
        Instant::from_nanos(microseconds * 1_000)
    }

    #[test]
    fn the_first_notification_halves_the_rate() {
        let mut limiter = Dcqcn::new(&PAPER, at(0));
        limiter.on_cnp(&PAPER, at(0));
        assert_eq!((limiter.current_rate, limiter.target_rate), (50_000_000_000, 100_000_000_000));
        assert_eq!(limiter.alpha, ONE);
    }

    #[test]
    fn alpha_falls_by_one_part_in_256_for_every_interval_without_notification() {
        let mut limiter = Dcqcn::new(&PAPER, at(0));
        limiter.on_cnp(&PAPER, at(0));
        limiter.apply_elapsed_time(&PAPER, at(55 * 10));
        let expected = (0..10).fold(1.0, |alpha: f64, _| alpha * 255.0 / 256.0);
        assert!((limiter.alpha as f64 / ONE as f64 - expected).abs() < 1e-6);
    }

    #[test]
    fn five_steps_of_fast_recovery_come_before_the_target_rises() {
        let mut limiter = Dcqcn::new(&PAPER, at(0));
        limiter.set_rate(&PAPER, at(0), 8_000_000_000);
        limiter.on_cnp(&PAPER, at(0));
        assert_eq!((limiter.current_rate, limiter.target_rate), (4_000_000_000, 8_000_000_000));
        for (steps, rate) in [(1, 6_000_000_000), (2, 7_000_000_000), (3, 7_500_000_000), (4, 7_750_000_000)]
        {
            limiter.apply_elapsed_time(&PAPER, at(55 * steps));
            assert_eq!((limiter.current_rate, limiter.target_rate), (rate, 8_000_000_000));
        }
        limiter.apply_elapsed_time(&PAPER, at(55 * 5));
        assert_eq!((limiter.current_rate, limiter.target_rate), (7_895_000_000, 8_040_000_000));
    }

    #[test]
    fn hyper_increase_needs_time_and_bytes() {
        let mut limiter = Dcqcn::new(&PAPER, at(0));
        limiter.set_rate(&PAPER, at(0), 8_000_000_000);
        limiter.on_cnp(&PAPER, at(0));
        limiter.apply_elapsed_time(&PAPER, at(55 * 6));
        assert_eq!(limiter.target_rate, 8_080_000_000);
        for _ in 0..5 {
            assert!(limiter.on_packet_sent(&PAPER, at(55 * 6), PAPER.byte_counter));
        }
        assert_eq!(limiter.target_rate, 8_280_000_000);
        limiter.on_packet_sent(&PAPER, at(55 * 6), PAPER.byte_counter);
        assert_eq!(limiter.target_rate, 8_680_000_000);
    }

    #[test]
    fn packets_leave_at_the_rate_to_the_nanosecond() {
        let mut limiter = Dcqcn::new(&PAPER, at(0));
        limiter.set_rate(&PAPER, at(0), 30_000_000_000);
        let mut now = at(0);
        for _ in 0..3_000 {
            limiter.on_packet_sent(&PAPER, now, 1_000);
            now = limiter.next_send_at();
        }
        // 3,000,000 bytes at 30 Gb/s.
        assert_eq!(now.nanos(), 800_000);
    }

    #[test]
    fn a_rate_recovers_to_that_of_the_port_and_limits_nothing_then() {
        let mut limiter = Dcqcn::new(&PAPER, at(0));
        limiter.on_cnp(&PAPER, at(0));
        limiter.apply_elapsed_time(&PAPER, at(1_000_000));
        assert!(!limiter.is_active(&PAPER));
        limiter.on_packet_sent(&PAPER, at(1_000_000), 4_096);
        assert_eq!(limiter.next_send_at(), at(1_000_000));
    }
}
