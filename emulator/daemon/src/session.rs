//! One connection: reads calls, writes replies and news, and notices when the other side is gone.

use crate::client::Client;
use crate::faults;
use crate::host::Host;
use crate::outbox::Outbox;
use crate::peer::Peer;
use crate::ports;
use crate::refusal::Refusal;
use crate::server::Shared;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use softhca_queue::PortState;
use softhca_queue::control::{
    Call, ClientStatus, Frame, FrameReader, Hello, Message, News, PROTOCOL, Reply, Welcome, decode, encode,
    send_frame,
};
use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Answers that may wait for a client that does not read, before its calls wait too.
const MOST_WAITING: usize = 64;
/// Events of connection management in one frame.
const MOST_EVENTS: usize = 64;

/// What others may know of a session.
pub(crate) struct Card {
    pub host: Option<String>,
    pub status: ClientStatus,
}

struct Outgoing {
    frame: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    done: usize,
}

/// A socket, and what waits to be sent over it.
struct Way {
    stream: UnixStream,
    outgoing: VecDeque<Outgoing>,
}

impl Way {
    fn new(stream: UnixStream) -> io::Result<Way> {
        stream.set_nonblocking(true)?;
        Ok(Way { stream, outgoing: VecDeque::new() })
    }

    fn has_room(&self) -> bool {
        self.outgoing.len() < MOST_WAITING
    }

    fn send<T: serde::Serialize>(&mut self, message: &T, descriptors: Vec<OwnedFd>) {
        let frame = Frame::lay_out(&encode(message), descriptors.len());
        self.outgoing.push_back(Outgoing { frame, descriptors, done: 0 });
    }

    /// Writes what the socket takes.
    fn write(&mut self) -> io::Result<()> {
        while let Some(out) = self.outgoing.front_mut() {
            let descriptors: Vec<_> = out.descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
            match send_frame(self.stream.as_fd(), &out.frame, out.done, &descriptors) {
                Ok(count) => out.done += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // It closed its end: reading finds that out.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    self.outgoing.clear();
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
            if out.done == out.frame.len() {
                self.outgoing.pop_front();
            }
        }
        Ok(())
    }
}

/// One connection.
pub(crate) struct Session {
    shared: Arc<Shared>,
    calls: Way,
    /// Where news go once a device is open.
    news: Option<Way>,
    peer: Peer,
    outbox: Arc<Outbox>,
    reader: FrameReader,
    greeted: bool,
    client: Option<Client>,
    card: Arc<Mutex<Card>>,
    /// The hosts that it gave rules or roles to, or whose port it took down.
    disturbed: BTreeSet<String>,
    /// Its number, by which it has records.
    serial: u64,
    /// Send what waits, then end.
    ending: bool,
}

impl Session {
    pub fn new(
        shared: Arc<Shared>,
        stream: UnixStream,
        peer: Peer,
        card: Arc<Mutex<Card>>,
        serial: u64,
    ) -> io::Result<Session> {
        Ok(Session {
            shared,
            calls: Way::new(stream)?,
            news: None,
            peer,
            outbox: Arc::new(Outbox::new()?),
            reader: FrameReader::default(),
            greeted: false,
            client: None,
            card,
            disturbed: BTreeSet::new(),
            serial,
            ending: false,
        })
    }

    /// Serves the connection to its end. An error is what the other side did wrong.
    pub fn run(mut self) -> io::Result<()> {
        let result = self.serve();
        self.shared.watchers.remove(&self.outbox);
        let _ = self.shared.records.end(self.serial);
        self.undo();
        // The card lets the client go before the socket closes: who sees its end may take the rings over.
        self.client = None;
        result
    }

    /// Leaves the cards as they were, unless a program's own rules stand there, which go with its card.
    fn undo(&mut self) {
        for name in std::mem::take(&mut self.disturbed) {
            if let Ok(host) = self.shared.host(Some(&name)) {
                let _ = faults::clear(&self.shared, host);
                host.station.control(|driver| driver.set_port(PortState::Active));
            }
        }
    }

    /// Takes note that a host is not as it was. What a program does to its own host stays, as long as the host does.
    fn disturb(&mut self, host: &Option<String>) -> Result<(), Refusal> {
        if self.client.is_none() {
            let name = self.host(host.clone())?.card.name.clone();
            self.disturbed.insert(name);
        }
        Ok(())
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            self.calls.write()?;
            if let Some(news) = &mut self.news {
                news.write()?;
                if news.outgoing.is_empty() {
                    self.outbox.is_sent();
                }
            }
            if self.ending && self.calls.outgoing.is_empty() {
                return Ok(());
            }
            // What a client that does not read is owed waits in places that are limited.
            let (mut interest, mut news) = (PollFlags::empty(), PollFlags::empty());
            if self.calls.has_room() && !self.ending {
                interest |= PollFlags::IN;
            }
            if self.news.as_ref().unwrap_or(&self.calls).has_room() && !self.ending {
                news |= PollFlags::IN;
            }
            if !self.calls.outgoing.is_empty() {
                interest |= PollFlags::OUT;
            }
            let mut polled = vec![
                PollFd::new(&self.calls.stream, interest),
                PollFd::from_borrowed_fd(self.outbox.as_fd(), news),
                PollFd::from_borrowed_fd(self.peer.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.shared.stopping.as_fd(), PollFlags::IN),
            ];
            let blocked = self.news.as_ref().filter(|news| !news.outgoing.is_empty());
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
                self.take_news()?;
            }
            if stream.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) && !self.read()? {
                return Ok(());
            }
        }
    }

    fn take_news(&mut self) -> io::Result<()> {
        let Some(news) = self.outbox.take() else {
            return Err(io::Error::other("it does not read its news"));
        };
        let Session { client, calls, news: way, .. } = self;
        let way = way.as_mut().unwrap_or(calls);
        for news in news {
            let News::CmRaised { channel, .. } = news else {
                way.send(&Message::News(news), Vec::new());
                continue;
            };
            let events = client.as_mut().map(|client| client.take_cm_events(channel)).unwrap_or_default();
            for events in events.chunks(MOST_EVENTS) {
                let news = News::CmRaised { channel, events: events.to_vec() };
                way.send(&Message::News(news), Vec::new());
            }
        }
        self.note();
        Ok(())
    }

    /// Reads once and answers what is complete. False at the end of the stream.
    fn read(&mut self) -> io::Result<bool> {
        match self.reader.fill(self.calls.stream.as_fd()) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(true),
                io::ErrorKind::ConnectionReset => return Ok(false),
                _ => return Err(error),
            },
        }
        while let Some(Frame { bytes, descriptors }) = self.reader.take()? {
            if !self.greeted {
                self.greet(&bytes)?;
                continue;
            }
            let call: Call = decode(&bytes)?;
            let (reply, passed) = match self.answer(call, descriptors) {
                Ok(answer) => answer,
                Err(refusal) => (refusal.reply(), Vec::new()),
            };
            self.calls.send(&Message::Reply(reply), passed);
            self.note();
        }
        Ok(true)
    }

    /// Checks who it is and which protocol it speaks.
    fn greet(&mut self, bytes: &[u8]) -> io::Result<()> {
        let hello: Hello = decode(bytes)?;
        if hello.magic != Hello::MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a client of ours"));
        }
        let user = rustix::process::geteuid().as_raw();
        let ours = env!("CARGO_PKG_VERSION");
        let refusal = if self.peer.user != user {
            let text = format!("this daemon serves user {user} only, and you are {}", self.peer.user);
            Some(Refusal::new(libc::EACCES, text))
        } else if hello.protocol != PROTOCOL {
            let text = format!(
                "the daemon is version {ours} (protocol {PROTOCOL}), the library {} (protocol {}): \
                 `softhca stop`, and start the daemon that came with the library",
                hello.version, hello.protocol
            );
            Some(Refusal::new(libc::EPROTO, text))
        } else {
            None
        };
        match refusal {
            Some(refusal) => {
                self.ending = true;
                self.calls.send(&Err::<Welcome, _>(refusal.message), Vec::new());
            }
            None => {
                self.greeted = true;
                let hosts = self.shared.hosts.iter().map(|host| host.card.clone()).collect();
                let process = std::process::id();
                let welcome = Welcome { protocol: PROTOCOL, version: ours.into(), process, hosts };
                self.calls.send(&Ok::<_, String>(welcome), Vec::new());
            }
        }
        Ok(())
    }

    fn answer(&mut self, call: Call, mut descriptors: Vec<OwnedFd>) -> crate::client::Answer {
        let reply = match call {
            Call::Open { host } => {
                if self.client.is_some() {
                    return Err(Refusal::new(libc::EBUSY, "the device is open already"));
                }
                let host = self.shared.host(host.as_deref())?.clone();
                let memory = descriptors.pop();
                let (client, reply, mut passed) =
                    Client::open(&self.shared, &host, &self.peer, &self.outbox, memory)?;
                let (ours, theirs) = UnixStream::pair()?;
                passed.insert(passed.len() - 1, theirs.into());
                let way = Way::new(ours)?;
                self.outbox.lead_to(way.stream.try_clone()?);
                (self.client, self.news) = (Some(client), Some(way));
                return Ok((reply, passed));
            }
            Call::Status => Reply::Status(self.shared.status()),
            Call::Counters { host } => {
                let host = self.host(host)?;
                Reply::Counters(host.station.control(|driver| *driver.card().counters()))
            }
            Call::Ports => {
                let names: Vec<_> = self.shared.hosts.iter().map(|host| host.card.name.as_str()).collect();
                let ports = self.shared.backbone.as_ref().map(|backbone| ports::count(backbone, &names));
                Reply::Ports(ports.unwrap_or_default())
            }
            Call::Watch => {
                self.shared.watchers.remove(&self.outbox);
                self.shared.watchers.add(&self.outbox);
                Reply::Done
            }
            Call::AddRules { host, seed, rules } => {
                self.disturb(&host)?;
                return faults::add_rules(&self.shared, self.host(host)?, seed, &rules);
            }
            Call::AddFlows { host, seed, flows } => return faults::add_flows(self.host(host)?, seed, &flows),
            Call::NameFlows { host, seed, roles } => {
                self.disturb(&host)?;
                self.shared.names.expect(self.host(host)?, seed, roles)?;
                Reply::Done
            }
            Call::Rules { host } => return faults::rules(self.host(host)?),
            Call::ClearRules { host } => return faults::clear(&self.shared, self.host(host)?),
            Call::Record { capture, log } => {
                let mut files = descriptors.into_iter().map(File::from);
                let [capture, log] = [capture, log].map(|asked| asked.then(|| files.next()));
                if matches!(capture, Some(None)) || matches!(log, Some(None)) {
                    return Err(Refusal::new(libc::EBADF, "a record needs the descriptor that it goes to"));
                }
                self.shared.records.start(self.serial, capture.flatten(), log.flatten())?;
                Reply::Done
            }
            Call::EndRecords => {
                self.shared.records.end(self.serial)?;
                Reply::Done
            }
            Call::SetPort { host, state } => {
                let host = Some(host);
                self.disturb(&host)?;
                self.host(host)?.station.control(|driver| driver.set_port(state));
                Reply::Done
            }
            Call::Stop => {
                self.shared.ask_to_stop();
                Reply::Done
            }
            call => match &mut self.client {
                Some(client) => return client.call(call, descriptors),
                None => return Err(Refusal::new(libc::ENODEV, "no device is open on this connection")),
            },
        };
        Ok((reply, Vec::new()))
    }

    /// The host with this name; without one, the client's own, or the first.
    fn host(&self, name: Option<String>) -> Result<&Arc<Host>, Refusal> {
        match (&self.client, name) {
            (Some(client), None) => Ok(&client.host),
            (_, name) => self.shared.host(name.as_deref()),
        }
    }

    /// Keeps what others may know up to date.
    fn note(&mut self) {
        let Some(client) = &mut self.client else { return };
        if let Some(counts) = client.quota.changed_counts() {
            let mut card = self.card.lock();
            card.host.get_or_insert_with(|| client.host.card.name.clone());
            card.status.resources = counts;
        }
    }
}
