//! `softhca report`: an HTML report from a run or a capture.

use crate::{exit_code, output, terminal};
use softhca_explorer::{OpenError, Page, Run};
use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `softhca report`.
#[derive(clap::Args)]
#[command(after_help = "The report is a single file that loads nothing from the network.\n\
                        Damaged input is shown up to the damage, and the report says so.")]
pub struct Arguments {
    /// Event log, folder of a run, or pcap or pcapng file
    run: PathBuf,
    /// Second run or capture to compare with
    other: Option<PathBuf>,
    /// File to write
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
}

/// The length of the progress bar of a stage.
const BAR_LENGTH: u64 = 1000;

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let bar = terminal::progress_bar(BAR_LENGTH, "{bar:40} {percent:>3} %, {elapsed} elapsed, {msg}");
    let page = build_page(arguments, &|stage, share| {
        bar.set_message(stage);
        bar.set_position((share * BAR_LENGTH as f64) as u64);
    });
    bar.finish_and_clear();
    let page = match page {
        Ok(page) => page,
        Err(error) => {
            errln!("softhca report: {error}");
            return ExitCode::from(exit_code::BAD_INPUT);
        }
    };
    let output = arguments.output.display();
    match write(page, arguments) {
        Ok(()) => {
            outln!("report: {output}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            errln!("softhca report: {output}: {error}; choose another file with -o");
            ExitCode::from(exit_code::BAD_INPUT)
        }
    }
}

fn build_page(arguments: &Arguments, report: &dyn Fn(&'static str, f64)) -> Result<Page, OpenError> {
    let open = |path: &PathBuf| {
        let run = Run::open_with_progress(path, report)?;
        for note in run.notes() {
            errln!("softhca report: {}: {note}", path.display());
        }
        Ok(run)
    };
    let page = Page::new(open(&arguments.run)?);
    Ok(match &arguments.other {
        Some(path) => page.with_run(open(path)?),
        None => page,
    })
}

fn write(page: Page, arguments: &Arguments) -> io::Result<()> {
    page.write(BufWriter::new(output::create_private(&arguments.output)?))
}
