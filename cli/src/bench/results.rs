//! Figures for people and for programs.

use serde::Serialize;

/// One measured figure.
#[derive(Serialize)]
pub struct Measurement {
    /// What was measured.
    pub name: String,
    /// On which card, or which peer.
    pub mode: &'static str,
    /// The unit of `value` and `raw`.
    pub unit: &'static str,
    /// What the card did.
    pub value: f64,
    /// What bare sockets did in between.
    pub raw: f64,
    /// `value / raw`.
    pub ratio: f64,
    /// The 99th percentile, for latencies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
}

/// Prints figures as they come.
pub struct ResultPrinter {
    json: bool,
    header_printed: bool,
}

impl ResultPrinter {
    pub fn new(json: bool) -> ResultPrinter {
        ResultPrinter { json, header_printed: false }
    }

    pub fn print(&mut self, figure: &Measurement) {
        if self.json {
            say!("{}", serde_json::to_string(figure).expect("a figure is plain data"));
            return;
        }
        if !self.header_printed {
            let heads = ["benchmark", "mode", "unit", "value", "raw", "ratio", "p99"];
            let [name, mode, unit, value, raw, ratio, p99] = heads;
            say!("{name:24} {mode:16} {unit:8} {value:>9} {raw:>9} {ratio:>6} {p99:>7}");
        }
        self.header_printed = true;
        let Measurement { name, mode, unit, value, raw, ratio, p99 } = figure;
        let p99 = p99.map_or(String::new(), |p99| format!("{p99:.2}"));
        say!("{name:24} {mode:16} {unit:8} {value:>9.2} {raw:>9.2} {ratio:>6.2} {p99:>7}");
    }
}
