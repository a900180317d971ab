//! `softhca run` and `softhca shrink`: exit codes, JSON lines, reports, shards.

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn softhca(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_softhca")).args(arguments).output().expect("the command starts")
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("an exit code")
}

fn lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON object per line")).collect()
}

/// Creates an empty folder for a test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("run-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn library(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    root.join("scenarios/library").join(name).display().to_string()
}

const LOSS: &str = "fatal-lost-write-middle.toml";

/// The library scenario with an expectation that cannot hold.
fn failing_scenario(folder: &Path) -> String {
    let text = fs::read_to_string(library(LOSS)).expect("a scenario");
    let path = folder.join("broken.toml");
    let more = "\n[[expect]]\ncompletion = { qp = \"alice.1\", status = \"SUCCESS\" }\n";
    fs::write(&path, text + more).expect("a file");
    path.display().to_string()
}

#[test]
fn json_output_has_one_object_per_run_with_the_contract_keys() {
    let path = library(LOSS);
    let output = softhca(&["run", "--json", &path]);
    assert_eq!(code(&output), 0, "{}", String::from_utf8_lossy(&output.stdout));
    let [line] = &lines(&output)[..] else { panic!("one line") };
    assert_eq!(line["scenario"], path.as_str());
    assert_eq!(line["seed"], 1);
    assert_eq!(line["on"], "sim");
    assert_eq!(line["verdict"], "pass");
    assert_eq!(line["trace_sha256"].as_str().expect("a digest").len(), 64);
    assert_eq!(line["replay"], format!("softhca run {path} --seed 1"));
    assert_eq!(
        line["rules"][0],
        serde_json::json!({"name": "lose the second packet", "fired": 1, "optional": false})
    );
    assert!(
        line["expectations"]
            .as_array()
            .expect("a list")
            .iter()
            .all(|one| one["held"] == true && one["detail"].is_string())
    );
}

#[test]
fn a_failed_expectation_prints_its_packets_and_exits_with_1() {
    let folder = folder("failure");
    let output =
        softhca(&["run", &failing_scenario(&folder), "--out", &folder.join("out").display().to_string()]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(code(&output), 1, "{text}");
    for part in [
        "FAIL",
        "FAILED alice.1: a work request completes with SUCCESS",
        "NAK sequence error +1",
        "dropped by",
        "replay: softhca run",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    let kept = folder.join("out/broken/seed-1");
    for name in ["events.jsonl", "capture.pcapng", "ladder.txt", "result.json"] {
        assert!(kept.join(name).metadata().is_ok_and(|file| file.len() > 0), "{name}");
    }
}

#[test]
fn trace_sha256_is_the_digest_of_events_jsonl() {
    let folder = folder("digest");
    let output = softhca(&[
        "run",
        "--json",
        &library(LOSS),
        "--seeds",
        "1..3",
        "--out",
        &folder.display().to_string(),
    ]);
    assert_eq!(code(&output), 0);
    let digests: BTreeSet<String> = lines(&output)
        .iter()
        .map(|line| line["trace_sha256"].as_str().expect("a digest").to_owned())
        .collect();
    assert_eq!(digests.len(), 3, "seeds differ in keys and PSNs");
    for line in lines(&output) {
        let log = folder.join(format!("fatal-lost-write-middle/seed-{}/events.jsonl", line["seed"]));
        let sum = Command::new("sha256sum").arg(&log).output();
        // Skipped where sha256sum is not installed.
        if let Ok(sum) = sum {
            let sum = String::from_utf8_lossy(&sum.stdout).into_owned();
            assert!(sum.starts_with(line["trace_sha256"].as_str().expect("a digest")), "{sum}");
        }
    }
}

#[test]
fn bad_input_exits_with_2_before_the_first_run() {
    let folder = folder("input");
    let path = folder.join("bad.toml");
    fs::write(&path, "title = \"t\"\n[hosts]\nalice = {}\n[[stepp]]\n").expect("a file");
    let bad = path.display().to_string();
    let output = softhca(&["run", "--json", &library(LOSS), &bad]);
    assert_eq!(code(&output), 2);
    assert!(output.stdout.is_empty(), "nothing may run");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("bad.toml:4:3: unknown field `stepp`") && message.contains("did you mean `step`?"),
        "{message}"
    );
    assert_eq!(code(&softhca(&["run", "no such file"])), 2);
    assert_eq!(code(&softhca(&["run", &library(LOSS), "--shard", "3/2"])), 2);
    assert_eq!(code(&softhca(&["run", &library(LOSS), "--set", "x=1"])), 2);
}

#[test]
fn unwritable_outputs_are_rejected_before_the_first_run() {
    let file = folder("unwritable").join("file");
    fs::write(&file, "").expect("a file");
    let below = file.join("below").display().to_string();
    for option in ["--out", "--junit"] {
        let output = softhca(&["run", &library(LOSS), option, &below]);
        assert_eq!(code(&output), 2);
        assert!(output.stdout.is_empty(), "{output:?}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.starts_with("softhca run: cannot write") && text.contains(&below), "{text}");
    }
}

#[test]
fn too_many_runs_are_rejected() {
    let output = softhca(&["run", &library(LOSS), "--seeds", "0..18446744073709551615"]);
    assert_eq!(code(&output), 2);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.ends_with("18446744073709551615 runs: the maximum of one command is 1000000\n"), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn an_endless_file_is_rejected() {
    for command in ["run", "why", "lint"] {
        let output = softhca(&[command, "/dev/zero"]);
        assert_eq!(code(&output), 2, "{output:?}");
    }
}

/// The read end of the pipe is closed before the command writes.
#[cfg(target_os = "linux")]
#[test]
fn a_closed_pipe_ends_the_command_without_an_error() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    let output = command.arg("doctor").stdout(writer).output().expect("the command starts");
    assert_eq!((code(&output), String::from_utf8_lossy(&output.stderr)), (0, "".into()));
}

#[test]
fn shards_partition_the_runs() {
    let path = library("gbn-random-loss.toml");
    let run = |shard: &str| {
        let output = softhca(&["run", "--json", &path, "--seeds", "1..7", "--shard", shard]);
        assert_eq!(code(&output), 0);
        lines(&output).iter().map(|line| line["seed"].as_u64().expect("a seed")).collect::<Vec<_>>()
    };
    let mut all = [run("1/3"), run("2/3"), run("3/3")].concat();
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn the_number_of_runs_at_a_time_does_not_change_the_results() {
    let path = library(LOSS);
    let run = |at_once: &str| softhca(&["run", "--json", "--seeds", "1..6", "--jobs", at_once, &path]);
    let results = |output: &Output| {
        let mut lines = lines(output);
        lines.iter_mut().for_each(|line| line["duration_ms"] = Value::Null);
        lines
    };
    let (one, three) = (run("1"), run("3"));
    assert_eq!((code(&one), lines(&one).len()), (0, 6));
    assert_eq!(results(&one), results(&three));
    assert_eq!(code(&run("0")), 2);
}

#[test]
fn a_scenario_without_expectations_says_so() {
    let folder = folder("no-expectations");
    let text = fs::read_to_string(library(LOSS)).expect("a scenario");
    let (before, _) = text.split_once("[[expect]]").expect("an expectation");
    let path = folder.join("none.toml").display().to_string();
    fs::write(&path, before).expect("a file");
    let output = softhca(&["run", "--json", "--seeds", "1..3", &path]);
    assert_eq!(code(&output), 0);
    for line in lines(&output) {
        assert_eq!(line["expectations"], serde_json::json!([]));
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text, format!("softhca run: {path}: no expectation was checked: add [[expect]]\n"));
    let checked = softhca(&["run", &library(LOSS)]);
    assert!(checked.stderr.is_empty(), "{checked:?}");
}

#[test]
fn expectations_of_another_file_are_checked_too() {
    let (folder, path) = (folder("expect"), library(LOSS));
    let write = |name: &str, text: &str| {
        let path = folder.join(name).display().to_string();
        fs::write(&path, text).expect("a file");
        path
    };
    let wrong = write("wrong.toml", "[[expect]]\ncompletion = { qp = \"alice.1\", status = \"SUCCESS\" }\n");
    let output = softhca(&["run", "--json", "--expect", &wrong, &path]);
    assert_eq!(code(&output), 1, "{output:?}");
    let [line] = &lines(&output)[..] else { panic!("one line") };
    assert_eq!(line["replay"], format!("softhca run {path} --expect {wrong} --seed 1"));
    let held: Vec<bool> =
        line["expectations"].as_array().expect("a list").iter().map(|one| one["held"] == true).collect();
    assert_eq!((held.len(), held.iter().filter(|held| !**held).count()), (8, 1), "{line}");
    let unknown = write("unknown.toml", "\n[[expect]]\nstate = { qp = \"alice.9\", is = \"error\" }\n");
    let output = softhca(&["run", "--expect", &unknown, &path]);
    assert_eq!(code(&output), 2, "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains(&format!("{unknown}:3:")) && text.contains("alice.9"), "{text}");
    let other = write("other.toml", "title = \"x\"\n");
    assert_eq!(code(&softhca(&["run", "--expect", &other, &path])), 2);
}

#[test]
fn set_all_runs_every_parameter_value() {
    let output = softhca(&["run", "--json", &library("gbn-random-loss.toml"), "--set", "loss=all"]);
    assert_eq!(code(&output), 0);
    let values: Vec<Value> = lines(&output).iter().map(|line| line["parameters"]["loss"].clone()).collect();
    assert_eq!(values, ["0.001", "0.01", "0.05"]);
}

/// The results of `--json`, `--junit` and `--out` are the same.
#[test]
fn results_of_shards_are_merged_and_what_is_missing_has_a_name() {
    let folder = folder("merge");
    let at = |name: &str| folder.join(name).display().to_string();
    let files = [library(LOSS), failing_scenario(&folder)];
    let run = |more: &[&str]| {
        let mut all = vec!["run", &files[0], &files[1], "--seeds", "1..4"];
        all.extend(more);
        softhca(&all)
    };
    let stderr = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    fs::create_dir(folder.join("results")).expect("a folder");
    let first = run(&["--shard", "1/3", "--json"]);
    fs::write(folder.join("results/1.json"), &first.stdout).expect("a file");
    assert_eq!(code(&run(&["--shard", "2/3", "--out", &at("results/2")])), 1);
    // The third never ran.
    let merged = run(&["--merge", &at("results"), "--shards", "3", "--junit", &at("all.xml"), "--json"]);
    assert_eq!((code(&merged), lines(&merged).len()), (2, 6), "{}", stderr(&merged));
    assert_eq!(stderr(&merged), "softhca run: shard 3/3 is missing: none of its 2 runs has a result\n");
    let report = fs::read_to_string(at("all.xml")).expect("a report");
    assert!(report.contains("tests=\"8\" failures=\"3\" errors=\"2\""), "{report}");
    assert_eq!(report.matches("no shard has a result of this run").count(), 4, "{report}");

    // Its JUnit report is enough. The merged report, in which these runs are missing, adds nothing.
    fs::copy(at("all.xml"), at("results/all.xml")).expect("a file");
    assert_eq!(code(&run(&["--shard", "3/3", "--junit", &at("results/3.xml")])), 1);
    let merged = run(&["--merge", &at("results"), "--shards", "3", "--json"]);
    assert_eq!((code(&merged), lines(&merged).len()), (1, 6), "{}", stderr(&merged));
    assert!(
        stderr(&merged).starts_with("softhca run: 2 results are in JUnit reports only"),
        "{}",
        stderr(&merged)
    );
    let merged = run(&["--merge", &at("results"), "--junit", &at("all.xml")]);
    assert_eq!((code(&merged), stderr(&merged).as_str()), (1, ""));
    let report = fs::read_to_string(at("all.xml")).expect("a report");
    assert!(report.contains("tests=\"8\" failures=\"4\" errors=\"0\""), "{report}");

    let third = run(&["--shard", "3/3", "--json"]);
    fs::write(folder.join("results/3.json"), &third.stdout).expect("a file");
    let options = ["--merge", &at("results"), "--summary", &at("summary.md"), "--annotate"];
    let merged = run(&options);
    assert_eq!(code(&merged), 1, "{}", stderr(&merged));
    let line = fs::read_to_string(&files[1]).expect("ours").lines().count() - 1;
    let annotation = format!("::error file={},line={line},title=", files[1]);
    assert!(stderr(&merged).starts_with(&annotation), "{}", stderr(&merged));
    assert!(
        stderr(&merged).contains("%0AThis line fails in 4 runs.%0Arepeat: softhca run"),
        "{}",
        stderr(&merged)
    );
    let text = String::from_utf8_lossy(&merged.stdout).into_owned();
    assert!(text.starts_with("FAIL  ") && text.ends_with("\n4 of 8 runs passed, 4 failed\n"), "{text}");
    // One run of everything gives the same summary, but for the times.
    let whole = run(&["--summary", &at("whole.md")]);
    assert_eq!(code(&whole), 1);
    let [merged, whole] = ["summary.md", "whole.md"].map(|name| {
        let text = fs::read_to_string(at(name)).expect("a summary");
        let row = |line: &str| match line.strip_suffix(" s |") {
            Some(row) => row.rsplit_once('|').expect("a cell").0.to_owned(),
            None => line.to_owned(),
        };
        let mut rows: Vec<String> = text.lines().map(row).collect();
        rows.sort();
        rows
    });
    assert_eq!(merged, whole);
    assert_eq!(code(&softhca(&["run", &files[0], "--merge", &files[0]])), 2);
}

#[test]
fn an_invalid_file_is_annotated_at_its_line() {
    let path = folder("annotate").join("bad.toml").display().to_string();
    fs::write(&path, "title = \"t\"\n[hosts]\nalice = {}\n[[stepp]]\n").expect("a file");
    let output = softhca(&["run", "--annotate", &path]);
    assert_eq!(code(&output), 2);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.starts_with(&format!("::error file={path},line=4,title=invalid scenario::unknown field")),
        "{text}"
    );
}

#[test]
fn shrink_prints_the_fault_that_causes_the_failure() {
    let folder = folder("shrink");
    let output = softhca(&["shrink", &failing_scenario(&folder), "--seed", "5"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(code(&output), 0, "{text}");
    assert!(text.contains("1 of 1 faults suffice") && text.contains("lose the second packet"), "{text}");
    // The rule is in the notation of files, and a file with it fails too.
    let minimal = folder.join("minimal.toml").display().to_string();
    let output = softhca(&["shrink", &failing_scenario(&folder), "--seed", "5", "-o", &minimal]);
    assert_eq!(code(&output), 0);
    let again = softhca(&["shrink", &minimal, "--seed", "5"]);
    assert!(String::from_utf8_lossy(&again.stdout).contains("1 of 1 faults suffice"), "{again:?}");
    assert!(text.contains("[[fault]]\n") && text.contains("action = \"drop\""), "{text}");
    let fine = softhca(&["shrink", &library("rnr-recovers.toml")]);
    assert_eq!(code(&fine), 1);
}

const STREAM: &str = r#"title = "A stream of messages"
hosts = { alice = {}, bob = {} }
[[pair]]
qps = ["alice.1", "bob.1"]
timeout = 8
[[workload]]
name = "messages"
stream = { qp = "alice.1", op = "send", bytes = 2000, count = 50 }
"#;

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("a file");
    path.display().to_string()
}

/// The run of a replay command.
fn replay(line: &Value) -> Vec<Value> {
    let words: Vec<&str> = line["replay"].as_str().expect("a command").split(' ').collect();
    assert_eq!(words[0], "softhca");
    lines(&softhca(&[&words[1..], &["--json"]].concat()))
}

#[test]
fn a_swarm_draws_each_run_and_its_replay_repeats_it() {
    let path = write(&folder("swarm"), "stream.toml", STREAM);
    let output = softhca(&["run", "--swarm", "30", "--json", &path]);
    assert_eq!(code(&output), 0, "{}", String::from_utf8_lossy(&output.stdout));
    let runs = lines(&output);
    assert_eq!(runs.len(), 30);
    for key in ["mtu", "profile", "recovery", "acks", "bytes-1"] {
        let drawn: BTreeSet<&str> =
            runs.iter().map(|run| run["parameters"][format!("swarm.{key}")].as_str().expect(key)).collect();
        assert!(drawn.len() > 1, "{key}: {drawn:?}");
    }
    let again = replay(&runs[16]);
    assert_eq!(again[0]["trace_sha256"], runs[16]["trace_sha256"]);
    assert_eq!(again[0]["parameters"], runs[16]["parameters"]);
    let refused = softhca(&["run", "--swarm", "2", "--seeds", "1..3", &path]);
    assert_eq!(code(&refused), 2);
}

#[test]
fn a_sometimes_expectation_is_counted_over_all_seeds() {
    let faults = "[device]\nrecovery = \"go-back-n\"\n[[fault]]\non = \"alice -> bob\"\naction = \"drop\"\nprobability = \"1%\"\noptional = true\n";
    let expect = |what: &str| {
        format!(
            "{STREAM}{faults}[[expect]]\nsometimes = true\ncounter = {{ host = \"alice\", name = \"{what}\", is = \">= 1\" }}\n"
        )
    };
    let folder = folder("sometimes");
    let happens = write(&folder, "happens.toml", &expect("packet_seq_err"));
    let output = softhca(&["run", "--seeds", "1..40", &happens]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(code(&output), 0, "{text}");
    let total = text.lines().find_map(|line| line.strip_prefix("sometimes: ")).expect("a total");
    let (_, times) = total.split_once(": in ").expect("a number of runs");
    let times: u64 = times.split(' ').next().unwrap_or_default().parse().expect("a number");
    assert!((1..40).contains(&times) && total.contains("of 40 runs"), "{total}");

    let never = write(&folder, "never.toml", &expect("cq_overflow"));
    let output = softhca(&["run", "--seeds", "1..3", &never]);
    assert_eq!(code(&output), 1);
    assert!(String::from_utf8_lossy(&output.stdout).contains("never: "), "{output:?}");
    // One run says nothing about all of them, nor does a shard.
    assert_eq!(code(&softhca(&["run", &never])), 0);
    assert_eq!(code(&softhca(&["run", "--seeds", "1..9", "--shard", "1/3", &never])), 0);
    // The shards together do.
    let files: Vec<String> = (1..=3)
        .map(|shard| {
            let output =
                softhca(&["run", "--seeds", "1..9", "--json", "--shard", &format!("{shard}/3"), &never]);
            write(&folder, &format!("{shard}.jsonl"), &String::from_utf8_lossy(&output.stdout))
        })
        .collect();
    let files = files.iter().map(String::as_str);
    let merged: Vec<&str> = ["run", "--seeds", "1..9", &never, "--merge"].into_iter().chain(files).collect();
    let output = softhca(&merged);
    assert_eq!(code(&output), 1);
    assert!(String::from_utf8_lossy(&output.stdout).contains("in 0 of 9 runs"), "{output:?}");
}

#[test]
fn a_run_that_does_not_converge_says_what_waits_for_what() {
    let heal = "[heal]\nat = \"1ms\"\ndeadline = \"5ms\"\n";
    let folder = folder("heal");
    // The faults end, but the program of bob was killed, and alice has no timeout.
    let starved = STREAM.replace("timeout = 8", "timeout = 0")
        + "[[fault]]\nhost = \"bob\"\nat = \"20us\"\naction = \"kill\"\n";
    let path = write(&folder, "starved.toml", &format!("{starved}{heal}"));
    let output = softhca(&["run", "--json", &path]);
    assert_eq!(code(&output), 1);
    let [line] = &lines(&output)[..] else { panic!("one line") };
    let failed = &line["expectations"][0];
    let detail = failed["detail"].as_str().unwrap_or_default();
    assert!(detail.contains(" of 50 messages: alice.1 waits for a response of bob.1 to PSN +"), "{detail}");
    assert!(detail.ends_with("without a timeout; bob.1 is destroyed"), "{detail}");
    // The link that is down comes up.
    let faults = "[device]\nrecovery = \"go-back-n\"\n[[fault]]\nlink = \"alice - bob\"\nat = \"10us\"\naction = { link-down = {} }\n";
    let path = write(&folder, "healed.toml", &format!("{STREAM}{heal}{faults}"));
    let output = softhca(&["run", &path]);
    assert_eq!(code(&output), 0, "{}", String::from_utf8_lossy(&output.stdout));
    // Without the end of its faults the run fails.
    let path = write(
        &folder,
        "down.toml",
        &format!("{STREAM}{faults}[[expect]]\nfinish = {{ of = \"messages\" }}\n"),
    );
    assert_eq!(code(&softhca(&["run", &path])), 1);
    let bisected = softhca(&["bisect", "--json", &path]);
    assert_eq!(code(&bisected), 0, "{bisected:?}");
    let [found] = &lines(&bisected)[..] else { panic!("one line") };
    assert!(found["inevitable_from_ns"].as_u64().unwrap_or_default() > 10_000, "{found}");
    assert!(found["cause"].as_str().unwrap_or_default().contains("link"), "{found}");
    assert_eq!(code(&softhca(&["bisect", &library("rnr-recovers.toml")])), 1);
    let late = write(&folder, "late.toml", &format!("duration = \"3ms\"\n{STREAM}{heal}"));
    let output = softhca(&["run", &late]);
    assert_eq!(code(&output), 2);
    assert!(String::from_utf8_lossy(&output.stderr).contains("before the deadline"), "{output:?}");
}
