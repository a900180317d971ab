//! The declaration of fault actions: what the language accepts, and the reference pages.

use softhca_scenarios::spec::{FaultAction, FaultTarget};
use softhca_scenarios::{ParameterValues, Scenario};
use std::fmt::Write;

const NETWORK: &str = r#"title = "t"
[hosts]
alice = {}
bob = {}
[switches]
tor = {}
[[link]]
between = ["alice", "tor"]
[[link]]
between = ["bob", "tor"]
[[fault]]
"#;

const fn keys(target: FaultTarget) -> &'static str {
    match target {
        FaultTarget::Packets => "on = \"alice -> tor\"",
        FaultTarget::Link => "link = \"alice - tor\"",
        FaultTarget::Switch => "switch = \"tor\"",
        FaultTarget::Host => "host = \"alice\"",
        FaultTarget::Completions => "qp = \"alice.1\"",
        FaultTarget::Calls => "host = \"alice\"\nverb = \"rdma_connect\"",
    }
}

#[test]
fn every_action_applies_to_its_targets_and_to_no_other() {
    for action in FaultAction::DECLARATIONS {
        for target in FaultTarget::ALL {
            let text = format!("{NETWORK}{}\naction = {}\n", keys(target), action.example);
            let plan = Scenario::parse("t", &text)
                .and_then(|scenario| scenario.plan(&ParameterValues::new(), scenario.seed));
            match (action.targets.contains(&target), plan) {
                (true, Err(problem)) => panic!("{problem}"),
                (false, Ok(_)) => panic!("`{}` applies to {}", action.name, target.name()),
                (false, Err(problem)) => {
                    let needs_verb =
                        target == FaultTarget::Host && problem.message.contains("missing `verb`");
                    let is_refused = problem.message.contains("does not apply to")
                        && problem.excerpt.starts_with("action");
                    assert!(needs_verb || is_refused, "{problem}");
                }
                (true, Ok(_)) => {}
            }
        }
    }
}

/// Compares the part of a reference page between two marks with the declaration.
fn check_page(page: &str, part: &str, table: &str) {
    let path = format!("{}/../docs/reference/{page}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the page");
    let start = format!(
        "<!-- {part}: SOFTHCA_BLESS=1 cargo test -p softhca-scenarios --test scenarios writes this part -->\n"
    );
    let end = format!("<!-- end of {part} -->\n");
    let (before, rest) = text.split_once(&start).expect("the mark of the start");
    let (_, after) = rest.split_once(&end).expect("the mark of the end");
    let wanted = format!("{before}{start}\n{table}\n{end}{after}");
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        return std::fs::write(path, wanted).expect("the page is writable");
    }
    assert_eq!(text, wanted, "run again with SOFTHCA_BLESS=1");
}

#[test]
fn the_reference_page_has_every_action() {
    let mut table = String::from("| action | target | effect |\n|---|---|---|\n");
    for action in FaultAction::DECLARATIONS {
        let targets = action.list_targets(FaultTarget::key);
        let _ = writeln!(table, "| `{}` | {targets} | {} |", action.example, action.effect.trim());
    }
    check_page("faults.md", "actions", &table);
}

#[test]
fn the_page_of_the_language_has_the_actions_of_each_target() {
    let mut table = String::from("| target | actions |\n|---|---|\n");
    for target in FaultTarget::ALL {
        let of_target = FaultAction::DECLARATIONS.iter().filter(|action| action.targets.contains(&target));
        let examples: Vec<String> = of_target.map(|action| format!("`{}`", action.example)).collect();
        let _ = writeln!(table, "| {}: {} | {} |", target.key(), target.name(), examples.join(", "));
    }
    check_page("scenarios.md", "actions", &table);
}
