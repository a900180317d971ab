//! The reference page of the event log says what the code can emit, no more and no less.

use softhca_trace::log::EVENT_SCHEMAS;
use std::fmt::Write;
use std::path::Path;

/// Where the generated part of the page starts and ends.
const START: &str = "<!-- vocabulary: SOFTHCA_BLESS=1 cargo test -p softhca-trace writes this part -->\n";
const END: &str = "<!-- end of vocabulary -->\n";

fn vocabulary() -> String {
    let mut text = String::new();
    for schema in EVENT_SCHEMAS {
        let _ = write!(text, "\n### `{}`\n\n{}\n\n", schema.name, schema.description.trim());
        let _ = writeln!(text, "| field | meaning |\n|---|---|");
        for (field, description) in schema.fields() {
            let _ = writeln!(text, "| `{field}` | {description} |");
        }
    }
    text + "\n"
}

#[test]
fn the_page_lists_exactly_the_names_and_fields_that_the_code_can_emit() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/event-log.md");
    let page = std::fs::read_to_string(&path).expect("the reference page");
    let (head, rest) = page.split_once(START).expect("the start of the vocabulary");
    let (written, tail) = rest.split_once(END).expect("the end of the vocabulary");
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        let page = [head, START, &vocabulary(), END, tail].concat();
        return std::fs::write(&path, page).expect("a page that can be written");
    }
    assert_eq!(written, vocabulary(), "run again with SOFTHCA_BLESS=1");
}
