//! Packets between ports on one machine have no ICRC if both ports agree and nobody looks at the packets. All others have
//! the right one.

use softhca::fault::{Action, Repeat, Rule, RuleId, Selector};
use softhca::trace::{EventSink, NetworkEvent};
use softhca::{
    AccessFlags, ConnectOptions, Context, Device, EmbeddedOptions, Endpoint, IcrcCheck, IcrcMode, Instant,
    MemoryRegion, QpType, QueuePair, RemoteAddress, SendRequest,
};
use softhca_fabric::{BitPosition, IcrcPolicy, Stage};
use softhca_tests::process::TEST_TIMEOUT;
use softhca_wire::link_control::{
    Body, ExchangeKind, Grant, Heartbeat, Hello, Incarnation, LINK_PORT, Message, Slots, Token,
};
use softhca_wire::{AddressHeaders, Bth, Gid, ICRC_LEN, Icrc, Opcode, Psn, Qpn, ROCE_PORT, RemoteKey};
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BYTES: u32 = 600;

/// What the port at the other end says about its machine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Claim {
    Same,
    Other,
    Nothing,
}

/// A port that does the handshake and grants whatever is asked for.
struct Port {
    link: UdpSocket,
    roce: UdpSocket,
    card: IpAddr,
    claim: Claim,
    known: Option<(Incarnation, Token)>,
    /// The machine that the card has named.
    machine: Option<NonZeroU64>,
}

impl Port {
    fn new(card: IpAddr, claim: Claim) -> Port {
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = Ipv4Addr::new(127, 224 | high & 15, low, 1 + claim as u8 + 10 * rand(card));
        let [link, roce] = [LINK_PORT, ROCE_PORT]
            .map(|port| UdpSocket::bind((address, port)).expect("a free loopback address"));
        link.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        roce.set_nonblocking(true).unwrap();
        Port { link, roce, card, claim, known: None, machine: None }
    }

    fn address(&self) -> IpAddr {
        self.roce.local_addr().unwrap().ip()
    }

    fn send(&self, body: Body) {
        let message = Message {
            sender: Incarnation::new(1),
            receiver: self.known.map(|(incarnation, _)| incarnation),
            token: self.known.map(|(_, token)| token),
            slots: Slots::default(),
            frame_order: Default::default(),
            body,
        };
        let _ = self.link.send_to(&message.emit(), (self.card, LINK_PORT));
    }

    fn send_hello(&self) {
        let machine = match self.claim {
            Claim::Same => self.machine,
            Claim::Other => self.machine.and_then(|number| NonZeroU64::new(number.get() ^ 1)),
            Claim::Nothing => None,
        };
        let (exchange, token) = (ExchangeKind::Query, Token::new(7));
        self.send(Body::Hello(Hello { exchange, token, budget: 1 << 20, machine }));
    }

    /// Receives one message, if there is any, and responds to it.
    fn respond(&mut self) {
        let mut bytes = [0; 128];
        let Ok((length, _)) = self.link.recv_from(&mut bytes) else { return };
        let message = Message::parse(&bytes[..length]).expect("a link control message");
        match message.body {
            Body::Hello(hello) => {
                let is_new = self.known != Some((message.sender, hello.token));
                (self.known, self.machine) = (Some((message.sender, hello.token)), hello.machine);
                if is_new || message.receiver != Some(Incarnation::new(1)) {
                    self.send_hello();
                }
            }
            Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Query, stamp, .. }) => {
                self.send(Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Reply, stamp, returned: 0 }));
            }
            Body::Request(request) => {
                let granted = request.consumed + request.returned + (1 << 20);
                self.send(Body::Grant(Grant { granted, returned: request.returned, max_unused: 1 << 20 }));
            }
            _ => {}
        }
    }

    /// The next packet of the card, with its addressing.
    fn receive(&mut self) -> (AddressHeaders, Vec<u8>) {
        let deadline = std::time::Instant::now() + TEST_TIMEOUT;
        let mut bytes = vec![0; 8192];
        loop {
            if let Ok((length, from)) = self.roce.recv_from(&mut bytes) {
                bytes.truncate(length);
                let mut addressing = AddressHeaders::between(from.ip(), self.address());
                addressing.source_port = from.port();
                return (addressing, bytes);
            }
            assert!(std::time::Instant::now() < deadline, "the card sends a packet");
            self.respond();
        }
    }
}

/// Tests run at once, and each has addresses of its own.
fn rand(card: IpAddr) -> u8 {
    let IpAddr::V4(card) = card else { unreachable!("an IPv4 address") };
    card.octets()[3] % 24
}

/// Looks at all packets, or at none. Records whether delivered ones had the right ICRC.
#[derive(Clone)]
struct Sink {
    looks: bool,
    delivered: Arc<Mutex<Vec<bool>>>,
}

impl EventSink for Sink {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Frame { stage: Stage::Delivered, addressing, packet, .. } = event {
            self.delivered.lock().unwrap().push(Icrc::verify(addressing, packet));
        }
    }

    fn is_enabled(&self) -> bool {
        self.looks
    }
}

struct Card {
    device: Device,
    context: Context,
    region: MemoryRegion,
    qp: QueuePair,
    sink: Sink,
}

/// A card with a queue pair to a port that is not there yet.
fn card(icrc: IcrcCheck, icrc_mode: IcrcMode, looks: bool) -> Card {
    let sink = Sink { looks, delivered: Arc::default() };
    let options = EmbeddedOptions {
        icrc,
        icrc_mode: Some(icrc_mode),
        event_sink: Box::new(sink.clone()),
        ..EmbeddedOptions::default()
    };
    let device = Device::embedded_with(options).unwrap();
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let cq = context.create_completion_queue(16).unwrap();
    let region = domain.allocate_region(4096, AccessFlags::LOCAL_WRITE).unwrap();
    let qp = domain.create_queue_pair(QpType::Rc, &cq).build().unwrap();
    Card { device, context, region, qp, sink }
}

/// The packet of a WRITE of such a card to such a port.
fn sent(card: &Card, claim: Claim) -> (Port, AddressHeaders, Vec<u8>) {
    let mut port = Port::new(card.device.address(), claim);
    let endpoint = Endpoint { gid: Gid::from(port.address()), qpn: Qpn::new(0x77), psn: Psn::new(5) };
    card.qp.connect(&endpoint, &ConnectOptions::default()).unwrap();
    let sg_list = [card.region.sge(0, BYTES)];
    let remote = RemoteAddress { address: 0, rkey: RemoteKey(1) };
    card.qp.post_send(&SendRequest::rdma_write(1, &sg_list, remote)).unwrap();
    let (addressing, packet) = port.receive();
    (port, addressing, packet)
}

fn has_icrc(packet: &[u8]) -> bool {
    packet[packet.len() - ICRC_LEN..] != [0; ICRC_LEN]
}

#[test]
fn packets_between_ports_of_one_machine_have_no_icrc() {
    let card = card(IcrcCheck::Auto, IcrcMode::Offload, false);
    let (port, _, packet) = sent(&card, Claim::Same);
    assert!(port.machine.is_some(), "Linux numbers the machine");
    assert!(!has_icrc(&packet));
    assert_eq!(Bth::parse(&packet).unwrap().opcode, Opcode::RC_WRITE_ONLY);
}

#[test]
fn all_other_packets_have_the_right_icrc() {
    let offload = || card(IcrcCheck::Auto, IcrcMode::Offload, false);
    let cases = [
        ("another machine", offload(), Claim::Other),
        ("a peer that wants ICRCs", offload(), Claim::Nothing),
        ("a recorded card", card(IcrcCheck::Auto, IcrcMode::Offload, true), Claim::Same),
        ("a card that always computes them", card(IcrcCheck::Auto, IcrcMode::Always, false), Claim::Same),
        ("a card that always checks them", card(IcrcCheck::Strict, IcrcMode::Offload, false), Claim::Same),
    ];
    for (case, card, claim) in cases {
        let (port, addressing, packet) = sent(&card, claim);
        assert!(Icrc::verify(&addressing, &packet), "{case}");
        let asks = card.sink.looks || matches!(claim, Claim::Other | Claim::Nothing);
        assert_eq!(port.machine.is_some(), asks, "{case}");
    }
}

#[test]
fn a_corrupted_packet_between_ports_of_one_machine_is_detected() {
    let card = card(IcrcCheck::Auto, IcrcMode::Offload, false);
    let action = Action::Corrupt { bit: BitPosition::PayloadBit(3), icrc: IcrcPolicy::Stale };
    let rule = Rule { id: RuleId(1), selector: Selector::default(), repeat: Repeat::default(), action };
    card.device.add_rule(1, rule);
    let (_, addressing, packet) = sent(&card, Claim::Same);
    assert!(has_icrc(&packet) && !Icrc::verify(&addressing, &packet));
}

/// Sends the card a packet without an ICRC. Returns how many it received and how many it dropped for their ICRC.
fn counts_after_receiving(card: &Card, claim: Claim) -> (u64, u64) {
    let (mut port, _, _) = sent(card, claim);
    let mut packet = vec![0; Bth::LEN + ICRC_LEN];
    Bth::new(Opcode::RC_SEND_ONLY, card.qp.qpn(), Psn::new(5)).emit(&mut packet);
    port.roce.send_to(&packet, (card.device.address(), ROCE_PORT)).unwrap();
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    loop {
        let counters = card.context.counters();
        let counts = (counters.rcvd_pkts, counters.rx_icrc_encapsulated);
        if counts != (0, 0) {
            return counts;
        }
        assert!(std::time::Instant::now() < deadline, "the card counts the packet");
        port.respond();
    }
}

#[test]
fn a_packet_without_icrc_is_accepted_from_the_same_machine_only() {
    for looks in [false, true] {
        let card = card(IcrcCheck::Auto, IcrcMode::Offload, looks);
        assert_eq!(counts_after_receiving(&card, Claim::Same), (1, 0));
        // Whoever records the card sees the packet with its ICRC.
        assert_eq!(*card.sink.delivered.lock().unwrap(), vec![true; usize::from(looks)]);
    }
    for (icrc_mode, claim) in [
        (IcrcMode::Offload, Claim::Other),
        (IcrcMode::Offload, Claim::Nothing),
        (IcrcMode::Always, Claim::Same),
    ] {
        let card = card(IcrcCheck::Auto, icrc_mode, false);
        assert_eq!(counts_after_receiving(&card, claim), (0, 1), "{icrc_mode:?}, {claim:?}");
    }
}
