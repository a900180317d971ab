//! What a run leaves behind: log, capture, ladder, result and, if it failed, a page, in a folder of its own.

use super::job::{Job, Ran};
use softhca_explorer::{Page, Run};
use softhca_scenarios::Verdict;
use softhca_trace::Style;
use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

/// What file systems hand out: a file takes whole blocks.
const BLOCK: u64 = 4096;

/// The files of a run, before they are written.
pub struct Artefacts<'a> {
    files: Vec<(&'static str, Cow<'a, [u8]>)>,
    /// Whether a page is made of them.
    page: bool,
}

impl<'a> Artefacts<'a> {
    /// Everything that was kept of a run.
    pub fn of(job: &Job, ran: &'a Ran) -> io::Result<Artefacts<'a>> {
        let line = serde_json::to_string(&job.line(ran)).map_err(io::Error::from)? + "\n";
        let mut files: Vec<(_, Cow<[u8]>)> = vec![("result.json", line.into_bytes().into())];
        if let Some(kept) = &ran.outcome.artefacts {
            let ladders: Vec<String> =
                kept.ladders.iter().map(|ladder| ladder.draw(Style::default())).collect();
            files.push(("events.jsonl", (&kept.events).into()));
            files.push(("capture.pcapng", (&kept.capture).into()));
            files.push(("ladder.txt", ladders.join("\n").into_bytes().into()));
        }
        let page = ran.outcome.verdict != Verdict::Pass && ran.outcome.artefacts.is_some();
        Ok(Artefacts { files, page })
    }

    /// How much the files take, without the page: that is made of what was written.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, content)| (content.len() as u64).next_multiple_of(BLOCK)).sum()
    }

    /// Writes the files into a folder.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        for (name, content) in &self.files {
            fs::write(folder.join(name), content)?;
        }
        if self.page
            && let Ok(run) = Run::open(folder)
        {
            Page::new(run).write(BufWriter::new(File::create(folder.join("report.html"))?))?;
        }
        Ok(())
    }
}

/// How much the files of a folder take; nothing if it is not there.
pub fn bytes_in(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let files = entries.filter_map(|entry| entry.ok()?.metadata().ok());
    files.filter(|file| file.is_file()).map(|file| file.len().next_multiple_of(BLOCK)).sum()
}

/// A folder for each file, parameters and seed: `library/livelock/seed-1`.
pub fn folder_of(job: &Job) -> PathBuf {
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
