//! `softhca why` and `softhca lint`: analysis of an event log or a capture.

use crate::exit_code::{CommandError, CommandResult, bad_input, bad_input_in};
use crate::terminal;
use serde::Serialize;
use softhca_trace::lint::{Finding, Linter};
use softhca_trace::log::{CaptureConverter, LogError, LogErrorKind};
use softhca_trace::why::{self, LogAnalyzer, Query};
use softhca_trace::{CaptureReader, EventLogReader, Packet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `softhca why`.
#[derive(clap::Args)]
#[command(
    after_help = "Without --wr, explains every work request that failed on its own (not flushed); if none failed, \
                        those that were delayed.\nA capture shows packets only: work requests are numbered in the order in \
                        which they begin, and each cause is known, inferred or ambiguous.\nExit code: 0; 2 if the input \
                        cannot be read or does not contain the queue pair or work request."
)]
pub struct WhyArguments {
    /// An event log (events.jsonl), a pcap or pcapng file, or - for standard input
    #[arg(required_unless_present = "schema")]
    file: Option<PathBuf>,
    /// Print one JSON object per finding
    #[arg(long)]
    json: bool,
    /// Print the JSON Schema of the objects of --json
    #[arg(long)]
    schema: bool,
    /// Only this queue pair: its QPN, decimal or with 0x, or its name in the log, such as alice.1
    #[arg(long, value_name = "Q")]
    qp: Option<String>,
    /// Only the work request with this wr_id
    #[arg(long, value_name = "N")]
    wr: Option<u64>,
}

/// Arguments of `softhca lint`.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if there are no findings or only notes; 1 if there are errors or warnings; 2 if the log \
                        cannot be read."
)]
pub struct LintArguments {
    /// An event log (events.jsonl), or - for standard input
    log: PathBuf,
    /// Print one JSON object per finding
    #[arg(long)]
    json: bool,
}

fn read_error(path: &Path, error: LogError) -> CommandError {
    let failed = bad_input_in(path.display());
    match error {
        LogError { line: 0, cause } => failed(format!("{cause}; give the path of an event log")),
        error => failed(error.to_string()),
    }
}

/// Writes to standard output. A closed pipe is not an error.
pub fn print(text: &str) -> Result<(), CommandError> {
    let mut output = io::stdout().lock();
    match output.write_all(terminal::printable(text).as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(bad_input(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Reads an event log, or a capture, of which damage is reported and what was read before it is analysed.
pub fn read_any(path: &Path) -> Result<LogAnalyzer, CommandError> {
    let unreadable = |error: &dyn std::fmt::Display| {
        let text = format!("{error}; give the path of an event log or of a pcap or pcapng file");
        bad_input_in(path.display())(text)
    };
    let mut input = crate::input::open_with_progress(path).map_err(|error| unreadable(&error))?;
    if crate::input::is_event_log(&mut input).map_err(|error| unreadable(&error))? {
        let reader = EventLogReader::new(input).map_err(|error| read_error(path, error))?;
        let mut analyzer = LogAnalyzer::new(reader.header());
        for entry in reader {
            analyzer.push(entry.map_err(|error| read_error(path, error))?);
        }
        return Ok(analyzer);
    }
    let capture = CaptureReader::new(input).map_err(|error| unreadable(&error))?;
    let mut converter = CaptureConverter::default();
    let mut start_ns = None;
    for record in capture {
        match record {
            Ok(record) => converter.push(&Packet::new(&record, *start_ns.get_or_insert(record.time_ns))),
            Err(error) => {
                warnln!("{}: {error}; only the packets before it are analysed", path.display());
                break;
            }
        }
    }
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let (header, entries) = converter.finish(&name);
    let mut analyzer = LogAnalyzer::new(&header);
    entries.for_each(|entry| analyzer.push_converted(entry));
    Ok(analyzer)
}

/// A value as a line of JSON.
fn json_line(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("plain fields make an object") + "\n"
}

/// Runs `softhca why`.
pub fn why(arguments: &WhyArguments) -> CommandResult {
    let text = match &arguments.file {
        Some(file) if !arguments.schema => {
            let question = Query { queue_pair: arguments.qp.clone(), wr_id: arguments.wr };
            let answer = read_any(file)?.diagnose(&question).map_err(bad_input)?;
            match arguments.json {
                true => answer.explanations.iter().map(json_line).collect(),
                false => answer.text(terminal::style().width) + "\n",
            }
        }
        _ => why::SCHEMA.to_owned(),
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `softhca lint`.
pub fn lint(arguments: &LintArguments) -> CommandResult {
    let linter = read_linter(&arguments.log).map_err(|error| read_error(&arguments.log, error))?;
    let format = |finding: &Finding| match arguments.json {
        true => json_line(finding),
        false => format!("{finding}\n\n"),
    };
    let mut text: String = linter.findings().map(format).collect();
    let [errors, warnings, notes] = linter.counts();
    if !arguments.json {
        text += &format!("{errors} errors, {warnings} warnings, {notes} notes\n");
    }
    print(&text)?;
    Ok(if errors + warnings > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn read_linter(log: &Path) -> Result<Linter, LogError> {
    let input = crate::input::open_with_progress(log);
    let input = input.map_err(|error| LogError { line: 0, cause: LogErrorKind::Io(error) })?;
    let reader = EventLogReader::new(input)?;
    let mut linter = Linter::new(reader.header());
    for entry in reader {
        linter.push(&entry?);
    }
    Ok(linter)
}
