//! `softhca bench`: the card beside bare sockets, measured in turns in one run.
//!
//! Machines are noisy, so every figure is a ratio to what bare UDP sockets did between the card's own rounds.

mod connections;
mod mode;
mod peer;
mod programs;
mod rdma;
mod results;

use clap::Args;
use mode::{BenchDaemon, Mode};
use softhca::Loopback;
use std::process::ExitCode;
use std::time::Duration;

/// What `softhca bench` takes.
#[derive(Args)]
pub struct Arguments {
    /// Shorter rounds, fewer sizes, no peers unless asked for: ends within 30 seconds
    #[arg(long)]
    quick: bool,
    /// One JSON object per line
    #[arg(long)]
    json: bool,
    /// Only this card, embedded or daemon, only the peers that are installed, or perftest's programs on a card beside
    /// iperf3 and TCP
    #[arg(long, value_name = "MODE", value_parser = ["embedded", "daemon", "peer", "programs"])]
    mode: Option<String>,
    /// Only benchmarks whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

/// How long and how often to measure.
#[derive(Clone, Copy)]
pub struct Effort {
    /// Of one round.
    pub round_time: Duration,
    /// Rounds, each beside one of bare sockets.
    pub rounds: usize,
}

/// Why nothing was measured.
type BenchError = Box<dyn std::error::Error + Send + Sync>;

impl Arguments {
    /// Whether a mode is measured. Perftest's programs have to be asked for, and peers take longer than a quick run.
    fn is_selected(&self, mode: &str) -> bool {
        match &self.mode {
            Some(only) => only == mode,
            None => matches!(mode, "embedded" | "daemon") || (mode == "peer" && !self.quick),
        }
    }

    /// Whether a benchmark is measured in the modes that have it.
    fn matches_filter(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|text| name.contains(text.as_str()))
    }

    /// Refuses to measure nothing.
    fn check_filter(&self) -> Result<(), String> {
        let Some(text) = &self.only else { return Ok(()) };
        let names = self.names();
        if names.iter().any(|name| self.matches_filter(name)) {
            return Ok(());
        }
        let place = match (&self.mode, self.quick) {
            (Some(mode), false) => format!(" of --mode {mode}"),
            (Some(mode), true) => format!(" of --quick --mode {mode}"),
            (None, true) => " of --quick".into(),
            (None, false) => String::new(),
        };
        let names = names.join(", ");
        Err(format!("--only {text:?} is in the name of no benchmark{place}; the names are {names}"))
    }

    /// The names of everything that these modes measure, in the order in which it runs.
    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        if self.is_selected("embedded") || self.is_selected("daemon") {
            names.extend(rdma::standard_benchmarks().into_iter().map(|benchmark| benchmark.name));
            if !self.quick {
                names.extend(rdma::extended_benchmarks().into_iter().map(|benchmark| benchmark.name));
            }
        }
        if self.is_selected("programs") {
            names.extend(programs::names());
        }
        if self.is_selected("peer") {
            names.extend(peer::NAMES.map(String::from));
        }
        names
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    if let Err(why) = arguments.check_filter() {
        eprintln!("softhca bench: {why}");
        return ExitCode::from(crate::EXIT_BAD_INPUT);
    }
    let effort = match arguments.quick {
        true => Effort { round_time: Duration::from_millis(200), rounds: 3 },
        false => Effort { round_time: Duration::from_millis(500), rounds: 7 },
    };
    let mut output = results::ResultPrinter::new(arguments.json);
    for wanted in ["embedded", "daemon"] {
        if !arguments.is_selected(wanted) {
            continue;
        }
        let mode = match wanted {
            "embedded" => Ok(Mode::Embedded),
            _ => BenchDaemon::start(Loopback::Socket).map(Mode::Daemon),
        };
        if let Err(why) = mode.and_then(|mode| measure(arguments, &mode, effort, &mut output)) {
            eprintln!("softhca: {wanted}: {why}");
            return ExitCode::FAILURE;
        }
    }
    let wanted = |name: &str| arguments.matches_filter(name);
    if arguments.is_selected("programs")
        && let Err(why) = programs::measure(&wanted, effort, &mut |figure| output.print(figure))
    {
        eprintln!("softhca: programs: {why}");
        return ExitCode::FAILURE;
    }
    if arguments.is_selected("peer")
        && let Err(why) = peer::measure(&wanted, effort, &mut |figure| output.print(figure))
    {
        eprintln!("softhca: peers: {why}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn measure(
    arguments: &Arguments,
    mode: &Mode,
    effort: Effort,
    output: &mut results::ResultPrinter,
) -> Result<(), BenchError> {
    let more = if arguments.quick { Vec::new() } else { rdma::extended_benchmarks() };
    // The sizes between and the variants are for the shape of things: fewer rounds will do.
    let less = Effort { rounds: effort.rounds.min(3), ..effort };
    let all = rdma::standard_benchmarks()
        .into_iter()
        .map(|one| (one, effort))
        .chain(more.into_iter().map(|one| (one, less)));
    for (benchmark, effort) in all.filter(|(benchmark, _)| arguments.matches_filter(&benchmark.name)) {
        let figure = benchmark.measure(mode, effort).map_err(|why| format!("{}: {why}", benchmark.name))?;
        output.print(&figure);
    }
    Ok(())
}
