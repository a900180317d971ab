//! The files of a run: event log, capture, ladder, result and, if it failed, an HTML report.

use super::job::{Job, RunResult};
use crate::output::Access;
use softhca_explorer::{Page, Run};
use softhca_scenarios::Verdict;
use softhca_trace::LadderStyle;
use std::borrow::Cow;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The allocation unit of file systems.
const FILE_SYSTEM_BLOCK: u64 = 4096;

/// The files of a run, before they are written.
pub struct Artifacts<'a> {
    files: Vec<(String, Cow<'a, [u8]>)>,
    /// Whether an HTML report is created from them.
    has_report: bool,
}

impl<'a> Artifacts<'a> {
    /// The files of a run.
    pub fn new(job: &Job, ran: &'a RunResult) -> io::Result<Artifacts<'a>> {
        let line = serde_json::to_string(&job.json_line(ran)).map_err(io::Error::from)? + "\n";
        let mut files: Vec<(String, Cow<[u8]>)> = vec![("result.json".into(), line.into_bytes().into())];
        if let Some(kept) = &ran.outcome.artifacts {
            files.push(("events.jsonl".into(), (&kept.events).into()));
            // The packets of programs are not always recorded.
            if !kept.capture.is_empty() {
                files.push(("capture.pcapng".into(), (&kept.capture).into()));
            }
            if !kept.ladders.is_empty() {
                let ladders: Vec<String> =
                    kept.ladders.iter().map(|ladder| ladder.draw(LadderStyle::default())).collect();
                files.push(("ladder.txt".into(), ladders.join("\n").into_bytes().into()));
            }
            for (index, (program, output)) in kept.outputs.iter().enumerate() {
                let name = format!("output-{}-{}.txt", index + 1, file_name(program));
                files.push((name, output.into()));
            }
        }
        let page = ran.outcome.verdict != Verdict::Pass && ran.outcome.artifacts.is_some();
        Ok(Artifacts { files, has_report: page })
    }

    /// The size of the files on disk, without the report, which is created from them.
    pub fn size(&self) -> u64 {
        self.files.iter().map(|(_, content)| (content.len() as u64).next_multiple_of(FILE_SYSTEM_BLOCK)).sum()
    }

    /// Writes the files into a folder.
    pub fn write(&self, folder: &Path, access: Access) -> io::Result<()> {
        access.create_folder(folder)?;
        for (name, content) in &self.files {
            access.create(&folder.join(name))?.write_all(content)?;
        }
        if self.has_report
            && let Ok(run) = Run::open(folder)
        {
            Page::new(run).write(BufWriter::new(access.create(&folder.join("report.html"))?))?;
        }
        Ok(())
    }
}

/// The size of the files in a folder; 0 if it does not exist.
pub fn folder_size(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let files = entries.filter_map(|entry| entry.ok()?.metadata().ok());
    files.filter(|file| file.is_file()).map(|file| file.len().next_multiple_of(FILE_SYSTEM_BLOCK)).sum()
}

/// The part of a name that a file can have.
fn file_name(name: &str) -> String {
    name.chars().filter(|c| c.is_ascii_alphanumeric() || ".-_".contains(*c)).take(64).collect()
}

/// The folder of a run, by scenario, parameters and seed: `livelock/seed-1`.
pub fn run_folder(job: &Job) -> PathBuf {
    let path = Path::new(job.scenario.name());
    let stem = path.file_stem().map_or_else(|| "scenario".into(), |stem| stem.to_string_lossy().into_owned());
    let mut name = format!("seed-{}", job.seed);
    for (parameter, value) in &job.parameters {
        name += &format!("-{parameter}-{}", file_name(value));
    }
    Path::new(&stem).join(name)
}
