//! Swarm: the seed draws the configuration of a run.

use softhca_scenarios::{ParameterValues, Recording, Scenario, Verdict, simulate};
use std::collections::BTreeSet;

const OPEN: &str = r#"
    title = "A stream between two hosts"
    [hosts]
    alice = {}
    bob = {}
    [[link]]
    between = ["alice", "bob"]
    [[pair]]
    qps = ["alice.1", "bob.1"]
    [[workload]]
    name = "writes"
    stream = { qp = "alice.1", op = "write", bytes = 8192, count = 10 }
"#;

#[test]
fn a_seed_draws_the_same_run_each_time_and_seeds_differ() {
    let scenario = Scenario::parse("open.toml", OPEN).unwrap();
    let mut seen = BTreeSet::new();
    let mut values: BTreeSet<(String, String)> = BTreeSet::new();
    for seed in 1..=40 {
        let digests = [(); 2].map(|()| {
            let plan = scenario.swarm_plan(&ParameterValues::new(), seed).unwrap();
            values.extend(plan.parameters.clone());
            let outcome = simulate(&plan, Recording::Digest);
            assert_ne!(outcome.verdict, Verdict::Error, "{:?}", outcome.error);
            outcome.trace_sha256.unwrap()
        });
        assert_eq!(digests[0], digests[1], "seed {seed}");
        seen.insert(digests[0].clone());
    }
    assert_eq!(seen.len(), 40);
    for (name, count) in [("mtu", 5), ("profile", 3), ("recovery", 3), ("acks", 2), ("rate", 5)] {
        let drawn = values.iter().filter(|(key, _)| *key == format!("swarm.{name}")).count();
        assert_eq!(drawn, count, "{name}: {values:?}");
    }
    for kind in ["drop", "duplicate", "delay", "corrupt", "reorder"] {
        assert!(values.contains(&(format!("swarm.{kind}"), "on".into())), "{kind}: {values:?}");
    }
}

#[test]
fn what_a_file_sets_is_not_drawn() {
    let text = OPEN.replace(
        "[hosts]",
        "device = { recovery = \"go-back-n\", profile = \"rxe\" }\nconnection = { mtu = 512 }\n[hosts]",
    );
    let scenario = Scenario::parse("set.toml", &text).unwrap();
    for seed in 1..=10 {
        let plan = scenario.swarm_plan(&ParameterValues::new(), seed).unwrap();
        assert_eq!(plan.hosts[0].settings.recovery.name(), "go-back-n");
        assert_eq!((plan.hosts[0].settings.profile.name, plan.pairs[0].mtu.bytes()), ("rxe", 512));
        assert!((1..=8192).contains(&plan.flows[0].bytes));
        assert!(!plan.parameters.contains_key("swarm.recovery"));
    }
}
