//! The sockets to a daemon: calls and their replies over one, and over another news, which a thread reads.

use crate::Error;
use crate::backend::Result;
use crate::embedded::check_process;
use crate::memory::spawn_bystander;
use parking_lot::Mutex;
use softhca_queue::control::{
    Call, Folder, Frame, FrameReader, Hello, Message, News, PROTOCOL, Reply, Welcome, decode, encode,
    send_frame,
};
use softhca_udp::ProcessMark;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A greeted socket that nobody reads yet.
pub(crate) struct Greeted {
    stream: UnixStream,
    reader: FrameReader,
    process: ProcessMark,
    pub welcome: Welcome,
}

impl Greeted {
    /// Connects to the daemon with this name.
    pub fn connect(name: &str) -> Result<Greeted> {
        let folder = Folder::of_user();
        let path = folder.socket(name);
        let missing =
            |why: String| Error::NoDaemon { path: path.display().to_string(), why, is_absent: false };
        let absent = |why: &str| Error::NoDaemon {
            path: path.display().to_string(),
            why: why.into(),
            is_absent: true,
        };
        if folder.path().exists() {
            folder.check().map_err(|error| missing(error.to_string()))?;
        }
        let stream = match UnixStream::connect(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(absent("nobody listens there"));
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(absent("the one that listened there has died"));
            }
            result => result.map_err(|error| missing(error.to_string()))?,
        };
        Greeted::greet(stream, &path)
    }

    fn greet(stream: UnixStream, path: &Path) -> Result<Greeted> {
        let missing =
            |why: String| Error::NoDaemon { path: path.display().to_string(), why, is_absent: false };
        let fault = |error: io::Error| missing(error.to_string());
        match send(stream.as_fd(), &encode(&Hello::ours()), &[]) {
            // It may have said why before it closed.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            result => result.map_err(fault)?,
        }
        let mut reader = FrameReader::default();
        let Some(frame) = reader.next(stream.as_fd()).map_err(fault)? else {
            return Err(missing("it closed the connection: it may have as many clients as it allows".into()));
        };
        let answer: std::result::Result<Welcome, String> =
            decode(&frame.bytes).map_err(|error| missing(error.to_string()))?;
        let welcome = answer.map_err(missing)?;
        if welcome.protocol != PROTOCOL {
            let text = format!("it speaks protocol {}, this library {PROTOCOL}", welcome.protocol);
            return Err(missing(text));
        }
        Ok(Greeted { stream, reader, process: ProcessMark::current(), welcome })
    }

    /// Asks one thing, and skips news.
    pub fn ask(&mut self, call: &Call, passed: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>)> {
        check_process(&self.process)?;
        send(self.stream.as_fd(), &encode(call), passed).map_err(gone)?;
        loop {
            if let (Message::Reply(reply), descriptors) = self.next()? {
                return accepted(reply, descriptors);
            }
        }
    }

    /// The next message.
    pub fn next(&mut self) -> Result<(Message, Vec<OwnedFd>)> {
        check_process(&self.process)?;
        receive(&mut self.reader, self.stream.as_fd()).map_err(gone)
    }

    /// Has a thread read `news` from now on, which gives them to `listener`.
    pub fn listen(self, news: UnixStream, listener: Arc<dyn Listener>) -> Result<Line> {
        let Greeted { stream, reader, process, .. } = self;
        let system =
            |source| Error::System { what: "starting the thread that reads the daemon's news", source };
        let thread = spawn_bystander("softhca news", {
            let news = news.try_clone().map_err(system)?;
            move || {
                let mut reader = FrameReader::default();
                while let Ok((message, _)) = receive(&mut reader, news.as_fd()) {
                    if let Message::News(news) = message {
                        listener.news(news);
                    }
                }
                listener.gone();
            }
        })
        .map_err(system)?;
        Ok(Line { stream, reader: Mutex::new(reader), news, process, thread: Some(thread) })
    }
}

/// Hears what the daemon tells unasked.
pub(crate) trait Listener: Send + Sync {
    fn news(&self, news: News);
    /// The daemon is gone, or let us go.
    fn gone(&self);
}

/// A connection that any thread may call over.
pub(crate) struct Line {
    stream: UnixStream,
    /// One call at a time: whoever calls reads the answer.
    reader: Mutex<FrameReader>,
    news: UnixStream,
    process: ProcessMark,
    thread: Option<JoinHandle<()>>,
}

impl Line {
    /// Refuses in a child: the connection is the parent's.
    pub fn check_process(&self) -> Result<()> {
        check_process(&self.process)
    }

    /// Asks one thing.
    pub fn call(&self, call: &Call, passed: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>)> {
        self.check_process()?;
        let mut reader = self.reader.lock();
        send(self.stream.as_fd(), &encode(call), passed).map_err(gone)?;
        loop {
            if let (Message::Reply(reply), descriptors) =
                receive(&mut reader, self.stream.as_fd()).map_err(gone)?
            {
                return accepted(reply, descriptors);
            }
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if !self.process.is_here() {
            // The parent's connection, and a thread that does not exist here.
            std::mem::forget(self.thread.take());
            return;
        }
        for stream in [&self.stream, &self.news] {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

fn gone(error: io::Error) -> Error {
    Error::DeviceGone { why: error.to_string() }
}

fn accepted(reply: Reply, descriptors: Vec<OwnedFd>) -> Result<(Reply, Vec<OwnedFd>)> {
    match reply {
        Reply::Refused { errno, message } => Err(Error::Refused { errno, message }),
        reply => Ok((reply, descriptors)),
    }
}

fn receive(reader: &mut FrameReader, stream: BorrowedFd<'_>) -> io::Result<(Message, Vec<OwnedFd>)> {
    match reader.next(stream)? {
        Some(Frame { bytes, descriptors }) => Ok((decode(&bytes)?, descriptors)),
        None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
    }
}

fn send(stream: BorrowedFd<'_>, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let frame = Frame::lay_out(message, descriptors.len());
    let mut done = 0;
    while done < frame.len() {
        match send_frame(stream, &frame, done, descriptors) {
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
