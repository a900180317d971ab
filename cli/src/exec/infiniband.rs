//! Programs on a host of an InfiniBand subnet.

use super::daemon::{self, DaemonLifetime};
use super::program::{self, ExecError, NextPoll};
use super::sysfs::View;
use super::{Arguments, DaemonOptions, library};
use softhca::DaemonControl;
use softhca_control::{SubnetRequest, SubnetResponse};
use std::path::PathBuf;

impl DaemonOptions {
    /// The folder with what the programs of a host of the subnet see of `/sys` and `/dev`.
    pub(super) fn subnet_view(&self, connection: &mut DaemonControl) -> Result<PathBuf, String> {
        match connection.subnet(SubnetRequest::CreateView { host: self.chosen_host() }) {
            Ok((SubnetResponse::View(root), _)) => Ok(root.into()),
            Ok(_) => Err("the daemon did not create a view".into()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The first option that a subnet does not have.
fn unsupported(arguments: &Arguments) -> Option<&'static str> {
    let Arguments { daemon, scenario, capture, log, why, lint, .. } = arguments;
    let options = [
        ("--cards", daemon.cards.is_some()),
        ("--recovery", daemon.recovery.is_some()),
        ("--profile", daemon.profile.is_some()),
        ("--loopback", daemon.loopback.is_some()),
        ("--path", daemon.data_path.is_some()),
        ("--scenario", scenario.is_some()),
        ("--capture", capture.is_some()),
        ("--log", log.is_some()),
        ("--why", *why),
        ("--lint", *lint),
    ];
    options.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
}

/// Runs a program, and returns its exit code.
pub(super) fn execute(arguments: &Arguments) -> Result<u8, ExecError> {
    if let Some(option) = unsupported(arguments) {
        return Err(format!("{option} needs --fabric roce: an InfiniBand subnet does not have it").into());
    }
    let path = program::find(&arguments.program[0])?;
    let folder = library::subnet_library_folder()?;
    // The open connection keeps an auto-started daemon running until the program is done.
    let mut connection =
        daemon::connect_or_start(&arguments.daemon.requirements(), DaemonLifetime::WhileUsed)?;
    let root = arguments.daemon.subnet_view(&mut connection)?;
    let mut variables = arguments.daemon.environment(&folder);
    if arguments.preload {
        variables.push(library::preloaded_verbs(&folder));
    }
    let views = if arguments.no_view { Vec::new() } else { View::choices(&root, arguments.view, &folder) };
    program::run(&path, &arguments.program, &variables, views, &mut |_| NextPoll::default())
}
