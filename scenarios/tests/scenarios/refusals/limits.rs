//! Numbers that no run could be carried out with, and lists that say nothing.

use super::{read, rejected};
use softhca_scenarios::{Diagnostic, Scenario};

/// A file with four hosts on a star, and a workload.
fn star(topology: &str, workload: &str) -> Result<Scenario, Diagnostic> {
    let text = format!(
        "title = \"t\"\n[hosts]\n\"h[1..4]\" = {{}}\n[topology]\n{topology}\n[[workload]]\n{workload}\n"
    );
    Scenario::parse("s.toml", &text)
}

#[track_caller]
fn star_rejected(topology: &str, workload: &str, sentence: &str) {
    let message = match star(topology, workload) {
        Err(problem) => problem.to_string(),
        Ok(_) => panic!("this was accepted: {topology} {workload}"),
    };
    assert!(message.contains(sentence), "{message}");
}

const PERMUTATION: &str = "permutation = { hosts = [\"h[1..4]\"], bytes = 1, count = 1 }";

#[test]
fn queues_are_as_long_as_those_of_a_card() {
    let pair =
        |more: &str| format!("[[pair]]\nqps = [\"alice.2\", \"bob.2\"]\n{more}\n[[expect]]\nfinish = {{}}\n");
    rejected(&pair("max-send-wr = 4294967295"), &["max-send-wr is 4294967295, the maximum is 16384"]);
    rejected(&pair("posted-receives = 4294967295"), &["posted-receives is 4294967295, the maximum is 16384"]);
    rejected(&pair("cqe = 4294967295"), &["cqe is 4294967295, the maximum is 4194303"]);
    rejected(&pair("receive-bytes = \"5GiB\""), &["receive-bytes is 5368709120, the maximum is 4294967295"]);
    assert!(read(&pair("max-send-wr = 16384\nposted-receives = 16384")).is_ok());
}

#[test]
fn memory_is_of_sensible_size() {
    let step = |what: &str| format!("[[step]]\nqp = \"alice.1\"\n{what}\n");
    let huge = "9223372036854775807";
    for what in [
        format!("write = {{ bytes = 8, offset = {huge} }}"),
        format!("write = {{ bytes = 8, remote-offset = {huge} }}"),
        format!("receive = {{ bytes = 8, offset = {huge} }}"),
        format!("fetch-add = {{ add = 1, remote-offset = {huge} }}"),
    ] {
        rejected(
            &step(&what),
            &["8 bytes at offset 9223372036854775807 exceed the maximum area size of 4294967296 bytes"],
        );
    }
}

#[test]
fn times_are_of_a_day_at_most() {
    rejected(
        "[[step]]\nqp = \"alice.1\"\nat = \"1441min\"\nwrite = { bytes = 8 }\n",
        &["lasts at most one day"],
    );
    let flap = "[[fault]]\nlink = \"alice - bob\"\naction = { flap = { down = \"1us\", up = \"1us\", times = 4294967295 } }\n";
    rejected(flap, &["times is 4294967295, the maximum is 10000"]);
}

#[test]
fn copies_and_messages_are_counted_before_they_are_made() {
    rejected(
        "[[fault]]\non = \"alice -> bob\"\naction = { duplicate = 4294967295 }\n",
        &["4294967295 copies of a packet, the maximum is 1000"],
    );
    rejected(
        "[[workload]]\nstream = { qp = \"alice.1\", op = \"write\", bytes = 1, count = 9223372036854775807 }\n",
        &["more than 4194304 messages in total"],
    );
}

#[test]
fn topologies_have_a_limited_number_of_links() {
    star_rejected("fat-tree = { k = 4294967294 }", PERMUTATION, "links, the maximum is 16384");
    star_rejected(
        "leaf-spine = { leaves = 1024, spines = 1024 }",
        PERMUTATION,
        "the topology has 1048580 links",
    );
    assert!(star("fat-tree = { k = 4 }", PERMUTATION).is_ok());
    let hosts = Scenario::parse("s.toml", "title = \"t\"\n[hosts]\n\"h[1..999999]\" = {}\n").err().unwrap();
    assert!(hosts.message.contains("more than 4096 names"), "{hosts}");
}

#[test]
fn priorities_are_those_of_a_packet() {
    let permutation = PERMUTATION.replace("count = 1", "count = 1, priority = 8");
    star_rejected("star = {}", &permutation, "priority is 8, the maximum is 7");
    let incast = "incast = { from = [\"h2\"], to = \"h1\", bytes = 1, count = 1, priority = 8 }";
    star_rejected("star = {}", incast, "priority is 8, the maximum is 7");
}

#[test]
fn what_carries_nothing_is_rejected() {
    rejected(
        "[[fault]]\nlink = \"alice - bob\"\naction = { set-mtu = 0 }\n",
        &["a link with MTU 0 carries no packets", "use link-down"],
    );
}

#[test]
fn addresses_are_of_one_host() {
    for address in ["239.1.1.1", "0.0.0.0", "::", "ff02::1"] {
        let text = format!("title = \"t\"\n[hosts]\nalice = {{ address = \"{address}\" }}\nbob = {{}}\n");
        let problem = Scenario::parse("s.toml", &text).err().unwrap();
        assert_eq!((problem.line, problem.message), (3, format!("{address} is not a unicast address")));
    }
}

#[test]
fn lists_that_say_nothing_or_too_much_are_rejected() {
    rejected("[[expect]]\norder = []\n", &["an order needs at least one item"]);
    rejected("[[expect]]\nfairness = { of = [] }\n", &["fairness needs at least one queue pair"]);
    rejected("[[expect]]\nfairness = { of = [\"alice.1\"], at-least = nan }\n", &["between 0 and 1"]);
    let incast = "incast = { from = [], to = \"h1\", bytes = 1, count = 1 }";
    star_rejected("star = {}", incast, "an incast needs at least one sender");
    let three = "[[pair]]\nqps = [\"alice.2\", \"bob.2\", \"bob.3\"]\n";
    rejected(three, &["invalid length 3, expected an array of length 2"]);
    rejected("[[pair]]\nqps = [\"alice.2\", \"bob.2\"]\nsq-psn = [1, 2, 3]\n", &["invalid length 3"]);
    rejected("[[link]]\nbetween = [\"alice\", \"bob\", \"alice\"]\n", &["invalid length 3"]);
}
