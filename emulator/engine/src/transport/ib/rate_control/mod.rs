//! Congestion control: the settings of both ends, and the algorithms that limit the send rate of a queue pair.
//!
//! The notification point answers ECN marks with CNPs, the reaction point limits rates. Both follow DCQCN (Zhu et al.,
//! SIGCOMM 2015). All arithmetic is on integers, so that a run yields the same rates on every machine.

mod algorithm;
mod dcqcn;

pub use algorithm::RateCause;
pub(crate) use algorithm::{RateControl, RateSample};
pub use dcqcn::DcqcnParameters;

use crate::Instant;
use alloc::boxed::Box;
use core::time::Duration;

/// The congestion settings of a device. Both halves are off by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CongestionSettings {
    /// Answers ECN-marked packets with CNPs; `None` only counts the marks.
    pub notification_point: Option<NotificationPoint>,
    /// Limits rates when CNPs arrive; `None` only counts the CNPs.
    pub rate_control: Option<RateControlSettings>,
}

impl CongestionSettings {
    /// Both halves with the parameters of the DCQCN paper.
    pub const DCQCN: CongestionSettings = CongestionSettings {
        notification_point: Some(NotificationPoint::PAPER),
        rate_control: Some(RateControlSettings::Dcqcn(DcqcnParameters::PAPER)),
    };

    /// The names that [`CongestionSettings::from_name`] accepts.
    pub const NAMES: [&'static str; 2] = ["off", "dcqcn"];

    /// The default settings of an algorithm by its name in configuration files and scenarios.
    pub fn from_name(name: &str) -> Option<CongestionSettings> {
        match name {
            "off" => Some(CongestionSettings::default()),
            "dcqcn" => Some(CongestionSettings::DCQCN),
            _ => None,
        }
    }

    /// The name of default settings of an algorithm.
    pub fn name(&self) -> Option<&'static str> {
        Self::NAMES.into_iter().find(|name| Self::from_name(name).as_ref() == Some(self))
    }
}

/// The notification point: the reaction of a receiver to ECN-marked packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotificationPoint {
    /// The minimum time between two CNPs of one queue pair.
    pub min_cnp_interval: Duration,
    /// The traffic class of CNPs: DSCP in the upper six bits.
    pub traffic_class: u8,
}

impl NotificationPoint {
    /// The interval of the paper, 50 µs; DSCP 48, which is priority 6.
    pub const PAPER: NotificationPoint =
        NotificationPoint { min_cnp_interval: Duration::from_micros(50), traffic_class: 48 << 2 };
}

impl Default for NotificationPoint {
    fn default() -> NotificationPoint {
        NotificationPoint::PAPER
    }
}

/// The rate control algorithm of a device, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateControlSettings {
    /// DCQCN.
    Dcqcn(DcqcnParameters),
}

impl RateControlSettings {
    /// Sets the rate of the port, at which every queue pair starts.
    pub fn set_line_rate(&mut self, bits_per_second: u64) {
        match self {
            RateControlSettings::Dcqcn(parameters) => parameters.line_rate = bits_per_second,
        }
    }

    /// Lets a sender that runs late catch up by at least `slack`.
    pub fn allow_slack(&mut self, slack: Duration) {
        match self {
            RateControlSettings::Dcqcn(parameters) => parameters.slack = parameters.slack.max(slack),
        }
    }

    /// The algorithm for one queue pair, at the rate of the port.
    pub(crate) fn start(&self, now: Instant) -> Box<dyn RateControl> {
        match self {
            RateControlSettings::Dcqcn(parameters) => Box::new(dcqcn::Dcqcn::new(*parameters, now)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_is_found_by_its_name() {
        for name in CongestionSettings::NAMES {
            assert!(CongestionSettings::from_name(name).is_some(), "{name}");
        }
        assert_eq!(CongestionSettings::from_name("swift"), None);
    }
}
