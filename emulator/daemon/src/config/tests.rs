use super::*;

#[test]
fn foreign_peers_have_settings_of_their_own() {
    let parse = |text| Config::parse(text).map(|config| (config.foreign_recovery, config.foreign_window));
    assert_eq!(parse(""), Ok((Recovery::GoBackN, 128)));
    assert_eq!(
        parse("recovery = 'fatal'"),
        Ok((Recovery::Fatal, 128)),
        "a mode that is set is for all peers"
    );
    let both = "recovery = 'fatal'\nforeign_recovery = 'go-back-n'\nforeign_window = 32";
    assert_eq!(parse(both), Ok((Recovery::GoBackN, 32)));
    assert!(parse("foreign_recovery = 'never'").unwrap_err().starts_with("foreign_recovery is \"never\""));
}

#[test]
fn a_host_has_several_cards() {
    let config =
        Config::parse("cards = 2\n[hosts]\nalice = ['10.0.0.1', '10.0.1.1', '10.0.2.1']\nbob = '10.0.0.2'");
    let config = config.unwrap();
    let cards: Vec<_> = config.cards().into_iter().map(|card| (card.name, card.host, card.address)).collect();
    let at = |last: [u8; 4]| Some(IpAddr::from(last));
    assert_eq!(
        cards,
        [
            ("alice".into(), "alice", at([10, 0, 0, 1])),
            ("alice:softhca1".into(), "alice", at([10, 0, 1, 1])),
            ("alice:softhca2".into(), "alice", at([10, 0, 2, 1])),
            ("bob".into(), "bob", at([10, 0, 0, 2])),
            ("bob:softhca4".into(), "bob", None),
        ]
    );
    let error = Config::parse("[hosts]\nalice = []").unwrap_err();
    assert_eq!(error, "line 2: host \"alice\" has no address");
}

#[test]
fn a_file_configures_hosts_and_limits() {
    let config = Config::parse(
        "name = 'lab'\nrecovery = 'go-back-n'\n[hosts]\nalice = '127.0.0.2'\nbob = '127.0.0.3'\n[client_limits]\nmax_qp = 7\n",
    )
    .unwrap();
    assert_eq!(config.name, "lab");
    assert_eq!((config.recovery, config.foreign_recovery), (Recovery::GoBackN, Recovery::GoBackN));
    assert_eq!(config.hosts.len(), 2);
    assert_eq!(config.device_limits().max_qp, 7);
    assert_eq!(config.device_limits().max_mr, ClientLimits::default().max_mr);
}

#[test]
fn a_file_configures_loopback() {
    assert_eq!(Config::parse("").unwrap().loopback(), Loopback::Internal);
    assert_eq!(Config::parse("data_path = 'daemon'").unwrap().loopback(), Loopback::Socket);
    assert!(Config::parse("data_path = 'far'").unwrap_err().contains("daemon"));
    for loopback in Loopback::ALL {
        let config = Config::parse(&format!("loopback = '{}'", loopback.name())).unwrap();
        assert_eq!(config.loopback(), loopback);
    }
    let message = Config::parse("loopback = 'kernel'").unwrap_err();
    assert!(message.contains("\"kernel\"") && message.contains("\"socket\", \"internal\""), "{message}");
}

#[test]
fn a_host_may_have_both_ip_versions() {
    let config = Config::parse("entropy = true\n[hosts]\nalice = '10.0.0.1, fd00::1'\n").unwrap();
    assert_eq!(config.hosts[0].address, Some([10, 0, 0, 1].into()));
    assert_eq!(config.ipv6["alice"], "fd00::1".parse::<Ipv6Addr>().unwrap());
    assert_eq!(config.entropy, Entropy::On);
    let message = Config::parse("[hosts]\nalice = 'fd00::1, 10.0.0.1'\n").unwrap_err();
    assert!(message.contains("alice") && message.contains("fd00::1, 10.0.0.1"), "{message}");
}

#[test]
fn a_fabric_has_as_many_hosts_as_the_daemon() {
    let hosts = "[hosts]\na = '127.0.0.2'\nb = '127.0.0.3'\nc = '127.0.0.4'\nd = '127.0.0.5'\n";
    let parse = |fabric: &str| Config::parse(&format!("congestion = 'dcqcn'\n{hosts}[fabric]\n{fabric}"));
    let config = parse("topology = 'leaf-spine'\nleaves = 2\nspines = 2\nrate_gbit = 40\n").unwrap();
    assert_eq!(config.congestion, CongestionSettings::DCQCN);
    let fabric = config.fabric.unwrap();
    assert_eq!(fabric.topology, Topology::LeafSpine { leaves: 2, spines: 2, hosts_per_leaf: 2 });
    assert_eq!(fabric.link.bits_per_second, NonZeroU64::new(40_000_000_000));
    let config = parse(
        "topology = 'star'\necn = { kmin = 1, kmax = 2, pmax = 0.5 }\npfc = { xoff = 800 }\nreceive_gbit = { b = 1.5 }\n",
    );
    let fabric = config.unwrap().fabric.unwrap();
    assert_eq!(fabric.settings.ecn_marking.unwrap().pmax_per_billion, PER_BILLION / 2);
    assert_eq!(fabric.settings.pfc.unwrap().xon, 700);
    assert_eq!(fabric.receive_rates["b"], 1_500_000_000);
    for (wrong, says) in [
        ("topology = 'mesh'", "one of"),
        ("topology = 'star'\necn = { kmin = 3, kmax = 2, pmax = 0.5 }", "above kmax"),
        ("topology = 'star'\necn = { kmin = 1, kmax = 2, pmax = 50 }", "between 0 and 1"),
        ("topology = 'star'\npfc = { xon = 9, xoff = 8 }", "not below xon"),
        ("topology = 'star'\nreceive_gbit = { z = 1 }", "no host is named \"z\""),
        ("topology = 'star'\nreceive_gbit = { b = 0 }", "more than 0"),
        ("topology = 'leaf-spine'\nspines = 2", "requires leaves"),
        ("topology = 'ring'\nswitches = 3", "evenly"),
        ("topology = 'fat-tree'\nk = 4", "16 hosts"),
        ("topology = 'star'\ndelay_ns = 1_000_000_001", "at most"),
        ("topology = 'star'\ncolour = 1", "colour"),
    ] {
        let message = parse(wrong).unwrap_err();
        assert!(message.contains(says), "{wrong}: {message}");
    }
}

#[test]
fn an_unknown_key_is_an_error_with_its_position() {
    let message = Config::parse("nmae = 'lab'").unwrap_err();
    assert!(message.contains("line 1") && message.contains("nmae"), "{message}");
}
