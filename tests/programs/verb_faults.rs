//! The same fault file has the same effect on a C program under `softhca exec`, on an embedded device and in a simulation;
//! and a sweep finds the bugs of a program.

use crate::exec::{compile, compile_with, compiler};
use crate::rig::{Rig, softhca};
use libtest_mimic::Trial;
use softhca::cm::{EventChannel, PortSpace};
use softhca::sim::World;
use softhca::{
    AccessFlags, AddressVector, CqNotify, Device, Error, ModifyQp, Mtu, PortState, Psn, QpState, QpType,
    QueuePair, ReceiveRequest, RnrTimer, SendRequest,
};
use softhca_scenarios::{ParameterValues, Scenario};
use softhca_tests::needs;
use std::fmt::Write;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

/// The tests of this file.
pub fn trials() -> Vec<Trial> {
    vec![
        needs!(compiler(), a_fault_file_has_the_same_effect_everywhere),
        needs!(compiler(), a_killed_call_ends_the_process),
        needs!(compiler(), a_sweep_finds_six_bugs_and_nothing_in_the_corrected_program),
        needs!(compiler(), a_sweep_can_be_replayed_resumed_and_split),
        needs!(compiler(), a_sweep_addresses_packets_by_flow_and_psn),
        needs!(compiler(), the_faults_of_a_program_are_shrunk),
        needs!(compiler(), completions_gather_and_notifications_get_lost_everywhere),
        needs!(compiler(), a_call_ends_with_an_event_of_the_connection_manager_everywhere),
    ]
}

/// The fault, the number of asynchronous events that it causes, and a line that the fault changes.
const FAULTS: &[(&str, usize, &str)] = &[
    ("host = \"alice\"\nverb = \"reg_mr\"\nnth = 2\naction = { fail = \"ENOMEM\" }", 0, "reg_mr ENOMEM"),
    ("host = \"alice\"\nverb = \"alloc_pd\"\nnth = 1\naction = { fail = \"ENOMEM\" }", 0, "alloc_pd ENOMEM"),
    (
        "host = \"alice\"\nverb = \"create_cq\"\nevery = 2\naction = { fail = \"EINVAL\" }",
        0,
        "create_cq EINVAL",
    ),
    (
        "host = \"alice\"\nverb = \"create_qp\"\nskip = 1\ntimes = 1\naction = { fail = \"ENOMEM\" }",
        0,
        "create_qp ENOMEM",
    ),
    (
        "host = \"alice\"\nverb = \"modify_qp\"\nobject = 2\nnth = 3\naction = { fail = \"EINVAL\" }",
        0,
        "modify_qp EINVAL",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nobject = 1\nnth = 2\naction = { fail = \"ENOMEM\" }",
        0,
        "post_send ENOMEM",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nprobability = 0.5\noptional = true\naction = { fail = \"EAGAIN\" }",
        0,
        "post_send EAGAIN",
    ),
    (
        "host = \"alice\"\nverb = \"post_recv\"\nafter = { verb = \"post_recv\", nth = 3 }\naction = { fail = \"EINVAL\" }",
        0,
        "post_recv EINVAL",
    ),
    (
        "qp = \"alice.1\"\nnth = 2\nvendor-error = 77\naction = { set-status = \"RETRY_EXC_ERR\" }",
        0,
        "send 1 status 12 vendor_err 77",
    ),
    ("qp = \"alice.1\"\nnth = 3\naction = { delay-completion = \"3ms\" }", 0, "send 2 status 0 vendor_err 0"),
    ("qp = \"alice.1\"\nnth = 2\naction = \"overflow-cq\"", 3, "send 1 lost"),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 2\nobject = 2\naction = { raise-event = \"cq-err\" }",
        3,
        "send 1 lost",
    ),
    ("qp = \"alice.1\"\ntimes = 2\naction = { burst-completions = 2 }", 0, "send 1 status 0 vendor_err 0"),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 3\naction = { unmap = 1 }",
        0,
        "send 2 status 4 vendor_err",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = \"count\"\n\
         [[fault]]\nqp = \"alice.1\"\nafter = { fault = \"fault 1\" }\nnth = 1\naction = { set-status = \"REM_ACCESS_ERR\" }",
        0,
        "send 1 status 10",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = { raise-event = \"lid-change\" }",
        1,
        "event 11",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = { raise-event = \"pkey-change\" }",
        1,
        "event 12",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 3\naction = { raise-event = \"device-fatal\" }",
        1,
        "send 2 status 5 vendor_err 2",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = { raise-event = \"port-err\" }",
        1,
        "port down",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = { raise-event = \"port-err\" }\n\
         [[fault]]\nhost = \"alice\"\nverb = \"post_send\"\nafter = { event = \"PORT_ERR\" }\nnth = 1\n\
         action = { raise-event = \"port-active\" }",
        2,
        "port active",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 2\nobject = 1\naction = { raise-event = \"srq-limit-reached\" }",
        1,
        "event 15",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 3\naction = { raise-event = \"device-removed\" }",
        1,
        "send 2 status 5 vendor_err 2",
    ),
    (
        "host = \"alice\"\nverb = \"reg_mr\"\nuntil = { verb = \"reg_mr\", nth = 3 }\naction = { fail = \"EINVAL\" }",
        0,
        "reg_mr EINVAL\nreg_mr EINVAL\nreg_mr ok",
    ),
    (
        "host = \"alice\"\nverb = \"create_qp\"\npattern = \"OOX\"\naction = { fail = \"ENOMEM\" }",
        0,
        "create_qp ENOMEM",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nobject = 1\nnth = 2\naction = { raise-event = \"qp-fatal\" }",
        1,
        "send 1 status 5 vendor_err 2",
    ),
    (
        "host = \"alice\"\nverb = \"post_send\"\nnth = 4\naction = { raise-event = \"gid-change\" }",
        1,
        "event 18",
    ),
];

fn scenario(fault: &str) -> String {
    format!("title = \"one fault\"\n[hosts]\nalice = {{}}\nbob = {{}}\n[[fault]]\n{fault}\n")
}

/// Prints as the C program does.
struct Printer(String);

impl Printer {
    fn print<T>(&mut self, call: &str, result: Result<T, Error>) -> Option<T> {
        let text = match &result {
            Ok(_) => "ok",
            Err(error) => match error.errno() {
                5 => "EIO",
                11 => "EAGAIN",
                12 => "ENOMEM",
                22 => "EINVAL",
                _ => "another error",
            },
        };
        let _ = writeln!(self.0, "{call} {text}");
        result.ok()
    }

    fn connect(&mut self, qp: &QueuePair, peer: &QueuePair) {
        let modify = ModifyQp::default;
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let init = modify().state(QpState::Init).pkey_index(0).port(1).access_flags(access);
        let receive = modify()
            .state(QpState::ReadyToReceive)
            .address_vector(AddressVector::to(peer.endpoint().gid))
            .path_mtu(Mtu::B1024)
            .dest_qpn(peer.qpn())
            .rq_psn(Psn::new(7))
            .max_dest_rd_atomic(1)
            .min_rnr_timer(RnrTimer::new(12));
        let send = modify().state(QpState::ReadyToSend).sq_psn(Psn::new(7));
        let send = send.timeout(14).retry_count(1).rnr_retry(7).max_rd_atomic(1);
        for step in [init, receive, send] {
            if self.print("modify_qp", qp.modify(&step)).is_none() {
                return;
            }
        }
    }
}

/// The calls of the C program. With `may_lose`, an event can take the place of a completion.
fn call_verbs(device: &Device, events: usize, may_lose: bool) -> String {
    let mut out = Printer(String::new());
    let context = device.open();
    let domains: Vec<_> =
        (0..2).map(|_| out.print("alloc_pd", context.allocate_protection_domain())).collect();
    let domain = domains.into_iter().flatten().last().expect("a domain");
    let region = |_| domain.allocate_region(256, AccessFlags::LOCAL_WRITE);
    let regions: Vec<_> = (0..3).map(|n| out.print("reg_mr", region(n))).collect();
    let queues: Vec<_> =
        (0..2).map(|_| out.print("create_cq", context.create_completion_queue(64))).collect();
    let queue = queues.iter().flatten().last().expect("a completion queue").clone();
    let _shared = out.print("create_srq", domain.create_shared_receive_queue(4, 1));
    let build =
        || domain.create_queue_pair(QpType::Rc, &queue).max_send_wr(16).max_recv_wr(16).sq_sig_all().build();
    let pairs: Vec<_> = (0..3).map(|_| out.print("create_qp", build())).collect();
    let pairs: Vec<_> = pairs.into_iter().flatten().collect();
    out.connect(&pairs[0], &pairs[1]);
    out.connect(&pairs[1], &pairs[0]);
    let usable = regions.into_iter().flatten().next().expect("a region");
    let entry = [usable.sge(0, 16)];
    let (mut receives, mut first_event) = (0, None);
    for wr_id in 100..104 {
        let posted = out.print("post_recv", pairs[1].post_recv(&ReceiveRequest { wr_id, sg_list: &entry }));
        receives += u64::from(posted.is_some());
    }
    'sends: for wr_id in 0..receives {
        if out.print("post_send", pairs[0].post_send(&SendRequest::send(wr_id, &entry))).is_none() {
            continue;
        }
        loop {
            let timeout = Duration::from_millis(if may_lose { 20 } else { 30_000 });
            let Some(completion) = queue.wait_for(timeout) else {
                first_event = first_event.or_else(|| context.wait_async_event(timeout));
                if !may_lose || first_event.is_some() {
                    let _ = writeln!(out.0, "send {wr_id} lost");
                    break 'sends;
                }
                continue;
            };
            if completion.wr_id < 100 {
                let (status, vendor) = (completion.status as u32, completion.vendor_error);
                let _ = writeln!(out.0, "send {} status {status} vendor_err {vendor}", completion.wr_id);
                break;
            }
        }
    }
    let port = if context.port_state() == PortState::Active { "active" } else { "down" };
    let _ = writeln!(out.0, "port {port}");
    for _ in 0..events {
        let event = first_event.take().or_else(|| context.wait_async_event(Duration::from_secs(30)));
        let event = event.expect("an event");
        let number = match event.name() {
            "CQ_ERR" => 0,
            "QP_FATAL" => 1,
            "DEVICE_FATAL" => 8,
            "PORT_ACTIVE" => 9,
            "PORT_ERR" => 10,
            "SRQ_LIMIT_REACHED" => 15,
            "LID_CHANGE" => 11,
            "PKEY_CHANGE" => 12,
            "GID_CHANGE" => 18,
            name => panic!("{name}"),
        };
        let _ = writeln!(out.0, "event {number}");
    }
    out.print("alloc_pd", context.allocate_protection_domain());
    out.0
}

fn a_fault_file_has_the_same_effect_everywhere() {
    let mut rig = Rig::new();
    let program = compile(&rig, "verb_faults");
    for (fault, events, line) in FAULTS {
        let text = scenario(fault);
        let plan =
            Scenario::parse("f", &text).expect("a file").plan(&ParameterValues::new(), 1).expect("a plan");
        let faults = plan.program_faults(0).expect("faults of alice");
        let file = rig.write("fault.toml", &text);
        // A completion queue that fails never completes the send.
        let may_lose = line.ends_with(" lost");
        let arguments = vec![if may_lose { "lost" } else { "event" }; *events];
        let words = [&[program.as_str()][..], &arguments].concat();
        let mut world = World::new(1);
        let simulated = world.device("alice");
        simulated.set_program_faults(faults.clone());
        let in_world = call_verbs(&simulated, *events, may_lose);
        let embedded = Device::embedded().expect("an embedded device");
        embedded.set_program_faults(faults);
        let on_sockets = call_verbs(&embedded, *events, may_lose);
        assert!(in_world.contains(line), "{fault}\n{in_world}");
        assert_eq!(in_world, on_sockets, "{fault}");
        let seen = rig.exec(&["--host", "alice", "--name", "verbs", "--scenario", &file], &words);
        let printed: String =
            seen.text.lines().take(in_world.lines().count()).map(|line| format!("{line}\n")).collect();
        assert_eq!(in_world, printed, "{fault}\n{}", seen.text);
        assert!(seen.text.contains("fault \"fault 1\" applied"), "{fault}\n{}", seen.text);
        assert_eq!(seen.code, Some(0), "{fault}\n{}", seen.text);
    }
}

fn a_killed_call_ends_the_process() {
    let mut rig = Rig::new();
    let program = compile(&rig, "verb_faults");
    let file = rig
        .write("kill.toml", &scenario("host = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = \"kill\""));
    let seen = rig.exec(&["--scenario", &file, "--name", "kill"], &[&program]);
    assert_eq!(seen.code, Some(137), "{}", seen.text);
}

/// Runs `softhca sweep` and returns its exit code and output.
fn sweep(words: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(softhca());
    // The library keeps destroyed objects on purpose: LeakSanitizer would report them.
    command.arg("sweep").args(words).env("ASAN_OPTIONS", "detect_leaks=0");
    let output = command.output().expect("softhca runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

fn a_sweep_finds_six_bugs_and_nothing_in_the_corrected_program() {
    let rig = Rig::new();
    let corrected = compile_with(&rig, "planted_bugs", &["-fsanitize=address", "-g", "-libverbs"]);
    let (code, text) = sweep(&["--all", "--per-group", "2", "--", &corrected]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("no bad outcome"), "{text}");
    let bugs = compile_with(&rig, "planted_bugs", &["-DBUGS", "-fsanitize=address", "-g", "-libverbs"]);
    let (code, text) = sweep(&["--all", "--per-group", "2", "--", &bugs]);
    assert_eq!(code, Some(1), "{text}");
    for (bug, outcome) in [
        ("ignores a failed post", "hang at planted_bugs:post_recv:2:1:"),
        ("frees a buffer before the flush completes", "crash at planted_bugs:completion:1:1:"),
        ("waits for a completion that never comes", "hang at planted_bugs:post_send:1:1:"),
        ("leaks a region on an error path", "leak at planted_bugs:reg_mr:0:3:"),
        ("retries for ever", "hang at planted_bugs:create_qp:0:1:ENOMEM+"),
        ("reports success after a failed completion", "wrong-result at planted_bugs:completion:2:1:"),
    ] {
        assert!(text.contains(outcome), "{bug}: {outcome:?} is not in {text}");
    }
    assert!(text.contains("heap-use-after-free"), "{text}");
}

fn a_sweep_can_be_replayed_resumed_and_split() {
    let rig = Rig::new();
    let program = compile_with(&rig, "planted_bugs", &["-libverbs", "-DBUGS"]);
    let (code, text) = sweep(&["--only", "planted_bugs:reg_mr:0:3:ENOMEM", "--json", "--", &program]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("\"outcome\":\"leak\"") && text.contains("ended without releasing 2 memory region"),
        "{text}"
    );
    let (code, text) = sweep(&["--only", "nobody:reg_mr:0:2:ENOMEM", "--", &program]);
    assert_eq!(code, Some(2), "{text}");
    // How often a program waits for events depends on time; this one polls.
    let polling = compile(&rig, "verb_faults");
    let (_, all) = sweep(&["--list", "--", &polling]);
    let parts: Vec<String> =
        ["1/2", "2/2"].map(|shard| sweep(&["--list", "--shard", shard, "--", &polling]).1).into();
    let mut joined: Vec<&str> = parts.iter().flat_map(|part| part.lines()).collect();
    let mut whole: Vec<&str> = all.lines().collect();
    joined.sort_unstable();
    whole.sort_unstable();
    assert!(whole.len() > 20 && joined == whole, "{all}");
    let out = rig.file("out");
    let point = "planted_bugs:completion:2:1:RETRY_EXC_ERR";
    let (code, text) = sweep(&["--only", point, "--out", &out, "--", &program]);
    assert_eq!(code, Some(1), "{text}");
    let kept = |name: &str| format!("{out}/{}/{name}", point.replace(':', "-"));
    let ladder = std::fs::read_to_string(kept("ladder.txt")).expect("a ladder");
    assert!(ladder.contains("WRITE") && ladder.contains("SEND"), "{ladder}");
    for name in ["events.jsonl", "packets.pcapng", "planted_bugs.stdout", "planted_bugs.stderr"] {
        assert!(std::fs::metadata(kept(name)).is_ok(), "{name}");
    }
    // The fault as a scenario has the same effect.
    let seen = Rig::new().exec(&["--scenario", &kept("fault.toml"), "--name", "kept"], &[&program]);
    assert!(seen.success && seen.text.contains("replicate: commit 0: "), "{seen:?}");
    let first = ["--only", "planted_bugs:alloc_pd:0:1:ENOMEM", "--out", &out, "--", &program];
    assert_eq!(sweep(&first).0, Some(0));
    let both = [
        "--only",
        "planted_bugs:alloc_pd:0:1:ENOMEM",
        "--only",
        "planted_bugs:open_device:0:1:ENODEV",
        "--resume",
        "--json",
        "--out",
        &out,
        "--",
        &program,
    ];
    let (code, text) = sweep(&both);
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains("\"name\":\"alloc_pd\"") && text.contains("\"name\":\"open_device\""), "{text}");
}

fn a_sweep_addresses_packets_by_flow_and_psn() {
    let rig = Rig::new();
    let program = compile_with(&rig, "planted_bugs", &["-libverbs"]);
    // The queue pair that receives is ready first.
    let (_, list) = sweep(&["--list", "--packets", "--per-group", "9", "--", &program]);
    for fault in ["drop", "duplicate", "delay", "corrupt"] {
        for psn in 1..=7 {
            let point = format!("planted_bugs:request:2:{psn}:{fault}");
            assert!(list.lines().any(|line| line == point), "{point} is not in {list}");
        }
    }
    assert!(list.contains("planted_bugs:response:2:7:drop"), "{list}");
    for (point, outcome) in [
        ("request:2:3:drop", "clean-error"),
        ("request:2:7:corrupt", "clean-error"),
        ("request:2:2:duplicate", "right"),
        ("response:2:7:drop", "clean-error"),
    ] {
        let (code, text) = sweep(&["--only", &format!("planted_bugs:{point}"), "--json", "--", &program]);
        assert_eq!(code, Some(0), "{point}: {text}");
        let outcome = format!("\"outcome\":\"{outcome}\"");
        assert!(text.contains(&outcome) && text.contains("\"reached\":true"), "{point}: {text}");
    }
}

fn the_faults_of_a_program_are_shrunk() {
    let rig = Rig::new();
    let program = compile_with(&rig, "planted_bugs", &["-libverbs"]);
    // The program tries again to create a queue pair; a region that it cannot register ends it.
    let faults = "title = \"t\"\n[hosts]\nalice = {}\n\
        [[fault]]\nname = \"busy\"\nhost = \"alice\"\nverb = \"create_qp\"\nnth = 1\naction = { fail = \"ENOMEM\" }\n\
        [[fault]]\nname = \"full\"\nhost = \"alice\"\nverb = \"reg_mr\"\nskip = 1\naction = { fail = \"ENOMEM\" }\n\
        optional = true\n";
    let file = rig.write("faults.toml", &faults.replacen("action", "optional = true\naction", 1));
    let minimal = rig.file("minimal.toml");
    let seen = rig.softhca(&["shrink", &file, "-o", &minimal, "--", &program]);
    assert!(seen.success, "{seen:?}");
    assert!(seen.text.contains("1 of 2 faults suffice") && seen.text.contains("[[fault]]\n"), "{seen:?}");
    assert!(seen.text.contains("the program ends with 1"), "{seen:?}");
    let text = std::fs::read_to_string(&minimal).expect("the minimal file");
    assert!(text.contains("reg_mr") && !text.contains("create_qp"), "{text}");
    let again = Rig::new().exec(&["--scenario", &minimal, "--name", "minimal"], &[&program]);
    assert_eq!(again.code, Some(1), "{again:?}");
    let fine = rig.write("fine.toml", &faults[..faults.rfind("[[fault]]").expect("two faults")]);
    assert_eq!(rig.softhca(&["shrink", &fine, "--", &program]).code, Some(1));
}

/// Completions and notifications of a device, as `fault_kinds.c` prints them.
fn complete_and_notify(device: &Device) -> String {
    let mut out = Printer(String::new());
    let context = device.open();
    let domain = context.allocate_protection_domain().expect("a domain");
    let region = domain.allocate_region(64, AccessFlags::LOCAL_WRITE).expect("a region");
    let channel = context.create_completion_channel().expect("a channel");
    let sends = context.create_completion_queue_with_channel(16, &channel).expect("a queue");
    let receives = context.create_completion_queue(16).expect("a queue");
    let build = || {
        let pair = domain.create_queue_pair(QpType::Rc, &sends).recv_cq(&receives);
        pair.max_send_wr(8).max_recv_wr(8).sq_sig_all().build().expect("a queue pair")
    };
    let pairs = [build(), build()];
    out.connect(&pairs[0], &pairs[1]);
    out.connect(&pairs[1], &pairs[0]);
    out.0.clear();
    let entry = [region.sge(0, 16)];
    for wr_id in 0..4 {
        pairs[1].post_recv(&ReceiveRequest { wr_id, sg_list: &entry }).expect("room");
    }
    let transfer = |wr_id| {
        pairs[0].post_send(&SendRequest::send(wr_id, &entry)).expect("room");
        receives.wait_for(Duration::from_secs(30)).expect("a message");
    };
    let wait = || sends.wait_for(Duration::from_secs(30)).expect("a completion").wr_id;
    // The message is there, and its completion waits for the next one.
    transfer(0);
    let held = if sends.poll().is_none() { "held" } else { "at once" };
    transfer(1);
    let _ = writeln!(out.0, "first {held}, then {} {}", wait(), wait());
    // The device checks whether a notification is requested after it has written a completion. A verb waits for that.
    pairs[0].query().expect("a queue pair");
    // A wait that sleeps requests a notification itself.
    while channel.poll().is_some() {}
    for wr_id in 2..4 {
        sends.request_notification(CqNotify::NextCompletion);
        pairs[0].post_send(&SendRequest::send(wr_id, &entry)).expect("room");
        if wr_id == 3 {
            assert!(channel.wait_for(Duration::from_secs(30)).is_some(), "no notification");
        }
        let completed = wait();
        let notified = if wr_id == 3 || channel.poll().is_some() { "notified" } else { "silent" };
        let _ = writeln!(out.0, "{completed} {notified}");
    }
    out.0
}

fn completions_gather_and_notifications_get_lost_everywhere() {
    let mut rig = Rig::new();
    let program = compile_with(&rig, "fault_kinds", &["-libverbs", "-lrdmacm"]);
    let text = scenario(
        "qp = \"alice.1\"\ntimes = 2\naction = { burst-completions = 2 }\n\
         [[fault]]\nqp = \"alice.1\"\nnth = 3\naction = \"drop-notification\"",
    );
    let plan = Scenario::parse("f", &text).expect("a file").plan(&ParameterValues::new(), 1).expect("a plan");
    let faults = plan.program_faults(0).expect("faults of alice");
    let expected = "first held, then 0 1\n2 silent\n3 notified\n";
    let mut world = World::new(1);
    let embedded = Device::embedded().expect("an embedded device");
    for device in [world.device("alice"), embedded] {
        device.set_program_faults(faults.clone());
        assert_eq!(complete_and_notify(&device), expected);
    }
    let file = rig.write("kinds.toml", &text);
    let seen = rig.exec(&["--scenario", &file, "--name", "kinds"], &[&program, "completions"]);
    assert!(seen.success && seen.text.starts_with(expected), "{seen:?}");
}

/// Two connection identifiers resolve their own address, as `fault_kinds.c` does.
fn resolve_twice(device: &Device) -> String {
    let context = device.open();
    let channel = EventChannel::new(&context).expect("a channel");
    let mut text = String::new();
    let mut wait = || {
        let event = channel.wait_for(Duration::from_secs(30)).expect("a device").expect("an event");
        let _ = writeln!(text, "{} {}", event.kind, event.status);
    };
    let peer = SocketAddr::new(device.address(), 7471);
    let ids = [0, 1].map(|_| channel.create_id(PortSpace::Tcp).expect("an identifier"));
    for id in &ids {
        id.resolve_address(None, peer).expect("it is resolved later");
        wait();
    }
    ids[1].resolve_route().expect("it is resolved later");
    wait();
    text
}

fn a_call_ends_with_an_event_of_the_connection_manager_everywhere() {
    let mut rig = Rig::new();
    let program = compile_with(&rig, "fault_kinds", &["-libverbs", "-lrdmacm"]);
    let text = scenario(
        "host = \"alice\"\nverb = \"rdma_resolve_addr\"\nobject = 1\naction = { cm-event = { event = \"addr-error\", status = -19 } }\n\
         [[fault]]\nhost = \"alice\"\nverb = \"rdma_resolve_route\"\nobject = 2\naction = { cm-event = { event = \"route-error\", status = -110 } }",
    );
    let plan = Scenario::parse("f", &text).expect("a file").plan(&ParameterValues::new(), 1).expect("a plan");
    let faults = plan.program_faults(0).expect("faults of alice");
    let expected =
        "RDMA_CM_EVENT_ADDR_ERROR -19\nRDMA_CM_EVENT_ADDR_RESOLVED 0\nRDMA_CM_EVENT_ROUTE_ERROR -110\n";
    let mut world = World::new(1);
    let embedded = Device::embedded().expect("an embedded device");
    for device in [world.device("alice"), embedded] {
        device.set_program_faults(faults.clone());
        assert_eq!(resolve_twice(&device), expected);
    }
    let file = rig.write("cm.toml", &text);
    let seen = rig.exec(&["--scenario", &file, "--name", "cm"], &[&program, "resolve"]);
    assert!(seen.success && seen.text.starts_with(expected), "{seen:?}");
}
