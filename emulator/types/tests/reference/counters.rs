//! Compares the reference page of the counters with the counters of the HCA.

use softhca_types::{Counters, PortCounters};
use std::fmt::Write;
use std::path::Path;

/// The marks around the generated parts of the page.
const START: &str = "<!-- counters: SOFTHCA_BLESS=1 cargo test -p softhca-types writes this part -->\n";
const END: &str = "<!-- end of counters -->\n";
const PORTS_START: &str = "<!-- ports: SOFTHCA_BLESS=1 cargo test -p softhca-types writes this part -->\n";
const PORTS_END: &str = "<!-- end of ports -->\n";

/// The page with this table between the marks.
fn with_table(page: &str, [start, end]: [&str; 2], descriptions: &[(&str, &str)]) -> String {
    let mut table = String::from("\n| counter | meaning |\n|---|---|\n");
    for (name, description) in descriptions {
        let _ = writeln!(table, "| `{name}` | {} |", description.trim());
    }
    table.push('\n');
    let (head, rest) = page.split_once(start).expect("the page has the start mark");
    let (_, tail) = rest.split_once(end).expect("the page has the end mark");
    [head, start, &table, end, tail].concat()
}

#[test]
fn the_reference_page_lists_every_counter() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/counters.md");
    let page = std::fs::read_to_string(&path).expect("the reference page exists");
    let wanted = with_table(&page, [START, END], Counters::DESCRIPTIONS);
    let wanted = with_table(&wanted, [PORTS_START, PORTS_END], PortCounters::DESCRIPTIONS);
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        return std::fs::write(&path, wanted).expect("the page is writable");
    }
    assert_eq!(page, wanted, "run again with SOFTHCA_BLESS=1");
}
