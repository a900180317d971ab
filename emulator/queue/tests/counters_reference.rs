//! The reference page of the counters lists what the card counts, no more and no less.

use softhca_queue::{Counters, PortCounters};
use std::fmt::Write;
use std::path::Path;

/// Where the generated parts of the page start and end.
const START: &str = "<!-- counters: SOFTHCA_BLESS=1 cargo test -p softhca-queue writes this part -->\n";
const END: &str = "<!-- end of counters -->\n";
const PORTS_START: &str = "<!-- ports: SOFTHCA_BLESS=1 cargo test -p softhca-queue writes this part -->\n";
const PORTS_END: &str = "<!-- end of ports -->\n";

/// The page with this table between the marks.
fn with_table(page: &str, [start, end]: [&str; 2], meanings: &[(&str, &str)]) -> String {
    let mut table = String::from("\n| counter | what it counts |\n|---|---|\n");
    for (name, meaning) in meanings {
        let _ = writeln!(table, "| `{name}` | {} |", meaning.trim());
    }
    table.push('\n');
    let (head, rest) = page.split_once(start).expect("the start of the table");
    let (_, tail) = rest.split_once(end).expect("the end of the table");
    [head, start, &table, end, tail].concat()
}

#[test]
fn the_page_of_counters_lists_every_counter() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/counters.md");
    let page = std::fs::read_to_string(&path).expect("the reference page");
    let wanted = with_table(&page, [START, END], Counters::DESCRIPTIONS);
    let wanted = with_table(&wanted, [PORTS_START, PORTS_END], PortCounters::DESCRIPTIONS);
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        return std::fs::write(&path, wanted).expect("a page that can be written");
    }
    assert_eq!(page, wanted, "run again with SOFTHCA_BLESS=1");
}
