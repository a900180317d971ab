//! A socket: its connection, the events that advance it, and the threads that wait for it.

use super::super::devices::{CmDevice, cm_devices, no_device};
use super::super::identifier::{CmIdState, new_channel};
use super::options::{Options, sizes};
use super::stream::{ConnectionData, PeerState, Stream};
use super::wait::{block, look};
use crate::errno::Rejection;
use core::ffi::{c_int, c_short};
use parking_lot::{Mutex, MutexGuard, RwLock};
use softhca::cm::{Event, EventChannel, EventType, PortSpace};
use softhca::{Context, Error};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a call looks for completions before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(50);

/// The descriptors of sockets begin here if the limits permit it. The preload library opens a descriptor of its own before
/// it calls `rsocket` or `raccept`. Its `select` (rdma-core 44) reports another one if that of the socket is lower, as it
/// may be if a thread closes descriptors meanwhile. A process that has threads waits for milliseconds when its table of
/// descriptors grows: the first socket takes its descriptor before the device is opened.
const FIRST_DESCRIPTOR: c_int = 512;

/// The sockets of the process, by descriptor.
static SOCKETS: RwLock<BTreeMap<c_int, Arc<Rsocket>>> = RwLock::new(BTreeMap::new());

/// A socket. Its descriptor is an event counter, by which a thread that processes completions wakes others.
pub struct Rsocket {
    wakeup: OwnedFd,
    state: Mutex<State>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    Unconnected,
    Listening,
    /// The connection is requested, or accepted and not confirmed.
    Connecting,
    Connected,
    Disconnected,
    Failed(c_int),
}

pub struct State {
    pub phase: Phase,
    pub stream: Option<Stream>,
    pub cm: CmIdState,
    channels: Vec<EventChannel>,
    /// How often anything has changed.
    changes: u64,
    /// Requests that wait for `raccept`.
    pub requests: VecDeque<Event>,
    pub is_nonblocking: bool,
    pub options: Options,
    /// The pending error of SO_ERROR.
    pub error: c_int,
    /// Closed by `rshutdown`.
    pub is_read_shut: bool,
    pub is_write_shut: bool,
    waiters: Waiters,
}

/// Threads that sleep until the socket changes.
#[derive(Default)]
struct Waiters {
    count: u32,
    /// The number of wakeups so far, and of threads that have to see the last one.
    wakeups: u64,
    unseen: u32,
}

/// The descriptor of a socket.
fn new_descriptor() -> Result<OwnedFd, Rejection> {
    // SAFETY: no pointers.
    let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if descriptor < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Rejection::system(&error, "creating a descriptor for a socket"));
    }
    // SAFETY: it was just created.
    let lowest = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // SAFETY: no pointers.
    let moved = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR) };
    // SAFETY: it was just created.
    Ok(if moved < 0 { lowest } else { unsafe { OwnedFd::from_raw_fd(moved) } })
}

fn device(card: usize) -> Result<CmDevice, Rejection> {
    cm_devices()?.get(card).copied().ok_or_else(no_device)
}

pub fn not_connected() -> Rejection {
    Rejection::new(libc::ENOTCONN, "the socket is not connected")
}

impl Rsocket {
    /// Creates a socket on all cards of the host.
    pub fn open() -> Result<c_int, Rejection> {
        let wakeup = new_descriptor()?;
        let devices = cm_devices()?;
        let channels: Vec<EventChannel> = devices.iter().map(new_channel).collect::<Result<_, _>>()?;
        let ids = channels.iter().map(|channel| channel.create_id(PortSpace::Tcp));
        let ids = ids.collect::<Result<_, Error>>()?;
        let cm = CmIdState::new(0, ids);
        Ok(Rsocket::insert(wakeup, cm, channels, Phase::Unconnected, Options::new(), None))
    }

    fn insert(
        wakeup: OwnedFd,
        cm: CmIdState,
        channels: Vec<EventChannel>,
        phase: Phase,
        options: Options,
        stream: Option<Stream>,
    ) -> c_int {
        let descriptor = wakeup.as_raw_fd();
        let state = State {
            phase,
            stream,
            cm,
            channels,
            changes: 0,
            requests: VecDeque::new(),
            is_nonblocking: false,
            options,
            error: 0,
            is_read_shut: false,
            is_write_shut: false,
            waiters: Waiters::default(),
        };
        SOCKETS.write().insert(descriptor, Arc::new(Rsocket { wakeup, state: Mutex::new(state) }));
        descriptor
    }

    /// The socket of a descriptor, if it is one.
    pub fn get(descriptor: c_int) -> Option<Arc<Rsocket>> {
        SOCKETS.read().get(&descriptor).cloned()
    }

    /// The socket of a descriptor, or why it cannot be used.
    pub fn find(descriptor: c_int) -> Result<Arc<Rsocket>, Rejection> {
        let socket = Rsocket::get(descriptor).ok_or_else(|| {
            Rejection::new(libc::EBADF, format!("descriptor {descriptor} is not an rsocket"))
        })?;
        socket.state.lock().channels[0].context().check_process()?;
        Ok(socket)
    }

    /// Closes a socket: its descriptor is free once no other thread uses it.
    pub fn remove(descriptor: c_int) {
        let removed = SOCKETS.write().remove(&descriptor);
        if let Some(socket) = removed {
            let mut state = socket.state.lock();
            state.phase = Phase::Failed(libc::EBADF);
            socket.wake(&mut state);
        }
    }

    /// Locks the socket, and processes its completions and events.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        if state.progress() {
            self.wake(&mut state);
        }
        state
    }

    /// Wakes all threads that wait for the socket, which has changed.
    pub fn wake(&self, state: &mut State) {
        state.changes += 1;
        let waiters = &mut state.waiters;
        if waiters.count > 0 {
            (waiters.wakeups, waiters.unseen) = (waiters.wakeups + 1, waiters.count);
            // SAFETY: eight bytes of a local value. It fails only if the counter is at its maximum: readable.
            unsafe { libc::write(self.wakeup.as_raw_fd(), (&raw const waiters.wakeups).cast(), 8) };
        }
    }

    /// Joins the threads that wait. Returns what [`Rsocket::leave`] needs.
    fn enter(state: &mut State) -> u64 {
        state.waiters.count += 1;
        state.waiters.wakeups
    }

    fn leave(&self, state: &mut State, entered_at: u64) {
        let waiters = &mut state.waiters;
        waiters.count -= 1;
        if entered_at < waiters.wakeups && waiters.unseen > 0 {
            waiters.unseen -= 1;
            if waiters.unseen == 0 {
                let mut count = 0_u64;
                // SAFETY: eight bytes of a local value; the descriptor does not block.
                unsafe { libc::read(self.wakeup.as_raw_fd(), (&raw mut count).cast(), 8) };
            }
        }
    }

    /// Repeats `attempt` until it has a result, waiting in between unless the call does not block.
    pub fn wait_for<T>(
        self: &Arc<Self>,
        may_block: bool,
        mut attempt: impl FnMut(&mut State) -> Result<Option<T>, Rejection>,
    ) -> Result<T, Rejection> {
        let mut spin_until = None;
        loop {
            let seen = {
                let mut state = self.state.lock();
                for has_progressed in [false, true] {
                    if has_progressed && state.progress() {
                        self.wake(&mut state);
                    }
                    let result = attempt(&mut state);
                    if state.stream.as_mut().is_some_and(Stream::take_changes) {
                        self.wake(&mut state);
                    }
                    if let Some(value) = result? {
                        return Ok(value);
                    }
                }
                state.changes
            };
            if !may_block {
                return Err(Rejection::would_block());
            }
            if Instant::now() < *spin_until.get_or_insert_with(|| Instant::now() + SPIN_TIME) {
                std::thread::yield_now();
                continue;
            }
            sleep(&[(self.clone(), seen)], &mut [], None)?;
        }
    }
}

/// Sleeps until one of the sockets has changed since the caller saw it, one of the other descriptors is ready, or the
/// time is over. May return early.
fn sleep(
    sockets: &[(Arc<Rsocket>, u64)],
    others: &mut [libc::pollfd],
    timeout: Option<Duration>,
) -> Result<(), Rejection> {
    let mut polled = Vec::new();
    let mut contexts: Vec<Context> = Vec::new();
    let mut entered = Vec::new();
    let mut has_changed = false;
    for (socket, seen) in sockets {
        let mut state = socket.state.lock();
        if let Some(stream) = &state.stream {
            stream.arm();
        }
        if state.progress() {
            socket.wake(&mut state);
        }
        has_changed |= state.changes != *seen;
        let add = |descriptor| libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
        polled.push(add(socket.wakeup.as_raw_fd()));
        polled.extend(state.stream.iter().map(|stream| add(stream.channel.as_fd().as_raw_fd())));
        let descriptors = state.channels.iter().filter_map(|channel| channel.descriptor().ok());
        polled.extend(descriptors.map(|descriptor| add(descriptor.as_raw_fd())));
        let context = state.context();
        if contexts.iter().all(|other| other.address() != context.address()) {
            contexts.push(context);
        }
        entered.push(Rsocket::enter(&mut state));
    }
    let result = if has_changed { look(others) } else { block(&contexts, polled, others, timeout) };
    for ((socket, _), entered_at) in sockets.iter().zip(entered) {
        socket.leave(&mut socket.state.lock(), entered_at);
    }
    result
}

/// `poll` for sockets and other descriptors.
pub fn poll(entries: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<c_int, Rejection> {
    let until = timeout.map(|timeout| Instant::now() + timeout);
    let found: Vec<Option<Arc<Rsocket>>> = entries.iter().map(|entry| Rsocket::get(entry.fd)).collect();
    let mut others: Vec<libc::pollfd> = entries.to_vec();
    for (other, socket) in others.iter_mut().zip(&found) {
        other.revents = 0;
        if socket.is_some() {
            // The kernel ignores negative descriptors.
            other.fd = -1;
        }
    }
    let spin_until = Instant::now() + SPIN_TIME;
    // The kernel knows which of the other descriptors are ready.
    let mut has_looked = found.iter().all(Option::is_some);
    loop {
        let mut ready = 0;
        let mut sockets = Vec::new();
        for ((entry, socket), other) in entries.iter_mut().zip(&found).zip(&others) {
            entry.revents = match socket {
                Some(socket) => {
                    let mut state = socket.lock();
                    sockets.push((socket.clone(), state.changes));
                    state.ready(entry.events)
                }
                None => other.revents,
            };
            ready += c_int::from(entry.revents != 0);
        }
        let now = Instant::now();
        let left = until.map(|until| until.saturating_duration_since(now));
        let is_over = ready > 0 || left == Some(Duration::ZERO);
        if is_over && has_looked {
            return Ok(ready);
        }
        if has_looked && now < spin_until && !sockets.is_empty() {
            std::thread::yield_now();
            continue;
        }
        match has_looked {
            true => sleep(&sockets, &mut others, left)?,
            false => look(&mut others)?,
        }
        has_looked = true;
    }
}

impl State {
    /// Processes completions and connection events. Returns whether anything has changed.
    fn progress(&mut self) -> bool {
        let is_connected = self.phase == Phase::Connected;
        let mut has_changed = self.stream.as_mut().is_some_and(|stream| stream.progress(is_connected));
        let mut has_cm_event = false;
        for index in 0..self.channels.len() {
            while !matches!(self.phase, Phase::Failed(_)) && self.channels[index].may_have_event() {
                match self.channels[index].poll() {
                    Ok(None) => break,
                    Ok(Some(event)) => self.process(event),
                    Err(error) => self.fail(Rejection::from(error)),
                }
                has_cm_event = true;
            }
        }
        if has_cm_event {
            has_changed = true;
            // Data that arrived before the connection ended.
            if let Some(stream) = &mut self.stream {
                stream.progress(false);
            }
        }
        if self.stream.as_ref().is_some_and(Stream::is_over) && self.phase == Phase::Connected {
            self.phase = Phase::Disconnected;
        }
        has_changed
    }

    /// The selected card.
    pub fn context(&self) -> Context {
        self.cm.id().context()
    }

    fn fail(&mut self, rejection: Rejection) {
        self.error = rejection.code("an rsocket");
        self.phase = Phase::Failed(self.error);
    }

    fn process(&mut self, event: Event) {
        let refused = |errno| Rejection::new(errno, format!("{:?}, status {}", event.kind, event.status));
        let result = match event.kind {
            EventType::ConnectRequest => {
                self.requests.push_back(event);
                Ok(())
            }
            EventType::AddressResolved => self.cm.id().resolve_route().map_err(Rejection::from),
            EventType::RouteResolved => self.request_connection(),
            EventType::Established => self.complete(&event.private_data),
            EventType::Disconnected => {
                if !matches!(self.phase, Phase::Failed(_)) {
                    self.phase = Phase::Disconnected;
                }
                Ok(())
            }
            EventType::AddressError | EventType::RouteError => Err(refused(libc::ENETUNREACH)),
            EventType::Unreachable => Err(refused(libc::ETIMEDOUT)),
            EventType::Rejected | EventType::ConnectError => Err(refused(libc::ECONNREFUSED)),
            EventType::DeviceRemoval => Err(refused(libc::ENODEV)),
            _ => Ok(()),
        };
        if let Err(rejection) = result {
            self.fail(rejection);
        }
    }

    /// Requests the connection, whose path is known.
    fn request_connection(&mut self) -> Result<(), Rejection> {
        let stream = prepare(&self.cm, &self.options)?;
        self.cm.id().connect(&stream.parameters())?;
        self.stream = Some(stream);
        Ok(())
    }

    /// The connection stands. The side that requested it learns now what the other has said.
    fn complete(&mut self, private_data: &[u8]) -> Result<(), Rejection> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        if !stream.has_peer() {
            let Some(peer) = ConnectionData::parse(private_data) else {
                return Err(Rejection::new(libc::EPROTO, "the peer accepted, but does not use rsockets"));
            };
            stream.set_peer(peer);
        }
        self.phase = Phase::Connected;
        stream.progress(true);
        Ok(())
    }

    /// Begins to connect.
    pub fn connect(&mut self, address: SocketAddr) -> Result<(), Rejection> {
        match self.phase {
            Phase::Unconnected => {}
            Phase::Connecting => return Err(Rejection::new(libc::EALREADY, "the socket is connecting")),
            Phase::Failed(errno) => return Err(Rejection::new(errno, "the connection has failed")),
            _ => return Err(Rejection::new(libc::EISCONN, "the socket is connected or listens")),
        }
        self.cm.resolve(None, address)?;
        self.phase = Phase::Connecting;
        Ok(())
    }

    pub fn listen(&mut self, backlog: c_int) -> Result<(), Rejection> {
        self.cm.listen(backlog.max(0) as u32)?;
        self.phase = Phase::Listening;
        Ok(())
    }

    /// Accepts the next request, if there is one: the descriptor of a new socket.
    pub fn accept(&mut self) -> Result<Option<c_int>, Rejection> {
        if self.phase != Phase::Listening {
            return Err(Rejection::invalid("the socket does not listen"));
        }
        while let Some(request) = self.requests.pop_front() {
            let Some(peer) = ConnectionData::parse(&request.private_data) else {
                // A program that uses the connection otherwise.
                let _ = request.id.reject(&[]);
                continue;
            };
            let cards = cm_devices()?;
            let address = request.id.context().address();
            let card = cards.iter().position(|device| device.address == address).unwrap_or(0);
            let channel = new_channel(&device(card)?)?;
            request.id.migrate(&channel)?;
            let cm = CmIdState::new(card, vec![request.id]);
            let mut stream = prepare(&cm, &self.options)?;
            stream.set_peer(peer);
            cm.id().accept(&stream.parameters())?;
            let options = self.options.clone();
            let wakeup = new_descriptor()?;
            let accepted =
                Rsocket::insert(wakeup, cm, vec![channel], Phase::Connecting, options, Some(stream));
            return Ok(Some(accepted));
        }
        Ok(None)
    }

    /// The stream, once it is connected; `None` while it connects.
    pub fn connected(&mut self) -> Result<Option<&mut Stream>, Rejection> {
        match self.phase {
            Phase::Connecting => Ok(None),
            Phase::Failed(errno) => Err(Rejection::new(errno, "the connection has failed")),
            Phase::Connected | Phase::Disconnected => Ok(self.stream.as_mut()),
            Phase::Unconnected | Phase::Listening => Err(not_connected()),
        }
    }

    /// The stream to send on, or why nothing can be sent; `None` while it connects.
    pub fn writable(&mut self) -> Result<Option<&mut Stream>, Rejection> {
        if self.connected()?.is_none() {
            return Ok(None);
        }
        let why = match (&self.stream, self.phase) {
            _ if self.is_write_shut => "the socket was shut down".into(),
            (Some(stream), Phase::Disconnected) => match &stream.failure {
                Some(completion) => completion.to_string(),
                None => "the peer has disconnected".into(),
            },
            _ => return Ok(self.stream.as_mut()),
        };
        Err(Rejection::new(libc::EPIPE, why))
    }

    /// Whether no more data will arrive.
    pub fn is_at_end(&self) -> bool {
        let has_peer_ended = self.stream.as_ref().is_some_and(|stream| stream.peer_state != PeerState::Open);
        self.is_read_shut || has_peer_ended || self.phase == Phase::Disconnected
    }

    /// The requested events that are there, and errors.
    fn ready(&mut self, requested: c_short) -> c_short {
        let mut ready = 0;
        let is_at_end = self.is_at_end();
        match self.phase {
            Phase::Unconnected => ready |= libc::POLLOUT | libc::POLLHUP,
            Phase::Listening if !self.requests.is_empty() => ready |= libc::POLLIN,
            Phase::Listening | Phase::Connecting => {}
            Phase::Failed(_) => ready |= libc::POLLIN | libc::POLLOUT | libc::POLLERR | libc::POLLHUP,
            Phase::Disconnected => {
                ready |= libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
                // Programs take POLLHUP for the end of the data too.
                if self.stream.as_ref().is_none_or(|stream| stream.readable() == 0) {
                    ready |= libc::POLLHUP;
                }
            }
            Phase::Connected => {
                let Some(stream) = &mut self.stream else { return 0 };
                if stream.readable() > 0 {
                    ready |= libc::POLLIN;
                }
                if is_at_end {
                    ready |= libc::POLLIN | libc::POLLRDHUP;
                }
                if self.is_write_shut || stream.can_send() {
                    ready |= libc::POLLOUT;
                }
            }
        }
        for (event, normal) in [(libc::POLLIN, libc::POLLRDNORM), (libc::POLLOUT, libc::POLLWRNORM)] {
            if ready & event != 0 {
                ready |= normal;
            }
        }
        ready & (requested | libc::POLLERR | libc::POLLHUP)
    }

    /// Ends one or both directions, and sends a control message that says so.
    pub fn shut_down(&mut self, is_read: bool, is_write: bool) {
        let was_over = self.is_read_shut && self.is_write_shut;
        let was_write_shut = self.is_write_shut;
        self.is_read_shut |= is_read;
        self.is_write_shut |= is_write;
        let is_over = self.is_read_shut && self.is_write_shut;
        if let Some(stream) = self.stream.as_mut().filter(|_| self.phase == Phase::Connected)
            && (is_over && !was_over || self.is_write_shut && !was_write_shut)
        {
            stream.shut_down(is_over);
        }
    }
}

/// Creates the stream of an identifier that has a card, ready to receive.
fn prepare(cm: &CmIdState, options: &Options) -> Result<Stream, Rejection> {
    let device = device(cm.card())?;
    let open = device.context.find()?;
    let domain = device.pd.find()?;
    let stream = Stream::new(&open.context, &domain.domain, sizes(options))?;
    cm.id().attach_queue_pair(stream.pair())?;
    stream.post_receives()?;
    Ok(stream)
}
