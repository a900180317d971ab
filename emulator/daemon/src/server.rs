//! The daemon: its hosts, its socket, and its connections.

use crate::client_process::ClientProcess;
use crate::command_error::CommandError;
use crate::config::{Config, FabricConfig};
use crate::fault_rules::QpRoles;
use crate::host::{AsyncEventWatchers, DaemonHost};
use crate::recording::{FabricEventSink, Recordings};
use crate::session::{Session, SessionStatus};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use softhca_fabric::ReceiverSettings;
use softhca_queue::control::{
    ClientStatus, DaemonStatus, FramedMessage, HostStatus, RuntimeDir, Welcome, encode, send_message,
};
use softhca_udp::{HostNetwork, Waker};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Why a daemon could not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// A host's sockets could not be had.
    #[error("host {host}: {source}")]
    Bind {
        /// Which host.
        host: String,
        /// Why.
        source: softhca_udp::BindError,
    },
    /// There is one already.
    #[error("a daemon named {name:?} runs already: `softhca status`, `softhca stop`, or another `--name`")]
    AlreadyRunning {
        /// Its name.
        name: String,
    },
    /// The name cannot be used.
    #[error("{name:?} cannot name a daemon: letters, digits, '-', '_' and '.', at most 64")]
    BadName {
        /// The name.
        name: String,
    },
    /// Two hosts have the same name, or there is none.
    #[error("the names of hosts: {0}")]
    BadHosts(String),
    /// The network between the hosts cannot be built.
    #[error("the fabric: {0}")]
    Fabric(#[from] softhca_udp::HostNetworkError),
    /// The system failed.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// What all connections share.
pub(crate) struct DaemonState {
    pub config: Config,
    pub hosts: Vec<Arc<DaemonHost>>,
    pub watchers: Arc<AsyncEventWatchers>,
    pub recordings: Arc<Recordings>,
    pub roles: QpRoles,
    pub mappings: Arc<AtomicUsize>,
    /// The network between the hosts.
    pub network: Option<Arc<HostNetwork>>,
    /// Readable when every connection is to end.
    pub stopping: Waker,
    stop_requested: Waker,
    has_stopped: AtomicBool,
    started: Instant,
    sessions: Mutex<BTreeMap<u64, Arc<Mutex<SessionStatus>>>>,
}

impl DaemonState {
    pub fn host(&self, name: Option<&str>) -> Result<&Arc<DaemonHost>, CommandError> {
        let found = match name {
            None => self.hosts.first(),
            Some(name) => {
                self.hosts.iter().find(|host| host.device.name == name || host.device.device_name == name)
            }
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = self.hosts.iter().map(|host| host.device.name.as_str()).collect();
            let text = format!("there is no host {:?}: {}", name.unwrap_or(""), names.join(", "));
            CommandError::new(libc::ENODEV, text)
        })
    }

    pub fn request_stop(&self) {
        self.stop_requested.wake();
    }

    pub fn status(&self) -> DaemonStatus {
        let sessions: Vec<_> = self.sessions.lock().values().cloned().collect();
        let hosts = self.hosts.iter().map(|host| {
            let clients = sessions.iter().filter_map(|card| {
                let card = card.lock();
                (card.host_name.as_ref() == Some(&host.device.name)).then(|| card.client.clone())
            });
            let (queue_pairs, listening) = host.driver.control(|driver| {
                let card = driver.hca();
                (card.queue_pair_count() as u32, card.listening_ports().collect())
            });
            HostStatus {
                host: host.device.clone(),
                clients: clients.collect(),
                queue_pairs,
                listening_ports: listening,
            }
        });
        DaemonStatus {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_s: self.started.elapsed().as_secs(),
            hosts: hosts.collect(),
        }
    }
}

/// One or more cards, and the socket where programs ask for them.
pub struct Daemon {
    state: Arc<DaemonState>,
    listener: UnixListener,
    socket: PathBuf,
    /// Held locked for as long as the daemon lives.
    _lock: File,
    threads: Vec<JoinHandle<()>>,
    last_session: u64,
    /// Kept locked until everything else is gone, if the daemon leaves by itself: whoever waits at the door starts a new
    /// one then, which finds nothing of this one in its way.
    start_lock: Option<File>,
}

/// Puts a network between hosts.
fn build_network(
    config: &FabricConfig,
    hosts: &[Arc<DaemonHost>],
    records: &Arc<Recordings>,
) -> Result<Arc<HostNetwork>, StartError> {
    let addresses: Vec<_> = hosts.iter().map(|host| host.device.address).collect();
    let FabricConfig { topology, link: line, settings, .. } = *config;
    let lookout = Box::new(FabricEventSink(records.clone()));
    let backbone = HostNetwork::with_sink(0, &addresses, &topology, line, settings, lookout)?;
    let laid = backbone.topology();
    backbone.with_fabric(|fabric| {
        let switches = laid.switches.iter().map(|id| (*id, fabric.switch(*id).name()));
        records.name_fabric(switches, laid.links.iter().map(|id| (*id, fabric.link_ends(*id))));
    });
    for host in hosts {
        if let Some(rate) = config.receive_rates.get(&host.device.name) {
            let receiver = ReceiverSettings { bits_per_second: Some(*rate), ..ReceiverSettings::default() };
            backbone.set_receiver(host.device.address, receiver);
        }
        host.attach_network(&backbone)?;
    }
    Ok(backbone)
}

impl Daemon {
    /// Starts the cards and opens the socket.
    pub fn start(config: Config) -> Result<Daemon, StartError> {
        if !RuntimeDir::is_valid_name(&config.name) {
            return Err(StartError::BadName { name: config.name });
        }
        let mut names: Vec<&str> = config.hosts.iter().map(|host| host.name.as_str()).collect();
        names.sort();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(StartError::BadHosts(format!("{:?} is there twice", twice[0])));
        }
        if names.is_empty() {
            return Err(StartError::BadHosts("there is none".into()));
        }
        let folder = RuntimeDir::for_user();
        folder.create()?;
        let lock = lock(&folder.lock(&config.name), &config.name)?;
        let watchers = Arc::new(AsyncEventWatchers::default());
        let records = Recordings::new();
        let hosts: Result<Vec<_>, StartError> = config
            .hosts
            .iter()
            .enumerate()
            .map(|(index, host)| DaemonHost::start(&config, index, host, &watchers, &records).map(Arc::new))
            .collect();
        let hosts = hosts?;
        let backbone = match &config.fabric {
            Some(fabric) => Some(build_network(fabric, &hosts, &records)?),
            None => None,
        };
        // Whoever had this socket does not live: the lock is ours.
        let socket = folder.socket(&config.name);
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", socket.display())))?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        raise_descriptor_limit();
        let shared = Arc::new(DaemonState {
            config,
            hosts,
            watchers,
            recordings: records,
            roles: QpRoles::default(),
            mappings: Arc::default(),
            network: backbone,
            stopping: Waker::new()?,
            stop_requested: Waker::new()?,
            has_stopped: AtomicBool::new(false),
            started: Instant::now(),
            sessions: Mutex::default(),
        });
        Ok(Daemon {
            state: shared,
            listener,
            socket,
            _lock: lock,
            threads: Vec::new(),
            last_session: 0,
            start_lock: None,
        })
    }

    /// Writes what the cards do, from now to the daemon's end: a capture, an event log, or both.
    pub fn start_recording(&self, capture: Option<File>, log: Option<File>) -> io::Result<()> {
        self.state.recordings.start(0, capture, log)
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The hosts and what runs on them.
    pub fn status(&self) -> DaemonStatus {
        self.state.status()
    }

    /// Serves until somebody asks it to stop, `signals` becomes readable, or nobody was there for too long.
    pub fn run(&mut self, signals: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut idle_since = Instant::now();
        let mut rounds =
            StallWatchdog { last_check: Instant::now(), stalled_since: vec![None; self.state.hosts.len()] };
        loop {
            let limit = match self.state.config.idle_exit_after {
                Some(_) => Timespec { tv_sec: 0, tv_nsec: 100_000_000 },
                None => Timespec { tv_sec: 1, tv_nsec: 0 },
            };
            let mut polled = vec![
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.state.stop_requested.as_fd(), PollFlags::IN),
            ];
            polled.extend(signals.map(|signals| PollFd::from_borrowed_fd(signals, PollFlags::IN)));
            match poll(&mut polled, Some(&limit)) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result?,
            };
            if polled[1..].iter().any(|slot| !slot.revents().is_empty()) {
                return Ok(());
            }
            if !polled[0].revents().is_empty() {
                self.accept();
            }
            self.threads.retain(|thread| !thread.is_finished());
            rounds.poll(&self.state);
            if !self.state.sessions.lock().is_empty() {
                idle_since = Instant::now();
            }
            let is_idle =
                self.state.config.idle_exit_after.is_some_and(|limit| idle_since.elapsed() >= limit);
            // Somebody who is about to connect holds the door.
            if is_idle && self.try_start_lock() {
                self.stop();
                return Ok(());
            }
        }
    }

    /// Locks the door, if nobody is in it. Where the folder is gone, nobody finds the way any more.
    fn try_start_lock(&mut self) -> bool {
        let path = RuntimeDir::for_user().start_lock(&self.state.config.name);
        match File::options().create(true).truncate(false).write(true).open(path) {
            Ok(file) => {
                let is_shut = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
                self.start_lock = is_shut.then_some(file);
                is_shut
            }
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    fn accept(&mut self) {
        match self.listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = self.admit(stream) {
                    eprintln!("softhca: a connection was refused: {error}");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // No descriptors are left: wait until a client leaves.
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }

    fn admit(&mut self, stream: UnixStream) -> io::Result<()> {
        let limit = self.state.config.max_clients;
        if self.state.sessions.lock().len() >= limit {
            let why = format!("it has {limit} clients, as many as it allows");
            let frame = FramedMessage::frame(&encode(&Err::<Welcome, _>(&why)), 0);
            // It has room for this: it is new.
            let _ = send_message(stream.as_fd(), &frame, 0, &[]);
            return Err(io::Error::other(why));
        }
        let peer = ClientProcess::from_stream(&stream)?;
        let (process, name) = (peer.pid, peer.name.clone());
        let status = ClientStatus { pid: process, name: name.clone(), resources: Vec::new() };
        let card = Arc::new(Mutex::new(SessionStatus { host_name: None, client: status }));
        let session = Session::new(self.state.clone(), stream, peer, card.clone(), self.last_session + 1)?;
        self.last_session += 1;
        let (serial, shared) = (self.last_session, self.state.clone());
        self.state.sessions.lock().insert(serial, card);
        let thread = std::thread::Builder::new().name(format!("client {process}")).spawn(move || {
            if let Err(error) = session.run() {
                eprintln!("softhca: process {process} ({name}) was disconnected: {error}");
            }
            shared.sessions.lock().remove(&serial);
        });
        match thread {
            Ok(thread) => self.threads.push(thread),
            Err(error) => {
                self.state.sessions.lock().remove(&serial);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Lets every client go and removes the socket.
    pub fn stop(&mut self) {
        if self.state.has_stopped.swap(true, Ordering::AcqRel) {
            return;
        }
        let _ = std::fs::remove_file(&self.socket);
        self.state.stopping.wake();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        if let Err(error) = self.state.recordings.end(0) {
            eprintln!("softhca: the record is not complete: {error}");
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Looks once a second whether a card is held up inside of a client's memory, and hands records on.
struct StallWatchdog {
    last_check: Instant,
    /// The access that each card was in at the last round, and since when.
    stalled_since: Vec<Option<((u64, u32), Instant)>>,
}

impl StallWatchdog {
    fn poll(&mut self, shared: &DaemonState) {
        if self.last_check.elapsed() < Duration::from_secs(1) {
            return;
        }
        self.last_check = Instant::now();
        shared.recordings.flush();
        for (host, seen) in shared.hosts.iter().zip(&mut self.stalled_since) {
            let now = host.access_monitor.current();
            let since = seen.filter(|(access, _)| Some(*access) == now).map(|(_, since)| since);
            if let (Some((_, process)), Some(since)) = (now, since) {
                let name = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
                let (host, name) = (&host.device.name, name.trim());
                eprintln!(
                    "softhca: host {host} waits for memory of process {process} ({name}): \
                     it has a page that does not come; everybody on the host waits with it"
                );
                if shared.config.kill_after.is_some_and(|limit| since.elapsed() >= limit) {
                    eprintln!("softhca: process {process} ({name}) is ended, so that host {host} can go on");
                    kill_process(process);
                }
            }
            *seen = now.map(|access| (access, since.unwrap_or(self.last_check)));
        }
    }
}

/// SIGKILL. It cannot be another process by now: the card is inside of its memory.
fn kill_process(number: u32) {
    if let Some(process) = rustix::process::Pid::from_raw(number as i32) {
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
}

/// Locks the file, or says that somebody has it.
fn lock(path: &Path, name: &str) -> Result<File, StartError> {
    let file = File::options().create(true).truncate(false).write(true).open(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StartError::AlreadyRunning { name: name.into() }),
        Err(error) => Err(StartError::System(error.into())),
    }
}

/// Clients take a handful of descriptors each.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_waits_at_the_door_finds_nothing_of_a_daemon_that_left() {
        let name = format!("door-{}", std::process::id());
        let config =
            Config { name: name.clone(), idle_exit_after: Some(Duration::ZERO), ..Config::default() };
        let folder = RuntimeDir::for_user();
        let is_free = |path: PathBuf| {
            let file = File::options().write(true).open(path).expect("the daemon made it");
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        };
        let mut daemon = Daemon::start(config).expect("it starts");
        daemon.run(None).expect("it leaves, as nobody is there");
        assert!(!folder.socket(&name).exists());
        // It still has its lock: nobody may start another yet.
        assert!(!is_free(folder.lock(&name)) && !is_free(folder.start_lock(&name)));
        drop(daemon);
        assert!(is_free(folder.start_lock(&name)) && is_free(folder.lock(&name)));
        for path in [folder.start_lock(&name), folder.lock(&name)] {
            std::fs::remove_file(path).expect("it is ours");
        }
    }
}
