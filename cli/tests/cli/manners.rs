//! Conventions of all subcommands: errors, colours, exit codes, version, completions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// An empty runtime folder.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("manners-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn command(runtime: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    command.args(arguments).env("XDG_RUNTIME_DIR", runtime).current_dir(root());
    command
}

fn softhca(runtime: &Path, arguments: &[&str]) -> Output {
    command(runtime, arguments).output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn every_error_begins_with_the_name_of_its_command() {
    let runtime = folder("errors");
    for arguments in [
        &["run", "no-such.toml"][..],
        &["run", "scenarios/library/psn-wrap.toml", "--out", "/dev/null/x"],
        &["run", "--seed", "x", "scenarios/library/psn-wrap.toml"],
        &["run"],
        &["trace", "no-such.pcap"],
        &["trace", "--colour", "always", "no-such.pcap"],
        &["why", "no-such.jsonl"],
        &["lint", "no-such.jsonl"],
        &["report", "no-such"],
        &["shrink", "no-such.toml"],
        &["sweep", "no-such.toml"],
        &["explore", "no-such.jsonl"],
        &["playground", "no-such.toml"],
        &["demo", "--capture", "/dev/null/x"],
        &["bench", "--only", "no-such"],
        &["daemon", "--config", "no-such.toml"],
        &["status"],
        &["devices"],
        &["stats"],
        &["link"],
        &["metrics"],
        &["stop"],
        &["completions", "tcsh"],
        &["man", "/dev/null/x"],
        &["exec", "--", "no-such-program"],
        &["exec", "--cards", "none", "true"],
        &["lab", "--host"],
    ] {
        let output = softhca(&runtime, arguments);
        let stderr = text(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}: {output:?}");
        assert!(stderr.starts_with(&format!("softhca {}: ", arguments[0])), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("error: "), "{arguments:?}: {stderr}");
    }
    let unknown = softhca(&runtime, &["rum"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(text(&unknown.stderr).starts_with("softhca: unrecognized subcommand 'rum'"), "{unknown:?}");
    // Each problem of several begins with the name.
    let output = softhca(&runtime, &["run", "one.toml", "two.toml"]);
    assert_eq!(text(&output.stderr).matches("softhca run: ").count(), 2, "{output:?}");
}

#[test]
fn the_option_color_has_precedence_over_the_terminal_and_no_color() {
    let runtime = folder("color");
    let ladder = ["trace", "--ladder", "tests/captures/vt_loss_write.pcap"];
    let is_colored = |options: &[&str], no_color: bool| {
        let mut command = command(&runtime, options);
        command.args(ladder).env_remove("NO_COLOR").envs(no_color.then_some(("NO_COLOR", "1")));
        let output = command.output().expect("the command starts");
        assert!(output.status.success(), "{output:?}");
        text(&output.stdout).contains("\x1b[")
    };
    assert!(is_colored(&["--color", "always"], false) && is_colored(&["--color=always"], true));
    assert!(!is_colored(&[], false) && !is_colored(&["--color", "never"], false));
    // On a terminal, which script(1) provides.
    let on_terminal = |options: &str, no_color: &str| {
        let line = format!("{} {options} {}", env!("CARGO_BIN_EXE_softhca"), ladder.join(" "));
        let mut script = Command::new("script");
        script.args(["-qec", &line, "/dev/null"]).env("NO_COLOR", no_color).current_dir(root());
        let output =
            script.stdin(std::process::Stdio::null()).output().expect("script is essential in Debian");
        text(&output.stdout).contains("\x1b[")
    };
    assert!(on_terminal("", "") && !on_terminal("", "1"));
    assert!(!on_terminal("--color never", "") && on_terminal("--color always", "1"));
    for (when, is_colored) in [("always", true), ("never", false)] {
        let help = softhca(&runtime, &["run", "--color", when, "--help"]);
        assert_eq!(text(&help.stdout).contains("\x1b["), is_colored, "{when}");
    }
    // The words of a program are its own.
    let output = softhca(&runtime, &["exec", "--", "printf", "%s", "--color=always"]);
    assert_eq!(text(&output.stdout), "--color=always");
    softhca(&runtime, &["stop"]);
}

#[test]
fn the_version_has_the_commit() {
    let version = text(&softhca(&folder("version"), &["--version"]).stdout);
    let own = env!("CARGO_PKG_VERSION");
    let git = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(root()).output();
    match git.ok().filter(|output| output.status.success() && root().join(".git").exists()) {
        Some(output) => {
            let commit = text(&output.stdout);
            assert_eq!(version, format!("softhca {own} ({})\n", &commit[..12]));
        }
        // A tarball of the sources.
        None => assert!(version.starts_with(&format!("softhca {own}")), "{version}"),
    }
}

#[test]
fn completion_scripts_complete_subcommands_and_options() {
    let runtime = folder("completions");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = text(&softhca(&runtime, &["completions", shell]).stdout);
        for word in ["sweep", "junit", "doctor"] {
            assert!(script.contains(word), "{shell} does not complete {word}");
        }
    }
    let complete = |words: &[&str]| {
        let [.., previous, last] = words else { panic!("two words at least") };
        let line = format!(
            "source <({} completions bash); COMP_WORDS=({}); COMP_CWORD={}; \
             _softhca softhca {last} {previous}; echo ${{COMPREPLY[@]}}",
            env!("CARGO_BIN_EXE_softhca"),
            words.join(" "),
            words.len() - 1
        );
        let output = Command::new("bash").args(["-c", &line]).output().expect("bash");
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        text(&output.stdout)
    };
    assert_eq!(complete(&["softhca", "swe"]), "sweep\n");
    let options = complete(&["softhca", "run", "--s"]);
    assert!(options.contains("--seeds") && options.contains("--shard"), "{options}");
}

#[test]
fn doctor_prints_the_command_that_fixes_a_finding() {
    let runtime = folder("doctor");
    let own = runtime.join("softhca");
    fs::create_dir(&own).expect("a folder");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    fs::set_permissions(&own, mode).expect("its mode");
    // A daemon that was killed leaves its socket behind.
    drop(std::os::unix::net::UnixListener::bind(own.join("default.sock")).expect("a socket"));
    let findings = text(&softhca(&runtime, &["doctor"]).stdout);
    assert!(findings.contains("missing daemon") && !findings.contains("fix "), "{findings}");
    let hints = text(&softhca(&runtime, &["doctor", "--fix-hints"]).stdout);
    let lines: Vec<&str> = hints.lines().collect();
    let place = lines.iter().position(|line| line.starts_with("missing daemon")).expect("the finding");
    assert_eq!(lines[place + 1], "fix     daemon       softhca exec -- true");
    let fixed = softhca(&runtime, &["exec", "--", "true"]);
    assert!(fixed.status.success(), "{fixed:?}");
    let findings = text(&softhca(&runtime, &["doctor"]).stdout);
    assert!(!findings.contains("missing daemon"), "{findings}");
    softhca(&runtime, &["stop"]);
}

#[test]
fn doctor_sees_limits_and_a_runtime_folder_that_cannot_be_written() {
    let runtime = folder("doctor-limits");
    let path = env!("CARGO_BIN_EXE_softhca");
    let doctor = |runtime: &Path, limits: &str| {
        let script = format!("{limits} exec \"$0\" doctor --fix-hints");
        let mut command = Command::new("sh");
        command.args(["-c", &script, path]).env("XDG_RUNTIME_DIR", runtime).env_remove("SOFTHCA_DAEMON");
        text(&command.output().expect("a shell").stdout)
    };
    let healthy = doctor(&runtime, "");
    assert!(healthy.contains("ok      runtime") && !healthy.contains("missing limits"), "{healthy}");
    let limited = doctor(&runtime, "ulimit -n 64; ulimit -f 8192; ulimit -v 8000000;");
    for part in [
        "missing descriptors  limit 64",
        "fix     descriptors  ulimit -n 65536",
        "missing limits       limited to 7812 MiB of address space: devices and regions fail with ENOMEM",
        "fix     limits       ulimit -v unlimited",
        "missing limits       files are limited to 4096 KiB",
    ] {
        assert!(limited.contains(part), "{part:?} is not in {limited}");
    }
    // A folder in which not even root can create anything, and one of this name that is a file.
    fs::write(runtime.join("softhca-file"), "").expect("a file");
    for (place, part) in [
        (Path::new("/proc"), "cannot create /proc/softhca"),
        (&runtime.join("softhca-file"), "cannot create"),
    ] {
        let squatted = doctor(place, "");
        assert!(squatted.contains("missing runtime") && squatted.contains(part), "{squatted}");
        assert!(squatted.contains("fix     runtime      export XDG_RUNTIME_DIR=$(mktemp -d)"), "{squatted}");
    }
}

/// One command for each row of the table in docs/reference/commands.md.
#[test]
fn the_table_of_exit_codes_is_complete_and_true() {
    let runtime = folder("codes");
    let scenario = root().join("scenarios/library/fatal-lost-write-middle.toml");
    let failing = runtime.join("failing.toml");
    let more = "\n[[expect]]\ncompletion = { qp = \"alice.1\", status = \"SUCCESS\" }\n";
    fs::write(&failing, fs::read_to_string(&scenario).expect("a scenario") + more).expect("a file");
    let failing = failing.to_str().expect("UTF-8");
    let program = runtime.join("program.toml");
    let event = "title = \"an event that does not occur\"\nhosts = { alice = {} }\n[[expect]]\n\
                 event = { host = \"alice\", name = \"QP_FATAL\" }\n";
    fs::write(&program, event).expect("a file");
    let mut capture = fs::read(root().join("tests/captures/vt_ops.pcap")).expect("a capture");
    *capture.last_mut().expect("the ICRC of the last packet") ^= 1;
    let damaged = runtime.join("damaged.pcap");
    fs::write(&damaged, capture).expect("a file");
    let page = fs::read_to_string(root().join("docs/reference/commands.md")).expect("the page");
    let (_, table) = page.split_once("## Exit codes").expect("the table");
    let (table, _) = table.split_once("\n## ").expect("a section after it");
    let rows =
        table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next()?.parse::<i32>().ok());
    let mut documented: Vec<i32> = rows.collect();
    documented.dedup();
    let mut seen = Vec::new();
    for (code, arguments) in [
        (0, &["run", scenario.to_str().expect("UTF-8")][..]),
        (1, &["run", failing]),
        (1, &["status"]),
        (1, &["trace", "--check", damaged.to_str().expect("UTF-8")]),
        (2, &["run", "no-such.toml"]),
        (2, &["run", "--no-such-option"]),
        (123, &["exec", "--scenario", program.to_str().expect("UTF-8"), "--", "true"]),
        (125, &["exec", "--no-such-option", "true"]),
        (125, &["lab", "--no-such-option", "true"]),
        (126, &["exec", "--", "/etc/passwd"]),
        (127, &["exec", "--", "no-such-program"]),
    ] {
        let output = softhca(&runtime, arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
        seen.push(code);
    }
    assert_eq!(softhca(&runtime, &["exec", "--", "sh", "-c", "exit 7"]).status.code(), Some(7));
    softhca(&runtime, &["stop"]);
    // A sweep that is interrupted: `interruption` in tests/programs.
    seen.push(130);
    seen.dedup();
    assert_eq!(documented, seen);
}
