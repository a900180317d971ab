//! Congestion control at the card: the notification point answers marks, the reaction point limits rates.
//!
//! What each side does is DCQCN's, as published by Zhu et al. at SIGCOMM 2015; numbers are integers, so that
//! a run gives the same rates on every machine.

mod dcqcn;

pub(crate) use dcqcn::Dcqcn;

use core::time::Duration;

/// The congestion settings of a device. Both halves are off unless asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CongestionSettings {
    /// Answers marked packets with notifications; `None` counts them only.
    pub notification_point: Option<NotificationPoint>,
    /// Limits rates when notifications come; `None` counts them only.
    pub rate_control: Option<DcqcnParameters>,
}

impl CongestionSettings {
    /// Both halves with the paper's parameters.
    pub const DCQCN: CongestionSettings = CongestionSettings {
        notification_point: Some(NotificationPoint::PAPER),
        rate_control: Some(DcqcnParameters::PAPER),
    };
}

/// The notification point: what a receiver of marked packets does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotificationPoint {
    /// The least time between two notifications of one queue pair.
    pub min_cnp_interval: Duration,
    /// The traffic class of notifications: DSCP in the upper six bits.
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

/// The reaction point: how a sender changes the rate of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DcqcnParameters {
    /// The rate of the port, at which every queue pair starts. A world sets it from the cable.
    pub line_rate: u64,
    /// The least rate, in bits per second.
    pub min_rate: u64,
    /// One part in so many of the distance is made up when `alpha` changes: 1/g.
    pub gain_divisor: u32,
    /// How long without a notification until `alpha` falls.
    pub alpha_interval: Duration,
    /// How long until the rate rises, again and again.
    pub rate_increase_interval: Duration,
    /// After how many bytes the rate rises, again and again.
    pub byte_counter: u64,
    /// Rises of each kind before the target itself rises: F.
    pub fast_recovery_steps: u32,
    /// By how much the target rises in additive increase, in bits per second: R_AI.
    pub additive_increase: u64,
    /// By how much more with each step in hyper increase, in bits per second: R_HAI.
    pub hyper_increase: u64,
    /// How far a sender that was late may catch up. Nothing in virtual time, where nobody is late.
    pub slack: Duration,
}

impl DcqcnParameters {
    /// The parameters of the paper at 100 Gb/s. It gives none for hyper increase: ten times the additive one
    /// is the ratio that cards ship with.
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

/// Why the rate of a queue pair changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum RateCause {
    CnpReceived,
    RateTimer,
    ByteCounter,
    Requested,
}
