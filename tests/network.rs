//! Two processes, each in a network namespace of its own, joined by a virtual Ethernet link: MTU 1500 and 9000,
//! IPv4 and IPv6. The test makes the namespaces; where that is not allowed it is counted as ignored.

use libtest_mimic::{Failed, Trial};
use softhca::{
    Access, Device, EmbeddedOptions, Endpoint, Mtu, Path, QpKind, ReceiveRequest, RemoteAddress, RemoteKey,
    SendRequest,
};
use softhca_tests::process::{self, PATIENCE, Process, hear, say};
use softhca_tests::{namespace, tools};
use std::process::{Command, ExitCode};

const BYTES: usize = 4 << 20;
const MESSAGES: u64 = 64;

fn main() -> ExitCode {
    match process::role().as_deref() {
        Some("alice") => be_alice(),
        Some("bob") => be_bob(),
        _ => {
            let mut tests = Vec::new();
            for mtu in [1500, 9000] {
                for version in [4, 6] {
                    let name = format!("two_hosts_on_a_link_of_mtu_{mtu}_over_ipv{version}");
                    tests.push(needs_namespace(&name, move || run(mtu, version)));
                }
            }
            return tools::run(tests);
        }
    }
    ExitCode::SUCCESS
}

/// A test that needs a network namespace.
fn needs_namespace(name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    if namespace::wrapper().is_some() {
        return Trial::test(name, move || {
            test();
            Ok(())
        });
    }
    if namespace::is_required() {
        return Trial::test(name, || Err(Failed::from(namespace::NOT_ALLOWED)));
    }
    eprintln!("skipped: {}", namespace::NOT_ALLOWED);
    Trial::test(name, || Ok(())).with_ignored_flag(true)
}

fn run(mtu: u32, version: u32) {
    let mut command = process::command(namespace::wrapper().unwrap(), "alice");
    command.env("TEST_MTU", mtu.to_string()).env("TEST_VERSION", version.to_string());
    let mut alice = Process::start(&mut command);
    println!("MTU {mtu}, IPv{version}: {}", alice.hear());
    alice.finish();
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

fn number(name: &str) -> u32 {
    std::env::var(name).unwrap().parse().unwrap()
}

/// Gives the interface its addresses and waits until it carries packets.
fn configure(interface: &str, host: u32) {
    ip(&format!("link set {interface} mtu {} up", number("TEST_MTU")));
    ip(&format!("addr add 10.77.0.{host}/24 dev {interface}"));
    ip(&format!("-6 addr add fd77::{host}/64 dev {interface} nodad"));
}

fn card(host: u32) -> Device {
    let address = match number("TEST_VERSION") {
        4 => format!("10.77.0.{host}"),
        _ => format!("fd77::{host}"),
    };
    let options = EmbeddedOptions { address: Some(address.parse().unwrap()), ..EmbeddedOptions::default() };
    Device::embedded_with(options).unwrap()
}

/// The largest packets that the interface carries.
fn path() -> Path {
    let mtu = if number("TEST_MTU") >= 4096 + 128 { Mtu::B4096 } else { Mtu::B1024 };
    Path { mtu, ..Path::default() }
}

fn nothing_was_dropped(device: &Device) {
    let [roce, link] = device.receive_memory().unwrap().unwrap();
    assert_eq!([roce.dropped, link.dropped], [0, 0], "{roce:?} {link:?}");
}

const RIGHTS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);

/// Lays the link, and does every kind of transfer.
fn be_alice() {
    let mut bob = Process::start(&mut process::command(&["unshare", "--net"], "bob"));
    assert_eq!(bob.hear(), "here");
    ip("link add alice0 type veth peer name bob0");
    ip(&format!("link set bob0 netns {}", bob.number()));
    configure("alice0", 1);
    bob.say("the link is there");

    let device = card(1);
    let context = device.open();
    let domain = context.allocate_domain().unwrap();
    let queue = context.create_completion_queue(256).unwrap();
    let region = domain.register(BYTES, RIGHTS).unwrap();
    let pair = domain.queue_pair(QpKind::Rc, &queue).create().unwrap();
    let answer = bob.hear();
    let mut fields = answer.splitn(3, ' ');
    let mut field = || fields.next().unwrap();
    let remote =
        RemoteAddress { address: field().parse().unwrap(), key: RemoteKey(field().parse().unwrap()) };
    let peer: Endpoint = field().parse().unwrap();
    pair.connect(&peer, &path()).unwrap();
    bob.say(&pair.endpoint().to_string());
    assert_eq!(bob.hear(), "connected");

    let finish = |count: usize| {
        for _ in 0..count {
            let completion = queue.wait_for(PATIENCE).expect("a completion");
            assert!(completion.status.is_success(), "{completion:?}");
        }
    };
    let half = BYTES / 2;
    let data: Vec<u8> = (0..half as u32).map(|index| (index % 251) as u8).collect();
    region.write_at(0, &data);
    let whole = [region.entry(0, half as u32)];
    pair.post(&SendRequest::write(1, &whole, remote)).unwrap();
    finish(1);
    pair.post(&SendRequest::read(2, &[region.entry(half as u64, half as u32)], remote)).unwrap();
    finish(1);
    assert_eq!(region.read_at(half as u64, half), data);
    for id in 0..MESSAGES {
        pair.post(&SendRequest::send(id, &[region.entry(0, 10_000)])).unwrap();
    }
    finish(MESSAGES as usize);
    // Frames of all sizes, as fast as grants come.
    for id in 0..128 {
        pair.post(&SendRequest::write(id, &[region.entry(0, 1 + id as u32 * 400)], remote)).unwrap();
    }
    finish(128);
    assert_eq!(bob.hear(), "received");
    nothing_was_dropped(&device);
    let counters = context.counters();
    assert_eq!((counters.packet_seq_err, counters.implied_nak_seq_err), (0, 0));
    bob.say("done");
    bob.finish();
    say(&format!("{} packets sent, {} received", counters.sent_pkts, counters.rcvd_pkts));
}

fn be_bob() {
    say("here");
    assert_eq!(hear().unwrap(), "the link is there");
    configure("bob0", 2);
    let device = card(2);
    let context = device.open();
    let domain = context.allocate_domain().unwrap();
    let queue = context.create_completion_queue(256).unwrap();
    let region = domain.register(BYTES, RIGHTS).unwrap();
    let pair = domain.queue_pair(QpKind::Rc, &queue).create().unwrap();
    let RemoteAddress { address, key } = region.remote(0);
    say(&format!("{address} {} {}", key.0, pair.endpoint()));
    for id in 0..MESSAGES {
        let scatter = [region.entry((BYTES / 2) as u64 + id * 16_384, 16_384)];
        pair.post_receive(&ReceiveRequest { id, scatter: &scatter }).unwrap();
    }
    pair.connect(&hear().unwrap().parse().unwrap(), &path()).unwrap();
    say("connected");
    for id in 0..MESSAGES {
        let completion = queue.wait_for(PATIENCE).expect("a message");
        assert!(completion.status.is_success() && completion.id == id, "{completion:?}");
        assert_eq!(completion.bytes, 10_000);
    }
    say("received");
    assert_eq!(hear().unwrap(), "done");
    nothing_was_dropped(&device);
    assert_eq!(context.counters().out_of_sequence, 0);
}
