//! `softhca why` and `softhca lint`: analysis of an event log or a capture.

use crate::{exit_code, terminal};
use softhca_trace::lint::{Finding, Linter, Severity};
use softhca_trace::log::CaptureConverter;
use softhca_trace::log::{Entry, Header, LogError, LogErrorKind};
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

/// Reads a log: creates the state from the header and feeds it every entry.
fn read_log<S>(
    path: &Path,
    start: impl FnOnce(&Header) -> S,
    mut each: impl FnMut(&mut S, Entry),
) -> Result<S, LogError> {
    let input = crate::input::open(path, false);
    let input = input.map_err(|error| LogError { line: 0, cause: LogErrorKind::Io(error) })?;
    let reader = EventLogReader::new(input)?;
    let mut state = start(reader.header());
    for entry in reader {
        each(&mut state, entry?);
    }
    Ok(state)
}

fn report_read_error(command: &str, path: &Path, error: &LogError) -> ExitCode {
    let file = path.display();
    match error {
        LogError { line: 0, cause } => {
            errln!("softhca {command}: {file}: {cause}; give the path of an event log");
        }
        error => errln!("softhca {command}: {file}: {error}"),
    }
    ExitCode::from(exit_code::BAD_INPUT)
}

/// Writes to standard output. A closed pipe is not an error.
fn print(command: &str, text: &str) -> Result<(), ExitCode> {
    let mut output = io::stdout().lock();
    match output.write_all(terminal::printable(text).as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            errln!("softhca {command}: cannot write the output: {error}");
            Err(ExitCode::from(exit_code::BAD_INPUT))
        }
        _ => Ok(()),
    }
}

/// Reads an event log, or a capture, of which damage is reported and what was read before it is analysed.
pub fn read_any(command: &str, path: &Path) -> Result<LogAnalyzer, ExitCode> {
    let unreadable = |error: &dyn std::fmt::Display| {
        errln!(
            "softhca {command}: {}: {error}; give the path of an event log or of a pcap or pcapng file",
            path.display()
        );
        ExitCode::from(exit_code::BAD_INPUT)
    };
    let mut input = crate::input::open(path, false).map_err(|error| unreadable(&error))?;
    if crate::input::is_event_log(&mut input).map_err(|error| unreadable(&error))? {
        let reader = EventLogReader::new(input).map_err(|error| report_read_error(command, path, &error))?;
        let mut analyzer = LogAnalyzer::new(reader.header());
        for entry in reader {
            analyzer.push(entry.map_err(|error| report_read_error(command, path, &error))?);
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
                errln!(
                    "softhca {command}: {}: {error}; only the packets before it are analysed",
                    path.display()
                );
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

/// Runs `softhca why`.
pub fn why(arguments: &WhyArguments) -> ExitCode {
    let Some(file) = arguments.file.as_ref().filter(|_| !arguments.schema) else {
        return print("why", &why::schema()).map_or_else(|code| code, |()| ExitCode::SUCCESS);
    };
    let analyzer = match read_any("why", file) {
        Ok(analyzer) => analyzer,
        Err(code) => return code,
    };
    let question = Query { queue_pair: arguments.qp.clone(), wr_id: arguments.wr };
    let format = |answer: &why::Diagnosis| match arguments.json {
        true => answer
            .explanations
            .iter()
            .map(|explanation| {
                serde_json::to_string(explanation).expect("plain fields make an object") + "\n"
            })
            .collect(),
        false => answer.text(terminal::style().width) + "\n",
    };
    match analyzer.diagnose(&question) {
        Ok(answer) => match print("why", &format(&answer)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(code) => code,
        },
        Err(why) => {
            errln!("softhca why: {why}");
            ExitCode::from(exit_code::BAD_INPUT)
        }
    }
}

/// Runs `softhca lint`.
pub fn lint(arguments: &LintArguments) -> ExitCode {
    let linter = match read_log(&arguments.log, Linter::new, |linter: &mut Linter, entry| linter.push(&entry))
    {
        Ok(linter) => linter,
        Err(error) => return report_read_error("lint", &arguments.log, &error),
    };
    let findings: Vec<&Finding> = linter.findings().collect();
    let mut text = String::new();
    for finding in &findings {
        if arguments.json {
            text += &(serde_json::to_string(finding).expect("plain fields make an object") + "\n");
        } else {
            text += &format!("{finding}\n\n");
        }
    }
    let of = |severity| findings.iter().filter(|finding| finding.pitfall.severity == severity).count();
    let counts = [of(Severity::Error), of(Severity::Warning), of(Severity::Note)];
    if !arguments.json {
        text += &format!("{} errors, {} warnings, {} notes\n", counts[0], counts[1], counts[2]);
    }
    match print("lint", &text) {
        Err(code) => code,
        Ok(()) if counts[0] + counts[1] > 0 => ExitCode::FAILURE,
        Ok(()) => ExitCode::SUCCESS,
    }
}
