//! The daemon: its hosts, its socket, and its connections.

use crate::config::{Config, FabricConfig};
use crate::faults::Names;
use crate::host::{Host, Watchers};
use crate::peer::Peer;
use crate::record::{Lookout, Records};
use crate::refusal::Refusal;
use crate::session::{Card, Session};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use softhca_fabric::Receiver;
use softhca_queue::control::{ClientStatus, Folder, Frame, HostStatus, Status, Welcome, encode, send_frame};
use softhca_udp::{Backbone, Waker};
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
    Running {
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
    Fabric(#[from] softhca_udp::BackboneError),
    /// The system failed.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// What all connections share.
pub(crate) struct Shared {
    pub config: Config,
    pub hosts: Vec<Arc<Host>>,
    pub watchers: Arc<Watchers>,
    pub records: Arc<Records>,
    pub names: Names,
    pub mappings: Arc<AtomicUsize>,
    /// Readable when every connection is to end.
    pub stopping: Waker,
    asked_to_stop: Waker,
    has_stopped: AtomicBool,
    started: Instant,
    sessions: Mutex<BTreeMap<u64, Arc<Mutex<Card>>>>,
}

impl Shared {
    pub fn host(&self, name: Option<&str>) -> Result<&Arc<Host>, Refusal> {
        let found = match name {
            None => self.hosts.first(),
            Some(name) => self.hosts.iter().find(|host| host.card.name == name || host.card.device == name),
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = self.hosts.iter().map(|host| host.card.name.as_str()).collect();
            let text = format!("there is no host {:?}: {}", name.unwrap_or(""), names.join(", "));
            Refusal::new(libc::ENODEV, text)
        })
    }

    pub fn ask_to_stop(&self) {
        self.asked_to_stop.wake();
    }

    pub fn status(&self) -> Status {
        let sessions: Vec<_> = self.sessions.lock().values().cloned().collect();
        let hosts = self.hosts.iter().map(|host| {
            let clients = sessions.iter().filter_map(|card| {
                let card = card.lock();
                (card.host.as_ref() == Some(&host.card.name)).then(|| card.status.clone())
            });
            let (queue_pairs, listening) = host.station.control(|driver| {
                let card = driver.card();
                (card.queue_pair_count() as u32, card.listening_ports().collect())
            });
            HostStatus { host: host.card.clone(), clients: clients.collect(), queue_pairs, listening }
        });
        Status {
            process: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            uptime: self.started.elapsed().as_secs(),
            hosts: hosts.collect(),
        }
    }
}

/// One or more cards, and the socket where programs ask for them.
pub struct Daemon {
    shared: Arc<Shared>,
    listener: UnixListener,
    socket: PathBuf,
    /// Held locked for as long as the daemon lives.
    _lock: File,
    threads: Vec<JoinHandle<()>>,
    serial: u64,
    /// Kept locked until everything else is gone, if the daemon leaves by itself: whoever waits at the door starts a new
    /// one then, which finds nothing of this one in its way.
    door: Option<File>,
}

/// Puts a network between hosts.
fn join(config: &FabricConfig, hosts: &[Arc<Host>], records: &Arc<Records>) -> Result<(), StartError> {
    let addresses: Vec<_> = hosts.iter().map(|host| host.card.address).collect();
    let FabricConfig { topology, line, settings, .. } = *config;
    let lookout = Box::new(Lookout(records.clone()));
    let backbone = Backbone::observed(0, &addresses, &topology, line, settings, lookout)?;
    let laid = backbone.laid();
    backbone.ask(|fabric| {
        let switches = laid.switches.iter().map(|id| (*id, fabric.switch(*id).name()));
        records.name_fabric(switches, laid.cables.iter().map(|id| (*id, fabric.ends(*id))));
    });
    for host in hosts {
        if let Some(rate) = config.receive_rates.get(&host.card.name) {
            let receiver = Receiver { bits_per_second: Some(*rate), ..Receiver::default() };
            backbone.set_receiver(host.card.address, receiver);
        }
        host.plug_in(&backbone)?;
    }
    Ok(())
}

impl Daemon {
    /// Starts the cards and opens the socket.
    pub fn start(config: Config) -> Result<Daemon, StartError> {
        if !Folder::is_name(&config.name) {
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
        let folder = Folder::of_user();
        folder.prepare()?;
        let lock = lock(&folder.lock(&config.name), &config.name)?;
        let watchers = Arc::new(Watchers::default());
        let records = Records::new();
        let hosts: Result<Vec<_>, StartError> = config
            .hosts
            .iter()
            .enumerate()
            .map(|(index, host)| Host::start(&config, index, host, &watchers, &records).map(Arc::new))
            .collect();
        let hosts = hosts?;
        if let Some(fabric) = &config.fabric {
            join(fabric, &hosts, &records)?;
        }
        // Whoever had this socket does not live: the lock is ours.
        let socket = folder.socket(&config.name);
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", socket.display())))?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        raise_descriptor_limit();
        let shared = Arc::new(Shared {
            config,
            hosts,
            watchers,
            records,
            names: Names::default(),
            mappings: Arc::default(),
            stopping: Waker::new()?,
            asked_to_stop: Waker::new()?,
            has_stopped: AtomicBool::new(false),
            started: Instant::now(),
            sessions: Mutex::default(),
        });
        Ok(Daemon { shared, listener, socket, _lock: lock, threads: Vec::new(), serial: 0, door: None })
    }

    /// Writes what the cards do, from now to the daemon's end: a capture, an event log, or both.
    pub fn record(&self, capture: Option<File>, log: Option<File>) -> io::Result<()> {
        self.shared.records.start(0, capture, log)
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The hosts and what runs on them.
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// Serves until somebody asks it to stop, `signals` becomes readable, or nobody was there for too long.
    pub fn run(&mut self, signals: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut idle_since = Instant::now();
        let mut rounds = Rounds { at: Instant::now(), seen: vec![None; self.shared.hosts.len()] };
        loop {
            let limit = match self.shared.config.leave_after {
                Some(_) => Timespec { tv_sec: 0, tv_nsec: 100_000_000 },
                None => Timespec { tv_sec: 1, tv_nsec: 0 },
            };
            let mut polled = vec![
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.shared.asked_to_stop.as_fd(), PollFlags::IN),
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
            rounds.make(&self.shared);
            if !self.shared.sessions.lock().is_empty() {
                idle_since = Instant::now();
            }
            let is_idle = self.shared.config.leave_after.is_some_and(|limit| idle_since.elapsed() >= limit);
            // Somebody who is about to connect holds the door.
            if is_idle && self.close_door() {
                self.stop();
                return Ok(());
            }
        }
    }

    /// Locks the door, if nobody is in it. Where the folder is gone, nobody finds the way any more.
    fn close_door(&mut self) -> bool {
        let path = Folder::of_user().door(&self.shared.config.name);
        match File::options().create(true).truncate(false).write(true).open(path) {
            Ok(file) => {
                let is_shut = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
                self.door = is_shut.then_some(file);
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
        let limit = self.shared.config.clients;
        if self.shared.sessions.lock().len() >= limit {
            let why = format!("it has {limit} clients, as many as it allows");
            let frame = Frame::lay_out(&encode(&Err::<Welcome, _>(&why)), 0);
            // It has room for this: it is new.
            let _ = send_frame(stream.as_fd(), &frame, 0, &[]);
            return Err(io::Error::other(why));
        }
        let peer = Peer::of(&stream)?;
        let (process, name) = (peer.process, peer.name.clone());
        let status = ClientStatus { process, name: name.clone(), resources: Vec::new() };
        let card = Arc::new(Mutex::new(Card { host: None, status }));
        let session = Session::new(self.shared.clone(), stream, peer, card.clone(), self.serial + 1)?;
        self.serial += 1;
        let (serial, shared) = (self.serial, self.shared.clone());
        self.shared.sessions.lock().insert(serial, card);
        let thread = std::thread::Builder::new().name(format!("client {process}")).spawn(move || {
            if let Err(error) = session.run() {
                eprintln!("softhca: process {process} ({name}) was disconnected: {error}");
            }
            shared.sessions.lock().remove(&serial);
        });
        match thread {
            Ok(thread) => self.threads.push(thread),
            Err(error) => {
                self.shared.sessions.lock().remove(&serial);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Lets every client go and removes the socket.
    pub fn stop(&mut self) {
        if self.shared.has_stopped.swap(true, Ordering::AcqRel) {
            return;
        }
        let _ = std::fs::remove_file(&self.socket);
        self.shared.stopping.wake();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        if let Err(error) = self.shared.records.end(0) {
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
struct Rounds {
    at: Instant,
    /// The access that each card was in at the last round, and since when.
    seen: Vec<Option<((u64, u32), Instant)>>,
}

impl Rounds {
    fn make(&mut self, shared: &Shared) {
        if self.at.elapsed() < Duration::from_secs(1) {
            return;
        }
        self.at = Instant::now();
        shared.records.flush();
        for (host, seen) in shared.hosts.iter().zip(&mut self.seen) {
            let now = host.reaching.now();
            let since = seen.filter(|(access, _)| Some(*access) == now).map(|(_, since)| since);
            if let (Some((_, process)), Some(since)) = (now, since) {
                let name = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
                let (host, name) = (&host.card.name, name.trim());
                eprintln!(
                    "softhca: host {host} waits for memory of process {process} ({name}): \
                     it has a page that does not come; everybody on the host waits with it"
                );
                if shared.config.kill_after.is_some_and(|limit| since.elapsed() >= limit) {
                    eprintln!("softhca: process {process} ({name}) is ended, so that host {host} can go on");
                    end_process(process);
                }
            }
            *seen = now.map(|access| (access, since.unwrap_or(self.at)));
        }
    }
}

/// SIGKILL. It cannot be another process by now: the card is inside of its memory.
fn end_process(number: u32) {
    if let Some(process) = rustix::process::Pid::from_raw(number as i32) {
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
}

/// Locks the file, or says that somebody has it.
fn lock(path: &Path, name: &str) -> Result<File, StartError> {
    let file = File::options().create(true).truncate(false).write(true).open(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StartError::Running { name: name.into() }),
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
        let config = Config { name: name.clone(), leave_after: Some(Duration::ZERO), ..Config::default() };
        let folder = Folder::of_user();
        let is_free = |path: PathBuf| {
            let file = File::options().write(true).open(path).expect("the daemon made it");
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        };
        let mut daemon = Daemon::start(config).expect("it starts");
        daemon.run(None).expect("it leaves, as nobody is there");
        assert!(!folder.socket(&name).exists());
        // It still has its lock: nobody may start another yet.
        assert!(!is_free(folder.lock(&name)) && !is_free(folder.door(&name)));
        drop(daemon);
        assert!(is_free(folder.door(&name)) && is_free(folder.lock(&name)));
        for path in [folder.door(&name), folder.lock(&name)] {
            std::fs::remove_file(path).expect("it is ours");
        }
    }
}
