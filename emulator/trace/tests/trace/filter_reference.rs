//! The reference page of filters lists the fields and words of the language.

use softhca_trace::filter::{FILTER_FIELDS, FILTER_FLAGS};
use std::fmt::Write;
use std::path::Path;

const START: &str = "<!-- fields: SOFTHCA_BLESS=1 cargo test -p softhca-trace writes this part -->\n";
const END: &str = "<!-- end of fields -->\n";

#[test]
fn the_page_lists_every_field_and_word() {
    let mut table = String::from("| field | in Wireshark | meaning |\n|---|---|---|\n");
    for field in FILTER_FIELDS {
        let names: Vec<String> = field.wireshark.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(table, "| `{}` | {} | {} |", field.name, names.join(", "), field.description);
    }
    table += "\n| word | true of |\n|---|---|\n";
    for (name, description) in FILTER_FLAGS {
        let _ = writeln!(table, "| `{name}` | {description} |");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/filter.md");
    let page = std::fs::read_to_string(&path).expect("the reference page");
    let (head, rest) = page.split_once(START).expect("the start of the tables");
    let (written, tail) = rest.split_once(END).expect("the end of the tables");
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        return std::fs::write(&path, [head, START, &table, END, tail].concat())
            .expect("a page that can be written");
    }
    assert_eq!(written, table, "run again with SOFTHCA_BLESS=1");
}
