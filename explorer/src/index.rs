//! The page that lists many runs, each with a link to its report. It has no script.

use crate::bundle;
use std::io::{self, Write};

/// A run in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexRow {
    /// The scenario and its parameters.
    pub scenario: String,
    /// The scenario's title.
    pub title: String,
    pub seed: u64,
    /// `pass`, `fail` or `error`.
    pub verdict: String,
    /// Why it failed, or what happened; may be empty.
    pub cause: String,
    /// The report, relative to the page; none if the run has no event log.
    pub report: Option<String>,
}

/// A page with a line for each run.
#[derive(Clone, Debug, Default)]
pub struct IndexPage {
    /// The common title of the runs.
    pub title: String,
    /// The runs.
    pub rows: Vec<IndexRow>,
}

const INDEX_STYLE: &str = "body { overflow: auto; height: auto; } main { max-width: 72rem; margin: 0 auto; padding: 1.5rem; } \
    h1 { font-size: 1.6rem; white-space: normal; } table { border-collapse: collapse; width: 100%; } \
    td, th { text-align: left; padding: .5rem .8rem; vertical-align: top; border-bottom: 1px solid var(--line); } \
    th { color: var(--muted); font-weight: 600; } tbody tr:hover { background: var(--hover); } a { color: var(--blue); } \
    .mark { display: inline-block; min-width: 3.6rem; text-align: center; border-radius: 6px; padding: .1rem .5rem; font-weight: 650; color: var(--bg); background: var(--red); } \
    .mark.pass { background: var(--green); } .mark.error { background: var(--orange); }";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A relative link: only letters that need no escape stay as they are.
fn escape_link(path: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-~".contains(&byte);
    path.bytes()
        .map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

impl IndexPage {
    /// Writes the page.
    pub fn write(&self, mut output: impl Write) -> io::Result<()> {
        let count = |verdict: &str| self.rows.iter().filter(|row| row.verdict == verdict).count();
        write!(
            output,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>{}\
             {INDEX_STYLE}</style>\n\
             </head>\n<body>\n<main>\n<h1>{title}</h1>\n<p>{} runs: {} passed, {} failed, {} could not run.</p>\n\
             <table>\n<thead><tr><th>Verdict</th><th>Scenario</th><th>Seed</th><th>What happened</th></tr></thead>\n<tbody>\n",
            bundle::STYLE,
            self.rows.len(),
            count("pass"),
            count("fail"),
            count("error"),
            title = escape(&self.title),
        )?;
        for row in &self.rows {
            let name = format!("{}: {}", row.scenario, row.title);
            let link = match &row.report {
                Some(report) => format!("<a href=\"{}\">{}</a>", escape_link(report), escape(&name)),
                None => escape(&name),
            };
            writeln!(
                output,
                "<tr><td><span class=\"mark {0}\">{0}</span></td><td>{link}</td><td>{1}</td><td>{2}</td></tr>",
                escape(&row.verdict),
                row.seed,
                escape(&row.cause)
            )?;
        }
        output.write_all(b"</tbody>\n</table>\n</main>\n</body>\n</html>\n")?;
        output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text_and_links_stay_relative() {
        let row = IndexRow {
            scenario: "<b>".into(),
            title: "\"quoted\"".into(),
            seed: 1,
            verdict: "fail".into(),
            cause: "a < b && c".into(),
            report: Some("java script:x/seed 1/report.html".into()),
        };
        let mut page = Vec::new();
        IndexPage { title: "Runs".into(), rows: vec![row] }
            .write(&mut page)
            .expect("a vector takes everything");
        let page = String::from_utf8(page).expect("UTF-8");
        assert!(page.contains("href=\"java%20script%3Ax/seed%201/report.html\""), "{page}");
        assert!(page.contains("&lt;b&gt;: &quot;quoted&quot;") && page.contains("a &lt; b &amp;&amp; c"));
        assert!(page.contains("1 runs: 0 passed, 1 failed, 0 could not run."));
    }
}
