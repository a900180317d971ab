//! `softhca bench`: the card beside bare sockets, measured in turns in one run.
//!
//! Machines are noisy, so every figure is a ratio to what bare UDP sockets did between the card's own rounds.

mod card;
mod connections;
mod mode;
mod table;

use clap::Args;
use mode::Mode;
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
    /// Only this card: embedded or daemon
    #[arg(long, value_name = "MODE", value_parser = ["embedded", "daemon"])]
    mode: Option<String>,
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
    for wanted in ["embedded", "daemon"] {
        if arguments.mode.as_ref().is_some_and(|mode| mode != wanted) {
            continue;
        }
        let mode = if wanted == "embedded" { Ok(Mode::Embedded) } else { Mode::daemon() };
        if let Err(why) = mode.and_then(|mode| measure(arguments, &mode, effort, &mut output)) {
            eprintln!("softhca: {wanted}: {why}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn measure(
    arguments: &Arguments,
    mode: &Mode,
    effort: Effort,
    output: &mut table::Output,
) -> Result<(), Failure> {
    let wanted = |name: &str| arguments.only.as_ref().is_none_or(|text| name.contains(text.as_str()));
    for benchmark in card::BENCHMARKS.iter().filter(|benchmark| wanted(benchmark.name)) {
        let figure = benchmark.measure(mode, effort).map_err(|why| format!("{}: {why}", benchmark.name))?;
        output.row(&figure);
    }
    Ok(())
}
