//! The command `softhca`: each subcommand is a module with its arguments and a `run`.
//!
//! Exit codes: 0 all is well, 1 an expectation failed, 2 bad input.

mod bench;
mod time;
mod trace;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// SoftHCA: an RDMA network card made of software.
#[derive(Parser)]
#[command(name = "softhca", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the card beside bare UDP sockets
    Bench(bench::Arguments),
    /// Tell the RoCE packets of a capture, one line each or as a ladder
    Trace(trace::Arguments),
}

/// The exit code for input that cannot be used.
const BAD_INPUT: u8 = 2;

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
    }
}
