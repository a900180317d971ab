//! Datagram services that are found by their port, and groups that are joined.

use super::{only, resolve};
use softhca::cm::{ConnectionParameters, Event, EventChannel, EventParameters, EventType, Id, PortSpace};
use softhca::{
    AccessFlags, Device, Error, QpType, QueuePair,
    fault::{Action, CmMessage, Repeat, Rule, RuleId},
    sim::World,
};

/// Answers a request of datagrams.
async fn name_queue_pair(device: Device) -> Result<(QueuePair, Id), Error> {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let id = channel.create_id(PortSpace::Udp)?;
    id.bind("0.0.0.0:7174".parse().unwrap())?;
    id.listen(0)?;
    let Event { id: request, private_data, .. } = channel.next().await?.expect(EventType::ConnectRequest)?;
    assert_eq!(&private_data[..3], b"who");
    let queue = context.create_completion_queue(16)?;
    let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Ud, &queue).build()?;
    request.attach_queue_pair(&pair)?;
    request
        .accept(&ConnectionParameters { private_data: b"me".to_vec(), ..ConnectionParameters::default() })?;
    Ok((pair, request))
}

/// Asks for a datagram queue pair.
async fn ask_for_queue_pair(device: Device) -> Result<Event, Error> {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let id = channel.create_id(PortSpace::Udp)?;
    resolve(&id, "10.0.0.1:7174").await?;
    id.connect(&ConnectionParameters { private_data: b"who".to_vec(), ..ConnectionParameters::default() })?;
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
        for (message, from_client) in [(CmMessage::SidrReq, true), (CmMessage::SidrRep, false)] {
            let mut world = World::new(1);
            world.service("server", |device| async move {
                let (pair, _request) = name_queue_pair(device.clone()).await?;
                device.endpoint_exchange().publish("pair", pair.qpn());
                std::future::pending::<()>().await;
                Ok::<(), Error>(())
            });
            world.host("client", |device| async move {
                let event = ask_for_queue_pair(device.clone()).await?.expect(EventType::Established)?;
                let target = event.target().unwrap();
                assert_eq!(target.qpn, device.endpoint_exchange().lookup("pair").await);
                assert_eq!(target.qkey.0, 0x0123_4567);
                assert_eq!(&event.private_data[..2], b"me");
                Ok::<(), Error>(())
            });
            let ends = if from_client { ["client", "server"] } else { ["server", "client"] };
            let rule = world.fault(
                ends[0],
                ends[1],
                Rule { id: RuleId(0), selector: only(message), repeat, action },
            );
            assert!(world.run().unwrap().rule_counters(rule).fired >= 1);
        }
    }
}

#[test]
fn a_datagram_service_without_a_listener_is_unreachable() {
    let mut world = World::new(1);
    world.device("server");
    world.host("client", |device| async move {
        let event = ask_for_queue_pair(device).await?;
        assert_eq!((event.kind, event.status), (EventType::Unreachable, 1));
        Ok::<(), Error>(())
    });
    world.run().unwrap();
}

#[test]
fn the_members_of_a_group_hear_each_other_after_a_join() {
    let mut world = World::new(1);
    let group = "239.1.2.3".parse().unwrap();
    let context = world.device("host").open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(16).unwrap();
    let region = domain.allocate_region(128, AccessFlags::LOCAL_WRITE).unwrap();
    let members = [(); 2].map(|()| {
        let id = Id::synchronous(&context, PortSpace::Udp).unwrap();
        id.bind("0.0.0.0:0".parse().unwrap()).unwrap();
        let pair = domain.create_queue_pair(QpType::Ud, &queue).build().unwrap();
        id.attach_queue_pair(&pair).unwrap();
        id.join_multicast(group).unwrap();
        (id, pair)
    });
    let EventParameters::Ud(target) = members[0].0.detail() else { panic!("a group") };
    assert_eq!((target.qpn.value(), target.qkey.0), (0xff_ffff, 0x0123_4567));
    members[1].0.leave_multicast(group).unwrap();
    assert!(members[1].0.leave_multicast(group).is_err(), "it is no member any more");
    assert!(members[0].0.join_multicast("10.0.0.1".parse().unwrap()).is_err());
    drop(region);
}
