//! The server: starts the hosts, listens on the control socket and runs one task per connection.
//!
//! The control plane runs on a tokio runtime; the data path does not use it. A session may wait for long for a driver, for
//! a recording, or for a descriptor of another process to close. It then does so inside `block_in_place`, and the runtime
//! continues on another thread. Connections and signals are accepted on a thread of their own.

use crate::async_event_watchers::AsyncEventWatchers;
use crate::client_process::ClientProcess;
use crate::config::{Config, FabricConfig};
use crate::host::DaemonHost;
use crate::messages::{self, report};
use crate::network_namespace::within;
use crate::readable_fd::ReadableFd;
use crate::recording::{FabricEventSink, RecordingFiles, Recordings};
use crate::session::Session;
use crate::stall_watchdog::StallWatchdog;
use crate::start_error::StartError;
use crate::state::{DaemonState, SessionStatus};
use crate::subnet::SubnetServer;
use crate::sysfs::Views;
use parking_lot::Mutex;
use softhca_control::{
    ClientStatus, DaemonStatus, FramedMessage, LockFile, RuntimeDir, Welcome, encode, send_message,
};
use softhca_fabric::{IdOffsets, ReceiverSettings};
use softhca_udp::HostNetwork;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// Threads that run sessions. One handles thousands of commands per second; the second one hides its system calls.
const WORKERS: usize = 2;
/// Connections beyond those of clients: commands such as `softhca status` and `softhca stop` reach a full daemon.
const CONTROL_CONNECTIONS: usize = 16;
/// Connections beyond all limits: those that end because others need their place, and have not ended yet.
const EVICTED_CONNECTIONS: usize = 64;
/// How long the server waits for its sessions to end when it stops: longer than a recording waits for its file.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the server looks for stalled hosts.
const TICK: Duration = Duration::from_secs(1);
/// How long an idle server waits for a client that is connecting, before it tries to exit again.
const START_LOCK_RETRY: Duration = Duration::from_millis(100);
/// How long the server waits after a failed accept: no descriptor is free until a client disconnects.
const ACCEPT_RETRY: Duration = Duration::from_millis(10);

/// One or more HCAs, and the control socket that programs connect to.
pub struct Daemon {
    state: Arc<DaemonState>,
    /// Taken when the server stops.
    runtime: Option<Runtime>,
    /// Taken while it serves.
    sessions: Option<Sessions>,
    socket: PathBuf,
    /// Dropped when the server stops.
    views: Option<Views>,
    /// Locked for the lifetime of the daemon.
    _lock: LockFile,
    /// Set when an idle daemon exits, and locked until everything else is dropped: a client that waits for this lock
    /// starts a new daemon, which must find nothing of this one.
    start_lock: Option<LockFile>,
}

/// Accepts connections, and runs one session for each.
struct Sessions {
    state: Arc<DaemonState>,
    /// Runs them.
    runtime: Handle,
    listener: UnixListener,
    running: JoinSet<()>,
    last: u64,
}

/// Why the server returned.
enum Exit {
    Requested,
    /// With the start lock.
    Idle(Option<LockFile>),
}

/// Builds the network between the hosts.
fn build_network(
    config: &FabricConfig,
    hosts: &[Arc<DaemonHost>],
    recordings: &Arc<Recordings>,
) -> Result<Arc<HostNetwork>, StartError> {
    let addresses: Vec<_> = hosts.iter().map(|host| host.device.address).collect();
    let FabricConfig { topology, link, settings, .. } = *config;
    let offsets = IdOffsets { links: hosts.len() as u32, ..IdOffsets::default() };
    let sink = Box::new(FabricEventSink { recordings: recordings.clone(), offsets });
    let network = HostNetwork::with_sink(0, &addresses, &topology, link, settings, sink)?;
    network.with_fabric(|fabric| {
        recordings.name(|names| names.add_fabric(fabric, network.topology(), offsets));
    });
    for host in hosts {
        if let Some(rate) = config.receive_rates.get(&host.device.name) {
            let receiver = ReceiverSettings { bits_per_second: Some(*rate), ..ReceiverSettings::default() };
            network.set_receiver(host.device.address, receiver);
        }
        host.attach_network(&network)?;
    }
    Ok(network)
}

impl Daemon {
    /// Starts the hosts and binds the control socket.
    pub fn start(config: Config) -> Result<Daemon, StartError> {
        if !RuntimeDir::is_valid_name(&config.name) {
            return Err(StartError::BadName { name: config.name });
        }
        let mut names: Vec<&str> = config.hosts.iter().map(|host| host.name.as_str()).collect();
        names.sort();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(StartError::BadHosts(format!("{:?} is used twice", twice[0])));
        }
        // It becomes the name of a folder.
        if let Some(bad) = names.iter().find(|name| !RuntimeDir::is_valid_name(name)) {
            return Err(StartError::BadHosts(format!(
                "{bad:?} is not a valid name: use letters, digits, '-', '_' and '.'"
            )));
        }
        if names.is_empty() && config.subnet.is_none() {
            return Err(StartError::BadHosts("at least one host is required".into()));
        }
        let directory = RuntimeDir::for_user();
        directory.create()?;
        let lock = LockFile::try_lock(&directory.lock(&config.name))?
            .ok_or_else(|| StartError::AlreadyRunning { name: config.name.clone() })?;
        let watchers = Arc::new(AsyncEventWatchers::default());
        let recordings = Recordings::new(watchers.clone());
        let mut hosts = Vec::new();
        for (index, card) in config.cards().iter().enumerate() {
            let start = || DaemonHost::start(&config, index, card, &watchers, &recordings);
            let host = Arc::new(within(config.namespace(card.host), start)??);
            if let Some(slots) = &host.slots {
                slots.set_slot_0(&host.driver);
            }
            hosts.push(host);
        }
        let network = match &config.fabric {
            Some(fabric) => Some(build_network(fabric, &hosts, &recordings)?),
            None => None,
        };
        let views_folder = directory.views(&config.name);
        let subnet =
            config.subnet.as_ref().map(|subnet| SubnetServer::start(subnet, views_folder)).transpose()?;
        // The lock is ours, so no daemon uses a socket or views of this name.
        let views = Some(Views::start(&config, &hosts));
        let socket = directory.socket(&config.name);
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", socket.display())))?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        raise_descriptor_limit();
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKERS)
            // Every session may block in a command at the same time, beside the end of vacant ports.
            .max_blocking_threads(
                config.max_clients.saturating_add(CONTROL_CONNECTIONS + EVICTED_CONNECTIONS + WORKERS + 1),
            )
            .thread_name("control")
            .enable_all()
            .build()?;
        let state = Arc::new(DaemonState::new(config, hosts, watchers, recordings, network, subnet));
        let handle = runtime.handle().clone();
        let sessions =
            Sessions { state: state.clone(), runtime: handle, listener, running: JoinSet::new(), last: 0 };
        Ok(Daemon {
            state,
            runtime: Some(runtime),
            sessions: Some(sessions),
            socket,
            views,
            _lock: lock,
            start_lock: None,
        })
    }

    /// Records all hosts until the daemon ends: a capture, an event log, or both.
    pub fn start_recording(&self, capture: Option<File>, log: Option<File>) -> io::Result<()> {
        let files = RecordingFiles { capture, log, events: None };
        self.state.recordings.start(0, None, files).map_err(|error| io::Error::other(error.to_string()))
    }

    /// The path of the control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The hosts and their clients.
    pub fn status(&self) -> DaemonStatus {
        self.state.status()
    }

    /// Serves until a client requests a stop, `signals` becomes readable, or the daemon was idle for too long.
    pub fn run(&mut self, signals: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let Some(sessions) = &mut self.sessions else { return Ok(()) };
        let signals = signals.map(|signals| signals.try_clone_to_owned()).transpose()?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        if let Exit::Idle(start_lock) = runtime.block_on(sessions.serve(signals))? {
            self.start_lock = start_lock;
            self.stop();
        }
        Ok(())
    }

    /// Disconnects every client and removes the socket.
    pub fn stop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        let _ = std::fs::remove_file(&self.socket);
        self.views = None;
        self.state.stopping.send_replace(true);
        if let Some(Sessions { mut running, .. }) = self.sessions.take() {
            let ended = async { while running.join_next().await.is_some() {} };
            // A session that is still blocked then ends with the process.
            let _ = runtime.block_on(async { tokio::time::timeout(STOP_TIMEOUT, ended).await });
        }
        runtime.shutdown_background();
        if let Err(error) = self.state.recordings.end(0) {
            report!("the recording is incomplete: {error}");
        }
        messages::flush();
    }
}

impl Sessions {
    async fn serve(&mut self, signals: Option<OwnedFd>) -> io::Result<Exit> {
        let listener = tokio::net::UnixListener::from_std(self.listener.try_clone()?)?;
        let signals = signals.map(ReadableFd::new).transpose()?;
        let state = self.state.clone();
        let mut watchdog = StallWatchdog::default();
        let end_vacant = {
            let state = state.clone();
            move || {
                state
                    .hosts()
                    .iter()
                    .filter_map(|host| host.slots.as_ref())
                    .for_each(|slots| slots.end_vacant())
            }
        };
        let mut ending = self.runtime.spawn_blocking(end_vacant.clone());
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let idle_limit = state.config.idle_exit_after;
        let mut exit_at = idle_limit.map(|limit| tokio::time::Instant::now() + limit);
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted.and_then(|(stream, _)| stream.into_std()) {
                    Ok(stream) => match self.admit(stream) {
                        Ok(()) => exit_at = None,
                        Err(error) => report!("connection refused: {error}"),
                    },
                    Err(_) => tokio::time::sleep(ACCEPT_RETRY).await,
                },
                Some(_) = self.running.join_next(), if !self.running.is_empty() => {
                    if self.running.is_empty() {
                        exit_at = idle_limit.map(|limit| tokio::time::Instant::now() + limit);
                    }
                }
                _ = ticks.tick() => {
                    watchdog.poll(&state);
                    if ending.is_finished() {
                        ending = self.runtime.spawn_blocking(end_vacant.clone());
                    }
                }
                () = state.stop_requested.notified() => return Ok(Exit::Requested),
                _ = readable(&signals), if signals.is_some() => return Ok(Exit::Requested),
                () = sleep_until(exit_at), if exit_at.is_some() => {
                    // A client that is connecting holds this lock.
                    if let Some(start_lock) = self.try_start_lock() {
                        return Ok(Exit::Idle(start_lock));
                    }
                    exit_at = Some(tokio::time::Instant::now() + START_LOCK_RETRY);
                }
            }
        }
    }

    /// Locks the start lock, unless a client holds it. Without a runtime directory no client can find the daemon, and there
    /// is no lock.
    fn try_start_lock(&self) -> Option<Option<LockFile>> {
        let path = RuntimeDir::for_user().start_lock(&self.state.config.name);
        match LockFile::try_lock(&path) {
            Ok(lock) => lock.map(Some),
            Err(error) => (error.kind() == io::ErrorKind::NotFound).then_some(None),
        }
    }

    /// The limit that another connection of a process exceeds. If the daemon is full, a connection without a device ends:
    /// the oldest of the process that has most of them.
    fn connection_limit(&self, pid: u32) -> Option<String> {
        let Config { max_clients, .. } = self.state.config;
        let sessions = self.state.sessions.lock();
        let share = self.state.config.max_clients_per_process() + CONTROL_CONNECTIONS / 2;
        let of_process = sessions.values().filter(|session| session.lock().client.pid == pid).count();
        if of_process >= share {
            return Some(format!(
                "process {pid} has {share} connections to the daemon, which is the limit of a process"
            ));
        }
        let limit = max_clients + CONTROL_CONNECTIONS;
        if sessions.len() < limit {
            return None;
        }
        let mut without_device = BTreeMap::<u32, Vec<Arc<Notify>>>::new();
        for session in sessions.values() {
            let session = session.lock();
            if session.host_name.is_none() {
                without_device.entry(session.client.pid).or_default().push(session.evicted.clone());
            }
        }
        let longest = without_device.into_values().max_by_key(Vec::len);
        match longest.as_ref().and_then(|connections| connections.get(sessions.len() - limit)) {
            Some(evicted) if sessions.len() < limit + EVICTED_CONNECTIONS => {
                evicted.notify_one();
                None
            }
            _ => Some(format!(
                "the daemon has {limit} connections, which is its limit: max_clients, {max_clients}, and \
                 {CONTROL_CONNECTIONS} for commands; `softhca status` shows the clients"
            )),
        }
    }

    /// Starts a session.
    fn admit(&mut self, stream: UnixStream) -> io::Result<()> {
        let _registers = self.runtime.enter();
        let process = ClientProcess::from_stream(&stream)?;
        if let Some(reason) = self.connection_limit(process.pid) {
            let frame = FramedMessage::frame(&encode(&Err::<Welcome, _>(&reason)), 0);
            // A new socket has room for this.
            let _ = send_message(stream.as_fd(), &frame, 0, &[]);
            return Err(io::Error::other(reason));
        }
        let (pid, name) = (process.pid, process.name.clone());
        let client = ClientStatus { pid, name: name.clone(), resources: Vec::new(), is_direct: false };
        let status = Arc::new(Mutex::new(SessionStatus { host_name: None, client, evicted: Arc::default() }));
        self.last += 1;
        let id = self.last;
        let session = Session::new(self.state.clone(), stream, process, status.clone(), id)?;
        self.state.sessions.lock().insert(id, status);
        let state = self.state.clone();
        let run = async move {
            if let Err(error) = session.run().await {
                report!("process {pid} ({name}) was disconnected: {error}");
            }
            state.sessions.lock().remove(&id);
        };
        self.running.spawn_on(run, &self.runtime);
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn readable(descriptor: &Option<ReadableFd>) {
    if let Some(descriptor) = descriptor {
        descriptor.readable().await;
    }
}

async fn sleep_until(deadline: Option<tokio::time::Instant>) {
    if let Some(deadline) = deadline {
        tokio::time::sleep_until(deadline).await;
    }
}

/// Raises the limit of open files: each client needs several descriptors.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_control::{Hello, MessageReader, Request};

    #[test]
    fn an_idle_daemon_holds_its_locks_until_it_is_gone() {
        let name = format!("idle-{}", std::process::id());
        let config =
            Config { name: name.clone(), idle_exit_after: Some(Duration::ZERO), ..Config::default() };
        let directory = RuntimeDir::for_user();
        let locks = [directory.start_lock(&name), directory.lock(&name)];
        let mut daemon = Daemon::start(config).expect("it starts");
        daemon.run(None).expect("it exits because it is idle");
        assert!(!directory.socket(&name).exists());
        // No other daemon may start yet.
        for path in &locks {
            assert!(LockFile::try_lock(path).expect("the folder exists").is_none(), "{path:?}");
        }
        drop(daemon);
        assert!(!locks.iter().any(|path| path.exists()));
    }

    /// Connects, and returns once the daemon has answered the handshake.
    fn connect(socket: &Path) -> UnixStream {
        let stream = UnixStream::connect(socket).expect("the daemon listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout above zero");
        send(&stream, &Hello::current());
        MessageReader::default().read(stream.as_fd()).expect("an answer in time").expect("a welcome");
        stream
    }

    fn send<T: serde::Serialize>(stream: &UnixStream, message: &T) {
        send_message(stream.as_fd(), &FramedMessage::frame(&encode(message), 0), 0, &[]).expect("room");
    }

    /// The bytes that the other end has not read yet.
    #[allow(unsafe_code)]
    fn unread_bytes(stream: &UnixStream) -> libc::c_int {
        use std::os::fd::AsRawFd;
        let mut bytes = 0;
        // SAFETY: the call writes one integer, which outlives it.
        assert_eq!(unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) }, 0);
        bytes
    }

    #[test]
    fn sessions_that_wait_for_a_busy_driver_do_not_block_others() {
        let config = Config { name: format!("busy-{}", std::process::id()), ..Config::default() };
        let mut daemon = Daemon::start(config).expect("it starts");
        let (state, socket) = (daemon.state.clone(), daemon.socket.clone());
        let server = std::thread::spawn(move || daemon.run(None));
        let waiting = state.hosts()[0].driver.control(|_| {
            let waiting = [(); 2 * WORKERS].map(|()| connect(&socket));
            waiting.iter().for_each(|stream| send(stream, &Request::Status));
            // Each session has read its request, and waits for the driver.
            while waiting.iter().any(|stream| unread_bytes(stream) > 0) {
                std::thread::yield_now();
            }
            connect(&socket);
            waiting
        });
        for stream in &waiting {
            MessageReader::default().read(stream.as_fd()).expect("an answer in time").expect("a status");
        }
        send(&waiting[0], &Request::Stop);
        server.join().expect("no panic").expect("it serves until it is stopped");
    }
}
