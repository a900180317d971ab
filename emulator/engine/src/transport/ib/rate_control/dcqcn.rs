//! DCQCN's reaction point: the rate of one queue pair after its first CNP.

use super::algorithm::{RateControl, RateSample};
use crate::{DcqcnParameters, Instant, RateCause};

/// One, in the fixed-point unit of `alpha`.
const ONE: u64 = 1 << 32;

/// The rate of a queue pair and the state of its increase.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dcqcn {
    parameters: DcqcnParameters,
    current_rate: u64,
    target_rate: u64,
    /// The estimate of congestion, in units of [`ONE`].
    alpha: u64,
    alpha_update_at: Instant,
    rate_increase_at: Instant,
    bytes_until_increase: u64,
    timer_increases: u32,
    byte_increases: u32,
    /// The time of the next packet; `remainder` is the part below a nanosecond, in (bits × 10^9) modulo the rate.
    next_send_at: Instant,
    remainder: u64,
}

impl Dcqcn {
    /// Starts at the rate of the port, with the highest estimate of congestion.
    pub fn new(parameters: DcqcnParameters, now: Instant) -> Dcqcn {
        Dcqcn {
            current_rate: parameters.line_rate,
            target_rate: parameters.line_rate,
            alpha: ONE,
            alpha_update_at: now.plus(parameters.alpha_interval),
            rate_increase_at: now.plus(parameters.rate_increase_interval),
            bytes_until_increase: parameters.byte_counter,
            timer_increases: 0,
            byte_increases: 0,
            next_send_at: now,
            remainder: 0,
            parameters,
        }
    }

    fn is_limited(&self) -> bool {
        self.current_rate < self.parameters.line_rate
    }

    fn decay_alpha(&mut self, now: Instant) {
        let divisor = u64::from(self.parameters.gain_divisor);
        while self.alpha_update_at <= now && self.alpha >= divisor {
            self.alpha -= self.alpha / divisor;
            self.alpha_update_at = self.alpha_update_at.plus(self.parameters.alpha_interval);
        }
        if self.alpha_update_at <= now {
            self.alpha_update_at = now.plus(self.parameters.alpha_interval);
        }
    }

    /// One step of fast recovery, additive increase or hyper increase.
    fn increase_rate(&mut self) {
        let parameters = &self.parameters;
        let (time, bytes) = (self.timer_increases, self.byte_increases);
        let hyper_steps = time.min(bytes).saturating_sub(parameters.fast_recovery_steps);
        if hyper_steps > 0 {
            self.target_rate += parameters.hyper_increase * u64::from(hyper_steps);
        } else if time.max(bytes) >= parameters.fast_recovery_steps {
            self.target_rate += parameters.additive_increase;
        }
        self.target_rate = self.target_rate.min(parameters.line_rate);
        // Rounding up lets the rate reach the line rate.
        self.current_rate = (self.target_rate + self.current_rate).div_ceil(2);
        self.remainder = 0;
    }
}

impl RateControl for Dcqcn {
    /// Cuts the rate by `alpha / 2`, then raises `alpha`.
    fn on_cnp(&mut self, now: Instant) -> Option<RateCause> {
        self.advance(now);
        self.decay_alpha(now);
        let parameters = &self.parameters;
        self.target_rate = self.current_rate;
        let cut = ((u128::from(self.current_rate) * u128::from(self.alpha)) >> 33) as u64;
        self.current_rate = (self.current_rate - cut).max(parameters.min_rate);
        let divisor = u64::from(parameters.gain_divisor);
        self.alpha = (self.alpha - self.alpha / divisor + ONE / divisor).min(ONE);
        self.alpha_update_at = now.plus(parameters.alpha_interval);
        self.rate_increase_at = now.plus(parameters.rate_increase_interval);
        self.bytes_until_increase = parameters.byte_counter;
        self.timer_increases = 0;
        self.byte_increases = 0;
        self.remainder = 0;
        Some(RateCause::CnpReceived)
    }

    fn on_packet_sent(&mut self, now: Instant, bytes: u64) -> Option<RateCause> {
        if !self.is_limited() {
            self.next_send_at = now;
            return None;
        }
        let time = bytes * 8 * 1_000_000_000 + self.remainder;
        let slack = self.parameters.slack.as_nanos() as u64;
        let start = self.next_send_at.max(Instant::from_nanos(now.nanos().saturating_sub(slack)));
        self.next_send_at = Instant::from_nanos(start.nanos() + time / self.current_rate);
        self.remainder = time % self.current_rate;
        if bytes < self.bytes_until_increase {
            self.bytes_until_increase -= bytes;
            return None;
        }
        self.bytes_until_increase = self.parameters.byte_counter;
        self.byte_increases += 1;
        self.increase_rate();
        Some(RateCause::ByteCounter)
    }

    fn advance(&mut self, now: Instant) -> Option<RateCause> {
        if self.rate_increase_at > now || !self.is_limited() {
            return None;
        }
        while self.rate_increase_at <= now && self.is_limited() {
            self.timer_increases += 1;
            self.rate_increase_at = self.rate_increase_at.plus(self.parameters.rate_increase_interval);
            self.increase_rate();
        }
        self.decay_alpha(now);
        Some(RateCause::RateTimer)
    }

    fn next_send_at(&self) -> Instant {
        self.next_send_at
    }

    fn is_waiting(&self, now: Instant) -> bool {
        self.next_send_at > now && self.rate_increase_at > now
    }

    fn limit(&self) -> Option<u64> {
        self.is_limited().then_some(self.current_rate)
    }

    fn sample(&self) -> RateSample {
        RateSample {
            bits_per_second: self.current_rate,
            target: self.target_rate,
            alpha_millionths: ((self.alpha * 1_000_000) >> 32) as u32,
        }
    }

    fn set_rate(&mut self, now: Instant, bits_per_second: u64) {
        let rate = bits_per_second.clamp(self.parameters.min_rate, self.parameters.line_rate);
        *self = Dcqcn { current_rate: rate, target_rate: rate, ..Dcqcn::new(self.parameters, now) };
    }

    fn set_line_rate(&mut self, bits_per_second: u64) {
        self.parameters.line_rate = bits_per_second;
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
    fn the_first_cnp_halves_the_rate() {
        let mut dcqcn = Dcqcn::new(PAPER, at(0));
        dcqcn.on_cnp(at(0));
        assert_eq!((dcqcn.current_rate, dcqcn.target_rate), (50_000_000_000, 100_000_000_000));
        assert_eq!(dcqcn.alpha, ONE);
    }

    #[test]
    fn alpha_decays_by_1_in_256_per_interval_without_a_cnp() {
        let mut dcqcn = Dcqcn::new(PAPER, at(0));
        dcqcn.on_cnp(at(0));
        dcqcn.advance(at(55 * 10));
        let expected = (0..10).fold(1.0, |alpha: f64, _| alpha * 255.0 / 256.0);
        assert!((dcqcn.alpha as f64 / ONE as f64 - expected).abs() < 1e-6);
    }

    #[test]
    fn fast_recovery_takes_five_steps_before_the_target_rate_rises() {
        let mut dcqcn = Dcqcn::new(PAPER, at(0));
        dcqcn.set_rate(at(0), 8_000_000_000);
        dcqcn.on_cnp(at(0));
        assert_eq!((dcqcn.current_rate, dcqcn.target_rate), (4_000_000_000, 8_000_000_000));
        for (steps, rate) in [(1, 6_000_000_000), (2, 7_000_000_000), (3, 7_500_000_000), (4, 7_750_000_000)]
        {
            dcqcn.advance(at(55 * steps));
            assert_eq!((dcqcn.current_rate, dcqcn.target_rate), (rate, 8_000_000_000));
        }
        dcqcn.advance(at(55 * 5));
        assert_eq!((dcqcn.current_rate, dcqcn.target_rate), (7_895_000_000, 8_040_000_000));
    }

    #[test]
    fn hyper_increase_needs_timer_and_byte_counter() {
        let mut dcqcn = Dcqcn::new(PAPER, at(0));
        dcqcn.set_rate(at(0), 8_000_000_000);
        dcqcn.on_cnp(at(0));
        dcqcn.advance(at(55 * 6));
        assert_eq!(dcqcn.target_rate, 8_080_000_000);
        for _ in 0..5 {
            assert_eq!(dcqcn.on_packet_sent(at(55 * 6), PAPER.byte_counter), Some(RateCause::ByteCounter));
        }
        assert_eq!(dcqcn.target_rate, 8_280_000_000);
        dcqcn.on_packet_sent(at(55 * 6), PAPER.byte_counter);
        assert_eq!(dcqcn.target_rate, 8_680_000_000);
    }

    #[test]
    fn packets_are_paced_to_the_nanosecond() {
        let mut dcqcn = Dcqcn::new(PAPER, at(0));
        dcqcn.set_rate(at(0), 30_000_000_000);
        let mut now = at(0);
        for _ in 0..3_000 {
            dcqcn.on_packet_sent(now, 1_000);
            now = dcqcn.next_send_at();
        }
        // 3,000,000 bytes at 30 Gb/s.
        assert_eq!(now.nanos(), 800_000);
    }

    #[test]
    fn a_rate_that_recovers_to_the_line_rate_is_no_limit() {
        let mut dcqcn = Dcqcn::new(PAPER, at(0));
        dcqcn.on_cnp(at(0));
        dcqcn.advance(at(1_000_000));
        assert!(!dcqcn.is_limited());
        dcqcn.on_packet_sent(at(1_000_000), 4_096);
        assert_eq!(dcqcn.next_send_at(), at(1_000_000));
    }
}
