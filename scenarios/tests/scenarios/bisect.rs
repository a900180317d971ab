//! From which moment on a failure was inevitable.

use softhca_scenarios::{Moment, ParameterValues, Plan, Scenario, bisect};

fn plan(faults: &str, seed: u64) -> Plan {
    let text = format!(
        r#"
        title = "Writes under faults"
        device = {{ recovery = "go-back-n" }}
        [hosts]
        alice = {{}}
        bob = {{}}
        [[pair]]
        qps = ["alice.1", "bob.1"]
        timeout = 8
        retry-count = 2
        [[workload]]
        name = "writes"
        stream = {{ qp = "alice.1", op = "write", bytes = 64, count = 200, interval = "10us" }}
        {faults}
        [[expect]]
        finish = {{ of = "writes" }}
        "#
    );
    Scenario::parse("bisect.toml", &text).unwrap().plan(&ParameterValues::new(), seed).unwrap()
}

#[test]
fn a_link_that_goes_down_for_good_is_fatal_when_it_goes_down() {
    let plan = plan("[[fault]]\nlink = \"alice - bob\"\naction = { link-down = {} }\nat = \"500us\"", 1);
    let found = bisect(&plan, 4, |_| {}).unwrap();
    // Healed at once, the link costs a retransmission. The last retry is what cannot be taken back.
    let inevitable = found.inevitable.unwrap();
    assert!(inevitable.at_ns > 500_001, "{found:?}");
    assert!(found.cause.as_ref().unwrap().contains("link"), "{found:?}");
    let before: Vec<&Moment> =
        found.moments.iter().filter(|moment| moment.at_ns < inevitable.at_ns).collect();
    assert!(before.iter().all(|moment| moment.failed < moment.continuations), "{found:?}");
}

#[test]
fn a_run_that_passes_has_nothing_to_bisect() {
    assert!(bisect(&plan("", 1), 4, |_| {}).is_none());
}

#[test]
fn chance_can_avoid_a_failure_until_its_last_draw() {
    let faults = "[[fault]]\non = \"alice -> bob\"\naction = \"drop\"\nprobability = 0.4\noptional = true";
    let failing = (1..100).map(|seed| plan(faults, seed)).find_map(|plan| bisect(&plan, 8, |_| {}));
    let found = failing.expect("one of a hundred seeds fails");
    let inevitable = found.inevitable.unwrap();
    assert!(inevitable.faults >= 3, "three losses in a row end the connection: {found:?}");
    assert!(inevitable.continuations == 9, "{found:?}");
    assert!(found.moments[0].failed < found.moments[0].continuations, "{found:?}");
}
