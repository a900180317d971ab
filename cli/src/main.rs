//! The command `softhca`: each subcommand is a module with its arguments and a `run`.
//!
//! Exit codes: 0 all is well, 1 an expectation failed, 2 bad input; `exec` has those of env(1).

#[macro_use]
mod terminal;

mod bench;
#[cfg(target_os = "linux")]
mod daemon;
mod demo;
#[cfg(target_os = "linux")]
mod doctor;
#[cfg(target_os = "linux")]
mod exec;
mod explain;
#[cfg(unix)]
mod explore;
mod input;
mod output;
mod playground;
mod report;
mod run;
mod shrink;
#[cfg(target_os = "linux")]
mod status;
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
    /// See every operation on two emulated hosts, and a lost packet
    Demo(demo::Arguments),
    /// Run one or more cards that programs share, in the foreground
    #[cfg(target_os = "linux")]
    Daemon(daemon::Arguments),
    /// Run an unmodified verbs program on an emulated host; starts a daemon when none runs
    #[cfg(target_os = "linux")]
    Exec(exec::Arguments),
    /// Print the variables that put programs on an emulated host, for shells, IDEs and test runners
    #[cfg(target_os = "linux")]
    Env(exec::EnvArguments),
    /// Tell what runs in a daemon
    #[cfg(target_os = "linux")]
    Status(status::DaemonTarget),
    /// List the devices of a daemon
    #[cfg(target_os = "linux")]
    Devices(status::DaemonTarget),
    /// Describe the devices of a daemon
    #[cfg(target_os = "linux")]
    Devinfo(status::DevinfoArguments),
    /// Tell what the cards of a daemon counted
    #[cfg(target_os = "linux")]
    Stats(status::StatsArguments),
    /// Tell every asynchronous event of a daemon's cards as it comes
    #[cfg(target_os = "linux")]
    Asyncwatch(status::DaemonTarget),
    /// End a daemon
    #[cfg(target_os = "linux")]
    Stop(status::DaemonTarget),
    /// Tell what this machine allows, and what is lost without it
    #[cfg(target_os = "linux")]
    Doctor,
    /// Run scenario files: scripted faults, expectations, a verdict
    Run(run::Arguments),
    /// Find the fewest faults with which a scenario still fails
    Shrink(shrink::Arguments),
    /// Show a run that goes on in a browser
    #[cfg(unix)]
    Explore(explore::Arguments),
    /// Make a page in which scenarios are edited and run
    Playground(playground::Arguments),
    /// Make a page of a run or a capture, to be looked at in a browser
    Report(report::Arguments),
    /// Explain from an event log why a work request failed or took long
    Why(explain::WhyArguments),
    /// Warn of what an event log shows to be wrong in a verbs program
    Lint(explain::LintArguments),
    /// Tell the RoCE packets of a capture, one line each or as a ladder, or the events of a log
    Trace(trace::Arguments),
}

/// The exit code for input that cannot be used.
const EXIT_BAD_INPUT: u8 = 2;

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        #[cfg(target_os = "linux")]
        Command::Daemon(arguments) => daemon::run(&arguments),
        #[cfg(target_os = "linux")]
        Command::Exec(arguments) => exec::run(&arguments),
        #[cfg(target_os = "linux")]
        Command::Env(arguments) => exec::env(&arguments),
        #[cfg(target_os = "linux")]
        Command::Status(target) => status::status(&target),
        #[cfg(target_os = "linux")]
        Command::Devices(target) => status::devices(&target),
        #[cfg(target_os = "linux")]
        Command::Devinfo(arguments) => status::devinfo(&arguments),
        #[cfg(target_os = "linux")]
        Command::Stats(arguments) => status::stats(&arguments),
        #[cfg(target_os = "linux")]
        Command::Asyncwatch(target) => status::asyncwatch(&target),
        #[cfg(target_os = "linux")]
        Command::Stop(target) => status::stop(&target),
        #[cfg(target_os = "linux")]
        Command::Doctor => doctor::run(),
        #[cfg(unix)]
        Command::Explore(arguments) => explore::run(&arguments),
        Command::Playground(arguments) => playground::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Shrink(arguments) => shrink::run(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
        Command::Why(arguments) => explain::why(&arguments),
        Command::Lint(arguments) => explain::lint(&arguments),
    }
}
