//! A soak: processes exchange random traffic over a daemon and over embedded devices, while processes and daemons are
//! killed, links lose packets, and memory regions come and go. Nothing may be lost, nothing may leak, and the counters
//! must agree. `SOFTHCA_SOAK` is the number of seconds:
//! `SOFTHCA_SOAK=1800 cargo test -p softhca-tests --test sockets -- --ignored --nocapture soak`

use super::data::{ALL_ACCESS, ConnectedHost};
use super::process::{Process, TEST_TIMEOUT, TestDaemon, receive_line, send_line, spawn};
use softhca::{
    CompletionStatus, ConnectOptions, Counters, DaemonControl, Device, EmbeddedOptions, Error,
    ReceiveRequest, Recovery, RemoteAddress, SendRequest,
    fault::{Action, Choice, Repeat, Rule, RuleId, Selector},
};
use std::time::{Duration, Instant};

const SOAKERS: usize = 3;
const REGION: u64 = 256 << 10;
/// Rounds after which the resources of a process are its baseline. A daemon opens the sockets of some slots before it
/// reuses the first.
const WARM_UP: u64 = 4;
const DAEMON_WARM_UP: u64 = 12;

/// Pseudorandom numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

fn lossy_rule(id: u32) -> Rule {
    let choice = Choice::Probability { per_billion: 2_000_000 };
    Rule {
        id: RuleId(id),
        selector: Selector::default(),
        repeat: Repeat::choice(choice),
        action: Action::Drop,
    }
}

/// What happened to the packets of both ends.
#[derive(Clone, Copy, Debug)]
struct Packets {
    sent: u64,
    /// Received by a queue pair, or dropped by a rule.
    arrived: u64,
    /// Dropped on arrival; a queue pair may have received some of them.
    dropped: u64,
}

impl Packets {
    fn new(counters: [Counters; 2], fired: u64) -> Packets {
        let of = |one: fn(&Counters) -> u64| counters.iter().map(one).sum::<u64>();
        Packets {
            sent: of(|counters| counters.sent_pkts),
            arrived: of(|counters| counters.rcvd_pkts) + fired,
            dropped: of(|counters| {
                counters.rx_dropped + counters.rx_malformed + counters.rx_icrc_encapsulated
            }),
        }
    }

    /// Every packet is accounted for, and none twice.
    fn is_balanced(&self) -> bool {
        (self.arrived..=self.arrived + self.dropped).contains(&self.sent)
    }
}

/// Waits until every packet is accounted for: the last ACKs may be on their way.
fn await_balance(whose: &str, mut packets: impl FnMut() -> Packets) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !packets().is_balanced() {
        assert!(Instant::now() < deadline, "{whose}: {:?}", packets());
        std::thread::yield_now();
    }
}

/// The resources of a process: descriptors, mappings, and kilobytes of memory.
fn resources(pid: u32) -> [u64; 3] {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let mappings = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident = resident.split_whitespace().next().unwrap().parse().unwrap();
    [descriptors as u64, mappings as u64, resident]
}

/// Compares the resources of a process with its baseline, which allows for caches of the allocator and the runtime.
struct LeakCheck {
    warm_up: u64,
    rounds: u64,
    baseline: [u64; 3],
}

impl LeakCheck {
    fn new(warm_up: u64) -> LeakCheck {
        LeakCheck { warm_up, rounds: 0, baseline: [0; 3] }
    }

    /// Waits until the process has given back what it needs no more: an idle thread of the runtime ends after ten seconds.
    fn check(&mut self, what: &str, pid: u32) {
        let mut now = resources(pid);
        self.rounds += 1;
        if self.rounds <= self.warm_up {
            self.baseline = std::array::from_fn(|index| self.baseline[index].max(now[index]));
            return;
        }
        // A daemon keeps the sockets, pages and rings of the slots that it reuses, a dozen descriptors each: 210 to 280
        // in all, however long it runs. The baseline may have been taken when only a few slots had been used.
        let descriptors = if self.warm_up == DAEMON_WARM_UP { 300 } else { 4 };
        let allowed = [descriptors, 64, 64 << 10];
        let deadline = Instant::now() + TEST_TIMEOUT;
        while (0..3).any(|index| now[index] > self.baseline[index] + allowed[index]) {
            assert!(Instant::now() < deadline, "{what} leaks: {now:?} after {:?}", self.baseline);
            std::thread::sleep(Duration::from_millis(100));
            now = resources(pid);
        }
    }
}

/// A process that runs a round for each line, and prints its operations or that the daemon is gone.
pub fn run_soaker() {
    while let Some(line) = receive_line() {
        let mut random = Random(line.parse().unwrap());
        let outcome = match random.below(3) {
            0 => embedded_round(&mut random),
            _ => daemon_round(&mut random),
        };
        match outcome {
            Some(operations) => send_line(&format!("done {operations}")),
            None => send_line("gone"),
        }
    }
}

fn embedded_round(random: &mut Random) -> Option<u64> {
    let devices = [(); 2].map(|()| {
        let mut options = EmbeddedOptions::default();
        options.settings.recovery = Recovery::GoBackN;
        Device::embedded_with(options).expect("an embedded device")
    });
    if random.below(2) == 0 {
        devices.iter().for_each(|device| device.add_rule(7, lossy_rule(1)));
    }
    let operations = traffic(&devices, random).expect("an embedded device stays");
    let contexts = devices.each_ref().map(Device::open);
    let fired: fn(&Device) -> u64 = |device| device.rules().iter().map(|(_, counters)| counters.fired).sum();
    await_balance("embedded devices", || {
        let counters = contexts.each_ref().map(|context| context.counters());
        Packets::new(counters, devices.iter().map(fired).sum())
    });
    Some(operations)
}

fn daemon_round(random: &mut Random) -> Option<u64> {
    let open = |host| match Device::daemon_host(None, Some(host)) {
        Ok(device) => Some(device),
        Err(Error::NoDaemon { .. } | Error::DaemonRefused { .. } | Error::DeviceGone { .. }) => None,
        Err(error) => panic!("{error}"),
    };
    traffic(&[open("alice")?, open("bob")?], random)
}

/// Random operations between two devices, each of which must complete once and move the right bytes. `None` if the
/// daemon ended.
fn traffic(devices: &[Device; 2], random: &mut Random) -> Option<u64> {
    let create = |device| match ConnectedHost::try_new(device, REGION) {
        Ok(host) => Some(host),
        Err(error) if error.is_device_gone() => None,
        Err(error) => panic!("objects cannot be created: {error}"),
    };
    let [near, far] = [create(&devices[0])?, create(&devices[1])?];
    let is_gone = || !near.context.is_alive() || !far.context.is_alive();
    let lost = |what: &str| -> Option<u64> {
        // The end of a daemon may show in a completion before it shows in the device.
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !is_gone() {
            assert!(Instant::now() < deadline, "{what}");
        }
        None
    };
    if near.pair.connect_both(&far.pair, &ConnectOptions::default()).is_err() {
        return lost("the queue pairs cannot be connected");
    }
    let operations = 40 + random.below(80);
    let mut sum = 0;
    far.region.write_at(0, &[0; 8]);
    for id in 0..operations {
        let length = 1 + random.below(60 << 10) as usize;
        let pattern: Vec<u8> = (0..length).map(|index| (id as usize * 7 + index) as u8).collect();
        let remote = |offset: u64| -> RemoteAddress {
            let start = far.region.remote_address(0);
            RemoteAddress { address: start.address + offset, ..start }
        };
        // Half of the regions are new.
        let Ok(fresh) = near.domain.allocate_region(64 << 10, ALL_ACCESS) else { return lost("no region") };
        let own = if random.below(2) == 0 { &fresh } else { &near.region };
        own.write_at(0, &pattern);
        let gather = [own.sge(0, length as u32)];
        let mut received = 0;
        let kind = random.below(4);
        let posted = match kind {
            0 => near.pair.post_send(&SendRequest::rdma_write(id, &gather, remote(4096))),
            1 => {
                far.region.write_at(4096, &pattern);
                own.write_at(0, &vec![0; length]);
                near.pair.post_send(&SendRequest::rdma_read(id, &gather, remote(4096)))
            }
            2 => {
                let scatter = [far.region.sge(4096, 64 << 10)];
                received = 1;
                far.pair
                    .post_recv(&ReceiveRequest { wr_id: id, sg_list: &scatter })
                    .and_then(|()| near.pair.post_send(&SendRequest::send(id, &gather)))
            }
            _ => near.pair.post_send(&SendRequest::fetch_and_add(id, &[own.sge(0, 8)], remote(0), id)),
        };
        if posted.is_err() {
            return lost("a work request cannot be posted");
        }
        for (end, count) in [(&near, 1), (&far, received)] {
            for _ in 0..count {
                let Some(completion) = end.queue.wait_for(TEST_TIMEOUT) else { return lost("no completion") };
                if completion.status != CompletionStatus::Success {
                    return lost(&format!("{completion:?}"));
                }
                assert_eq!(completion.wr_id, id);
            }
        }
        match kind {
            0 | 2 => assert_eq!(far.region.read_at(4096, length as u64), pattern, "operation {id}"),
            1 => assert_eq!(own.read_at(0, length as u64), pattern, "operation {id}"),
            _ => {
                assert_eq!(own.load(0), sum, "operation {id}");
                sum += id;
            }
        }
    }
    assert!(is_gone() || near.queue.poll().is_none() && far.queue.poll().is_none(), "a completion too many");
    Some(operations)
}

fn start_soaker(daemon: &TestDaemon) -> (Process, LeakCheck) {
    // A backtrace of one of its failures would load symbols, which stay in memory.
    (spawn("soaker", &daemon.name, &[("RUST_BACKTRACE", "0")]), LeakCheck::new(WARM_UP))
}

/// Waits until the daemon has no clients, and checks its objects and counters.
fn check_daemon(daemon: &TestDaemon, control: &mut DaemonControl, dropped: Option<u64>) {
    daemon.wait_until("the end of all clients", |status| {
        status.hosts.iter().all(|host| host.clients.is_empty() && host.queue_pairs == 0)
    });
    let Some(dropped) = dropped else { return };
    await_balance("the daemon", || {
        Packets::new(["alice", "bob"].map(|host| control.counters(Some(host)).unwrap()), dropped)
    });
}

fn fired(control: &mut DaemonControl) -> u64 {
    let of = |host: &str, control: &mut DaemonControl| -> u64 {
        control.rules(host).unwrap().iter().map(|(_, counters)| counters.fired).sum()
    };
    of("alice", control) + of("bob", control)
}

#[test]
#[ignore = "takes as long as SOFTHCA_SOAK says, two minutes by default"]
fn soak() {
    let seconds = std::env::var("SOFTHCA_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(120);
    let end = Instant::now() + Duration::from_secs(seconds);
    // Both data paths, in turns.
    let variables = ["direct", "daemon"].map(|path| format!("recovery = 'go-back-n'\ndata_path = '{path}'"));
    let variables = variables.each_ref().map(|text| [("TEST_CONFIG", text.as_str())]);
    let mut daemon = TestDaemon::with(&variables[0]);
    let mut control = daemon.control();
    let (mut check, mut dropped) = (LeakCheck::new(DAEMON_WARM_UP), 0);
    let mut soakers: Vec<_> = (0..SOAKERS).map(|_| start_soaker(&daemon)).collect();
    let mut random = Random(std::process::id().into());
    let (mut rounds, mut operations, mut kills, mut restarts) = (0u64, 0u64, 0u64, 0u64);
    while Instant::now() < end {
        rounds += 1;
        if random.below(2) == 0 {
            for host in ["alice", "bob"] {
                control.add_rules(host, rounds, &[(lossy_rule(1), "lose some")]).unwrap();
            }
        }
        for (soaker, _) in &mut soakers {
            soaker.send_line(&random.below(1 << 50).max(1).to_string());
        }
        let event = random.below(16);
        if event < 3 {
            // At some moment of the round, if any soaker uses the daemon in it.
            let deadline = Instant::now() + Duration::from_millis(random.below(200));
            while control.status().unwrap().hosts[0].queue_pairs == 0 && Instant::now() < deadline {}
        }
        match event {
            0 => {
                dropped = 0;
                daemon.process.kill();
                daemon = TestDaemon::named(daemon.name.clone(), &variables[(restarts as usize + 1) % 2]);
                control = daemon.control();
                check = LeakCheck::new(DAEMON_WARM_UP);
                restarts += 1;
            }
            1 | 2 => {
                let index = random.below(SOAKERS as u64) as usize;
                soakers[index].0.kill();
                soakers[index] = start_soaker(&daemon);
                soakers[index].0.send_line("12345");
                kills += 1;
            }
            _ => {}
        }
        for (soaker, check) in &mut soakers {
            let line = soaker.receive_line();
            match line.split_once(' ') {
                Some(("done", count)) => operations += count.parse::<u64>().unwrap(),
                _ => assert!(line == "gone" && event == 0, "round {rounds}, event {event}: {line}"),
            }
            check.check("a client", soaker.id());
        }
        dropped += fired(&mut control);
        ["alice", "bob"].iter().for_each(|host| control.clear_rules(host).unwrap());
        // A process that ends takes the packets in its rings with it, and one that is killed its last counts.
        let is_counted = restarts % 2 == 1;
        check_daemon(&daemon, &mut control, is_counted.then_some(dropped));
        check.check("the daemon", daemon.process.id());
    }
    println!("{rounds} rounds, {operations} operations, {kills} processes and {restarts} daemons killed");
    assert!(operations > 0);
}
