//! The output of a recording: a bounded buffer, and a thread that writes it.
//!
//! An engine thread never waits for a reader. A pipe, socket or terminal whose reader does not keep up ends its
//! recording. A file loses nothing: an engine thread waits for it, unless it accepts nothing at all for some time.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

/// The bytes that are passed to the thread at once.
const CHUNK: usize = 8 << 10;
/// The most bytes that wait to be written.
pub(crate) const MAX_WAITING: usize = 16 << 20;
/// How long a file may accept nothing before its recording ends.
const FILE_STALL_LIMIT: Duration = Duration::from_secs(5);
/// How long the end of a recording waits for a reader that reads nothing.
const READER_STALL_LIMIT: Duration = Duration::from_secs(1);

/// Writes to the buffer of a recording.
pub(crate) struct RecordWriter {
    buffer: Vec<u8>,
    output: RecordOutput,
}

/// The buffer and its state, which the writer and its thread share.
#[derive(Clone)]
pub(crate) struct RecordOutput {
    shared: Arc<Shared>,
}

struct Shared {
    is_file: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    chunks: VecDeque<Vec<u8>>,
    /// The bytes in `chunks` and in the chunk that the thread writes.
    waiting: usize,
    written: u64,
    /// Nothing follows.
    closed: bool,
    error: Option<io::Error>,
    /// The thread has closed the file.
    finished: bool,
}

impl State {
    fn fail(&mut self, error: io::Error) {
        self.chunks = VecDeque::new();
        self.waiting = 0;
        self.error.get_or_insert(error);
    }

    fn result(&self) -> io::Result<()> {
        match &self.error {
            Some(error) => Err(io::Error::new(error.kind(), error.to_string())),
            None => Ok(()),
        }
    }
}

impl RecordWriter {
    /// Starts the thread, which keeps `guard` until it has closed the file.
    pub fn start(file: File, guard: impl Send + 'static) -> io::Result<RecordWriter> {
        let is_file = file.metadata()?.is_file();
        let shared = Arc::new(Shared { is_file, state: Mutex::default(), changed: Condvar::new() });
        let output = RecordOutput { shared };
        let thread = output.clone();
        std::thread::Builder::new().name("recording".into()).spawn(move || {
            thread.write_chunks(file);
            drop(guard);
        })?;
        Ok(RecordWriter { buffer: Vec::with_capacity(CHUNK), output })
    }

    /// The other side of the buffer.
    pub fn output(&self) -> RecordOutput {
        self.output.clone()
    }

    /// Passes the bytes so far to the thread.
    fn pass_on(&mut self) -> io::Result<()> {
        let Shared { is_file, state, changed } = &*self.output.shared;
        let mut state = state.lock();
        while state.error.is_none() && state.waiting > 0 && state.waiting + self.buffer.len() > MAX_WAITING {
            let written = state.written;
            if !is_file {
                let text = format!("its reader does not keep up: {MAX_WAITING} bytes wait for it");
                state.fail(io::Error::new(io::ErrorKind::TimedOut, text));
            } else if changed.wait_for(&mut state, FILE_STALL_LIMIT).timed_out() && state.written == written {
                state.fail(file_stalled());
            }
        }
        state.result()?;
        if !self.buffer.is_empty() {
            state.waiting += self.buffer.len();
            state.chunks.push_back(std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK)));
            changed.notify_all();
        }
        Ok(())
    }
}

impl Write for RecordWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK {
            self.pass_on().inspect_err(|_| self.buffer = Vec::new())?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.pass_on()
    }
}

impl Drop for RecordWriter {
    fn drop(&mut self) {
        self.output.shared.state.lock().closed = true;
        self.output.shared.changed.notify_all();
    }
}

impl RecordOutput {
    /// The thread: writes until the writer is dropped and everything is written, or until an error.
    fn write_chunks(&self, mut file: File) {
        let Shared { state, changed, .. } = &*self.shared;
        loop {
            let mut locked = state.lock();
            while locked.error.is_none() && locked.chunks.is_empty() && !locked.closed {
                changed.wait(&mut locked);
            }
            let Some(chunk) = locked.chunks.pop_front() else { break };
            drop(locked);
            let written = write_all(&mut file, &chunk);
            let mut locked = state.lock();
            match written {
                Ok(()) if locked.error.is_none() => {
                    locked.waiting -= chunk.len();
                    locked.written += chunk.len() as u64;
                }
                Ok(()) => {}
                Err(error) => locked.fail(error),
            }
            changed.notify_all();
        }
        // The reader sees the end of the recording now.
        drop(file);
        state.lock().finished = true;
        changed.notify_all();
    }

    /// Waits until everything is written, after the writer was dropped. Returns the error that ended the recording.
    pub fn finish(&self) -> io::Result<()> {
        let Shared { is_file, state, changed } = &*self.shared;
        let limit = if *is_file { FILE_STALL_LIMIT } else { READER_STALL_LIMIT };
        let mut state = state.lock();
        while state.error.is_none() && !state.finished {
            let written = state.written;
            if changed.wait_for(&mut state, limit).timed_out() && state.written == written && !state.finished
            {
                let unread = io::Error::new(io::ErrorKind::TimedOut, "its reader does not read the rest");
                state.fail(if *is_file { file_stalled() } else { unread });
            }
        }
        state.result()
    }
}

fn file_stalled() -> io::Error {
    let text = format!("the file accepted nothing for {} seconds", FILE_STALL_LIMIT.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// Writes everything. A descriptor that does not block is waited for.
fn write_all(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        match file.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                use rustix::event::{PollFd, PollFlags, poll};
                let _ = poll(&mut [PollFd::new(&*file, PollFlags::OUT)], None);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::OwnedFd;

    fn pipe() -> (io::PipeReader, File) {
        let (reader, writer) = io::pipe().unwrap();
        (reader, File::from(OwnedFd::from(writer)))
    }

    #[test]
    fn a_reader_gets_everything_in_order() {
        let (mut reader, file) = pipe();
        let reading = std::thread::spawn(move || {
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            text
        });
        let mut writer = RecordWriter::start(file, ()).unwrap();
        let expected: String = (0..100_000).map(|number| format!("{number}\n")).collect();
        for line in expected.split_inclusive('\n') {
            writer.write_all(line.as_bytes()).unwrap();
        }
        writer.flush().unwrap();
        let output = writer.output();
        drop(writer);
        output.finish().unwrap();
        assert_eq!(reading.join().unwrap(), expected);
    }

    #[test]
    fn a_pipe_without_a_reader_ends_its_recording_and_closes() {
        let (mut reader, file) = pipe();
        let mut writer = RecordWriter::start(file, ()).unwrap();
        let line = [b'x'; 1000];
        let accepted = (0..2 * MAX_WAITING / line.len()).find(|_| writer.write_all(&line).is_err());
        let accepted = accepted.expect("the buffer is bounded") * line.len();
        assert!((MAX_WAITING - CHUNK..2 * MAX_WAITING).contains(&accepted), "{accepted}");
        let output = writer.output();
        drop(writer);
        let error = output.finish().unwrap_err();
        assert!(error.to_string().contains("keep up"), "{error}");
        // A reader that starts again gets what was in the pipe, and then its end.
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        assert!(!rest.is_empty() && rest.len() < MAX_WAITING, "{}", rest.len());
    }

    #[test]
    fn the_end_does_not_wait_for_a_reader_that_reads_nothing() {
        let (_reader, file) = pipe();
        let mut writer = RecordWriter::start(file, ()).unwrap();
        writer.write_all(&[0; 1 << 20]).unwrap();
        let output = writer.output();
        drop(writer);
        let error = output.finish().unwrap_err();
        assert!(error.to_string().contains("does not read"), "{error}");
    }
}
