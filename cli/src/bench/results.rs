//! Measurement results, as a table or as JSON.

use serde::Serialize;
use std::time::Duration;

/// Why nothing was measured.
pub type BenchError = Box<dyn std::error::Error + Send + Sync>;

/// How long and how often to measure.
#[derive(Clone, Copy)]
pub struct Effort {
    pub round_time: Duration,
    /// The number of rounds, each next to one of raw sockets.
    pub rounds: usize,
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
            let heads = ["benchmark", "mode", "unit", "value", "raw", "ratio", "p99"];
            let [name, mode, unit, value, raw, ratio, p99] = heads;
            outln!("{name:24} {mode:16} {unit:8} {value:>9} {raw:>9} {ratio:>6} {p99:>7}");
        }
        self.header_printed = true;
        let Measurement { name, mode, unit, value, raw, ratio, p99 } = measurement;
        let p99 = p99.map_or(String::new(), |p99| format!("{p99:.2}"));
        outln!("{name:24} {mode:16} {unit:8} {value:>9.2} {raw:>9.2} {ratio:>6.2} {p99:>7}");
    }
}
