//! Captures of connection management: alice is the active side, bob the passive side.

use softhca::cm::{ConnectionParameters, Connector, EventChannel, EventType, Id, Listener, PortSpace};
use softhca::{
    AccessFlags, ConnectOptions, Context, Device, Error, QpType, QueuePair, ReceiveRequest, SendRequest,
    fault::{self, Selector},
    sim::World,
    sleep,
};
use softhca_fabric::{CmMessage, PacketClass, PacketClasses};
use std::time::Duration;

/// One capture.
pub struct CmCapture {
    pub name: &'static str,
    pub about: &'static str,
    pub run: fn(&mut World),
}

/// Every capture.
pub const CM_CAPTURES: &[CmCapture] = &[
    CmCapture {
        name: "cm-connect",
        about: "Connection manager: REQ, REP, RTU, a message, DREQ, DREP",
        run: |world| {
            world.host("alice", connect).host("bob", serve);
        },
    },
    CmCapture {
        name: "cm-request-lost",
        about: "Connection manager: the REQ is lost and retransmitted",
        run: |world| {
            world.host("alice", connect).host("bob", serve);
            let selector = Selector {
                classes: Some(PacketClasses::Only(PacketClass::Cm(CmMessage::Req))),
                ..Selector::default()
            };
            world.fault("alice", "bob", fault::select(selector).times(1).drop());
        },
    },
    CmCapture {
        name: "cm-reject",
        about: "Connection manager: the server rejects the connection, REJ with private data",
        run: |world| {
            world.host("alice", connect_and_expect_rejection).host("bob", |device| async move {
                let listener = Listener::bind(&device.open(), "0.0.0.0:7174")?;
                listener.accept().await?.reject(b"not today")
            });
        },
    },
    CmCapture {
        name: "cm-no-listener",
        about: "Connection manager: no listener on the port, REJ invalid service ID",
        run: |world| {
            world.host("alice", connect_and_expect_rejection);
            world.device("bob");
        },
    },
    CmCapture {
        name: "cm-slow-server",
        about: "Connection manager: the server takes a minute and sends an MRA",
        run: |world| {
            world.host("alice", connect).host("bob", |device| async move {
                let context = device.open();
                let listener = Listener::bind(&context, "0.0.0.0:7174")?;
                let request = listener.accept().await?;
                sleep(Duration::from_secs(60)).await;
                receive_one(&context, request).await
            });
        },
    },
    CmCapture {
        name: "cm-datagram",
        about: "Connection manager: SIDR_REQ and SIDR_REP resolve the QPN and Q_Key of a datagram service",
        run: |world| {
            world.host("alice", resolve_sidr).service("bob", |device| async move {
                let _kept = serve_sidr(device).await?;
                std::future::pending::<()>().await;
                Ok::<(), Error>(())
            });
        },
    },
];

fn create_queue_pair(context: &Context) -> Result<QueuePair, Error> {
    let queue = context.create_completion_queue(256)?;
    context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()
}

/// Connects, sends a message and disconnects.
async fn connect(device: Device) -> Result<(), Error> {
    let context = device.open();
    let queue = context.create_completion_queue(256)?;
    let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()?;
    let connection = Connector::new(&context).private_data(b"hello").connect(&pair, "bob:7174").await?;
    pair.post_send(&SendRequest::send(1, &[]).inline_data(b"a message for the listening side"))?;
    assert!(queue.next().await.status.is_success());
    connection.disconnect().await
}

async fn serve(device: Device) -> Result<(), Error> {
    let context = device.open();
    let listener = Listener::bind(&context, "0.0.0.0:7174")?;
    let request = listener.accept().await?;
    receive_one(&context, request).await
}

async fn receive_one(context: &Context, request: softhca::cm::ConnectRequest) -> Result<(), Error> {
    let domain = context.allocate_protection_domain()?;
    let queue = context.create_completion_queue(256)?;
    let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
    let region = domain.allocate_region(64, AccessFlags::LOCAL_WRITE)?;
    pair.init(&ConnectOptions::default())?;
    pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[region.sge(0, 64)] })?;
    let connection = request.accept(&pair).await?;
    assert!(queue.next().await.status.is_success());
    connection.wait_disconnected().await
}

/// Requests a connection that is rejected.
async fn connect_and_expect_rejection(device: Device) {
    let context = device.open();
    let pair = create_queue_pair(&context).expect("a queue pair");
    assert!(Connector::new(&context).connect(&pair, "bob:7174").await.is_err());
}

/// Serves a SIDR request.
async fn serve_sidr(device: Device) -> Result<(QueuePair, Id), Error> {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let id = channel.create_id(PortSpace::Udp)?;
    id.bind("0.0.0.0:7174".parse().expect("an address"))?;
    id.listen(0)?;
    let request = channel.next().await?.expect(EventType::ConnectRequest)?.id;
    let queue = context.create_completion_queue(256)?;
    let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Ud, &queue).build()?;
    request.attach_queue_pair(&pair)?;
    request.accept(&ConnectionParameters::default())?;
    Ok((pair, request))
}

/// Sends a SIDR request.
async fn resolve_sidr(device: Device) -> Result<(), Error> {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let id = channel.create_id(PortSpace::Udp)?;
    id.resolve_address(None, "10.0.0.2:7174".parse().expect("an address"))?;
    channel.next().await?.expect(EventType::AddressResolved)?;
    id.resolve_route()?;
    channel.next().await?.expect(EventType::RouteResolved)?;
    id.connect(&ConnectionParameters::default())?;
    let event = channel.next().await?.expect(EventType::Established)?;
    assert!(event.target().is_some());
    Ok(())
}
