//! Connection management through a daemon: hosts connect by address and by name, processes share the ports of a host,
//! and the connections of a process end with it.

use super::data::DEVICE_LOOPBACK;
use super::process::{TEST_TIMEOUT, TestDaemon};
use softhca::cm::{ConnectionParameters, Connector, EventChannel, EventType, Id, Listener, PortSpace};
use softhca::{Context, DaemonControl, Device, Error, QpType, QueuePair, block_on, spawn};
use std::time::{Duration, Instant};

fn create_queue_pair(context: &Context) -> Result<QueuePair, Error> {
    let queue = context.create_completion_queue(16)?;
    context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()
}

/// Connects to a listener of `server` at `peer` and disconnects.
fn connect_and_disconnect(client: &Device, server: &Device, peer: &str) {
    let [client, server] = [client.open(), server.open()];
    let listener = Listener::bind(&server, "0.0.0.0:7174").unwrap();
    block_on(async {
        let serving = spawn(async move {
            let connection = listener.accept().await?.accept(&create_queue_pair(&server)?).await?;
            connection.wait_disconnected().await
        });
        let connection = Connector::new(&client).connect(&create_queue_pair(&client)?, peer).await?;
        connection.disconnect().await?;
        serving.await
    })
    .unwrap();
}

#[test]
fn hosts_of_a_daemon_connect_by_address_and_by_name() {
    let daemon = TestDaemon::start();
    let [alice, bob] = [daemon.open("alice"), daemon.open("bob")];
    connect_and_disconnect(&alice, &bob, &format!("{}:7174", bob.address()));
    connect_and_disconnect(&alice, &bob, "bob:7174");
}

#[test]
fn processes_on_one_host_share_its_ports_and_its_127_0_0_1() {
    share_ports(&TestDaemon::start());
}

#[test]
pub fn processes_on_one_host_connect_with_internal_loopback() {
    share_ports(&TestDaemon::with(&DEVICE_LOOPBACK));
}

fn share_ports(daemon: &TestDaemon) {
    let [first, second] = [daemon.open("alice"), daemon.open("alice")];
    connect_and_disconnect(&first, &second, "127.0.0.1:7174");
    let [first, second] = [first.open(), second.open()];
    let taken = Listener::bind(&first, "0.0.0.0:7174").unwrap();
    let error = Listener::bind(&second, "0.0.0.0:7174").unwrap_err();
    assert_eq!(error.errno(), 98, "{error}");
    drop(taken);
    Listener::bind(&second, "0.0.0.0:7174").unwrap();
}

#[test]
fn a_process_that_exits_ends_its_connections() {
    let daemon = TestDaemon::start();
    let [alice, bob] = [daemon.open("alice"), daemon.open("bob")];
    let server = bob.open();
    let channel = EventChannel::new(&server).unwrap();
    let listener = channel.create_id(PortSpace::Tcp).unwrap();
    listener.bind("0.0.0.0:7174".parse().unwrap()).unwrap();
    listener.listen(0).unwrap();
    let address = bob.address();
    let leaving = std::thread::spawn(move || {
        let client = alice.open();
        let id = Id::synchronous(&client, PortSpace::Tcp).unwrap();
        id.resolve_address(None, (address, 7174).into()).unwrap();
        id.resolve_route().unwrap();
        id.attach_queue_pair(&create_queue_pair(&client).unwrap()).unwrap();
        id.connect(&ConnectionParameters::default()).unwrap();
        // Drops the id, its queue pair and the device.
    });
    let request = channel.wait().unwrap().expect(EventType::ConnectRequest).unwrap();
    request.id.attach_queue_pair(&create_queue_pair(&server).unwrap()).unwrap();
    request.id.accept(&ConnectionParameters::default()).unwrap();
    channel.wait().unwrap().expect(EventType::Established).unwrap();
    channel.wait().unwrap().expect(EventType::Disconnected).unwrap();
    leaving.join().unwrap();
}

/// The open descriptors of a daemon, and the resources of its clients.
fn resource_counts(daemon: &TestDaemon, control: &mut DaemonControl) -> (usize, Vec<Vec<(String, u32)>>) {
    let folder = format!("/proc/{}/fd", daemon.process.id());
    let hosts = control.status().unwrap().hosts;
    let clients = hosts.into_iter().flat_map(|host| host.clients).map(|client| client.resources).collect();
    (std::fs::read_dir(folder).unwrap().count(), clients)
}

#[test]
fn a_thousand_consecutive_connections_leak_nothing() {
    // With a limit of four queue pairs and eight ids, one leak per connection would fail.
    let daemon = TestDaemon::with(&[("TEST_QUEUE_PAIRS", "4")]);
    let [alice, bob] = [daemon.open("alice"), daemon.open("bob")];
    let [client, server] = [alice.open(), bob.open()];
    let [active, passive] = [&client, &server].map(|context| EventChannel::new(context).unwrap());
    let listener = passive.create_id(PortSpace::Tcp).unwrap();
    listener.bind("0.0.0.0:7174".parse().unwrap()).unwrap();
    listener.listen(0).unwrap();
    let expect_event = |channel: &EventChannel, kind| loop {
        let event = channel.wait_for(TEST_TIMEOUT).unwrap().expect("an event");
        if event.kind != EventType::TimewaitExit {
            return event.expect(kind).unwrap().id;
        }
    };
    // Every connection uses the same source port, which must be free again.
    let (own, peer) = ((alice.address(), 5000).into(), (bob.address(), 7174).into());
    let connect = || {
        let id = active.create_id(PortSpace::Tcp).unwrap();
        id.resolve_address(Some(own), peer).unwrap();
        expect_event(&active, EventType::AddressResolved);
        id.resolve_route().unwrap();
        expect_event(&active, EventType::RouteResolved);
        id.attach_queue_pair(&create_queue_pair(&client).unwrap()).unwrap();
        id.connect(&ConnectionParameters::default()).unwrap();
        let request = expect_event(&passive, EventType::ConnectRequest);
        request.attach_queue_pair(&create_queue_pair(&server).unwrap()).unwrap();
        request.accept(&ConnectionParameters::default()).unwrap();
        expect_event(&active, EventType::Established);
        expect_event(&passive, EventType::Established);
        id.disconnect().unwrap();
        expect_event(&passive, EventType::Disconnected);
        request.disconnect().unwrap();
        expect_event(&active, EventType::Disconnected);
    };
    connect();
    let mut control = daemon.control();
    let (descriptors, resources) = resource_counts(&daemon, &mut control);
    (0..1000).for_each(|_| connect());
    // The status is updated, and descriptors are closed, after the reply to the last call: also to the first one.
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        let now = resource_counts(&daemon, &mut control);
        if now.0 <= descriptors && now.1 == resources {
            break;
        }
        assert!(Instant::now() < deadline, "{now:?}, {descriptors} and {resources:?} before");
        std::thread::sleep(Duration::from_millis(5));
    }
}
