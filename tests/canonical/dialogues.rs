//! Dialogues of connection managers: alice asks, bob answers, each a program of its own.

use softhca::rdma_cm::{Connector, EventChannel, EventKind, Id, Listener, Parameters, PortSpace};
use softhca::{
    Access, Action, Context, Device, Error, QpKind, QueuePair, ReceiveRequest, Repeat, Selector, SendRequest,
    World, sleep,
};
use softhca_fabric::{Class, Classes, CmMessage};
use std::time::Duration;

/// One capture.
pub struct Dialogue {
    pub name: &'static str,
    pub about: &'static str,
    pub play: fn(&mut World),
}

/// Every capture.
pub const DIALOGUES: &[Dialogue] = &[
    Dialogue {
        name: "cm-connect",
        about: "Connection manager: REQ, REP, RTU, a message, DREQ, DREP",
        play: |world| {
            world.host("alice", connect).host("bob", serve);
        },
    },
    Dialogue {
        name: "cm-request-lost",
        about: "Connection manager: the REQ is lost and repeated",
        play: |world| {
            world.host("alice", connect).host("bob", serve);
            let selector = Selector {
                classes: Some(Classes::Only(Class::Cm(CmMessage::ConnectRequest))),
                ..Selector::default()
            };
            world.fault("alice", "bob", selector, Repeat::times(1), Action::Drop);
        },
    },
    Dialogue {
        name: "cm-reject",
        about: "Connection manager: the server refuses, REJ with its own words",
        play: |world| {
            world.host("alice", try_to_connect).host("bob", |device| async move {
                let listener = Listener::bind(&device.open(), "0.0.0.0:7174")?;
                listener.next().await?.reject(b"not today")
            });
        },
    },
    Dialogue {
        name: "cm-no-listener",
        about: "Connection manager: nobody listens on the port, REJ invalid service id",
        play: |world| {
            world.host("alice", try_to_connect);
            world.device("bob");
        },
    },
    Dialogue {
        name: "cm-slow-server",
        about: "Connection manager: the server takes a minute; MRA asks for patience",
        play: |world| {
            world.host("alice", connect).host("bob", |device| async move {
                let context = device.open();
                let listener = Listener::bind(&context, "0.0.0.0:7174")?;
                let request = listener.next().await?;
                sleep(Duration::from_secs(60)).await;
                receive_one(&context, request).await
            });
        },
    },
    Dialogue {
        name: "cm-datagram",
        about: "Connection manager: SIDR_REQ and SIDR_REP, which queue pair and Q_Key serve a datagram service",
        play: |world| {
            world.host("alice", ask).service("bob", |device| async move {
                let _kept = answer(device).await?;
                std::future::pending::<()>().await;
                Ok::<(), Error>(())
            });
        },
    },
];

fn pair(context: &Context) -> Result<QueuePair, Error> {
    let queue = context.create_completion_queue(256)?;
    context.allocate_domain()?.queue_pair(QpKind::Rc, &queue).create()
}

/// Connects, sends a message and leaves.
async fn connect(device: Device) -> Result<(), Error> {
    let context = device.open();
    let queue = context.create_completion_queue(256)?;
    let pair = context.allocate_domain()?.queue_pair(QpKind::Rc, &queue).create()?;
    let connection = Connector::new(&context).private_data(b"hello").connect(&pair, "bob:7174").await?;
    pair.post(&SendRequest::send(1, &[]).inline(b"a message"))?;
    assert!(queue.next().await.status.is_success());
    connection.disconnect().await
}

async fn serve(device: Device) -> Result<(), Error> {
    let context = device.open();
    let listener = Listener::bind(&context, "0.0.0.0:7174")?;
    let request = listener.next().await?;
    receive_one(&context, request).await
}

async fn receive_one(context: &Context, request: softhca::rdma_cm::Request) -> Result<(), Error> {
    let domain = context.allocate_domain()?;
    let queue = context.create_completion_queue(256)?;
    let pair = domain.queue_pair(QpKind::Rc, &queue).create()?;
    let region = domain.register(64, Access::LOCAL_WRITE)?;
    pair.post_receive(&ReceiveRequest { id: 1, scatter: &[region.entry(0, 64)] })?;
    let connection = request.accept(&pair).await?;
    assert!(queue.next().await.status.is_success());
    connection.closed().await
}

/// Asks for a connection that is refused.
async fn try_to_connect(device: Device) {
    let context = device.open();
    let pair = pair(&context).expect("a queue pair");
    assert!(Connector::new(&context).connect(&pair, "bob:7174").await.is_err());
}

/// Names the queue pair of a datagram service.
async fn answer(device: Device) -> Result<(QueuePair, Id), Error> {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let id = channel.create_id(PortSpace::Udp)?;
    id.bind("0.0.0.0:7174".parse().expect("an address"))?;
    id.listen(0)?;
    let request = channel.next().await?.expect(EventKind::ConnectRequest)?.id;
    let queue = context.create_completion_queue(256)?;
    let pair = context.allocate_domain()?.queue_pair(QpKind::Ud, &queue).create()?;
    request.attach(&pair)?;
    request.accept(&Parameters::default())?;
    Ok((pair, request))
}

/// Asks for the queue pair of a datagram service.
async fn ask(device: Device) -> Result<(), Error> {
    let context = device.open();
    let channel = EventChannel::new(&context)?;
    let id = channel.create_id(PortSpace::Udp)?;
    id.resolve_address(None, "10.0.0.2:7174".parse().expect("an address"))?;
    channel.next().await?.expect(EventKind::AddressResolved)?;
    id.resolve_route()?;
    channel.next().await?.expect(EventKind::RouteResolved)?;
    id.connect(&Parameters::default())?;
    let event = channel.next().await?.expect(EventKind::Established)?;
    assert!(event.target().is_some());
    Ok(())
}
