//! `softhca bench`: RDMA performance relative to raw sockets, measured alternately in one run.
//!
//! Machines are noisy, so every result is compared with raw UDP sockets measured between the RDMA rounds.

mod collective;
mod connections;
mod mode;
mod peer;
mod programs;
mod rdma;
mod results;

use crate::exit_code::{CommandResult, bad_input, failure, failure_in};
use clap::Args;
pub use collective::RankArguments;
use mode::{BenchDaemon, Mode};
use results::{BenchResult, Effort, Measurement, ResultPrinter};
use softhca::Loopback;
use softhca_daemon::DataPath;
use std::process::ExitCode;
use std::time::Duration;

/// Arguments of `softhca bench`.
#[derive(Args)]
pub struct Arguments {
    /// Shorter rounds, fewer sizes, no peers unless --mode peer: takes at most 30 seconds
    #[arg(long)]
    quick: bool,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Only this mode: embedded devices, devices of a daemon on either data path, the traffic of a collective
    /// operation, perftest programs compared with iperf3 and TCP on either data path, or installed peer software; or
    /// all of them
    #[arg(long, value_name = "MODE", value_parser = MODES)]
    mode: Option<String>,
    /// Only benchmarks whose name contains this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

const MODES: [&str; 8] =
    ["embedded", "direct", "daemon", "collective", "programs", "programs-daemon", "peer", "all"];

impl Arguments {
    /// Whether a mode is measured. Programs run only on request; peers take longer than a quick run.
    fn is_selected(&self, mode: &str) -> bool {
        match self.mode.as_deref() {
            Some("all") => true,
            Some(only) => only == mode,
            None => {
                matches!(mode, "embedded" | "direct" | "daemon")
                    || (matches!(mode, "peer" | "collective") && !self.quick)
            }
        }
    }

    /// Whether `--only` selects a benchmark.
    fn matches_filter(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|text| name.contains(text.as_str()))
    }

    /// Rejects a filter that selects no benchmark.
    fn check_filter(&self) -> Result<(), String> {
        let Some(text) = &self.only else { return Ok(()) };
        let names = self.names();
        if names.iter().any(|name| self.matches_filter(name)) {
            return Ok(());
        }
        let scope = match (&self.mode, self.quick) {
            (Some(mode), false) => format!(" of --mode {mode}"),
            (Some(mode), true) => format!(" of --quick --mode {mode}"),
            (None, true) => " of --quick".into(),
            (None, false) => String::new(),
        };
        let names = names.join(", ");
        Err(format!("no benchmark name{scope} contains {text:?} (--only); the names are {names}"))
    }

    /// The benchmark names of the selected modes, in the order in which they run.
    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        if ["embedded", "direct", "daemon"].into_iter().any(|mode| self.is_selected(mode)) {
            names.extend(rdma::standard_benchmarks().into_iter().map(|benchmark| benchmark.name));
            if !self.quick {
                names.extend(rdma::extended_benchmarks().into_iter().map(|benchmark| benchmark.name));
            }
        }
        if self.is_selected("collective") {
            names.push(collective::NAME.into());
        }
        if self.is_selected("programs") || self.is_selected("programs-daemon") {
            names.extend(programs::names());
        }
        if self.is_selected("peer") {
            names.extend(peer::NAMES.map(String::from));
        }
        names
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    arguments.check_filter().map_err(bad_input)?;
    let effort = match arguments.quick {
        true => Effort { round_time: Duration::from_millis(200), rounds: 3 },
        false => Effort { round_time: Duration::from_millis(500), rounds: 7 },
    };
    let mut output = ResultPrinter::new(arguments.json);
    for selected in ["embedded", "direct", "daemon"] {
        if !arguments.is_selected(selected) {
            continue;
        }
        let mode = match selected {
            "embedded" => Ok(Mode::Embedded),
            "direct" => BenchDaemon::start(DataPath::Direct, Loopback::Internal).map(Mode::Direct),
            _ => BenchDaemon::start(DataPath::Daemon, Loopback::Socket).map(Mode::Daemon),
        };
        mode.and_then(|mode| measure(arguments, &mode, effort, &mut output)).map_err(failure_in(selected))?;
    }
    let selected = |name: &str| arguments.matches_filter(name);
    let mut print = |measurement: &Measurement| output.print(measurement);
    if arguments.is_selected("collective") && selected(collective::NAME) {
        collective::measure(effort, &mut print).map_err(failure_in("collective"))?;
    }
    for (mode, data_path) in [("programs", DataPath::Direct), ("programs-daemon", DataPath::Daemon)] {
        if arguments.is_selected(mode) {
            let measured = programs::measure(data_path, &selected, effort, &mut print);
            measured.map_err(failure_in(mode))?;
        }
    }
    if arguments.is_selected("peer") {
        peer::measure(&selected, effort, &mut print).map_err(failure_in("peers"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs one rank of the collective benchmark.
pub fn run_rank(arguments: &RankArguments) -> CommandResult {
    collective::run_rank(arguments).map_err(failure)?;
    Ok(ExitCode::SUCCESS)
}

fn measure(arguments: &Arguments, mode: &Mode, effort: Effort, output: &mut ResultPrinter) -> BenchResult {
    let more = if arguments.quick { Vec::new() } else { rdma::extended_benchmarks() };
    // Fewer rounds suffice for the intermediate sizes and variants.
    let less = Effort { rounds: effort.rounds.min(3), ..effort };
    let all = rdma::standard_benchmarks()
        .into_iter()
        .map(|one| (one, effort))
        .chain(more.into_iter().map(|one| (one, less)));
    for (benchmark, effort) in all.filter(|(benchmark, _)| arguments.matches_filter(&benchmark.name)) {
        let measurement =
            benchmark.measure(mode, effort).map_err(|why| format!("{}: {why}", benchmark.name))?;
        output.print(&measurement);
    }
    Ok(())
}
