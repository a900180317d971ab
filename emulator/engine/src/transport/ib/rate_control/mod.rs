//! The algorithms that limit the send rate of a queue pair.
//!
//! The notification point answers ECN marks with CNPs, the reaction point limits rates. Both follow DCQCN (Zhu et al.,
//! SIGCOMM 2015). All arithmetic is on integers, so that a run yields the same rates on every machine.

mod algorithm;
mod dcqcn;

pub(crate) use algorithm::{RateControl, RateSample};

use crate::{Instant, RateControlSettings};
use alloc::boxed::Box;

impl RateControlSettings {
    /// The algorithm for one queue pair, at the rate of the port.
    pub(crate) fn start(&self, now: Instant) -> Box<dyn RateControl> {
        match self {
            RateControlSettings::Dcqcn(parameters) => Box::new(dcqcn::Dcqcn::new(*parameters, now)),
        }
    }
}
