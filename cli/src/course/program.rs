//! Builds the program of a submission: afterwards `./program` runs it.

use super::exercise::Language;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The time that a compiler has.
const BUILD_TIMEOUT: Duration = Duration::from_secs(60);
/// The time that cargo has, which compiles the crate `softhca` too.
pub const CARGO_TIMEOUT: Duration = Duration::from_secs(900);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The output of a compiler that is read.
const MAX_OUTPUT: u64 = 1 << 20;

/// Why a program was not built.
#[derive(Debug)]
pub struct BuildError {
    /// The machine lacks something; it is not the student's mistake.
    pub is_environment: bool,
    pub message: String,
    pub output: Vec<u8>,
}

impl BuildError {
    fn environment(message: impl Into<String>) -> BuildError {
        BuildError { is_environment: true, message: message.into(), output: Vec::new() }
    }
}

/// Builds the program from the files of the folder, which is the working directory.
pub fn build(language: Language, folder: &Path) -> Result<(), BuildError> {
    match language {
        Language::C => build_c(folder),
        Language::Python => build_python(folder),
        Language::Rust => build_rust(folder),
    }
}

fn build_c(folder: &Path) -> Result<(), BuildError> {
    let mut command = Command::new("cc");
    command.args(["-std=gnu11", "-O1", "-g", "-Wall", "-o", "program"]);
    let entries = fs::read_dir(folder).map_err(|error| BuildError::environment(error.to_string()))?;
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut sources: Vec<_> = names.filter(|name| name.to_string_lossy().ends_with(".c")).collect();
    sources.sort();
    command.args(sources).args(["-libverbs", "-lrdmacm", "-lpthread"]);
    run(command, "cc", "install gcc and libc6-dev (Debian's packages)", BUILD_TIMEOUT).map_err(
        |mut failed| {
            let text = String::from_utf8_lossy(&failed.output);
            let is_missing =
                ["infiniband/verbs.h: No such file", "cannot find -libverbs", "cannot find -lrdmacm"]
                    .iter()
                    .any(|part| text.contains(part));
            if is_missing {
                failed.is_environment = true;
                failed.message =
                    "the headers of libibverbs and librdmacm are missing: install libibverbs-dev and \
                              librdmacm-dev (Debian's packages)"
                        .into();
            }
            failed
        },
    )
}

/// The first Python that has pyverbs: the one in PATH may be another one than Debian's.
fn build_python(folder: &Path) -> Result<(), BuildError> {
    let has_pyverbs = |python: &&str| {
        let mut command = Command::new(python);
        command.args(["-c", "import pyverbs.device"]);
        run(command, python, "", BUILD_TIMEOUT).is_ok()
    };
    let python = ["python3", "/usr/bin/python3"].into_iter().find(has_pyverbs).ok_or_else(|| {
        BuildError::environment("no python3 with pyverbs: install python3-pyverbs (Debian's package)")
    })?;
    let mut compile = Command::new(python);
    compile.args(["-c", "import ast; ast.parse(open('solution.py').read(), 'solution.py')"]);
    run(compile, python, "", BUILD_TIMEOUT)?;
    let main = if folder.join("main.py").exists() { "main.py" } else { "solution.py" };
    // Lines must arrive before a buffer is full.
    let script = format!("#!/bin/sh\nexec {python} -u {main} \"$@\"\n");
    let path = folder.join("program");
    let written =
        fs::write(&path, script).and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)));
    written.map_err(|error| BuildError::environment(format!("{}: {error}", path.display())))
}

fn build_rust(folder: &Path) -> Result<(), BuildError> {
    let mut command = Command::new("cargo");
    command.args(["build", "--release", "--offline", "--quiet", "--target-dir", "target"]);
    run(command, "cargo", "install Rust (https://rustup.rs)", CARGO_TIMEOUT).map_err(|mut failed| {
        let text = String::from_utf8_lossy(&failed.output);
        if text.contains("you may be missing the `--offline`") || text.contains("without --offline") {
            failed.is_environment = true;
            failed.message =
                "the crates are not on this machine: run `cargo fetch` in the folder once".into();
        }
        failed
    })?;
    let linked = std::os::unix::fs::symlink("target/release/solution", folder.join("program"));
    linked.map_err(|error| BuildError::environment(format!("program: {error}")))
}

/// Runs a compiler. Its output goes to a file, whose size the system limits.
fn run(mut command: Command, name: &str, advice: &str, timeout: Duration) -> Result<(), BuildError> {
    let failed = |error: std::io::Error| BuildError::environment(format!("{name}: {error}"));
    let output = File::options().read(true).write(true).create(true).truncate(true).open("build.txt");
    let output = output.map_err(failed)?;
    command.stdin(Stdio::null()).process_group(0);
    command.stdout(output.try_clone().map_err(failed)?).stderr(output);
    let mut child = command.spawn().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => BuildError::environment(format!("{name} is missing: {advice}")),
        _ => failed(error),
    })?;
    let until = Instant::now() + timeout;
    let status = loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => break Some(status),
            None if Instant::now() >= until => {
                let group = rustix::process::Pid::from_child(&child);
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(POLL_INTERVAL),
        }
    };
    let message = match status {
        Some(status) if status.success() => return Ok(()),
        Some(_) => format!("{name} reports errors"),
        None => format!("{name} did not end within {} s", timeout.as_secs()),
    };
    let mut bytes = Vec::new();
    let read = File::open("build.txt").and_then(|file| {
        use std::io::Read;
        file.take(MAX_OUTPUT).read_to_end(&mut bytes)
    });
    let _ = fs::remove_file("build.txt");
    read.map_err(failed)?;
    Err(BuildError { is_environment: false, message, output: bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_compiler_is_not_the_students_mistake_and_the_message_says_what_to_install() {
        let failed =
            run(Command::new("/no/such/cc"), "cc", "install gcc", BUILD_TIMEOUT).expect_err("it is missing");
        assert!(failed.is_environment);
        assert_eq!(failed.message, "cc is missing: install gcc");
    }
}
