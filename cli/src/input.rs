//! Input of a command: a file, a growing file or standard input.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

/// The interval between reads at the end of a growing file.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

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

/// Whether the input is an event log. Event logs are JSON; captures are not.
pub fn is_event_log(input: &mut dyn BufRead) -> io::Result<bool> {
    Ok(input.fill_buf()?.first() == Some(&b'{'))
}
