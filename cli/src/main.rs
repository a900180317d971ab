//! The command `softhca`. Each subcommand is a module with its arguments and a `run` function.
//!
//! Exit codes are in [`exit_code`], and for users in docs/reference/commands.md.

#![cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "most commands are for Linux"))]

#[macro_use]
mod terminal;

#[cfg(target_os = "linux")]
mod bench;
mod bisect;
mod completions;
#[cfg(unix)]
mod course;
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
mod man;
#[cfg(target_os = "linux")]
mod metrics;
mod output;
mod playground;
#[cfg(target_os = "linux")]
mod rdma;
mod report;
mod run;
mod scenario;
mod selection;
mod shell;
mod shrink;
#[cfg(target_os = "linux")]
mod status;
#[cfg(target_os = "linux")]
mod subnet;
#[cfg(target_os = "linux")]
mod sweep;
mod trace;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use exit_code::CommandResult;
use std::process::ExitCode;

/// The version, and the commit if the build knows it.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), env!("SOFTHCA_COMMIT"));

/// SoftHCA: a software RDMA NIC (RoCEv2 over UDP), with fault injection, captures and explanations.
#[derive(Parser)]
#[command(name = "softhca", version = VERSION)]
struct Arguments {
    /// Colours: auto has them on a terminal, unless NO_COLOR is set
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "WHEN",
        default_value = "auto",
        display_order = 1000
    )]
    color: terminal::Color,
    #[command(subcommand)]
    command: Command,
}

/// Declares the commands: each with its arguments, and the function that runs it.
macro_rules! commands {
    ($(
        $(#[doc = $about:literal])+
        $(#[command($($option:tt)*)])?
        $(#[cfg($($system:tt)*)])?
        $name:ident($arguments:ty) => $run:path,
    )*) => {
        #[derive(Subcommand)]
        enum Command {$(
            $(#[doc = $about])+
            $(#[command($($option)*)])?
            $(#[cfg($($system)*)])?
            $name($arguments),
        )*}

        impl Command {
            fn run(&self) -> CommandResult {
                match self {$(
                    $(#[cfg($($system)*)])?
                    Command::$name(arguments) => $run(arguments),
                )*}
            }
        }
    };
}

commands! {
    /// Measure RDMA performance relative to raw UDP sockets
    #[cfg(target_os = "linux")]
    Bench(bench::Arguments) => bench::run,
    /// One rank of the collective benchmark
    #[command(hide = true)]
    #[cfg(target_os = "linux")]
    BenchRank(bench::RankArguments) => bench::run_rank,
    /// Run every RDMA operation between two emulated hosts, then lose a packet
    Demo(demo::Arguments) => demo::run,
    /// Run the daemon in the foreground: emulated hosts, each with a device that programs share
    #[cfg(target_os = "linux")]
    Daemon(daemon::Arguments) => daemon::run,
    /// Run an unmodified verbs program on an emulated host; starts a daemon if none is running
    #[cfg(target_os = "linux")]
    Exec(exec::Arguments) => exec::run,
    /// Print the environment variables that run programs on an emulated host, for shells, IDEs and test runners
    #[cfg(target_os = "linux")]
    Env(exec::EnvArguments) => exec::env,
    /// Run a program on a host with a network interface of its own, in a network of such hosts; needs no root
    #[cfg(target_os = "linux")]
    Lab(lab::Arguments) => lab::run,
    /// Show the hosts, clients and resources of a daemon
    #[cfg(target_os = "linux")]
    Status(status::DaemonTarget) => status::status,
    /// List the RDMA devices of a daemon, as ibv_devices does
    #[cfg(target_os = "linux")]
    Devices(status::DaemonTarget) => status::devices,
    /// Show the attributes of a daemon's RDMA devices, as ibv_devinfo does
    #[cfg(target_os = "linux")]
    Devinfo(status::DevinfoArguments) => status::devinfo,
    /// Show the counters of a daemon's devices and network ports
    #[cfg(target_os = "linux")]
    Stats(status::StatsArguments) => status::stats,
    /// Print the counters of a daemon's devices in the Prometheus text format, or serve them
    #[cfg(target_os = "linux")]
    Metrics(metrics::Arguments) => metrics::run,
    /// Show the ports of a daemon's devices as `rdma link` does, take one down or bring it up
    #[cfg(target_os = "linux")]
    Link(rdma::LinkArguments) => rdma::link,
    /// Count the objects of a daemon's devices or list queue pairs, as `rdma resource` does
    #[cfg(target_os = "linux")]
    Resource(rdma::ResourceArguments) => rdma::resource,
    /// Print asynchronous events of a daemon's devices as they occur, as ibv_asyncwatch does
    #[cfg(target_os = "linux")]
    Asyncwatch(status::DaemonTarget) => status::asyncwatch,
    /// Stop a daemon
    #[cfg(target_os = "linux")]
    Stop(status::DaemonTarget) => status::stop,
    /// Check what this machine supports, and what is lost where it does not
    #[cfg(target_os = "linux")]
    Doctor(doctor::Arguments) => doctor::run,
    /// Run scenario files: workloads, scripted faults and expectations, with a verdict
    Run(run::Arguments) => run::run,
    /// Find a minimal set of faults with which a scenario still fails
    Shrink(shrink::Arguments) => shrink::run,
    /// Find the moment from which on a failure was inevitable, however the run continues
    Bisect(bisect::Arguments) => bisect::run,
    /// Run programs again and again, with a fault in another call, completion or event each time
    #[cfg(target_os = "linux")]
    Sweep(sweep::Arguments) => sweep::run,
    /// Show a running daemon or a growing event log in a browser
    #[cfg(unix)]
    Explore(explore::Arguments) => explore::run,
    /// Create an HTML page that edits and runs scenarios in a browser
    Playground(playground::Arguments) => playground::run,
    /// List, start and grade exercises
    #[cfg(unix)]
    Course(course::Arguments) => course::run,
    /// Create an HTML report from a run or a capture
    Report(report::Arguments) => report::run,
    /// Explain from an event log or a capture why work requests failed or were slow
    Why(explain::WhyArguments) => explain::why,
    /// Report mistakes of a verbs program that an event log shows
    Lint(explain::LintArguments) => explain::lint,
    /// Write the manual pages of all commands
    #[command(hide = true)]
    Man(man::Arguments) => man::run,
    /// Print the RoCE packets in a capture, as lines or as ladder diagrams, or the events in a log
    Trace(trace::Arguments) => trace::run,
    /// Print the completion script of a shell
    Completions(completions::Arguments) => completions::run,
}

fn main() -> ExitCode {
    let color = terminal::color_option(std::env::args_os().skip(1));
    let mut command = Arguments::command().color(color.into());
    let name = std::env::args()
        .skip(1)
        .find_map(|word| command.find_subcommand(&word).map(|found| found.get_name().to_owned()));
    if let Some(name) = &name {
        terminal::set_command_name(name);
    }
    let parsed = command.try_get_matches_from_mut(std::env::args_os());
    match parsed.and_then(|matches| Arguments::from_arg_matches(&matches)) {
        Ok(arguments) => {
            terminal::set_color(arguments.color);
            arguments.command.run().unwrap_or_else(|error| error.report())
        }
        Err(error) => report_usage(&error, name.as_deref()),
    }
}

/// Prints help, or an error of the command line in the format of all errors.
fn report_usage(error: &clap::Error, name: Option<&str>) -> ExitCode {
    if !error.use_stderr() {
        // Nothing can be done if standard output is closed.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.render().to_string();
    match text.strip_prefix("error: ") {
        Some(text) => warnln!("{}", text.trim_end()),
        // The help, because there is no subcommand.
        None => errln!("{}", text.trim_end()),
    }
    ExitCode::from(match name {
        Some("exec" | "env" | "lab") => exit_code::EXEC_FAILED,
        _ => exit_code::BAD_INPUT,
    })
}
