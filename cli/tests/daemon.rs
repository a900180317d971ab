//! The commands that speak to a daemon, as a shell sees them.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

/// A daemon in a folder of its own.
struct Daemon {
    folder: PathBuf,
    child: Child,
}

fn softhca(folder: &PathBuf, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softhca"));
    command.args(arguments).env("XDG_RUNTIME_DIR", folder);
    command
}

impl Daemon {
    fn start(test: &str, arguments: &[&str]) -> Daemon {
        let folder = std::env::temp_dir().join(format!("softhca-cli-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut child = softhca(&folder, arguments).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.map(Result::unwrap).find(|line| line.starts_with("ready: "));
        assert!(ready.is_some(), "the daemon did not start");
        Daemon { folder, child }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        softhca(&self.folder, arguments).output().unwrap()
    }

    fn lines(&self, arguments: &[&str]) -> Vec<serde_json::Value> {
        let output = self.run(arguments);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn a_daemon_that_cannot_start_leaves_the_records_of_the_one_that_runs() {
    let record = std::env::temp_dir().join(format!("softhca-cli-records-{}.pcapng", std::process::id()));
    std::fs::write(&record, "something of before").unwrap();
    let record = record.to_str().unwrap();
    let daemon = Daemon::start("records", &["daemon", "--capture", record]);
    let begun = std::fs::read(record).unwrap();
    assert!(!begun.starts_with(b"something"), "it begins anew");
    std::fs::write(record, "what it wrote").unwrap();
    let second = daemon.run(&["daemon", "--capture", record]);
    assert!(!second.status.success(), "{second:?}");
    assert_eq!(std::fs::read(record).unwrap(), b"what it wrote");
    drop(daemon);
    std::fs::remove_file(record).unwrap();
}

#[test]
fn a_daemon_tells_of_its_hosts_and_stops_when_asked() {
    let mut daemon = Daemon::start("tells", &["daemon", "--host", "alice", "--host", "bob"]);
    let status = daemon.lines(&["status", "--json"]);
    let hosts: Vec<_> = status.iter().map(|line| line["host"].as_str().unwrap()).collect();
    assert_eq!(hosts, ["alice", "bob"]);
    assert_eq!(status[0]["clients"], serde_json::json!([]));
    let devices = daemon.lines(&["devices", "--json"]);
    assert_eq!(devices[1]["device"], "softhca1");
    let info = daemon.lines(&["devinfo", "--json", "bob"]);
    assert_eq!((info.len(), &info[0]["max_qp"]), (1, &serde_json::json!(4096)));
    let stats = daemon.lines(&["stats", "--json", "--host", "alice"]);
    assert_eq!(stats[0]["sent_pkts"], 0);
    assert!(daemon.run(&["stop"]).status.success());
    assert!(daemon.child.wait().unwrap().success());
    let gone = daemon.run(&["status"]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(String::from_utf8(gone.stderr).unwrap().contains("softhca daemon"));
}

#[test]
fn stats_show_the_ports_of_the_network_between_hosts() {
    let folder = std::env::temp_dir().join(format!("softhca-cli-fabric-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("fabric.toml");
    let subnet = format!("127.98.{}", std::process::id() % 250 + 1);
    let text = format!("[hosts]\nalice = '{subnet}.2'\nbob = '{subnet}.3'\n[fabric]\ntopology = 'star'\n");
    std::fs::write(&file, text).unwrap();
    let daemon = Daemon::start("fabric", &["daemon", "--config", file.to_str().unwrap()]);
    let stats = daemon.lines(&["stats", "--json"]);
    assert_eq!(stats.len(), 6, "two hosts, two ports of the switch, two ports of hosts: {stats:?}");
    let [switch, port] = [&stats[2], &stats[4]];
    assert_eq!((&port["port"], &port["to"]), (&switch["to"], &switch["port"]), "both ends of one cable");
    assert_eq!((&port["port"], &switch["deepest"]), (&"alice".into(), &0.into()));
    assert_eq!(switch["pauses_sent"].as_array().unwrap().len(), 8);
    assert!(port.get("marked").is_none(), "hosts do not mark");
    assert_eq!(daemon.lines(&["stats", "--json", "--host", "bob"]).len(), 3);
    let all = String::from_utf8(daemon.run(&["stats", "--all"]).stdout).unwrap();
    assert!(all.lines().any(|line| line.contains(":bob") && line.contains("pauses_received.7")), "{all}");
    assert!(daemon.run(&["stats"]).stdout.is_empty(), "nothing was counted yet");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_second_daemon_of_the_same_name_is_refused_with_what_to_do() {
    let daemon = Daemon::start("second", &["daemon", "--name", "lab"]);
    let second = daemon.run(&["daemon", "--name", "lab"]);
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8(second.stderr).unwrap().contains("softhca stop"));
    assert!(daemon.run(&["stop", "--name", "lab"]).status.success());
}

#[test]
fn a_bad_configuration_is_bad_input_with_its_place() {
    let folder = std::env::temp_dir().join(format!("softhca-cli-config-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("bad.toml");
    std::fs::write(&file, "name = 'lab'\n[hosts]\nalice = 'nowhere'\n").unwrap();
    let output = softhca(&folder, &["daemon", "--config", file.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("bad.toml") && text.contains("line 3"), "{text}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_killed_daemon_is_told_of_and_the_next_takes_its_place() {
    let mut daemon = Daemon::start("killed", &["daemon", "--host", "alice"]);
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(daemon.folder.join("softhca/default.sock").exists(), "nobody could clean up");
    let status = daemon.run(&["status"]);
    let text = String::from_utf8(status.stderr).unwrap();
    assert!(!status.status.success() && text.contains("has died"), "{text}");
    let doctor = String::from_utf8(daemon.run(&["doctor"]).stdout).unwrap();
    assert!(
        doctor.lines().any(|line| line.starts_with("missing daemon") && line.contains("has died")),
        "{doctor}"
    );
    let next = Daemon::start("killed", &["daemon", "--host", "alice"]);
    assert_eq!(next.lines(&["status", "--json"])[0]["host"], "alice");
}

#[test]
fn a_daemon_that_is_to_leave_does_so_without_its_folder_too() {
    let mut daemon = Daemon::start("homeless", &["daemon", "--host", "alice", "--leave-after", "1"]);
    std::fs::remove_dir_all(&daemon.folder).unwrap();
    assert!(daemon.child.wait().unwrap().success());
}

#[test]
fn a_daemon_writes_a_capture_and_a_log_to_its_end() {
    let files = ["pcapng", "jsonl"]
        .map(|kind| std::env::temp_dir().join(format!("softhca-cli-record-{}.{kind}", std::process::id())));
    let [capture, log] = files.each_ref().map(|path| path.to_str().unwrap());
    let arguments = ["daemon", "--host", "alice", "--capture", capture, "--log", log];
    let mut daemon = Daemon::start("record", &arguments);
    assert!(daemon.run(&["stop"]).status.success());
    daemon.child.wait().unwrap();
    let trace = daemon.run(&["trace", capture]);
    assert!(trace.status.success(), "{trace:?}");
    let first = std::fs::read_to_string(log).unwrap();
    let header: serde_json::Value = serde_json::from_str(first.lines().next().unwrap()).unwrap();
    assert_eq!(header["vantage_points"][0]["host"], "alice");
    for path in &files {
        std::fs::remove_file(path).unwrap();
    }
}
