//! Priority flow control of the port, and the send rates of its queue pairs.

use crate::rate_control::Dcqcn;
use crate::{Context, Hca, RateCause};
use softhca_wire::Qpn;

impl Hca {
    /// The priorities in this mask stop, all others go on: what a pause frame of the port asks for.
    pub fn set_paused_priorities(&mut self, priorities: u8) {
        let resumed = self.state.paused_priorities & !priorities;
        self.state.paused_priorities = priorities;
        if resumed == 0 {
            return;
        }
        for priority in (0..8).filter(|priority| resumed >> priority & 1 == 1) {
            for number in core::mem::take(&mut self.state.paused_qps[priority]) {
                if let Some(qp) = self.queue_pairs.get_mut(number.value()) {
                    qp.is_paused = false;
                    qp.schedule_transmit(&mut self.state);
                }
            }
        }
        self.state.control_packets.unblock();
    }

    /// Counts pause frames that reached the port.
    pub fn count_pause_frames(&mut self, frames: u64) {
        self.state.counters.rx_pause_frames += frames;
    }

    /// The priorities that are stopped.
    pub fn paused_priorities(&self) -> u8 {
        self.state.paused_priorities
    }

    /// Tells the rate of the port.
    pub fn set_line_rate(&mut self, bits_per_second: u64) {
        if let Some(control) = &mut self.state.settings.congestion.rate_control {
            control.line_rate = bits_per_second;
        }
    }

    /// Limits a queue pair to a rate, from which congestion control goes on. False if it is off, or if there
    /// is no such queue pair.
    pub fn set_rate(&mut self, ctx: &mut Context<'_>, queue_pair: Qpn, bits_per_second: u64) -> bool {
        let Some(qp) = self.queue_pairs.get_mut(queue_pair.value()) else { return false };
        let Some(settings) = &self.state.settings.congestion.rate_control else { return false };
        let limiter = qp.rate_control.get_or_insert_with(|| Dcqcn::new(settings, ctx.now).into());
        limiter.set_rate(settings, ctx.now, bits_per_second);
        ctx.emit(limiter.rate_changed_event(queue_pair, RateCause::Requested));
        true
    }

    /// The rate that congestion control lets a queue pair send at; `None` if nothing limits it.
    pub fn rate(&self, queue_pair: Qpn) -> Option<u64> {
        let settings = self.state.settings.congestion.rate_control.as_ref()?;
        let limiter = self.queue_pairs.get(queue_pair.value())?.rate_control.as_ref()?;
        limiter.is_active(settings).then(|| limiter.rate())
    }
}
