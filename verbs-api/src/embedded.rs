//! A card in this process: callers drive it when they poll, a thread of its own when nobody does.

use crate::backend::Result;
use crate::local::{Board, Local, Seat};
use crate::memory::{Block, HostMemory};
use crate::notifier::Notifier;
use crate::time::real_now;
use crate::{Error, Rendezvous};
use softhca_engine::{Context, Event, Hca, Instant, MemoryId};
use softhca_fabric::{Fault, Flow, Rule, Tally};
use softhca_queue::Words;
use softhca_udp::{
    Conduct, Driver, DriverOptions, HostSockets, LinkEvent, Passage, ProcessMark, ReceiveMemory, Station,
    Witness,
};
use softhca_wire::{Envelope, Gid, Mtu};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// How long a caller that waits for an event of a connection drives before it sleeps.
const ATTENTION: Duration = Duration::from_micros(50);

/// Reads the card's events for the board, and passes everything on.
struct Reader {
    board: Arc<Board>,
    next: Box<dyn Witness>,
}

impl Witness for Reader {
    fn card(&mut self, now: Instant, event: &Event) {
        self.board.put_up(event);
        self.next.card(now, event);
    }

    fn frame(&mut self, now: Instant, passage: Passage, envelope: &Envelope, packet: &[u8]) {
        self.next.frame(now, passage, envelope, packet);
    }

    fn fault(&mut self, now: Instant, fault: &Fault) {
        self.next.fault(now, fault);
    }

    fn link(&mut self, now: Instant, event: &LinkEvent) {
        self.next.link(now, event);
    }
}

/// A card in this process, on real sockets.
pub(crate) type Embedded = Local<Stand>;

/// The station of an embedded card: callers drive it when they poll.
pub(crate) struct Stand {
    station: Station<HostMemory>,
    process: ProcessMark,
}

/// Starts a card on these sockets.
pub(crate) fn start(
    sockets: HostSockets,
    options: DriverOptions,
    witness: Box<dyn Witness>,
) -> Result<Embedded> {
    let board = Arc::new(Board::default());
    let reader = Reader { board: board.clone(), next: witness };
    let driver = Driver::new(sockets, options, HostMemory::default(), Box::new(reader));
    let station = Station::start(driver, Conduct::Callers, Words::heap(1))
        .map_err(|source| Error::System { what: "starting the card's thread", source })?;
    Local::new(Stand { station, process: ProcessMark::current() }, board)
}

/// Refuses in a child of the process that `mark` stands for.
pub(crate) fn check_process(mark: &ProcessMark) -> Result<()> {
    if mark.is_here() { Ok(()) } else { Err(Error::Forked { parent: mark.number }) }
}

impl Stand {
    pub fn address(&self) -> IpAddr {
        self.station.control(|driver| driver.address())
    }

    pub fn receive_memory(&self) -> Result<[ReceiveMemory; 2]> {
        self.station
            .control(|driver| driver.receive_memory())
            .map_err(|source| Error::System { what: "asking the card's sockets", source })
    }

    pub fn add_rule(&self, seed: u64, rule: Rule) {
        self.station.control(|driver| driver.add_rule(seed, rule));
    }

    pub fn add_flow(&self, seed: u64, flow: Flow) {
        self.station.control(|driver| driver.add_flow(seed, flow));
    }

    pub fn rules(&self) -> Vec<(Rule, Tally)> {
        self.station.control(|driver| driver.rules().map(|(rule, tally)| (rule.clone(), tally)).collect())
    }
}

impl Seat for Stand {
    fn check_process(&self) -> Result<()> {
        check_process(&self.process)
    }

    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        self.station.control(|driver| driver.control(act))
    }

    fn add_memory(&self, block: Arc<Block>) -> MemoryId {
        self.station.control(|driver| driver.memory().add(block))
    }

    fn remove_memory(&self, memory: MemoryId) {
        self.station.control(|driver| driver.memory().remove(memory));
    }

    fn check_group(&self, group: Gid) -> Result<()> {
        match self.station.control(|driver| driver.multicast_failure(group)) {
            None => Ok(()),
            Some(source) => Err(Error::System { what: "joining the multicast group", source }),
        }
    }

    fn hear(&self) {
        self.station.wake();
    }

    fn active_mtu(&self) -> Mtu {
        self.station.control(|driver| driver.card().settings().mtu)
    }

    fn host_named(&self, _: &str) -> Option<IpAddr> {
        None
    }

    fn drive(&self) {
        self.station.drive();
    }

    fn now(&self) -> Instant {
        real_now()
    }

    fn attend(&self, news: &Notifier, seen: u64) {
        let until = std::time::Instant::now() + ATTENTION;
        while news.count() == seen {
            if std::time::Instant::now() >= until {
                return self.station.hand_over();
            }
            self.station.drive();
        }
    }

    fn wait(&self, news: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        news.wait(seen, until.map(|until| until.since(real_now())))
    }

    fn random(&self) -> u64 {
        RandomState::new().hash_one(0)
    }

    fn rendezvous(&self) -> Rendezvous {
        Rendezvous::of_process()
    }
}
