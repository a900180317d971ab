use super::*;
use softhca_subnet::{Fault, MAX_MAD, UserMadHeader};
use softhca_wire::smp::{Attribute, AttributeId, Lid, Method, NodeInfo, PortCapabilities, Smp};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

/// Longer than any answer takes.
const LIMIT: Duration = Duration::from_secs(60);

struct Rig {
    server: Arc<SubnetServer>,
    folder: PathBuf,
}

impl Rig {
    fn new(name: &str, manager: SubnetManager) -> Rig {
        let folder = std::env::temp_dir().join(format!("softhca-subnet-{}-{name}", std::process::id()));
        let config = SubnetConfig::read("one-switch:3", manager).expect("a generator");
        Rig { server: SubnetServer::start(&config, folder.clone()).expect("it starts"), folder }
    }

    /// Opens the port of a host with an agent for SMPs.
    fn open(&self, host: usize) -> Client {
        let node = self.server.hcas(Some(&format!("node{host}"))).expect("a host").1[0];
        let (port, stream) = UmadPort::open(&self.server, PortId { node, port: 1 }).expect("it opens");
        let stream = UnixStream::from(stream);
        stream.set_nonblocking(false).expect("a socket");
        stream.set_read_timeout(Some(LIMIT)).expect("a socket");
        let registration =
            Registration { mgmt_class: Smp::CLASS_DIRECTED, class_version: 1, ..Registration::default() };
        let agent =
            self.server.with_clients(|clients| clients.register(port.id(), registration)).expect("an agent");
        Client { _port: port, stream, agent }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

struct Client {
    _port: UmadPort,
    stream: UnixStream,
    agent: u32,
}

impl Client {
    fn message(&self, agent: u32) -> Vec<u8> {
        let header =
            UserMadHeader { agent, timeout_ms: 1000, lid: Lid::PERMISSIVE, ..UserMadHeader::default() };
        let smp = Smp::new(Method::GET, AttributeId::NodeInfo, 0, 7).directed(&[]);
        [&header.emit(256)[..], &smp.emit()].concat()
    }

    /// The header and the MAD of the next message.
    fn receive(&mut self) -> std::io::Result<(UserMadHeader, Vec<u8>)> {
        let mut header = [0; UserMadHeader::LEN];
        self.stream.read_exact(&mut header)?;
        let mut mad = vec![0; UserMadHeader::message_length(&header) - UserMadHeader::LEN];
        self.stream.read_exact(&mut mad)?;
        Ok((UserMadHeader::parse(&header), mad))
    }

    fn asks_its_own_port(&mut self) {
        let message = self.message(self.agent);
        self.stream.write_all(&message).expect("the daemon reads");
        let (header, mad) = self.receive().expect("an answer");
        let smp = Smp::parse(&mad).expect("an SMP");
        assert_eq!((header.status, header.agent, smp.method), (0, self.agent, Method::GET_RESP));
        assert_eq!(NodeInfo::from_block(&smp.data).local_port, 1);
    }
}

#[test]
fn a_message_without_a_length_ends_its_stream_only() {
    let rig = Rig::new("lengths", SubnetManager::Builtin);
    let mut other = rig.open(2);
    for length in [0, 63, (UserMadHeader::LEN + MAX_MAD + 1) as u32, u32::MAX] {
        let mut bad = rig.open(1);
        let mut message = bad.message(bad.agent);
        message[16..20].copy_from_slice(&length.to_ne_bytes());
        bad.stream.write_all(&message).expect("room");
        let error = bad.receive().expect_err("the stream ends").kind();
        assert!(matches!(error, ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset), "{length}: {error}");
        other.asks_its_own_port();
    }
    // Half a message stays half a message.
    let mut slow = rig.open(1);
    let message = slow.message(slow.agent);
    slow.stream.write_all(&message[..100]).expect("room");
    other.asks_its_own_port();
    slow.stream.write_all(&message[100..]).expect("room");
    assert_eq!(slow.receive().expect("an answer").0.status, 0);
}

#[test]
fn a_program_that_never_reads_loses_its_own_mads_only() {
    let rig = Rig::new("flood", SubnetManager::Builtin);
    let mut flood = rig.open(1);
    let mut other = rig.open(2);
    let message = flood.message(flood.agent);
    let many = message.repeat(100);
    let sent = softhca_subnet::MAX_RECEIVED + 3000;
    for _ in 0..sent.div_ceil(100) {
        flood.stream.write_all(&many).expect("the daemon reads all the same");
    }
    let full = |server: &SubnetServer| server.state.lock().clients.subnet().dropped(DropReason::QueueFull);
    let until = Instant::now() + LIMIT;
    while full(&rig.server) == 0 {
        assert!(Instant::now() < until, "the queue is not bounded");
        std::thread::yield_now();
    }
    other.asks_its_own_port();
    assert_eq!(flood.receive().expect("what was queued").0.status, 0);
}

#[test]
fn a_request_that_cannot_be_sent_returns_with_the_reason() {
    let rig = Rig::new("agents", SubnetManager::Builtin);
    let mut client = rig.open(1);
    let message = client.message(client.agent + 1);
    client.stream.write_all(&message).expect("room");
    let (header, mad) = client.receive().expect("the request");
    assert_eq!((header.status, header.agent, mad.len()), (22, client.agent + 1, 24));
    let long = [
        &UserMadHeader { agent: client.agent, timeout_ms: 1, ..UserMadHeader::default() }.emit(300)[..],
        &[1; 300],
    ]
    .concat();
    client.stream.write_all(&long).expect("room");
    assert_eq!(client.receive().expect("the request").0.status, 90);
    client.asks_its_own_port();
}

#[test]
fn a_port_has_the_capability_is_sm_while_its_file_is_open() {
    let rig = Rig::new("issm", SubnetManager::None);
    let root = rig.server.create_view(Some("node2")).expect("a view");
    let node = rig.server.hcas(Some("node2")).expect("a host").1[0];
    let await_is_sm = |wanted: bool| {
        let until = Instant::now() + LIMIT;
        let is_sm = || {
            let state = rig.server.state.lock();
            state
                .clients
                .subnet()
                .port_info(PortId { node, port: 1 })
                .capabilities
                .contains(PortCapabilities::SM)
        };
        while is_sm() != wanted {
            assert!(Instant::now() < until, "IsSM does not become {wanted}");
            std::thread::yield_now();
        }
    };
    for _ in 0..3 {
        let file = std::fs::File::open(root.join("dev/infiniband/issm0")).expect("the file");
        await_is_sm(true);
        drop(file);
        await_is_sm(false);
    }
}

#[test]
fn a_view_shows_the_state_of_the_ports() {
    let rig = Rig::new("view", SubnetManager::Builtin);
    let root = rig.server.create_view(Some("node2")).expect("a view");
    let port = root.join("sys/class/infiniband/softhca0/ports/1");
    let text = |name: &str| std::fs::read_to_string(port.join(name)).expect("a file").trim().to_owned();
    assert_eq!(
        [text("state"), text("phys_state"), text("link_layer")],
        ["4: ACTIVE", "5: LinkUp", "InfiniBand"]
    );
    assert_eq!(text("rate"), "100 Gb/sec (4X EDR)");
    assert_ne!(text("lid"), "0x0");
    assert!(text("gids/0").starts_with("fe80:0000:0000:0000:"), "{}", text("gids/0"));
    let node = rig.server.hcas(Some("node2")).expect("a host").1[0];
    rig.server
        .with_clients(|clients| {
            clients.change(|subnet| subnet.apply(PortId { node, port: 1 }, Fault::LinkDown))
        })
        .expect("a link");
    assert_eq!([text("state"), text("phys_state")], ["1: DOWN", "2: Polling"]);
    assert!(root.join("sys/class/infiniband_mad/umad0/ibdev").is_file());
    assert!(rig.server.create_view(Some("node9")).is_err());
}

#[test]
fn settings_are_checked() {
    let read = |text: &str| SubnetConfig::read(text, SubnetManager::None).map(|config| config.name);
    assert_eq!(read("fat-tree:4"), Ok("fat-tree:4".into()));
    assert!(read("fat-tree:5").is_err_and(|why| why.contains("must be even")));
    assert!(read("no-such-file.net").is_err_and(|why| why.contains("fat-tree:PORTS")));
    let path = std::env::temp_dir().join(format!("softhca-topology-{}", std::process::id()));
    std::fs::write(&path, "Switch 2 \"alone\"\n").expect("a folder of ours");
    let text = path.display().to_string();
    assert!(read(&text).is_err_and(|why| why.contains("no HCA")));
    std::fs::write(&path, "Switch 2 \"s\"\n[1] \"a\"[1]\n[1] \"a\"[2]\nHca 2 \"a\"\n")
        .expect("a folder of ours");
    assert!(read(&text).is_err_and(|why| why.contains("line 3, column 5")));
    std::fs::remove_file(path).expect("the file");
}
