//! `softhca explore`: a run that goes on, in a browser.

use crate::BAD_INPUT;
use softhca_explorer::{Feed, LiveServer};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// What `softhca explore` is asked for.
#[derive(clap::Args)]
#[command(
    after_help = "The page is served on 127.0.0.1 only, to whoever has the link that is printed, and it cannot change anything.\n\
                        End it with Ctrl+C."
)]
pub struct Arguments {
    /// An event log; it may still be written to, or be a pipe
    log: PathBuf,
    /// The port; a free one unless said otherwise
    #[arg(long, value_name = "N", default_value_t = 0)]
    port: u16,
}

/// How often a file is looked at for more.
const PAUSE: Duration = Duration::from_millis(50);

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let log = &arguments.log;
    match serve(log, arguments.port) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("softhca explore: {}: {error}; give the path of an event log", log.display());
            ExitCode::from(BAD_INPUT)
        }
    }
}

fn serve(log: &Path, port: u16) -> io::Result<()> {
    let file = File::open(log)?;
    let name = log.file_name().unwrap_or(log.as_os_str()).to_string_lossy().into_owned();
    let feed = Feed::default();
    let server = LiveServer::bind(port, &token()?, &name, feed.clone())?;
    println!("explore: {}", server.link());
    let is_file = file.metadata()?.is_file();
    std::thread::spawn(move || {
        if let Err(error) = follow(BufReader::new(file), is_file, &feed) {
            eprintln!("softhca explore: {error}");
        }
        feed.end();
    });
    server.serve()
}

/// Hands every whole line on. A file may grow, so its end is no end; that of a pipe is.
fn follow(mut input: impl BufRead, may_grow: bool, feed: &Feed) -> io::Result<()> {
    let mut line = String::new();
    loop {
        input.read_line(&mut line)?;
        match line.strip_suffix('\n') {
            Some(whole) => {
                if !feed.push(whole) {
                    return Err(io::Error::other(
                        "the log is longer than a browser can hold; what comes now is not shown",
                    ));
                }
                line.clear();
            }
            None if may_grow => std::thread::sleep(PAUSE),
            None => return Ok(()),
        }
    }
}

/// A secret that nobody guesses.
fn token() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
