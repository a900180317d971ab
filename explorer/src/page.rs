//! Puts everything into one HTML file.

use crate::section::Section;
use crate::{Run, WhyReport, bundle};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use sha2::{Digest, Sha256};
use softhca_trace::log::EVENT_SCHEMAS;
use std::io::{self, Write};

/// A page with one run, with two that stand side by side, with one that goes on, or with the card itself.
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
}

/// A run that the page asks its server for.
#[derive(Serialize)]
struct LiveRun {
    name: String,
    notes: Vec<String>,
}

struct Playground {
    module: Vec<u8>,
    scenarios: Vec<ExampleScenario>,
}

/// A scenario that a playground comes with.
#[derive(Serialize)]
pub struct ExampleScenario {
    /// What a link calls it.
    pub name: String,
    /// The file.
    pub text: String,
}

/// An event of the log, so that the page explains it.
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
    why: Option<&'a WhyReport>,
}

impl Page {
    /// A page of this run.
    pub fn new(run: Run) -> Page {
        Page { runs: vec![run], ..Page::default() }
    }

    /// A page that asks the server it came from for the events of a run that goes on.
    pub fn live(name: &str) -> Page {
        let live = LiveRun { name: name.into(), notes: Vec::new() };
        Page { live: Some(live), ..Page::default() }
    }

    /// A page in which scenarios are run by `module`, the playground's WebAssembly; the first is there to begin with.
    pub fn playground(module: Vec<u8>, scenarios: Vec<ExampleScenario>) -> Page {
        Page { playground: Some(Playground { module, scenarios }), ..Page::default() }
    }

    /// The same page with another run beside the first.
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
        };
        // Only code that this crate holds may run: it is named by its hash, so text from a log cannot.
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
             <noscript>This page draws itself with JavaScript, which is switched off here.</noscript>\n\
             <div id=\"app\"></div>\n",
            bundle::STYLE
        )?;
        writeln!(
            output,
            "<script type=\"application/json\" id=\"meta\">{}</script>",
            escape_for_script_element(&meta)
        )?;
        for (index, run) in self.runs.into_iter().enumerate() {
            element(&mut output, &format!("lines-{index}"), run.lines)?;
            element(&mut output, &format!("frames-{index}"), Section::of(&run.frames))?;
        }
        if let Some(playground) = self.playground {
            element(&mut output, "playground", Section::of(&playground.module))?;
        }
        write!(output, "<script>{script}</script>\n</body>\n</html>\n")?;
        output.flush()
    }
}

fn element(output: &mut impl Write, id: &str, section: Section) -> io::Result<()> {
    let text = section.into_base64();
    writeln!(output, "<script type=\"application/octet-stream\" id=\"{id}\">{text}</script>")
}

/// JSON that cannot end the element that it stands in: `<` occurs in strings only, and may be escaped there.
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
