//! The reference page lists every verb that a fault can select.

use softhca_types::{Verb, VerbReach};
use std::fmt::Write;

/// The marks around the generated part of the page.
const START: &str = "<!-- verbs: SOFTHCA_BLESS=1 cargo test -p softhca-types writes this part -->\n";
const END: &str = "<!-- end of verbs -->\n";

fn table() -> String {
    let mut text =
        String::from("\n| `verb` | call | object | programs | errors of a sweep |\n|---|---|---|---|---|\n");
    for verb in Verb::ALL {
        let object = verb.object().map_or("", |kind| kind.name());
        let programs = match verb.reach() {
            VerbReach::AllPrograms => "all",
            VerbReach::CPrograms => "C",
        };
        let errors: Vec<String> = verb.errors().iter().map(ToString::to_string).collect();
        let (name, c_name, errors) = (verb.name(), verb.c_name(), errors.join(", "));
        let _ = writeln!(text, "| `{name}` | `{c_name}` | {object} | {programs} | {errors} |");
    }
    text + "\n"
}

#[test]
fn the_reference_page_has_every_verb() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/faults.md");
    let page = std::fs::read_to_string(path).expect("the page");
    let (before, rest) = page.split_once(START).expect("the mark of the start");
    let (_, after) = rest.split_once(END).expect("the mark of the end");
    let wanted = format!("{before}{START}{}{END}{after}", table());
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        return std::fs::write(path, wanted).expect("the page is writable");
    }
    assert_eq!(page, wanted, "run again with SOFTHCA_BLESS=1");
}

#[test]
fn every_verb_has_one_name_and_an_error() {
    for verb in Verb::ALL {
        assert_eq!(Verb::from_name(verb.name()), Some(*verb));
        assert_eq!(Verb::from_name(verb.c_name()), Some(*verb));
        assert!(!verb.errors().is_empty(), "{verb}");
    }
}
