//! A host: its card, the thread that drives it, and who hears what the card tells.

use crate::config::{Config, HostConfig};
use crate::outbox::Outbox;
use crate::reach::{Memories, Reaching};
use crate::record::Records;
use crate::server::StartError;
use parking_lot::Mutex;
use softhca_engine::{Acks, ClientId, CqId, Event, Instant, Settings};
use softhca_fabric::{FabricEvent, Fault, HostId};
use softhca_queue::control::{HostCard, News};
use softhca_queue::{Rights, SharedMemory};
use softhca_trace::Heading;
use softhca_udp::{
    Backbone, Conduct, Driver, DriverOptions, HostSockets, IcrcCheck, Passage, SocketOptions, Station,
    Witness, bind_host,
};
use softhca_wire::{Envelope, Pfc};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// A host of the daemon.
pub(crate) struct Host {
    pub card: HostCard,
    pub station: Station<Memories>,
    pub board: Arc<Board>,
    pub reaching: Arc<Reaching>,
    /// The page that tells clients whether the engine thread sleeps. They can only read it.
    pub asleep: OwnedFd,
}

/// Who hears what of a card.
#[derive(Default)]
pub(crate) struct Board {
    host: String,
    queues: Mutex<BTreeMap<CqId, Arc<Outbox>>>,
    clients: Mutex<BTreeMap<ClientId, Listener>>,
    watchers: Arc<Watchers>,
}

struct Listener {
    process: u32,
    name: String,
    outbox: Arc<Outbox>,
}

/// Connections that hear every asynchronous event of every host.
#[derive(Default)]
pub(crate) struct Watchers {
    all: Mutex<Vec<Arc<Outbox>>>,
}

impl Watchers {
    pub fn add(&self, outbox: &Arc<Outbox>) {
        self.all.lock().push(outbox.clone());
    }

    pub fn remove(&self, outbox: &Arc<Outbox>) {
        self.all.lock().retain(|other| !Arc::ptr_eq(other, outbox));
    }
}

impl Board {
    pub fn add_client(&self, client: ClientId, process: u32, name: &str, outbox: &Arc<Outbox>) {
        let listener = Listener { process, name: name.into(), outbox: outbox.clone() };
        self.clients.lock().insert(client, listener);
    }

    pub fn remove_client(&self, client: ClientId) {
        self.clients.lock().remove(&client);
    }

    pub fn add_queue(&self, cq: CqId, outbox: &Arc<Outbox>) {
        self.queues.lock().insert(cq, outbox.clone());
    }

    pub fn remove_queue(&self, cq: CqId) {
        self.queues.lock().remove(&cq);
    }

    fn raised(&self, client: Option<ClientId>, event: softhca_engine::AsyncEvent) {
        let clients = self.clients.lock();
        let heard = |id: &ClientId| client.is_none_or(|client| client == *id);
        for (_, listener) in clients.iter().filter(|(id, _)| heard(id)) {
            listener.outbox.put(News::Raised(event));
        }
        let process = client.and_then(|client| clients.get(&client)).map(|listener| listener.process);
        for watcher in self.watchers.all.lock().iter() {
            watcher.put(News::Seen { host: self.host.clone(), process, event });
        }
    }
}

/// Reads the card's events for the board and for records.
struct Herald {
    board: Arc<Board>,
    records: Arc<Records>,
    host: HostId,
    /// Queues whose owners are to be woken, once everything that arrived together is in its place: a program may
    /// take it for granted that the acknowledgement of its message comes before the answer, although both are in one
    /// send, the other way round.
    notified: Vec<CqId>,
}

impl Witness for Herald {
    fn card(&mut self, _: Instant, event: &Event) {
        self.records.card(self.host, event);
        match event {
            Event::Notified { cq } => self.notified.push(*cq),
            Event::Raised { client, event } => self.board.raised(*client, *event),
            Event::CmRaised { client, channel, .. } => {
                if let Some(listener) = self.board.clients.lock().get(client) {
                    // The session takes them when it sends.
                    listener.outbox.put(News::CmRaised { channel: *channel, events: Vec::new() });
                }
            }
            Event::ClientFaulted { client, qp, why } => {
                let clients = self.board.clients.lock();
                if let Some(Listener { process, name, .. }) = clients.get(client) {
                    eprintln!("softhca: process {process} ({name}), queue pair {qp}: {why}; it was stopped");
                }
            }
            _ => {}
        }
    }

    fn settled(&mut self) {
        if self.notified.is_empty() {
            return;
        }
        let queues = self.board.queues.lock();
        for cq in self.notified.drain(..) {
            if let Some(outbox) = queues.get(&cq) {
                outbox.put(News::Notified(cq));
            }
        }
    }

    fn frame(&mut self, _: Instant, passage: Passage, envelope: &Envelope, packet: &[u8]) {
        if passage == Passage::Sent {
            self.records.sent(self.host, envelope, packet);
        }
    }

    fn fault(&mut self, _: Instant, fault: &Fault) {
        self.records.fault(self.host, fault);
    }

    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        self.records.port(self.host, now, event);
    }

    fn pause(&mut self, _: Instant, passage: Passage, pause: &Pfc) {
        let heading = if passage == Passage::Sent { Heading::Out } else { Heading::In };
        self.records.link_pause(self.host, heading, pause);
    }
}

impl Host {
    pub fn start(
        config: &Config,
        index: usize,
        host: &HostConfig,
        watchers: &Arc<Watchers>,
        records: &Arc<Records>,
    ) -> Result<Host, StartError> {
        let explain = |source| StartError::Bind { host: host.name.clone(), source };
        let sockets = match host.address {
            Some(address) => {
                let ipv6 = config.ipv6.get(&host.name).copied();
                HostSockets::bind_both(address, ipv6, SocketOptions::default()).map_err(explain)?
            }
            None => bind_host(SocketOptions::default()).map_err(explain)?,
        };
        let settings = Settings {
            recovery: config.recovery,
            congestion: config.congestion,
            acks: Acks::Coalesce,
            least_ack_timeout: Duration::from_millis(500),
            seed: RandomState::new().hash_one(index),
            ..Settings::default()
        };
        let card = HostCard {
            name: host.name.clone(),
            device: format!("softhca{index}"),
            address: sockets.address(),
            active_mtu: sockets.active_mtu(),
            limits: config.share.limits(config.clients),
            recovery: config.recovery.name().into(),
            loopback: config.loopback.name().into(),
        };
        let board =
            Arc::new(Board { host: host.name.clone(), watchers: watchers.clone(), ..Board::default() });
        let Config { entropy, loopback, .. } = *config;
        let options = DriverOptions { settings, icrc: IcrcCheck::default(), entropy, loopback };
        let reaching = Arc::new(Reaching::default());
        let id = HostId(index as u32);
        records.name_host(id, &host.name, card.address);
        let herald = Box::new(Herald {
            board: board.clone(),
            records: records.clone(),
            host: id,
            notified: Vec::new(),
        });
        let driver = Driver::new(sockets, options, Memories::new(reaching.clone()), herald);
        let page = Arc::new(SharedMemory::create("softhca-asleep", 4096, Rights::Read)?);
        let asleep = page.take_descriptor().expect("nobody took it yet");
        let conduct = Conduct::Thread { linger: config.linger };
        let station = Station::start(driver, conduct, page.words(0, 1))?;
        Ok(Host { card, station, board, reaching, asleep })
    }

    /// Puts a network between this host and the others of the daemon.
    pub fn plug_in(&self, backbone: &Arc<Backbone>) -> io::Result<()> {
        if let Some(bell) = backbone.bell(self.card.address) {
            self.station.listen(bell)?;
        }
        self.station.control(|driver| driver.plug_in(backbone.clone()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_woken_when_all_that_came_together_is_there() {
        let (board, outbox) = (Arc::new(Board::default()), Arc::new(Outbox::new().unwrap()));
        for number in [1, 2] {
            board.add_queue(CqId(number), &outbox);
        }
        let records = Records::new();
        let mut herald = Herald { board: board.clone(), records, host: HostId(0), notified: Vec::new() };
        let now = Instant::from_nanos(0);
        for number in [2, 1] {
            herald.card(now, &Event::Notified { cq: CqId(number) });
            assert!(outbox.take().unwrap().is_empty(), "before the rest has arrived");
        }
        board.remove_queue(CqId(1));
        herald.settled();
        assert_eq!(outbox.take().unwrap(), [News::Notified(CqId(2))]);
        herald.settled();
        assert!(outbox.take().unwrap().is_empty());
    }
}
