//! The link state machines with lossy control channels, slow receivers, and ports that stop, die and restart.
//! Invariants: no receive buffer is charged beyond its budget, and every sender makes progress.

use proptest::prelude::*;
use softhca_udp::{
    LinkChange, LinkControl, MAX_FRAME_CHARGE, PeerState, UnreachablePort, charge, grant_budget,
};
use softhca_wire::link_control::{Incarnation, Message, Pause};
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

fn address(port: usize) -> IpAddr {
    Ipv4Addr::from(0x7f00_0002 + port as u32).into()
}

fn index(address: IpAddr) -> usize {
    match address {
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
    errors: Vec<(IpAddr, UnreachablePort)>,
    /// Chunks that one poll reads.
    reads_per_poll: u64,
    stopped_until: u64,
    down_until: Option<u64>,
    /// Frames left to send, by destination.
    backlog: Vec<u64>,
    changes: Vec<(usize, LinkChange)>,
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
        };
        for _ in 0..ports {
            let port = simulation.new_port(ports);
            simulation.ports.push(port);
        }
        simulation
    }

    fn new_port(&mut self, ports: usize) -> Port {
        self.incarnations += 1000;
        let mut links = LinkControl::new(Incarnation::new(self.incarnations), self.budget, self.now);
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
        for port in 0..self.ports.len() {
            if self.ports[port].down_until.is_some_and(|until| now >= until) {
                self.restart(port);
            }
            if self.ports[port].down_until.is_none() && now >= self.ports[port].stopped_until {
                self.poll(port);
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
            port.links.on_message(address(from), &message, now);
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
            let (len, segments) = match self.random.below(3) {
                0 => (64, 1),
                1 => (4154, 1),
                _ => (1082, 1 + self.random.below(4) as usize),
            };
            let charge = charge(len, segments);
            let port = &mut self.ports[from];
            if port.backlog[to] == 0 || !port.links.may_send(address(to), charge, self.now) {
                return;
            }
            port.links.record_sent(address(to), charge, self.now);
            port.backlog[to] -= 1;
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
                let charged = self.ports[to].charged;
                assert!(charged <= self.budget, "{charged} in a socket for {}", self.budget);
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

#[test]
fn restarted_port_does_not_grant_what_its_last_incarnation_granted() {
    for seed in 0..200 {
        let mut simulation = SimulatedPorts::new(seed, 2, grant_budget(212_992), NO_FAULTS);
        simulation.faulty_until = 0;
        simulation.ports[1].backlog[0] = 4000;
        for life in 0..6 {
            // A slow reader: granted data is sent and stays in the socket.
            simulation.ports[0].reads_per_poll = 1;
            let until = simulation.now + MILLISECOND * (20 + 7 * life);
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
    let mut links = LinkControl::new(Incarnation::new(1), grant_budget(212_992), 0);
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
    simulation.ports[0].links.send_pause(address(1), pause, simulation.now);
    let end = simulation.now + 10 * MILLISECOND;
    while simulation.now < end {
        simulation.tick();
    }
    assert!(simulation.ports[1].changes.contains(&(0, LinkChange::PauseReceived(pause))));
}
