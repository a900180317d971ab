//! Real programs with scripted faults: their behaviour, and our output.

use crate::exec::{compile, compiler};
use crate::rig::Rig;
use libtest_mimic::Trial;
use softhca_tests::needs;

/// The tests of this file.
pub fn trials() -> Vec<Trial> {
    vec![
        needs!("ib_write_bw", a_lost_packet_breaks_a_program_with_fatal_recovery),
        needs!("ib_write_bw", a_lost_packet_only_slows_a_program_with_go_back_n),
        needs!("ib_write_bw", a_fault_that_is_never_applied_fails_the_run),
        needs!("sh", unsupported_scenario_features_are_rejected),
        needs!("ibv_asyncwatch", port_state_changes_raise_async_events),
        needs!("ibv_devinfo", a_port_that_is_down_is_reported_as_down),
        needs!("ib_write_bw", lint_warns_while_the_program_runs),
        needs!("ib_write_bw", a_scenario_starts_its_programs),
        needs!("sh", a_run_of_programs_keeps_its_files_and_their_outputs),
        needs!("sh", a_program_that_fails_or_takes_too_long_ends_the_run),
        needs!("rping", a_program_waits_until_another_listens),
        needs!("sh", the_exit_code_of_a_program_is_an_expectation),
        needs!("sh", an_expected_failure_of_a_program_is_success),
        needs!("ibv_devinfo", a_program_starts_again),
        needs!(compiler(), a_process_is_killed_after_a_call),
        needs!(compiler(), an_event_at_a_time_reaches_a_program),
        needs!(compiler(), a_killed_daemon_is_a_device_that_is_gone),
        needs!("ibv_devinfo", env_gives_the_faults_of_a_file_to_the_programs_of_a_shell),
        needs!("ib_write_bw", the_rate_of_a_link_limits_a_program),
        needs!("ibv_rc_pingpong", delay_jitter_and_loss_of_a_link_apply_to_a_program),
    ]
}

fn scenario(name: &str) -> String {
    format!("{}/../scenarios/programs/{name}.toml", env!("CARGO_MANIFEST_DIR"))
}

/// Runs ib_write_bw with the server on alice and the client on bob with the scenario; returns the output of the client.
fn write_bw(rig: &mut Rig, recovery: &str, options: &[&str]) -> crate::rig::ProgramOutput {
    let server = ["--host", "alice", "--recovery", recovery];
    let client = [&["--host", "bob", "--recovery", recovery], options].concat();
    let (mut server, mut client) = rig.start_pair_with([&server, &client], &["ib_write_bw", "-n", "100"]);
    let seen = client.wait();
    let _ = server.wait();
    seen
}

/// The words after each occurrence of `mark` in a text.
fn lines_after<'a>(text: &'a str, mark: &str) -> Vec<&'a str> {
    text.split(mark).skip(1).map(|rest| rest.split_whitespace().next().unwrap_or_default()).collect()
}

fn a_lost_packet_breaks_a_program_with_fatal_recovery() {
    let mut rig = Rig::new();
    let (file, log) = (scenario("lost-write"), rig.file("log.jsonl"));
    let seen = write_bw(&mut rig, "fatal", &["--scenario", &file, "--log", &log]);
    assert!(!seen.success, "{}", seen.text);
    // perftest prints status, wr_id and vendor_err; 20 means that the peer missed a packet.
    assert!(seen.text.contains("Failed status 12: wr_id 0 syndrom 0x14"), "{}", seen.text);
    // We print the same work request, the peer and the packet: the first PSN of the client plus 2.
    assert!(seen.text.contains("WRITE 0 of bob.1 ended with RETRY_EXC_ERR"), "{}", seen.text);
    let first = lines_after(&seen.text, " PSN 0x")[0];
    let lost = (u32::from_str_radix(first, 16).expect("a PSN") + 2) & 0xff_ffff;
    let sentence = format!("+2 (PSN {lost}) is lost on its way to alice.1");
    assert!(seen.text.contains(&sentence), "{sentence:?} is not in {}", seen.text);
    for line in [
        "pass  The third packet of a real program is lost",
        "fault \"lose the third packet\" applied once",
        "held   alice -> bob: NAK sequence error, of bob.1, PSN +2, once: one passed",
    ] {
        assert!(seen.text.contains(line), "{line:?} is not in {}", seen.text);
    }
    let later = rig.softhca(&["why", &log]);
    assert!(later.success && later.text.contains(&sentence), "{later:?}");
}

fn a_lost_packet_only_slows_a_program_with_go_back_n() {
    let mut rig = Rig::new();
    let seen = write_bw(&mut rig, "go-back-n", &["--scenario", &scenario("lost-write")]);
    assert!(seen.success, "{}", seen.text);
    assert!(seen.text.contains("fault \"lose the third packet\" applied once"), "{}", seen.text);
    assert!(!seen.text.contains("RETRY_EXC_ERR"), "{}", seen.text);
}

fn a_fault_that_is_never_applied_fails_the_run() {
    let mut rig = Rig::new();
    let text = std::fs::read_to_string(scenario("lost-write")).expect("the scenario");
    let file = rig.write("never.toml", &text.replace("psn = \"+2\"", "psn = \"+900000\""));
    let seen = write_bw(&mut rig, "fatal", &["--scenario", &file]);
    assert_eq!(seen.code, Some(123), "{}", seen.text);
    assert!(seen.text.contains("fault \"lose the third packet\" never applied"), "{}", seen.text);
    assert!(seen.text.contains("FAIL"), "{}", seen.text);
}

fn unsupported_scenario_features_are_rejected() {
    let mut rig = Rig::new();
    for (name, text, sentence) in [
        (
            "steps",
            "[[pair]]\nqps = [\"a.1\", \"b.1\"]\n[[step]]\nqp = \"a.1\"\nwrite = { bytes = 1 }",
            "steps or workloads",
        ),
        (
            "calls",
            "[[fault]]\nhost = \"b\"\nverb = \"post_send\"\naction = { fail = \"ENOMEM\" }",
            "the program runs on a, and the scenario has faults in the calls or completions of b",
        ),
        ("acks", "[device]\nacks = \"coalesce\"", "only the device settings `profile` and `recovery`"),
        ("finish", "[[expect]]\nfinish = {}", "cannot be checked for real programs"),
        (
            "withheld",
            "[[fault]]\nhost = \"a\"\naction = { withhold-receives = \"1ms\" }",
            "not supported for real programs",
        ),
        ("mtu", "[[link]]\nbetween = [\"a\", \"b\"]\nmtu = 1500", "the network sets the MTU"),
        ("typo", "[[fault]]\nhots = \"a\"\naction = \"kill\"", "hots"),
    ] {
        let file = rig.write(name, &format!("title = \"x\"\n[hosts]\na = {{}}\nb = {{}}\n{text}\n"));
        let seen = rig.exec(&["--scenario", &file, "--name", name], &["true"]);
        assert_eq!(seen.code, Some(125), "{name}: {seen:?}");
        assert!(seen.text.contains(sentence), "{name}: {seen:?}");
    }
}

/// The link goes down and up repeatedly, so that nothing depends on when the program starts to listen. The reader stops
/// after enough events, and the next event ends the program.
fn port_state_changes_raise_async_events() {
    let mut rig = Rig::new();
    let watch = "stdbuf -oL ibv_asyncwatch | \
                 awk '{ print } /PORT_ERR/ { down = 1 } down && /PORT_ACTIVE/ { exit }'";
    let seen = rig.exec(&["--scenario", &scenario("port-flap")], &["sh", "-c", watch]);
    assert!(seen.success, "{seen:?}");
    for line in [
        "event_type IBV_EVENT_PORT_ERR (10), port 1",
        "event_type IBV_EVENT_PORT_ACTIVE (9), port 1",
        "held   alice raises PORT_ERR",
    ] {
        assert!(seen.text.contains(line), "{line:?} is not in {seen:?}");
    }
}

fn a_port_that_is_down_is_reported_as_down() {
    let mut rig = Rig::new();
    let look =
        "until ibv_devinfo | grep PORT_DOWN; do :; done; until ibv_devinfo | grep PORT_ACTIVE; do :; done";
    let seen = rig.exec(&["--scenario", &scenario("port-flap")], &["sh", "-c", look]);
    assert!(seen.success, "{seen:?}");
    assert!(seen.text.contains("PORT_DOWN (1)") && seen.text.contains("PORT_ACTIVE (4)"), "{seen:?}");
}

/// A mistake of ib_write_bw on every device: its CQ has room for the sends but not for the additional receive.
fn lint_warns_while_the_program_runs() {
    let mut rig = Rig::new();
    let (mut server, mut client) = rig.start_pair_with([&[], &["--lint"]], &["ib_write_bw", "-n", "200"]);
    let seen = client.wait();
    assert!(seen.success, "{seen:?}");
    for part in ["softhca lint: note[cq-too-small]: completion queue ", "softhca lint: 0 errors, "] {
        assert!(seen.text.contains(part), "{part:?} is not in {seen:?}");
    }
    assert!(server.wait().success);
}

fn a_scenario_starts_its_programs() {
    let rig = Rig::new();
    let seen = rig.softhca(&["run", "--on", "udp", &scenario("two-programs")]);
    assert!(seen.success, "{seen:?}");
    for line in [
        "fault \"lose the third packet\" applied once",
        "held   program \"client\" on bob ends with 0",
        "held   program \"server\" on alice ends with 0",
    ] {
        assert!(seen.text.contains(line), "{line:?} is not in {seen:?}");
    }
    let virtual_time = rig.softhca(&["run", &scenario("two-programs")]);
    assert_eq!(virtual_time.code, Some(2), "{virtual_time:?}");
    assert!(virtual_time.text.contains("real time only"), "{virtual_time:?}");
}

fn the_exit_code_of_a_program_is_an_expectation() {
    let rig = Rig::new();
    let text = "title = \"x\"\n[hosts]\na = {}\n[[workload]]\nname = \"p\"\n\
                command = { host = \"a\", argv = [\"sh\", \"-c\", \"echo ${ADDRESS_a}; exit 3\"], exit-code = 3 }\n";
    let file = rig.write("three.toml", text);
    let seen = rig.softhca(&["run", "--on", "udp", &file]);
    assert!(seen.success && seen.text.contains("program \"p\" on a ends with 3: it did"), "{seen:?}");
    let file = rig.write("four.toml", &text.replace("exit-code = 3", "exit-code = 4"));
    let seen = rig.softhca(&["run", "--on", "udp", &file]);
    assert_eq!(seen.code, Some(1), "{seen:?}");
    assert!(seen.text.contains("it ended with 3 and printed: 127.0.0."), "{seen:?}");
}

/// A file with two programs, `first` and `second`, on their hosts: what `command` has beside the host.
fn two_programs(first: &str, second: &str) -> String {
    format!(
        "title = \"x\"\n[hosts]\na = {{}}\nb = {{}}\n\
         [[workload]]\nname = \"first\"\ncommand = {{ host = \"a\", {first} }}\n\
         [[workload]]\nname = \"second\"\ncommand = {{ host = \"b\", {second} }}\n"
    )
}

fn a_run_of_programs_keeps_its_files_and_their_outputs() {
    let rig = Rig::new();
    // The second program waits for the text of the first, and the first for the file of the second.
    let (file, mark) = (rig.file("ready.toml"), rig.file("mark"));
    let text = two_programs(
        &format!(
            "argv = [\"sh\", \"-c\", \"echo is up; until test -e {mark}; do sleep 0.01; done\"], ready = \"is up\""
        ),
        &format!("argv = [\"sh\", \"-c\", \"echo hello; touch {mark}; exit 3\"]"),
    );
    std::fs::write(&file, text).expect("a file");
    let (out, junit) = (rig.file("out"), rig.file("junit.xml"));
    let seen = rig.softhca(&["run", "--on", "udp", "--out", &out, "--junit", &junit, &file]);
    assert_eq!(seen.code, Some(1), "{seen:?}");
    let junit = std::fs::read_to_string(junit).expect("the report");
    let outputs = "<system-out>first:&#10;is up&#10;&#10;second:&#10;hello&#10;&#10;</system-out></testcase>";
    assert!(junit.contains(outputs), "{junit}");
    let read = |name: &str| std::fs::read(format!("{out}/ready/seed-1/{name}")).unwrap_or_default();
    assert_eq!(
        (&*read("output-1-first.txt"), &*read("output-2-second.txt")),
        (&b"is up\n"[..], &b"hello\n"[..])
    );
    for name in ["events.jsonl", "capture.pcapng", "report.html", "result.json"] {
        assert!(!read(name).is_empty(), "{name}: {seen:?}");
    }
}

fn a_program_that_fails_or_takes_too_long_ends_the_run() {
    let rig = Rig::new();
    let endless = "argv = [\"sleep\", \"1000\"]";
    let failing = "argv = [\"sh\", \"-c\", \"exit 3\"]";
    let stopped = "program \"first\" on a ends with 0: it was stopped, because \"second\" had failed";
    for (first, second, lines) in [
        (endless.to_owned(), failing, [stopped, "program \"second\" on b ends with 0: it ended with 3"]),
        (
            format!("{endless}, timeout = \"100ms\""),
            endless,
            [
                "program \"first\" on a ends with 0: it did not end within 100 ms",
                "program \"second\" on b ends with 0: it was stopped, because \"first\" had failed",
            ],
        ),
        (
            format!("{endless}, ready = \"never\", timeout = \"100ms\""),
            endless,
            [
                "program \"first\" on a ends with 0: it did not end within 100 ms",
                "program \"second\" on b ends with 0: it did not start, because \"first\" had failed",
            ],
        ),
    ] {
        let file = rig.write("stopped.toml", &two_programs(&first, second));
        let seen = rig.softhca(&["run", "--on", "udp", &file]);
        assert_eq!(seen.code, Some(1), "{seen:?}");
        for line in lines {
            assert!(seen.text.contains(line), "{line:?} is not in {seen:?}");
        }
    }
}

fn a_program_waits_until_another_listens() {
    let rig = Rig::new();
    // Each client fails if it starts before its server, which takes its time.
    let server =
        "argv = [\"sh\", \"-c\", \"sleep 0.3; exec rping -s -a ${ADDRESS_a} -C 1\"], ready-listen = true";
    let client = "argv = [\"rping\", \"-c\", \"-a\", \"${ADDRESS_a}\", \"-C\", \"1\"]";
    let file = rig.write("listen.toml", &two_programs(server, client));
    let seen = rig.softhca(&["run", "--on", "udp", &file]);
    assert!(seen.success, "{seen:?}");
    let silent = "argv = [\"sh\", \"-c\", \"exec sleep 1000\"]";
    for (ready, missing) in [
        ("ready = \"up\"", "\"first\" had not printed \"up\""),
        ("ready-tcp = true", "\"first\" did not listen on TCP port "),
        ("ready-listen = true", "\"first\" did not listen for connections of the connection manager"),
    ] {
        let text = format!("duration = \"300ms\"\n{}", two_programs(&format!("{silent}, {ready}"), client));
        let seen = rig.softhca(&["run", "--on", "udp", &rig.write("silent.toml", &text)]);
        assert_eq!(seen.code, Some(1), "{seen:?}");
        let line = format!("it did not start within the time of the run: {missing}");
        assert!(seen.text.contains(&line), "{line:?} is not in {seen:?}");
    }
}

/// A file for a program on alice.
fn for_alice(rest: &str) -> String {
    format!("title = \"x\"\n[hosts]\nalice = {{}}\nbob = {{}}\n{rest}\n")
}

fn an_expected_failure_of_a_program_is_success() {
    let mut rig = Rig::new();
    let file = rig.write("three.toml", &for_alice("[[expect]]\nexit-code = 3"));
    for (program, code, line) in [
        ("exit 3", 0, "held   the program ends with 3: it ended with 3"),
        ("exit 0", 123, "the program ends with 3: it ended with 0"),
    ] {
        let seen = rig.exec(&["--scenario", &file, "--name", "three"], &["sh", "-c", program]);
        assert_eq!(seen.code, Some(code), "{seen:?}");
        assert!(seen.text.contains(line), "{seen:?}");
    }
    let killed = "[[fault]]\nhost = \"alice\"\naction = \"kill\"\n[[expect]]\nexit-code = 137";
    let file = rig.write("killed.toml", &for_alice(killed));
    let seen = rig.exec(&["--scenario", &file, "--name", "killed"], &["sleep", "1000"]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
}

/// The first run of the program waits for ever, after a call that the restart waits for.
fn a_program_starts_again() {
    let mut rig = Rig::new();
    let runs = rig.file("runs");
    let script = format!(
        "echo run >> {runs}; ibv_devinfo > {runs}.info; test $(wc -l < {runs}) -ge 2 || exec sleep 1000"
    );
    let faults = "[[fault]]\nname = \"query\"\nhost = \"alice\"\nverb = \"query_port\"\nnth = 1\naction = \"count\"\n\
        [[fault]]\nhost = \"alice\"\nafter = { fault = \"query\" }\naction = \"restart\"\n\
        [[expect]]\nexit-code = 0";
    let file = rig.write("restart.toml", &for_alice(faults));
    let seen = rig.exec(&["--scenario", &file, "--name", "restart"], &["sh", "-c", &script]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
    assert!(seen.text.contains("fault \"fault 2\" applied once"), "{seen:?}");
    assert_eq!(std::fs::read_to_string(&runs).expect("two runs").lines().count(), 2);
}

/// The program waits for an event that never comes; the kill waits for its second post.
fn a_process_is_killed_after_a_call() {
    let mut rig = Rig::new();
    let program = compile(&rig, "verb_faults");
    let faults = "[[fault]]\nname = \"second post\"\nhost = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = \"count\"\n\
        [[fault]]\nhost = \"alice\"\nafter = { fault = \"second post\" }\naction = \"kill\"\n\
        [[expect]]\nexit-code = 137";
    let file = rig.write("killed.toml", &for_alice(faults));
    let seen = rig.exec(&["--scenario", &file, "--name", "killed"], &[&program, "event"]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
    assert!(seen.text.contains("fault \"fault 2\" applied once"), "{seen:?}");
}

/// The program does not use the data path of the daemon, and its start takes an unknown time: the event is raised until
/// it is there.
fn an_event_at_a_time_reaches_a_program() {
    let mut rig = Rig::new();
    let program = compile(&rig, "verb_faults");
    let at = |n: u32| {
        let (at, action) = (100 * n, "{ raise-event = \"gid-change\" }");
        format!("[[fault]]\nhost = \"alice\"\nat = \"{at}ms\"\naction = {action}\noptional = true\n")
    };
    let faults: String = (0..200).map(at).collect();
    let file = rig.write("event.toml", &for_alice(&faults));
    let seen = rig.exec(&["--scenario", &file, "--name", "event"], &[&program, "event"]);
    assert!(seen.success && seen.text.contains("event 18"), "{seen:?}");
}

fn env_gives_the_faults_of_a_file_to_the_programs_of_a_shell() {
    let rig = Rig::new();
    let faults = "[[fault]]\nhost = \"alice\"\nverb = \"query_port\"\naction = { fail = \"EIO\" }\n\
        [[fault]]\non = \"alice -> bob\"\naction = \"drop\"\n[[expect]]\nexit-code = 0\n";
    let file =
        rig.write("faults.toml", &format!("title = \"t\"\n[hosts]\nalice = {{}}\nbob = {{}}\n{faults}"));
    let devinfo = |exports: &str| {
        let exports: Vec<&str> = exports.lines().filter(|line| line.starts_with("export ")).collect();
        let script = format!("{}\nibv_devinfo", exports.join("\n"));
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &script]).env("XDG_RUNTIME_DIR", rig.file(""));
        command.output().expect("a shell").status.success()
    };
    let started = rig.softhca(&["env", "--scenario", &file]);
    assert!(started.text.contains("the expectations are not checked"), "{started:?}");
    assert!(!devinfo(&started.text), "the fault hits the call");
    // The rules of a second file replace those of the first.
    let other = rig.write("none.toml", "title = \"t\"\n[hosts]\nalice = {}\nbob = {}\n");
    assert!(devinfo(&rig.softhca(&["env", "--scenario", &other]).text));
    let late = "[[fault]]\nname = \"late\"\nhost = \"alice\"\nat = \"1s\"\naction = \"kill\"\n";
    let late = rig.write("late.toml", &format!("title = \"t\"\n[hosts]\nalice = {{}}\nbob = {{}}\n{late}"));
    let refused = rig.softhca(&["env", "--scenario", &late]);
    assert!(!refused.success && refused.text.contains("fault \"late\" begins at a time"), "{refused:?}");
}

/// The program waits for DEVICE_FATAL; the daemon ends after its second post.
fn a_killed_daemon_is_a_device_that_is_gone() {
    let mut rig = Rig::new();
    let program = compile(&rig, "verb_faults");
    let faults = "[[fault]]\nname = \"second post\"\nhost = \"alice\"\nverb = \"post_send\"\nnth = 2\naction = \"count\"\n\
        [[fault]]\nhost = \"alice\"\nafter = { fault = \"second post\" }\naction = \"kill-daemon\"\n\
        [[expect]]\nexit-code = 0";
    let file = rig.write("killed.toml", &for_alice(faults));
    let seen = rig.exec(&["--scenario", &file, "--name", "killed"], &[&program, "event"]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
    assert!(
        seen.text.contains("event 8") && seen.text.contains("fault \"fault 2\" applied once"),
        "{seen:?}"
    );
}

fn the_rate_of_a_link_limits_a_program() {
    let mut rig = Rig::new();
    let link = "[[link]]\nbetween = [\"alice\", \"bob\"]\nrate = \"40mbit\"";
    let file = rig.write("slow.toml", &for_alice(link));
    let client = ["--host", "bob", "--scenario", &file];
    let options: [&[&str]; 2] = [&["--host", "alice"], &client];
    let (mut server, mut client) = rig.start_pair_with(options, &["ib_write_bw", "-n", "20", "-s", "65536"]);
    let seen = client.wait();
    assert!(seen.success && server.wait().success, "{seen:?}");
    let row = seen.text.lines().find(|line| line.trim_start().starts_with("65536 ")).expect("a row");
    let average: f64 = row.split_whitespace().nth(3).and_then(|word| word.parse().ok()).expect("a number");
    // 40 Mb/s are 4.77 MiB/s, headers included. A busy machine is slower, never faster.
    assert!(average > 0.0 && average < 4.8, "{row}");
}

fn delay_jitter_and_loss_of_a_link_apply_to_a_program() {
    // Each iteration has a packet in both directions. A busy machine is slower, never faster.
    for (setting, least_us) in
        [("delay = \"2ms\"", 4_000.0), ("jitter = \"4ms\"", 1_000.0), ("loss = 1.0", 0.0)]
    {
        let mut rig = Rig::new();
        let link = format!("[[link]]\nbetween = [\"alice\", \"bob\"]\n{setting}");
        let file = rig.write("link.toml", &for_alice(&link));
        let options: [&[&str]; 2] = [&["--host", "alice", "--scenario", &file], &["--host", "bob"]];
        let (mut server, mut client) =
            rig.start_pair_with(options, &["ibv_rc_pingpong", "-g", "0", "-n", "30"]);
        let seen = client.wait();
        if setting.starts_with("loss") {
            assert!(!seen.success && seen.text.contains("Failed status"), "{seen:?}");
            server.kill();
            continue;
        }
        assert!(seen.success && server.wait().success, "{seen:?}");
        let each = seen.text.split_whitespace().rev().skip_while(|word| *word != "usec/iter").nth(1);
        let each: f64 = each.and_then(|word| word.parse().ok()).expect("a time");
        assert!(each > least_us, "{setting}: {seen:?}");
    }
}
