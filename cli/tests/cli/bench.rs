//! Arguments that `softhca bench` rejects. Nothing is measured here.

use std::process::Command;

/// Standard error of a command that rejects its arguments.
fn stderr_of(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    let output = command.arg("bench").args(arguments).output().expect("the command starts");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "nothing may be measured: {output:?}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

#[test]
fn an_unknown_benchmark_name_is_rejected_with_the_valid_names() {
    let text = stderr_of(&["--only", "rc-wirte"]);
    let begin = "softhca bench: no benchmark name contains \"rc-wirte\" (--only); the names are ";
    assert!(text.starts_with(begin), "{text}");
    for name in ["rc-write-1MiB", "rc-send-64B-rate", "rc-read-4KiB", "message-64B-latency"] {
        assert!(text.contains(name), "{name} is not in: {text}");
    }
    assert!(!text.contains("ib_write_bw"), "programs run only on request: {text}");
}

#[test]
fn the_valid_names_depend_on_the_mode() {
    let text = stderr_of(&["--mode", "programs", "--only", "rc-write-1MiB"]);
    assert!(text.contains("no benchmark name of --mode programs contains"), "{text}");
    assert!(
        text.contains("ib_write_bw-1MiB, ib_write_bw-1MiB-socket-loopback, ib_write_bw-1MiB-two-hosts"),
        "{text}"
    );
    let text = stderr_of(&["--mode", "peer", "--only", "rc-write-1MiB"]);
    assert!(text.ends_with("the names are stream-1MiB, message-64B-latency\n"), "{text}");
}

#[test]
fn a_size_that_quick_omits_is_rejected() {
    let text = stderr_of(&["--quick", "--mode", "embedded", "--only", "rc-read-4KiB"]);
    assert!(text.contains("no benchmark name of --quick --mode embedded contains"), "{text}");
    assert!(text.contains("rc-read-1MiB"), "{text}");
}
