//! `softhca explore`: a run that goes on, in a browser.

use crate::EXIT_BAD_INPUT;
use softhca_explorer::{EventFeed, LiveServer};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
#[cfg(target_os = "linux")]
use std::os::fd::AsFd;
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
    /// An event log; it may still be written to, or be a pipe. Without one, the cards of a daemon from now on
    log: Option<PathBuf>,
    /// The daemon's name; without one, SOFTHCA_DAEMON or the default one
    #[cfg(target_os = "linux")]
    #[arg(long, conflicts_with = "log")]
    name: Option<String>,
    /// The port; a free one unless said otherwise
    #[arg(long, value_name = "N", default_value_t = 0)]
    port: u16,
}

/// How often a file is looked at for more.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let served = match &arguments.log {
        Some(log) => follow_file(log, arguments.port)
            .map_err(|error| format!("{}: {error}; give the path of an event log", log.display())),
        None => follow_daemon(arguments),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("softhca explore: {error}");
            ExitCode::from(EXIT_BAD_INPUT)
        }
    }
}

fn follow_file(log: &Path, port: u16) -> io::Result<()> {
    let file = File::open(log)?;
    let name = log.file_name().unwrap_or(log.as_os_str()).to_string_lossy().into_owned();
    let may_grow = file.metadata()?.is_file();
    serve(&name, BufReader::new(file), may_grow, port)
}

/// Asks a daemon for its event log through a pipe. It writes as long as the connection lasts.
#[cfg(target_os = "linux")]
fn follow_daemon(arguments: &Arguments) -> Result<(), String> {
    let mut control =
        softhca::DaemonControl::connect(arguments.name.as_deref()).map_err(|error| error.to_string())?;
    let (reader, writer) = io::pipe().map_err(|error| error.to_string())?;
    control.start_recording(None, Some(writer.as_fd())).map_err(|error| error.to_string())?;
    drop(writer);
    let name = arguments.name.as_deref().unwrap_or("the daemon");
    serve(name, BufReader::new(reader), false, arguments.port).map_err(|error| error.to_string())
}

#[cfg(not(target_os = "linux"))]
fn follow_daemon(_: &Arguments) -> Result<(), String> {
    Err("daemons run on Linux only; give the path of an event log".into())
}

/// Serves a log while it is read.
fn serve(name: &str, log: impl BufRead + Send + 'static, may_grow: bool, port: u16) -> io::Result<()> {
    let feed = EventFeed::default();
    let server = LiveServer::bind(port, &token()?, name, feed.clone())?;
    // Whoever reads this may go: the page is served all the same.
    let _ = writeln!(io::stdout(), "explore: {}", server.url());
    std::thread::spawn(move || {
        if let Err(error) = follow(log, may_grow, &feed) {
            eprintln!("softhca explore: {error}");
        }
        feed.end();
    });
    server.serve()
}

/// Hands every whole line on. A file may grow, so its end is no end; that of a pipe is.
fn follow(mut input: impl BufRead, may_grow: bool, feed: &EventFeed) -> io::Result<()> {
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
            None if may_grow => std::thread::sleep(POLL_INTERVAL),
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
