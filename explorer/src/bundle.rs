//! The scripts of the page as one script.
//!
//! Each file is an ES module, so that editors and readers see its dependencies. A page that is opened from disk cannot
//! import files, so this module concatenates them in order, without import lines and without the word `export`. A name
//! may therefore be declared at the top level of one file only; a test checks that.

use serde_json::json;
use softhca_trace::filter::{FILTER_FIELDS, FILTER_FLAGS};

const MODULES: &[(&str, &str)] = &[
    ("words.js", include_str!("../page/words.js")),
    ("dom.js", include_str!("../page/dom.js")),
    ("filter.js", include_str!("../page/filter.js")),
    ("dissect.js", include_str!("../page/dissect.js")),
    ("run.js", include_str!("../page/run.js")),
    ("data.js", include_str!("../page/data.js")),
    ("state.js", include_str!("../page/state.js")),
    ("say.js", include_str!("../page/say.js")),
    ("rows.js", include_str!("../page/rows.js")),
    ("chart.js", include_str!("../page/chart.js")),
    ("ladder.js", include_str!("../page/ladder.js")),
    ("sequence.js", include_str!("../page/sequence.js")),
    ("timeline.js", include_str!("../page/timeline.js")),
    ("machines.js", include_str!("../page/machines.js")),
    ("memory.js", include_str!("../page/memory.js")),
    ("why.js", include_str!("../page/why.js")),
    ("summary.js", include_str!("../page/summary.js")),
    ("packet.js", include_str!("../page/packet.js")),
    ("events.js", include_str!("../page/events.js")),
    ("compare.js", include_str!("../page/compare.js")),
    ("inspector.js", include_str!("../page/inspector.js")),
    ("overview.js", include_str!("../page/overview.js")),
    ("live.js", include_str!("../page/live.js")),
    ("card.js", include_str!("../page/card.js")),
    ("toml.js", include_str!("../page/toml.js")),
    ("editor.js", include_str!("../page/editor.js")),
    ("playground.js", include_str!("../page/playground.js")),
    ("main.js", include_str!("../page/main.js")),
];

/// The style sheet.
pub(crate) const STYLE: &str = include_str!("../page/style.css");

/// All scripts, each after those that it imports.
pub(crate) fn script() -> String {
    let mut script = String::from("\"use strict\";\n");
    for (name, source) in MODULES {
        script.push_str("\n// ");
        script.push_str(name);
        script.push('\n');
        for line in source.lines().filter(|line| !line.starts_with("import ")) {
            script.push_str(line.strip_prefix("export ").unwrap_or(line));
            script.push('\n');
        }
        if *name == "filter.js" {
            script.push_str(&filter_words());
        }
    }
    script
}

/// The names of the filter language.
fn filter_words() -> String {
    let fields = FILTER_FIELDS.iter().map(|field| [&[field.name], field.wireshark].concat());
    let flags = FILTER_FLAGS.iter().map(|(name, _)| *name);
    let (fields, flags) = (fields.collect::<Vec<_>>(), flags.collect::<Vec<_>>());
    format!("FILTER_FIELDS.push(...{});\nFILTER_FLAGS.push(...{});\n", json!(fields), json!(flags))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn no_name_is_declared_in_two_files() {
        let mut owners = BTreeMap::new();
        for (file, source) in MODULES {
            for line in source.lines() {
                let line = line.strip_prefix("export ").unwrap_or(line);
                let Some(rest) = ["function* ", "async function ", "function ", "class ", "const ", "let "]
                    .iter()
                    .find_map(|word| line.strip_prefix(word))
                else {
                    continue;
                };
                let name: String = rest
                    .chars()
                    .take_while(|c| c.is_ascii_alphanumeric() || *c == '_' || *c == '$')
                    .collect();
                if let Some(other) = owners.insert(name.clone(), file) {
                    panic!("{name} is declared in {other} and in {file}");
                }
            }
        }
    }

    #[test]
    fn a_module_imports_only_exported_names_of_earlier_modules() {
        for (index, (file, source)) in MODULES.iter().enumerate() {
            for line in source.lines().filter(|line| line.starts_with("import ")) {
                let (names, from) = line
                    .strip_prefix("import { ")
                    .and_then(|rest| rest.strip_suffix("\";"))
                    .and_then(|rest| rest.split_once(" } from \"./"))
                    .unwrap_or_else(|| panic!("{file}: `{line}` has another form than the bundler reads"));
                let (_, exporter) = MODULES[..index]
                    .iter()
                    .find(|(name, _)| *name == from)
                    .unwrap_or_else(|| panic!("{file}: {from} is not an earlier module"));
                for name in names.split(", ") {
                    let is_exported = exporter.lines().any(|line| {
                        line.strip_prefix("export ").is_some_and(|rest| {
                            rest.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$'))
                                .any(|word| word == name)
                        })
                    });
                    assert!(is_exported, "{file}: {from} does not export {name}");
                }
            }
        }
    }

    #[test]
    fn the_script_can_neither_end_its_element_nor_turn_text_into_markup() {
        let script = script();
        for forbidden in
            ["</script", "<!--", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("]
        {
            assert!(!script.contains(forbidden), "{forbidden}");
        }
    }
}
