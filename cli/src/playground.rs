//! `softhca playground`: a page in which scenarios are edited and run.

use crate::BAD_INPUT;
use softhca_explorer::Page;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What `softhca playground` is asked for.
#[derive(clap::Args)]
#[command(after_help = "The page has the card itself in it, as WebAssembly: one file, nothing is fetched.")]
pub struct Arguments {
    /// The scenario to begin with
    scenario: Option<PathBuf>,
    /// The page to write
    #[arg(short, long, value_name = "FILE", default_value = "playground.html")]
    output: PathBuf,
}

/// What there is to edit without a file.
const FIRST: &str = include_str!("../../scenarios/library/fatal-lost-write-middle.toml");
const MODULE: &str = "softhca_playground.wasm";
const BUILD: &str = "cargo build --profile playground --target wasm32-unknown-unknown -p softhca-playground";

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let refuse = |what: &Path, why: &dyn std::fmt::Display| {
        eprintln!("softhca playground: {}: {why}", what.display());
        ExitCode::from(BAD_INPUT)
    };
    let scenario = match arguments.scenario.as_ref().map(fs::read_to_string).transpose() {
        Ok(text) => text.unwrap_or_else(|| FIRST.into()),
        Err(error) => return refuse(arguments.scenario.as_deref().unwrap_or(Path::new("")), &error),
    };
    let Some(module) = places().into_iter().find(|place| place.is_file()) else {
        return refuse(Path::new(MODULE), &format_args!("it is not beside the command; build it with `{BUILD}`"));
    };
    let module = match fs::read(&module) {
        Ok(bytes) => bytes,
        Err(error) => return refuse(&module, &error),
    };
    match write(Page::playground(module, &scenario), &arguments.output) {
        Ok(()) => {
            println!("playground: {}", arguments.output.display());
            ExitCode::SUCCESS
        }
        Err(error) => refuse(&arguments.output, &error),
    }
}

/// Where the module may be: beside the command, where a package puts it, and where cargo puts it.
fn places() -> Vec<PathBuf> {
    let Some(folder) = std::env::current_exe().ok().and_then(|command| Some(command.parent()?.to_owned())) else {
        return Vec::new();
    };
    [".", "../lib/softhca", "../wasm32-unknown-unknown/playground"].map(|place| folder.join(place).join(MODULE)).into()
}

fn write(page: Page, output: &Path) -> io::Result<()> {
    page.write(BufWriter::new(File::create(output)?))
}
