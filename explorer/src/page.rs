//! Puts everything into one HTML file.

use crate::{Run, bundle};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use sha2::{Digest, Sha256};
use softhca_trace::log::VOCABULARY;
use std::io::{self, Write};

/// A page with one run, or with two that stand side by side.
pub struct Page {
    runs: Vec<Run>,
}

#[derive(Serialize)]
struct Meta<'a> {
    version: &'static str,
    vocabulary: Vec<Word>,
    runs: Vec<RunMeta<'a>>,
}

/// A name of the event log, so that the page can tell what it means.
#[derive(Serialize)]
struct Word {
    name: &'static str,
    meaning: &'static str,
    fields: &'static [(&'static str, &'static str)],
}

#[derive(Serialize)]
struct RunMeta<'a> {
    name: &'a str,
    source: &'a str,
    events: u64,
    frames: u64,
    notes: &'a [String],
}

impl Page {
    /// A page of this run.
    pub fn new(run: Run) -> Page {
        Page { runs: vec![run] }
    }

    /// The same page with another run beside the first.
    pub fn beside(mut self, run: Run) -> Page {
        self.runs.push(run);
        self
    }

    /// Writes the page.
    pub fn write(self, mut output: impl Write) -> io::Result<()> {
        let script = bundle::script();
        let vocabulary = VOCABULARY
            .iter()
            .map(|word| Word { name: word.name, meaning: word.meaning.trim(), fields: word.fields })
            .collect();
        let runs = self.runs.iter().map(|run| RunMeta {
            name: &run.name,
            source: run.source.name(),
            events: run.events,
            frames: run.frame_count,
            notes: &run.notes,
        });
        let meta = Meta { version: env!("CARGO_PKG_VERSION"), vocabulary, runs: runs.collect() };
        let meta = serde_json::to_string(&meta).expect("strings and numbers are JSON");
        // Only code that this crate holds may run: it is named by its hash, so text from a log cannot.
        let policy = format!(
            "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; img-src data:; base-uri 'none'; form-action 'none'",
            STANDARD.encode(Sha256::digest(&script)),
            STANDARD.encode(Sha256::digest(bundle::STYLE)),
        );
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
        writeln!(output, "<script type=\"application/json\" id=\"meta\">{}</script>", inert(&meta))?;
        for (index, run) in self.runs.into_iter().enumerate() {
            element(&mut output, "lines", index, run.lines.into_base64())?;
            element(&mut output, "frames", index, run.frames.into_base64())?;
        }
        write!(output, "<script>{script}</script>\n</body>\n</html>\n")?;
        output.flush()
    }
}

fn element(output: &mut impl Write, kind: &str, index: usize, text: String) -> io::Result<()> {
    writeln!(output, "<script type=\"application/octet-stream\" id=\"{kind}-{index}\">{text}</script>")
}

/// JSON that cannot end the element that it stands in: `<` occurs in strings only, and may be escaped there.
fn inert(json: &str) -> String {
    json.replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_element() {
        let hostile = serde_json::to_string("</script><script>alert(1)</script><!--").expect("JSON");
        let text = inert(&hostile);
        assert!(!text.contains('<'));
        assert_eq!(
            serde_json::from_str::<String>(&text).expect("still JSON"),
            "</script><script>alert(1)</script><!--"
        );
    }
}
