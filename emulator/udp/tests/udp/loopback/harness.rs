//! Hosts with one driver each, and their applications.

use crate::bare;
use softhca_engine::{
    AddressVector, ClientId, CongestionSettings, CqId, DeviceLimits, Instant, Memory, MemoryId, MemoryRegion,
    PdId, QpInitAttributes, QpRings, QpType, Recovery, Settings,
};
use softhca_fabric::{Action, EventSink, NetworkEvent, PacketClasses, Repeat, Rule, RuleId, Selector, Stage};
use softhca_queue::{
    CompletionConsumer, DoorbellProducer, MemoryBlock, ReceiveProducer, SendProducer, completion_ring,
    doorbell_ring, receive_ring, send_ring,
};
use softhca_types::{
    AccessFlags, CompletionStatus, Operation, ReceiveWorkRequest, RemoteAddress, SendWorkRequest, Sge,
};
use softhca_udp::{Driver, DriverOptions, HostSockets, Loopback, SocketOptions};
use softhca_wire::{AddressHeaders, Gid, LocalKey, Mtu, Psn, Qpn, QueueKey, RemoteKey};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant as Clock};

pub const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);
pub const MEMORY_LENGTH: u64 = 4 << 20;
pub const QKEY: QueueKey = QueueKey(7);
/// A quarter of the memory for each of four purposes.
pub const QUARTER: u64 = MEMORY_LENGTH / 4;

/// The packets that passed the port, and its link events.
#[derive(Default)]
pub struct RecordedTraffic {
    pub frames: Vec<(Stage, AddressHeaders, Vec<u8>)>,
    pub links: Vec<IpAddr>,
    pub pauses: Vec<Stage>,
}

#[derive(Clone, Default)]
pub struct Recorder(pub Arc<Mutex<RecordedTraffic>>);

impl EventSink for Recorder {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        let mut recorded = self.0.lock().unwrap();
        match *event {
            NetworkEvent::Frame { stage, addressing, packet, .. } => {
                recorded.frames.push((stage, *addressing, packet.to_vec()));
            }
            NetworkEvent::PeerLinkChanged { peer, .. } => recorded.links.push(peer),
            NetworkEvent::PauseFrame { stage, .. } => recorded.pauses.push(stage),
            _ => {}
        }
    }
}

/// A queue pair, with the application's ends of its rings.
pub struct Pair {
    pub qp: Qpn,
    pub send: SendProducer,
    pub receive: ReceiveProducer,
}

/// The objects of an application.
pub struct Application {
    pub client: ClientId,
    pub domain: PdId,
    pub cq: CqId,
    pub completions: CompletionConsumer,
    pub doorbell: DoorbellProducer,
    pub key: RemoteKey,
}

pub struct Host {
    pub driver: Driver,
    pub application: Application,
    pub recorder: Recorder,
}

/// A loopback address that no other test of this process uses.
pub fn free_address() -> IpAddr {
    static LAST: AtomicU8 = AtomicU8::new(1);
    let last = LAST.fetch_add(1, Ordering::Relaxed);
    Ipv4Addr::new(127, 95, std::process::id() as u8, last).into()
}

impl Application {
    /// Creates a client, a completion queue, and a memory region over the whole memory.
    pub fn open(driver: &mut Driver) -> Application {
        let (doorbell, doorbell_consumer) = doorbell_ring(DeviceLimits::HCA.max_qp);
        let (cq_ring, completions) = completion_ring(4096);
        let memory = driver.memory().add(Arc::new(MemoryBlock::new(MEMORY_LENGTH as usize)));
        assert_eq!(memory, MemoryId(0));
        driver.control(|hca, _| {
            let client = hca.open_client(doorbell_consumer).unwrap();
            let domain = hca.allocate_protection_domain(client).unwrap();
            let cq = hca.create_completion_queue(client, cq_ring).unwrap();
            let region = MemoryRegion {
                client,
                pd: domain,
                iova: 0,
                length: MEMORY_LENGTH,
                access_flags: RIGHTS,
                memory,
            };
            let key = hca.register_memory_region(region).unwrap();
            Application { client, domain, cq, completions, doorbell, key }
        })
    }

    pub fn add_pair(&self, driver: &mut Driver, kind: QpType) -> Pair {
        let (send, send_consumer) = send_ring(256, 1, 0);
        let (receive, receive_consumer) = receive_ring(256, 1);
        let init =
            QpInitAttributes { qp_type: kind, sq_sig_all: true, ..bare::reliable(self.domain, self.cq) };
        let rings = QpRings { send: Some(send_consumer), receive: Some(receive_consumer) };
        let qp = driver.control(|hca, _| hca.create_queue_pair(self.client, init, rings).unwrap());
        Pair { qp, send, receive }
    }

    pub fn connect(&self, driver: &mut Driver, from: &Pair, peer: IpAddr, to: Qpn) {
        let [init, receive, send] = bare::steps((Gid::from(peer), to), Mtu::B1024, Psn::new(0));
        let path = AddressVector { traffic_class: 3 << 5, ..AddressVector::to(Gid::from(peer)) };
        driver.control(|hca, ctx| {
            for step in [init.access_flags(RIGHTS), receive.address_vector(path), send] {
                hca.modify_queue_pair(ctx, self.client, from.qp, &step).unwrap();
            }
        });
    }

    pub fn entry(&self, address: u64, length: u32) -> Sge {
        Sge { address, length, lkey: LocalKey(self.key.0) }
    }

    pub fn post(&self, pair: &mut Pair, id: u64, operation: Operation, address: u64, length: u32) {
        self.post_request(pair, &SendWorkRequest::new(id, operation, &[self.entry(address, length)]));
    }

    pub fn post_request(&self, pair: &mut Pair, request: &SendWorkRequest<'_>) {
        pair.send.enqueue(request).unwrap();
        pair.send.publish();
        pair.send.ring(&self.doorbell, pair.qp);
    }

    pub fn receive(&self, pair: &mut Pair, id: u64, address: u64, length: u32) {
        pair.receive
            .enqueue(&ReceiveWorkRequest { wr_id: id, sg_list: &[self.entry(address, length)] })
            .unwrap();
        if pair.receive.publish() {
            pair.send.ring(&self.doorbell, pair.qp);
        }
    }

    pub fn write(&self, remote: u64) -> Operation {
        Operation::Write { remote: RemoteAddress { address: remote, rkey: self.key }, imm_data: None }
    }
}

impl Host {
    pub fn new(loopback: Loopback, recovery: Recovery) -> Host {
        Host::at(free_address(), loopback, recovery)
    }

    pub fn at(address: IpAddr, loopback: Loopback, recovery: Recovery) -> Host {
        let sockets = HostSockets::bind(address, SocketOptions::default()).expect("a free loopback address");
        let settings = Settings { recovery, congestion: CongestionSettings::DCQCN, ..Settings::default() };
        let recorder = Recorder::default();
        let options = DriverOptions { settings, loopback, ..DriverOptions::default() };
        let mut driver = Driver::new(sockets, options, Box::new(recorder.clone()));
        let application = Application::open(&mut driver);
        Host { driver, application, recorder }
    }

    pub fn add_pair(&mut self) -> Pair {
        self.application.add_pair(&mut self.driver, QpType::Rc)
    }

    pub fn connect(&mut self, from: &Pair, peer: IpAddr, to: Qpn) {
        self.application.connect(&mut self.driver, from, peer, to);
    }

    /// Two queue pairs connected to each other.
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

    pub fn poll(&mut self) -> bool {
        self.driver.poll().unwrap()
    }

    /// Polls until `count` completions have arrived.
    pub fn completions(&mut self, count: usize) -> Vec<(Qpn, u64, CompletionStatus)> {
        let mut received = Vec::new();
        drive(&mut [self], |hosts| {
            let popped = std::iter::from_fn(|| hosts[0].application.completions.pop());
            received.extend(popped.map(|completion| (completion.qpn, completion.wr_id, completion.status)));
            received.len() >= count
        });
        assert_eq!(received.len(), count, "{received:?}");
        received
    }

    pub fn succeed(&mut self, count: usize) {
        let received = self.completions(count);
        assert!(received.iter().all(|(_, _, status)| status.is_success()), "{received:?}");
    }

    /// The host has a link to itself exactly with [`Loopback::Socket`].
    pub fn check_links(&self, loopback: Loopback) {
        let own = self.driver.address();
        assert_eq!(self.driver.links().state(own.into()).is_some(), loopback == Loopback::Socket);
        let links = self.recorder.0.lock().unwrap().links.contains(&own);
        assert_eq!(links, loopback == Loopback::Socket, "a link to itself");
    }
}

pub fn pattern(index: u64, seed: u8) -> u8 {
    (index.wrapping_mul(31) >> 3) as u8 ^ seed
}

/// Polls all hosts until `done`, for at most a minute.
pub fn drive(hosts: &mut [&mut Host], mut done: impl FnMut(&mut [&mut Host]) -> bool) {
    let deadline = Clock::now() + Duration::from_secs(60);
    while !done(hosts) {
        assert!(Clock::now() < deadline, "nothing happened for a minute");
        for host in hosts.iter_mut() {
            host.poll();
        }
    }
}

pub fn once(classes: PacketClasses, action: Action) -> Rule {
    let selector = Selector { classes: Some(classes), ..Selector::default() };
    Rule { id: RuleId(1), selector, repeat: Repeat::times(1), action }
}

pub fn for_each_loopback(mut test: impl FnMut(Loopback)) {
    for loopback in Loopback::ALL {
        println!("loopback {}", loopback.name());
        test(loopback);
    }
}
