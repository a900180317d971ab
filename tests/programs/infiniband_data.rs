//! Unmodified verbs programs that exchange data by LID across an emulated InfiniBand subnet.

use crate::rig::{ProgramOutput, Rig, Running};
use libtest_mimic::Trial;
use softhca_tests::{needs, tools};
use std::time::{Duration, Instant};

/// Programs that run as server and client at the ends of a ring of four switches.
const PAIRS: &[&str] = &[
    "ibv_rc_pingpong -n 200",
    "ibv_rc_pingpong -n 200 -e",
    "ibv_rc_pingpong -n 200 -l 3",
    "ibv_rc_pingpong -s 1048576 -n 100 -m 4096",
    "ibv_rc_pingpong -g 0 -n 200",
    "ibv_uc_pingpong -n 200",
    "ibv_ud_pingpong -n 200",
    "ibv_srq_pingpong -n 200",
    "ibv_xsrq_pingpong -n 200",
    "ib_send_bw -n 100",
    "ib_send_bw -n 100 -c UD",
    "ib_send_bw -n 100 -c UC",
    "ib_send_bw -n 50 -q 8",
    "ib_send_lat -n 100",
    "ib_send_lat -n 100 -c UD",
    "ib_write_bw -n 100",
    "ib_write_bw -n 10 -a",
    "ib_write_lat -n 50",
    "ib_read_bw -n 100",
    "ib_read_lat -n 100",
    "ib_atomic_bw -n 100",
    "ib_write_bw -n 100 -x 0",
];

pub fn trials() -> Vec<Trial> {
    let mut tests = vec![
        needs!("ibv_devinfo", devinfo_shows_the_port_of_the_subnet),
        needs!("ibv_rc_pingpong", two_programs_of_one_host_exchange_data),
        needs!("ibv_rc_pingpong", a_link_that_goes_down_is_routed_around_under_traffic),
        needs!("ibv_asyncwatch", the_states_of_the_link_raise_events),
        needs!("rping", the_connection_manager_says_why_it_is_not_available),
    ];
    for words in PAIRS {
        let program = words.split(' ').next().expect("a program");
        let name = format!("by_lid_{}", words.replace(' ', "_"));
        tests.push(tools::needs_with(program, &name, move || run_pair("ring:4", ["node1", "node3"], words)));
    }
    tests
}

fn options<'a>(topology: &'a str, host: &'a str) -> [&'a str; 6] {
    ["--fabric", "infiniband", "--topology", topology, "--host", host]
}

fn start_pair(rig: &mut Rig, topology: &str, hosts: [&str; 2], words: &str) -> (Running, Running) {
    let [server, client] = hosts.map(|host| options(topology, host));
    let words: Vec<&str> = words.split(' ').collect();
    rig.start_pair_with([&server, &client], &words)
}

fn run_pair(topology: &str, hosts: [&str; 2], words: &str) {
    let mut rig = Rig::new();
    let (mut server, mut client) = start_pair(&mut rig, topology, hosts, words);
    for seen in [client.wait(), server.wait()] {
        assert!(seen.success, "{words}: {seen:?}\n{:?}", rig.softhca(&["status"]));
    }
}

fn run(rig: &mut Rig, host: &str, words: &[&str]) -> ProgramOutput {
    rig.exec(&options("one-switch", host), words)
}

fn devinfo_shows_the_port_of_the_subnet() {
    let mut rig = Rig::new();
    let seen = run(&mut rig, "node2", &["ibv_devinfo", "-v"]);
    assert!(seen.success, "{seen:?}");
    for wanted in [
        "hca_id:\tsofthca0",
        "state:\t\t\tPORT_ACTIVE (4)",
        "active_mtu:\t\t4096 (5)",
        "link_layer:\t\tInfiniBand",
        "sm_lid:\t\t\t1",
        "port_lid:\t\t3",
        "pkey_tbl_len:\t\t128",
        "GID[  0]:",
    ] {
        let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(squeezed(&seen.text).contains(&squeezed(wanted)), "{wanted}: {}", seen.text);
    }
}

fn two_programs_of_one_host_exchange_data() {
    run_pair("one-switch:1", ["node1", "node1"], "ibv_rc_pingpong -n 200");
}

/// The link is down and up many times, so that nothing depends on when the traffic starts.
fn a_link_that_goes_down_is_routed_around_under_traffic() {
    let mut rig = Rig::new();
    // Neighbours in the ring: their packets take the other way round while the link between them is down.
    let words = "ibv_rc_pingpong -n 500";
    let (mut server, mut client) = start_pair(&mut rig, "ring:4", ["node1", "node2"], words);
    let seen = rig.softhca(&["link", "switch1/2", "flap=20ms,20ms,50"]);
    assert!(seen.success, "{seen:?}");
    for seen in [client.wait(), server.wait()] {
        assert!(seen.success, "{seen:?}\n{:?}", rig.softhca(&["status"]));
    }
}

/// The link goes down and up repeatedly, so that nothing depends on when the program starts to listen. The reader stops
/// after enough events, and the next event ends the program.
fn the_states_of_the_link_raise_events() {
    let mut rig = Rig::new();
    let script = "stdbuf -oL ibv_asyncwatch | awk '{ print } /PORT_ERR/ { down = 1 } \
                  down && /CLIENT_REREGISTER/ { again = 1 } again && /PORT_ACTIVE/ { exit }'";
    let mut watch = rig.start_with(&options("one-switch", "node2"), &["sh", "-c", script]);
    let until = Instant::now() + Duration::from_secs(60);
    while !rig.softhca(&["link", "node2", "flap=100ms,200ms,200"]).success {
        assert!(Instant::now() < until && !watch.has_ended(), "{:?}", watch.wait());
    }
    let seen = watch.wait();
    assert!(seen.success, "{seen:?}");
    for event in ["IBV_EVENT_PORT_ERR (10)", "IBV_EVENT_CLIENT_REREGISTER (17)", "IBV_EVENT_PORT_ACTIVE (9)"]
    {
        assert!(seen.text.contains(event), "{event}: {seen:?}");
    }
}

fn the_connection_manager_says_why_it_is_not_available() {
    let mut rig = Rig::new();
    let seen = run(&mut rig, "node1", &["env", "SOFTHCA_EXPLAIN=1", "rping", "-s", "-C", "1"]);
    assert!(!seen.success && seen.text.contains("not available"), "{seen:?}");
}
