//! The library on real sockets: the same verdicts and the same events as in virtual time.

use softhca_scenarios::{ParameterValues, Recording, Scenario, Verdict, simulate, udp};
use softhca_trace::log::LogEvent;
use softhca_trace::{CaptureReader, EventLogReader, LadderStyle, Packet, PacketContents};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many scenarios run at a time: they mostly wait.
const AT_ONCE: usize = 4;

/// Nothing in these depends on how long something takes; where chance decides about packets that are sent again, the
/// verdicts are compared.
#[test]
fn the_library_tells_the_same_story_on_real_sockets() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("library");
    let mut files: Vec<_> =
        fs::read_dir(folder).expect("the library").map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    let next = AtomicUsize::new(0);
    let work = || {
        let (mut compared, mut differences) = (0, Vec::new());
        while let Some(path) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(found) = differences_of(path) {
                compared += 1;
                differences.extend(found);
            }
        }
        (compared, differences)
    };
    let (mut compared, mut differences) = (0, Vec::new());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            let (count, found) = worker.join().expect("a worker");
            compared += count;
            differences.extend(found);
        }
    });
    assert!(compared >= 25, "only {compared} scenarios were compared");
    assert!(differences.is_empty(), "{differences:#?}");
}

/// The steps `first` and `second`, and faults that wait for something.
const WAITING: &str = r#"title = "t"
[hosts]
alice = {}
bob = {}
[[link]]
between = ["alice", "bob"]
[[pair]]
qps = ["alice.1", "bob.1"]
[[step]]
name = "first"
qp = "alice.1"
write = { bytes = 4000 }
[[step]]
name = "second"
after = "first"
qp = "alice.1"
write = { bytes = 4000 }
[[expect]]
completion = { step = "first", status = "SUCCESS", times = 1 }
"#;

#[test]
fn faults_wait_for_a_step_an_event_or_another_fault_in_virtual_and_real_time() {
    for rest in [
        // A fault of packets after a step.
        "[[fault]]\non = \"alice -> bob\"\nafter = { step = \"first\" }\nskip = 1\ntimes = 1\naction = \"drop\"\n\
         [[expect]]\ncompletion = { step = \"second\", status = \"RETRY_EXC_ERR\", times = 1 }",
        // A fault of a call after a step, and one after a fault of packets.
        "[[fault]]\nhost = \"alice\"\nverb = \"post_send\"\nafter = { step = \"first\" }\naction = { fail = \"ENOMEM\" }\n\
         [[expect]]\nverb-error = { host = \"alice\", errno = \"ENOMEM\", times = 1 }",
        "[[fault]]\nname = \"seen\"\non = \"alice -> bob\"\ntimes = 1\naction = \"count\"\n\
         [[fault]]\nhost = \"alice\"\nverb = \"post_send\"\nafter = { fault = \"seen\" }\naction = { fail = \"EINVAL\" }\n\
         [[expect]]\nverb-error = { host = \"alice\", errno = \"EINVAL\", times = 1 }",
        // A fault of a host after a call.
        "[[fault]]\nname = \"second\"\nhost = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = \"count\"\n\
         [[fault]]\nhost = \"bob\"\nafter = { fault = \"second\" }\naction = { raise-event = \"qp-fatal\" }\n\
         [[expect]]\nevent = { host = \"bob\", name = \"QP_FATAL\", times = 1 }",
        // A fault of a host after an event, which waits for a step.
        "[[fault]]\nhost = \"alice\"\nafter = { step = \"first\" }\naction = { raise-event = \"gid-change\" }\n\
         [[fault]]\nhost = \"alice\"\nafter = { event = \"GID_CHANGE\" }\naction = { raise-event = \"pkey-change\" }\n\
         [[expect]]\nevent = { host = \"alice\", name = \"PKEY_CHANGE\", times = 1 }",
        // A link that goes down after a step, and one that flaps.
        "[[fault]]\nlink = \"alice - bob\"\nafter = { step = \"first\" }\naction = { link-down = {} }\n\
         [[expect]]\nevent = { host = \"bob\", name = \"PORT_ERR\", times = 1 }\n\
         [[expect]]\ncompletion = { step = \"second\", status = \"RETRY_EXC_ERR\", times = 1 }",
        "[[fault]]\nlink = \"alice - bob\"\nafter = { step = \"second\" }\naction = { flap = { down = \"1ms\", up = \"1ms\", times = 2 } }\n\
         [[expect]]\nevent = { host = \"alice\", name = \"PORT_ERR\", times = 2 }\n\
         [[expect]]\nevent = { host = \"bob\", name = \"PORT_ACTIVE\", times = 2 }",
        // Memory that becomes inaccessible.
        "[[fault]]\nhost = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = { unmap = 1 }\n\
         [[expect]]\ncompletion = { step = \"second\", status = \"LOC_PROT_ERR\", times = 1 }",
    ] {
        let scenario = Scenario::parse("waiting", &format!("{WAITING}{rest}\n")).expect(rest);
        let plan = scenario.plan(&ParameterValues::new(), 1).expect("a plan");
        for outcome in [simulate(&plan, Recording::Digest), udp::run(&plan, Recording::Digest)] {
            assert_eq!(outcome.verdict, Verdict::Pass, "{rest}\n{outcome:#?}");
        }
    }
}

/// What differs in a scenario in real time, if it can be compared.
fn differences_of(path: &Path) -> Option<Vec<String>> {
    let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
    let scenario = Scenario::parse(&name, &fs::read_to_string(path).expect("a text")).expect("a scenario");
    let plan = scenario.plan(&ParameterValues::new(), 1).expect("a plan");
    if plan.unsupported_on_udp().is_some() || plan.timed_expectations().next().is_some() {
        return None;
    }
    let virtual_time = simulate(&plan, Recording::Everything);
    assert_ne!(virtual_time.verdict, Verdict::Error, "{name}: {:?}", virtual_time.error);
    let real_time = udp::run(&plan, Recording::Digest);
    let mut differences = Vec::new();
    if real_time.verdict != virtual_time.verdict {
        let failures: Vec<String> =
            real_time.failures().map(|failure| format!("{}: {}", failure.text, failure.detail)).collect();
        differences.push(format!("{name}: {:?} {failures:?} {:?}", real_time.verdict, real_time.error));
    }
    if let (false, Some(ours), Some(theirs)) =
        (plan.has_random_faults(), &virtual_time.comparable_trace, &real_time.comparable_trace)
    {
        differences
            .extend(ours.differences(theirs).into_iter().map(|difference| format!("{name}: {difference}")));
    }
    Some(differences)
}

fn plan_of(text: &str) -> softhca_scenarios::Plan {
    Scenario::parse("test.toml", text).expect("a scenario").plan(&ParameterValues::new(), 1).expect("a plan")
}

const LOSS: &str = include_str!("../../library/fatal-lost-write-middle.toml");

#[test]
fn a_real_run_leaves_a_log_a_capture_and_ladders() {
    let outcome = udp::run(&plan_of(LOSS), Recording::Everything);
    assert_eq!(outcome.verdict, Verdict::Pass, "{:?}", outcome.error);
    let artefacts = outcome.artifacts.expect("they were asked for");
    let entries: Vec<_> = EventLogReader::new(&artefacts.events[..])
        .expect("a log")
        .map(|entry| entry.expect("an entry"))
        .collect();
    let fault =
        entries.iter().find(|entry| matches!(entry.event, LogEvent::Fault { .. })).expect("the fault");
    assert_eq!(fault.host, "alice");
    assert_eq!(fault.trigger.as_deref(), Some("dropped by \"lose the second packet\""));
    assert!(entries.iter().any(|entry| entry.host == "bob"));
    let comment = b"dropped by \"lose the second packet\"";
    assert_eq!(artefacts.capture.windows(comment.len()).filter(|window| window == comment).count(), 1);
    let records: Vec<_> = CaptureReader::new(&artefacts.capture[..])
        .expect("a capture")
        .map(|record| record.expect("one"))
        .collect();
    let roce =
        records.iter().filter(|record| matches!(Packet::new(record, 0).contents, PacketContents::Roce(_)));
    // Four packets of the WRITE, and the NAK.
    assert!(roce.count() >= 5);
    let drawn: Vec<String> =
        artefacts.ladders.iter().map(|ladder| ladder.draw(LadderStyle::default())).collect();
    assert!(drawn.join("\n").contains("lose the second packet"), "{drawn:?}");
}

#[test]
fn a_real_run_that_fails_is_written_down_whether_or_not_somebody_asked() {
    let wrong = format!("{LOSS}\n[[expect]]\ncompletion = {{ qp = \"alice.1\", status = \"SUCCESS\" }}\n");
    assert!(udp::run(&plan_of(&wrong), Recording::Digest).artifacts.is_some());
    assert!(udp::run(&plan_of(LOSS), Recording::Digest).artifacts.is_none());
}
