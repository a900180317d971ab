//! The commands about a daemon.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

/// A daemon with its own runtime folder.
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
        let mut command = softhca(&folder, arguments);
        Daemon::spawn(folder, &mut command)
    }

    fn spawn(folder: PathBuf, command: &mut Command) -> Daemon {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
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
fn a_daemon_that_cannot_start_keeps_the_files_of_the_running_one() {
    let file = std::env::temp_dir().join(format!("softhca-cli-records-{}.pcapng", std::process::id()));
    std::fs::write(&file, "old contents").unwrap();
    let file = file.to_str().unwrap();
    let daemon = Daemon::start("records", &["daemon", "--capture", file]);
    // The file header is there once the daemon has written it.
    while !std::fs::read(file).unwrap().starts_with(&[0x0a, 0x0d, 0x0d, 0x0a]) {
        std::thread::yield_now();
    }
    std::fs::write(file, "written by the daemon").unwrap();
    let second = daemon.run(&["daemon", "--capture", file]);
    assert!(!second.status.success(), "{second:?}");
    assert_eq!(std::fs::read(file).unwrap(), b"written by the daemon");
    drop(daemon);
    std::fs::remove_file(file).unwrap();
}

#[test]
fn status_devices_devinfo_stats_and_stop_work() {
    let mut daemon = Daemon::start("status", &["daemon", "--host", "alice", "--host", "bob"]);
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
fn one_host_of_several_has_the_address_of_the_environment() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = format!("127.{}.{low}.3", 80 | high & 15);
    let folder = std::env::temp_dir().join(format!("softhca-cli-address-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut command = softhca(&folder, &["daemon", "--host", "alice", "--host", "bob"]);
    let daemon = Daemon::spawn(folder, command.env("SOFTHCA_ADDRESS", &address));
    let status = daemon.lines(&["status", "--json"]);
    let addresses: Vec<_> = status.iter().map(|line| line["address"].as_str().unwrap()).collect();
    assert_eq!(addresses[0], address);
    assert!(addresses[1].starts_with("127.0.0."), "{addresses:?}");
}

#[test]
fn stats_include_the_ports_of_the_switch() {
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
    assert_eq!((&port["port"], &port["to"]), (&switch["to"], &switch["port"]), "both ends of one link");
    assert_eq!((&port["port"], &switch["max_queue_bytes"]), (&"alice".into(), &0.into()));
    assert_eq!(switch["pauses_sent"].as_array().unwrap().len(), 8);
    assert!(port.get("marked").is_none(), "hosts do not mark");
    assert_eq!(daemon.lines(&["stats", "--json", "--host", "bob"]).len(), 3);
    let all = String::from_utf8(daemon.run(&["stats", "--all"]).stdout).unwrap();
    assert!(all.lines().any(|line| line.contains(":bob") && line.contains("pauses_received.7")), "{all}");
    assert!(daemon.run(&["stats"]).stdout.is_empty(), "all counters are zero");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_second_daemon_with_the_same_name_is_rejected_with_advice() {
    let daemon = Daemon::start("second", &["daemon", "--name", "lab"]);
    let second = daemon.run(&["daemon", "--name", "lab"]);
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8(second.stderr).unwrap().contains("softhca stop"));
    assert!(daemon.run(&["stop", "--name", "lab"]).status.success());
}

#[test]
fn a_configuration_error_names_its_line_and_exits_with_2() {
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
fn a_killed_daemon_is_reported_and_can_be_replaced() {
    let mut daemon = Daemon::start("killed", &["daemon", "--host", "alice"]);
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(daemon.folder.join("softhca/default.sock").exists(), "the socket remains");
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
fn a_daemon_and_a_program_leave_no_lock_files() {
    let mut daemon = Daemon::start("locks", &["daemon", "--host", "alice"]);
    let locks = || {
        let entries = std::fs::read_dir(daemon.folder.join("softhca")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".lock") || name.ends_with(".start")).collect::<Vec<_>>()
    };
    assert_eq!(locks(), ["default.lock"]);
    assert!(daemon.run(&["env"]).status.success());
    assert_eq!(locks(), ["default.lock"], "the start lock was held");
    assert!(daemon.run(&["stop"]).status.success());
    assert!(daemon.child.wait().unwrap().success());
    assert_eq!(locks(), Vec::<String>::new());
}

/// A write beyond `ulimit -f` raises it, also one to memory that is shared with a client.
#[test]
fn the_signal_of_the_file_size_limit_does_not_end_a_daemon() {
    let daemon = Daemon::start("xfsz", &["daemon", "--host", "alice"]);
    let pid = rustix::process::Pid::from_child(&daemon.child);
    rustix::process::kill_process(pid, rustix::process::Signal::XFSZ).unwrap();
    for _ in 0..2 {
        assert_eq!(daemon.lines(&["status", "--json"])[0]["host"], "alice");
    }
}

#[test]
fn an_idle_daemon_exits_even_if_its_folder_is_gone() {
    let mut daemon = Daemon::start("idle", &["daemon", "--host", "alice", "--idle-timeout", "1"]);
    std::fs::remove_dir_all(&daemon.folder).unwrap();
    assert!(daemon.child.wait().unwrap().success());
}

#[test]
fn a_daemon_completes_its_capture_and_log_when_it_stops() {
    let files = ["pcapng", "jsonl"]
        .map(|kind| std::env::temp_dir().join(format!("softhca-cli-file-{}.{kind}", std::process::id())));
    let [capture, log] = files.each_ref().map(|path| path.to_str().unwrap());
    let arguments = ["daemon", "--host", "alice", "--capture", capture, "--log", log];
    let mut daemon = Daemon::start("file", &arguments);
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
