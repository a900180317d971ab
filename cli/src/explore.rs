//! `softhca explore`: a running daemon or a growing event log in a browser.

use crate::exit_code::{CommandResult, bad_input};
use softhca_explorer::{EventFeed, LiveServer};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
#[cfg(target_os = "linux")]
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Arguments of `softhca explore`.
#[derive(clap::Args)]
#[command(
    after_help = "Serves the page on 127.0.0.1 only. The printed link contains a secret token. The page is read-only.\n\
                        Stop it with Ctrl+C."
)]
pub struct Arguments {
    /// Event log, which may still grow or be a pipe [default: the events of a running daemon from now on]
    log: Option<PathBuf>,
    /// Name of the daemon [default: SOFTHCA_DAEMON, or the default daemon]
    #[cfg(target_os = "linux")]
    #[arg(long, conflicts_with = "log")]
    name: Option<String>,
    /// TCP port; 0 for any free port
    #[arg(long, value_name = "N", default_value_t = 0)]
    port: u16,
}

/// The interval between reads at the end of a file.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    let served = match &arguments.log {
        Some(log) => follow_file(log, arguments.port)
            .map_err(|error| format!("{}: {error}; give the path of an event log", log.display())),
        None => follow_daemon(arguments),
    };
    served.map_err(bad_input)?;
    Ok(ExitCode::SUCCESS)
}

fn follow_file(log: &Path, port: u16) -> io::Result<()> {
    let file = File::open(log)?;
    let name = log.file_name().unwrap_or(log.as_os_str()).to_string_lossy().into_owned();
    let may_grow = file.metadata()?.is_file();
    serve(&name, port, move |feed| follow(BufReader::new(file), may_grow, feed))
}

/// Has a daemon write its event log to a pipe for as long as the connection lasts.
#[cfg(target_os = "linux")]
fn follow_daemon(arguments: &Arguments) -> Result<(), String> {
    let mut control =
        softhca::DaemonControl::connect(arguments.name.as_deref()).map_err(|error| error.to_string())?;
    let (reader, writer) = io::pipe().map_err(|error| error.to_string())?;
    control.start_recording(None, Some(writer.as_fd())).map_err(|error| error.to_string())?;
    drop(writer);
    let name = arguments.name.as_deref().unwrap_or("the daemon");
    serve(name, arguments.port, move |feed| {
        follow(BufReader::new(reader), false, feed)?;
        // The pipe ends before the connection if the daemon ended the recording.
        control.stop_recording().map_err(|error| {
            io::Error::other(format!("the daemon ended the recording; later events are not shown: {error}"))
        })
    })
    .map_err(|error| error.to_string())
}

#[cfg(not(target_os = "linux"))]
fn follow_daemon(_: &Arguments) -> Result<(), String> {
    Err("daemons run on Linux only; give the path of an event log".into())
}

/// Serves a log while `follow` reads it.
fn serve(
    name: &str,
    port: u16,
    follow: impl FnOnce(&EventFeed) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    let feed = EventFeed::default();
    let server = LiveServer::bind(port, &token(), name, feed.clone())?;
    // A closed standard output does not stop the server.
    let _ = writeln!(io::stdout(), "explore: {}", server.url());
    std::thread::spawn(move || {
        if let Err(error) = follow(&feed) {
            warnln!("{error}");
        }
        feed.end();
    });
    server.serve()
}

/// Feeds complete lines to the page. The end of a pipe ends the log; a file may grow.
fn follow(mut input: impl BufRead, may_grow: bool, feed: &EventFeed) -> io::Result<()> {
    let mut line = String::new();
    loop {
        input.read_line(&mut line)?;
        match line.strip_suffix('\n') {
            Some(whole) => {
                if !feed.push(whole) {
                    return Err(io::Error::other(
                        "the log is too long for a browser; later events are not shown",
                    ));
                }
                line.clear();
            }
            None if may_grow => std::thread::sleep(POLL_INTERVAL),
            None => return Ok(()),
        }
    }
}

/// A random secret.
fn token() -> String {
    softhca_udp::random_words().map(|word| format!("{word:016x}")).concat()
}
