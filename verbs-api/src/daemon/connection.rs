//! The sockets to a daemon: requests and their responses over one, and over another notifications, which a thread reads.

use crate::Error;
use crate::backend::{Result, check_process};
use parking_lot::Mutex;
use softhca_control::{
    FramedMessage, Hello, Message, MessageReader, Notification, PROTOCOL_VERSION, Request, Response,
    RuntimeDir, Welcome, decode, encode, send_message,
};
use softhca_udp::{ProcessIdentity, SignalsBlocked};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A greeted socket that nobody reads yet.
pub(crate) struct ControlSocket {
    stream: UnixStream,
    reader: MessageReader,
    process: ProcessIdentity,
    pub welcome: Welcome,
}

impl ControlSocket {
    /// Connects to the daemon with this name.
    pub fn connect(name: &str) -> Result<ControlSocket> {
        ControlSocket::connect_and_request(name, None)
    }

    /// Connects to the daemon with this name, and sends it a request before it has accepted the connection: one wait for
    /// both. [`ControlSocket::response`] returns the response.
    pub fn connect_and_request(
        name: &str,
        request: Option<(&Request, &[BorrowedFd<'_>])>,
    ) -> Result<ControlSocket> {
        let folder = RuntimeDir::for_user();
        let path = folder.socket(name);
        let missing = |error: io::Error| {
            let absent = match error.kind() {
                io::ErrorKind::NotFound => Some("nobody listens there".into()),
                io::ErrorKind::ConnectionRefused => Some("the one that listened there has died".into()),
                _ => None,
            };
            let (path, is_absent) = (path.display().to_string(), absent.is_some());
            Error::NoDaemon { path, why: absent.unwrap_or_else(|| error.to_string()), is_absent }
        };
        if folder.path().exists() {
            folder.check().map_err(missing)?;
        }
        let stream = UnixStream::connect(&path).map_err(missing)?;
        ControlSocket::handshake(stream, &path, request)
    }

    fn handshake(
        stream: UnixStream,
        path: &Path,
        request: Option<(&Request, &[BorrowedFd<'_>])>,
    ) -> Result<ControlSocket> {
        let refused = |why: String| Error::DaemonRefused { path: path.display().to_string(), why };
        let fault = |error: io::Error| refused(error.to_string());
        let mut frames = FramedMessage::frame(&encode(&Hello::current()), 0);
        let mut passed: &[BorrowedFd<'_>] = &[];
        if let Some((request, descriptors)) = request {
            frames.extend(FramedMessage::frame(&encode(request), descriptors.len()));
            passed = descriptors;
        }
        match send_frames(stream.as_fd(), &frames, passed) {
            // It may have said why before it closed.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            result => result.map_err(fault)?,
        }
        let mut reader = MessageReader::default();
        let Some(frame) = reader.read(stream.as_fd()).map_err(fault)? else {
            return Err(refused("it closed the connection without a reason".into()));
        };
        let answer: std::result::Result<Welcome, String> =
            decode(&frame.bytes).map_err(|error| refused(error.to_string()))?;
        let welcome = answer.map_err(refused)?;
        if welcome.protocol != PROTOCOL_VERSION {
            let text = format!("it speaks protocol {}, this library {PROTOCOL_VERSION}", welcome.protocol);
            return Err(refused(text));
        }
        Ok(ControlSocket { stream, reader, process: ProcessIdentity::current(), welcome })
    }

    /// Sends a request, and waits for its response.
    pub fn call(&mut self, call: &Request, passed: &[BorrowedFd<'_>]) -> Result<(Response, Vec<OwnedFd>)> {
        check_process(&self.process)?;
        send(self.stream.as_fd(), &encode(call), passed).map_err(device_gone)?;
        self.response()
    }

    /// Sends a request. [`ControlSocket::response`] returns the response.
    pub fn send(&mut self, call: &Request) -> Result<()> {
        check_process(&self.process)?;
        send(self.stream.as_fd(), &encode(call), &[]).map_err(device_gone)
    }

    /// Waits for the response to the request that was sent. Notifications before it are skipped.
    pub fn response(&mut self) -> Result<(Response, Vec<OwnedFd>)> {
        loop {
            if let (Message::Response(reply), descriptors) = self.next_message()? {
                return check_reply(reply, descriptors);
            }
        }
    }

    /// The next message.
    pub fn next_message(&mut self) -> Result<(Message, Vec<OwnedFd>)> {
        check_process(&self.process)?;
        receive(&mut self.reader, self.stream.as_fd()).map_err(device_gone)
    }

    /// Starts a thread that reads `notifications` and gives them to `listener`.
    pub fn start_notification_thread(
        self,
        notifications: UnixStream,
        listener: Arc<dyn NotificationHandler>,
    ) -> Result<ControlConnection> {
        let system = |source| Error::System {
            what: "starting the thread that reads the daemon's notifications",
            source,
        };
        let source = notifications.try_clone().map_err(system)?;
        let read_all = move || {
            let mut reader = MessageReader::default();
            while let Ok((message, descriptors)) = receive(&mut reader, source.as_fd()) {
                if let Message::Notification(notification) = message {
                    listener.on_notification(notification, descriptors);
                }
            }
            listener.on_disconnect();
        };
        // The program's signals are for its own threads.
        let _blocked = SignalsBlocked::begin();
        let thread =
            std::thread::Builder::new().name("softhca notify".into()).spawn(read_all).map_err(system)?;
        let process = self.process;
        Ok(ControlConnection { socket: Mutex::new(self), notifications, process, thread: Some(thread) })
    }
}

/// Receives the notifications of the daemon.
pub(crate) trait NotificationHandler: Send + Sync {
    fn on_notification(&self, notification: Notification, descriptors: Vec<OwnedFd>);
    /// The daemon has ended, or has closed the connection.
    fn on_disconnect(&self);
}

/// A connection that any thread may call over.
pub(crate) struct ControlConnection {
    /// One call at a time: the caller reads the reply.
    socket: Mutex<ControlSocket>,
    notifications: UnixStream,
    process: ProcessIdentity,
    thread: Option<JoinHandle<()>>,
}

impl ControlConnection {
    /// Refuses in a child: the connection is the parent's.
    pub fn check_process(&self) -> Result<()> {
        check_process(&self.process)
    }

    /// Sends a request, and waits for its response.
    pub fn call(&self, call: &Request, passed: &[BorrowedFd<'_>]) -> Result<(Response, Vec<OwnedFd>)> {
        self.check_process()?;
        self.socket.lock().call(call, passed)
    }
}

impl Drop for ControlConnection {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The parent's connection, and a thread that does not exist here.
            std::mem::forget(self.thread.take());
            return;
        }
        for stream in [&self.socket.get_mut().stream, &self.notifications] {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

fn device_gone(error: io::Error) -> Error {
    Error::DeviceGone { why: error.to_string() }
}

fn check_reply(reply: Response, descriptors: Vec<OwnedFd>) -> Result<(Response, Vec<OwnedFd>)> {
    match reply {
        Response::VerbFailed(error) => Err(error.into()),
        Response::Error { errno: libc::ENODEV, message } => Err(Error::NoSuchDevice { why: message }),
        Response::Error { errno, message } => Err(Error::DaemonRejected { errno, message }),
        reply => Ok((reply, descriptors)),
    }
}

fn receive(reader: &mut MessageReader, stream: BorrowedFd<'_>) -> io::Result<(Message, Vec<OwnedFd>)> {
    match reader.read(stream)? {
        Some(FramedMessage { bytes, descriptors }) => Ok((decode(&bytes)?, descriptors)),
        None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
    }
}

fn send(stream: BorrowedFd<'_>, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_frames(stream, &FramedMessage::frame(message, descriptors.len()), descriptors)
}

fn send_frames(stream: BorrowedFd<'_>, frames: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut done = 0;
    while done < frames.len() {
        match send_message(stream, frames, done, descriptors) {
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
