//! The same faults of packets, links and devices in a simulation, on embedded devices and under `softhca exec`; and faults
//! that only programs have: a daemon that starts again, a process that stops.

use crate::exec::{compile_with, compiler};
use crate::rig::{ProgramOutput, Rig};
use libtest_mimic::Trial;
use softhca::fault::InjectedEvent;
use softhca::sim::World;
use softhca::{AccessFlags, Device, ModifyQp, QpState, QpType, ReceiveRequest};
use softhca_scenarios::{ParameterValues, Scenario};
use softhca_tests::needs;
use softhca_trace::EventLogReader;
use softhca_trace::log::LogEvent;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The tests of this file.
pub fn trials() -> Vec<Trial> {
    vec![
        needs!(compiler(), packets_and_links_have_the_same_faults_everywhere),
        needs!(compiler(), events_at_a_time_are_the_same_everywhere),
        needs!(compiler(), a_device_is_removed_and_returns_everywhere),
        needs!(compiler(), a_daemon_starts_again),
        needs!(compiler(), a_process_stops_at_a_packet_and_at_a_call),
        needs!(compiler(), a_process_is_killed_at_a_packet),
        needs!(compiler(), recording_changes_no_outcome_of_a_released_region),
    ]
}

/// Two cards of a host, which is what one program sees.
const HOSTS: &str = "title = \"t\"\n[hosts]\nalice = {}\nsofthca1 = {}\n";

/// A rig with a daemon whose hosts have two cards, and `fault_kinds.c`.
fn rig_with_cards() -> (Rig, String) {
    let rig = Rig::with_two_cards();
    let started = rig.softhca(&["env", "--cards", "2"]);
    assert!(started.success, "{started:?}");
    let program = compile_with(&rig, "fault_kinds", &["-libverbs", "-lrdmacm"]);
    (rig, program)
}

/// Four sends of 1000 bytes from the first card to the second: those of `fault_kinds cards`.
const SENDS: &str = "[[pair]]\nqps = [\"alice.1\", \"softhca1.1\"]\ntimeout = 18\n\
    [[workload]]\nname = \"sends\"\nstream = { qp = \"alice.1\", op = \"send\", bytes = 1000, count = 4, depth = 4 }\n";

const ALL: &str = "SUCCESS SUCCESS SUCCESS SUCCESS";
const SECOND_LOST: &str = "SUCCESS RETRY_EXC_ERR WR_FLUSH_ERR WR_FLUSH_ERR";
const NONE: &str = "RETRY_EXC_ERR WR_FLUSH_ERR WR_FLUSH_ERR WR_FLUSH_ERR";

/// The links and faults, the milliseconds that the sends take at least, and the statuses of the sends.
const PACKET_FAULTS: &[(&str, u64, &str)] = &[
    ("[[link]]\nbetween = [\"alice\", \"softhca1\"]\nrate = \"400kbit\"", 80, ALL),
    ("[[link]]\nbetween = [\"alice\", \"softhca1\"]\ndelay = \"40ms\"", 80, ALL),
    ("[[link]]\nbetween = [\"alice\", \"softhca1\"]\njitter = \"100ms\"", 20, ALL),
    ("[[link]]\nbetween = [\"alice\", \"softhca1\"]\nloss = 1.0", 0, NONE),
    ("[[fault]]\nhost = \"alice\"\naction = { slow-device = \"30ms\" }", 120, ALL),
    ("[[fault]]\nON\nskip = 1\ntimes = 1\naction = \"drop\"", 0, SECOND_LOST),
    ("[[fault]]\nON\nskip = 1\ntimes = 1\naction = { corrupt = {} }", 0, SECOND_LOST),
    (
        "[[fault]]\nON\nskip = 1\ntimes = 1\naction = { rewrite = { field = \"pkey\", value = 5 } }",
        0,
        SECOND_LOST,
    ),
    (
        "[[fault]]\nON\nskip = 1\ntimes = 1\naction = { reorder = { by = 1, within = \"10s\" } }",
        0,
        SECOND_LOST,
    ),
    (
        "[[fault]]\nON\nskip = 1\ntimes = 1\naction = { link-down = { direction = \"forward\" } }",
        0,
        SECOND_LOST,
    ),
    ("[[fault]]\nON\nskip = 1\ntimes = 1\naction = { duplicate = 2 }", 0, ALL),
    ("[[fault]]\nON\nskip = 3\ntimes = 1\naction = { delay = \"80ms\" }", 80, ALL),
    ("[[fault]]\nON\naction = { limit-rate = \"400kbit\" }", 80, ALL),
    ("[[fault]]\nON\naction = { jitter = \"100ms\" }", 20, ALL),
    ("[[fault]]\nON\naction = \"mark-ce\"", 0, ALL),
    ("[[fault]]\nON\nskip = 3\ntimes = 1\naction = \"count\"", 0, ALL),
    (
        "[[fault]]\nname = \"third\"\nON\nskip = 2\ntimes = 1\naction = \"count\"\n\
         [[fault]]\nhost = \"alice\"\nafter = { fault = \"third\" }\naction = { raise-event = \"gid-change\" }\n\
         [[expect]]\nevent = { host = \"alice\", name = \"GID_CHANGE\", times = 1 }",
        0,
        ALL,
    ),
    // The ACKs arrive while the sender stands still.
    (
        "[[fault]]\nname = \"first\"\nON\ntimes = 1\naction = \"count\"\n\
         [[fault]]\nON\naction = { delay = \"50ms\" }\n\
         [[fault]]\nhost = \"alice\"\nafter = { fault = \"first\" }\naction = { stall = \"200ms\" }",
        200,
        ALL,
    ),
];

/// The statuses of the sends of alice in an event log, and the nanoseconds from the first WQE to the last completion.
fn sends_of(log: &Path) -> (String, u64) {
    let bytes = std::fs::read(log).expect("the event log");
    let (mut statuses, mut began, mut ended) = (Vec::new(), None, 0);
    for entry in EventLogReader::new(&bytes[..]).expect("an event log").map(|entry| entry.expect("an entry"))
    {
        if entry.host != "alice" {
            continue;
        }
        if entry.event.name() == "work:fetched" {
            began = began.or(Some(entry.time));
        }
        if let LogEvent::Completed { completion, .. } = &entry.event
            && completion.operation == "send"
        {
            statuses.push(completion.status.to_string());
            ended = entry.time;
        }
    }
    (statuses.join(" "), ended - began.expect("a WQE"))
}

/// The lines of a verdict, without the heading.
fn verdict(text: &str) -> Vec<String> {
    let is_of_verdict = |line: &&str| line.starts_with("fault ") || line.starts_with("held ");
    text.lines().map(str::trim).filter(is_of_verdict).map(str::to_owned).collect()
}

/// The event log of a run in a folder.
fn log_in(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let mut found = entries.filter_map(|path| match path.is_dir() {
        true => log_in(&path),
        false => path.ends_with("events.jsonl").then_some(path),
    });
    found.next()
}

fn packets_and_links_have_the_same_faults_everywhere() {
    let (mut rig, program) = rig_with_cards();
    for (index, (faults, least_ms, expected)) in PACKET_FAULTS.iter().enumerate() {
        let on = "on = \"alice -> softhca1\"\nmatch = { class = \"send\" }";
        let faults = format!("{HOSTS}{}\n", faults.replace("ON", on));
        let run = rig.write("run.toml", &format!("{faults}{SENDS}"));
        let mut logs = Vec::new();
        for on in ["sim", "udp"] {
            let out = rig.file(&format!("{index}-{on}"));
            let seen = rig.softhca(&["run", "--on", on, "--out", &out, &run]);
            assert!(seen.success, "{on}: {faults}\n{seen:?}");
            logs.push(log_in(Path::new(&out)).expect("the run has a log"));
        }
        let file = rig.write("exec.toml", &faults);
        // The program executes the transport itself, and then the daemon.
        let verdicts = ["direct", "daemon"].map(|path| {
            let log = rig.file(&format!("{index}-{path}.jsonl"));
            let options = ["--path", path, "--scenario", &file, "--log", &log];
            let seen = rig.exec(&options, &[&program, "cards"]);
            assert!(seen.success, "{path}: {faults}\n{seen:?}");
            logs.push(log.into());
            verdict(&seen.text)
        });
        assert_eq!(verdicts[0], verdicts[1], "{faults}");
        for log in logs {
            let (statuses, elapsed_ns) = sends_of(&log);
            assert_eq!(statuses, *expected, "{}: {faults}", log.display());
            // A program that stands still does not stop a card in the daemon.
            let is_in_time =
                elapsed_ns >= least_ms * 1_000_000 || log.ends_with(format!("{index}-daemon.jsonl"));
            assert!(is_in_time, "{} {elapsed_ns} ns: {faults}", log.display());
        }
    }
}

/// The event, its name and number, and the result of the next call.
const EVENTS: &[(&str, &str, u32, &str)] = &[
    ("gid-change", "GID_CHANGE", 18, "ok"),
    ("lid-change", "LID_CHANGE", 11, "ok"),
    ("pkey-change", "PKEY_CHANGE", 12, "ok"),
    ("port-err", "PORT_ERR", 10, "ok"),
    ("port-active", "PORT_ACTIVE", 9, "ok"),
    ("device-fatal", "DEVICE_FATAL", 8, "EIO"),
    ("device-removed", "DEVICE_FATAL", 8, "EIO"),
];

/// A program on the direct data path. Its start takes an unknown time: the events are raised until one reaches it.
fn events_at_a_time_are_the_same_everywhere() {
    let mut rig = Rig::new();
    let program = compile_with(&rig, "fault_kinds", &["-libverbs", "-lrdmacm"]);
    for (event, name, number, result) in EVENTS {
        // The event that comes first: a port or a device has an event only if its state changes.
        let before = match *event {
            "port-active" => Some("port-err"),
            "port-err" => Some("port-active"),
            "device-removed" => Some("device-returned"),
            _ => None,
        };
        let raise = |event: &str, at_ms: u64| {
            format!(
                "[[fault]]\nhost = \"alice\"\nat = \"{at_ms}ms\"\naction = {{ raise-event = \"{event}\" }}\noptional = true\n"
            )
        };
        let at = |at_ms: u64| {
            let first = before.map(|before| raise(before, at_ms)).unwrap_or_default();
            first + &raise(event, at_ms + 20)
        };
        let mut expected =
            format!("[[expect]]\nevent = {{ host = \"alice\", name = \"{name}\", times = \">= 1\" }}\n");
        if *result == "EIO" {
            expected += "[[expect]]\ncompletion = { qp = \"alice.1\", status = \"WR_FLUSH_ERR\" }\n";
        }
        let hosts = "title = \"t\"\n[hosts]\nalice = {}\nbob = {}\n";
        let sends = "[[pair]]\nqps = [\"alice.1\", \"bob.1\"]\n[[workload]]\nname = \"sends\"\n\
            stream = { qp = \"alice.1\", op = \"send\", bytes = 1, count = 1 }\n";
        let run = rig.write("run.toml", &format!("{hosts}{}{expected}{sends}", at(1)));
        for on in ["sim", "udp"] {
            let seen = rig.softhca(&["run", "--on", on, &run]);
            assert!(seen.success, "{on}: {event}: {seen:?}");
        }
        let faults: String = (0..100).map(|n| at(200 * n)).collect();
        // The queue pair of the program never becomes ready to receive, so that it has no name.
        let expected = expected.lines().take(2).collect::<Vec<_>>().join("\n");
        let file = rig.write("exec.toml", &format!("{hosts}{faults}{expected}\n"));
        let seen = rig.exec(&["--scenario", &file], &[&program, "wait", &number.to_string()]);
        let flushed = if *result == "EIO" { "receive status 5\n" } else { "" };
        let printed = format!("event {number}\n{flushed}alloc_pd {result}\n");
        assert!(seen.success && seen.text.starts_with(&printed), "{event}: {seen:?}");
    }
}

/// Loses the device at a call, and opens it again, as `fault_kinds lose` does.
fn lose_device(device: &Device) -> String {
    let mut text = String::new();
    let mut print = |call: &str, result: Result<(), softhca::Error>| {
        let errno = result.err().map(|error| error.errno());
        let result = match errno {
            None => "ok",
            Some(libc::EIO) => "EIO",
            Some(_) => "another error",
        };
        let _ = writeln!(text, "{call} {result}");
    };
    let context = device.open();
    let domain = context.allocate_protection_domain().expect("a domain");
    let region = domain.allocate_region(64, AccessFlags::LOCAL_WRITE).expect("a region");
    let queue = context.create_completion_queue(16).expect("a queue");
    let pair = domain.create_queue_pair(QpType::Rc, &queue).build().expect("a queue pair");
    let access = AccessFlags::LOCAL_WRITE;
    let init = ModifyQp::default().state(QpState::Init).pkey_index(0).port(1).access_flags(access);
    pair.modify(&init).expect("INIT");
    let entries = [region.sge(0, 16)];
    print("post_recv", pair.post_recv(&ReceiveRequest { wr_id: 7, sg_list: &entries }));
    let wait = Duration::from_secs(30);
    assert_eq!(context.wait_async_event(wait).expect("an event").name(), "DEVICE_FATAL");
    let status = queue.wait_for(wait).expect("the receive is flushed").status;
    assert_eq!(status, softhca::CompletionStatus::WrFlushError);
    print("alloc_pd", context.allocate_protection_domain().map(drop));
    print("query_device", context.check_device());
    // While it is removed, a new context has no device either.
    assert!(device.open().allocate_protection_domain().is_err());
    context.raise_event(InjectedEvent::DeviceReturned, None).expect("it returns");
    print("alloc_pd", device.open().allocate_protection_domain().map(drop));
    print("alloc_pd", context.allocate_protection_domain().map(drop));
    text.replacen("post_recv ok\n", "post_recv ok\nevent 8\nreceive status 5\n", 1)
}

const LOST_AND_FOUND: &str =
    "post_recv ok\nevent 8\nreceive status 5\nalloc_pd EIO\nquery_device EIO\nalloc_pd ok\nalloc_pd EIO\n";

fn a_device_is_removed_and_returns_everywhere() {
    let removal = "[[fault]]\nhost = \"alice\"\nverb = \"post_recv\"\nnth = 1\naction = { raise-event = \"device-removed\" }\n";
    let plan = Scenario::parse("f", &format!("{HOSTS}{removal}")).expect("a file");
    let plan = plan.plan(&ParameterValues::new(), 1).expect("a plan");
    let faults = plan.program_faults(0).expect("faults of alice");
    let mut world = World::new(1);
    let embedded = Device::embedded().expect("an embedded device");
    for device in [world.device("alice"), embedded] {
        device.set_program_faults(faults.clone());
        assert_eq!(lose_device(&device), LOST_AND_FOUND);
    }
    // The program creates a shared receive queue on its other card when it has seen that the first is gone.
    let return_ = "[[fault]]\nname = \"seen\"\nhost = \"alice\"\nverb = \"create_srq\"\naction = \"count\"\n\
        [[fault]]\nhost = \"alice\"\nafter = { fault = \"seen\" }\naction = { raise-event = \"device-returned\" }\n";
    let (mut rig, program) = rig_with_cards();
    let file = rig.write("removed.toml", &format!("{HOSTS}{removal}{return_}"));
    let seen = rig.exec(&["--scenario", &file], &[&program, "lose-one"]);
    assert!(seen.success && seen.text.starts_with(LOST_AND_FOUND), "{seen:?}");
    // A device that a fault removed is back when the program has ended.
    let file = rig.write("gone.toml", &format!("{HOSTS}{removal}"));
    let seen = rig.exec(&["--scenario", &file], &[&program, "lose-and-end"]);
    assert!(seen.success && seen.text.contains("query_device EIO"), "{seen:?}");
    let seen = rig.exec(&[], &[&program, "cards"]);
    assert!(seen.success, "{seen:?}");
}

fn a_daemon_starts_again() {
    let mut rig = Rig::new();
    let program = compile_with(&rig, "fault_kinds", &["-libverbs", "-lrdmacm"]);
    let hosts = "title = \"t\"\n[hosts]\nalice = {}\nbob = {}\n";
    let faults = "[[fault]]\nname = \"receive\"\nhost = \"alice\"\nverb = \"post_recv\"\nnth = 1\naction = \"count\"\n\
        [[fault]]\nhost = \"alice\"\nafter = { fault = \"receive\" }\naction = \"restart-daemon\"\n\
        [[expect]]\nexit-code = 0\n";
    let file = rig.write("restart.toml", &format!("{hosts}{faults}"));
    let addresses =
        |rig: &Rig| rig.softhca(&["status"]).text.split_once("127.").map(|(_, rest)| rest[..10].to_owned());
    assert!(rig.softhca(&["env"]).success);
    let before = addresses(&rig);
    let seen = rig.exec(&["--scenario", &file], &[&program, "lose"]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
    assert!(seen.text.starts_with(LOST_AND_FOUND), "{seen:?}");
    assert!(seen.text.contains("fault \"fault 2\" applied once"), "{seen:?}");
    // The new daemon has the addresses of the first one, and goes on.
    assert_eq!(addresses(&rig), before, "{seen:?}");
}

/// Runs a program on two cards, with faults that wait for a fault named "place".
fn run_until(place: &str, action: &str, words: &dyn Fn(String) -> Vec<String>) -> ProgramOutput {
    let (mut rig, program) = rig_with_cards();
    let text = format!(
        "{HOSTS}[[fault]]\nname = \"place\"\n{place}\ntimes = 1\naction = \"count\"\n\
         [[fault]]\nhost = \"alice\"\nafter = {{ fault = \"place\" }}\naction = {action}\n"
    );
    let file = rig.write("place.toml", &text);
    let words = words(program);
    rig.exec(&["--scenario", &file], &words.iter().map(String::as_str).collect::<Vec<_>>())
}

const PACKET: &str = "on = \"alice -> softhca1\"\nskip = 2";

/// A process beside the one that stops sees its state.
fn a_process_stops_at_a_packet_and_at_a_call() {
    for place in [PACKET, "host = \"alice\"\nverb = \"post_send\"\nskip = 2"] {
        let seen = run_until(place, "{ stall = \"2s\" }", &|program| {
            let watch = "until grep -q '^State:.T' /proc/$$/status; do sleep 0.02; done; echo stopped";
            let script = format!("({watch}) & {program} cards; wait; echo went on");
            vec!["sh".into(), "-c".into(), script]
        });
        assert!(seen.success && seen.text.starts_with("stopped\nwent on\n"), "{place}: {seen:?}");
        assert!(seen.text.contains("fault \"fault 2\" applied once"), "{place}: {seen:?}");
    }
}

/// The packet waits for the kill: the program does not end by itself, although it needs microseconds for the rest.
fn a_process_is_killed_at_a_packet() {
    let seen = run_until(PACKET, "\"kill\"", &|program| vec![program, "cards".into()]);
    assert_eq!(seen.code, Some(137), "{seen:?}");
}

/// An ACK that is late or lost decides when the region is deregistered, not the speed of the program: between the two
/// transmissions, or between a message and its completion.
fn recording_changes_no_outcome_of_a_released_region() {
    for (recovery, fault, statuses) in [
        ("fatal", "times = 1\naction = { delay = \"100ms\" }", ["status 0", "status 0"]),
        ("go-back-n", "action = \"drop\"", ["status 0", "status 4"]),
    ] {
        let mut rig = Rig::new();
        let settings = ["--cards", "2", "--recovery", recovery];
        let program = compile_with(&rig, "fault_kinds", &["-libverbs", "-lrdmacm"]);
        let on = "[[fault]]\non = \"softhca1 -> alice\"\nmatch = { class = \"ack\" }\nskip = 1\n";
        let file = rig.write("ack.toml", &format!("{HOSTS}{on}{fault}\n"));
        let statuses_in = |text: &str| -> Vec<String> {
            text.lines().filter(|line| line.starts_with("status")).map(str::to_owned).collect()
        };
        // Without a recording, and then with one. Each run has the rules anew.
        for (path, watch) in [("", ""), ("direct", "--why"), ("direct", "--strict"), ("daemon", "--strict")] {
            let exports = rig.softhca(&[&["env"], &settings[..], &["--scenario", &file]].concat()).text;
            let exports: Vec<&str> = exports.lines().filter(|line| line.starts_with("export ")).collect();
            let script = format!("{}\n{program} release", exports.join("\n"));
            let options = [&settings[..], &["--path", path, watch]].concat();
            let seen = match watch {
                "" => rig.shell(&script),
                _ => rig.exec(&options, &[&program, "release"]),
            };
            assert_eq!(statuses_in(&seen.text), statuses, "{recovery} {path} {watch}: {seen:?}");
            // The first region is released when its request has completed, but nobody has polled that.
            if watch == "--strict" {
                let mistakes = seen.text.matches("error[deregistered-in-use]").count();
                let is_named = ["before the completion of work request 0 of", "while work request 1 of"]
                    .map(|mistake| seen.text.contains(mistake));
                assert!(mistakes == 2 && is_named == [true; 2], "{path}: {seen:?}");
            }
        }
    }
}
