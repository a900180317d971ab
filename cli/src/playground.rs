//! `softhca playground`: a page in which scenarios are edited and run.

use crate::EXIT_BAD_INPUT;
use softhca_explorer::{ExampleScenario, Page};
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What `softhca playground` is asked for.
#[derive(clap::Args)]
#[command(after_help = "The page has the card itself in it, as WebAssembly: one file, nothing is fetched.")]
pub struct Arguments {
    /// Scenarios to choose from, before those of the lessons
    scenarios: Vec<PathBuf>,
    /// The page to write
    #[arg(short, long, value_name = "FILE", default_value = "playground.html")]
    output: PathBuf,
}

/// Names of the library, each with its file.
macro_rules! library {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("../../scenarios/library/", $name, ".toml")))),*]
    };
}

/// What every page has: the scenarios that the lessons lead to. The first is there to begin with.
const LESSON_SCENARIOS: &[(&str, &str)] = &library![
    "fatal-lost-write-middle" "ping-pong-latency" "completion-held" "ud-lost-datagram" "uc-lost-middle"
    "gbn-lost-write-middle" "gb0-lost-write-middle" "gbn-lost-read-response" "duplicate-atomic"
    "cm-connect" "cm-req" "cm-reject" "multicast-members" "multicast-lost-branch" "access-wrong-rkey" "access-out-of-bounds" "receive-too-small" "rnr-recovers" "fatal-flush-order"
    "ecn-marks-and-cnps" "dcqcn-convergence" "incast-pfc" "incast-without-pfc" "victim-flow"
    "gbn-random-loss" "livelock-go-back-0" "livelock-go-back-n"
];

const WASM_MODULE: &str = "softhca_playground.wasm";
const BUILD_COMMAND: &str =
    "cargo build --profile playground --target wasm32-unknown-unknown -p softhca-playground";

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let refuse = |what: &Path, why: &dyn std::fmt::Display| {
        eprintln!("softhca playground: {}: {why}", what.display());
        ExitCode::from(EXIT_BAD_INPUT)
    };
    let mut scenarios = Vec::new();
    for path in &arguments.scenarios {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        match fs::read_to_string(path) {
            Ok(text) => scenarios.push(ExampleScenario { name, text }),
            Err(error) => return refuse(path, &error),
        }
    }
    for (name, text) in LESSON_SCENARIOS {
        if scenarios.iter().all(|example| example.name != *name) {
            scenarios.push(ExampleScenario { name: (*name).into(), text: (*text).into() });
        }
    }
    let Some(module) = candidate_paths().into_iter().find(|place| place.is_file()) else {
        return refuse(
            Path::new(WASM_MODULE),
            &format_args!(
                "the card for browsers is not beside this command; `rustup target add wasm32-unknown-unknown`, then `{BUILD_COMMAND}` makes it"
            ),
        );
    };
    let module = match fs::read(&module) {
        Ok(bytes) => bytes,
        Err(error) => return refuse(&module, &error),
    };
    match write(Page::playground(module, scenarios), &arguments.output) {
        Ok(()) => {
            say!("playground: {}", arguments.output.display());
            ExitCode::SUCCESS
        }
        Err(error) => refuse(&arguments.output, &error),
    }
}

/// Where the module may be: beside the command, where a package puts it, and where cargo puts it.
fn candidate_paths() -> Vec<PathBuf> {
    let Some(folder) = std::env::current_exe().ok().and_then(|command| Some(command.parent()?.to_owned()))
    else {
        return Vec::new();
    };
    [".", "../lib/softhca", "../wasm32-unknown-unknown/playground"]
        .map(|place| folder.join(place).join(WASM_MODULE))
        .into()
}

fn write(page: Page, output: &Path) -> io::Result<()> {
    page.write(BufWriter::new(File::create(output)?))
}
