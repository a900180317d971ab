//! The command: output, exit codes and errors of its subcommands.

mod bench;
#[cfg(target_os = "linux")]
mod daemon;
mod explain;
#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
mod manners;
#[cfg(unix)]
mod outputs;
mod report;
mod run;
mod trace;
