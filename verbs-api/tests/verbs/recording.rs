//! The event log and the capture of embedded devices.

use softhca::{
    AccessFlags, CompletionStatus, ConnectOptions, Device, EmbeddedOptions, Error, QpType, SendRequest,
};
use softhca_trace::why::{LogAnalyzer, Query};
use softhca_trace::{CaptureReader, EventLogReader};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A folder of this test, which is empty.
fn folder(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Writes to memory of a peer that allows no writes.
fn fail(options: impl Fn() -> EmbeddedOptions) -> Result<(), Error> {
    let devices = [Device::embedded_with(options())?, Device::embedded_with(options())?];
    let contexts = [devices[0].open(), devices[1].open()];
    let domains = [contexts[0].allocate_protection_domain()?, contexts[1].allocate_protection_domain()?];
    let queues = [contexts[0].create_completion_queue(8)?, contexts[1].create_completion_queue(8)?];
    let regions = [
        domains[0].allocate_region(64, AccessFlags::LOCAL_WRITE)?,
        domains[1].allocate_region(64, AccessFlags::LOCAL_WRITE)?,
    ];
    let pairs = [
        domains[0].create_queue_pair(QpType::Rc, &queues[0]).build()?,
        domains[1].create_queue_pair(QpType::Rc, &queues[1]).build()?,
    ];
    pairs[0].connect_both(&pairs[1], &ConnectOptions::default())?;
    pairs[0].post_send(&SendRequest::rdma_write(7, &[regions[0].sge(0, 8)], regions[1].remote_address(0)))?;
    let completion = queues[0].wait_for(Duration::from_secs(20)).expect("a completion");
    assert_eq!(completion.status, CompletionStatus::RemoteAccessError);
    Ok(())
}

fn explain(log: &Path) -> String {
    let reader = EventLogReader::new(BufReader::new(File::open(log).unwrap())).unwrap();
    let mut analyzer = LogAnalyzer::new(reader.header());
    reader.for_each(|entry| analyzer.push(entry.unwrap()));
    let text = analyzer.diagnose(&Query::default()).unwrap().to_string();
    // Without line breaks.
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn check(log: &Path, capture: &Path) {
    let text = explain(log);
    assert!(text.contains("ended with REM_ACCESS_ERR"), "{text}");
    assert!(text.contains("allows LOCAL_WRITE; the access requires REMOTE_WRITE"), "{text}");
    let packets = CaptureReader::new(BufReader::new(File::open(capture).unwrap())).unwrap();
    assert!(packets.filter(|packet| packet.is_ok()).count() >= 2, "a WRITE and a NAK");
}

#[test]
fn options_name_the_log_and_the_capture() {
    let folder = folder("options_name_the_log_and_the_capture");
    let (log, capture) = (folder.join("events.jsonl"), folder.join("packets.pcapng"));
    let options = || EmbeddedOptions {
        log: Some(log.clone()),
        capture: Some(capture.clone()),
        ..EmbeddedOptions::default()
    };
    fail(options).unwrap();
    check(&log, &capture);
}

#[test]
fn the_environment_names_the_log_and_the_capture() {
    let folder = folder("the_environment_names_the_log_and_the_capture");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "recording::program", "--ignored"])
        .env("SOFTHCA_LOG", folder.join("%p.jsonl"))
        .env("SOFTHCA_CAPTURE", folder.join("packets.pcapng"))
        .spawn()
        .unwrap();
    let log = folder.join(format!("{}.jsonl", child.id()));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    check(&log, &folder.join("packets.pcapng"));
}

/// The program of the test above.
#[test]
#[ignore = "another test runs it with an environment of its own"]
fn program() {
    fail(EmbeddedOptions::default).unwrap();
}

#[test]
fn a_log_that_cannot_be_written_is_an_error_with_its_path() {
    let options = EmbeddedOptions { log: Some("/nowhere/events.jsonl".into()), ..EmbeddedOptions::default() };
    let error = Device::embedded_with(options).err().expect("no such folder").to_string();
    assert!(error.contains("/nowhere/events.jsonl"), "{error}");
}
