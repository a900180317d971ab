//! Hosts with several cards.

use super::run_both;
use crate::rig::{Rig, Running, await_listener, free_port};
use std::time::{Duration, Instant};

/// A rig with two cards for each host, whose daemon runs until the program that is returned ends.
fn start() -> (Rig, Running) {
    start_in(Rig::with_two_cards())
}

fn start_in(mut rig: Rig) -> (Rig, Running) {
    let watcher = rig.start(&["stdbuf", "-oL", "ibv_asyncwatch", "-d", "softhca1"]);
    let until = Instant::now() + Duration::from_secs(60);
    while !rig.softhca(&["resource", "softhca1"]).text.contains("ctx 1") {
        assert!(Instant::now() < until, "{:?}", rig.softhca(&["status"]));
        std::thread::sleep(Duration::from_millis(20));
    }
    (rig, watcher)
}

/// The packets that a card has sent.
pub fn packets_sent(rig: &Rig, device: &str) -> u64 {
    let text = rig.softhca(&["metrics"]).text;
    let start = format!("softhca_sent_pkts_total{{device=\"{device}\"");
    let line =
        text.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no {start}: {text}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

/// Runs a ping-pong on a card; whether both ends succeeded.
fn ping_pong(rig: &mut Rig, device: &str) -> bool {
    let (mut server, mut client) = rig.start_pair(&["ibv_rc_pingpong", "-d", device, "-g", "0", "-n", "50"]);
    let succeeded = client.wait().success;
    if !succeeded {
        server.terminate();
    }
    server.wait().success && succeeded
}

pub fn programs_see_all_cards_of_their_host() {
    let mut rig = Rig::with_two_cards();
    let seen = rig.run(&["sh", "-c", "ibv_devices; ls /sys/class/infiniband /dev/infiniband"]);
    let names: Vec<&str> = seen.text.split_whitespace().filter(|word| word.starts_with("softhca")).collect();
    assert_eq!(names, ["softhca0", "softhca1", "softhca0", "softhca1"], "{seen:?}");
    let seen = rig.run_on("bob", &["sh", "-c", "ibv_devices; cat /sys/class/infiniband/*/node_guid"]);
    let names: Vec<&str> = seen.text.split_whitespace().filter(|word| word.starts_with("softhca")).collect();
    assert_eq!(names, ["softhca2", "softhca3"], "{seen:?}");
    let seen = rig.softhca(&["exec", "--cards", "3", "--", "ibv_devices"]);
    assert!(!seen.success && seen.text.contains("have 2 cards, not 3"), "{seen:?}");
}

pub fn a_card_that_is_down_affects_itself_alone() {
    let (mut rig, mut watcher) = start();
    assert!(ping_pong(&mut rig, "softhca1"));
    assert_eq!(packets_sent(&rig, "softhca0"), 0, "the other card has its own counters");
    assert!(packets_sent(&rig, "softhca1") >= 100);
    assert!(rig.softhca(&["link", "softhca1", "down"]).success);
    let seen = rig.softhca(&["link"]);
    for line in ["link softhca0/1 state ACTIVE", "link softhca1/1 state DOWN"] {
        assert!(seen.text.contains(line), "{seen:?}");
    }
    assert!(ping_pong(&mut rig, "softhca0"));
    assert!(!ping_pong(&mut rig, "softhca1"), "its packets are lost");
    assert!(rig.softhca(&["link", "softhca1", "up"]).success);
    assert!(ping_pong(&mut rig, "softhca1"));
    watcher.terminate();
    let seen = watcher.wait();
    assert!(
        seen.text.contains("IBV_EVENT_PORT_ERR") && seen.text.contains("IBV_EVENT_PORT_ACTIVE"),
        "{seen:?}"
    );
}

/// A scenario asks for the cards, and takes one of them down in a call of a program that uses the other.
pub fn a_scenario_takes_one_card_down() {
    let mut rig = Rig::new();
    let file = rig.write(
        "rail.toml",
        "title = \"t\"\n[device]\ncards = 2\n[hosts]\nalice = {}\n\
         [[fault]]\nname = \"opened\"\nhost = \"alice\"\nverb = \"open_device\"\naction = \"count\"\n\
         [[fault]]\nhost = \"alice:softhca1\"\nafter = { fault = \"opened\" }\naction = { raise-event = \"port-err\" }\n\
         [[expect]]\nevent = { host = \"alice:softhca1\", name = \"PORT_ERR\", times = 1 }\n\
         [[expect]]\nevent = { host = \"alice\", name = \"PORT_ERR\", times = 0 }\n",
    );
    let is_down = "until grep -q DOWN /sys/class/infiniband/softhca1/ports/1/state; do :; done";
    let script = format!("ibv_devinfo -d softhca0 | grep state; {is_down}; ibv_devinfo | grep state");
    let seen = rig.exec(&["--scenario", &file], &["sh", "-c", &script]);
    assert!(seen.success, "{seen:?}");
    let states = || seen.text.lines().map(str::trim).filter(|line| line.starts_with("state:"));
    let state = |name: &str| states().filter(|line| line.contains(name)).count();
    assert_eq!((state("PORT_ACTIVE"), state("PORT_DOWN")), (2, 1), "{seen:?}");
}

/// A listener without an address takes connections on every card, and a connection uses the card of its address.
pub fn connections_use_the_card_of_their_address() {
    let (mut rig, watcher) = start();
    let devices = rig.softhca(&["devices"]).text;
    for (device, other) in [("softhca1", "softhca0"), ("softhca0", "softhca1")] {
        let line = devices.lines().find(|line| line.starts_with(device)).expect("a device");
        let address = line.split_whitespace().nth(2).expect("its address");
        let before = packets_sent(&rig, other);
        let mut server = rig.start(&["rping", "-s", "-C", "5"]);
        rig.await_cm_listener(&mut server).unwrap_or_else(|why| panic!("{why}"));
        let seen = [rig.run(&["rping", "-c", "-a", address, "-C", "5"]), server.wait()];
        assert!(seen.iter().all(|seen| seen.success), "{device}: {seen:?}");
        assert!(packets_sent(&rig, device) >= 20, "{device}");
        assert_eq!(packets_sent(&rig, other), before, "{device} alone carries it");
    }
    watcher.kill();
}

/// Waits until a card has sent more packets while a program runs.
pub fn await_packets(rig: &Rig, device: &str, more: u64, program: &mut Running) {
    let until = Instant::now() + Duration::from_secs(100);
    let wanted = packets_sent(rig, device) + more;
    while packets_sent(rig, device) < wanted {
        assert!(!program.has_ended(), "it ended: {:?}", program.wait());
        assert!(
            Instant::now() < until,
            "{device} has not sent {wanted} packets: {:?}",
            rig.softhca(&["stats"])
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// UCX has no failover, but RC retransmits what was lost while a rail was down: UCX waits for longer than a short flap.
pub fn ucx_survives_a_flapping_rail() {
    let (mut rig, watcher) = start_in(Rig::with(&["--cards", "2", "--recovery", "go-back-n"]));
    let port = free_port().to_string();
    let program = [&["env"][..], &TWO_RAILS, &["ucx_perftest", "-p", &port]].concat();
    let mut server = rig.start(&program);
    await_listener(port.parse().expect("a port"));
    let test = ["localhost", "-t", "tag_bw", "-n", "3000", "-w", "2", "-s", "1048576"];
    let mut client = rig.start(&[&program[..], &test].concat());
    await_packets(&rig, "softhca1", 3000, &mut client);
    assert!(rig.softhca(&["link", "softhca1", "down"]).success);
    assert!(rig.softhca(&["link", "softhca1", "up"]).success);
    await_packets(&rig, "softhca1", 3000, &mut client);
    let seen = client.wait();
    assert!(seen.success && seen.text.contains("Final:"), "{seen:?}");
    server.terminate();
    let _ = server.wait();
    watcher.kill();
}

/// The variables for UCX over both cards.
const TWO_RAILS: [&str; 4] = [
    "UCX_TLS=rc_verbs,ud_verbs:aux",
    "UCX_NET_DEVICES=softhca0:1,softhca1:1",
    "UCX_MAX_RNDV_RAILS=2",
    "UCX_MAX_EAGER_RAILS=2",
];

/// UCX divides a large message over both cards.
pub fn ucx_uses_two_rails() {
    let (mut rig, watcher) = start();
    let port = free_port();
    let variables = TWO_RAILS.map(str::to_string);
    let number = port.to_string();
    let shared = ["ucx_perftest", "-p", &number];
    let client = ["localhost", "-t", "tag_bw", "-n", "20", "-w", "2", "-s", "1048576"];
    run_both(&mut rig, &variables, &shared, &client, port);
    for device in ["softhca0", "softhca1"] {
        // Both cards carry a part of 20 MiB, in packets of 4 KiB or less.
        assert!(packets_sent(&rig, device) > 1000, "{device}: {}", packets_sent(&rig, device));
    }
    watcher.kill();
}
