//! Output files that cannot be written: rejected as bad input before anything starts.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Creates a folder for a test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("outputs-{name}"));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// Standard error of a command that rejects its arguments.
fn stderr_of(folder: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    let output = command.args(arguments).env("XDG_RUNTIME_DIR", folder).output().expect("the command starts");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "nothing may start: {output:?}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

/// Checks the cause and the advice for paths that cannot be written.
fn rejects_unwritable_files(command: &[&str], option: &str, folder: &Path) {
    let below = folder.join("none/capture.pcapng");
    let cases = [
        (folder, "Is a directory", "give a file in that folder"),
        (&below, "No such file or directory", "create the folder first"),
        // Fails for root too.
        (Path::new("/dev/null/capture.pcapng"), "Not a directory", "create the folder first"),
    ];
    for (path, why, advice) in cases {
        let path = path.to_str().expect("UTF-8");
        let text = stderr_of(folder, &[command, &[option, path]].concat());
        assert!(text.contains(&format!("cannot write {path} ({option}): {why}")), "{text}");
        assert!(text.contains(advice), "{text}");
    }
}

#[test]
fn demo_rejects_an_unwritable_capture() {
    rejects_unwritable_files(&["demo"], "--capture", &folder("demo"));
}

#[cfg(target_os = "linux")]
#[test]
fn daemon_rejects_an_unwritable_capture_or_log() {
    for option in ["--capture", "--log"] {
        let folder = folder(&format!("daemon{option}"));
        rejects_unwritable_files(&["daemon", "--host", "alice"], option, &folder);
        assert!(!folder.join("softhca").exists(), "no daemon was started");
    }
}
