//! Measurement results, as a table or as JSON.

use serde::Serialize;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// Why nothing was measured.
pub type BenchError = Box<dyn std::error::Error + Send + Sync>;

pub type BenchResult<T = ()> = Result<T, BenchError>;

/// How long and how often to measure.
#[derive(Clone, Copy)]
pub struct Effort {
    pub round_time: Duration,
    /// The number of rounds, each next to one of raw sockets.
    pub rounds: usize,
}

pub const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The results of some rounds.
#[derive(Default)]
pub struct Rounds {
    pub values: Vec<f64>,
    /// The results of what the device is compared with.
    pub raws: Vec<f64>,
    /// The 99th percentiles, for latencies.
    pub p99s: Vec<f64>,
}

impl Rounds {
    /// The medians of the rounds.
    pub fn measurement(self, name: &str, mode: &'static str, unit: &'static str) -> Measurement {
        let Rounds { values, raws, p99s } = self;
        let p99 = (!p99s.is_empty()).then(|| median(p99s));
        Measurement { p99, ..Measurement::new(name, mode, unit, median(values), median(raws)) }
    }
}

/// Half a round trip in microseconds.
pub fn half_micros(round_trip: Duration) -> f64 {
    round_trip.as_nanos() as f64 / 2e3
}

/// The median of some values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[derive(Serialize)]
pub struct Measurement {
    /// The benchmark.
    pub name: String,
    /// The mode, or the peer software.
    pub mode: &'static str,
    /// The unit of `value` and `raw`.
    pub unit: &'static str,
    /// The result of the device.
    pub value: f64,
    /// The result of raw sockets in between.
    pub raw: f64,
    /// `value / raw`.
    pub ratio: f64,
    /// The 99th percentile, for latencies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
    /// The aim of the result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aim: Option<Aim>,
}

impl Measurement {
    pub fn new(name: &str, mode: &'static str, unit: &'static str, value: f64, raw: f64) -> Self {
        let aim = Aim::of(name, mode);
        Measurement { name: name.into(), mode, unit, value, raw, ratio: value / raw, p99: None, aim }
    }
}

/// The aim of a result.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aim {
    RatioAtLeast(f64),
    RatioAtMost(f64),
    /// In the unit of the measurement.
    ValueAtLeast(f64),
}

impl Aim {
    /// The aim of a benchmark in a mode.
    fn of(name: &str, mode: &str) -> Option<Aim> {
        Some(match (mode, name) {
            ("embedded", "rc-write-1MiB" | "rc-read-1MiB" | "rc-send-1MiB") => Aim::RatioAtLeast(0.8),
            // Three million messages per second.
            ("embedded", "rc-write-64B") => Aim::ValueAtLeast(0.192),
            ("embedded", "rc-write-4KiB") => Aim::RatioAtLeast(0.6),
            ("embedded", "rc-write-32KiB") => Aim::RatioAtLeast(0.7),
            ("embedded", "rc-send-64B-rate") => Aim::ValueAtLeast(5.0),
            ("embedded", "rc-send-64B-latency") => Aim::RatioAtMost(1.25),
            ("direct", "cm-connect-1" | "cm-connect-64") => Aim::RatioAtLeast(0.4),
            ("direct", "all-reduce-64MiB") => Aim::RatioAtLeast(1.0),
            ("programs", "ib_write_bw-1MiB") => Aim::RatioAtLeast(1.0),
            ("programs", "ib_write_bw-1MiB-two-hosts") => Aim::RatioAtLeast(0.9),
            ("programs", "ib_send_lat-64B") => Aim::RatioAtMost(0.5),
            ("programs", "ib_send_lat-64B-two-hosts") => Aim::RatioAtMost(1.2),
            ("programs", "ib_send_lat-64B-events" | "ib_send_lat-64B-events-two-hosts") => {
                Aim::RatioAtMost(1.2)
            }
            ("programs", "ib_send_bw-64B" | "ib_send_bw-64B-two-hosts") => Aim::ValueAtLeast(4.0),
            _ => return None,
        })
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Aim::RatioAtLeast(ratio) => write!(f, "ratio >= {ratio}"),
            Aim::RatioAtMost(ratio) => write!(f, "ratio <= {ratio}"),
            Aim::ValueAtLeast(value) => write!(f, "value >= {value}"),
        }
    }
}

/// Prints measurements as they arrive.
pub struct ResultPrinter {
    json: bool,
    header_printed: bool,
}

impl ResultPrinter {
    pub fn new(json: bool) -> ResultPrinter {
        ResultPrinter { json, header_printed: false }
    }

    pub fn print(&mut self, measurement: &Measurement) {
        if self.json {
            outln!("{}", serde_json::to_string(measurement).expect("a measurement is plain data"));
            return;
        }
        if !self.header_printed {
            let heads = ["benchmark", "mode", "unit", "value", "raw", "ratio", "p99", "aim"];
            let [name, mode, unit, value, raw, ratio, p99, aim] = heads;
            outln!("{name:34} {mode:16} {unit:8} {value:>9} {raw:>9} {ratio:>6} {p99:>7}  {aim}");
        }
        self.header_printed = true;
        let Measurement { name, mode, unit, value, raw, ratio, p99, aim } = measurement;
        let p99 = p99.map_or(String::new(), |p99| format!("{p99:.2}"));
        let aim = aim.map_or(String::new(), |aim| aim.to_string());
        let line =
            format!("{name:34} {mode:16} {unit:8} {value:>9.2} {raw:>9.2} {ratio:>6.2} {p99:>7}  {aim}");
        outln!("{}", line.trim_end());
    }
}
