//! The send rates of queue pairs.

use crate::{Context, Hca, RateCause};
use softhca_wire::Qpn;

impl Hca {
    /// Sets the rate of the port.
    pub fn set_line_rate(&mut self, bits_per_second: u64) {
        let Some(settings) = &mut self.state.settings.congestion.rate_control else { return };
        settings.set_line_rate(bits_per_second);
        for qpn in self.queue_pairs.numbers(|qp| qp.requester.rate_control.is_some()) {
            let qp = self.queue_pairs.get_mut(qpn);
            if let Some(rate_control) = qp.and_then(|qp| qp.requester.rate_control.as_mut()) {
                rate_control.set_line_rate(bits_per_second);
            }
        }
    }

    /// Limits a queue pair to a rate, from which its rate control continues. False if rate control is off, or if the
    /// queue pair does not exist.
    pub fn set_rate(&mut self, ctx: &mut Context<'_>, qpn: Qpn, bits_per_second: u64) -> bool {
        let Some(qp) = self.queue_pairs.get_mut(qpn.value()) else { return false };
        let Some(settings) = &self.state.settings.congestion.rate_control else { return false };
        qp.requester
            .rate_control
            .get_or_insert_with(|| settings.start(ctx.now))
            .set_rate(ctx.now, bits_per_second);
        qp.emit_rate_change(ctx, Some(RateCause::Requested));
        true
    }

    /// The rate to which rate control limits a queue pair; `None` if it does not.
    pub fn rate(&self, qpn: Qpn) -> Option<u64> {
        self.queue_pairs.get(qpn.value())?.requester.rate_control.as_ref()?.limit()
    }
}
