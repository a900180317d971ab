//! The reference page of the counters lists what the card counts, no more and no less.

use softhca_queue::Counters;
use std::fmt::Write;
use std::path::Path;

/// Where the generated part of the page starts and ends.
const START: &str = "<!-- counters: SOFTHCA_BLESS=1 cargo test -p softhca-queue writes this part -->\n";
const END: &str = "<!-- end of counters -->\n";

#[test]
fn the_page_of_counters_lists_every_counter() {
    let mut table = String::from("\n| counter | what it counts |\n|---|---|\n");
    for (name, meaning) in Counters::MEANINGS {
        let _ = writeln!(table, "| `{name}` | {} |", meaning.trim());
    }
    table.push('\n');
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/counters.md");
    let page = std::fs::read_to_string(&path).expect("the reference page");
    let (head, rest) = page.split_once(START).expect("the start of the table");
    let (written, tail) = rest.split_once(END).expect("the end of the table");
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        let page = [head, START, &table, END, tail].concat();
        return std::fs::write(&path, page).expect("a page that can be written");
    }
    assert_eq!(written, table, "run again with SOFTHCA_BLESS=1");
}
