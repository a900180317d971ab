//! Connection management in virtual time: the dialogue, and what a user sees when a message of it is lost,
//! late or there twice.

use softhca::rdma_cm::{
    CmOption, CmState, Connector, Event, EventChannel, EventKind, Id, Listener, Parameters, PortSpace,
    REQUEST_DATA, RejectReason, create_endpoint,
};
use softhca::{
    Access, Action, Class, Classes, CmMessage, Context, Device, Error, Mtu, QpKind, QueuePair,
    ReceiveRequest, Repeat, Report, Selector, SendRequest, Settings, State, What, World, sleep, spawn,
};
use std::time::Duration;

type Outcome = Result<(), Error>;

fn pair(context: &Context) -> Result<QueuePair, Error> {
    let queue = context.create_completion_queue(16)?;
    context.allocate_domain()?.queue_pair(QpKind::Rc, &queue).create()
}

/// Accepts one connection, and waits until the peer ends it.
async fn serve_one(device: Device) -> Outcome {
    let context = device.open();
    let listener = Listener::bind(&context, "0.0.0.0:7174")?;
    let connection = listener.next().await?.accept(&pair(&context)?).await?;
    connection.closed().await
}

async fn connect_and_leave(device: Device) -> Outcome {
    let context = device.open();
    let connection = Connector::new(&context).connect(&pair(&context)?, "server:7174").await?;
    connection.disconnect().await
}

fn only(message: CmMessage) -> Selector {
    Selector { classes: Some(Classes::Only(Class::Cm(message))), ..Selector::default() }
}

/// What the two hosts sent and heard of the connection manager, in order.
fn story(report: &Report) -> Vec<String> {
    let told = report.record.iter().filter_map(|moment| match moment.what {
        What::Event(softhca::Event::CmSent { message, again, .. }) => {
            let again = if again { " again" } else { "" };
            Some(format!("{} sends {}{again}", moment.host, message.name()))
        }
        What::Event(softhca::Event::CmRaised { kind, status, .. }) => {
            let kind = kind.name().trim_start_matches("RDMA_CM_EVENT_");
            Some(format!("{} hears {kind} {status}", moment.host))
        }
        _ => None,
    });
    told.collect()
}

/// Runs a server and a client that connect and part, with a fault on the way.
fn with_fault(message: CmMessage, from_client: bool, repeat: Repeat, action: Action) -> (Report, u64) {
    let mut world = World::new(11);
    world.record().limit(Duration::from_secs(3600));
    world.service("server", |device| async move {
        let _ = serve_one(device).await;
    });
    world.host("client", |device| async move {
        let _ = connect_and_leave(device).await;
        sleep(Duration::from_secs(300)).await;
    });
    let ends = if from_client { ["client", "server"] } else { ["server", "client"] };
    let rule = world.fault(ends[0], ends[1], only(message), repeat, action);
    let report = world.run().unwrap();
    let fired = report.tally(rule).fired;
    (report, fired)
}

/// What the hosts heard, without resolving.
fn heard(report: &Report) -> Vec<String> {
    let all = story(report).into_iter();
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
    (CmMessage::ConnectRequest, true),
    (CmMessage::ConnectReply, false),
    (CmMessage::ReadyToUse, true),
    (CmMessage::DisconnectRequest, true),
    (CmMessage::DisconnectReply, false),
];

#[test]
fn a_connection_is_made_and_ended_in_five_messages() {
    let mut world = World::new(3);
    world.record();
    world.host("server", serve_one).host("client", connect_and_leave);
    let report = world.run().unwrap();
    assert_eq!(
        story(&report),
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
    assert_eq!(report.ended_at.nanos(), 4_000, "REQ, REP, DREQ, DREP over a cable of 1 µs");
}

#[test]
fn every_message_may_be_lost_once_and_the_connection_is_made_and_ended_all_the_same() {
    for (message, from_client) in DIALOGUE {
        let (report, fired) = with_fault(message, from_client, Repeat::times(1), Action::Drop);
        assert_eq!(fired, 1, "{message:?}");
        let told = heard(&report);
        // Where the RTU is lost the DREQ comes first: who hears that the connection is over knows that it stood.
        let expected: Vec<&str> = match message {
            CmMessage::ReadyToUse => vec![GOOD[0], GOOD[1], "server hears DISCONNECTED 0"],
            _ => GOOD[..5].to_vec(),
        };
        assert_eq!(told[..expected.len()], expected[..], "{message:?}: {told:?}");
        let again = story(&report).iter().filter(|line| line.contains("again")).count();
        match message {
            CmMessage::ReadyToUse => assert_eq!(again, 0),
            CmMessage::DisconnectRequest | CmMessage::DisconnectReply => assert_eq!(again, 1),
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
        assert_eq!(heard(&report), GOOD, "{message:?}: {:#?}", story(&report));
    }
}

#[test]
fn every_message_may_be_late_and_nothing_happens_twice() {
    for (message, from_client) in DIALOGUE {
        let late = Action::Delay { ns: 9_000_000_000 };
        let (report, fired) = with_fault(message, from_client, Repeat::times(1), late);
        assert_eq!(fired, 1, "{message:?}");
        let mut told = heard(&report);
        let mut expected = GOOD.to_vec();
        if message == CmMessage::ReadyToUse {
            // The DREQ overtakes it.
            expected.remove(2);
        }
        told.sort();
        expected.sort();
        assert_eq!(told, expected, "{message:?}: {:#?}", story(&report));
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
        let id = channel.next().await?.expect(EventKind::ConnectRequest)?.id;
        id.attach(&pair(&context)?)?;
        id.accept(&Parameters::default())?;
        channel.next().await?.expect(EventKind::Established)?;
        channel.next().await?.expect(EventKind::Disconnected)?;
        id.disconnect()?;
        assert_eq!(id.view()?.state, CmState::TimeWait);
        let before = softhca::now();
        assert_eq!(channel.next().await?.expect(EventKind::TimewaitExit)?.id, id);
        assert_eq!(softhca::now().since(before), Duration::from_nanos(4096 << 19));
        assert_eq!(id.view()?.state, CmState::Closed);
        Ok::<(), Error>(())
    });
    world.host("client", connect_and_leave);
    world.run().unwrap();
}

#[test]
fn a_message_that_is_always_lost_ends_in_a_status_that_says_so() {
    let cases: [(CmMessage, bool, &[&str]); 4] = [
        (CmMessage::ConnectRequest, true, &["client hears UNREACHABLE -110"]),
        (
            CmMessage::ConnectReply,
            false,
            &[
                "server hears CONNECT_REQUEST 0",
                "client hears UNREACHABLE -110",
                "server hears UNREACHABLE -110",
            ],
        ),
        (CmMessage::DisconnectRequest, true, &[GOOD[0], GOOD[1], GOOD[2], "client hears DISCONNECTED -110"]),
        (
            CmMessage::DisconnectReply,
            false,
            &[GOOD[0], GOOD[1], GOOD[2], GOOD[3], "client hears DISCONNECTED -110"],
        ),
    ];
    for (message, from_client, expected) in cases {
        let always = Repeat::default();
        let (report, fired) = with_fault(message, from_client, always, Action::Drop);
        assert!(fired >= 16, "{message:?} was sent {fired} times");
        assert_eq!(heard(&report), expected, "{message:?}");
    }
}

#[test]
fn without_an_rtu_the_server_gives_up_and_the_client_hears_that_it_is_over() {
    let mut world = World::new(5);
    world.record().limit(Duration::from_secs(3600));
    world.service("server", |device| async move {
        let _ = serve_one(device).await;
    });
    world.host("client", |device| async move {
        let context = device.open();
        let connection = Connector::new(&context).connect(&pair(&context)?, "server:7174").await?;
        connection.closed().await
    });
    world.fault("client", "server", only(CmMessage::ReadyToUse), Repeat::default(), Action::Drop);
    let report = world.run().unwrap();
    let told = heard(&report);
    assert_eq!(told[2..4], ["server hears UNREACHABLE -110", "client hears DISCONNECTED 0"], "{told:?}");
}

#[test]
fn nobody_listens_and_the_client_hears_reason_8() {
    let mut world = World::new(1);
    world.device("server");
    world.host("client", |device| async move {
        let context = device.open();
        let error = Connector::new(&context).connect(&pair(&context)?, "server:7174").await.unwrap_err();
        assert!(matches!(error, Error::Connection { kind: EventKind::Rejected, status: 8 }), "{error}");
        assert_eq!(error.to_string(), "the connection was refused: reason 8 (invalid service ID)");
        assert_eq!(error.errno(), 111);
        Ok::<(), Error>(())
    });
    world.run().unwrap();
}

#[test]
fn a_lost_refusal_is_asked_for_again() {
    let mut world = World::new(1);
    world.device("server");
    world.host("client", |device| async move {
        let context = device.open();
        let error = Connector::new(&context).connect(&pair(&context)?, "server:7174").await.unwrap_err();
        assert!(matches!(error, Error::Connection { kind: EventKind::Rejected, status: 8 }), "{error}");
        Ok::<(), Error>(())
    });
    world.fault("server", "client", only(CmMessage::Reject), Repeat::times(1), Action::Drop);
    assert!(world.run().unwrap().ended_at.nanos() > 6_000_000_000);
}

#[test]
fn a_server_refuses_with_its_own_words_and_any_reason() {
    let mut world = World::new(1);
    world.host("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        listener.next().await?.reject(b"not today")?;
        listener.next().await?.reject_for(RejectReason::NO_RESOURCES, &[])?;
        drop(listener.next().await?);
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let context = device.open();
        let channel = EventChannel::new(&context)?;
        for (reason, words) in [(28, &b"not today"[..]), (3, b""), (28, b"")] {
            let id = channel.create_id(PortSpace::Tcp)?;
            id.attach(&pair(&context)?)?;
            resolve(&id, "10.0.0.1:7174").await?;
            id.connect(&Parameters::default())?;
            let event = channel.next().await?;
            assert_eq!((event.kind, event.status), (EventKind::Rejected, reason));
            assert_eq!(&event.private_data[..words.len()], words);
            assert_eq!(id.queue_pair().unwrap().state()?, State::Error);
        }
        Ok::<(), Error>(())
    });
    world.run().unwrap();
}

/// Finds address and path, and waits for both events.
async fn resolve(id: &Id, peer: &str) -> Outcome {
    id.resolve_address(None, peer.parse().expect("an address"))?;
    id.channel().next().await?.expect(EventKind::AddressResolved)?;
    id.resolve_route()?;
    id.channel().next().await?.expect(EventKind::RouteResolved)?;
    Ok(())
}

#[test]
fn a_listener_that_dies_with_requests_refuses_them() {
    let mut world = World::new(1);
    world.host("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        sleep(Duration::from_secs(1)).await;
        drop(listener);
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let context = device.open();
        for reason in [28, 8] {
            let error = Connector::new(&context).connect(&pair(&context)?, "server:7174").await.unwrap_err();
            assert!(matches!(error, Error::Connection { status, .. } if status == reason), "{error}");
        }
        Ok::<(), Error>(())
    });
    world.run().unwrap();
}

#[test]
fn a_peer_that_dies_while_connecting_is_unreachable() {
    let mut world = World::new(1);
    world.limit(Duration::from_secs(3600));
    world.service("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        let request = listener.next().await?;
        // It has the request, and then its cable is pulled.
        sleep(Duration::from_secs(3600)).await;
        drop(request);
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let context = device.open();
        let error = Connector::new(&context).connect(&pair(&context)?, "server:7174").await.unwrap_err();
        assert!(matches!(error, Error::Connection { kind: EventKind::Unreachable, status: -110 }), "{error}");
        Ok::<(), Error>(())
    });
    world.fault("server", "client", Selector::default(), Repeat::default(), Action::Drop);
    world.run().unwrap();
}

#[test]
fn a_slow_server_asks_for_patience() {
    let mut world = World::new(1);
    world.record();
    world.host("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        let request = listener.next().await?;
        sleep(Duration::from_secs(60)).await;
        request.accept(&pair(&context)?).await?.closed().await
    });
    world.host("client", connect_and_leave);
    let story = story(&world.run().unwrap());
    let count = |text: &str| story.iter().filter(|line| line.contains(text)).count();
    assert_eq!((count("sends REQ"), count("sends MRA")), (2, 1), "{story:#?}");
    assert_eq!(count("REQ again"), 1);
}

#[test]
fn more_requests_than_the_backlog_wait_until_there_is_room() {
    let mut world = World::new(1);
    world.record();
    world.service("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind_with(&context, "0.0.0.0:7174".parse().unwrap(), 2)?;
        sleep(Duration::from_secs(1)).await;
        loop {
            let (request, pair) = (listener.next().await?, pair(&context)?);
            spawn(async move { request.accept(&pair).await?.closed().await });
        }
        #[allow(unreachable_code, reason = "it says what the errors are")]
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let all: Vec<_> = (0..5).map(|_| spawn(connect_and_leave(device.clone()))).collect();
        for one in all {
            one.await?;
        }
        Ok::<(), Error>(())
    });
    let story = story(&world.run().unwrap());
    assert_eq!(story.iter().filter(|line| *line == "client sends REQ again").count(), 3, "{story:#?}");
    assert_eq!(story.iter().filter(|line| line.contains("server hears ESTABLISHED")).count(), 5);
}

#[test]
fn hosts_that_connect_to_each_other_at_once_get_a_connection_each_way() {
    let mut world = World::new(1);
    for (name, peer) in [("left", "right:9"), ("right", "left:9")] {
        world.host(name, move |device| async move {
            let context = device.open();
            let listener = Listener::bind(&context, "0.0.0.0:9")?;
            let answering = spawn({
                let context = context.clone();
                async move { listener.next().await?.accept(&pair(&context)?).await?.closed().await }
            });
            let connection = Connector::new(&context).connect(&pair(&context)?, peer).await?;
            connection.disconnect().await?;
            answering.await
        });
    }
    world.run().unwrap();
}

#[test]
fn a_host_connects_to_itself_as_127_0_0_1() {
    let mut world = World::new(1);
    world.host("alone", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "127.0.0.1:0")?;
        let port = listener.local_address().unwrap().port();
        assert!(port >= 32_768, "any port is one of the dynamic ones: {port}");
        let answering = spawn({
            let context = context.clone();
            async move { listener.next().await?.accept(&pair(&context)?).await?.closed().await }
        });
        let peer = format!("127.0.0.1:{port}");
        let connection = Connector::new(&context).connect(&pair(&context)?, &peer).await?;
        assert_eq!(connection.peer_address().unwrap().ip(), device.address());
        connection.disconnect().await?;
        answering.await
    });
    world.run().unwrap();
}

#[test]
fn both_sides_agree_on_what_each_can_do() {
    let mut world = World::new(1);
    world.settings(Settings { mtu: Mtu::B1024, ..Settings::default() });
    world.host("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        let request = listener.next().await?;
        assert_eq!(&request.private_data()[..4], b"ping");
        assert_eq!(request.private_data().len(), REQUEST_DATA);
        let offer = request.offer();
        assert_eq!((offer.responder_resources, offer.initiator_depth), (3, 9));
        let pair = pair(&context)?;
        let parameters = Parameters {
            private_data: b"pong".to_vec(),
            responder_resources: 2,
            initiator_depth: 200,
            rnr_retry_count: 3,
            ..Parameters::default()
        };
        let connection = request.accept_with(&pair, &parameters).await?;
        let own = pair.query()?.attributes;
        assert_eq!((own.max_reads_in, own.max_reads_out), (2, 9), "no more than the peer serves");
        assert_eq!((own.retry_count, own.rnr_retry, own.mtu), (5, 6, Mtu::B1024));
        device.rendezvous().publish("server", (own.send_psn, own.receive_psn));
        connection.closed().await
    });
    world.host("client", |device| async move {
        let context = device.open();
        let pair = pair(&context)?;
        let parameters = Parameters {
            private_data: b"ping".to_vec(),
            responder_resources: 9,
            initiator_depth: 3,
            retry_count: 5,
            rnr_retry_count: 6,
            ..Parameters::default()
        };
        let connector = Connector::new(&context).parameters(parameters);
        let connection = connector.connect(&pair, "server:7174").await?;
        assert_eq!(&connection.private_data()[..4], b"pong");
        let own = pair.query()?.attributes;
        assert_eq!((own.max_reads_in, own.max_reads_out), (9, 2), "no more than the peer serves");
        assert_eq!((own.retry_count, own.rnr_retry, own.mtu), (5, 3, Mtu::B1024));
        let (send, receive) = device.rendezvous().lookup("server").await;
        assert_eq!((own.receive_psn, own.send_psn), (send, receive));
        connection.disconnect().await
    });
    world.run().unwrap();
}

#[test]
fn data_flows_over_a_connection() {
    let mut world = World::new(1);
    world.host("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        let request = listener.next().await?;
        let domain = context.allocate_domain()?;
        let queue = context.create_completion_queue(16)?;
        let region = domain.register(64, Access::LOCAL_WRITE)?;
        let pair = domain.queue_pair(QpKind::Rc, &queue).create()?;
        pair.post_receive(&ReceiveRequest { id: 1, scatter: &[region.entry(0, 64)] })?;
        let connection = request.accept(&pair).await?;
        assert_eq!(queue.next().await.bytes, 5);
        assert_eq!(region.read_at(0, 5), b"hello");
        connection.closed().await
    });
    world.host("client", |device| async move {
        let context = device.open();
        let queue = context.create_completion_queue(16)?;
        let pair = context.allocate_domain()?.queue_pair(QpKind::Rc, &queue).create()?;
        let connection = Connector::new(&context).connect(&pair, "server:7174").await?;
        pair.post(&SendRequest::send(1, &[]).inline(b"hello"))?;
        assert!(queue.next().await.status.is_success());
        connection.disconnect().await
    });
    world.run().unwrap();
}

/// Answers a request of datagrams.
async fn name_queue_pair(device: Device) -> Result<(QueuePair, Id), Error> {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let id = channel.create_id(PortSpace::Udp)?;
    id.bind("0.0.0.0:7174".parse().unwrap())?;
    id.listen(0)?;
    let Event { id: request, private_data, .. } = channel.next().await?.expect(EventKind::ConnectRequest)?;
    assert_eq!(&private_data[..3], b"who");
    let queue = context.create_completion_queue(16)?;
    let pair = context.allocate_domain()?.queue_pair(QpKind::Ud, &queue).create()?;
    request.attach(&pair)?;
    request.accept(&Parameters { private_data: b"me".to_vec(), ..Parameters::default() })?;
    Ok((pair, request))
}

/// Asks for a datagram queue pair.
async fn ask_for_queue_pair(device: Device) -> Result<Event, Error> {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let id = channel.create_id(PortSpace::Udp)?;
    resolve(&id, "10.0.0.1:7174").await?;
    id.connect(&Parameters { private_data: b"who".to_vec(), ..Parameters::default() })?;
    channel.next().await
}

#[test]
fn datagram_services_are_found_and_messages_about_them_may_be_lost_late_or_twice() {
    let faults = [
        (Action::Count, Repeat::default()),
        (Action::Drop, Repeat::times(1)),
        (Action::Duplicate { copies: 1 }, Repeat::times(1)),
        (Action::Delay { ns: 9_000_000_000 }, Repeat::times(1)),
    ];
    for (action, repeat) in faults {
        for (message, from_client) in [(CmMessage::ServiceRequest, true), (CmMessage::ServiceReply, false)] {
            let mut world = World::new(1);
            world.service("server", |device| async move {
                let (pair, _request) = name_queue_pair(device.clone()).await?;
                device.rendezvous().publish("pair", pair.number());
                std::future::pending::<()>().await;
                Ok::<(), Error>(())
            });
            world.host("client", |device| async move {
                let event = ask_for_queue_pair(device.clone()).await?.expect(EventKind::Established)?;
                let target = event.target().unwrap();
                assert_eq!(target.queue_pair, device.rendezvous().lookup("pair").await);
                assert_eq!(target.queue_key.0, 0x0123_4567);
                assert_eq!(&event.private_data[..2], b"me");
                Ok::<(), Error>(())
            });
            let ends = if from_client { ["client", "server"] } else { ["server", "client"] };
            let rule = world.fault(ends[0], ends[1], only(message), repeat, action);
            assert!(world.run().unwrap().tally(rule).fired >= 1);
        }
    }
}

#[test]
fn a_datagram_service_that_nobody_has_is_unreachable() {
    let mut world = World::new(1);
    world.device("server");
    world.host("client", |device| async move {
        let event = ask_for_queue_pair(device).await?;
        assert_eq!((event.kind, event.status), (EventKind::Unreachable, 1));
        Ok::<(), Error>(())
    });
    world.run().unwrap();
}

#[test]
fn ports_belong_to_the_host() {
    let mut world = World::new(1);
    let context = world.device("host").open();
    let channel = EventChannel::new(&context).unwrap();
    let address = "0.0.0.0:7174".parse().unwrap();
    let first = channel.create_id(PortSpace::Tcp).unwrap();
    first.bind(address).unwrap();
    let second = channel.create_id(PortSpace::Tcp).unwrap();
    let error = second.bind(address).unwrap_err();
    assert_eq!(error.to_string(), "port 7174 of the tcp port space is in use on this host");
    assert_eq!(error.errno(), 98);
    channel.create_id(PortSpace::Udp).unwrap().bind(address).unwrap();
    drop(first);
    second.bind(address).unwrap();
    let foreign = channel.create_id(PortSpace::Tcp).unwrap();
    assert_eq!(foreign.bind("10.9.9.9:1".parse().unwrap()).unwrap_err().errno(), 99);
    assert_eq!(foreign.resolve_address(None, "[fd00::1]:1".parse().unwrap()).unwrap_err().errno(), 101);
    assert_eq!(foreign.connect(&Parameters::default()).unwrap_err().errno(), 22);
}

#[test]
fn an_identifier_moves_to_another_channel_with_its_events() {
    let mut world = World::new(1);
    let context = world.device("host").open();
    let [first, second] = [(); 2].map(|()| EventChannel::new(&context).unwrap());
    let id = first.create_id(PortSpace::Tcp).unwrap();
    id.resolve_address(None, "127.0.0.1:1".parse().unwrap()).unwrap();
    id.migrate(&second).unwrap();
    assert!(first.poll().unwrap().is_none());
    let event = second.poll().unwrap().unwrap();
    assert_eq!((event.kind, event.id), (EventKind::AddressResolved, id));
}

#[test]
fn options_reach_the_packets_and_the_queue_pair() {
    let mut world = World::new(1);
    world.host("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        let pair = pair(&context)?;
        let connection = listener.next().await?.accept(&pair).await?;
        let own = pair.query()?.attributes;
        assert_eq!((own.path.traffic_class, own.timeout), (104, 17));
        connection.closed().await
    });
    world.host("client", |device| async move {
        let context = device.open();
        let channel = EventChannel::new(&context)?;
        let id = channel.create_id(PortSpace::Tcp)?;
        id.set_option(CmOption::TypeOfService(104))?;
        id.set_option(CmOption::AckTimeout(17))?;
        let pair = pair(&context)?;
        id.attach(&pair)?;
        resolve(&id, "10.0.0.1:7174").await?;
        id.connect(&Parameters::default())?;
        channel.next().await?.expect(EventKind::Established)?;
        let own = pair.query()?.attributes;
        assert_eq!((own.path.traffic_class, own.timeout), (104, 17));
        assert_eq!(id.view()?.state, CmState::Established);
        id.disconnect()
    });
    world.run().unwrap();
}

#[test]
fn the_members_of_a_group_hear_each_other_after_a_join() {
    let mut world = World::new(1);
    let group = "239.1.2.3".parse().unwrap();
    let context = world.device("host").open();
    let domain = context.allocate_domain().unwrap();
    let queue = context.create_completion_queue(16).unwrap();
    let region = domain.register(128, Access::LOCAL_WRITE).unwrap();
    let members = [(); 2].map(|()| {
        let id = Id::synchronous(&context, PortSpace::Udp).unwrap();
        id.bind("0.0.0.0:0".parse().unwrap()).unwrap();
        let pair = domain.queue_pair(QpKind::Ud, &queue).create().unwrap();
        id.attach(&pair).unwrap();
        id.join_multicast(group).unwrap();
        (id, pair)
    });
    let softhca::rdma_cm::Detail::Datagram(target) = members[0].0.detail() else { panic!("a group") };
    assert_eq!((target.queue_pair.value(), target.queue_key.0), (0xff_ffff, 0x0123_4567));
    members[1].0.leave_multicast(group).unwrap();
    assert!(members[1].0.leave_multicast(group).is_err(), "it is no member any more");
    assert!(members[0].0.join_multicast("10.0.0.1".parse().unwrap()).is_err());
    drop(region);
}

#[test]
fn real_cards_connect_with_blocking_calls_and_endpoints() {
    use softhca::rdma_cm::{Endpoint, Hints, address_info};
    let [server, client] = [(); 2].map(|()| Device::embedded().unwrap().open());
    let hints = Hints { passive: true, ..Hints::default() };
    let info = address_info(&server, None, "7471", &hints).unwrap();
    let listening = create_endpoint(&server, &info, 8).unwrap();
    listening.id.listen(0).unwrap();
    let address = server.address().to_string();
    let serving = std::thread::spawn(move || {
        let endpoint = Endpoint::of_request(listening.id.get_request()?, 8)?;
        let region = endpoint.domain.register(16, Access::LOCAL_WRITE)?;
        let pair = endpoint.queue_pair.as_ref().expect("a connection has one");
        pair.post_receive(&ReceiveRequest { id: 1, scatter: &[region.entry(0, 16)] })?;
        endpoint.id.accept(&Parameters::default())?;
        assert_eq!(endpoint.receives.wait()?.bytes, 3);
        assert_eq!(region.read_at(0, 3), b"abc");
        endpoint.id.channel().wait()?.expect(EventKind::Disconnected)?;
        endpoint.id.disconnect().or(Ok::<(), Error>(()))
    });
    let info = address_info(&client, Some(&address), "7471", &Hints::default()).unwrap();
    let endpoint = create_endpoint(&client, &info, 8).unwrap();
    endpoint.id.connect(&Parameters::default()).unwrap();
    let pair = endpoint.queue_pair.as_ref().unwrap();
    pair.post(&SendRequest::send(1, &[]).inline(b"abc")).unwrap();
    assert!(endpoint.sends.wait().unwrap().status.is_success());
    endpoint.id.disconnect().unwrap();
    serving.join().unwrap().unwrap();
}

#[test]
fn nobody_is_at_an_address_and_the_client_hears_it_at_once() {
    let context = Device::embedded().unwrap().open();
    let endpoint = |port: &str| {
        let info =
            softhca::rdma_cm::address_info(&context, Some("127.0.0.253"), port, &Default::default()).unwrap();
        create_endpoint(&context, &info, 8).unwrap()
    };
    let error = endpoint("7471").id.connect(&Parameters::default()).unwrap_err();
    assert!(matches!(error, Error::Connection { kind: EventKind::Unreachable, .. }), "{error}");
}
