//! `softhca bench`: the card beside bare sockets, measured in turns in one run.
//!
//! Machines are noisy, so every figure is a ratio to what bare UDP sockets did between the card's own rounds.

mod embedded;
mod table;

use clap::Args;
use std::process::ExitCode;
use std::time::Duration;

/// What `softhca bench` takes.
#[derive(Args)]
pub struct Arguments {
    /// Shorter rounds: ends within 30 seconds
    #[arg(long)]
    quick: bool,
    /// One JSON object per line
    #[arg(long)]
    json: bool,
    /// Only benchmarks whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

/// How long and how often to measure.
#[derive(Clone, Copy)]
pub struct Effort {
    /// Of one round.
    pub round: Duration,
    /// Rounds, each beside one of bare sockets.
    pub rounds: usize,
}

/// Why nothing was measured.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let effort = match arguments.quick {
        true => Effort { round: Duration::from_millis(200), rounds: 3 },
        false => Effort { round: Duration::from_millis(500), rounds: 7 },
    };
    let mut output = table::Output::new(arguments.json);
    for benchmark in embedded::BENCHMARKS {
        if arguments.only.as_ref().is_some_and(|text| !benchmark.name.contains(text.as_str())) {
            continue;
        }
        match benchmark.measure(effort) {
            Ok(figure) => output.row(&figure),
            Err(why) => {
                eprintln!("softhca: {}: {why}", benchmark.name);
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
