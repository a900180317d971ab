//! One connection: reads calls, writes replies and news, and notices when the other side is gone.

use crate::client::Client;
use crate::client_process::ClientProcess;
use crate::command_error::CommandError;
use crate::fault_rules;
use crate::host::DaemonHost;
use crate::notification_queue::NotificationQueue;
use crate::port_counters;
use crate::server::DaemonState;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use softhca_queue::PortState;
use softhca_queue::control::{
    ClientStatus, FramedMessage, Hello, Message, MessageReader, Notification, PROTOCOL_VERSION, Request,
    Response, Welcome, decode, encode, send_message,
};
use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Answers that may wait for a client that does not read, before its calls wait too.
const MAX_PENDING_RESPONSES: usize = 64;
/// Events of connection management in one frame.
const MAX_CM_EVENTS: usize = 64;

/// What others may know of a session.
pub(crate) struct SessionStatus {
    pub host_name: Option<String>,
    pub client: ClientStatus,
}

struct PendingMessage {
    frame: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    sent: usize,
}

/// A socket, and what waits to be sent over it.
struct ControlSocket {
    stream: UnixStream,
    outgoing: VecDeque<PendingMessage>,
}

impl ControlSocket {
    fn new(stream: UnixStream) -> io::Result<ControlSocket> {
        stream.set_nonblocking(true)?;
        Ok(ControlSocket { stream, outgoing: VecDeque::new() })
    }

    fn has_room(&self) -> bool {
        self.outgoing.len() < MAX_PENDING_RESPONSES
    }

    fn send<T: serde::Serialize>(&mut self, message: &T, descriptors: Vec<OwnedFd>) {
        let frame = FramedMessage::frame(&encode(message), descriptors.len());
        self.outgoing.push_back(PendingMessage { frame, descriptors, sent: 0 });
    }

    /// Writes what the socket takes.
    fn write(&mut self) -> io::Result<()> {
        while let Some(out) = self.outgoing.front_mut() {
            let descriptors: Vec<_> = out.descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
            match send_message(self.stream.as_fd(), &out.frame, out.sent, &descriptors) {
                Ok(count) => out.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // It closed its end: reading finds that out.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    self.outgoing.clear();
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
            if out.sent == out.frame.len() {
                self.outgoing.pop_front();
            }
        }
        Ok(())
    }
}

/// One connection.
pub(crate) struct Session {
    daemon: Arc<DaemonState>,
    requests: ControlSocket,
    /// Where news go once a device is open.
    notification_socket: Option<ControlSocket>,
    process: ClientProcess,
    notifications: Arc<NotificationQueue>,
    reader: MessageReader,
    handshake_done: bool,
    client: Option<Client>,
    status: Arc<Mutex<SessionStatus>>,
    /// The hosts that it gave rules or roles to, or whose port it took down.
    altered_hosts: BTreeSet<String>,
    /// Its number, by which it has records.
    id: u64,
    /// Send what waits, then end.
    ending: bool,
}

impl Session {
    pub fn new(
        shared: Arc<DaemonState>,
        stream: UnixStream,
        peer: ClientProcess,
        card: Arc<Mutex<SessionStatus>>,
        serial: u64,
    ) -> io::Result<Session> {
        Ok(Session {
            daemon: shared,
            requests: ControlSocket::new(stream)?,
            notification_socket: None,
            process: peer,
            notifications: Arc::new(NotificationQueue::new()?),
            reader: MessageReader::default(),
            handshake_done: false,
            client: None,
            status: card,
            altered_hosts: BTreeSet::new(),
            id: serial,
            ending: false,
        })
    }

    /// Serves the connection to its end. An error is what the other side did wrong.
    pub fn run(mut self) -> io::Result<()> {
        let result = self.serve();
        self.daemon.watchers.remove(&self.notifications);
        let _ = self.daemon.recordings.end(self.id);
        self.restore_hosts();
        // The card lets the client go before the socket closes: who sees its end may take the rings over.
        self.client = None;
        result
    }

    /// Leaves the cards as they were, unless a program's own rules stand there, which go with its card.
    fn restore_hosts(&mut self) {
        for name in std::mem::take(&mut self.altered_hosts) {
            if let Ok(host) = self.daemon.host(Some(&name)) {
                let _ = fault_rules::clear_rules(&self.daemon, host);
                host.driver.control(|driver| driver.set_port_state(PortState::Active));
            }
        }
    }

    /// Takes note that a host is not as it was. What a program does to its own host stays, as long as the host does.
    fn mark_altered(&mut self, host: &Option<String>) -> Result<(), CommandError> {
        if self.client.is_none() {
            let name = self.host(host.clone())?.device.name.clone();
            self.altered_hosts.insert(name);
        }
        Ok(())
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            self.requests.write()?;
            if let Some(news) = &mut self.notification_socket {
                news.write()?;
                if news.outgoing.is_empty() {
                    self.notifications.finish_drain();
                }
            }
            if self.ending && self.requests.outgoing.is_empty() {
                return Ok(());
            }
            // What a client that does not read is owed waits in places that are limited.
            let (mut interest, mut news) = (PollFlags::empty(), PollFlags::empty());
            if self.requests.has_room() && !self.ending {
                interest |= PollFlags::IN;
            }
            if self.notification_socket.as_ref().unwrap_or(&self.requests).has_room() && !self.ending {
                news |= PollFlags::IN;
            }
            if !self.requests.outgoing.is_empty() {
                interest |= PollFlags::OUT;
            }
            let mut polled = vec![
                PollFd::new(&self.requests.stream, interest),
                PollFd::from_borrowed_fd(self.notifications.as_fd(), news),
                PollFd::from_borrowed_fd(self.process.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.daemon.stopping.as_fd(), PollFlags::IN),
            ];
            let blocked = self.notification_socket.as_ref().filter(|news| !news.outgoing.is_empty());
            polled.extend(blocked.map(|news| PollFd::new(&news.stream, PollFlags::OUT)));
            match poll(&mut polled, None) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result?,
            };
            let [stream, news, process, stop] = [0, 1, 2, 3].map(|index: usize| polled[index].revents());
            if !process.is_empty() || !stop.is_empty() {
                return Ok(());
            }
            if !news.is_empty() {
                self.send_notifications()?;
            }
            if stream.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) && !self.read()? {
                return Ok(());
            }
        }
    }

    fn send_notifications(&mut self) -> io::Result<()> {
        let Some(news) = self.notifications.drain() else {
            return Err(io::Error::other("it does not read its news"));
        };
        let Session { client, requests: calls, notification_socket: way, .. } = self;
        let way = way.as_mut().unwrap_or(calls);
        for news in news {
            let Notification::CmEventsRaised { channel, .. } = news else {
                way.send(&Message::Notification(news), Vec::new());
                continue;
            };
            let events = client.as_mut().map(|client| client.dequeue_cm_events(channel)).unwrap_or_default();
            for events in events.chunks(MAX_CM_EVENTS) {
                let news = Notification::CmEventsRaised { channel, events: events.to_vec() };
                way.send(&Message::Notification(news), Vec::new());
            }
        }
        self.update_status();
        Ok(())
    }

    /// Reads once and answers what is complete. False at the end of the stream.
    fn read(&mut self) -> io::Result<bool> {
        match self.reader.fill(self.requests.stream.as_fd()) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(true),
                io::ErrorKind::ConnectionReset => return Ok(false),
                _ => return Err(error),
            },
        }
        while let Some(FramedMessage { bytes, descriptors }) = self.reader.pop()? {
            if !self.handshake_done {
                self.handshake(&bytes)?;
                continue;
            }
            let call: Request = decode(&bytes)?;
            let (reply, passed) = match self.handle(call, descriptors) {
                Ok(answer) => answer,
                Err(refusal) => (refusal.into_response(), Vec::new()),
            };
            self.requests.send(&Message::Response(reply), passed);
            self.update_status();
        }
        Ok(true)
    }

    /// Checks who it is and which protocol it speaks.
    fn handshake(&mut self, bytes: &[u8]) -> io::Result<()> {
        let hello: Hello = decode(bytes)?;
        if hello.magic != Hello::MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a client of ours"));
        }
        let user = rustix::process::geteuid().as_raw();
        let ours = env!("CARGO_PKG_VERSION");
        let refusal = if self.process.uid != user {
            let text = format!("this daemon serves user {user} only, and you are {}", self.process.uid);
            Some(CommandError::new(libc::EACCES, text))
        } else if hello.protocol != PROTOCOL_VERSION {
            let text = format!(
                "the daemon is version {ours} (protocol {PROTOCOL_VERSION}), the library {} (protocol {}): \
                 `softhca stop`, and start the daemon that came with the library",
                hello.version, hello.protocol
            );
            Some(CommandError::new(libc::EPROTO, text))
        } else {
            None
        };
        match refusal {
            Some(refusal) => {
                self.ending = true;
                self.requests.send(&Err::<Welcome, _>(refusal.to_string()), Vec::new());
            }
            None => {
                self.handshake_done = true;
                let hosts = self.daemon.hosts.iter().map(|host| host.device.clone()).collect();
                let process = std::process::id();
                let welcome =
                    Welcome { protocol: PROTOCOL_VERSION, version: ours.into(), pid: process, hosts };
                self.requests.send(&Ok::<_, String>(welcome), Vec::new());
            }
        }
        Ok(())
    }

    fn handle(&mut self, call: Request, mut descriptors: Vec<OwnedFd>) -> crate::client::RequestResult {
        let reply = match call {
            Request::Open { host } => {
                if self.client.is_some() {
                    return Err(CommandError::new(libc::EBUSY, "the device is open already"));
                }
                let host = self.daemon.host(host.as_deref())?.clone();
                let memory = descriptors.pop();
                let (client, reply, mut passed) =
                    Client::open(&self.daemon, &host, &self.process, &self.notifications, memory)?;
                let (ours, theirs) = UnixStream::pair()?;
                passed.insert(passed.len() - 1, theirs.into());
                let way = ControlSocket::new(ours)?;
                self.notifications.attach_socket(way.stream.try_clone()?);
                (self.client, self.notification_socket) = (Some(client), Some(way));
                return Ok((reply, passed));
            }
            Request::Status => Response::Status(self.daemon.status()),
            Request::Counters { host } => {
                let host = self.host(host)?;
                Response::Counters(host.driver.control(|driver| *driver.hca().counters()))
            }
            Request::PortCounters => {
                let names: Vec<_> = self.daemon.hosts.iter().map(|host| host.device.name.as_str()).collect();
                let ports =
                    self.daemon.network.as_ref().map(|backbone| port_counters::collect(backbone, &names));
                Response::PortCounters(ports.unwrap_or_default())
            }
            Request::WatchAsyncEvents => {
                self.daemon.watchers.remove(&self.notifications);
                self.daemon.watchers.add(&self.notifications);
                Response::Done
            }
            Request::AddFaultRules { host, seed, rules } => {
                self.mark_altered(&host)?;
                return fault_rules::add_rules(&self.daemon, self.host(host)?, seed, &rules);
            }
            Request::AddFlows { host, seed, flows } => {
                return fault_rules::add_flows(self.host(host)?, seed, &flows);
            }
            Request::AssignRoles { host, seed, roles } => {
                self.mark_altered(&host)?;
                self.daemon.roles.reserve(self.host(host)?, seed, roles)?;
                Response::Done
            }
            Request::QueryFaultRules { host } => return fault_rules::rules(self.host(host)?),
            Request::ClearFaultRules { host } => {
                return fault_rules::clear_rules(&self.daemon, self.host(host)?);
            }
            Request::StartRecording { capture, log } => {
                let mut files = descriptors.into_iter().map(File::from);
                let [capture, log] = [capture, log].map(|asked| asked.then(|| files.next()));
                if matches!(capture, Some(None)) || matches!(log, Some(None)) {
                    return Err(CommandError::new(
                        libc::EBADF,
                        "a record needs the descriptor that it goes to",
                    ));
                }
                self.daemon.recordings.start(self.id, capture.flatten(), log.flatten())?;
                Response::Done
            }
            Request::StopRecordings => {
                self.daemon.recordings.end(self.id)?;
                Response::Done
            }
            Request::SetPortState { host, state } => {
                let host = Some(host);
                self.mark_altered(&host)?;
                self.host(host)?.driver.control(|driver| driver.set_port_state(state));
                Response::Done
            }
            Request::Stop => {
                self.daemon.request_stop();
                Response::Done
            }
            Request::Execute { command, backing } => match &mut self.client {
                Some(client) => return client.execute(command, backing, descriptors),
                None => return Err(CommandError::new(libc::ENODEV, "no device is open on this connection")),
            },
        };
        Ok((reply, Vec::new()))
    }

    /// The host with this name; without one, the client's own, or the first.
    fn host(&self, name: Option<String>) -> Result<&Arc<DaemonHost>, CommandError> {
        match (&self.client, name) {
            (Some(client), None) => Ok(&client.host),
            (_, name) => self.daemon.host(name.as_deref()),
        }
    }

    /// Keeps what others may know up to date.
    fn update_status(&mut self) {
        let Some(client) = &mut self.client else { return };
        if let Some(counts) = client.quota.changed_counts() {
            let mut card = self.status.lock();
            card.host_name.get_or_insert_with(|| client.host.device.name.clone());
            card.client.resources = counts;
        }
    }
}
