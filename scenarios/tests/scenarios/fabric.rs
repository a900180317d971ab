//! Switches, pauses and congestion control in a scenario do what the same settings do in a world.

use softhca_scenarios::{Outcome, ParameterValues, Recording, Scenario, Verdict, simulate};

fn run(text: &str) -> Outcome {
    let scenario = Scenario::parse("s.toml", text).unwrap_or_else(|problem| panic!("{problem}"));
    simulate(&scenario.plan(&ParameterValues::new(), 1).expect("a plan"), Recording::Everything)
}

#[track_caller]
fn passes(text: &str) -> Outcome {
    let outcome = run(text);
    let failures: Vec<String> =
        outcome.failures().map(|failure| format!("{}: {}", failure.text, failure.detail)).collect();
    assert_eq!(outcome.verdict, Verdict::Pass, "{failures:#?}");
    outcome
}

const STAR: &str = r#"title = "two senders, one receiver"
duration = "2ms"
[device]
payload = "elided"
[hosts]
a = {}
b = {}
c = {}
[topology]
star = { switch = "tor", rate = "40gbit" }
[connection]
mtu = 4096
ecn = true
[[workload]]
name = "incast"
incast = { from = ["a", "b"], to = "c", bytes = "64KB", depth = 16, priority = 3 }
"#;

#[test]
fn a_write_through_every_topology_arrives() {
    for (topology, hosts) in [
        ("pair = {}", 2),
        ("star = {}", 3),
        ("dumbbell = { left = [\"h[1..2]\"], right = [\"h[3..4]\"] }", 4),
        ("leaf-spine = { leaves = 3, spines = 2 }", 6),
        ("ring = { switches = 4 }", 8),
        ("fat-tree = { k = 4 }", 9),
    ] {
        let text = format!(
            "title = \"t\"\ninvariants = [\"only-injected-loss\"]\n[hosts]\n\"h[1..{hosts}]\" = {{}}\n[topology]\n{topology}\n\
             [[pair]]\nqps = [\"h1.1\", \"h{hosts}.1\"]\n[[step]]\nqp = \"h1.1\"\nwrite = {{ bytes = 10000 }}\n\
             [[expect]]\nmemory = {{ qp = \"h{hosts}.1\", bytes = 10000, holds = \"h1.1\" }}\n"
        );
        passes(&text);
    }
}

/// A switch that is changed in the middle of a run does what it did before until then.
#[test]
fn the_settings_of_a_switch_change_at_their_time() {
    let quiet = "[switches.tor]\necn = { kmin = \"1GB\", kmax = \"1GB\", pmax = 0 }\n";
    passes(&format!("{STAR}{quiet}[[expect]]\nswitch = {{ name = \"tor\", ecn-marked = 0, dropped = 0 }}\n"));
    let marks = "[[fault]]\nswitch = \"tor\"\nat = \"1ms\"\naction = { set-ecn = { kmin = 0, kmax = 1, pmax = 1 } }\n";
    passes(&format!(
        "{STAR}{quiet}{marks}[[expect]]\nswitch = {{ name = \"tor\", ecn-marked = \">= 100\" }}\n"
    ));
    let lossy = "[switches.tor]\npfc = { priorities = [] }\nqueue-limit = \"8MB\"\n";
    passes(&format!(
        "{STAR}{lossy}[[expect]]\nswitch = {{ name = \"tor\", pause-frames = 0, dropped = 0 }}\n"
    ));
    let pauses = "[[fault]]\nswitch = \"tor\"\nat = \"1ms\"\naction = { set-pfc = { xoff = \"20KB\" } }\n";
    passes(&format!(
        "{STAR}{lossy}{pauses}[[expect]]\nswitch = {{ name = \"tor\", pause-frames = \">= 2\" }}\n"
    ));
    let buffer = "[[fault]]\nswitch = \"tor\"\nat = \"1ms\"\naction = { set-buffer = \"50KB\" }\n";
    passes(&format!("{STAR}{buffer}[[expect]]\nswitch = {{ name = \"tor\", dropped = \">= 1\" }}\n"));
}

/// Pause frames have a class of their own, and rules can lose them.
#[test]
fn a_rule_can_lose_pause_frames() {
    let rule = "[[fault]]\non = \"tor -> a\"\nmatch = { class = \"pfc\" }\naction = \"drop\"\n";
    let outcome =
        run(&format!("{STAR}[switches.tor]\npfc = {{ xoff = \"20KB\", headroom = \"10KB\" }}\n{rule}"));
    assert!(outcome.rules[0].fired > 0);
    let lossless = "[switches.tor]\npfc = { xoff = \"20KB\", headroom = \"64KB\" }\n[[expect]]\nswitch = { name = \"tor\", dropped = 0 }\n";
    passes(&format!("{STAR}{lossless}"));
    let with_rule = run(&format!("{STAR}{rule}{lossless}"));
    assert_eq!(with_rule.verdict, Verdict::Fail, "a sender that receives no pause overruns the headroom");
}

#[test]
fn a_capture_has_the_pause_frames() {
    let outcome = passes(&format!("{STAR}[[expect]]\npause = {{ on = \"tor -> a\" }}\n"));
    let capture = outcome.artifacts.expect("everything was kept").capture;
    // EtherType 0x8808 (MAC control), opcode 0x0101 (priority flow control).
    assert!(capture.windows(4).any(|bytes| bytes == [0x88, 0x08, 0x01, 0x01]));
}

/// Expectations about switches fail when they ought to.
#[test]
fn an_expectation_about_a_switch_says_what_there_was() {
    let outcome =
        run(&format!("{STAR}[[expect]]\nswitch = {{ name = \"tor\", ecn-marked = 0, pause-frames = 0 }}\n"));
    let failure = outcome.failures().next().expect("a failure");
    assert!(failure.detail.contains("marked") && failure.detail.contains("pauses"), "{}", failure.detail);
    let outcome = run(&format!("{STAR}[[expect]]\npause = {{ on = \"c -> tor\" }}\n"));
    assert_eq!(outcome.verdict, Verdict::Fail);
}
