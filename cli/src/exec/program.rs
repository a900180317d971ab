//! Finds the program and runs it transparently.

use super::library;
use super::sysfs::View;
use crate::exit_code;
use rustix::process::{Pid, Signal, kill_process};
use softhca_daemon::Signals;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

/// Why a program does not run, with the exit code.
pub struct ExecError {
    pub code: u8,
    pub message: String,
}

impl From<String> for ExecError {
    fn from(message: String) -> ExecError {
        ExecError { code: exit_code::EXEC_FAILED, message }
    }
}

fn program_error(code: u8, program: &Path, why: &str) -> ExecError {
    ExecError { code, message: format!("{}: {why}", program.display()) }
}

/// Finds the file of a program, as a shell does.
pub fn find(name: &OsStr) -> Result<PathBuf, ExecError> {
    let path = if name.as_bytes().contains(&b'/') {
        PathBuf::from(name)
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
        let candidates = std::env::split_paths(&folders).map(|folder| folder.join(name));
        let files: Vec<PathBuf> = candidates.filter(|path| path.is_file()).collect();
        let found = files.iter().find(|path| is_executable(path)).or(files.first());
        found
            .cloned()
            .ok_or_else(|| program_error(exit_code::NOT_FOUND, Path::new(name), "no such program in PATH"))?
    };
    match std::fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(program_error(exit_code::NOT_FOUND, &path, "no such file"))
        }
        Err(error) => Err(program_error(exit_code::CANNOT_RUN, &path, &error.to_string())),
        Ok(found) if found.is_dir() => Err(program_error(exit_code::CANNOT_RUN, &path, "is a folder")),
        Ok(_) if !is_executable(&path) => {
            Err(program_error(exit_code::CANNOT_RUN, &path, "is not executable"))
        }
        Ok(found) if found.permissions().mode() & 0o6000 != 0 && !rustix::process::geteuid().is_root() => {
            let why = "is setuid or setgid, so the loader ignores LD_LIBRARY_PATH: run a copy of it";
            Err(program_error(exit_code::EXEC_FAILED, &path, why))
        }
        Ok(_) if is_static(&path) => {
            let why = "is statically linked, so its libibverbs cannot be replaced: link it dynamically";
            Err(program_error(exit_code::EXEC_FAILED, &path, why))
        }
        Ok(_) => Ok(path),
    }
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o111 != 0)
}

/// Whether a file is an ELF program without an interpreter.
fn is_static(path: &Path) -> bool {
    const HEADER: usize = 64;
    const PT_INTERP: u32 = 3;
    let mut start = Vec::new();
    let Ok(file) = File::open(path) else { return false };
    if file.take(64 << 10).read_to_end(&mut start).is_err() || start.len() < HEADER {
        return false;
    }
    // 64-bit little-endian; the kernel checks everything else.
    if !start.starts_with(b"\x7fELF\x02\x01") {
        return false;
    }
    let half = |at: usize| usize::from(u16::from_le_bytes([start[at], start[at + 1]]));
    let table = u64::from_le_bytes(start[32..40].try_into().expect("eight bytes")) as usize;
    let (size, count) = (half(54), half(56));
    !(0..count).any(|index| {
        let kind = table.checked_add(index * size).and_then(|at| start.get(at..at + 4));
        kind.is_none_or(|kind| u32::from_le_bytes(kind.try_into().expect("four bytes")) == PT_INTERP)
    })
}

/// When something is to be looked at again beside a program.
#[derive(Default)]
pub struct NextPoll {
    pub after: Option<Duration>,
    /// Or as soon as this descriptor is readable.
    pub readable: Option<OwnedFd>,
}

/// Runs the program until it exits, and returns its exit code. Forwards signals sent by processes; the terminal
/// signals the program itself. The program gets the first view that the kernel allows, or none. `poll` is called with the
/// process again and again, when it says.
pub fn run(
    path: &Path,
    argv: &[OsString],
    variables: &[(&'static str, OsString)],
    views: Vec<View>,
    poll: &mut dyn FnMut(i32) -> NextPoll,
) -> Result<u8, ExecError> {
    let failed = |error: io::Error| program_error(exit_code::EXEC_FAILED, path, &error.to_string());
    let signals = Signals::block_all().map_err(failed)?;
    let start = |view: View| {
        let mut command = Command::new(path);
        let mut all = [variables, &view.variables].concat();
        library::join_preloads(&mut all);
        command.arg0(&argv[0]).args(&argv[1..]).envs(all);
        signals.unblock_in_child(&mut command);
        // This is the main thread, which lasts as long as the process.
        Signals::kill_with_parent(&mut command);
        if let Some(mounts) = view.mounts {
            mounts.apply_to(&mut command);
        }
        command.spawn()
    };
    let with_view = views.into_iter().find_map(|view| start(view).ok());
    let mut child =
        with_view.map_or_else(|| start(View::default()), Ok).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                program_error(exit_code::NOT_FOUND, path, "its interpreter does not exist")
            }
            _ => program_error(exit_code::CANNOT_RUN, path, &error.to_string()),
        })?;
    let process = Pid::from_child(&child);
    loop {
        let NextPoll { after, readable } = poll(process.as_raw_nonzero().get());
        let received = signals.wait(after, readable.as_ref().map(AsFd::as_fd)).map_err(failed)?;
        let Some(received) = received else { continue };
        let Some(signal) = Signal::from_named_raw(received.number) else { continue };
        if signal == Signal::CHILD {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok(shell_exit_code(status));
            }
        } else if received.from_process {
            let _ = kill_process(process, signal);
        }
    }
}

/// The exit code that a shell reports.
pub fn shell_exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => exit_code::EXEC_FAILED,
    }
}
