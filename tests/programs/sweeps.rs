//! Sweeps of programs: groups of points, core files, interruption, several programs, and reports for CI.

use crate::exec::{compile, compiler};
use crate::rig::{Rig, softhca};
use libtest_mimic::Trial;
use softhca_tests::needs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Seconds after which a program hangs: longer than one waits for a processor of a busy machine.
const IDLE: &str = "5";

/// The tests of this file.
pub fn trials() -> Vec<Trial> {
    vec![
        needs!(compiler(), equivalent_calls_are_grouped_by_call_site_and_state),
        needs!(compiler(), a_limit_takes_one_point_of_each_group_first),
        needs!(compiler(), a_bad_run_names_its_core_file),
        needs!(compiler(), an_interrupted_sweep_continues),
        needs!(compiler(), the_faults_of_several_programs_are_shrunk),
        needs!(compiler(), a_link_goes_down_and_up),
        needs!(compiler(), seeds_repeat_each_fault_and_reports_name_each_run),
        needs!(compiler(), wrong_arguments_of_a_sweep_are_errors),
        needs!(compiler(), a_program_with_a_scenario_has_reports_and_distinct_exit_codes),
    ]
}

/// Runs `softhca` in the folder of the test. Returns its exit code, standard output and standard error.
fn run(rig: &Rig, words: &[&str]) -> (Option<i32>, String, String) {
    let output =
        Command::new(softhca()).args(words).current_dir(rig.file("")).output().expect("softhca runs");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// The last object of `--json`.
fn totals(text: &str) -> serde_json::Value {
    let last = text.lines().last().expect("totals");
    serde_json::from_str(last).expect(last)
}

/// The name and the numbers of points of each group: found and run.
fn groups(text: &str) -> Vec<(String, u64, u64)> {
    let groups = totals(text)["groups"].as_array().cloned().expect("groups");
    let number = |group: &serde_json::Value, key: &str| group[key].as_u64().expect("a number");
    let of = |group: &serde_json::Value| {
        let name = group["group"].as_str().expect("a name").to_owned();
        (name, number(group, "points_found"), number(group, "points_run"))
    };
    groups.iter().map(of).collect()
}

fn equivalent_calls_are_grouped_by_call_site_and_state() {
    let rig = Rig::new();
    let program = compile(&rig, "verb_faults");
    let point = "verb_faults:alloc_pd:0:1:ENOMEM";
    let once = || run(&rig, &["sweep", "--json", "--only", point, "--", &program]).1;
    let found = groups(&once());
    // The program connects two queue pairs in one function, with one call for each state.
    for state in ["RESET", "INIT", "RTR"] {
        let of_state = |(name, ..): &&(String, u64, u64)| {
            name.starts_with("verb_faults: modify_qp at verb_faults+0x")
                && name.ends_with(&format!(" in {state}"))
        };
        let counts: Vec<u64> = found.iter().filter(of_state).map(|(_, count, _)| *count).collect();
        assert_eq!(counts, [2], "{state}: {found:#?}");
    }
    // One of the calls of this verb ran, and nothing else.
    let ran: Vec<_> = found.iter().filter(|(_, _, ran)| *ran > 0).collect();
    assert!(matches!(ran[..], [(name, _, 1)] if name.starts_with("verb_faults: alloc_pd at ")), "{found:#?}");
    // Addresses are random, and the groups are the same.
    assert_eq!(found, groups(&once()));
}

fn a_limit_takes_one_point_of_each_group_first() {
    let rig = Rig::new();
    let program = compile(&rig, "fragile");
    let (code, text, _) = run(&rig, &["sweep", "--json", "--limit", "8", "--idle", IDLE, "--", &program]);
    assert_eq!(code, Some(1), "{text}");
    let found = groups(&text);
    assert_eq!(found.len(), 8, "{found:#?}");
    assert!(found.iter().all(|(_, _, ran)| *ran == 1), "{found:#?}");
    assert_eq!(totals(&text)["runs"], 8, "{text}");
    let (_, text, _) = run(&rig, &["sweep", "--limit", "8", "--idle", IDLE, "--", &program]);
    assert!(text.contains("14 points in 8 groups, 8 of them run"), "{text}");
    assert!(text.contains("fragile: reg_mr at fragile+0x") && text.contains(": 1 of 4 run"), "{text}");
}

fn a_bad_run_names_its_core_file() {
    let rig = Rig::new();
    let program = compile(&rig, "fragile");
    let (crash, hang) = ("fragile:alloc_pd:0:1:ENOMEM", "fragile:query_device:0:1:EIO");
    let words = ["sweep", "--only", crash, "--only", hang, "--idle", IDLE, "--jobs", "1", "--out", "kept"];
    let (code, text, errors) = run(&rig, &[&words[..], &["--junit", "report.xml", "--", &program]].concat());
    assert_eq!(code, Some(1), "{text}{errors}");
    assert!(text.contains(&format!("crash at {crash}: fragile ended with signal 11")), "{text}");
    let file = |point: &str, name: &str| rig.file(&format!("kept/{}/{name}", point.replace(':', "-")));
    let read = |path: &str| std::fs::read_to_string(path).expect(path);
    let junit = read(&rig.file("report.xml"));
    let pattern = read("/proc/sys/kernel/core_pattern");
    let limits = read("/proc/self/limits");
    let limit = limits.lines().find(|line| line.starts_with("Max core file size")).expect("a limit");
    let hard_limit = limit.split_whitespace().nth(5).expect("soft and hard limit");
    for point in [crash, hang] {
        let outcome = read(&file(point, "outcome.txt"));
        assert!(outcome.contains(&format!("replay: softhca sweep --only {point} -- ")), "{outcome}");
        let expected = match (pattern.strip_prefix('|'), hard_limit) {
            // A program that hangs is killed: the test does not report it.
            (Some(_), _) | (None, "0") if point == hang => continue,
            (Some(handler), _) => format!(" to {} ", handler.split_whitespace().next().expect("a program")),
            (None, "0") => "fragile: no core file: the hard limit of core files is 0".into(),
            (None, _) => {
                let core = file(point, "fragile.core");
                let start = std::fs::read(&core).expect(&core);
                assert!(start.starts_with(b"\x7fELF"), "{core} is no core file");
                format!("fragile: core file kept/{}/fragile.core", point.replace(':', "-"))
            }
        };
        assert!(outcome.contains(&expected), "{expected:?} is not in {outcome}");
        assert!(text.contains(&expected), "{expected:?} is not in {text}");
        assert!(junit.contains(&expected), "{expected:?} is not in {junit}");
    }
    if pattern.starts_with('|') || hard_limit == "0" {
        return;
    }
    // Two programs hang, and their core files may have the same name: the client waits for the output of the server.
    let of_host = |name: &str, host: &str, script: &str| {
        format!(
            "[[program]]\nname = \"{name}\"\nhost = \"{host}\"\ncommand = [\"sh\", \"-c\", \"{script}\"]\n"
        )
    };
    let server = of_host("server", "alice", &format!("exec {program} > output"));
    let client = of_host("client", "bob", "until [ -s output ]; do :; done; rm output");
    rig.write("programs.toml", &[server, client].concat());
    let hang = "server:query_device:0:1:EIO";
    let (_, text, errors) =
        run(&rig, &["sweep", "--only", hang, "--idle", IDLE, "--out", "both", "programs.toml"]);
    for name in ["server", "client"] {
        let core = format!("both/{}/{name}.core", hang.replace(':', "-"));
        assert!(text.contains(&format!("{name}: core file {core}")), "{text}{errors}");
        let start = std::fs::read(rig.file(&core)).expect(&core);
        assert!(start.starts_with(b"\x7fELF"), "{core} is no core file");
    }
}

/// Waits until a condition holds while a process runs.
fn await_condition(child: &mut Child, what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(child.try_wait().expect("it is ours").is_none(), "it ended before {what}");
        assert!(Instant::now() < until, "not within two minutes: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn an_interrupted_sweep_continues() {
    let rig = Rig::new();
    let program = compile(&rig, "fragile");
    let results = || std::fs::read_to_string(rig.file("kept/results.jsonl")).unwrap_or_default();
    // The second run hangs for longer than the test.
    let points =
        ["fragile:open_device:0:1:ENODEV", "fragile:query_device:0:1:EIO", "fragile:reg_mr:0:2:ENOMEM"];
    let only = points.map(|point| ["--only", point]).concat();
    let limits = |seconds| ["--idle", seconds, "--timeout", "600", "--jobs", "1", "--out", "kept"];
    let words = [&["sweep"][..], &only, &limits("600"), &["--", &program]].concat();
    let mut command = Command::new(softhca());
    command.args(&words).current_dir(rig.file("")).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut sweep = command.spawn().expect("softhca runs");
    await_condition(&mut sweep, "the first result", || results().lines().count() == 1);
    let interrupt = Command::new("kill").args(["-INT", &sweep.id().to_string()]).status().expect("kill runs");
    assert!(interrupt.success());
    let output = sweep.wait_with_output().expect("it ends");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{errors}");
    assert!(
        errors.contains("interrupted: 1 runs have results; continue with --resume --out kept"),
        "{errors}"
    );
    // The program that hung is gone.
    let processes = Command::new("pgrep").args(["-f", &program]).output().expect("pgrep runs");
    assert!(processes.stdout.is_empty(), "{processes:?}");
    // A result that was cut is none.
    std::fs::write(rig.file("kept/results.jsonl"), results() + "{\"point\":\"fra").expect("our file");
    let words = [&["sweep", "--resume"][..], &only, &limits(IDLE), &["--", &program]].concat();
    let (code, text, errors) = run(&rig, &words);
    assert_eq!(code, Some(1), "{text}{errors}");
    let text = results();
    assert_eq!(text.lines().count(), 4, "{text}");
    for (point, outcome) in points.iter().zip(["clean-error", "hang", "right"]) {
        let has = |line: &str| line.contains(point) && line.contains(&format!("\"outcome\":\"{outcome}\""));
        assert!(text.lines().any(has), "{point}: {outcome} is not in {text}");
    }
}

fn the_faults_of_several_programs_are_shrunk() {
    let rig = Rig::new();
    let program = compile(&rig, "fragile");
    let of_host = |name: &str, host: &str| {
        format!("[[program]]\nname = \"{name}\"\nhost = \"{host}\"\ncommand = [\"{program}\"]\n")
    };
    rig.write("programs.toml", &[of_host("server", "alice"), of_host("client", "bob")].concat());
    let fault = |host: &str, verb: &str, rest: &str| {
        format!("[[fault]]\nhost = \"{host}\"\nverb = \"{verb}\"\naction = {{ fail = \"ENOMEM\" }}\n{rest}\n")
    };
    let regions = fault("alice", "reg_mr", "times = 3");
    let domain = fault("bob", "alloc_pd", "");
    let hosts = "title = \"t\"\n[hosts]\nalice = {}\nbob = {}\n";
    rig.write("faults.toml", &[hosts, &regions, &domain].concat());
    let shrink =
        |file: &str| run(&rig, &["shrink", "--sweep", "-o", "minimal.toml", file, "--", "programs.toml"]);
    let (code, text, errors) = shrink("faults.toml");
    assert_eq!(code, Some(0), "{text}{errors}");
    // The three calls that fail on alice are faults of their own.
    assert!(text.contains("1 of 4 faults suffice") && text.contains("[[fault]]\n"), "{text}");
    assert!(text.contains("result: crash: client ended with signal 11"), "{text}");
    let minimal = std::fs::read_to_string(rig.file("minimal.toml")).expect("a file");
    assert!(minimal.contains("alloc_pd") && !minimal.contains("reg_mr"), "{minimal}");
    // The file of a sweep of several programs is one that shrink takes.
    let (_, text, _) =
        run(&rig, &["sweep", "--only", "server:alloc_pd:0:1:ENOMEM", "--out", "kept", "programs.toml"]);
    assert!(text.contains("crash at server:alloc_pd:0:1:ENOMEM"), "{text}");
    let (code, text, errors) = shrink("kept/server-alloc_pd-0-1-ENOMEM/fault.toml");
    assert_eq!(code, Some(0), "{text}{errors}");
    assert!(text.contains("1 of 1 faults suffice") && text.contains("crash: server ended"), "{text}");
    rig.write("fine.toml", &[hosts, &regions].concat());
    let (code, text, _) = shrink("fine.toml");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("programs.toml does not fail with fine.toml: nothing to shrink"), "{text}");
    for (text, part) in [
        (
            format!("{hosts}carol = {{}}\n{domain}"),
            "the scenario has the host carol; the programs run on alice, bob",
        ),
        (
            format!("{hosts}[[fault]]\nhost = \"bob\"\nat = \"1ms\"\naction = \"restart\"\n"),
            "restarts neither",
        ),
    ] {
        rig.write("bad.toml", &text);
        let (code, text, errors) = shrink("bad.toml");
        assert!(code == Some(2) && errors.contains(part), "{part:?} is not in {text}{errors}");
    }
}

fn a_link_goes_down_and_up() {
    let rig = Rig::new();
    let program = compile(&rig, "verb_faults");
    let point = "verb_faults:post_send:1:1:link-flap";
    let (_, list, _) = run(&rig, &["sweep", "--events", "--list", "--", &program]);
    assert!(list.lines().any(|line| line == point), "{list}");
    // The link is down for some time, so that the sends fail; at the end it is up. After PORT_ERR it stays down.
    for (point, line) in [(point, "port active"), ("verb_faults:post_send:1:1:PORT_ERR", "port down")] {
        let words = ["sweep", "--only", point, "--json", "--out", "kept", "--", &program];
        let (code, text, errors) = run(&rig, &words);
        assert!(code == Some(1) && text.contains("\"reached\":true"), "{text}{errors}");
        let output = rig.file(&format!("kept/{}/verb_faults.stdout", point.replace(':', "-")));
        let output = std::fs::read_to_string(&output).expect(&output);
        assert!(output.lines().any(|seen| seen == line), "{point}: {output}");
    }
}

fn seeds_repeat_each_fault_and_reports_name_each_run() {
    let rig = Rig::new();
    let program = compile(&rig, "fragile");
    let point = "fragile:alloc_pd:0:1:ENOMEM";
    let words =
        ["sweep", "--only", point, "--seeds", "3..5", "--junit", "report.xml", "--json", "--out", "kept"];
    let (code, text, errors) = run(&rig, &[&words[..], &["--", &program]].concat());
    assert_eq!(code, Some(1), "{text}{errors}");
    let junit = std::fs::read_to_string(rig.file("report.xml")).expect("a report");
    assert!(junit.contains("tests=\"3\" failures=\"3\""), "{junit}");
    for seed in 3..=5 {
        assert!(junit.contains(&format!("{point} (seed {seed})")), "{junit}");
        assert!(text.contains(&format!("--only {point} --seeds {seed}..{seed} -- ")), "{text}");
        let kept = rig.file(&format!("kept/fragile-alloc_pd-0-1-ENOMEM-seed-{seed}/outcome.txt"));
        assert!(std::fs::metadata(&kept).is_ok(), "{kept}");
    }
    assert_eq!(totals(&text)["totals"]["crash"], 3, "{text}");
}

fn wrong_arguments_of_a_sweep_are_errors() {
    let rig = Rig::new();
    let program = compile(&rig, "fragile");
    for (words, part) in [
        (&["--limit", "0"][..], "\"0\" is not a number of faults"),
        (&["--limit", "2", "--only", "fragile:alloc_pd:0:1:ENOMEM"], "cannot be used with"),
        (&["--timeout=-1"], "\"-1\" is not a number of seconds"),
        (&["--idle", "0"], "\"0\" is not a number of seconds"),
        (&["--seeds", "4"], "expected A..B"),
        (&["--shard", "5/4"], "K counts from 1"),
        (&["--only", "fragile:alloc_pd"], "not PROGRAM:VERB:OBJECT:NTH:FAULT"),
        (&["--resume"], "--out"),
    ] {
        let (code, text, errors) = run(&rig, &[&["sweep"][..], words, &["--", &program]].concat());
        assert!(code == Some(2) && errors.contains(part), "{words:?}: {text}{errors}");
    }
    for (program, part) in [("false", "the run without faults fails: false"), ("true", "calls no verb")] {
        let (code, _, errors) = run(&rig, &["sweep", "--", program]);
        assert!(code == Some(2) && errors.contains(part), "{errors}");
    }
}

fn a_program_with_a_scenario_has_reports_and_distinct_exit_codes() {
    let rig = Rig::new();
    let program = compile(&rig, "fragile");
    let fault = "title = \"regions\"\n[hosts]\nalice = {}\n[[fault]]\nname = \"full\"\nhost = \"alice\"\n\
        verb = \"reg_mr\"\naction = { fail = \"ENOMEM\" }\n";
    let expectation = |code| format!("{fault}[[expect]]\nexit-code = {code}\n");
    let exec = |text: &str| {
        rig.write("fault.toml", text);
        let options = ["--name", "reports", "--scenario", "fault.toml", "--junit", "report.xml", "--json"];
        run(&rig, &[&["exec"][..], &options, &["--", &program]].concat())
    };
    for (text, code, failures) in [
        (fault.to_owned(), 1, 0),
        (expectation(1), 0, 0),
        (expectation(0), 123, 1),
        ("nothing".into(), 125, 0),
    ] {
        let _ = std::fs::remove_file(rig.file("report.xml"));
        let (seen, text, errors) = exec(&text);
        assert_eq!(seen, Some(code), "{text}{errors}");
        let junit = std::fs::read_to_string(rig.file("report.xml"));
        if code == 125 {
            assert!(junit.is_err() && errors.contains("fault.toml"), "{errors}");
            continue;
        }
        let junit = junit.expect("a report");
        assert!(junit.contains(&format!("tests=\"1\" failures=\"{failures}\"")), "{junit}");
        let verdict = totals(&text);
        assert_eq!(verdict["verdict"], if failures == 0 { "pass" } else { "fail" }, "{text}");
        assert_eq!(verdict["rules"][0]["fired"], 4, "{text}");
    }
}
