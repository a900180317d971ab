//! `softhca exec` and `softhca env`: unmodified programs on an emulated host.
//!
//! Exit codes are those of env(1): the program's own, 125 if we failed, 126 if the program cannot be run and 127
//! if it is not there.

mod daemon;
mod library;
mod program;
mod view;

use clap::Args;
use daemon::Wanted;
use softhca::{DaemonControl, HOST_VARIABLE, NAME_VARIABLE};
use softhca_daemon::View;
use softhca_queue::control::Folder;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Our own failure.
const FAILED: u8 = 125;

/// On which daemon, host and how.
#[derive(Args)]
struct Place {
    /// The host that the program runs on; without one, the daemon's first
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// What a lost packet does: fatal, go-back-n or go-back-0
    #[arg(long, value_name = "MODE", value_parser = crate::daemon::parse_recovery)]
    recovery: Option<softhca::Recovery>,
    /// The daemon's name, for users with several
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

/// What `softhca exec` takes.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    place: Place,
    /// Write the packets of the daemon's cards to a pcapng file until the program ends
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Leave /sys/class and /dev as they are: programs that look there for RDMA devices find none
    #[arg(long)]
    no_view: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// What `softhca env` takes.
#[derive(Args)]
pub struct EnvArguments {
    #[command(flatten)]
    place: Place,
    /// Leave it to others to start the daemon
    #[arg(long)]
    no_start: bool,
}

impl Place {
    fn wanted(&self) -> Wanted<'_> {
        Wanted { name: self.name.as_deref(), host: self.host.as_deref(), recovery: self.recovery }
    }

    /// The variables that a program needs, with the libraries in `folder`.
    fn variables(&self, folder: &Path) -> Vec<(&'static str, OsString)> {
        let mut path = OsString::from(folder);
        if let Some(others) = std::env::var_os("LD_LIBRARY_PATH").filter(|others| !others.is_empty()) {
            path.push(":");
            path.push(others);
        }
        let mut variables = vec![("LD_LIBRARY_PATH", path)];
        variables.extend(self.name.as_ref().map(|name| (NAME_VARIABLE, name.into())));
        variables.extend(self.host.as_ref().map(|host| (HOST_VARIABLE, host.into())));
        variables
    }
}

impl Place {
    /// What the program is to see of its host's card in `/sys` and `/dev`. It is an extra: a card that cannot be
    /// opened now says so to the program.
    fn view(&self, connection: &DaemonControl) -> Option<View> {
        let chosen = self.host.clone().or_else(|| std::env::var(HOST_VARIABLE).ok());
        let host = chosen.or_else(|| connection.hosts().first().map(|card| card.name.clone()))?;
        view::Shown::of(self.name.as_deref(), &host).ok()?.view(&view_place().ok()?).ok()
    }
}

/// The folder that views are put together in.
fn view_place() -> std::io::Result<PathBuf> {
    let folder = Folder::of_user();
    folder.prepare()?;
    let place = folder.path().join("view");
    std::fs::create_dir_all(&place)?;
    Ok(place)
}

/// Whether programs see the card in `/sys` and `/dev` on this machine, or why not.
pub fn view_is_allowed() -> std::io::Result<()> {
    view::is_allowed(&view_place()?)
}

fn failed(message: &str) -> ExitCode {
    eprintln!("softhca: {message}");
    ExitCode::from(FAILED)
}

/// Runs `softhca exec`.
pub fn run(arguments: &Arguments) -> ExitCode {
    let first = arguments.program[0].to_string_lossy();
    if first.starts_with('-') {
        return failed(&format!("{first} is no option of `softhca exec`; `softhca exec --help` lists them"));
    }
    let path = match program::find(&arguments.program[0]) {
        Ok(path) => path,
        Err(refusal) => {
            eprintln!("softhca: {}", refusal.message);
            return ExitCode::from(refusal.code);
        }
    };
    let folder = match library::folder() {
        Ok(folder) => folder,
        Err(message) => return failed(&message),
    };
    // The connection keeps a daemon that was started for programs from leaving before the program is done.
    let mut connection = match daemon::connect_or_start(&arguments.place.wanted(), daemon::Stay::WhileUsed) {
        Ok(connection) => connection,
        Err(message) => return failed(&message),
    };
    if let Some(path) = &arguments.capture
        && let Err(message) = begin_capture(&mut connection, path)
    {
        return failed(&message);
    }
    let view = if arguments.no_view { None } else { arguments.place.view(&connection) };
    let code = program::run(&path, &arguments.program, &arguments.place.variables(&folder), view);
    if arguments.capture.is_some()
        && let Err(error) = connection.end_records()
    {
        return failed(&format!("the capture is not complete: {error}"));
    }
    drop(connection);
    match code {
        Ok(code) => ExitCode::from(code),
        Err(refusal) => {
            eprintln!("softhca: {}", refusal.message);
            ExitCode::from(refusal.code)
        }
    }
}

/// The file is opened here, with the rights of whoever asked for it, and passed to the daemon.
fn begin_capture(connection: &mut DaemonControl, path: &Path) -> Result<(), String> {
    let failed = |why: String| format!("{}: {why}", path.display());
    let file = File::create(path).map_err(|error| failed(error.to_string()))?;
    connection.record(Some(file.as_fd()), None).map_err(|error| failed(error.to_string()))
}

/// Runs `softhca env`.
pub fn environment(arguments: &EnvArguments) -> ExitCode {
    let folder = match library::folder() {
        Ok(folder) => folder,
        Err(message) => return failed(&message),
    };
    if !arguments.no_start
        && let Err(message) = daemon::connect_or_start(&arguments.place.wanted(), daemon::Stay::UntilStopped)
    {
        return failed(&message);
    }
    for (name, value) in arguments.place.variables(&folder) {
        println!("export {name}={}", quoted(&value.to_string_lossy()));
    }
    ExitCode::SUCCESS
}

/// A word that a shell reads as it is.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=@%+,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(quoted("/run/user/0/softhca"), "/run/user/0/softhca");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
