//! Output of `softhca why`, `lint` and `trace --follow` for the canonical captures and logs.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/captures").join(name)
}

fn softhca() -> Command {
    Command::new(env!("CARGO_BIN_EXE_softhca"))
}

fn format_output(output: Output) -> String {
    let mut text = String::from_utf8(output.stdout).expect("UTF-8");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    if !stderr.is_empty() {
        text += &format!("stderr: {stderr}");
    }
    text + &format!("exit {}", output.status.code().expect("an exit code"))
}

fn run(arguments: &[&str], file: &str) -> String {
    let output = softhca().args(arguments).arg(example(file)).output().expect("the command runs");
    format_output(output).replace(&*example(file).to_string_lossy(), "FILE")
}

#[test]
fn a_loss_is_explained() {
    insta::assert_snapshot!(run(&["why"], "loss-fatal.jsonl"));
    insta::assert_snapshot!(
        "a_flushed_request_is_explained",
        run(&["why", "--qp", "alice.1", "--wr", "2"], "loss-fatal.jsonl")
    );
}

/// The role of a program with two embedded devices, one of which writes with an rkey that no memory region has.
#[cfg(target_os = "linux")]
const WRONG_RKEY: &str = "TEST_WRONG_RKEY";

#[cfg(target_os = "linux")]
#[test]
fn wrong_rkey_program() {
    use softhca::{AccessFlags, ConnectOptions, Device, QpType, RemoteAddress, RemoteKey, SendRequest};
    if std::env::var_os(WRONG_RKEY).is_none() {
        return;
    }
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    let ends = [(); 2].map(|()| {
        let context = Device::embedded().unwrap().open();
        let pd = context.allocate_protection_domain().unwrap();
        let cq = context.create_completion_queue(4).unwrap();
        let region = pd.allocate_region(64, access).unwrap();
        let qp = pd.create_queue_pair(QpType::Rc, &cq).build().unwrap();
        (qp, cq, region)
    });
    let [(near, cq, region), (far, _, target)] = &ends;
    near.connect_both(far, &ConnectOptions::default()).unwrap();
    let right = target.remote_address(0);
    let wrong = RemoteAddress { rkey: RemoteKey(right.rkey.0 ^ 0xff00), ..right };
    near.post_send(&SendRequest::rdma_write(7, &[region.sge(0, 8)], wrong)).unwrap();
    let completion = cq.wait_for(std::time::Duration::from_secs(60)).expect("a completion");
    assert!(!completion.status.is_success());
    std::process::exit(3);
}

#[cfg(target_os = "linux")]
#[test]
fn exec_explains_a_rust_program_with_embedded_devices() {
    use std::os::unix::fs::DirBuilderExt;
    let folder = std::env::temp_dir().join(format!("softhca-explain-{}", std::process::id()));
    std::fs::DirBuilder::new().mode(0o700).create(&folder).expect("a new folder");
    let mut command = softhca();
    command.args(["exec", "--why", "--"]).arg(std::env::current_exe().expect("the path of this test"));
    command.args(["--exact", "explain::wrong_rkey_program", "--nocapture"]).env(WRONG_RKEY, "1");
    let output = command.env("XDG_RUNTIME_DIR", &folder).env_remove("SOFTHCA_DAEMON").output();
    let output = output.expect("the command runs");
    std::fs::remove_dir_all(&folder).expect("the folder of this test");
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(3), "{text}");
    for part in
        ["WRITE 7 completes with REM_ACCESS_ERR", "Cause:", "no memory region has key 0x", "What to do:"]
    {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

#[test]
fn bad_input_is_rejected_with_a_reason() {
    let outputs = [
        run(&["why", "--qp", "carol.1"], "rc-write.jsonl"),
        run(&["why", "--wr", "77"], "rc-write.jsonl"),
        run(&["why"], "README.md"),
        run(&["lint"], "nothing.jsonl"),
        run(&["trace", "--ladder"], "rc-write.jsonl"),
    ];
    insta::assert_snapshot!(outputs.join("\n"));
}

#[test]
fn a_capture_is_explained_with_certainty() {
    insta::assert_snapshot!(run(&["why"], "loss-go-back-n.pcapng"));
    let json = run(&["why", "--json"], "nak-remote-access.pcapng");
    let line = json.lines().next().expect("a finding");
    let finding: serde_json::Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(
        (&finding["code"], &finding["certainty"]),
        (&"nak/remote-access-error".into(), &"known".into())
    );
    let schema = softhca().args(["why", "--schema"]).output().expect("it runs");
    let schema: serde_json::Value = serde_json::from_slice(&schema.stdout).expect("JSON");
    assert!(schema["properties"]["certainty"].is_object(), "{schema}");
}

#[test]
fn a_filter_selects_packets_and_its_errors_point_at_the_place() {
    let naks = run(&["trace", "--filter", "nak && psn == +1"], "loss-go-back-n.pcapng");
    assert!(naks.contains("nak") && naks.contains("\n1 packets, 1 roce"), "{naks}");
    let again =
        run(&["trace", "--filter", "retransmission && infiniband.bth.opcode == 7"], "loss-go-back-n.pcapng");
    assert!(again.contains("\n2 packets, 2 roce"), "{again}");
    let wrong = run(&["trace", "--filter", "psm == 7"], "loss-go-back-n.pcapng");
    assert!(
        wrong.contains("did you mean psn?") && wrong.contains("psm == 7\n  ^") && wrong.ends_with("exit 2"),
        "{wrong}"
    );
}

#[test]
fn a_summary_is_text_json_or_csv() {
    let text = run(&["trace", "--summary"], "loss-go-back-n.pcapng");
    assert!(
        text.contains("2 hosts, 1 connections, 2 messages") && text.contains("request-lost: 1 inferred"),
        "{text}"
    );
    let json = run(&["trace", "--summary", "--json"], "loss-go-back-n.jsonl");
    let json: serde_json::Value = serde_json::from_str(json.lines().next().expect("a line")).expect("JSON");
    assert_eq!((&json["source"], &json["messages"]), (&"log".into(), &2.into()));
    let csv = run(&["trace", "--summary", "--csv"], "loss-go-back-n.jsonl");
    assert!(
        csv.starts_with("table,name,key,value\n") && csv.contains("\ncause,request-lost,known,1\n"),
        "{csv}"
    );
}

#[test]
fn a_trace_for_perfetto_is_written() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("perfetto.json");
    let text = run(&["trace", "--perfetto", path.to_str().expect("UTF-8")], "rc-write.jsonl");
    assert_eq!(text, format!("trace: {}\nexit 0", path.display()));
    let trace: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON");
    assert!(trace["traceEvents"].as_array().is_some_and(|events| events.len() > 10));
}

#[test]
fn lint_findings_determine_the_exit_code() {
    insta::assert_snapshot!(run(&["lint"], "rnr-exhausted.jsonl"));
    insta::assert_snapshot!("findings_in_json", run(&["lint", "--json"], "nak-remote-access.jsonl"));
    assert_eq!(run(&["lint"], "rc-write.jsonl"), "0 errors, 0 warnings, 0 notes\nexit 0");
}

#[test]
fn trace_prints_a_log_line_by_line() {
    insta::assert_snapshot!(run(&["trace"], "rnr.jsonl"));
    let json = softhca().args(["trace", "--json"]).arg(example("rnr.jsonl")).output().expect("it runs");
    let file = std::fs::read_to_string(example("rnr.jsonl")).expect("a log");
    let lines = file.split_once('\n').expect("a first line").1;
    assert_eq!(String::from_utf8(json.stdout).expect("UTF-8"), lines);
}

/// A command that is killed when the test ends.
struct Following(Child);

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command with `--follow` on a file that grows in two parts, and reads `lines` of its output.
fn follow(arguments: &[&str], source: &str, cut: usize, lines: [usize; 2]) -> Vec<String> {
    let bytes = std::fs::read(example(source)).expect("a file");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{source}", arguments.len()));
    let mut file = std::fs::File::create(&path).expect("a file in the target folder");
    file.write_all(&bytes[..cut]).expect("a file that can be written");
    let child = softhca().args(arguments).arg("--follow").arg(&path).stdout(Stdio::piped()).spawn();
    let mut child = Following(child.expect("the command runs"));
    let output = BufReader::new(child.0.stdout.take().expect("a pipe"));
    let mut output = output.lines().map(|line| line.expect("UTF-8"));
    // The first part is printed before the file grows.
    let mut printed: Vec<String> = output.by_ref().take(lines[0]).collect();
    file.write_all(&bytes[cut..]).expect("a file that can be written");
    printed.extend(output.take(lines[1]));
    printed
}

#[test]
fn a_growing_capture_is_followed() {
    let whole = softhca().arg("trace").arg(example("rc-write.pcapng")).output().expect("it runs");
    let whole = String::from_utf8(whole.stdout).expect("UTF-8");
    let expected: Vec<&str> = whole.lines().take(7).collect();
    // The cut is in the middle of the third packet.
    let printed = follow(&["trace"], "rc-write.pcapng", 2800, [2, 5]);
    assert_eq!(printed, expected);
}

#[test]
fn a_growing_log_is_followed() {
    let whole = softhca().arg("trace").arg(example("rc-write.jsonl")).output().expect("it runs");
    let whole = String::from_utf8(whole.stdout).expect("UTF-8");
    let expected: Vec<&str> = whole.lines().take(12).collect();
    assert_eq!(follow(&["trace"], "rc-write.jsonl", 2000, [2, 10]), expected);
}

#[test]
fn a_ladder_of_a_growing_capture_is_followed() {
    let printed = follow(&["trace", "--ladder"], "loss-go-back-n.pcapng", 2800, [4, 8]);
    insta::assert_snapshot!(printed.join("\n"));
}

#[test]
fn standard_input_is_followed_until_it_ends() {
    let mut child = softhca()
        .args(["trace", "--ladder", "--follow", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the command runs");
    let bytes = std::fs::read(example("rc-read.pcapng")).expect("a file");
    child.stdin.take().expect("a pipe").write_all(&bytes).expect("a reader");
    let mut text = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut text).expect("UTF-8");
    assert!(child.wait().expect("an end").success());
    insta::assert_snapshot!(text);
    assert!(!text.contains('\x1b'), "no colours in a pipe");
}
