//! Two processes, one daemon: every kind of operation, between two hosts and on one.

use crate::process::{self, PATIENCE, Process, TestDaemon, hear, say};
use softhca::{
    Access, CompletionQueue, Context, Device, Endpoint, Gid, MemoryRegion, Path, ProtectionDomain, Psn,
    QpKind, Qpn, QueuePair, ReceiveRequest, RemoteAddress, RemoteKey, SendRequest,
};
use std::ptr::NonNull;

pub const ALL: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// One end of a connection and everything that it needs.
pub struct End {
    pub context: Context,
    pub domain: ProtectionDomain,
    pub queue: CompletionQueue,
    pub pair: QueuePair,
    pub region: MemoryRegion,
}

impl End {
    pub fn new(device: &Device, bytes: usize) -> End {
        let context = device.open();
        let domain = context.allocate_domain().unwrap();
        let queue = context.create_completion_queue(256).unwrap();
        let pair = domain.queue_pair(QpKind::Rc, &queue).create().unwrap();
        let region = domain.register(bytes, ALL).unwrap();
        End { context, domain, queue, pair, region }
    }

    /// What the other end must know, as a line.
    pub fn card(&self) -> String {
        let Endpoint { gid, queue_pair, psn } = self.pair.endpoint();
        let gid: Vec<String> = gid.0.iter().map(|byte| byte.to_string()).collect();
        let RemoteAddress { address, key } = self.region.remote(0);
        format!("{} {} {} {address} {}", gid.join(","), queue_pair.value(), psn.value(), key.0)
    }

    /// Connects to whoever wrote the line, and returns where its memory is.
    pub fn connect(&self, card: &str) -> RemoteAddress {
        let fields: Vec<&str> = card.split(' ').collect();
        let bytes: Vec<u8> = fields[0].split(',').map(|byte| byte.parse().unwrap()).collect();
        let number = |index: usize| fields[index].parse::<u64>().unwrap();
        let peer = Endpoint {
            gid: Gid(bytes.try_into().unwrap()),
            queue_pair: Qpn::new(number(1) as u32),
            psn: Psn::new(number(2) as u32),
        };
        self.pair.connect(&peer, &Path::default()).unwrap();
        RemoteAddress { address: number(3), key: RemoteKey(number(4) as u32) }
    }

    pub fn finish(&self) {
        let completion = self.queue.wait_for(PATIENCE).expect("a completion");
        assert!(completion.status.is_success(), "{completion:?}");
    }
}

/// Sends back what it gets until its input ends.
pub fn be_echo() {
    let host = std::env::var("TEST_HOST").unwrap();
    let end = End::new(&Device::daemon_host(None, Some(&host)).unwrap(), 1 << 20);
    say(&end.card());
    end.connect(&hear().unwrap());
    let post = |id| {
        end.pair.post_receive(&ReceiveRequest { id, scatter: &[end.region.entry(0, 4096)] }).unwrap();
    };
    post(0);
    say("connected");
    let rounds: u64 = hear().unwrap().parse().unwrap();
    // The next message may come before the acknowledgement of the last answer.
    let mut answered = 0;
    while answered < rounds {
        let completion = end.queue.wait_for(PATIENCE).expect("a message or an acknowledgement");
        assert!(completion.status.is_success(), "{completion:?}");
        if !completion.operation.is_receive() {
            answered += 1;
            continue;
        }
        post(completion.id + 1);
        let entries = [end.region.entry(0, completion.bytes)];
        end.pair.post(&SendRequest::send(completion.id, &entries)).unwrap();
    }
    say("done");
    while hear().is_some() {}
}

/// An end of ours, connected to an echo in another process.
pub fn connected(daemon: &TestDaemon, ours: &str, theirs: &str) -> (End, Process, RemoteAddress) {
    let end = End::new(&daemon.open(ours), 1 << 20);
    let mut echo = process::spawn("echo", &daemon.name, &[("TEST_HOST", theirs)]);
    let remote = end.connect(&echo.hear());
    echo.say(&end.card());
    assert_eq!(echo.hear(), "connected");
    (end, echo, remote)
}

/// What makes a daemon's hosts reach themselves within their cards.
pub const WITHIN_CARDS: [(&str, &str); 1] = [("TEST_CONFIG", "loopback = 'card'")];

fn every_operation(daemon: &TestDaemon, ours: &str, theirs: &str) {
    let (end, mut echo, remote) = connected(daemon, ours, theirs);
    echo.say("50");
    for round in 0..50u64 {
        let text = format!("message {round}");
        end.region.write_at(0, text.as_bytes());
        let receive = ReceiveRequest { id: round, scatter: &[end.region.entry(4096, 4096)] };
        end.pair.post_receive(&receive).unwrap();
        end.pair.post(&SendRequest::send(round, &[end.region.entry(0, text.len() as u32)])).unwrap();
        end.finish();
        end.finish();
        assert_eq!(end.region.read_at(4096, text.len()), text.as_bytes());
    }
    assert_eq!(echo.hear(), "done");
    let at = |offset| RemoteAddress { address: remote.address + offset, ..remote };
    let data: Vec<u8> = (0..100_000u32).map(|index| index as u8).collect();
    end.region.write_at(8192, &data);
    end.pair.post(&SendRequest::write(1, &[end.region.entry(8192, 100_000)], at(200_000))).unwrap();
    end.finish();
    end.pair.post(&SendRequest::read(2, &[end.region.entry(500_000, 100_000)], at(200_000))).unwrap();
    end.finish();
    assert_eq!(end.region.read_at(500_000, data.len()), data);
    let old = [end.region.entry(0, 8)];
    end.region.write_at(8, &40u64.to_ne_bytes());
    end.pair.post(&SendRequest::write(3, &[end.region.entry(8, 8)], at(64))).unwrap();
    end.finish();
    end.pair.post(&SendRequest::fetch_add(4, &old, at(64), 2)).unwrap();
    end.finish();
    assert_eq!(end.region.load(0), 40);
    end.pair.post(&SendRequest::compare_swap(5, &old, at(64), 42, 7)).unwrap();
    end.finish();
    assert_eq!(end.region.load(0), 42);
    end.pair.post(&SendRequest::read(6, &[end.region.entry(16, 8)], at(64))).unwrap();
    end.finish();
    assert_eq!(end.region.load(16), 7);
}

#[test]
fn two_processes_on_two_hosts_do_every_operation() {
    every_operation(&TestDaemon::start(), "alice", "bob");
}

#[test]
fn two_processes_on_one_host_do_every_operation() {
    every_operation(&TestDaemon::start(), "alice", "alice");
}

#[test]
fn two_processes_on_one_host_do_every_operation_within_its_card() {
    let daemon = TestDaemon::with(&WITHIN_CARDS);
    every_operation(&daemon, "alice", "alice");
    let status = daemon.control().status().unwrap();
    assert!(status.hosts.iter().all(|host| host.host.loopback == "card"), "{status:?}");
    // Other hosts are where they were.
    every_operation(&daemon, "alice", "bob");
}

#[test]
fn memory_of_the_applications_own_is_read_and_written() {
    use_own_memory(&TestDaemon::start(), "alice", "bob");
}

#[test]
fn memory_of_the_applications_own_is_read_and_written_within_a_card() {
    use_own_memory(&TestDaemon::with(&WITHIN_CARDS), "alice", "alice");
}

#[allow(unsafe_code)]
fn use_own_memory(daemon: &TestDaemon, ours: &str, theirs: &str) {
    let (end, _echo, remote) = connected(daemon, ours, theirs);
    let memory: &'static mut [u8] = vec![7u8; 50_000].leak();
    let base = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the memory is never freed, and from here on nobody has a reference to it.
    let own = unsafe { end.domain.register_foreign(base, 50_000, ALL) }.unwrap();
    assert_eq!(own.address(), base.as_ptr() as u64);
    end.pair.post(&SendRequest::write(1, &[own.entry(100, 20_000)], remote)).unwrap();
    end.finish();
    end.pair.post(&SendRequest::read(2, &[end.region.entry(0, 20_000)], remote)).unwrap();
    end.finish();
    assert_eq!(end.region.read_at(0, 20_000), [7; 20_000]);
    end.region.write_at(0, &[9; 20_000]);
    end.pair.post(&SendRequest::write(3, &[end.region.entry(0, 20_000)], remote)).unwrap();
    end.finish();
    end.pair.post(&SendRequest::read(4, &[own.entry(25_000, 20_000)], remote)).unwrap();
    end.finish();
    assert_eq!(own.read_at(25_000, 20_000), [9; 20_000]);
    assert_eq!(own.read_at(24_999, 1), [7]);
    assert_eq!(own.read_at(45_000, 1), [7]);
}

#[test]
fn completion_events_come_to_one_who_sleeps() {
    let daemon = TestDaemon::start();
    let (end, mut echo, _) = connected(&daemon, "alice", "bob");
    let receive = ReceiveRequest { id: 9, scatter: &[end.region.entry(0, 100)] };
    end.pair.post_receive(&receive).unwrap();
    echo.say("1");
    let sender = {
        let (pair, region) = (end.pair.clone(), end.region.clone());
        std::thread::spawn(move || pair.post(&SendRequest::send(1, &[region.entry(200, 10)])).unwrap())
    };
    let mut ids: Vec<u64> = (0..2).map(|_| softhca::block_on(end.queue.next()).id).collect();
    ids.sort();
    assert_eq!(ids, [1, 9]);
    sender.join().unwrap();
}

/// Not a test: prints what decides how long an engine thread lingers. Run it with
/// `cargo test --release -p softhca-tests --test daemon measure -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure() {
    const ROUNDS: usize = 5000;
    for linger in ["0", "20", "50", "200"] {
        let daemon = TestDaemon::with(&[("TEST_LINGER", linger)]);
        for theirs in ["alice", "bob"] {
            let (end, mut echo, remote) = connected(&daemon, "alice", theirs);
            echo.say(&ROUNDS.to_string());
            let mut times: Vec<_> = (0..ROUNDS).map(|_| one_round(&end)).collect();
            assert_eq!(echo.hear(), "done");
            times.sort();
            let started = std::time::Instant::now();
            for id in 0..1000 {
                if id >= 16 {
                    end.finish();
                }
                let entries = [end.region.entry(0, 1 << 20)];
                end.pair.post(&SendRequest::write(id, &entries, remote)).unwrap();
            }
            (0..16).for_each(|_| end.finish());
            let rate = 1000.0 * 1.048_576e-3 / started.elapsed().as_secs_f64();
            println!(
                "linger {linger:>3} us, alice to {theirs:<5}: 64 B one way p50 {:?} p99 {:?}, 1 MiB writes {rate:.2} GB/s",
                times[ROUNDS / 2] / 2,
                times[ROUNDS * 99 / 100] / 2,
            );
        }
    }
}

fn one_round(end: &End) -> std::time::Duration {
    let started = std::time::Instant::now();
    end.pair.post_receive(&ReceiveRequest { id: 0, scatter: &[end.region.entry(4096, 64)] }).unwrap();
    end.pair.post(&SendRequest::send(1, &[end.region.entry(0, 64)])).unwrap();
    for _ in 0..2 {
        while end.queue.poll().is_none() {}
    }
    started.elapsed()
}
