//! Hosts of one driver each, and the applications on them.

use super::bare;
use softhca_engine::{
    AddressVector, ClientId, Congestion, CqId, Instant, Limits, Memory, MemoryId, PdId, QpInit, QpKind,
    QpRings, Recovery, Region, Settings,
};
use softhca_fabric::{Action, Classes, Repeat, Rule, RuleId, Selector, Store};
use softhca_queue::{
    Access, CompletionConsumer, DoorbellProducer, Operation, Receive, ReceiveProducer, RemoteAddress,
    SendProducer, SendRequest, Sge, Status, completion_ring, doorbell, receive_ring, send_ring,
};
use softhca_udp::{Driver, DriverOptions, HostSockets, LinkEvent, Loopback, Passage, SocketOptions, Witness};
use softhca_wire::{Envelope, Gid, LocalKey, Mtu, Psn, Qpn, QueueKey, RemoteKey};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant as Clock};

pub const RIGHTS: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);
pub const LENGTH: u64 = 4 << 20;
pub const KEY: QueueKey = QueueKey(7);
/// Where messages go, a quarter of the memory for each of four purposes.
pub const QUARTER: u64 = LENGTH / 4;

/// What passed the port, and what changed on its links.
#[derive(Default)]
pub struct Passed {
    pub frames: Vec<(Passage, Envelope, Vec<u8>)>,
    pub links: Vec<LinkEvent>,
    pub pauses: Vec<Passage>,
}

#[derive(Clone, Default)]
pub struct Seen(pub Arc<Mutex<Passed>>);

impl Witness for Seen {
    fn frame(&mut self, _: Instant, passage: Passage, envelope: &Envelope, packet: &[u8]) {
        self.0.lock().unwrap().frames.push((passage, *envelope, packet.to_vec()));
    }

    fn link(&mut self, _: Instant, event: &LinkEvent) {
        self.0.lock().unwrap().links.push(*event);
    }

    fn pause(&mut self, _: Instant, passage: Passage, _: &softhca_wire::Pfc) {
        self.0.lock().unwrap().pauses.push(passage);
    }
}

/// A queue pair, with the application's ends of its rings.
pub struct Pair {
    pub qp: Qpn,
    pub send: SendProducer,
    pub receive: ReceiveProducer,
}

/// What an application has of a card.
pub struct Application {
    pub client: ClientId,
    pub domain: PdId,
    pub cq: CqId,
    pub completions: CompletionConsumer,
    pub doorbell: DoorbellProducer,
    pub key: RemoteKey,
}

pub struct Host {
    pub driver: Driver<Store>,
    pub application: Application,
    pub seen: Seen,
}

/// A loopback address that no other test of this process has.
pub fn free_address() -> IpAddr {
    static LAST: AtomicU8 = AtomicU8::new(1);
    let last = LAST.fetch_add(1, Ordering::Relaxed);
    Ipv4Addr::new(127, 95, std::process::id() as u8, last).into()
}

impl Application {
    /// Opens a card: a client, a completion queue, and a region that is all of its memory.
    pub fn open(driver: &mut Driver<Store>) -> Application {
        let (doorbell, heard) = doorbell(Limits::CARD.queue_pairs as u32);
        let (completed, completions) = completion_ring(4096);
        let memory = driver.memory().allocate(LENGTH);
        assert_eq!(memory, MemoryId(0));
        driver.control(|hca, _| {
            let client = hca.open_client(heard).unwrap();
            let domain = hca.allocate_domain(client).unwrap();
            let cq = hca.create_completion_queue(client, completed).unwrap();
            let region = Region { client, domain, base: 0, length: LENGTH, access: RIGHTS, memory };
            let key = hca.register(region).unwrap();
            Application { client, domain, cq, completions, doorbell, key }
        })
    }

    pub fn add_pair(&self, driver: &mut Driver<Store>, kind: QpKind) -> Pair {
        let (send, taken) = send_ring(256, 1, 0);
        let (receive, posted) = receive_ring(256, 1);
        let init = QpInit { kind, signal_all: true, ..bare::reliable(self.domain, self.cq) };
        let rings = QpRings { send: Some(taken), receive: Some(posted) };
        let qp = driver.control(|hca, _| hca.create_queue_pair(self.client, init, rings).unwrap());
        Pair { qp, send, receive }
    }

    pub fn connect(&self, driver: &mut Driver<Store>, from: &Pair, peer: IpAddr, to: Qpn) {
        let [init, receive, send] = bare::steps((Gid::from(peer), to), Mtu::B1024, Psn::new(0));
        let path = AddressVector { traffic_class: 3 << 5, ..AddressVector::to(Gid::from(peer)) };
        driver.control(|hca, ctx| {
            for step in [init.access(RIGHTS), receive.path(path), send] {
                hca.modify_queue_pair(ctx, self.client, from.qp, &step).unwrap();
            }
        });
    }

    pub fn entry(&self, address: u64, length: u32) -> Sge {
        Sge { address, length, key: LocalKey(self.key.0) }
    }

    pub fn post(&self, pair: &mut Pair, id: u64, operation: Operation, address: u64, length: u32) {
        self.post_request(pair, &SendRequest::new(id, operation, &[self.entry(address, length)]));
    }

    pub fn post_request(&self, pair: &mut Pair, request: &SendRequest<'_>) {
        pair.send.place(request).unwrap();
        pair.send.publish();
        pair.send.ring(&self.doorbell, pair.qp);
    }

    pub fn receive(&self, pair: &mut Pair, id: u64, address: u64, length: u32) {
        pair.receive.place(&Receive { id, scatter: &[self.entry(address, length)] }).unwrap();
        if pair.receive.publish() {
            pair.send.ring(&self.doorbell, pair.qp);
        }
    }

    pub fn write(&self, remote: u64) -> Operation {
        Operation::Write { remote: RemoteAddress { address: remote, key: self.key }, immediate: None }
    }
}

impl Host {
    pub fn new(loopback: Loopback, recovery: Recovery) -> Host {
        Host::at(free_address(), loopback, recovery)
    }

    pub fn at(address: IpAddr, loopback: Loopback, recovery: Recovery) -> Host {
        let sockets = HostSockets::bind(address, SocketOptions::default()).expect("a free loopback address");
        let settings = Settings { recovery, congestion: Congestion::DCQCN, ..Settings::default() };
        let seen = Seen::default();
        let options = DriverOptions { settings, loopback, ..DriverOptions::default() };
        let mut driver = Driver::new(sockets, options, Store::default(), Box::new(seen.clone()));
        let application = Application::open(&mut driver);
        Host { driver, application, seen }
    }

    pub fn add_pair(&mut self) -> Pair {
        self.application.add_pair(&mut self.driver, QpKind::Rc)
    }

    pub fn connect(&mut self, from: &Pair, peer: IpAddr, to: Qpn) {
        self.application.connect(&mut self.driver, from, peer, to);
    }

    /// Two queue pairs that are each other's peer.
    pub fn connected_pairs(&mut self) -> [Pair; 2] {
        let pairs = [self.add_pair(), self.add_pair()];
        let own = self.driver.address();
        self.connect(&pairs[0], own, pairs[1].qp);
        self.connect(&pairs[1], own, pairs[0].qp);
        pairs
    }

    pub fn fill(&mut self, address: u64, length: u64, seed: u8) {
        let bytes: Vec<u8> = (0..length).map(|index| pattern(index, seed)).collect();
        self.driver.memory().write(MemoryId(0), address, &bytes).unwrap();
    }

    pub fn holds(&mut self, address: u64, length: u64, seed: u8) -> bool {
        let mut bytes = vec![0; length as usize];
        self.driver.memory().read(MemoryId(0), address, &mut bytes).unwrap();
        (0..length).zip(bytes).all(|(index, byte)| byte == pattern(index, seed))
    }

    pub fn word(&mut self, address: u64) -> u64 {
        let mut bytes = [0; 8];
        self.driver.memory().read(MemoryId(0), address, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    pub fn turn(&mut self) -> bool {
        self.driver.turn().unwrap()
    }

    /// Takes turns until so many completions came.
    pub fn completions(&mut self, count: usize) -> Vec<(Qpn, u64, Status)> {
        let mut came = Vec::new();
        drive(&mut [self], |hosts| {
            let popped = std::iter::from_fn(|| hosts[0].application.completions.pop());
            came.extend(popped.map(|completion| (completion.queue_pair, completion.id, completion.status)));
            came.len() >= count
        });
        assert_eq!(came.len(), count, "{came:?}");
        came
    }

    pub fn succeed(&mut self, count: usize) {
        let came = self.completions(count);
        assert!(came.iter().all(|(_, _, status)| status.is_success()), "{came:?}");
    }

    /// The link to itself is used, or there is none, as the setting says.
    pub fn check_links(&self, loopback: Loopback) {
        let own = self.driver.address();
        assert_eq!(self.driver.links().state(own).is_some(), loopback == Loopback::Socket);
        let links = self.seen.0.lock().unwrap().links.iter().any(|event| event.peer == own);
        assert_eq!(links, loopback == Loopback::Socket, "a link to itself");
    }
}

pub fn pattern(index: u64, seed: u8) -> u8 {
    (index.wrapping_mul(31) >> 3) as u8 ^ seed
}

/// Turns all hosts until `done`; a busy machine has a minute.
pub fn drive(hosts: &mut [&mut Host], mut done: impl FnMut(&mut [&mut Host]) -> bool) {
    let deadline = Clock::now() + Duration::from_secs(60);
    while !done(hosts) {
        assert!(Clock::now() < deadline, "nothing happened for a minute");
        for host in hosts.iter_mut() {
            host.turn();
        }
    }
}

pub fn once(classes: Classes, action: Action) -> Rule {
    let selector = Selector { classes: Some(classes), ..Selector::default() };
    Rule { id: RuleId(1), selector, repeat: Repeat::times(1), action }
}

pub fn each(mut test: impl FnMut(Loopback)) {
    for loopback in Loopback::ALL {
        println!("loopback {}", loopback.name());
        test(loopback);
    }
}
