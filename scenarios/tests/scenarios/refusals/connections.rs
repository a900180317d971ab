//! Connections that no connection manager would make, or whose events no program could receive.

use super::read;
use softhca_scenarios::{Recording, Verdict, simulate};

/// A pair that waits for a request.
const LISTEN: &str = r#"[[pair]]
qps = ["alice.2", "bob.2"]
[[step]]
name = "request"
qp = "bob.2"
listen = { port = 7471 }
"#;

const CONNECT: &str = "[[step]]\nname = \"connected\"\nqp = \"alice.2\"\nconnect = { port = 7471 }\n";

#[track_caller]
fn rejected(rest: &str, words: &[&str]) {
    super::rejected(&format!("{LISTEN}{rest}"), words);
}

#[test]
fn steps_that_no_connection_manager_would_do_are_rejected() {
    let step = |qp: &str, what: &str| format!("[[step]]\nqp = \"{qp}\"\n{what}\n");
    rejected(
        &step("alice.2", "listen = { port = 7471 }"),
        &["both sides of the pair", "one side must listen"],
    );
    rejected(&step("bob.2", "connect = { port = 7471 }"), &["listens or connects in an earlier step"]);
    rejected(&step("alice.2", "accept = {}"), &["alice.2 receives no request", "listen"]);
    rejected(&step("alice.2", "connect = { port = 0 }"), &["port 0"]);
    let long = "x".repeat(57);
    rejected(
        &step("alice.2", &format!("connect = {{ port = 7471, private-data = \"{long}\" }}")),
        &["57 bytes of private data, the maximum is 56"],
    );
    rejected(&step("bob.2", "repeat = 2\ndisconnect = true"), &["connects only once"]);
    rejected(
        &step("alice.2", "conect = { port = 7471 }"),
        &["unknown field `conect`", "did you mean `connect`"],
    );
    rejected(
        &format!(
            "{CONNECT}[[workload]]\nstream = {{ qp = \"alice.2\", op = \"send\", bytes = 1, count = 1 }}\n"
        ),
        &["not connected at the start of the run"],
    );
    rejected("[device]\ncm = { max-retries = 16 }\n", &["max-retries is 16, the maximum is 15"]);
}

#[test]
fn pairs_that_no_step_connects_have_no_connection_manager() {
    let plain = super::rejected;
    plain("[[step]]\nqp = \"alice.1\"\ndisconnect = true\n", &["connected before the run starts"]);
    plain(
        "[[expect]]\nconnection = { qp = \"alice.1\", event = \"established\" }\n",
        &["has no connection events"],
    );
    plain(
        "[[fault]]\non = \"alice -> bob\"\nmatch = { cm = \"req\" }\naction = \"drop\"\n",
        &["this rule can never fire: no step causes this message"],
    );
}

#[test]
fn messages_that_neither_side_sends_this_way_are_rejected() {
    let fault = |on: &str, matching: &str| {
        format!("{CONNECT}[[fault]]\non = \"{on}\"\nmatch = {{ {matching} }}\naction = \"drop\"\n")
    };
    let never = "this rule can never fire: no step causes this message in this direction";
    rejected(&fault("bob -> alice", "cm = \"req\""), &[never]);
    rejected(&fault("alice -> bob", "cm = \"rep\""), &[never]);
    rejected(&fault("alice -> bob", "cm = \"sidr-req\""), &[never, "transport"]);
    rejected(&fault("alice -> bob", "cm = \"req\", qp = \"alice.2\""), &["QP1"]);
    rejected(&fault("alice -> bob", "cm = \"reqq\""), &["unknown variant `reqq`", "did you mean `req`"]);
    assert!(read(&format!("{LISTEN}{}", fault("alice -> bob", "cm = \"req\""))).is_ok());
}

#[test]
fn an_expectation_that_does_not_hold_tells_what_was_received() {
    let text = format!("{CONNECT}[[step]]\nafter = \"request\"\nqp = \"bob.2\"\nreject = {{ reason = 3 }}\n");
    let expected = "[[expect]]\nconnection = { qp = \"alice.2\", event = \"established\" }\n";
    let scenario = read(&format!("{LISTEN}{text}{expected}")).unwrap_or_else(|problem| panic!("{problem}"));
    let outcome = simulate(&scenario.plan(&Default::default(), 1).unwrap(), Recording::Digest);
    assert_eq!(outcome.verdict, Verdict::Fail);
    let failure = outcome.failures().next().unwrap();
    assert_eq!(failure.text, "alice.2 receives ESTABLISHED, at least once");
    assert!(failure.detail.contains("REJECTED 3"), "{}", failure.detail);
}

#[test]
fn an_event_that_is_misspelt_is_rejected_with_the_nearest() {
    rejected(
        &format!("{CONNECT}[[expect]]\nconnection = {{ host = \"bob\", event = \"establishd\" }}\n"),
        &["unknown variant `establishd`", "did you mean `established`"],
    );
}
