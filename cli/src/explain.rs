//! `softhca why` and `softhca lint`: analysis of an event log.

use crate::{exit_code, terminal};
use softhca_trace::EventLogReader;
use softhca_trace::lint::{Finding, Linter, Severity};
use softhca_trace::log::{Entry, Header, LogError, LogErrorKind};
use softhca_trace::why::{LogAnalyzer, Query};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `softhca why`.
#[derive(clap::Args)]
#[command(
    after_help = "Without --wr, explains every work request that failed on its own (not flushed); if none failed, \
                        those that were delayed.\nExit code: 0; 2 if the log cannot be read or does not contain the \
                        queue pair or work request."
)]
pub struct WhyArguments {
    /// An event log (events.jsonl), or - for standard input
    log: PathBuf,
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

/// Runs `softhca why`.
pub fn why(arguments: &WhyArguments) -> ExitCode {
    let inquiry = match read_log(&arguments.log, LogAnalyzer::new, LogAnalyzer::push) {
        Ok(inquiry) => inquiry,
        Err(error) => return report_read_error("why", &arguments.log, &error),
    };
    let question = Query { queue_pair: arguments.qp.clone(), wr_id: arguments.wr };
    match inquiry.diagnose(&question) {
        Ok(answer) => match print("why", &(answer.text(terminal::style().width) + "\n")) {
            Ok(()) => ExitCode::SUCCESS,
            Err(code) => code,
        },
        Err(why) => {
            errln!("softhca why: {why}");
            ExitCode::from(exit_code::BAD_INPUT)
        }
    }
}

/// A finding in JSON.
#[derive(serde::Serialize)]
struct FindingJson<'a> {
    code: &'static str,
    severity: &'static str,
    time_ns: u64,
    times: u64,
    text: &'a str,
    fix: &'static str,
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
            let Finding { pitfall, time_ns, count: times, .. } = **finding;
            let severity = pitfall.severity.name();
            let object = FindingJson {
                code: pitfall.code,
                severity,
                time_ns,
                times,
                text: &finding.text,
                fix: pitfall.fix,
            };
            text += &serde_json::to_string(&object).expect("plain fields make an object");
            text.push('\n');
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
