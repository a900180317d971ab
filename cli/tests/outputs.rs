//! Files that a command is to write and cannot: bad input, said before anything starts.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder of its own for a test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("outputs-{name}"));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// What a command says of arguments that it refuses before it does anything.
fn stderr_of(folder: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    let output = command.args(arguments).env("XDG_RUNTIME_DIR", folder).output().expect("the command starts");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "nothing may start: {output:?}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

/// Each has a path that cannot be written, why, and what to do.
fn rejects_unwritable_files(command: &[&str], option: &str, folder: &Path) {
    let below = folder.join("none/capture.pcapng");
    let cases = [
        (folder, "Is a directory", "name a file in it"),
        (&below, "No such file or directory", "make its folder first"),
        // Also for whoever may write everywhere.
        (Path::new("/dev/null/capture.pcapng"), "Not a directory", "make its folder first"),
    ];
    for (path, why, what_to_do) in cases {
        let path = path.to_str().expect("UTF-8");
        let text = stderr_of(folder, &[command, &[option, path]].concat());
        assert!(text.contains(&format!("cannot write {path} ({option}): {why}")), "{text}");
        assert!(text.contains(what_to_do), "{text}");
    }
}

#[test]
fn a_demo_needs_a_capture_that_it_can_write() {
    rejects_unwritable_files(&["demo"], "--capture", &folder("demo"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_daemon_needs_a_capture_and_a_log_that_it_can_write() {
    for option in ["--capture", "--log"] {
        let folder = folder(&format!("daemon{option}"));
        rejects_unwritable_files(&["daemon", "--host", "alice"], option, &folder);
        assert!(!folder.join("softhca").exists(), "no daemon was there");
    }
}
