//! The settings of a device.

use crate::quantity::{Rate, Size, Time};
use crate::source::{Result, Source};
use crate::spec::{CmSpec, CongestionControlSpec, DeviceSpec};
use softhca_engine::{
    self as engine, CmTimers, DcqcnParameters, EndToEndCredits, NotificationPoint, RateControlSettings,
    Settings,
};
use softhca_fabric::{PER_BILLION, PfcSettings, ReceiverSettings};
use std::time::Duration;

/// A device with a receive rate. Its thresholds are fixed fractions of the buffer.
pub(super) fn slow_receiver(rate: Rate, buffer: Option<Size>) -> ReceiverSettings {
    let defaults = ReceiverSettings::default();
    let buffer = buffer.map_or(defaults.buffer, |size| size.0);
    let flow_control =
        defaults.pfc.map(|flow| PfcSettings { xoff: buffer / 4, xon: buffer / 16 * 3, ..flow });
    ReceiverSettings { bits_per_second: Some(rate.0), buffer, pfc: flow_control, ..defaults }
}

pub(super) fn congestion_settings(
    spec: &CongestionControlSpec,
    source: &Source,
    path: &str,
) -> Result<engine::CongestionSettings> {
    let defaults = engine::CongestionSettings::from_name(&spec.algorithm).ok_or_else(|| {
        let message = format!("unknown congestion control algorithm {:?}", spec.algorithm);
        source
            .error_in(path, "algorithm", message)
            .suggest(&spec.algorithm, engine::CongestionSettings::NAMES)
    })?;
    let Some(RateControlSettings::Dcqcn(defaults)) = defaults.rate_control else { return Ok(defaults) };
    let zero = [
        (spec.gain.is_some_and(|gain| gain.0 == 0), "gain"),
        (spec.alpha_timer.is_some_and(|time| time.0 == 0), "alpha-timer"),
        (spec.rate_timer.is_some_and(|time| time.0 == 0), "rate-timer"),
        (spec.byte_counter.is_some_and(|size| size.0 == 0), "byte-counter"),
        (spec.initial_rate.is_some_and(|rate| rate.0 == 0), "initial-rate"),
        (spec.min_rate.is_some_and(|rate| rate.0 == 0), "min-rate"),
    ];
    if let Some((_, key)) = zero.iter().find(|(is_zero, _)| *is_zero) {
        return Err(source.error_in(path, key, format!("`{key}` cannot be 0")));
    }
    let time =
        |spec: Option<Time>, defaults: Duration| spec.map_or(defaults, |time| Duration::from_nanos(time.0));
    let rate = |spec: Option<Rate>, defaults: u64| spec.map_or(defaults, |rate| rate.0);
    let control = DcqcnParameters {
        min_rate: rate(spec.min_rate, defaults.min_rate),
        gain_divisor: spec.gain.map_or(defaults.gain_divisor, |gain| (PER_BILLION + gain.0 / 2) / gain.0),
        alpha_interval: time(spec.alpha_timer, defaults.alpha_interval),
        rate_increase_interval: time(spec.rate_timer, defaults.rate_increase_interval),
        byte_counter: spec.byte_counter.map_or(defaults.byte_counter, |size| size.0),
        fast_recovery_steps: spec.fast_recovery_steps.unwrap_or(defaults.fast_recovery_steps),
        additive_increase: rate(spec.additive_increase, defaults.additive_increase),
        hyper_increase: rate(spec.hyper_increase, defaults.hyper_increase),
        ..defaults
    };
    let interval = time(spec.cnp_interval, NotificationPoint::PAPER.min_cnp_interval);
    let notification = NotificationPoint { min_cnp_interval: interval, ..NotificationPoint::PAPER };
    Ok(engine::CongestionSettings {
        notification_point: Some(notification),
        rate_control: Some(RateControlSettings::Dcqcn(control)),
    })
}

pub(super) fn cm_times(spec: &CmSpec, source: &Source) -> Result<CmTimers> {
    let defaults = CmTimers::LINUX;
    let number = |key: &str, value: Option<u8>, max: u8, defaults: u8| match value {
        Some(value) if value > max => {
            let message = format!("{key} is {value}, the maximum is {max}");
            Err(source.error_at(&format!("device.cm.{key}"), message))
        }
        value => Ok(value.unwrap_or(defaults)),
    };
    Ok(CmTimers {
        response_timeout: number("response-timeout", spec.response_timeout, 31, defaults.response_timeout)?,
        packet_lifetime: number("packet-lifetime", spec.packet_lifetime, 31, defaults.packet_lifetime)?,
        max_retries: number("max-retries", spec.max_retries, 15, defaults.max_retries)?,
        service_timeout: number("service-timeout", spec.service_timeout, 24, defaults.service_timeout)?,
    })
}

/// The settings of a device that the file does not configure.
pub(crate) fn default_settings() -> Settings {
    host_settings(&DeviceSpec::default())
}

pub(super) fn host_settings(spec: &DeviceSpec) -> Settings {
    let defaults = Settings::default();
    Settings {
        recovery: spec.recovery.unwrap_or_default(),
        ack_policy: spec.acks.unwrap_or_default(),
        end_to_end_credits: match spec.credits {
            Some(true) => EndToEndCredits::On,
            _ => EndToEndCredits::Off,
        },
        ack_request_interval: spec.ack_request_interval.unwrap_or(defaults.ack_request_interval),
        payload_mode: spec.payload.unwrap_or_default(),
        placement: spec.placement.unwrap_or_default(),
        ..defaults
    }
}
