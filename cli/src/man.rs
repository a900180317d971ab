//! `softhca man`: manual pages, which packages contain.

use crate::exit_code::{CommandResult, failure_in};
use clap::CommandFactory;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `softhca man`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder for the pages: one for the command and one for each subcommand
    folder: PathBuf,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    std::fs::create_dir_all(&arguments.folder)
        .and_then(|()| clap_mangen::generate_to(crate::Arguments::command(), &arguments.folder))
        .map_err(failure_in(arguments.folder.display()))?;
    Ok(ExitCode::SUCCESS)
}
