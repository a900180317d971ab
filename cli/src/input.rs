//! Input of a command: a file, a growing file or standard input.

use crate::terminal;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

/// The interval between reads at the end of a growing file.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Reading a file of this length may take seconds.
const LARGE: u64 = 32 << 20;

/// A file that is followed past its end, as `tail -f` does.
struct FollowedFile(File);

impl Read for FollowedFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer) {
                Ok(0) if !buffer.is_empty() => std::thread::sleep(POLL_INTERVAL),
                read => return read,
            }
        }
    }
}

/// Opens a file, or standard input for `-`. With `follow`, reading continues as the file grows.
pub fn open(path: &Path, follow: bool) -> io::Result<Box<dyn BufRead>> {
    if path == Path::new("-") {
        return Ok(Box::new(BufReader::new(io::stdin())));
    }
    let file = File::open(path)?;
    Ok(match follow {
        true => Box::new(BufReader::new(FollowedFile(file))),
        false => Box::new(BufReader::new(file)),
    })
}

/// Opens a file, or standard input for `-`, that is read to its end before anything is printed. A large file has a
/// progress bar.
pub fn open_with_progress(path: &Path) -> io::Result<Box<dyn BufRead>> {
    let input = open(path, false)?;
    Ok(match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.len() >= LARGE => {
            let bar = terminal::progress_bar(
                metadata.len(),
                "{bar:40} {percent:>3} %, {elapsed} elapsed, {eta} remaining",
            );
            Box::new(bar.wrap_read(input))
        }
        _ => input,
    })
}

/// Whether the input is an event log. Event logs are JSON; captures are not.
pub fn is_event_log(input: &mut dyn BufRead) -> io::Result<bool> {
    Ok(input.fill_buf()?.first() == Some(&b'{'))
}
