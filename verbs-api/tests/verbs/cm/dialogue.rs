//! The five messages that make and end a connection, and what a user sees when one of them is lost, late or there
//! twice.

use super::{connect_and_leave, only, pair, serve_one, trace};
use softhca::cm::{CmState, ConnectionParameters, Connector, EventChannel, EventType, PortSpace};
use softhca::{
    Error,
    fault::{self, Action, CmMessage, Repeat, Rule, RuleId},
    sim::{Report, World},
    sleep,
};
use std::time::Duration;

/// Runs a server and a client that connect and part, with a fault on the way.
fn with_fault(message: CmMessage, from_client: bool, repeat: Repeat, action: Action) -> (Report, u64) {
    let mut world = World::new(11);
    world.record_log().time_limit(Duration::from_secs(3600));
    world.service("server", |device| async move {
        let _ = serve_one(device).await;
    });
    world.host("client", |device| async move {
        let _ = connect_and_leave(device).await;
        sleep(Duration::from_secs(300)).await;
    });
    let ends = if from_client { ["client", "server"] } else { ["server", "client"] };
    let rule = world.fault(ends[0], ends[1], Rule { id: RuleId(0), selector: only(message), repeat, action });
    let report = world.run().unwrap();
    let fired = report.rule_counters(rule).fired;
    (report, fired)
}

/// The CM events of the hosts, without resolving.
fn heard(report: &Report) -> Vec<String> {
    let all = trace(report).into_iter();
    all.filter(|line| line.contains("hears") && !line.contains("RESOLVED")).collect()
}

const GOOD: [&str; 5] = [
    "server hears CONNECT_REQUEST 0",
    "client hears CONNECT_RESPONSE 0",
    "server hears ESTABLISHED 0",
    "server hears DISCONNECTED 0",
    "client hears DISCONNECTED 0",
];

/// The messages of the dialogue, and whether the client sends them.
const DIALOGUE: [(CmMessage, bool); 5] = [
    (CmMessage::Req, true),
    (CmMessage::Rep, false),
    (CmMessage::Rtu, true),
    (CmMessage::Dreq, true),
    (CmMessage::Drep, false),
];

#[test]
fn a_connection_is_made_and_ended_in_five_messages() {
    let mut world = World::new(3);
    world.record_log();
    world.host("server", serve_one).host("client", connect_and_leave);
    let report = world.run().unwrap();
    assert_eq!(
        trace(&report),
        [
            "client hears ADDR_RESOLVED 0",
            "client hears ROUTE_RESOLVED 0",
            "client sends REQ",
            "server hears CONNECT_REQUEST 0",
            "server sends REP",
            "client hears CONNECT_RESPONSE 0",
            "client sends RTU",
            "client sends DREQ",
            "server hears ESTABLISHED 0",
            "server hears DISCONNECTED 0",
            "server sends DREP",
            "client hears DISCONNECTED 0",
        ]
    );
    assert_eq!(report.ended_at.nanos(), 4_000, "REQ, REP, DREQ, DREP over a link of 1 µs");
}

#[test]
fn every_message_may_be_lost_once_and_the_connection_is_made_and_ended_all_the_same() {
    for (message, from_client) in DIALOGUE {
        let (report, fired) = with_fault(message, from_client, Repeat::times(1), Action::Drop);
        assert_eq!(fired, 1, "{message:?}");
        let events = heard(&report);
        // Where the RTU is lost the DREQ comes first: the DREQ proves that the connection was established.
        let expected: Vec<&str> = match message {
            CmMessage::Rtu => vec![GOOD[0], GOOD[1], "server hears DISCONNECTED 0"],
            _ => GOOD[..5].to_vec(),
        };
        assert_eq!(events[..expected.len()], expected[..], "{message:?}: {events:?}");
        let again = trace(&report).iter().filter(|line| line.contains("again")).count();
        match message {
            CmMessage::Rtu => assert_eq!(again, 0),
            CmMessage::Dreq | CmMessage::Drep => assert_eq!(again, 1),
            // A REP that is lost is sent again by its own timer, or because the REQ comes again.
            _ => assert!(again >= 1, "{message:?}"),
        }
    }
}

#[test]
fn every_message_may_come_twice_and_nothing_happens_twice() {
    for (message, from_client) in DIALOGUE {
        let (report, fired) =
            with_fault(message, from_client, Repeat::times(1), Action::Duplicate { copies: 1 });
        assert_eq!(fired, 1, "{message:?}");
        assert_eq!(heard(&report), GOOD, "{message:?}: {:#?}", trace(&report));
    }
}

#[test]
fn every_message_may_be_late_and_nothing_happens_twice() {
    for (message, from_client) in DIALOGUE {
        let late = Action::Delay { ns: 9_000_000_000 };
        let (report, fired) = with_fault(message, from_client, Repeat::times(1), late);
        assert_eq!(fired, 1, "{message:?}");
        let mut events = heard(&report);
        let mut expected = GOOD.to_vec();
        if message == CmMessage::Rtu {
            // The DREQ overtakes it.
            expected.remove(2);
        }
        events.sort();
        expected.sort();
        assert_eq!(events, expected, "{message:?}: {:#?}", trace(&report));
    }
}

#[test]
fn a_connection_that_is_over_waits_until_its_packets_are_gone() {
    let mut world = World::new(1);
    world.host("server", |device| async move {
        let context = device.open();
        let channel = EventChannel::new(&context)?;
        let listener = channel.create_id(PortSpace::Tcp)?;
        listener.bind("0.0.0.0:7174".parse().unwrap())?;
        listener.listen(0)?;
        let id = channel.next().await?.expect(EventType::ConnectRequest)?.id;
        id.attach_queue_pair(&pair(&context)?)?;
        id.accept(&ConnectionParameters::default())?;
        channel.next().await?.expect(EventType::Established)?;
        channel.next().await?.expect(EventType::Disconnected)?;
        id.disconnect()?;
        assert_eq!(id.query()?.state, CmState::TimeWait);
        let before = softhca::now();
        assert_eq!(channel.next().await?.expect(EventType::TimewaitExit)?.id, id);
        assert_eq!(softhca::now().since(before), Duration::from_nanos(4096 << 19));
        assert_eq!(id.query()?.state, CmState::Closed);
        Ok::<(), Error>(())
    });
    world.host("client", connect_and_leave);
    world.run().unwrap();
}

#[test]
fn a_message_that_is_always_lost_ends_in_a_status_that_says_so() {
    let cases: [(CmMessage, bool, &[&str]); 4] = [
        (CmMessage::Req, true, &["client hears UNREACHABLE -110"]),
        (
            CmMessage::Rep,
            false,
            &[
                "server hears CONNECT_REQUEST 0",
                "client hears UNREACHABLE -110",
                "server hears UNREACHABLE -110",
            ],
        ),
        (CmMessage::Dreq, true, &[GOOD[0], GOOD[1], GOOD[2], "client hears DISCONNECTED -110"]),
        (CmMessage::Drep, false, &[GOOD[0], GOOD[1], GOOD[2], GOOD[3], "client hears DISCONNECTED -110"]),
    ];
    for (message, from_client, expected) in cases {
        let always = Repeat::default();
        let (report, fired) = with_fault(message, from_client, always, Action::Drop);
        assert!(fired >= 16, "{message:?} was sent {fired} times");
        assert_eq!(heard(&report), expected, "{message:?}");
    }
}

#[test]
fn without_an_rtu_the_server_gives_up_and_the_client_gets_disconnected() {
    let mut world = World::new(5);
    world.record_log().time_limit(Duration::from_secs(3600));
    world.service("server", |device| async move {
        let _ = serve_one(device).await;
    });
    world.host("client", |device| async move {
        let context = device.open();
        let connection = Connector::new(&context).connect(&pair(&context)?, "server:7174").await?;
        connection.wait_disconnected().await
    });
    world.fault("client", "server", fault::cm(CmMessage::Rtu).drop());
    let report = world.run().unwrap();
    let events = heard(&report);
    assert_eq!(events[2..4], ["server hears UNREACHABLE -110", "client hears DISCONNECTED 0"], "{events:?}");
}
