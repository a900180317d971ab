//! The interface between a queue pair and the algorithm that limits its send rate.

use crate::{Instant, RateCause};

/// The rate of a queue pair as events report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RateSample {
    pub bits_per_second: u64,
    pub target: u64,
    pub alpha_millionths: u32,
}

/// Limits the send rate of one queue pair. A method returns a cause if it changed the rate.
///
/// An algorithm has no timer of its own. [`RateControl::advance`] applies the effect of elapsed time whenever the queue
/// pair wants to send; the queue pair waits until [`RateControl::next_send_at`].
pub(crate) trait RateControl: Send {
    /// The peer sent a congestion notification packet.
    fn on_cnp(&mut self, now: Instant) -> Option<RateCause>;

    /// The peer acknowledged packets; the acknowledgement arrived at `now`.
    fn on_ack(&mut self, now: Instant) -> Option<RateCause> {
        let _ = now;
        None
    }

    /// The ACK timer of the queue pair expired.
    fn on_timeout(&mut self, now: Instant) -> Option<RateCause> {
        let _ = now;
        None
    }

    /// The queue pair sent a packet with payload, of `bytes` on the wire.
    fn on_packet_sent(&mut self, now: Instant, bytes: u64) -> Option<RateCause>;

    /// Applies the time that has elapsed since the last call.
    fn advance(&mut self, now: Instant) -> Option<RateCause>;

    /// The earliest time at which the queue pair may send its next packet.
    fn next_send_at(&self) -> Instant;

    /// Whether [`RateControl::advance`] at `now` would neither change the rate nor allow a packet.
    fn is_waiting(&self, now: Instant) -> bool;

    /// The rate in bits per second; `None` if the algorithm does not limit the queue pair at present.
    fn limit(&self) -> Option<u64>;

    fn sample(&self) -> RateSample;

    /// Restarts the algorithm from a given rate.
    fn set_rate(&mut self, now: Instant, bits_per_second: u64);

    fn set_line_rate(&mut self, bits_per_second: u64);
}
