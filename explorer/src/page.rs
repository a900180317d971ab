//! Puts everything into one HTML file.

use crate::section::Section;
use crate::{Run, WhyReport, bundle};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use sha2::{Digest, Sha256};
use softhca_trace::log::EVENT_SCHEMAS;
use softhca_wire::Opcode;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// A page with one run, with two runs to compare, with a live run, or with the emulator itself.
#[derive(Default)]
pub struct Page {
    runs: Vec<Run>,
    live: Option<LiveRun>,
    playground: Option<Playground>,
}

#[derive(Serialize)]
struct PageData<'a> {
    version: &'static str,
    events: Vec<EventDoc>,
    runs: Vec<RunSummary<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    live: Option<LiveRun>,
    playground: bool,
    scenarios: &'a [ExampleScenario],
    /// The JSON Schema of scenarios, for completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    schema: Option<&'a serde_json::Value>,
    /// The number of each opcode, for filters.
    opcodes: BTreeMap<String, u8>,
}

/// A run whose events the server sends.
#[derive(Serialize)]
struct LiveRun {
    name: String,
    notes: Vec<String>,
}

struct Playground {
    module: Vec<u8>,
    scenarios: Vec<ExampleScenario>,
    schema: serde_json::Value,
}

/// A scenario that a playground contains.
#[derive(Serialize)]
pub struct ExampleScenario {
    /// The name in links.
    pub name: String,
    /// The file.
    pub text: String,
    /// The lesson that links to it, or 0.
    pub lesson: u8,
}

/// The description of an event of the log.
#[derive(Serialize)]
struct EventDoc {
    name: &'static str,
    description: &'static str,
    emphasis: &'static str,
    text: &'static str,
    fields: Vec<(String, &'static str)>,
}

#[derive(Serialize)]
struct RunSummary<'a> {
    name: &'a str,
    source: &'a str,
    events: u64,
    frames: u64,
    notes: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'a serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a WhyReport>,
}

impl Page {
    pub fn new(run: Run) -> Page {
        Page { runs: vec![run], ..Page::default() }
    }

    /// A page that follows a live run; its events come from the server of the page.
    pub fn live(name: &str) -> Page {
        let live = LiveRun { name: name.into(), notes: Vec::new() };
        Page { live: Some(live), ..Page::default() }
    }

    /// A page that runs scenarios with `module`, the WebAssembly of the playground. It opens with the first scenario;
    /// `schema` is the JSON Schema of scenarios.
    pub fn playground(module: Vec<u8>, scenarios: Vec<ExampleScenario>, schema: serde_json::Value) -> Page {
        Page { playground: Some(Playground { module, scenarios, schema }), ..Page::default() }
    }

    /// Adds a second run to the page.
    pub fn with_run(mut self, run: Run) -> Page {
        self.runs.push(run);
        self
    }

    /// Writes the page.
    pub fn write(self, mut output: impl Write) -> io::Result<()> {
        let script = bundle::script();
        let events = EVENT_SCHEMAS
            .iter()
            .map(|schema| EventDoc {
                name: schema.name,
                description: schema.description.trim(),
                emphasis: schema.emphasis.name(),
                text: schema.text,
                fields: schema.fields(),
            })
            .collect();
        let runs = self.runs.iter().map(|run| RunSummary {
            name: &run.name,
            source: run.source.name(),
            events: run.events,
            frames: run.frame_count,
            notes: &run.notes,
            result: run.result.as_ref(),
            why: run.why.as_ref(),
        });
        let playground = self.playground.as_ref();
        let meta = PageData {
            version: env!("CARGO_PKG_VERSION"),
            events,
            runs: runs.collect(),
            live: self.live,
            playground: playground.is_some(),
            scenarios: playground.map_or(&[], |playground| &playground.scenarios),
            schema: playground.map(|playground| &playground.schema),
            opcodes: Opcode::all().map(|opcode| (opcode.to_string(), opcode.byte())).collect(),
        };
        // Only the script of this crate may run. The policy contains its hash, so text from a log cannot.
        let policy = format!(
            "default-src 'none'; script-src 'sha256-{}'{}; style-src 'sha256-{}'{}{}; base-uri 'none'; form-action 'none'",
            STANDARD.encode(Sha256::digest(&script)),
            if meta.playground { " 'wasm-unsafe-eval'" } else { "" },
            STANDARD.encode(Sha256::digest(bundle::STYLE)),
            // The worker is made from a part of that script.
            if meta.playground { "; worker-src blob:" } else { "" },
            if meta.live.is_some() { "; connect-src 'self'" } else { "" },
        );
        let meta = serde_json::to_string(&meta).expect("strings and numbers are JSON");
        write!(
            output,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <title>SoftHCA explorer</title>\n<style>{}</style>\n</head>\n<body>\n\
             <noscript>This page needs JavaScript.</noscript>\n\
             <div id=\"app\"></div>\n",
            bundle::STYLE
        )?;
        writeln!(
            output,
            "<script type=\"application/json\" id=\"meta\">{}</script>",
            escape_for_script_element(&meta)
        )?;
        // The script precedes the data, so that the browser shows the page while it still reads them.
        writeln!(output, "<script>{script}</script>")?;
        for (index, run) in self.runs.into_iter().enumerate() {
            element(&mut output, &format!("lines-{index}"), run.lines)?;
            element(&mut output, &format!("frames-{index}"), Section::of(&run.frames))?;
        }
        if let Some(playground) = self.playground {
            element(&mut output, "playground", Section::of(&playground.module))?;
        }
        write!(output, "</body>\n</html>\n")?;
        output.flush()
    }
}

fn element(output: &mut impl Write, id: &str, section: Section) -> io::Result<()> {
    let text = section.into_base64();
    writeln!(output, "<script type=\"application/octet-stream\" id=\"{id}\">{text}</script>")
}

/// JSON that cannot end its element: `<` occurs in strings only, where it can be escaped.
fn escape_for_script_element(json: &str) -> String {
    json.replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_element() {
        let hostile = serde_json::to_string("</script><script>alert(1)</script><!--").expect("JSON");
        let text = escape_for_script_element(&hostile);
        assert!(!text.contains('<'));
        assert_eq!(
            serde_json::from_str::<String>(&text).expect("still JSON"),
            "</script><script>alert(1)</script><!--"
        );
    }
}
