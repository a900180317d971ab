//! `softhca report` with valid, damaged and unsuitable files.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn report(arguments: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    command.arg("report").args(arguments).output().expect("the command runs")
}

fn capture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures").join(name).with_extension("pcap")
}

fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("report-{name}"))
}

/// Exit code, standard output and standard error.
fn exit_code_and_output(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    (output.status.code().expect("an exit code"), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_report_is_a_single_file_without_external_references() {
    let page = scratch("ops.html");
    let output = report(&[&capture("vt_ops"), Path::new("-o"), &page]);
    assert_eq!(exit_code_and_output(&output), (0, format!("report: {}\n", page.display()), String::new()));
    let html = std::fs::read_to_string(page).expect("a page");
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
    for reference in ["http://", "https://", "src=", "href=", "@import", "url("] {
        let used = html.replace("http://www.w3.org/2000/svg", "").contains(reference);
        assert!(!used, "{reference} would load something from the network");
    }
}

#[test]
fn unsuitable_files_are_rejected_with_a_reason() {
    let empty = scratch("empty");
    std::fs::create_dir_all(&empty).expect("a folder");
    let text = scratch("text.txt");
    std::fs::write(&text, "neither log nor capture").expect("a file");
    let other = scratch("other.jsonl");
    std::fs::write(&other, "{\"format\":\"something\"}\n").expect("a file");
    for (file, wanted) in [
        (
            PathBuf::from("not-there"),
            "give an event log, a folder that `softhca run --out` wrote, or a pcap or pcapng file",
        ),
        (empty, "there is no events.jsonl and no capture in this folder"),
        (text, "this is neither pcap nor pcapng"),
        (other, "line 1: this is no event log"),
    ] {
        let (code, stdout, stderr) =
            exit_code_and_output(&report(&[&file, Path::new("-o"), &scratch("never.html")]));
        assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
        assert!(stderr.contains(wanted) && stderr.contains(&file.display().to_string()), "{stderr}");
    }
}

#[test]
fn a_truncated_capture_is_shown_up_to_the_damage_with_a_note() {
    let cut = scratch("cut.pcap");
    let whole = std::fs::read(capture("vt_ops")).expect("a capture");
    std::fs::write(&cut, &whole[..whole.len() - 100]).expect("a file");
    let (code, stdout, stderr) =
        exit_code_and_output(&report(&[&cut, Path::new("-o"), &scratch("cut.html")]));
    assert_eq!(code, 0);
    assert!(
        stdout.starts_with("report: ") && stderr.contains("The capture cannot be read beyond offset"),
        "{stderr}"
    );
}

/// The folder of many runs becomes a list with a line and a report for each.
#[test]
fn a_folder_of_runs_becomes_a_list() {
    let root = scratch("runs");
    let scenario = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/library/gbn-lost-send.toml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    let ran = command
        .args(["run", "--seeds", "1..3", "--out"])
        .arg(&root)
        .arg(&scenario)
        .output()
        .expect("it runs");
    assert!(ran.status.success(), "{ran:?}");
    let (code, stdout, stderr) = exit_code_and_output(&report(&[&root]));
    let index = root.join("index.html");
    assert_eq!((code, stdout, stderr), (0, format!("report: {}\n", index.display()), String::new()));
    let html = std::fs::read_to_string(index).expect("a page");
    assert!(
        html.contains("2 runs: 2 passed, 0 failed") || html.contains("3 runs: 3 passed, 0 failed"),
        "{html}"
    );
    let link = html.split("href=\"").nth(1).and_then(|rest| rest.split('"').next()).expect("a link");
    let linked = std::fs::read_to_string(root.join(link)).expect("the report of a run");
    assert!(linked.starts_with("<!doctype html>") && html.contains("did not arrive"), "{html}");
}
