//! Connections that stand: what both sides agree on, and data over them.

use super::{pair, resolve};
use softhca::cm::{
    CmOption, CmState, ConnectionParameters, Connector, EventChannel, EventType, Listener,
    MAX_REQ_PRIVATE_DATA, PortSpace,
};
use softhca::{AccessFlags, Mtu, QpType, ReceiveRequest, SendRequest, Settings, sim::World, spawn};

#[test]
fn hosts_that_connect_to_each_other_at_once_get_a_connection_each_way() {
    let mut world = World::new(1);
    for (name, peer) in [("left", "right:9"), ("right", "left:9")] {
        world.host(name, move |device| async move {
            let context = device.open();
            let listener = Listener::bind(&context, "0.0.0.0:9")?;
            let answering = spawn({
                let context = context.clone();
                async move { listener.accept().await?.accept(&pair(&context)?).await?.wait_disconnected().await }
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
            async move { listener.accept().await?.accept(&pair(&context)?).await?.wait_disconnected().await }
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
        let request = listener.accept().await?;
        assert_eq!(&request.private_data()[..4], b"ping");
        assert_eq!(request.private_data().len(), MAX_REQ_PRIVATE_DATA);
        let offer = request.offer();
        assert_eq!((offer.responder_resources, offer.initiator_depth), (3, 9));
        let pair = pair(&context)?;
        let parameters = ConnectionParameters {
            private_data: b"pong".to_vec(),
            responder_resources: 2,
            initiator_depth: 200,
            rnr_retry_count: 3,
            ..ConnectionParameters::default()
        };
        let connection = request.accept_with(&pair, &parameters).await?;
        let own = pair.query()?.attributes;
        assert_eq!((own.max_dest_rd_atomic, own.max_rd_atomic), (2, 9), "no more than the peer serves");
        assert_eq!((own.retry_count, own.rnr_retry, own.path_mtu), (5, 6, Mtu::B1024));
        device.endpoint_exchange().publish("server", (own.sq_psn, own.rq_psn));
        connection.wait_disconnected().await
    });
    world.host("client", |device| async move {
        let context = device.open();
        let pair = pair(&context)?;
        let parameters = ConnectionParameters {
            private_data: b"ping".to_vec(),
            responder_resources: 9,
            initiator_depth: 3,
            retry_count: 5,
            rnr_retry_count: 6,
            ..ConnectionParameters::default()
        };
        let connector = Connector::new(&context).parameters(parameters);
        let connection = connector.connect(&pair, "server:7174").await?;
        assert_eq!(&connection.private_data()[..4], b"pong");
        let own = pair.query()?.attributes;
        assert_eq!((own.max_dest_rd_atomic, own.max_rd_atomic), (9, 2), "no more than the peer serves");
        assert_eq!((own.retry_count, own.rnr_retry, own.path_mtu), (5, 3, Mtu::B1024));
        let (send, receive) = device.endpoint_exchange().lookup("server").await;
        assert_eq!((own.rq_psn, own.sq_psn), (send, receive));
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
        let request = listener.accept().await?;
        let domain = context.allocate_protection_domain()?;
        let queue = context.create_completion_queue(16)?;
        let region = domain.allocate_region(64, AccessFlags::LOCAL_WRITE)?;
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
        pair.init(&softhca::ConnectOptions::default())?;
        pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[region.sge(0, 64)] })?;
        let connection = request.accept(&pair).await?;
        assert_eq!(queue.next().await.byte_len, 5);
        assert_eq!(region.read_at(0, 5), b"hello");
        connection.wait_disconnected().await
    });
    world.host("client", |device| async move {
        let context = device.open();
        let queue = context.create_completion_queue(16)?;
        let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()?;
        let connection = Connector::new(&context).connect(&pair, "server:7174").await?;
        pair.post_send(&SendRequest::send(1, &[]).inline_data(b"hello"))?;
        assert!(queue.next().await.status.is_success());
        connection.disconnect().await
    });
    world.run().unwrap();
}

#[test]
fn options_reach_the_packets_and_the_queue_pair() {
    let mut world = World::new(1);
    world.host("server", |device| async move {
        let context = device.open();
        let listener = Listener::bind(&context, "0.0.0.0:7174")?;
        let pair = pair(&context)?;
        let connection = listener.accept().await?.accept(&pair).await?;
        let own = pair.query()?.attributes;
        assert_eq!((own.address_vector.traffic_class, own.timeout), (104, 17));
        connection.wait_disconnected().await
    });
    world.host("client", |device| async move {
        let context = device.open();
        let channel = EventChannel::new(&context)?;
        let id = channel.create_id(PortSpace::Tcp)?;
        id.set_option(CmOption::TypeOfService(104))?;
        id.set_option(CmOption::AckTimeout(17))?;
        let pair = pair(&context)?;
        id.attach_queue_pair(&pair)?;
        resolve(&id, "10.0.0.1:7174").await?;
        id.connect(&ConnectionParameters::default())?;
        channel.next().await?.expect(EventType::Established)?;
        let own = pair.query()?.attributes;
        assert_eq!((own.address_vector.traffic_class, own.timeout), (104, 17));
        assert_eq!(id.query()?.state, CmState::Established);
        id.disconnect()
    });
    world.run().unwrap();
}
