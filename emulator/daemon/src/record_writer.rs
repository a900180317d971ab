//! The output of a recording: a bounded buffer, and a thread that writes it.
//!
//! A pipe, socket or terminal whose reader does not keep up ends its recording. A file loses nothing: an engine thread
//! waits for it, unless it accepts nothing at all for some time. The reader of a stream of events is waited for once.
//! If it has still not read half of the buffer by then, the writer refuses events until it has read everything.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

/// The bytes that are passed to the thread at once.
const CHUNK: usize = 8 << 10;
/// The most bytes that wait to be written, and those of a stream of events.
const MAX_WAITING: usize = 16 << 20;
const MAX_STREAM_WAITING: usize = 4 << 20;
/// How long a file may accept nothing before its recording ends, and how long the reader of a stream is waited for.
const STALL_LIMIT: Duration = Duration::from_secs(5);
/// How long the end of a recording waits for a reader that reads nothing.
const READER_STALL_LIMIT: Duration = Duration::from_secs(1);

/// How a writer treats a full buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WhenFull {
    Wait,
    End,
    Refuse,
}

impl WhenFull {
    const fn max_waiting(self) -> usize {
        if let WhenFull::Refuse = self { MAX_STREAM_WAITING } else { MAX_WAITING }
    }
}

/// Writes to the buffer of a recording.
pub(crate) struct RecordWriter {
    buffer: Vec<u8>,
    output: RecordOutput,
    /// The reader of a stream of events did not keep up.
    refuses: bool,
}

/// The buffer and its state, which the writer and its thread share.
#[derive(Clone)]
pub(crate) struct RecordOutput {
    shared: Arc<Shared>,
}

struct Shared {
    when_full: WhenFull,
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
        let when_full = if file.metadata()?.is_file() { WhenFull::Wait } else { WhenFull::End };
        RecordWriter::start_with(file, guard, when_full)
    }

    /// Writes to a stream of events, which consists of whole writes. A write that is refused is
    /// [`io::ErrorKind::WouldBlock`].
    pub fn start_stream(file: File, guard: impl Send + 'static) -> io::Result<RecordWriter> {
        RecordWriter::start_with(file, guard, WhenFull::Refuse)
    }

    fn start_with(file: File, guard: impl Send + 'static, when_full: WhenFull) -> io::Result<RecordWriter> {
        let shared = Arc::new(Shared { when_full, state: Mutex::default(), changed: Condvar::new() });
        let output = RecordOutput { shared };
        let thread = output.clone();
        std::thread::Builder::new().name("recording".into()).spawn(move || {
            thread.write_chunks(file);
            drop(guard);
        })?;
        Ok(RecordWriter { buffer: Vec::with_capacity(CHUNK), output, refuses: false })
    }

    /// The other side of the buffer.
    pub fn output(&self) -> RecordOutput {
        self.output.clone()
    }

    /// Passes the bytes so far to the thread.
    fn pass_on(&mut self) -> io::Result<()> {
        let Shared { when_full, state, changed } = &*self.output.shared;
        let max_waiting = when_full.max_waiting();
        let mut state = state.lock();
        self.refuses &= state.waiting > 0;
        while state.error.is_none() && state.waiting > 0 && state.waiting + self.buffer.len() > max_waiting {
            let written = state.written;
            match when_full {
                WhenFull::Wait => {
                    if changed.wait_for(&mut state, STALL_LIMIT).timed_out() && state.written == written {
                        state.fail(file_stalled());
                    }
                }
                WhenFull::End => {
                    let text = format!("its reader does not keep up: {MAX_WAITING} bytes wait for it");
                    state.fail(io::Error::new(io::ErrorKind::TimedOut, text));
                }
                WhenFull::Refuse if self.refuses => break,
                WhenFull::Refuse => {
                    let is_full = |state: &mut State| state.waiting > max_waiting / 2;
                    self.refuses = changed.wait_while_for(&mut state, is_full, STALL_LIMIT).timed_out();
                }
            }
        }
        state.result()?;
        if self.refuses {
            return Err(io::ErrorKind::WouldBlock.into());
        }
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
        if self.buffer.len() >= CHUNK {
            self.pass_on().inspect_err(|error| {
                // Accepted events of a stream are kept.
                if error.kind() != io::ErrorKind::WouldBlock {
                    self.buffer = Vec::new();
                }
            })?;
        }
        self.buffer.extend_from_slice(bytes);
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
        let Shared { when_full, state, changed } = &*self.shared;
        let is_file = *when_full == WhenFull::Wait;
        let limit = if is_file { STALL_LIMIT } else { READER_STALL_LIMIT };
        let mut state = state.lock();
        while state.error.is_none() && !state.finished {
            let written = state.written;
            if changed.wait_for(&mut state, limit).timed_out() && state.written == written && !state.finished
            {
                let unread = io::Error::new(io::ErrorKind::TimedOut, "its reader does not read the rest");
                state.fail(if is_file { file_stalled() } else { unread });
            }
        }
        state.result()
    }
}

fn file_stalled() -> io::Error {
    let text = format!("the file accepted nothing for {} seconds", STALL_LIMIT.as_secs());
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
    fn a_stream_without_a_reader_refuses_and_accepts_again_when_all_is_read() {
        let (mut reader, file) = pipe();
        let mut writer = RecordWriter::start_stream(file, ()).unwrap();
        let item = [b'x'; 1000];
        let mut accepted = 0;
        let refusal = loop {
            match writer.write_all(&item) {
                Ok(()) => accepted += item.len(),
                Err(error) => break error,
            }
            assert!(accepted < 2 * MAX_STREAM_WAITING, "the buffer is bounded");
        };
        assert_eq!(refusal.kind(), io::ErrorKind::WouldBlock);
        assert!(writer.write_all(&item).is_err(), "it is waited for once");
        // The writer keeps what it has accepted and not passed on.
        let kept = CHUNK.next_multiple_of(item.len());
        let mut read = vec![0; accepted - kept];
        reader.read_exact(&mut read).unwrap();
        // The thread notes the end of its last write after the reader has the bytes.
        while writer.write_all(&item).is_err() {
            std::thread::yield_now();
        }
        writer.flush().unwrap();
        let output = writer.output();
        drop(writer);
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        output.finish().unwrap();
        assert_eq!(rest.len(), kept + item.len(), "what was accepted is not lost");
    }

    #[test]
    fn the_end_does_not_wait_for_a_reader_that_reads_nothing() {
        let (_reader, file) = pipe();
        let mut writer = RecordWriter::start(file, ()).unwrap();
        writer.write_all(&[0; 1 << 20]).unwrap();
        writer.flush().unwrap();
        let output = writer.output();
        drop(writer);
        let error = output.finish().unwrap_err();
        assert!(error.to_string().contains("does not read"), "{error}");
    }
}
