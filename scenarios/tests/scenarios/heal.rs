//! `[heal]`: all faults end, and the run must converge.

use softhca_scenarios::{Outcome, ParameterValues, Recording, Scenario, Verdict, simulate};

fn run(link: &str, fault: &str, end: &str) -> Outcome {
    let text = format!(
        r#"
        title = "Messages under a fault that lasts"
        {end}
        [device]
        recovery = "go-back-n"
        [hosts]
        alice = {{}}
        bob = {{}}
        [[link]]
        between = ["alice", "bob"]
        rate = "10gbit"
        {link}
        [[pair]]
        qps = ["alice.1", "bob.1"]
        timeout = 8
        retry-count = 7
        rnr-retry = 7
        [[workload]]
        name = "messages"
        stream = {{ qp = "alice.1", op = "send", bytes = 1000, count = 100, depth = 4, interval = "20us" }}
        {fault}
        [[expect]]
        finish = {{ of = "messages" }}
        "#
    );
    let scenario = Scenario::parse("heal.toml", &text).unwrap_or_else(|problem| panic!("{problem}\n{text}"));
    simulate(&scenario.plan(&ParameterValues::new(), 1).unwrap(), Recording::Digest)
}

#[test]
fn every_fault_that_lasts_ends_with_the_heal() {
    let fault = |text: &str| format!("[[fault]]\n{text}");
    for (link, fault) in [
        ("", fault("on = \"alice -> bob\"\naction = \"drop\"")),
        ("", fault("on = \"bob -> alice\"\naction = \"drop\"\nprobability = 0.9")),
        ("loss = 1.0", String::new()),
        ("", fault("link = \"alice - bob\"\nat = \"10us\"\naction = { link-down = {} }")),
        (
            "",
            fault(
                "link = \"alice - bob\"\naction = { flap = { down = \"10ms\", up = \"1us\", times = 50 } }",
            ),
        ),
        ("", fault("link = \"alice - bob\"\nat = \"10us\"\naction = { set-mtu = 300 }")),
        ("", fault("host = \"bob\"\nat = \"10us\"\naction = { withhold-receives = \"10min\" }")),
        ("", fault("host = \"bob\"\nat = \"10us\"\naction = { raise-event = \"port-err\" }")),
        (
            "",
            fault(
                "host = \"bob\"\nat = \"10us\"\naction = { pause-storm = { for = \"10min\", priority = 0 } }",
            ),
        ),
    ] {
        let sick = run(link, &fault, "duration = \"8ms\"");
        assert_eq!(sick.verdict, Verdict::Fail, "{link}{fault}");
        let healed = run(link, &fault, "heal = { at = \"1ms\", deadline = \"200ms\" }");
        let failures: Vec<_> = healed.failures().map(|failure| (&failure.text, &failure.detail)).collect();
        assert_eq!(healed.verdict, Verdict::Pass, "{link}{fault}: {failures:?}");
    }
}

#[test]
fn no_fault_begins_after_the_heal() {
    let fault =
        "[[fault]]\nlink = \"alice - bob\"\nat = \"1500us\"\noptional = true\naction = { link-down = {} }";
    let healed = run("", fault, "heal = { at = \"1ms\" }");
    assert_eq!((healed.verdict, healed.rules[0].fired), (Verdict::Pass, 0));
}

/// The run stops at the deadline, and the expectation says what is left.
#[test]
fn a_heal_that_comes_too_late_fails() {
    let fault = "[[fault]]\non = \"alice -> bob\"\naction = \"drop\"";
    let late = run("", fault, "heal = { at = \"100ms\", deadline = \"10ms\" }");
    // All retries are used, so the connection is in ERR and nothing waits: only `finish` fails.
    let failed: Vec<&str> = late.failures().map(|failure| failure.text.as_str()).collect();
    assert!(failed.len() == 1 && failed[0].contains("messages"), "{failed:?}");
    let early = run("", fault, "heal = { at = \"1ms\", deadline = \"10us\" }");
    let detail: Vec<&str> = early.failures().map(|failure| failure.detail.as_str()).collect();
    let waits = "alice.1 waits for a response of bob.1 to PSN +0, until ";
    assert!(detail.iter().any(|detail| detail.contains(waits)), "{detail:?}");
    assert!(early.ended_ns <= 1_010_000, "{}", early.ended_ns);
}
