//! The program: finding it, and running it as if we were not there.

use rustix::process::{Pid, Signal, kill_process};
use softhca_daemon::{MountNamespace, Signals};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

/// Why a program is not run, and the exit code that says so.
pub struct ExecError {
    pub code: u8,
    pub message: String,
}

const EXIT_CANNOT_RUN: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;

fn program_error(code: u8, program: &Path, why: &str) -> ExecError {
    ExecError { code, message: format!("{}: {why}", program.display()) }
}

/// The file of a program, found as a shell does.
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
            .ok_or_else(|| program_error(EXIT_NOT_FOUND, Path::new(name), "no such program in PATH"))?
    };
    match std::fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(program_error(EXIT_NOT_FOUND, &path, "no such file"))
        }
        Err(error) => Err(program_error(EXIT_CANNOT_RUN, &path, &error.to_string())),
        Ok(found) if found.is_dir() => Err(program_error(EXIT_CANNOT_RUN, &path, "is a folder")),
        Ok(_) if !is_executable(&path) => Err(program_error(EXIT_CANNOT_RUN, &path, "is not executable")),
        Ok(found) if found.permissions().mode() & 0o6000 != 0 && !rustix::process::geteuid().is_root() => {
            let why = "runs with another user's rights, so the loader ignores our library: run a copy of it";
            Err(program_error(super::EXIT_EXEC_FAILED, &path, why))
        }
        Ok(_) if is_static(&path) => {
            let why = "is a static binary: it has its own libibverbs inside, which no library can replace. \
                       Link it dynamically";
            Err(program_error(super::EXIT_EXEC_FAILED, &path, why))
        }
        Ok(_) => Ok(path),
    }
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o111 != 0)
}

/// Whether a file is an ELF program that names no loader.
fn is_static(path: &Path) -> bool {
    const HEADER: usize = 64;
    const LOADER: u32 = 3;
    let mut start = Vec::new();
    let Ok(file) = File::open(path) else { return false };
    if file.take(64 << 10).read_to_end(&mut start).is_err() || start.len() < HEADER {
        return false;
    }
    // 64 bits, little-endian; whatever else there is, the kernel judges.
    if !start.starts_with(b"\x7fELF\x02\x01") {
        return false;
    }
    let half = |at: usize| usize::from(u16::from_le_bytes([start[at], start[at + 1]]));
    let table = u64::from_le_bytes(start[32..40].try_into().expect("eight bytes")) as usize;
    let (size, count) = (half(54), half(56));
    !(0..count).any(|index| {
        let kind = table.checked_add(index * size).and_then(|at| start.get(at..at + 4));
        kind.is_none_or(|kind| u32::from_le_bytes(kind.try_into().expect("four bytes")) == LOADER)
    })
}

/// Runs the program to its end, and returns its exit code. Signals that a process sends us are passed on; those of
/// the terminal it gets itself. Where the kernel allows no view, the program goes without. `attend` is called now and
/// then, and says when it wants to be called again.
pub fn run(
    path: &Path,
    words: &[OsString],
    variables: &[(&'static str, OsString)],
    view: Option<MountNamespace>,
    attend: &mut dyn FnMut() -> Option<Duration>,
) -> Result<u8, ExecError> {
    let ours = |error: io::Error| program_error(super::EXIT_EXEC_FAILED, path, &error.to_string());
    let signals = Signals::block_all().map_err(ours)?;
    let start = |view: Option<MountNamespace>| {
        let mut command = Command::new(path);
        command.arg0(&words[0]).args(&words[1..]).envs(variables.iter().map(|(name, value)| (name, value)));
        signals.unblock_in_child(&mut command);
        if let Some(view) = view {
            view.apply_to(&mut command);
        }
        command.spawn()
    };
    let seeing = view.and_then(|view| start(Some(view)).ok());
    let mut child = seeing.map_or_else(|| start(None), Ok).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => program_error(EXIT_NOT_FOUND, path, "its interpreter is not there"),
        _ => program_error(EXIT_CANNOT_RUN, path, &error.to_string()),
    })?;
    let process = Pid::from_child(&child);
    loop {
        let patience = attend();
        let Some(came) = signals.wait(patience).map_err(ours)? else { continue };
        let Some(signal) = Signal::from_named_raw(came.number) else { continue };
        if signal == Signal::CHILD {
            if let Some(status) = child.try_wait().map_err(ours)? {
                return Ok(exit_code(status));
            }
        } else if came.from_process {
            let _ = kill_process(process, signal);
        }
    }
}

/// The exit code that a shell would tell.
pub fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => super::EXIT_EXEC_FAILED,
    }
}
