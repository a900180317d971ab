//! The command `softhca`. Each subcommand is a module with its arguments and a `run` function.
//!
//! Exit codes: 0 for success, 1 for a failed expectation, 2 for bad input; `exec` uses those of env(1).

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
mod exit_code;
mod explain;
#[cfg(unix)]
mod explore;
mod input;
#[cfg(target_os = "linux")]
mod lab;
#[cfg(target_os = "linux")]
mod metrics;
mod output;
mod playground;
#[cfg(target_os = "linux")]
mod rdma;
mod report;
mod run;
mod scenario;
mod shell;
mod shrink;
#[cfg(target_os = "linux")]
mod status;
#[cfg(target_os = "linux")]
mod sweep;
mod trace;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// SoftHCA: a software RDMA NIC (RoCEv2 over UDP), with fault injection, captures and explanations.
#[derive(Parser)]
#[command(name = "softhca", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure RDMA performance relative to raw UDP sockets
    Bench(bench::Arguments),
    /// Run every RDMA operation between two emulated hosts, then lose a packet
    Demo(demo::Arguments),
    /// Run the daemon in the foreground: emulated hosts, each with a device that programs share
    #[cfg(target_os = "linux")]
    Daemon(daemon::Arguments),
    /// Run an unmodified verbs program on an emulated host; starts a daemon if none is running
    #[cfg(target_os = "linux")]
    Exec(exec::Arguments),
    /// Print the environment variables that run programs on an emulated host, for shells, IDEs and test runners
    #[cfg(target_os = "linux")]
    Env(exec::EnvArguments),
    /// Run a program on a host with a network interface of its own, in a network of such hosts; needs no root
    #[cfg(target_os = "linux")]
    Lab(lab::Arguments),
    /// Show the hosts, clients and resources of a daemon
    #[cfg(target_os = "linux")]
    Status(status::DaemonTarget),
    /// List the RDMA devices of a daemon, as ibv_devices does
    #[cfg(target_os = "linux")]
    Devices(status::DaemonTarget),
    /// Show the attributes of a daemon's RDMA devices, as ibv_devinfo does
    #[cfg(target_os = "linux")]
    Devinfo(status::DevinfoArguments),
    /// Show the counters of a daemon's devices and network ports
    #[cfg(target_os = "linux")]
    Stats(status::StatsArguments),
    /// Print the counters of a daemon's devices in the Prometheus text format, or serve them
    #[cfg(target_os = "linux")]
    Metrics(metrics::Arguments),
    /// Show the ports of a daemon's devices as `rdma link` does, take one down or bring it up
    #[cfg(target_os = "linux")]
    Link(rdma::LinkArguments),
    /// Count the objects of a daemon's devices or list queue pairs, as `rdma resource` does
    #[cfg(target_os = "linux")]
    Resource(rdma::ResourceArguments),
    /// Print asynchronous events of a daemon's devices as they occur, as ibv_asyncwatch does
    #[cfg(target_os = "linux")]
    Asyncwatch(status::DaemonTarget),
    /// Stop a daemon
    #[cfg(target_os = "linux")]
    Stop(status::DaemonTarget),
    /// Check what this machine supports, and what is lost where it does not
    #[cfg(target_os = "linux")]
    Doctor,
    /// Run scenario files: workloads, scripted faults and expectations, with a verdict
    Run(run::Arguments),
    /// Find a minimal set of faults with which a scenario still fails
    Shrink(shrink::Arguments),
    /// Run programs again and again, with a fault in another call, completion or event each time
    #[cfg(target_os = "linux")]
    Sweep(sweep::Arguments),
    /// Show a running daemon or a growing event log in a browser
    #[cfg(unix)]
    Explore(explore::Arguments),
    /// Create an HTML page that edits and runs scenarios in a browser
    Playground(playground::Arguments),
    /// Create an HTML report from a run or a capture
    Report(report::Arguments),
    /// Explain from an event log or a capture why work requests failed or were slow
    Why(explain::WhyArguments),
    /// Report mistakes of a verbs program that an event log shows
    Lint(explain::LintArguments),
    /// Print the RoCE packets in a capture, as lines or as ladder diagrams, or the events in a log
    Trace(trace::Arguments),
}

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
        Command::Lab(arguments) => lab::run(&arguments),
        #[cfg(target_os = "linux")]
        Command::Status(target) => status::status(&target),
        #[cfg(target_os = "linux")]
        Command::Devices(target) => status::devices(&target),
        #[cfg(target_os = "linux")]
        Command::Devinfo(arguments) => status::devinfo(&arguments),
        #[cfg(target_os = "linux")]
        Command::Stats(arguments) => status::stats(&arguments),
        #[cfg(target_os = "linux")]
        Command::Metrics(arguments) => metrics::run(&arguments),
        #[cfg(target_os = "linux")]
        Command::Link(arguments) => rdma::link(&arguments),
        #[cfg(target_os = "linux")]
        Command::Resource(arguments) => rdma::resource(&arguments),
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
        #[cfg(target_os = "linux")]
        Command::Sweep(arguments) => sweep::run(&arguments),
        Command::Shrink(arguments) => shrink::run(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
        Command::Why(arguments) => explain::why(&arguments),
        Command::Lint(arguments) => explain::lint(&arguments),
    }
}
