//! `softhca playground`: an HTML page that edits and runs scenarios.

use crate::exit_code::{CommandResult, bad_input_in};
use flate2::read::GzDecoder;
use softhca_explorer::{ExampleScenario, Page};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Arguments of `softhca playground`.
#[derive(clap::Args)]
#[command(
    after_help = "The page is a single file. It contains the emulator as WebAssembly and loads nothing from the network."
)]
pub struct Arguments {
    /// Scenario files to offer before those of the lessons
    scenarios: Vec<PathBuf>,
    /// File to write
    #[arg(short, long, value_name = "FILE", default_value = "playground.html")]
    output: PathBuf,
}

const WASM_MODULE: &str = "softhca_playground.wasm";
/// What is added to the name in packages.
const COMPRESSED: &str = ".gz";
/// The largest module that is read. It has 4 MB.
const MAX_MODULE: u64 = 64 << 20;
const BUILD_COMMAND: &str =
    "cargo build --profile playground --target wasm32-unknown-unknown -p softhca-playground";

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    let failed = |path: &Path| bad_input_in(path.display().to_string());
    let mut scenarios = Vec::new();
    for path in &arguments.scenarios {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(path).map_err(failed(path))?;
        scenarios.push(ExampleScenario { name, text, lesson: 0 });
    }
    for (lesson, name, text) in softhca_scenarios::LESSON_SCENARIOS {
        if scenarios.iter().all(|example| example.name != *name) {
            scenarios.push(ExampleScenario { name: (*name).into(), text: (*text).into(), lesson: *lesson });
        }
    }
    let module = find_module().or_else(|| build_module().and_then(|()| find_module()));
    let module = module.ok_or_else(|| {
        io::Error::other(format!(
            "not found next to the executable; build it with `rustup target add wasm32-unknown-unknown` and `{BUILD_COMMAND}`"
        ))
    });
    let module = module.map_err(failed(Path::new(WASM_MODULE)))?;
    let module = read_module(&module).map_err(failed(&module))?;
    let schema = serde_json::from_str(softhca_scenarios::SCHEMA).expect("a schema is JSON");
    write(Page::playground(module, scenarios, schema), &arguments.output)
        .map_err(failed(&arguments.output))?;
    outln!("playground: {}", arguments.output.display());
    Ok(ExitCode::SUCCESS)
}

/// The folder of the executable.
fn own_folder() -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.parent()?.to_owned())
}

/// The module: next to the executable, compressed in an installed package, or in cargo's target folder.
fn find_module() -> Option<PathBuf> {
    let folder = own_folder()?;
    [(".", ""), ("../lib/softhca", COMPRESSED), ("../wasm32-unknown-unknown/playground", "")]
        .map(|(path, suffix)| folder.join(path).join(format!("{WASM_MODULE}{suffix}")))
        .into_iter()
        .find(|path| path.is_file())
}

fn read_module(path: &Path) -> io::Result<Vec<u8>> {
    let mut module = Vec::new();
    match path.extension().is_some_and(|extension| extension == "gz") {
        true => GzDecoder::new(File::open(path)?).take(MAX_MODULE).read_to_end(&mut module)?,
        false => File::open(path)?.take(MAX_MODULE).read_to_end(&mut module)?,
    };
    Ok(module)
}

/// Builds the module if this executable is in the target folder of its source tree.
fn build_module() -> Option<()> {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    let target = own_folder()?.parent()?.to_owned();
    if !target.starts_with(tree) || !tree.join("explorer/playground/Cargo.toml").is_file() {
        return None;
    }
    warnln!("building the WebAssembly module: {BUILD_COMMAND}");
    let mut command = Command::new("cargo");
    command.args(BUILD_COMMAND.split(' ').skip(1)).arg("--target-dir").arg(target).current_dir(tree);
    command.status().ok()?.success().then_some(())
}

fn write(page: Page, output: &Path) -> io::Result<()> {
    page.write(BufWriter::new(File::create(output)?))
}
