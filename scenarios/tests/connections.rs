//! Connections that steps make: every scenario about them holds with every value of its parameters, and what makes
//! no sense is refused at its place.

use softhca_scenarios::{ALL, Problem, Recording, Scenario, Verdict, simulate};
use std::fs;
use std::path::Path;

/// The scenarios of the library about connections, by name.
fn library() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("library");
    let entries = fs::read_dir(folder).expect("the library").map(|entry| entry.expect("an entry").path());
    let mut files: Vec<(String, String)> = entries
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?.to_owned();
            let text = fs::read_to_string(&path).ok()?;
            (name.starts_with("cm-") && name.ends_with(".toml")).then_some((name, text))
        })
        .collect();
    files.sort();
    files
}

#[test]
fn every_message_is_lost_late_and_doubled_with_the_outcome_that_its_scenario_tells() {
    let mut swept = Vec::new();
    for (name, text) in library() {
        let scenario = Scenario::read(&name, &text).unwrap_or_else(|problem| panic!("{problem}"));
        let names =
            ["fault", "message"].into_iter().filter(|name| text.contains(&format!("\n{name} = {{ default")));
        let set: Vec<(String, String)> = names.map(|name| (name.into(), ALL.into())).collect();
        let runs = scenario.sweep(&set).expect("the parameters have values");
        for values in &runs {
            let plan = scenario.plan(values, 1).unwrap_or_else(|problem| panic!("{problem}"));
            let outcome = simulate(&plan, Recording::Digest);
            let failures: Vec<String> =
                outcome.failures().map(|failure| format!("{}: {}", failure.text, failure.detail)).collect();
            assert_eq!(
                outcome.verdict,
                Verdict::Pass,
                "{name} {values:?}: {failures:#?} {:?}",
                outcome.error
            );
        }
        if runs.len() == 3 {
            swept.push(name);
        }
    }
    let messages = ["drep", "dreq", "mra", "rej", "rep", "req", "rtu", "sidr-rep", "sidr-req"];
    assert_eq!(swept, messages.map(|message| format!("cm-{message}.toml")));
}

const HEAD: &str = r#"title = "t"
ends = "10s"
[hosts]
alice = {}
bob = {}
[[pair]]
qps = ["alice.1", "bob.1"]
[[step]]
name = "request"
qp = "bob.1"
listen = { port = 7471 }
"#;

const CONNECT: &str = "[[step]]\nname = \"connected\"\nqp = \"alice.1\"\nconnect = { port = 7471 }\n";

fn read(rest: &str) -> Result<Scenario, Problem> {
    Scenario::read("s.toml", &format!("{HEAD}{rest}"))
}

#[track_caller]
fn refused(rest: &str, words: &[&str]) {
    let message = match read(rest) {
        Err(problem) => problem.to_string(),
        Ok(_) => panic!("this was accepted:\n{rest}"),
    };
    for word in words {
        assert!(message.contains(word), "{word:?} is not in:\n{message}");
    }
}

#[test]
fn steps_that_no_connection_manager_would_do_are_refused() {
    let step = |qp: &str, what: &str| format!("[[step]]\nqp = \"{qp}\"\n{what}\n");
    refused(&step("alice.1", "listen = { port = 7471 }"), &["both sides of the pair", "one side listens"]);
    refused(&step("bob.1", "connect = { port = 7471 }"), &["listens or connects in an earlier step"]);
    refused(&step("alice.1", "accept = {}"), &["no request comes to alice.1", "listen"]);
    refused(&step("alice.1", "connect = { port = 0 }"), &["port 0"]);
    let long = "x".repeat(57);
    refused(
        &step("alice.1", &format!("connect = {{ port = 7471, private-data = \"{long}\" }}")),
        &["57 bytes of private data, at most 56"],
    );
    refused(&step("bob.1", "repeat = 2\ndisconnect = true"), &["connected once"]);
    refused(
        &step("alice.1", "conect = { port = 7471 }"),
        &["unknown field `conect`", "did you mean `connect`"],
    );
    refused(
        &format!(
            "{CONNECT}[[workload]]\nstream = {{ qp = \"alice.1\", op = \"send\", bytes = 1, count = 1 }}\n"
        ),
        &["not connected when the run begins"],
    );
    refused("[device]\ncm = { retries = 16 }\n", &["retries is 16, at most 15"]);
}

#[test]
fn pairs_that_no_step_connects_have_no_connection_manager() {
    let plain = HEAD.replace("listen = { port = 7471 }", "receive = { bytes = 8 }");
    let problem = |rest: &str| Scenario::read("s.toml", &format!("{plain}{rest}")).unwrap_err().to_string();
    let message = problem("[[step]]\nqp = \"alice.1\"\ndisconnect = true\n");
    assert!(message.contains("connected before the run begins"), "{message}");
    let message = problem("[[expect]]\nconnection = { qp = \"alice.1\", event = \"established\" }\n");
    assert!(message.contains("nothing is heard of its connection"), "{message}");
    let message = problem("[[fault]]\non = \"alice -> bob\"\nmatch = { cm = \"req\" }\naction = \"drop\"\n");
    assert!(message.contains("this rule can never fire: no connection that a step makes"), "{message}");
}

#[test]
fn messages_that_nobody_sends_this_way_are_refused() {
    let fault = |on: &str, matching: &str| {
        format!("{CONNECT}[[fault]]\non = \"{on}\"\nmatch = {{ {matching} }}\naction = \"drop\"\n")
    };
    let never = "this rule can never fire: no connection that a step makes has such a message this way";
    refused(&fault("bob -> alice", "cm = \"req\""), &[never]);
    refused(&fault("alice -> bob", "cm = \"rep\""), &[never]);
    refused(&fault("alice -> bob", "cm = \"sidr-req\""), &[never, "transport"]);
    refused(&fault("alice -> bob", "cm = \"req\", qp = \"alice.1\""), &["QP1"]);
    refused(&fault("alice -> bob", "cm = \"reqq\""), &["unknown variant `reqq`", "did you mean `req`"]);
    assert!(read(&fault("alice -> bob", "cm = \"req\"")).is_ok());
}

#[test]
fn an_expectation_that_does_not_hold_tells_what_was_heard() {
    let text = format!("{CONNECT}[[step]]\nafter = \"request\"\nqp = \"bob.1\"\nreject = {{ reason = 3 }}\n");
    let expected = "[[expect]]\nconnection = { qp = \"alice.1\", event = \"established\" }\n";
    let scenario = read(&format!("{text}{expected}")).unwrap_or_else(|problem| panic!("{problem}"));
    let outcome = simulate(&scenario.plan(&Default::default(), 1).unwrap(), Recording::Digest);
    assert_eq!(outcome.verdict, Verdict::Fail);
    let failure = outcome.failures().next().unwrap();
    assert_eq!(failure.text, "alice.1 hears ESTABLISHED, at least once");
    assert!(failure.detail.contains("REJECTED 3"), "{}", failure.detail);
}

#[test]
fn an_event_that_is_misspelt_is_refused_with_the_nearest() {
    refused(
        &format!("{CONNECT}[[expect]]\nconnection = {{ host = \"bob\", event = \"establishd\" }}\n"),
        &["unknown variant `establishd`", "did you mean `established`"],
    );
}
