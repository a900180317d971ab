//! What `softhca bench` refuses: nothing is measured here.

use std::process::Command;

/// What the command says of arguments that it refuses.
fn stderr_of(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    let output = command.arg("bench").args(arguments).output().expect("the command starts");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "nothing may be measured: {output:?}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

#[test]
fn a_name_that_no_benchmark_has_is_refused_with_those_there_are() {
    let text = stderr_of(&["--only", "rc-wirte"]);
    let begin = "softhca bench: --only \"rc-wirte\" is in the name of no benchmark; the names are ";
    assert!(text.starts_with(begin), "{text}");
    for name in ["rc-write-1MiB", "rc-send-64B-rate", "rc-read-4KiB", "message-64B-latency"] {
        assert!(text.contains(name), "{name} is not in: {text}");
    }
    assert!(!text.contains("ib_write_bw"), "programs have to be asked for: {text}");
}

#[test]
fn the_names_are_those_of_the_mode() {
    let text = stderr_of(&["--mode", "programs", "--only", "rc-write-1MiB"]);
    assert!(text.contains("no benchmark of --mode programs"), "{text}");
    assert!(
        text.contains("ib_write_bw-1MiB, ib_write_bw-1MiB-internal-loopback, ib_write_bw-1MiB-two-hosts"),
        "{text}"
    );
    let text = stderr_of(&["--mode", "peer", "--only", "rc-write-1MiB"]);
    assert!(text.ends_with("the names are stream-1MiB, message-64B-latency\n"), "{text}");
}

#[test]
fn a_size_that_quick_runs_leave_out_is_not_silently_nothing() {
    let text = stderr_of(&["--quick", "--mode", "embedded", "--only", "rc-read-4KiB"]);
    assert!(text.contains("no benchmark of --quick --mode embedded"), "{text}");
    assert!(text.contains("rc-read-1MiB"), "{text}");
}
