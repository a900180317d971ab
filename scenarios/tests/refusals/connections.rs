//! Connections that no connection manager would make, or that nobody could hear of.

use crate::read;
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
fn refused(rest: &str, words: &[&str]) {
    crate::refused(&format!("{LISTEN}{rest}"), words);
}

#[test]
fn steps_that_no_connection_manager_would_do_are_refused() {
    let step = |qp: &str, what: &str| format!("[[step]]\nqp = \"{qp}\"\n{what}\n");
    refused(
        &step("alice.2", "listen = { port = 7471 }"),
        &["both sides of the pair", "one side must listen"],
    );
    refused(&step("bob.2", "connect = { port = 7471 }"), &["listens or connects in an earlier step"]);
    refused(&step("alice.2", "accept = {}"), &["alice.2 receives no request", "listen"]);
    refused(&step("alice.2", "connect = { port = 0 }"), &["port 0"]);
    let long = "x".repeat(57);
    refused(
        &step("alice.2", &format!("connect = {{ port = 7471, private-data = \"{long}\" }}")),
        &["57 bytes of private data, at most 56"],
    );
    refused(&step("bob.2", "repeat = 2\ndisconnect = true"), &["connects only once"]);
    refused(
        &step("alice.2", "conect = { port = 7471 }"),
        &["unknown field `conect`", "did you mean `connect`"],
    );
    refused(
        &format!(
            "{CONNECT}[[workload]]\nstream = {{ qp = \"alice.2\", op = \"send\", bytes = 1, count = 1 }}\n"
        ),
        &["not connected at the start of the run"],
    );
    refused("[device]\ncm = { max-retries = 16 }\n", &["max-retries is 16, the maximum is 15"]);
}

#[test]
fn pairs_that_no_step_connects_have_no_connection_manager() {
    let plain = crate::refused;
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
fn messages_that_nobody_sends_this_way_are_refused() {
    let fault = |on: &str, matching: &str| {
        format!("{CONNECT}[[fault]]\non = \"{on}\"\nmatch = {{ {matching} }}\naction = \"drop\"\n")
    };
    let never = "this rule can never fire: no step causes this message in this direction";
    refused(&fault("bob -> alice", "cm = \"req\""), &[never]);
    refused(&fault("alice -> bob", "cm = \"rep\""), &[never]);
    refused(&fault("alice -> bob", "cm = \"sidr-req\""), &[never, "transport"]);
    refused(&fault("alice -> bob", "cm = \"req\", qp = \"alice.2\""), &["QP1"]);
    refused(&fault("alice -> bob", "cm = \"reqq\""), &["unknown variant `reqq`", "did you mean `req`"]);
    assert!(read(&format!("{LISTEN}{}", fault("alice -> bob", "cm = \"req\""))).is_ok());
}

#[test]
fn an_expectation_that_does_not_hold_tells_what_was_heard() {
    let text = format!("{CONNECT}[[step]]\nafter = \"request\"\nqp = \"bob.2\"\nreject = {{ reason = 3 }}\n");
    let expected = "[[expect]]\nconnection = { qp = \"alice.2\", event = \"established\" }\n";
    let scenario = read(&format!("{LISTEN}{text}{expected}")).unwrap_or_else(|problem| panic!("{problem}"));
    let outcome = simulate(&scenario.plan(&Default::default(), 1).unwrap(), Recording::Digest);
    assert_eq!(outcome.verdict, Verdict::Fail);
    let failure = outcome.failures().next().unwrap();
    assert_eq!(failure.text, "alice.2 hears ESTABLISHED, at least once");
    assert!(failure.detail.contains("REJECTED 3"), "{}", failure.detail);
}

#[test]
fn an_event_that_is_misspelt_is_refused_with_the_nearest() {
    refused(
        &format!("{CONNECT}[[expect]]\nconnection = {{ host = \"bob\", event = \"establishd\" }}\n"),
        &["unknown variant `establishd`", "did you mean `established`"],
    );
}
