//! Requests that are refused, that wait, or that nobody answers.

use super::{connect_and_leave, pair, resolve};
use softhca::cm::{
    ConnectionParameters, Connector, EventChannel, EventType, Id, Listener, PortSpace, RejectReason,
};
use softhca::{
    Device, Error, QpState,
    fault::{self, CmMessage},
    sim::World,
    sleep, spawn,
};
use std::time::Duration;

/// Adds a client that connects once for each event and status with which that must fail, and returns no error itself.
fn add_failing_client(world: &mut World, failures: &'static [(EventType, i32)]) {
    world.host("client", move |device| async move {
        let context = device.open();
        for failure in failures {
            let error = Connector::new(&context).connect(&pair(&context)?, "server:7174").await.unwrap_err();
            let Error::Connection { kind, status } = error else { panic!("{error}") };
            assert_eq!((kind, status), *failure);
        }
        Ok::<(), Error>(())
    });
}

#[test]
fn without_a_listener_the_client_gets_reason_8() {
    let mut world = World::new(1);
    world.device("server");
    world.host("client", |device| async move {
        let context = device.open();
        let error = Connector::new(&context).connect(&pair(&context)?, "server:7174").await.unwrap_err();
        assert!(matches!(error, Error::Connection { kind: EventType::Rejected, status: 8 }), "{error}");
        assert_eq!(error.to_string(), "the connection was refused: reason 8 (invalid service ID)");
        assert_eq!(error.errno(), 111);
        Ok::<(), Error>(())
    });
    world.run().unwrap();
}

/// An identifier that has been bound to the port for 100 ms.
async fn bind_and_wait(device: Device) -> Result<Id, Error> {
    let listener = EventChannel::new(&device.open())?.create_id(PortSpace::Tcp)?;
    listener.bind(([0, 0, 0, 0], 7174).into())?;
    sleep(Duration::from_millis(100)).await;
    Ok(listener)
}

#[test]
fn a_request_to_a_bound_port_waits_until_the_server_listens() {
    let mut world = World::new(1);
    world.host("server", |device| async move {
        let listener = bind_and_wait(device).await?;
        let channel = listener.channel();
        assert!(channel.poll()?.is_none());
        listener.listen(1)?;
        let request = channel.next().await?.expect(EventType::ConnectRequest)?;
        assert!(channel.poll()?.is_none(), "the request arrived twice");
        request.id.reject(b"not today")
    });
    add_failing_client(&mut world, &[(EventType::Rejected, 28)]);
    world.fault("client", "server", fault::cm(CmMessage::Req).times(1).duplicate());
    let ended_at = world.run().unwrap().ended_at.nanos();
    assert!((100_000_000..101_000_000).contains(&ended_at), "{ended_at}");
}

#[test]
fn a_request_to_a_bound_port_is_rejected_if_nobody_listens() {
    for (closes, at) in [(true, 100_000_000), (false, 2_000_000_000)] {
        let mut world = World::new(1);
        world.service("server", move |device| async move {
            let listener = bind_and_wait(device).await.unwrap();
            if !closes {
                listener.channel().next().await.unwrap();
            }
        });
        add_failing_client(&mut world, &[(EventType::Rejected, 8)]);
        let ended_at = world.run().unwrap().ended_at.nanos();
        assert!((at..at + 1_000_000).contains(&ended_at), "{ended_at}");
    }
}

#[test]
fn a_lost_refusal_is_asked_for_again() {
    let mut world = World::new(1);
    world.device("server");
    add_failing_client(&mut world, &[(EventType::Rejected, 8)]);
    world.fault("server", "client", fault::cm(CmMessage::Rej).times(1).drop());
    assert!(world.run().unwrap().ended_at.nanos() > 6_000_000_000);
}

#[test]
fn a_server_refuses_with_its_own_words_and_any_reason() {
    let mut world = World::new(1);
    world.host("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        listener.accept().await?.reject(b"not today")?;
        listener.accept().await?.reject_with_reason(RejectReason::NO_RESOURCES, &[])?;
        drop(listener.accept().await?);
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let context = device.open();
        let channel = EventChannel::new(&context)?;
        for (reason, words) in [(28, &b"not today"[..]), (3, b""), (28, b"")] {
            let id = channel.create_id(PortSpace::Tcp)?;
            id.attach_queue_pair(&pair(&context)?)?;
            resolve(&id, "10.0.0.1:7174").await?;
            id.connect(&ConnectionParameters::default())?;
            let event = channel.next().await?;
            assert_eq!((event.kind, event.status), (EventType::Rejected, reason));
            assert_eq!(&event.private_data[..words.len()], words);
            assert_eq!(id.queue_pair().unwrap().state()?, QpState::Error);
        }
        Ok::<(), Error>(())
    });
    world.run().unwrap();
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
    add_failing_client(&mut world, &[(EventType::Rejected, 28), (EventType::Rejected, 8)]);
    world.run().unwrap();
}

#[test]
fn a_peer_that_dies_while_connecting_is_unreachable() {
    let mut world = World::new(1);
    world.time_limit(Duration::from_secs(3600));
    world.service("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        let request = listener.accept().await?;
        // It has the request, and then its link is cut.
        sleep(Duration::from_secs(3600)).await;
        drop(request);
        Ok::<(), Error>(())
    });
    add_failing_client(&mut world, &[(EventType::Unreachable, -110)]);
    world.fault("server", "client", fault::packets().drop());
    world.run().unwrap();
}

#[test]
fn a_slow_server_sends_an_mra() {
    let mut world = World::new(1);
    world.record_log();
    world.host("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        let request = listener.accept().await?;
        sleep(Duration::from_secs(60)).await;
        request.accept(&pair(&context)?).await?.wait_disconnected().await
    });
    world.host("client", connect_and_leave);
    let trace = super::trace(&world.run().unwrap());
    let count = |text: &str| trace.iter().filter(|line| line.contains(text)).count();
    assert_eq!((count("sends REQ"), count("sends MRA")), (2, 1), "{trace:#?}");
    assert_eq!(count("REQ again"), 1);
}

#[test]
fn more_requests_than_the_backlog_wait_until_there_is_room() {
    let mut world = World::new(1);
    world.record_log();
    world.service("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind_with(&context, "0.0.0.0:7174".parse().unwrap(), 2)?;
        sleep(Duration::from_secs(1)).await;
        loop {
            let (request, pair) = (listener.accept().await?, pair(&context)?);
            spawn(async move { request.accept(&pair).await?.wait_disconnected().await });
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
    let trace = super::trace(&world.run().unwrap());
    assert_eq!(trace.iter().filter(|line| *line == "client sends REQ again").count(), 3, "{trace:#?}");
    assert_eq!(trace.iter().filter(|line| line.contains("server hears ESTABLISHED")).count(), 5);
}
