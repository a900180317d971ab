//! `softhca report`: an HTML report from a run, a capture, or a folder of runs.

use crate::exit_code::{CommandResult, bad_input};
use crate::terminal;
use serde::Deserialize;
use softhca_explorer::{IndexPage, IndexRow, OpenError, Page, Run};
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `softhca report`.
#[derive(clap::Args)]
#[command(after_help = "The report is a single file that loads nothing from the network.\n\
                        Of a folder of runs, such as `softhca run --out` writes, the report is a list with a link to the report \
                        of each run, which is written beside it.\n\
                        Damaged input is shown up to the damage, and the report says so.")]
pub struct Arguments {
    /// Event log, folder of a run or of many runs, or pcap or pcapng file
    run: PathBuf,
    /// Second run or capture to compare with
    other: Option<PathBuf>,
    /// File to write [default: report.html; index.html in a folder of runs]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The length of the progress bar of a stage.
const BAR_LENGTH: u64 = 1000;

/// The result of a run that is not read from its log.
const RESULT: &str = "result.json";
const REPORT: &str = "report.html";

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    let runs = match arguments.other {
        None if arguments.run.is_dir() && !arguments.run.join(RESULT).exists() => run_folders(&arguments.run),
        _ => Vec::new(),
    };
    let default = if runs.is_empty() { PathBuf::from(REPORT) } else { arguments.run.join("index.html") };
    let output = arguments.output.clone().unwrap_or(default);
    let bar = terminal::progress_bar(BAR_LENGTH, "{bar:40} {percent:>3} %, {elapsed} elapsed, {msg}");
    let report = |stage: &'static str, share: f64| {
        bar.set_message(stage);
        bar.set_position((share * BAR_LENGTH as f64) as u64);
    };
    let written = if runs.is_empty() {
        let page = build_page(arguments, &report);
        bar.finish_and_clear();
        write(page.map_err(bad_input)?, &output)
    } else {
        let written = write_index(&arguments.run, &runs, &output, &report);
        bar.finish_and_clear();
        written
    };
    let output = output.display();
    written.map_err(|error| bad_input(format!("{output}: {error}; choose another file with -o")))?;
    outln!("report: {output}");
    Ok(ExitCode::SUCCESS)
}

fn build_page(arguments: &Arguments, report: &dyn Fn(&'static str, f64)) -> Result<Page, OpenError> {
    let open = |path: &PathBuf| {
        let run = Run::open_with_progress(path, report)?;
        for note in run.notes() {
            warnln!("{}: {note}", path.display());
        }
        Ok(run)
    };
    let page = Page::new(open(&arguments.run)?);
    Ok(match &arguments.other {
        Some(path) => page.with_run(open(path)?),
        None => page,
    })
}

fn write(page: Page, path: &Path) -> io::Result<()> {
    page.write(BufWriter::new(File::create(path)?))
}

/// The folders of runs below a folder: each has a result.
fn run_folders(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        if folder.join(RESULT).is_file() {
            found.push(folder);
            continue;
        }
        let entries = std::fs::read_dir(&folder).into_iter().flatten().filter_map(Result::ok);
        folders.extend(entries.map(|entry| entry.path()).filter(|path| path.is_dir() && !path.is_symlink()));
    }
    found.sort();
    found
}

/// The entry of a run in the list, from its result.
#[derive(Deserialize)]
struct RunResult {
    scenario: String,
    title: String,
    seed: u64,
    verdict: String,
    #[serde(default)]
    expectations: Vec<Expectation>,
    #[serde(default)]
    error: Option<String>,
}

#[derive(Deserialize)]
struct Expectation {
    text: String,
    held: bool,
    #[serde(default)]
    sometimes: bool,
    #[serde(default)]
    detail: String,
}

impl RunResult {
    /// The first reason of a failure.
    fn cause(&self) -> Option<String> {
        let broken = self.expectations.iter().find(|expectation| !expectation.held && !expectation.sometimes);
        let broken = broken.map(|Expectation { text, detail, .. }| format!("{text}: {detail}"));
        self.error.clone().or(broken)
    }
}

/// Writes the list, and the reports that do not exist yet.
fn write_index(
    root: &Path,
    runs: &[PathBuf],
    output: &Path,
    report: &dyn Fn(&'static str, f64),
) -> io::Result<()> {
    let mut rows = Vec::new();
    for (number, folder) in runs.iter().enumerate() {
        report("writing reports", number as f64 / runs.len() as f64);
        let name = folder.strip_prefix(root).unwrap_or(folder);
        let text = std::fs::read_to_string(folder.join(RESULT))?;
        let result: RunResult = match serde_json::from_str(&text) {
            Ok(result) => result,
            Err(error) => {
                warnln!("{}: {error}; the run is left out", folder.join(RESULT).display());
                continue;
            }
        };
        let path = folder.join(REPORT);
        let mut cause = result.cause();
        if !path.exists() || cause.is_none() {
            match Run::open(folder) {
                Ok(run) => {
                    cause = cause.or_else(|| run.why().and_then(|why| why.first_cause().map(str::to_owned)));
                    if !path.exists() {
                        write(Page::new(run), &path)?;
                    }
                }
                // A run on which nothing was recorded has no report.
                Err(OpenError::EmptyFolder { .. }) => {}
                Err(error) => warnln!("{error}"),
            }
        }
        let is_beside = output.parent().unwrap_or(Path::new("")) == root;
        let link = if is_beside { name.join(REPORT) } else { path.canonicalize().unwrap_or(path.clone()) };
        rows.push(IndexRow {
            scenario: name.parent().unwrap_or(name).to_string_lossy().into_owned(),
            title: if result.title.is_empty() { result.scenario } else { result.title },
            seed: result.seed,
            verdict: result.verdict,
            cause: cause.unwrap_or_default(),
            report: path.exists().then(|| link.to_string_lossy().into_owned()),
        });
    }
    let title = format!("Runs in {}", root.display());
    IndexPage { title, rows }.write(BufWriter::new(File::create(output)?))
}
