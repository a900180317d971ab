//! Attacks on link control over loopback, as another user of the machine can mount them: forged messages, addresses that
//! hoard grants, and a port that restarts all the time. Connections of other hosts continue.

use crate::StopOnDrop;
use softhca::trace::{Event, EventSink, NetworkEvent};
use softhca::{
    AccessFlags, CompletionQueue, ConnectOptions, Context, Device, EmbeddedOptions, Instant, MemoryRegion,
    ProtectionDomain, QpType, QueuePair, SendRequest,
};
use softhca_tests::process::TEST_TIMEOUT;
use softhca_udp::MAX_FRAME_CHARGE;
use softhca_wire::link_control::{
    Body, ExchangeKind, Grant, GrantRequest, Heartbeat, Hello, Incarnation, LINK_PORT, Message, Pause, Slots,
    Token,
};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// The most that a socket of the default size can grant is about nine frames.
const DEFAULT_BUFFER: u32 = 106_496;
const BYTES: u32 = 65_536;

/// Collects the reasons of rejected messages.
#[derive(Clone, Default)]
struct RejectReasons(Arc<Mutex<BTreeSet<String>>>);

impl EventSink for RejectReasons {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Hca { event: Event::LinkMessageRejected { reason, .. }, .. } = event {
            self.0.lock().unwrap().insert(reason.to_string());
        }
    }
}

struct Host {
    device: Device,
    context: Context,
    domain: ProtectionDomain,
    cq: CompletionQueue,
    region: MemoryRegion,
    reasons: RejectReasons,
}

impl Host {
    fn new() -> Host {
        let reasons = RejectReasons::default();
        let device = Device::embedded_with(EmbeddedOptions {
            receive_buffer: DEFAULT_BUFFER,
            event_sink: Box::new(reasons.clone()),
            ..EmbeddedOptions::default()
        })
        .unwrap();
        let context = device.open();
        let domain = context.allocate_protection_domain().unwrap();
        let cq = context.create_completion_queue(256).unwrap();
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let region = domain.allocate_region(BYTES.into(), access).unwrap();
        Host { device, context, domain, cq, region, reasons }
    }

    /// A queue pair to `other`, and the one at the other end.
    fn connect(&self, other: &Host) -> [QueuePair; 2] {
        let ends =
            [self, other].map(|host| host.domain.create_queue_pair(QpType::Rc, &host.cq).build().unwrap());
        ends[0].connect(&ends[1].endpoint(), &ConnectOptions::default()).unwrap();
        ends[1].connect(&ends[0].endpoint(), &ConnectOptions::default()).unwrap();
        ends
    }

    /// Writes this often to `other`, and waits for every completion.
    fn write(&self, qp: &QueuePair, other: &Host, times: u64) {
        for id in 0..times {
            let sg_list = [self.region.sge(0, BYTES)];
            let request = SendRequest::rdma_write(id, &sg_list, other.region.remote_address(0));
            qp.post_send(&request).unwrap();
            let completion = self.cq.wait_for(TEST_TIMEOUT).expect("the connection makes progress");
            assert!(completion.status.is_success(), "{completion:?}");
        }
    }
}

/// A loopback address of this test process.
fn loopback(group: u8, last: u8) -> IpAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 192 | high & 31, low, group.wrapping_add(last)).into()
}

/// A port that does the handshake of link control and nothing else that is expected of it.
struct Attacker {
    socket: UdpSocket,
    victim: IpAddr,
    incarnation: u64,
    /// The victim's incarnation, and the token that it gave this port.
    known: Option<(Incarnation, Token)>,
}

impl Attacker {
    fn new(address: IpAddr, victim: IpAddr) -> Attacker {
        let socket = UdpSocket::bind((address, LINK_PORT)).expect("a free loopback address");
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        Attacker { socket, victim, incarnation: 1, known: None }
    }

    fn send(&self, body: Body) {
        let message = Message {
            sender: Incarnation::new(self.incarnation),
            receiver: self.known.map(|(incarnation, _)| incarnation),
            token: self.known.map(|(_, token)| token),
            slots: Slots::default(),
            frame_order: Default::default(),
            body,
        };
        // The victim's socket may be full: the attacker repeats everything.
        let _ = self.socket.send_to(&message.emit(), (self.victim, LINK_PORT));
    }

    fn send_hello(&self) {
        let (exchange, token) = (ExchangeKind::Query, Token::new(7));
        self.send(Body::Hello(Hello { exchange, token, budget: 1 << 20, machine: None }));
    }

    /// Receives one message and responds to it so that the victim keeps the link. Returns what it granted.
    fn receive(&mut self) -> Option<Grant> {
        let mut bytes = [0; 128];
        let Ok((length, _)) = self.socket.recv_from(&mut bytes) else {
            self.send_hello();
            return None;
        };
        let message = Message::parse(&bytes[..length]).expect("a link control message");
        match message.body {
            Body::Hello(hello) => {
                let is_new = self.known != Some((message.sender, hello.token));
                self.known = Some((message.sender, hello.token));
                if is_new || message.receiver != Some(Incarnation::new(self.incarnation)) {
                    self.send_hello();
                } else {
                    self.request();
                }
            }
            Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Query, stamp, .. }) => {
                self.send(Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Reply, stamp, returned: 0 }));
                self.request();
            }
            Body::Grant(grant) => return Some(grant),
            _ => {}
        }
        None
    }

    /// Asks for everything, and never returns or uses anything.
    fn request(&self) {
        let (needed, wanted) = (MAX_FRAME_CHARGE, 1 << 28);
        self.send(Body::Request(GrantRequest { consumed: 0, returned: 0, needed, wanted }));
    }
}

fn wait_until(what: &str, held: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    while !held() {
        assert!(std::time::Instant::now() < deadline, "{what}");
        thread::yield_now();
    }
}

#[test]
fn hoarded_grants_do_not_stop_other_hosts() {
    let (victim, client) = (Host::new(), Host::new());
    let pair = client.connect(&victim);
    client.write(&pair[0], &victim, 10);
    let (stop, holders) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        for index in 0..60 {
            let mut attacker = Attacker::new(loopback(0, index), victim.device.address());
            let (stop, holders) = (&stop, &holders);
            scope.spawn(move || {
                attacker.send_hello();
                let mut holds = false;
                while !stop.load(Ordering::Acquire) {
                    if attacker.receive().is_some_and(|grant| grant.granted > 0) && !holds {
                        holds = true;
                        holders.fetch_add(1, Ordering::AcqRel);
                    }
                }
            });
        }
        wait_until("the attackers get grants", || holders.load(Ordering::Acquire) >= 3);
        client.write(&pair[0], &victim, 100);
        // A host that joins during the attack makes progress, too.
        let newcomer = Host::new();
        let pair = newcomer.connect(&victim);
        newcomer.write(&pair[0], &victim, 10);
    });
}

#[test]
fn port_that_restarts_all_the_time_does_not_stop_other_hosts() {
    let (victim, client) = (Host::new(), Host::new());
    let pair = client.connect(&victim);
    client.write(&pair[0], &victim, 10);
    let (stop, restarts) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        let mut attacker = Attacker::new(loopback(64, 0), victim.device.address());
        let (stop, restarts) = (&stop, &restarts);
        scope.spawn(move || {
            attacker.socket.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
            while !stop.load(Ordering::Acquire) {
                if attacker.receive().is_some_and(|grant| grant.granted > 0) {
                    attacker.incarnation += 1;
                    attacker.send_hello();
                    restarts.fetch_add(1, Ordering::AcqRel);
                }
            }
        });
        wait_until("the attacker restarts", || restarts.load(Ordering::Acquire) >= 10);
        client.write(&pair[0], &victim, 100);
        let seen = restarts.load(Ordering::Acquire);
        wait_until("the attack continues", || restarts.load(Ordering::Acquire) > seen);
    });
}

#[test]
fn forged_messages_do_not_stop_a_connection() {
    let (victim, client) = (Host::new(), Host::new());
    let pair = client.connect(&victim);
    client.write(&pair[0], &victim, 10);
    // Anybody may send from an address of loopback, but not from the link control port of a card.
    let stranger = UdpSocket::bind((loopback(65, 0), LINK_PORT)).unwrap();
    let impostors = [&victim, &client].map(|host| UdpSocket::bind((host.device.address(), 0)).unwrap());
    let stop = Pause { classes: 0xff, quanta: [u16::MAX; 8], rate: 1 };
    let hello = |exchange| Body::Hello(Hello { exchange, token: Token::new(9), budget: 1, machine: None });
    let bodies = [
        hello(ExchangeKind::Query),
        hello(ExchangeKind::Reply),
        Body::Pause(stop),
        Body::Grant(Grant { granted: u64::MAX, returned: 0, max_unused: 0 }),
        Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Reply, stamp: 0, returned: u64::MAX }),
    ];
    for round in 0..50u64 {
        for target in [&victim, &client] {
            let to = (target.device.address(), LINK_PORT);
            for body in bodies {
                let forged = Message {
                    sender: Incarnation::new(u64::MAX),
                    receiver: Some(Incarnation::new(round)),
                    token: Some(Token::new(round)),
                    slots: Slots::default(),
                    frame_order: Default::default(),
                    body,
                };
                for socket in impostors.iter().chain([&stranger]) {
                    socket.send_to(&forged.emit(), to).unwrap();
                }
                let mut version_1 = forged.emit();
                version_1[4] = 1;
                stranger.send_to(&version_1[..64], to).unwrap();
                stranger.send_to(b"nonsense", to).unwrap();
            }
        }
        client.write(&pair[0], &victim, 1);
    }
    for host in [&victim, &client] {
        let counts = || {
            let counters = host.context.counters();
            [counters.link_version_err, counters.link_malformed_err, counters.link_token_err]
        };
        wait_until("every reason is counted", || counts().iter().all(|count| *count > 0));
        wait_until("every reason is logged", || {
            let reasons = host.reasons.0.lock().unwrap();
            [
                "version 1 of link control",
                "not a link control message",
                "not from a link control port",
                "wrong token",
            ]
            .iter()
            .all(|wanted| reasons.iter().any(|reason| reason.contains(wanted)))
        });
    }
    client.write(&pair[0], &victim, 1);
}
