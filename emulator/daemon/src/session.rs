//! One control connection: reads requests, sends responses and notifications, and detects the end of the client.

use crate::client::Client;
use crate::client_process::ClientProcess;
use crate::command_error::{CommandError, RequestResult};
use crate::control_socket::ControlSocket;
use crate::fault_rules;
use crate::host::DaemonHost;
use crate::notification_queue::NotificationQueue;
use crate::port_counters;
use crate::recording::RecordingFiles;
use crate::state::{DaemonState, SessionStatus};
use crate::subnet::{self, UmadPort};
use parking_lot::Mutex;
use softhca_control::{
    DeviceChange, FramedMessage, Hello, Message, MessageReader, Notification, PROTOCOL_VERSION, Request,
    Response, Welcome, decode,
};
use softhca_types::QpState;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::task::block_in_place;
use tokio::time::sleep;

/// How long a connection may take for its greeting, which a library sends at once.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// The most connection manager events in one message.
const MAX_CM_EVENTS: usize = 64;

/// Whether a descriptor is that of a memfd. To close a socket or a file of another process may take long.
fn closes_at_once(descriptor: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(descriptor).is_ok()
}

/// One connection.
pub(crate) struct Session {
    daemon: Arc<DaemonState>,
    requests: ControlSocket,
    /// Carries notifications once a device is open.
    notification_socket: Option<ControlSocket>,
    process: ClientProcess,
    notifications: Arc<NotificationQueue>,
    reader: MessageReader,
    handshake_done: bool,
    client: Option<Client>,
    /// A port of the InfiniBand subnet.
    umad_port: Option<UmadPort>,
    /// The client has just opened the device.
    has_opened: bool,
    status: Arc<Mutex<SessionStatus>>,
    /// The hosts that the session gave rules or roles to, or whose port or device it changed.
    altered_hosts: BTreeSet<String>,
    /// The client executes the transport itself, and its faults raised events that concern all processes of its host.
    has_raised_events: bool,
    /// Identifies the recordings of the session.
    id: u64,
    /// The session ends once all responses are sent.
    ending: bool,
    stopping: watch::Receiver<bool>,
    /// The daemon needs the place of this connection.
    evicted: Arc<Notify>,
}

impl Session {
    /// Must be called on the runtime.
    pub fn new(
        daemon: Arc<DaemonState>,
        stream: UnixStream,
        process: ClientProcess,
        status: Arc<Mutex<SessionStatus>>,
        id: u64,
    ) -> io::Result<Session> {
        let stopping = daemon.stopping.subscribe();
        let evicted = status.lock().evicted.clone();
        Ok(Session {
            daemon,
            requests: ControlSocket::new(stream)?,
            notification_socket: None,
            process,
            notifications: Arc::default(),
            reader: MessageReader::default(),
            handshake_done: false,
            client: None,
            umad_port: None,
            has_opened: false,
            status,
            altered_hosts: BTreeSet::new(),
            has_raised_events: false,
            id,
            ending: false,
            stopping,
            evicted,
        })
    }

    /// Serves the connection until it ends. An error is a mistake of the client.
    pub async fn run(mut self) -> io::Result<()> {
        let result = self.serve().await;
        self.daemon.watchers.remove(&self.notifications);
        // Also if it had only watched events.
        let _ = self.end_recordings();
        self.restore_hosts();
        // Before the socket closes: a client that sees its end may flush its rings itself.
        self.client = None;
        // The descriptors that were passed, read or not, are closed here.
        block_in_place(|| drop(self));
        result
    }

    /// Writes the rest of the recordings, which may block.
    fn end_recordings(&self) -> io::Result<()> {
        block_in_place(|| self.daemon.recordings.end(self.id))
    }

    /// Removes the rules and roles that this session added, and brings ports up and devices back.
    fn restore_hosts(&mut self) {
        for name in std::mem::take(&mut self.altered_hosts) {
            if let Ok(host) = self.daemon.host(Some(&name)) {
                let _ = fault_rules::clear_rules(&self.daemon, &host);
                host.change_device(&DeviceChange::FaultsEnded, None);
            }
        }
        if let Some(client) = self.client.as_ref().filter(|_| self.has_raised_events) {
            client
                .host
                .change_device(&DeviceChange::FaultsEnded, client.slot().ok().map(|slot| slot.slot.number));
        }
    }

    /// Remembers that a host must be restored. A change that a program makes to its own host stays as long as the host.
    fn mark_altered(&mut self, host: &Option<String>) -> Result<(), CommandError> {
        if self.client.is_none() {
            let name = self.host(host.clone())?.device.name.clone();
            self.altered_hosts.insert(name);
        }
        Ok(())
    }

    async fn serve(&mut self) -> io::Result<()> {
        let greeting_timeout = sleep(GREETING_TIMEOUT);
        tokio::pin!(greeting_timeout);
        loop {
            self.requests.flush()?;
            if std::mem::take(&mut self.has_opened)
                && let Some(slots) = self.client.as_ref().and_then(|client| client.host.slots.as_ref())
            {
                block_in_place(|| slots.prepare_next());
            }
            if let Some(socket) = &mut self.notification_socket {
                socket.flush()?;
                if socket.is_drained() {
                    self.notifications.finish_drain();
                }
            }
            if self.ending && self.requests.is_drained() {
                return Ok(());
            }
            // A client that does not read fills bounded queues, and then its requests are not read either.
            let outbound = self.notification_socket.as_ref().unwrap_or(&self.requests);
            let reads_requests = self.requests.has_room() && !self.ending;
            let sends_notifications = outbound.has_room() && !self.ending;
            tokio::select! {
                () = self.process.exited() => return Ok(()),
                _ = self.stopping.changed() => return Ok(()),
                () = self.evicted.notified(), if self.client.is_none() && self.umad_port.is_none() => {
                    return Err(io::Error::other("other connections need its place"));
                }
                () = &mut greeting_timeout, if !self.handshake_done => {
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "it did not send a greeting"));
                }
                () = self.notifications.queued(), if sends_notifications => self.send_notifications()?,
                () = self.requests.readable(), if reads_requests => {
                    if !self.read()? {
                        return Ok(());
                    }
                }
                () = self.requests.writable(), if !self.requests.is_drained() => {}
                () = outbound.writable(), if !outbound.is_drained() => {}
            }
        }
    }

    fn send_notifications(&mut self) -> io::Result<()> {
        let Some(notifications) = self.notifications.drain() else {
            return Err(io::Error::other("it does not read its notifications"));
        };
        let Session { client, requests, notification_socket, .. } = self;
        let socket = notification_socket.as_mut().unwrap_or(requests);
        for notification in notifications {
            if let Notification::RingsOpened { slot } = notification {
                // The other process may be gone by now.
                let rings = client.as_ref().and_then(|client| client.slot().ok()?.rings(slot).ok());
                if let Some(descriptors) = rings {
                    socket.send(&Message::Notification(notification), descriptors);
                }
                continue;
            }
            let Notification::CmEventsRaised { channel, .. } = notification else {
                socket.send(&Message::Notification(notification), Vec::new());
                continue;
            };
            let events = client.as_mut().map(|client| client.dequeue_cm_events(channel)).unwrap_or_default();
            for events in events.chunks(MAX_CM_EVENTS) {
                let notification = Notification::CmEventsRaised { channel, events: events.to_vec() };
                socket.send(&Message::Notification(notification), Vec::new());
            }
        }
        self.update_status();
        Ok(())
    }

    /// Reads once and handles every complete request. False at the end of the stream.
    fn read(&mut self) -> io::Result<bool> {
        if !self.requests.fill(&mut self.reader)? {
            return Ok(false);
        }
        // The bytes after the greeting of a refused client are not read.
        while !self.ending
            && let Some(FramedMessage { bytes, descriptors }) = self.reader.pop()?
        {
            if !self.handshake_done {
                self.handshake(&bytes)?;
                continue;
            }
            let request: Request = decode(&bytes)?;
            let result = match descriptors.iter().all(closes_at_once) {
                true => self.handle(request, descriptors),
                false => block_in_place(|| self.handle(request, descriptors)),
            };
            let (response, passed) = result.unwrap_or_else(|error| (error.into_response(), Vec::new()));
            self.requests.send(&Message::Response(response), passed);
            self.update_status();
        }
        Ok(true)
    }

    /// Checks the user and the protocol of the client.
    fn handshake(&mut self, bytes: &[u8]) -> io::Result<()> {
        let hello: Hello = decode(bytes)?;
        if hello.magic != Hello::MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak the control protocol"));
        }
        let uid = rustix::process::geteuid().as_raw();
        let version = env!("CARGO_PKG_VERSION");
        let problem = if self.process.uid != uid {
            Some(format!("this daemon serves user {uid} only; you are user {}", self.process.uid))
        } else if hello.protocol != PROTOCOL_VERSION {
            Some(format!(
                "the daemon has version {version} (protocol {PROTOCOL_VERSION}), the library has version {} \
                 (protocol {}): run `softhca stop` and start the daemon of the same version as the library",
                hello.version, hello.protocol
            ))
        } else {
            None
        };
        if let Some(message) = problem {
            self.ending = true;
            self.requests.send(&Err::<Welcome, _>(message), Vec::new());
            return Ok(());
        }
        self.handshake_done = true;
        let hosts = self.daemon.listed_hosts();
        let pid = std::process::id();
        let subnet = self.daemon.subnet.as_ref().map(|subnet| subnet.settings().clone());
        let welcome = Welcome { protocol: PROTOCOL_VERSION, version: version.into(), pid, hosts, subnet };
        self.requests.send(&Ok::<_, String>(welcome), Vec::new());
        Ok(())
    }

    fn handle(&mut self, request: Request, mut descriptors: Vec<OwnedFd>) -> RequestResult {
        let response = match request {
            Request::Open { host, can_be_direct } => {
                if self.client.is_some() {
                    return Err(CommandError::new(libc::EBUSY, "the device is already open"));
                }
                let host = self.daemon.host(host.as_deref())?;
                let memory = descriptors.pop();
                self.daemon.add_client(&self.status, &host.device.name)?;
                let (process, notifications) = (&self.process, &self.notifications);
                let opened = Client::open(&self.daemon, &host, process, notifications, memory, can_be_direct);
                let (client, response, mut passed) =
                    opened.inspect_err(|_| self.status.lock().host_name = None)?;
                let (ours, theirs) = UnixStream::pair()?;
                passed.insert(0, theirs.into());
                let direct = ours.try_clone()?;
                self.notification_socket = Some(ControlSocket::new(ours)?);
                self.notifications.attach_socket(direct);
                self.status.lock().client.is_direct = client.is_direct();
                self.client = Some(client);
                self.has_opened = true;
                return Ok((response, passed));
            }
            Request::OpenSendSocket { source } => return self.client()?.open_send_socket(source),
            Request::OpenRings { slot } => {
                return Ok((Response::Done, self.client()?.slot()?.open_rings(slot)?));
            }
            Request::HandOver { packets } => {
                let client = self.client()?;
                let rest = client.slot()?.hand_over(packets);
                client.host.driver.control(|driver| driver.receive_handed_over(&rest));
                Response::Done
            }
            Request::Report { queue_pairs, resources } => {
                self.client()?.slot()?.report(queue_pairs, resources);
                Response::Done
            }
            Request::QueuePairReady { qp } => {
                let client = self.client()?;
                client.slot()?;
                let host = client.host.clone();
                match qp.state {
                    QpState::ReadyToReceive => self.daemon.roles.assign(&host.device.name, &qp),
                    _ => self.daemon.roles.publish_flow(&self.daemon.hosts(), &host, &qp),
                }
                Response::Done
            }
            Request::Status => Response::Status(block_in_place(|| self.daemon.status())),
            Request::Counters { host } => Response::Counters(self.host(host)?.counters()),
            Request::PortCounters => {
                let hosts = self.daemon.hosts();
                let names: Vec<_> = hosts.iter().map(|host| host.device.name.as_str()).collect();
                let ports =
                    self.daemon.network.as_ref().map(|network| port_counters::collect(network, &names));
                Response::PortCounters(ports.unwrap_or_default())
            }
            Request::WatchAsyncEvents => {
                self.daemon.watchers.remove(&self.notifications);
                self.daemon.watchers.add(&self.notifications);
                self.daemon.recordings.update_activity()?;
                Response::Done
            }
            Request::AddFaultRules { host, seed, rules } => {
                self.mark_altered(&host)?;
                let host = self.roce_host(host)?;
                return fault_rules::add_rules(&self.daemon, &host, seed, &rules);
            }
            Request::AddFlows { host, seed, flows } => {
                let host = self.roce_host(host)?;
                return fault_rules::add_flows(&host, seed, &flows);
            }
            Request::AssignRoles { host, seed, roles } => {
                self.mark_altered(&host)?;
                let host = self.roce_host(host)?;
                self.daemon.roles.reserve(&host, seed, roles)?;
                self.daemon.publish_has_roles();
                Response::Done
            }
            Request::QueryFaultRules { host } => {
                let host = self.host(host)?;
                return fault_rules::rules(&host);
            }
            Request::ClearFaultRules { host } => {
                let host = self.host(host)?;
                return fault_rules::clear_rules(&self.daemon, &host);
            }
            Request::KeepFaultRules => {
                self.altered_hosts.clear();
                Response::Done
            }
            Request::StartRecording { capture, log, events } => {
                let wanted = [capture, log, events];
                if descriptors.len() < wanted.iter().filter(|wanted| **wanted).count() {
                    let text = "a recording needs the descriptor that it is written to";
                    return Err(CommandError::new(libc::EBADF, text));
                }
                let mut files = descriptors.into_iter().map(File::from);
                let [capture, log, events] = wanted.map(|wanted| if wanted { files.next() } else { None });
                let files = RecordingFiles { capture, log, events };
                self.daemon.recordings.start(self.id, Some(self.process.pid), files)?;
                Response::Done
            }
            Request::StopRecordings => {
                self.end_recordings()?;
                Response::Done
            }
            Request::QueuePairs { host } => {
                let host = self.host(host)?;
                Response::QueuePairs(block_in_place(|| host.queue_pairs()))
            }
            Request::SetPortState { host, state, stays } => {
                let host = Some(host);
                if !stays {
                    self.mark_altered(&host)?;
                }
                self.roce_host(host)?.change_device(&DeviceChange::PortState(state), None);
                Response::Done
            }
            Request::RaiseEvent { host, event } => {
                let host = Some(host);
                self.mark_altered(&host)?;
                // A program that raised it by a fault has it already.
                let slot =
                    self.client.as_ref().and_then(|client| client.slot().ok()).map(|slot| slot.slot.number);
                self.has_raised_events |= slot.is_some();
                self.host(host)?.change_device(&DeviceChange::Event(event), slot);
                Response::Done
            }
            Request::NoteTrigger { host, trigger } => {
                self.host(Some(host))?.change_device(&DeviceChange::Trigger(trigger), None);
                Response::Done
            }
            Request::Subnet(request) => {
                let Some(subnet) = &self.daemon.subnet else {
                    let text = "the daemon has no InfiniBand subnet: start one with `--fabric infiniband`";
                    return Err(CommandError::new(libc::ENODEV, text));
                };
                let count = |host: &str| self.daemon.add_client(&self.status, host);
                let devices = |host: Option<&str>| self.daemon.subnet_devices(host);
                return block_in_place(|| {
                    subnet::handle(subnet, &mut self.umad_port, request, count, devices)
                });
            }
            Request::Stop => {
                self.daemon.stop_requested.notify_one();
                Response::Done
            }
            Request::Execute { command, backing, call_site } => {
                return self.client()?.execute(command, backing, descriptors, call_site);
            }
        };
        Ok((response, Vec::new()))
    }

    fn client(&mut self) -> Result<&mut Client, CommandError> {
        let message = "no device is open on this connection";
        self.client.as_mut().ok_or_else(|| CommandError::new(libc::ENODEV, message))
    }

    /// The host with this name. Without a name: the client's host, or else the first.
    fn host(&self, name: Option<String>) -> Result<Arc<DaemonHost>, CommandError> {
        match (&self.client, name) {
            (Some(client), None) => Ok(client.host.clone()),
            (_, name) => self.daemon.host(name.as_deref()),
        }
    }

    /// As [`Session::host`], for what a port of an InfiniBand subnet does not have.
    fn roce_host(&self, name: Option<String>) -> Result<Arc<DaemonHost>, CommandError> {
        if self.daemon.subnet.is_some() {
            let text = "links of an InfiniBand subnet have faults of their own: see `softhca link`";
            return Err(CommandError::new(libc::EOPNOTSUPP, text));
        }
        self.host(name)
    }

    /// Updates the resource counts that `softhca status` shows.
    fn update_status(&mut self) {
        let Some(client) = &mut self.client else { return };
        if let Some(counts) = client.quota.changed_counts() {
            self.status.lock().client.resources = counts;
        }
    }
}
