//! The link state machines with lossy control channels, slow receivers, and ports that stop, die and restart.
//! Invariants: no receive buffer is charged beyond its budget, and every sender makes progress.

use proptest::prelude::*;
use softhca_engine::LinkReject;
use softhca_udp::{
    LinkChange, LinkControl, LinkSecret, MAX_FRAME_CHARGE, PeerPort, PeerState, UnreachablePort, charge,
    grant_budget,
};
use softhca_wire::link_control::{
    Body, ExchangeKind, Grant, GrantRequest, Heartbeat, Hello, Incarnation, Message, Pause, Token,
};
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;

/// SplitMix64: a seed determines a run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }
}

fn address(port: usize) -> PeerPort {
    IpAddr::from(Ipv4Addr::from(0x7f00_0002 + port as u32)).into()
}

fn index(port: PeerPort) -> usize {
    match port.address {
        IpAddr::V4(v4) => (u32::from(v4) - 0x7f00_0002) as usize,
        IpAddr::V6(_) => unreachable!("simulated ports have IPv4 addresses"),
    }
}

struct Port {
    links: LinkControl,
    /// The RoCE socket: sender, kernel charge, and the granted part of it.
    socket: VecDeque<(usize, u64, u64)>,
    /// The sum of the granted parts. Data to a port that the sender takes for a foreign one is not granted.
    charged: u64,
    /// The sum of the charges.
    socket_bytes: u64,
    /// The link socket.
    control: VecDeque<(usize, Message)>,
    errors: Vec<(PeerPort, UnreachablePort)>,
    /// Chunks that one poll reads.
    reads_per_poll: u64,
    stopped_until: u64,
    down_until: Option<u64>,
    /// Frames left to send, by destination.
    backlog: Vec<u64>,
    changes: Vec<(usize, LinkChange)>,
    rejects: Vec<LinkReject>,
}

/// The faults and their rates.
#[derive(Clone, Copy, Debug)]
struct Faults {
    control_loss: u64,
    data_loss: u64,
    stops: bool,
    deaths: bool,
}

struct SimulatedPorts {
    now: u64,
    random: Random,
    faults: Faults,
    faulty_until: u64,
    budget: u64,
    ports: Vec<Port>,
    /// Messages in flight: arrival time, destination, source.
    in_flight: Vec<(u64, usize, usize, Message)>,
    incarnations: u64,
    /// The frames of a port have one size, as those of one queue pair.
    one_size_per_port: bool,
    sent: Sent,
}

/// How many frames and messages were sent.
#[derive(Clone, Copy, Default)]
struct Sent {
    frames: u64,
    /// REQUEST and GRANT.
    grants: u64,
    other_messages: u64,
}

impl Sent {
    fn total(&self) -> u64 {
        self.frames + self.grants + self.other_messages
    }
}

impl SimulatedPorts {
    fn new(seed: u64, ports: usize, budget: u64, faults: Faults) -> SimulatedPorts {
        let mut simulation = SimulatedPorts {
            now: SECOND,
            random: Random(seed),
            faults,
            faulty_until: 4 * SECOND,
            budget,
            ports: Vec::new(),
            in_flight: Vec::new(),
            incarnations: 0,
            one_size_per_port: false,
            sent: Sent::default(),
        };
        for _ in 0..ports {
            let port = simulation.new_port(ports);
            simulation.ports.push(port);
        }
        simulation
    }

    fn new_port(&mut self, ports: usize) -> Port {
        self.incarnations += 1000;
        let mut links = {
            let secret = LinkSecret::predictable(self.random.next());
            LinkControl::new(Incarnation::new(self.incarnations), secret, self.budget, self.now)
        };
        links.set_dead_after(2 * SECOND);
        Port {
            links,
            socket: VecDeque::new(),
            charged: 0,
            socket_bytes: 0,
            control: VecDeque::new(),
            errors: Vec::new(),
            reads_per_poll: 1 + self.random.below(20),
            stopped_until: 0,
            down_until: None,
            backlog: vec![0; ports],
            changes: Vec::new(),
            rejects: Vec::new(),
        }
    }

    fn done(&self) -> bool {
        self.ports.iter().all(|port| port.backlog.iter().all(|left| *left == 0) && port.socket.is_empty())
    }

    /// Runs until everything is sent and read.
    fn run(&mut self, limit: u64) {
        while !self.done() || self.now < self.faulty_until {
            self.tick();
            assert!(self.now < limit, "no progress: {:?}", self.backlogs());
        }
    }

    fn backlogs(&self) -> Vec<u64> {
        self.ports.iter().map(|port| port.backlog.iter().sum()).collect()
    }

    fn tick(&mut self) {
        self.now += MILLISECOND / 2;
        if self.now < self.faulty_until {
            self.break_something();
        }
        self.deliver();
        let now = self.now;
        for port in 0..self.ports.len() {
            if self.ports[port].down_until.is_some_and(|until| now >= until) {
                self.restart(port);
            }
            if self.ports[port].down_until.is_none() && now >= self.ports[port].stopped_until {
                self.poll(port);
            }
        }
    }

    /// One round of a processor. Programs that never sleep have it for `others`. Then each port with something to do reads,
    /// sends and answers as much as fits into its time slice.
    fn round(&mut self, others: u64) {
        self.now += others;
        self.deliver();
        for port in 0..self.ports.len() {
            let end = self.now + TIME_SLICE;
            while self.now < end && self.is_ready(port) {
                let Port { control, socket, reads_per_poll, .. } = &self.ports[port];
                let read = control.len() as u64 + (*reads_per_poll).min(socket.len() as u64);
                let sent = self.sent.total();
                self.poll(port);
                let operations = read + self.sent.total() - sent;
                self.now += operations.max(1) * TIME_PER_OPERATION;
                self.deliver();
            }
        }
    }

    /// Whether a process that sleeps has a reason to wake up.
    fn is_ready(&self, index: usize) -> bool {
        let Port { control, socket, links, .. } = &self.ports[index];
        let is_due = links.next_timeout().is_some_and(|at| at <= self.now);
        let has_work = self.ports[index].backlog.iter().enumerate().any(|(peer, left)| {
            *left > 0
                && (links.state(address(peer)).is_none() || links.allowance(address(peer), self.now) > 0)
        });
        !control.is_empty() || !socket.is_empty() || is_due || has_work
    }

    /// Hands over the messages that have arrived.
    fn deliver(&mut self) {
        let now = self.now;
        let (arrived, flying): (Vec<_>, Vec<_>) = self.in_flight.drain(..).partition(|(at, ..)| *at <= now);
        self.in_flight = flying;
        for (_, to, from, message) in arrived {
            if self.ports[to].down_until.is_some() {
                self.ports[from].errors.push((address(to), UnreachablePort::Link));
            } else if self.ports[to].control.len() < 256 {
                self.ports[to].control.push_back((from, message));
            }
        }
    }

    /// Starts a new incarnation of a port without the state of the last.
    fn restart(&mut self, port: usize) {
        let backlog = std::mem::take(&mut self.ports[port].backlog);
        self.ports[port] = self.new_port(backlog.len());
        self.ports[port].backlog = backlog;
    }

    fn break_something(&mut self) {
        let victim = self.random.below(self.ports.len() as u64) as usize;
        if self.faults.stops && self.random.below(1000) == 0 {
            self.ports[victim].stopped_until = self.now + self.random.below(4 * SECOND);
        }
        if self.faults.deaths && self.random.below(2000) == 0 && self.ports[victim].down_until.is_none() {
            // Longer than the grant lease.
            self.ports[victim].down_until = Some(self.now + SECOND / 2 + self.random.below(SECOND));
            self.ports[victim].socket.clear();
            (self.ports[victim].charged, self.ports[victim].socket_bytes) = (0, 0);
        }
        self.ports[victim].reads_per_poll = 1 + self.random.below(20);
    }

    /// The steps of a driver.
    fn poll(&mut self, index_here: usize) {
        let now = self.now;
        let port = &mut self.ports[index_here];
        for (peer, which) in port.errors.drain(..) {
            port.links.on_unreachable(peer, which, now);
        }
        while let Some((from, message)) = port.control.pop_front() {
            let result = port.links.on_message(address(from).address, &message, now);
            port.rejects.extend(result.err());
        }
        for _ in 0..port.reads_per_poll {
            match port.socket.pop_front() {
                Some((from, charge, granted)) => {
                    port.charged -= granted;
                    port.socket_bytes -= charge;
                    port.links.record_received(address(from), charge, now);
                }
                None => {
                    port.links.on_socket_empty(now);
                    break;
                }
            }
        }
        if port.links.next_timeout().is_some_and(|at| at <= now) {
            port.links.expire(now);
        }
        for peer in 0..self.ports.len() {
            self.send(index_here, peer);
        }
        let port = &mut self.ports[index_here];
        while let Some((to, message)) = port.links.transmit(now) {
            let copies =
                u64::from(!self.random.percent(self.faults.control_loss)) + u64::from(self.random.percent(5));
            match message.body {
                Body::Request(_) | Body::Grant(_) => self.sent.grants += 1,
                _ => self.sent.other_messages += 1,
            }
            for _ in 0..copies {
                let arrival = now + self.random.below(2 * MILLISECOND);
                self.in_flight.push((arrival, index(to), index_here, message));
            }
        }
        while let Some(event) = port.links.poll_event() {
            port.changes.push((index(event.peer), event.change));
        }
        assert!(port.links.grant_issuer().outstanding() <= self.budget);
    }

    fn send(&mut self, from: usize, to: usize) {
        for _ in 0..8 {
            let kind = if self.one_size_per_port { from as u64 % 3 } else { self.random.below(3) };
            let (len, segments) = match kind {
                0 => (64, 1),
                1 => (4154, 1),
                _ if self.one_size_per_port => (1082, 1),
                _ => (1082, 1 + self.random.below(4) as usize),
            };
            let charge = charge(len, segments);
            let port = &mut self.ports[from];
            if port.backlog[to] == 0 || !port.links.may_send(address(to), charge, self.now) {
                return;
            }
            port.links.record_sent(address(to), charge, self.now);
            port.backlog[to] -= 1;
            self.sent.frames += 1;
            let port = &mut self.ports[from];
            let foreign = port.links.state(address(to)) == Some(PeerState::Foreign);
            if self.ports[to].down_until.is_some() {
                self.ports[from].errors.push((address(to), UnreachablePort::Roce));
                continue;
            }
            // The kernel's limit is a third above the budget.
            let full = self.ports[to].socket_bytes > self.budget * 4 / 3;
            if !(self.random.percent(self.faults.data_loss) || foreign && full) {
                let granted = if foreign { 0 } else { charge };
                self.ports[to].socket.push_back((from, charge, granted));
                self.ports[to].charged += granted;
                self.ports[to].socket_bytes += charge;
                // Senders may use the grants of a port that is no more, which together with a quarter of the budget
                // fit into half of the buffer.
                let (charged, limit) = (self.ports[to].charged, self.budget + self.budget / 4);
                assert!(charged <= limit, "{charged} in a socket for {limit}");
            }
        }
    }
}

fn faults() -> impl Strategy<Value = Faults> {
    (0..40u64, 0..5u64, any::<bool>(), any::<bool>()).prop_map(|(control_loss, data_loss, stops, deaths)| {
        Faults { control_loss, data_loss, stops, deaths }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    #[test]
    fn no_buffer_overflows_and_every_sender_makes_progress(
        seed: u64,
        ports in 1..8usize,
        buffer in prop_oneof![Just(20_000usize), Just(212_992), Just(1 << 20)],
        faults in faults(),
    ) {
        let mut simulation = SimulatedPorts::new(seed, ports, grant_budget(buffer), faults);
        for from in 0..ports {
            for to in 0..ports {
                simulation.ports[from].backlog[to] = simulation.random.below(2000);
            }
        }
        simulation.run(400 * SECOND);
    }
}

const NO_FAULTS: Faults = Faults { control_loss: 0, data_loss: 0, stops: false, deaths: false };

#[test]
fn seventy_senders_share_a_default_buffer() {
    for (seed, control_loss) in [(1, 0), (2, 20)] {
        let faults = Faults { control_loss, ..NO_FAULTS };
        let mut simulation = SimulatedPorts::new(seed, 71, grant_budget(212_992), faults);
        for from in 1..71 {
            simulation.ports[from].backlog[0] = 200;
        }
        simulation.ports[0].reads_per_poll = 20;
        let mut half_time = None;
        while !simulation.done() {
            simulation.tick();
            let left = simulation.backlogs();
            if half_time.is_none() && left.iter().sum::<u64>() <= 70 * 100 {
                half_time = Some((left[1..].iter().min().copied(), left[1..].iter().max().copied()));
            }
            assert!(simulation.now < 200 * SECOND, "no progress: {left:?}");
        }
        let (Some(least), Some(most)) = half_time.expect("half of the frames were sent") else {
            unreachable!("senders exist")
        };
        assert!(
            least > 0 && most < 200,
            "at half time every sender has sent some but not all: {least} to {most} left"
        );
    }
}

/// The time slice of a process, and the time that it takes to read or send one packet or message.
const TIME_SLICE: u64 = 3 * MILLISECOND;
const TIME_PER_OPERATION: u64 = MILLISECOND / 100;

#[test]
fn starved_ports_exchange_few_messages() {
    const SENDERS: usize = 64;
    // The receive buffer, the programs that never sleep on one processor beside the senders and their receiver, and the
    // bound of messages for each frame. Replies to each REQUEST made it 11.8, 2.5 and 9.6.
    for (buffer, others, most) in [(212_992, 10, 8), (8 << 20, 10, 2), (8 << 20, 100, 6)] {
        let mut simulation = SimulatedPorts::new(9, SENDERS + 1, grant_budget(buffer), NO_FAULTS);
        (simulation.faulty_until, simulation.one_size_per_port) = (0, true);
        for sender in &mut simulation.ports[1..] {
            sender.backlog[0] = 1 << 40;
        }
        simulation.ports[0].reads_per_poll = 20;
        let mut run_until = |end| {
            while simulation.now < end {
                simulation.round(others * TIME_SLICE);
            }
            simulation.sent
        };
        let (before, after) = (run_until(10 * SECOND), run_until(30 * SECOND));
        let (frames, grants) = (after.frames - before.frames, after.grants - before.grants);
        assert!(
            grants < most * frames,
            "{others} programs, {buffer} bytes: {grants} messages for {frames} frames"
        );
    }
}

#[test]
fn restarted_port_does_not_grant_what_its_last_incarnation_granted() {
    for seed in 0..40 {
        let senders = 1 + seed as usize % 5;
        let mut simulation = SimulatedPorts::new(seed, senders + 1, grant_budget(212_992), NO_FAULTS);
        simulation.faulty_until = 0;
        for sender in 1..=senders {
            simulation.ports[sender].backlog[0] = 8000 / senders as u64;
        }
        for life in 0..6 {
            // A slow reader: granted data is sent and stays in the socket.
            simulation.ports[0].reads_per_poll = 1;
            let until = simulation.now + MILLISECOND * (600 + 7 * life);
            while simulation.now < until {
                simulation.tick();
            }
            simulation.restart(0);
        }
        simulation.run(400 * SECOND);
    }
}

#[test]
fn new_sender_makes_progress_beside_a_stream_and_a_stopped_grant_holder() {
    let mut simulation = SimulatedPorts::new(3, 4, grant_budget(212_992), NO_FAULTS);
    simulation.faulty_until = 0;
    simulation.ports[1].backlog[0] = 100_000;
    simulation.ports[2].backlog[0] = 1;
    while simulation.now < 2 * SECOND {
        simulation.tick();
    }
    simulation.ports[2].stopped_until = 100 * SECOND;
    simulation.ports[3].backlog[0] = 1;
    let begin = simulation.now;
    while simulation.ports[3].backlog[0] > 0 {
        simulation.tick();
    }
    assert!(simulation.now - begin < 50 * MILLISECOND, "after {} ns", simulation.now - begin);
    assert!(simulation.ports[1].backlog[0] > 0, "the stream was still running");
}

#[test]
fn stopped_peer_is_stalled_then_alive_and_loses_nothing() {
    let mut simulation = SimulatedPorts::new(4, 2, grant_budget(212_992), NO_FAULTS);
    simulation.faulty_until = 0;
    simulation.ports[0].backlog[1] = 10_000;
    while simulation.now < SECOND + SECOND / 10 {
        simulation.tick();
    }
    simulation.ports[1].stopped_until = simulation.now + SECOND;
    simulation.run(60 * SECOND);
    let states: Vec<_> = simulation.ports[0].changes.iter().map(|(_, change)| *change).collect();
    let became = LinkChange::StateChanged;
    assert_eq!(states, [became(PeerState::Alive), became(PeerState::Stalled), became(PeerState::Alive)]);
    assert_eq!(
        simulation.ports[1].changes,
        [(0, became(PeerState::Alive))],
        "the stopped port blames no peer"
    );
}

#[test]
fn silent_peer_dies_and_its_share_is_released() {
    let mut simulation = SimulatedPorts::new(5, 2, grant_budget(212_992), NO_FAULTS);
    simulation.faulty_until = 0;
    simulation.ports[0].backlog[1] = 10;
    simulation.run(SECOND + SECOND / 2);
    assert!(simulation.ports[1].links.grant_issuer().outstanding() > 0);
    simulation.ports[0].stopped_until = u64::MAX;
    while simulation.now < 6 * SECOND {
        simulation.tick();
    }
    assert_eq!(simulation.ports[1].links.state(address(0)), Some(PeerState::Dead));
    assert_eq!(simulation.ports[1].links.grant_issuer().outstanding(), 0);
}

#[test]
fn restart_of_a_peer_is_detected() {
    let mut simulation = SimulatedPorts::new(6, 2, grant_budget(212_992), NO_FAULTS);
    simulation.faulty_until = 0;
    simulation.ports[0].backlog[1] = 10;
    simulation.run(10 * SECOND);
    let port = simulation.new_port(2);
    simulation.ports[1] = port;
    simulation.ports[0].changes.clear();
    simulation.ports[0].backlog[1] = 10;
    simulation.run(20 * SECOND);
    let end = simulation.now + SECOND;
    while simulation.now < end {
        simulation.tick();
    }
    assert_eq!(simulation.ports[0].changes, [(1, LinkChange::Restarted)]);
}

#[test]
fn foreign_port_gets_a_small_window() {
    let mut links =
        LinkControl::new(Incarnation::new(1), LinkSecret::from_system(), grant_budget(212_992), 0);
    let peer = address(7);
    assert!(!links.may_send(peer, MAX_FRAME_CHARGE, 0));
    assert!(links.transmit(0).is_some(), "HELLO is sent at once");
    links.on_unreachable(peer, UnreachablePort::Link, 1000);
    assert_eq!(links.state(peer), Some(PeerState::Foreign));
    let mut sent = 0;
    while links.may_send(peer, MAX_FRAME_CHARGE, 2000) {
        links.record_sent(peer, MAX_FRAME_CHARGE, 2000);
        sent += 1;
    }
    assert_eq!(sent, 64 * 1024 / MAX_FRAME_CHARGE);
    links.record_received(peer, 1024, 3000);
    assert!(links.may_send(peer, MAX_FRAME_CHARGE, 3000), "a response opens the window");
    links.on_unreachable(peer, UnreachablePort::Roce, 4000);
    assert_eq!(links.state(peer), Some(PeerState::Dead));
}

#[test]
fn pause_reaches_the_peer() {
    let mut simulation = SimulatedPorts::new(8, 2, grant_budget(212_992), NO_FAULTS);
    simulation.faulty_until = 0;
    simulation.ports[0].backlog[1] = 1;
    simulation.run(2 * SECOND);
    let pause = Pause { classes: 8, quanta: [0, 0, 0, 0xffff, 0, 0, 0, 0], rate: 0 };
    simulation.ports[0].links.send_pause(address(1).address, pause, simulation.now);
    let end = simulation.now + 10 * MILLISECOND;
    while simulation.now < end {
        simulation.tick();
    }
    assert!(simulation.ports[1].changes.contains(&(0, LinkChange::PauseReceived(pause))));
}

/// Two ports with an established link and traffic in both directions.
fn established_pair(seed: u64) -> SimulatedPorts {
    let mut simulation = SimulatedPorts::new(seed, 2, grant_budget(212_992), NO_FAULTS);
    simulation.faulty_until = 0;
    (simulation.ports[0].backlog[1], simulation.ports[1].backlog[0]) = (100, 100);
    simulation.run(20 * SECOND);
    for port in &mut simulation.ports {
        port.rejects.clear();
        port.changes.clear();
    }
    simulation
}

/// Everything that an attacker may want to say in the name of port 1, with a token that it can only guess.
fn forgeries(simulation: &SimulatedPorts, token: Option<Token>) -> Vec<Message> {
    // The attacker may know both incarnations: they are no secret.
    let incarnation = |port: usize| Incarnation::new(1000 * (port as u64 + 1));
    let message = |sender, body| Message {
        sender,
        receiver: Some(incarnation(0)),
        token,
        slots: Default::default(),
        frame_order: Default::default(),
        body,
    };
    let later = Incarnation::new(u64::MAX);
    let hello =
        |exchange| Body::Hello(Hello { exchange, token: Token::new(7), budget: u64::MAX, machine: None });
    let stop = Pause { classes: 0xff, quanta: [u16::MAX; 8], rate: 0 };
    let heartbeat =
        |exchange, returned| Body::Heartbeat(Heartbeat { exchange, stamp: simulation.now, returned });
    let grant = Grant { granted: u64::MAX, returned: 0, max_unused: 0 };
    let request = GrantRequest { consumed: 0, returned: 0, needed: MAX_FRAME_CHARGE, wanted: 1 << 28 };
    let bodies = [
        hello(ExchangeKind::Query),
        hello(ExchangeKind::Reply),
        Body::Pause(stop),
        Body::Grant(grant),
        Body::Grant(Grant { granted: 1 << 40, ..grant }),
        Body::Request(request),
        Body::Request(GrantRequest { consumed: u64::MAX, ..request }),
        heartbeat(ExchangeKind::Query, 0),
        heartbeat(ExchangeKind::Reply, u64::MAX),
    ];
    let senders = [incarnation(1), later];
    senders.iter().flat_map(|sender| bodies.map(|body| message(*sender, body))).collect()
}

#[test]
fn forged_messages_change_nothing() {
    for seed in 0..20 {
        let mut simulation = established_pair(seed);
        let guesses = [None, Some(Token::new(seed)), Some(Token::new(simulation.random.next()))];
        for token in guesses {
            for message in forgeries(&simulation, token) {
                let is_query =
                    matches!(message.body, Body::Hello(Hello { exchange: ExchangeKind::Query, .. }));
                let before = format!("{:?}", simulation.ports[0].links.grant_issuer());
                let now = simulation.now;
                let links = &mut simulation.ports[0].links;
                let result = links.on_message(address(1).address, &message, now);
                // A stranger's HELLO gets an answer, but no state.
                assert_eq!(result, if is_query { Ok(()) } else { Err(LinkReject::BadToken) }, "{message}");
                assert_eq!(format!("{:?}", links.grant_issuer()), before, "{message}");
                assert_eq!(links.poll_event(), None, "{message}");
                assert_eq!(links.state(address(1)), Some(PeerState::Alive));
            }
        }
        // The answers reach the real port 1 and do not disturb it either.
        (simulation.ports[0].backlog[1], simulation.ports[1].backlog[0]) = (100, 100);
        let end = simulation.now + 100 * MILLISECOND;
        while simulation.now < end {
            simulation.tick();
        }
        assert!(simulation.done(), "{:?}", simulation.backlogs());
        assert!(simulation.ports.iter().all(|port| port.changes.is_empty()));
    }
}

#[test]
fn strangers_leave_no_state() {
    let mut simulation = established_pair(3);
    let now = simulation.now;
    let budget = simulation.ports[0].links.grant_issuer().outstanding();
    let messages = forgeries(&simulation, Some(Token::new(9)));
    let links = &mut simulation.ports[0].links;
    for stranger in 0..100_000u32 {
        let from = IpAddr::from(Ipv4Addr::from(0x7f10_0000 + stranger));
        let message = messages[stranger as usize % messages.len()];
        let _ = links.on_message(from, &message, now);
        assert_eq!(links.state(from.into()), None);
    }
    assert_eq!(links.grant_issuer().outstanding(), budget);
    let answers = std::iter::from_fn(|| links.transmit(now)).count();
    assert!(answers <= 300, "{answers} answers to forged messages");
}

#[test]
fn peer_that_proved_its_address_cannot_say_the_impossible() {
    let mut simulation = established_pair(4);
    let now = simulation.now;
    // A real message of port 1 has the right token.
    simulation.ports[1].links.send_pause(address(0).address, Pause { classes: 1, ..Pause::default() }, now);
    let (_, real) = simulation.ports[1].links.transmit(now).expect("a pause");
    let links = &mut simulation.ports[0].links;
    let slow = Pause { classes: 8, quanta: [u16::MAX; 8], rate: 1 };
    let request = GrantRequest { consumed: u64::MAX, returned: 0, needed: u64::MAX, wanted: u64::MAX };
    for body in [
        Body::Pause(slow),
        Body::Pause(Pause { classes: 0x100, rate: 0, ..slow }),
        Body::Grant(Grant { granted: u64::MAX, returned: 0, max_unused: 0 }),
        Body::Request(request),
    ] {
        let message = Message { body, ..real };
        let result = links.on_message(address(1).address, &message, now);
        assert_eq!(result, Err(LinkReject::OutOfBounds), "{message}");
        assert_eq!(links.poll_event(), None);
    }
    let elsewhere =
        Message { slots: softhca_wire::link_control::Slots { destination: 1, ..real.slots }, ..real };
    assert_eq!(links.on_message(address(1).address, &elsewhere, now), Err(LinkReject::NoSuchPort));
    let old = Message { sender: Incarnation::new(1), ..real };
    assert_eq!(links.on_message(address(1).address, &old, now), Err(LinkReject::Stale));
    assert_eq!(
        links.on_message(address(2).address, &real, now),
        Err(LinkReject::BadToken),
        "a token has one owner"
    );
    assert_eq!(links.on_message(address(1).address, &real, now), Ok(()));
}

#[test]
fn strangers_replace_no_peer_in_use() {
    let mut simulation = established_pair(5);
    let now = simulation.now;
    let links = &mut simulation.ports[0].links;
    // Packets of strangers, with or without link control, fill the table.
    for stranger in 0..5000u32 {
        let from = IpAddr::from(Ipv4Addr::from(0x7f10_0000 + stranger));
        links.record_received(from.into(), 1024, now + u64::from(stranger));
    }
    assert_eq!(links.state(address(1)), Some(PeerState::Alive));
    assert!(!links.may_send(address(7), MAX_FRAME_CHARGE, now + 10_000), "no grant yet");
    assert_eq!(links.state(address(7)), Some(PeerState::Probing), "a new peer finds room");
}
