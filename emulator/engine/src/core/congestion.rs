//! The settings of congestion control, at both ends.

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
}

/// The parameters of the reaction point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DcqcnParameters {
    /// The rate of the port in bits per second, at which every queue pair starts. A simulated network sets it from the
    /// link.
    pub line_rate: u64,
    /// The minimum rate, in bits per second.
    pub min_rate: u64,
    /// The reciprocal of the gain `g` with which `alpha` moves towards 0 or 1.
    pub gain_divisor: u32,
    /// The time without a CNP after which `alpha` decays.
    pub alpha_interval: Duration,
    /// The interval of rate increases by time.
    pub rate_increase_interval: Duration,
    /// The number of sent bytes between rate increases by volume.
    pub byte_counter: u64,
    /// The increases of either kind in fast recovery, before the target rate rises: F.
    pub fast_recovery_steps: u32,
    /// The additive increase of the target rate, in bits per second: R_AI.
    pub additive_increase: u64,
    /// The increase of the target rate per step of hyper increase, in bits per second: R_HAI.
    pub hyper_increase: u64,
    /// The time that a late sender may catch up. Zero in virtual time, in which no sender is late.
    pub slack: Duration,
}

impl DcqcnParameters {
    /// The parameters of the paper at 100 Gb/s. The paper gives none for hyper increase; ten times the additive
    /// increase is the ratio of shipping NICs.
    pub const PAPER: DcqcnParameters = DcqcnParameters {
        line_rate: 100_000_000_000,
        min_rate: 10_000_000,
        gain_divisor: 256,
        alpha_interval: Duration::from_micros(55),
        rate_increase_interval: Duration::from_micros(55),
        byte_counter: 10_000_000,
        fast_recovery_steps: 5,
        additive_increase: 40_000_000,
        hyper_increase: 400_000_000,
        slack: Duration::ZERO,
    };
}

impl Default for DcqcnParameters {
    fn default() -> DcqcnParameters {
        DcqcnParameters::PAPER
    }
}

/// The reason for a change of a queue pair's send rate.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are self-explanatory")]
pub enum RateCause {
    CnpReceived,
    RateTimer,
    ByteCounter,
    Requested,
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
