//! What a run leaves behind: log, capture, ladder, result and, if it failed, a page, in a folder of its own.

use super::job::{Job, Ran};
use softhca_explorer::{Page, Run};
use softhca_scenarios::Verdict;
use softhca_trace::Style;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

/// Writes everything that was kept of a run below `root`; returns the folder.
pub fn write(root: &Path, job: &Job, ran: &Ran) -> io::Result<PathBuf> {
    let folder = root.join(folder_of(job));
    fs::create_dir_all(&folder)?;
    let line = serde_json::to_string(&job.line(ran)).map_err(io::Error::from)?;
    fs::write(folder.join("result.json"), line + "\n")?;
    if let Some(artefacts) = &ran.outcome.artefacts {
        fs::write(folder.join("events.jsonl"), &artefacts.events)?;
        fs::write(folder.join("capture.pcapng"), &artefacts.capture)?;
        let ladders: Vec<String> =
            artefacts.ladders.iter().map(|ladder| ladder.draw(Style::default())).collect();
        fs::write(folder.join("ladder.txt"), ladders.join("\n"))?;
        if ran.outcome.verdict != Verdict::Pass
            && let Ok(run) = Run::open(&folder)
        {
            Page::new(run).write(BufWriter::new(File::create(folder.join("report.html"))?))?;
        }
    }
    Ok(folder)
}

/// A folder for each file, parameters and seed: `library/livelock/seed-1`.
fn folder_of(job: &Job) -> PathBuf {
    let path = Path::new(job.scenario.name());
    let stem = path.file_stem().map_or_else(|| "scenario".into(), |stem| stem.to_string_lossy().into_owned());
    let mut name = format!("seed-{}", job.seed);
    for (parameter, value) in &job.set {
        let value: String =
            value.chars().filter(|c| c.is_ascii_alphanumeric() || ".-_".contains(*c)).collect();
        name += &format!("-{parameter}-{value}");
    }
    Path::new(&stem).join(name)
}
