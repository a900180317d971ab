//! Debian's OpenSM and infiniband-diags on an emulated InfiniBand subnet.

use crate::rig::{ProgramOutput, Rig, Running};
use libtest_mimic::Trial;
use softhca_tests::{needs, tools};
use std::path::Path;
use std::time::{Duration, Instant};

/// Sufficient on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);
/// A ring of four switches with a host each: two paths between any two.
const RING: &str = "ring:4";

pub fn trials() -> Vec<Trial> {
    let mut tests = vec![
        needs!(diagnostics("ibstat"), the_tools_list_the_subnet_of_the_builtin_manager),
        needs!(diagnostics("smpquery"), smpquery_reads_every_attribute),
        needs!(diagnostics("ibping"), hosts_ping_each_other),
        needs!(diagnostics("perfquery"), counters_are_read_and_reset),
        needs!(diagnostics("smpquery"), faults_are_visible_in_the_tools),
        needs!(diagnostics("ibnetdiscover"), a_file_of_ibnetdiscover_is_a_topology),
        needs!(diagnostics("ibstat"), options_of_the_fabric_are_checked),
        needs!(opensm(), a_failed_link_is_routed_around),
        needs!(opensm(), saquery_reads_tables_in_segments),
        needs!(diagnostics("saquery"), the_builtin_manager_answers_queries),
        needs!("ibdmchk", min_hop_routes_of_a_ring_have_a_credit_loop),
    ];
    for (engine, topology, options) in ENGINES {
        let name = format!("opensm_brings_up_{topology}_with_{engine}");
        tests.push(tools::needs_with(opensm(), &name, move || opensm_brings_up(topology, options)));
    }
    let large = Trial::test("opensm_brings_up_a_large_fat_tree", || {
        opensm_brings_up("fat-tree:20", &[]);
        Ok(())
    });
    tests.push(large.with_ignored_flag(true));
    tests
}

/// Routing engines, a topology that suits each, and the options of OpenSM.
const ENGINES: &[(&str, &str, &[&str])] = &[
    ("default", "one-switch:3", &[]),
    ("updn", RING, &["-R", "updn", "-a"]),
    ("ftree", "fat-tree:4", &["-R", "ftree"]),
    ("lash", "torus:3x3", &["-R", "lash"]),
    ("dor", "torus:4x4", &["-R", "dor"]),
    ("torus-2QoS", "torus:4x4x4", &["-R", "torus-2QoS", "-Q", "--torus_config"]),
];

/// infiniband-diags are programs of root on Debian, in /usr/sbin.
fn diagnostics(program: &'static str) -> &'static str {
    if Path::new("/usr/sbin").join(program).exists() { "env" } else { "infiniband-diags" }
}

fn opensm() -> &'static str {
    if Path::new("/usr/sbin/opensm").exists() { diagnostics("saquery") } else { "opensm" }
}

/// A subnet with a manager: `builtin` or `none`.
struct SubnetRig {
    rig: Rig,
    topology: String,
    manager: &'static str,
}

impl SubnetRig {
    fn new(topology: &str, manager: &'static str) -> SubnetRig {
        SubnetRig { rig: Rig::new(), topology: topology.into(), manager }
    }

    fn start(&mut self, host: &str, words: &[&str]) -> Running {
        let options =
            ["--fabric", "infiniband", "--topology", &self.topology, "--sm", self.manager, "--host", host];
        let path = format!("PATH={}:/usr/sbin", std::env::var("PATH").unwrap_or_default());
        self.rig.start_with(&options, &[&["env", &path][..], words].concat())
    }

    fn run(&mut self, host: &str, words: &[&str]) -> ProgramOutput {
        self.start(host, words).wait()
    }

    /// The output of a program that succeeds.
    fn succeed(&mut self, host: &str, words: &[&str]) -> String {
        let seen = self.run(host, words);
        assert!(seen.success, "{words:?}: {seen:?}");
        seen.text
    }

    /// Runs a program until its output satisfies a condition.
    fn until(&mut self, host: &str, words: &[&str], holds: impl Fn(&str) -> bool) -> String {
        let until = Instant::now() + TIMEOUT;
        loop {
            let seen = self.run(host, words);
            if seen.success && holds(&seen.text) {
                return seen.text;
            }
            assert!(Instant::now() < until, "{words:?}: {seen:?}");
        }
    }

    /// Starts OpenSM at a host, and waits until the subnet is up.
    fn inject(&self, words: &[&str]) {
        let seen = self.rig.softhca(&[&["link"], words].concat());
        assert!(seen.success, "{words:?}: {seen:?}");
    }

    fn start_opensm(&mut self, host: &str, options: &[&str]) -> (Running, String) {
        let log = self.rig.file("opensm.log");
        // OpenSM buffers its log otherwise.
        let settings = self.rig.write("opensm.conf", "force_log_flush TRUE\n");
        let folder = self.rig.file("");
        let [cache, temporary] = ["OSM_CACHE_DIR", "OSM_TMP_DIR"].map(|name| format!("{name}={folder}"));
        let command = ["env", &cache, &temporary, "opensm", "-f", &log, "-F", &settings];
        let words = [&command[..], options].concat();
        let mut opensm = self.start(host, &words);
        let until = Instant::now() + TIMEOUT;
        while !read(&log).contains("SUBNET UP") {
            assert!(!opensm.has_ended(), "{}: {:?}", read(&log), opensm.wait());
            assert!(Instant::now() < until, "the subnet does not come up: {}", read(&log));
            std::thread::sleep(Duration::from_millis(20));
        }
        (opensm, log)
    }

    /// The LID of a host's port.
    fn lid(&mut self, host: &str) -> String {
        let text = self.succeed(host, &["ibstat", "softhca0", "1"]);
        let line = text.lines().find_map(|line| line.trim().strip_prefix("Base lid: "));
        line.unwrap_or_else(|| panic!("a LID: {text}")).into()
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn the_tools_list_the_subnet_of_the_builtin_manager() {
    let mut rig = SubnetRig::new("one-switch:3", "builtin");
    let port = rig.succeed("node2", &["ibstat"]);
    for expected in [
        "CA 'softhca0'",
        "CA type: SoftHCA",
        "State: Active",
        "Physical state: LinkUp",
        "Rate: 100",
        "Link layer: InfiniBand",
    ] {
        assert!(port.contains(expected), "{expected}: {port}");
    }
    assert!(rig.succeed("node2", &["sminfo"]).contains("state 3 SMINFO_MASTER"));
    let nodes = rig.succeed("node1", &["ibnetdiscover"]);
    assert_eq!(nodes.matches("\nCa\t").count(), 3, "{nodes}");
    for host in ["node1", "node2", "node3", "switch1"] {
        assert!(nodes.contains(&format!("\"{host}\"")), "{host}: {nodes}");
    }
    assert!(rig.succeed("node3", &["ibswitches"]).contains("\"switch1\""));
    assert_eq!(rig.succeed("node3", &["ibhosts"]).matches("Ca\t").count(), 3);
    let links = rig.succeed("node3", &["iblinkinfo"]);
    assert_eq!(links.matches("Active/  LinkUp").count(), 6, "{links}");
    let status = rig.succeed("node3", &["ibstatus"]);
    assert!(status.contains("state:\t\t 4: ACTIVE") && status.contains("100 Gb/sec (4X EDR)"), "{status}");
    let (from, to) = (rig.lid("node1"), rig.lid("node3"));
    let path = rig.succeed("node2", &["ibtracert", &from, &to]);
    assert!(path.contains("switch1") && path.lines().count() >= 4, "{path}");
    let switch = rig.succeed("node2", &["smpquery", "-D", "nodeinfo", "0,1"]);
    assert!(switch.contains("Switch"), "{switch}");
}

fn smpquery_reads_every_attribute() {
    let mut rig = SubnetRig::new("one-switch", "builtin");
    let lid = rig.lid("node2");
    let switch = rig.succeed("node1", &["smpquery", "-D", "portinfo", "0,1", "0"]);
    let switch: String =
        switch.lines().find_map(|line| line.strip_prefix("Lid:")).expect("a LID").trim_matches('.').into();
    for words in [
        ["nodeinfo", &lid],
        ["nodedesc", &lid],
        ["portinfo", &lid],
        ["pkeys", &lid],
        ["sl2vl", &lid],
        ["vlarb", &lid],
        ["switchinfo", &switch],
    ] {
        let text = rig.succeed("node1", &[&["smpquery"][..], &words].concat());
        assert!(text.lines().count() >= 1 && !text.contains("failed"), "{words:?}: {text}");
    }
    let routes = rig.succeed("node1", &["ibroute", &switch]);
    assert!(routes.contains(&format!("{:#06x}", lid.parse::<u16>().expect("a LID"))), "{routes}");
}

fn hosts_ping_each_other() {
    let mut rig = SubnetRig::new("one-switch", "builtin");
    let lid = rig.lid("node2");
    let server = rig.start("node2", &["ibping", "-S"]);
    let seen =
        rig.until("node1", &["ibping", "-c", "3", &lid], |text| text.contains("3 received, 0% packet loss"));
    assert!(seen.contains("Pong from"), "{seen}");
    server.kill();
}

fn counters_are_read_and_reset() {
    let mut rig = SubnetRig::new("one-switch", "builtin");
    let lid = rig.lid("node2");
    let packets = |text: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("PortRcvPkts:")).expect("a counter");
        line.trim_start_matches('.').parse::<u64>().expect("a number")
    };
    for _ in 0..5 {
        rig.succeed("node1", &["smpquery", "nodeinfo", &lid]);
    }
    let before = packets(&rig.succeed("node1", &["perfquery", &lid, "1"]));
    assert!(before >= 5, "{before}");
    rig.succeed("node1", &["perfquery", "-R", &lid, "1"]);
    let after = packets(&rig.succeed("node1", &["perfquery", &lid, "1"]));
    assert!(after < before, "{after} after a reset, {before} before");
    let extended = rig.succeed("node1", &["perfquery", "-x", &lid, "1"]);
    assert!(packets(&extended) > 0 && extended.contains("PortUnicastRcvPkts"), "{extended}");
}

fn faults_are_visible_in_the_tools() {
    let mut rig = SubnetRig::new("one-switch:3", "builtin");
    // The daemon ends without a program, and its faults with it.
    let _running = rig.start("node3", &["sleep", "1000"]);
    let lid = rig.lid("node2");
    let asks = ["smpquery", "-t", "100", "nodeinfo", &lid];
    let asks_patiently = ["smpquery", "-t", "20000", "nodeinfo", &lid];
    let perfquery = ["perfquery", "-t", "20000", &lid, "1"];
    rig.inject(&["node2", "symbol_error=7"]);
    assert!(rig.succeed("node1", &perfquery).contains("SymbolErrorCounter:..............7"));
    let errors = rig.run("node1", &["ibqueryerrors"]);
    assert!(errors.text.contains("SymbolErrorCounter == 7"), "{errors:?}");

    rig.inject(&["node2", "lose-smps=1"]);
    let lost = rig.run("node1", &asks);
    assert!(lost.code != Some(0), "{lost:?}");
    rig.inject(&["node2", "lose-smps=0"]);
    assert!(!rig.succeed("node1", &perfquery).contains("VL15Dropped:.....................0"));

    rig.inject(&["node2", "slow-agent=300ms"]);
    rig.succeed("node1", &asks_patiently);
    rig.inject(&["node2", "slow-agent=0"]);

    rig.inject(&["node2", "m-key=0x1234"]);
    let refused = rig.run("node1", &asks);
    assert!(refused.code != Some(0), "{refused:?}");
    rig.succeed("node1", &["smpquery", "-t", "20000", "-y", "0x1234", "nodeinfo", &lid]);
    rig.inject(&["node2", "m-key=0"]);

    rig.inject(&["switch1", "reboot=60min"]);
    let failed = rig.run("node1", &asks);
    assert!(failed.code != Some(0), "{failed:?}");
    rig.inject(&["switch1", "reboot=0"]);
    rig.until("node1", &asks_patiently, |text| text.contains("LocalPort:"));
    // The links of the switch went down, and the manager has set the switch up again.
    assert!(rig.succeed("node1", &perfquery).contains("LinkDownedCounter:...............1"));
    let seen = rig.rig.softhca(&["link", "node2/9", "down"]);
    assert!(seen.text.contains("node2/9: the node does not have this port"), "{seen:?}");
}

fn a_file_of_ibnetdiscover_is_a_topology() {
    let mut first = SubnetRig::new("fat-tree:4", "builtin");
    let text = first.succeed("node1", &["ibnetdiscover"]);
    let file = first.rig.write("cluster.net", &text);
    let mut second = SubnetRig::new(&file, "builtin");
    let again = second.succeed("node1", &["ibnetdiscover"]);
    assert_eq!(again.matches("\nCa\t").count(), 16, "{again}");
    assert_eq!(again.matches("\nSwitch\t").count(), 20, "{again}");
}

fn options_of_the_fabric_are_checked() {
    let mut rig = SubnetRig::new("one-switch", "builtin");
    let _running = rig.start("node1", &["sleep", "100"]);
    rig.until("node1", &["ibstat"], |text| text.contains("Active"));
    for (options, why) in [
        (&["--fabric", "infiniband", "--host", "node9"][..], "no host of the topology is named \"node9\""),
        (&["--fabric", "infiniband", "--topology", "ring:4"], "has topology one-switch, not ring:4"),
        (&["--fabric", "infiniband", "--sm", "none"], "has the subnet manager builtin, not none"),
        (&[], "has fabric infiniband, not roce"),
        (&["--fabric", "roce", "--topology", "ring:4"], "--topology needs --fabric infiniband"),
        (&["--fabric", "infiniband", "--lint"], "--lint needs --fabric roce"),
    ] {
        let seen = rig.rig.exec(options, &["true"]);
        assert!(seen.code == Some(125) && seen.text.contains(why), "{options:?}: {seen:?}");
    }
    assert!(rig.rig.exec(&["--fabric", "infiniband"], &["true"]).success);
}

fn opensm_brings_up(topology: &str, options: &[&str]) {
    let mut rig = SubnetRig::new(topology, "none");
    let files = [("--torus_config", TORUS), ("-a", ROOT)];
    let file = files.into_iter().find(|(option, _)| options.last() == Some(option));
    let file = file.map(|(_, content)| rig.rig.write("routing.conf", content));
    let options: Vec<&str> = options.iter().copied().chain(file.as_deref()).collect();
    let (opensm, log) = rig.start_opensm("node1", &options);
    // OpenSM uses another engine where one does not suit the topology.
    for failure in ["falling back", "cannot build lid matrices", "No routing engine"] {
        assert!(!read(&log).contains(failure), "{}", read(&log));
    }
    // Every host has a LID and reaches the manager.
    assert!(rig.succeed("node2", &["sminfo"]).contains("SMINFO_MASTER"));
    let (from, to) = (rig.lid("node1"), rig.lid("node3"));
    let path = rig.succeed("node2", &["ibtracert", &from, &to]);
    assert!(path.contains("node3"), "{path}");
    stop(opensm);
}

/// OpenSM cancels the threads that receive MADs, and ends.
fn stop(mut opensm: Running) {
    opensm.terminate();
    let seen = opensm.wait();
    assert!(seen.code == Some(0), "{seen:?}");
}

/// The switches from which torus-2QoS learns the directions of a torus of 4 x 4 x 4.
const TORUS: &str = "torus 4 4 4\n\
    xp_link 0x5f1c500000000100 0x5f1c500000000200\n\
    yp_link 0x5f1c500000000100 0x5f1c500000000500\n\
    zp_link 0x5f1c500000000100 0x5f1c500000001100\n";

/// The root of up/down routes: in a ring, OpenSM finds none.
const ROOT: &str = "0x5f1c500000000100\n";

fn min_hop_routes_of_a_ring_have_a_credit_loop() {
    for (options, expected) in
        [(&["-R", "minhop"][..], "credit loops in routing"), (&["-R", "updn", "-a"], "no credit loops found")]
    {
        let mut rig = SubnetRig::new("ring:6", "none");
        let root = rig.rig.write("roots", ROOT);
        let root = options.ends_with(&["-a"]).then_some(root.as_str());
        let options: Vec<&str> = options.iter().copied().chain(root).chain(["-D", "0x43"]).collect();
        let (opensm, _) = rig.start_opensm("node1", &options);
        stop(opensm);
        let [nodes, tables, groups] =
            ["opensm-subnet.lst", "opensm.fdbs", "opensm.mcfdbs"].map(|name| rig.rig.file(name));
        // It ends with an error if it finds loops.
        let seen = rig.run("node1", &["ibdmchk", "-s", &nodes, "-f", &tables, "-m", &groups]);
        assert!(seen.text.contains(expected), "{options:?}: {seen:?}");
    }
}

fn the_builtin_manager_answers_queries() {
    let mut rig = SubnetRig::new("fat-tree:4", "builtin");
    for (record, heading, count) in [
        ("NodeRecord", "NodeRecord", 36),
        ("PortInfoRecord", "PortInfoRecord", 16 + 20 * 5),
        ("PathRecord", "PathRecord", 36 * 36),
        ("LinkRecord", "LinkRecord", 96),
        ("SwitchInfoRecord", "SwitchInfoRecord", 20),
        ("LFTRecord", "LFT Record", 20),
        ("SMInfoRecord", "SMInfoRecord", 1),
        ("GUIDInfoRecord", "GUIDInfo Record", 36),
        ("SL2VLTableRecord", "SL2VLTableRecord", 16 + 20 * 4 * 5),
        ("PKeyTableRecord", "PKeyTableRecord", 4 * (16 + 20 * 5)),
    ] {
        let text = rig.succeed("node5", &["saquery", record]);
        assert_eq!(text.matches(&format!("{heading} dump:")).count(), count, "{record}: {text}");
    }
    let (from, to) = (rig.lid("node1"), rig.lid("node16"));
    let path = rig.succeed("node5", &["saquery", "-p", "--slid", &from, "--dlid", &to]);
    assert!(path.contains(&format!("dlid....................{to}")), "{path}");
    let problems = rig.succeed("node5", &["ibqueryerrors"]);
    assert!(problems.contains("36 nodes checked, 0 bad nodes found"), "{problems}");
    // The manager resolves the GUID.
    let by_guid = rig.succeed("node5", &["smpquery", "-G", "nodedesc", "0x5f1c000000000101"]);
    assert!(by_guid.contains("node1"), "{by_guid}");
    // It has no multicast groups, and says so at once.
    let groups = rig.run("node5", &["saquery", "MCMemberRecord"]);
    assert!(!groups.success && groups.text.contains("0x000c"), "{groups:?}");
}

fn a_failed_link_is_routed_around() {
    let mut rig = SubnetRig::new(RING, "none");
    let (opensm, log) = rig.start_opensm("node1", &["-s", "0"]);
    let (from, to) = (rig.lid("node1"), rig.lid("node2"));
    let trace = ["ibtracert", &from, &to];
    let short = rig.succeed("node1", &trace);
    assert!(!short.contains("switch3"), "{short}");
    // Port 2 of the first switch leads to the second one.
    assert!(rig.rig.softhca(&["link", "switch1/2", "down"]).success);
    let long = rig.until("node1", &trace, |text| text.contains("switch3"));
    assert!(long.contains("switch4"), "{long}");
    assert!(read(&log).contains("type:1 num:128"), "no trap: {}", read(&log));
    assert!(rig.rig.softhca(&["link", "switch1/2", "up"]).success);
    rig.until("node1", &trace, |text| !text.contains("switch3"));
    stop(opensm);
}

fn saquery_reads_tables_in_segments() {
    let mut rig = SubnetRig::new("fat-tree:4", "none");
    let (opensm, _) = rig.start_opensm("node1", &[]);
    let nodes = rig.succeed("node5", &["saquery", "NodeRecord"]);
    assert_eq!(nodes.matches("NodeRecord dump").count(), 36, "{nodes}");
    for (record, least) in
        [("PortInfoRecord", 36), ("PathRecord", 36 * 36), ("LinkRecord", 96), ("SwitchInfoRecord", 20)]
    {
        let text = rig.succeed("node5", &["saquery", record]);
        let count = text.matches(&format!("{record} dump")).count();
        assert!(count >= least, "{count} of {record}: {text}");
    }
    let problems = rig.succeed("node5", &["ibqueryerrors"]);
    assert!(problems.contains("36 nodes checked, 0 bad nodes found"), "{problems}");
    stop(opensm);
}
