//! `softhca report`: a run as a page.

use crate::EXIT_BAD_INPUT;
use softhca_explorer::{OpenError, Page, Run};
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::process::ExitCode;

/// What `softhca report` is asked for.
#[derive(clap::Args)]
#[command(after_help = "The page is one file that needs no network: open it from disk.\n\
                        What is broken half way is shown up to there, and the page says so.")]
pub struct Arguments {
    /// An event log, the folder of a run, or a pcap or pcapng file
    run: PathBuf,
    /// Another one to stand beside it
    other: Option<PathBuf>,
    /// The page to write
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let page = match build_page(arguments) {
        Ok(page) => page,
        Err(error) => {
            eprintln!("softhca report: {error}");
            return ExitCode::from(EXIT_BAD_INPUT);
        }
    };
    let output = arguments.output.display();
    match write(page, arguments) {
        Ok(()) => {
            say!("report: {output}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("softhca report: {output}: {error}; choose another place with -o");
            ExitCode::from(EXIT_BAD_INPUT)
        }
    }
}

fn build_page(arguments: &Arguments) -> Result<Page, OpenError> {
    let open = |path: &PathBuf| {
        let run = Run::open(path)?;
        for note in run.notes() {
            eprintln!("softhca report: {}: {note}", path.display());
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
    page.write(BufWriter::new(File::create(&arguments.output)?))
}
