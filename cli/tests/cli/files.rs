//! Attacks on the files and the output of the command: predictable names, permissions, terminal escapes.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SOFTHCA: &str = env!("CARGO_BIN_EXE_softhca");

/// A folder that is removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("softhca-files-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.0.join(name), text).unwrap();
        self.file(name)
    }

    /// Runs a shell command with this folder as the temporary directory. `$SOFTHCA` is the command.
    fn shell(&self, script: &str) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("SOFTHCA", SOFTHCA).env("TMPDIR", &self.0);
        command.env("XDG_RUNTIME_DIR", &self.0).output().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn mode(path: impl AsRef<Path>) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

const HOSTILE: &str = "\\u001b]0;owned\\u0007\\u001b[2J\\u009b31m\\u202e";

/// A scenario that fails, with a hostile title and a hostile name of a fault.
fn failing_scenario(folder: &Folder) -> String {
    let text = format!(
        r#"title = "{HOSTILE}"
[hosts]
alice = {{}}
bob = {{}}
[[link]]
between = ["alice", "bob"]
[[pair]]
qps = ["alice.1", "bob.1"]
[[step]]
qp = "alice.1"
write = {{ bytes = 4000 }}
[[fault]]
name = "lose {HOSTILE}"
on = "alice -> bob"
match = {{ class = "request", psn = "+1" }}
action = "drop"
times = 1
[[expect]]
completion = {{ qp = "alice.1", status = "SUCCESS" }}
"#
    );
    folder.write("failing.toml", &text)
}

fn assert_printable(output: &Output) {
    for text in [&output.stdout, &output.stderr] {
        let text = String::from_utf8(text.clone()).unwrap();
        let is_harmful = |c: char| (c.is_control() && !"\n\t".contains(c)) || c == '\u{202e}';
        assert!(!text.contains(is_harmful), "{text:?}");
    }
}

#[test]
fn demo_does_not_follow_a_link_that_waits_for_it() {
    let folder = Folder::new("demo");
    let victim = folder.write("victim", "precious");
    // The shell becomes the command, which keeps its process ID.
    let output = folder.shell("ln -s victim $TMPDIR/softhca-demo-$$.pcapng; exec $SOFTHCA demo");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    let text = String::from_utf8(output.stdout).unwrap();
    let capture = text.lines().find_map(|line| line.strip_prefix("capture: ")).unwrap();
    assert!(fs::symlink_metadata(capture).unwrap().is_file());
    assert_eq!(mode(capture), 0o600);
}

#[test]
fn the_files_of_a_failed_run_do_not_follow_a_link_that_waits_for_them() {
    let folder = Folder::new("run");
    let victim = folder.0.join("victim");
    fs::create_dir(&victim).unwrap();
    let scenario = failing_scenario(&folder);
    let script = format!("ln -s victim $TMPDIR/softhca-run-$$; exec $SOFTHCA run {scenario}");
    let output = folder.shell(&script);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let written = text.lines().find_map(|line| line.trim().strip_prefix("written: ")).unwrap();
    for name in ["events.jsonl", "capture.pcapng", "report.html", "result.json"] {
        assert_eq!(mode(Path::new(written).join(name)), 0o600, "{name}");
    }
    assert_eq!(mode(written), 0o700);
}

#[test]
fn named_files_follow_the_umask_and_existing_files_keep_their_mode() {
    let folder = Folder::new("named");
    let scenario = failing_scenario(&folder);
    let (out, junit) = (folder.file("out"), folder.file("junit.xml"));
    let script = format!("umask 022; exec $SOFTHCA run {scenario} --out {out} --junit {junit}");
    assert_eq!(folder.shell(&script).status.code(), Some(1));
    let run = format!("{out}/failing/seed-1");
    for name in ["events.jsonl", "capture.pcapng", "report.html", "result.json"] {
        assert_eq!(mode(format!("{run}/{name}")), 0o644, "{name}");
    }
    assert_eq!((mode(&run), mode(&junit)), (0o755, 0o644));
    let capture = folder.file("demo.pcapng");
    let script = format!("umask 026; exec $SOFTHCA demo --capture {capture}");
    assert!(folder.shell(&script).status.success());
    assert_eq!(mode(&capture), 0o640);
    let report = folder.file("report.html");
    assert!(folder.shell(&format!("umask 077; exec $SOFTHCA report {run} -o {report}")).status.success());
    assert_eq!(mode(&report), 0o600);
    let script = format!("umask 000; exec $SOFTHCA demo --capture {capture}");
    fs::set_permissions(&capture, fs::Permissions::from_mode(0o640)).unwrap();
    assert!(folder.shell(&script).status.success());
    assert_eq!(mode(&capture), 0o640);
    // A link that the user names is followed.
    let link = folder.file("link.pcapng");
    symlink("demo.pcapng", &link).unwrap();
    assert!(folder.shell(&format!("exec $SOFTHCA demo --capture {link}")).status.success());
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn text_from_files_cannot_control_the_terminal() {
    let folder = Folder::new("escapes");
    let scenario = failing_scenario(&folder);
    let out = folder.file("out");
    let output = folder.shell(&format!("exec $SOFTHCA run {scenario} --out {out}"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_printable(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("\\u001b]0;owned\\u0007"), "{output:?}");
    let json = folder.shell(&format!("exec $SOFTHCA run --json {scenario}"));
    assert_printable(&json);
    let line: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert!(line["rules"][0]["name"].as_str().unwrap().contains("\u{1b}]0;owned"), "{line}");
    let files = folder.file("out/failing/seed-1");
    for command in ["trace", "trace --json", "why", "lint"] {
        let output = folder.shell(&format!("exec $SOFTHCA {command} {files}/events.jsonl"));
        assert!(output.status.code().is_some_and(|code| code < 2), "{command}: {output:?}");
        assert_printable(&output);
    }
    for options in ["", "--json", "--ladder"] {
        let output = folder.shell(&format!("exec $SOFTHCA trace {options} {files}/capture.pcapng"));
        assert!(output.status.success(), "{output:?}");
        assert_printable(&output);
    }
    // Names of files are text too.
    let hostile = folder.write("a\u{1b}[2Jb.toml", "title = ");
    let output = Command::new(SOFTHCA).args(["run", &hostile]).output().unwrap();
    assert!(!output.status.success());
    assert_printable(&output);
}

#[test]
fn a_daemon_refuses_a_folder_of_another_user() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can give a folder away");
        return;
    }
    let folder = Folder::new("owner");
    let runtime = folder.0.join("softhca");
    fs::create_dir(&runtime).unwrap();
    fs::set_permissions(&runtime, fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(&runtime, Some(65_534), Some(65_534)).unwrap();
    for command in ["daemon", "status"] {
        let output = folder.shell(&format!("exec $SOFTHCA {command}"));
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("belongs to user 65534"), "{text}");
    }
    std::os::unix::fs::chown(&runtime, Some(0), Some(0)).unwrap();
    fs::set_permissions(&runtime, fs::Permissions::from_mode(0o755)).unwrap();
    let output = folder.shell("exec $SOFTHCA daemon");
    assert!(String::from_utf8_lossy(&output.stderr).contains("chmod 700"), "{output:?}");
}
