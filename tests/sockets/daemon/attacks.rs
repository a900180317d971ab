//! Attacks by other users of the machine and by processes of the same user. Others continue to work.

use super::data::{ALL_ACCESS, ConnectedHost, every_operation};
use super::direct::{DIRECT, datagram};
use super::hostile_clients::RawClient;
use super::multicast::GroupMember;
use super::process::{TEST_TIMEOUT, TestDaemon, receive_line, send_line, spawn};
use softhca::{DaemonControl, Device};
use softhca_control::{FramedMessage, RegionBacking, Request, Response, RuntimeDir, encode, send_message};
use softhca_types::Command;
use softhca_udp::{RoceSocket, SocketOptions};
use softhca_wire::cm::{Datagram, Req};
use softhca_wire::{
    AddressHeaders, Bth, Deth, ICRC_LEN, Icrc, ImmOrInvalidate, Opcode, Operation, Position, Psn, Qpn,
    QueueKey, ROCE_PORT, Service, TransportHeader,
};
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

/// A socket at an address that no other test uses.
fn bind_sender(number: u8) -> RoceSocket {
    let [.., high, low] = std::process::id().to_be_bytes();
    let own = IpAddr::from([127, 216 | high & 7, low, number]);
    RoceSocket::bind(SocketAddr::new(own, 0), SocketOptions::default()).unwrap()
}

/// A REQ to the process in a slot, with further bytes, from the BTH to the ICRC.
fn padded_request(from: SocketAddr, to: IpAddr, slot: u16, length: usize) -> Vec<u8> {
    let opcode = Opcode::new(Service::Ud, Operation::Send, Position::Only, ImmOrInvalidate::None);
    let mut header = TransportHeader::new(Bth::new(opcode.unwrap(), Qpn::GSI, Psn::new(0)));
    header.deth = Some(Deth { qkey: QueueKey::GSI, source_qp: Qpn::GSI });
    let mut bytes = vec![0; Bth::LEN + Deth::LEN];
    header.emit(&mut bytes);
    let mut datagram = Datagram::new(1, Req::default());
    datagram.set_listener_slot(slot);
    bytes.extend(datagram.emit());
    bytes.resize(length + ICRC_LEN, 0);
    let addressing = AddressHeaders { source_port: from.port(), ..AddressHeaders::between(from.ip(), to) };
    Icrc::write(&addressing, &mut bytes);
    bytes
}

/// A process hands packets for the daemon over to it. Their bytes are bounded.
#[test]
fn long_datagrams_of_others_do_not_end_the_device_of_a_process() {
    let daemon = TestDaemon::with(&DIRECT);
    let member = GroupMember::new(&daemon.open("alice"));
    let (to, qpn) = (daemon.control().hosts()[0].address, member.pair.endpoint().qpn);
    let mut socket = bind_sender(1);
    let own = socket.local_address();
    let target = SocketAddr::new(to, ROCE_PORT);
    let slot = (qpn.value() >> 15) as u16;
    for round in 0..8 {
        // The receive buffer holds only so many. The batches of the process take them before it reports.
        for _ in 0..8 {
            let request = padded_request(own, to, slot, 60_000);
            socket.send_batch_to(target, 0, request.len(), &request).unwrap();
        }
        let text = format!("m{round:03}");
        let last = datagram(own, to, qpn, &text);
        socket.send_batch_to(target, 0, last.len(), &last).unwrap();
        assert_eq!(member.receive(), text);
    }
    // The process answers over the connection on which it handed packets over.
    daemon.wait_until("the report of the process", |status| {
        status.hosts[0].clients.iter().any(|client| !client.resources.is_empty())
    });
    assert_eq!(member.context.poll_async_event(), None);
}

/// A TCP socket whose close waits for its peer, which reads nothing. The second is the peer.
fn lingering_socket() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 65_536]).is_ok() {}
    let hour = Some(Duration::from_secs(3600));
    rustix::net::sockopt::set_socket_linger(&socket, hour).unwrap();
    (socket.into(), peer)
}

/// The daemon closes the sockets: with a message that is not complete, and with two that need no descriptor.
#[test]
fn a_descriptor_whose_close_takes_long_does_not_stop_the_daemon() {
    let mut daemon = TestDaemon::start();
    let mut peers = Vec::new();
    for round in 0..3 {
        let mut raws = Vec::new();
        for kind in 0..3 {
            let (socket, peer) = lingering_socket();
            peers.push(peer);
            let mut raw = RawClient::handshaken(&daemon);
            let file = Some(RegionBacking::MemoryFile);
            let command = Command::AllocateProtectionDomain;
            let request = match kind {
                2 => Request::Execute { command, backing: file, call_site: None },
                _ => Request::Status,
            };
            if kind == 2 {
                raw.call(&Request::Open { host: Some("alice".into()), can_be_direct: round == 0 }, &[]);
            }
            // The copy of the daemon is the last one when it has the whole message.
            let frame = FramedMessage::frame(&encode(&request), 1);
            send_message(raw.stream.as_fd(), &frame[..5], 0, &[socket.as_fd()]).unwrap();
            drop(socket);
            if kind > 0 {
                send_message(raw.stream.as_fd(), &frame[5..], 0, &[]).unwrap();
            }
            raws.push(raw);
        }
        drop(raws);
        assert_eq!(daemon.control().status().unwrap().hosts.len(), 2);
        every_operation(&daemon, "alice", "bob");
    }
    daemon.control().stop().unwrap();
    assert!(daemon.process.wait().success());
}

/// Connections that send nothing end when others need their place.
#[test]
fn silent_connections_do_not_keep_commands_out() {
    let daemon = TestDaemon::with(&[("TEST_CLIENTS", "4")]);
    let socket = RuntimeDir::for_user().socket(&daemon.name);
    // A process may have ten, and the daemon 20.
    let mut others = [(); 2].map(|()| spawn("silent", &daemon.name, &[]));
    others.iter_mut().for_each(|other| assert_eq!(other.receive_line(), "connected"));
    let silent: Vec<_> = (0..10).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    drop(silent);
    // The daemon notices in its own time that the connections of this process ended.
    let deadline = Instant::now() + TEST_TIMEOUT;
    let mut control = loop {
        match DaemonControl::connect(Some(&daemon.name)) {
            Ok(control) => break control,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::yield_now();
    };
    assert_eq!(control.status().unwrap().hosts.len(), 2);
    let _device = daemon.open("alice").open();
    daemon.control().stop().unwrap();
}

#[test]
fn a_connection_without_a_greeting_ends() {
    let daemon = TestDaemon::start();
    let mut greeted = RawClient::handshaken(&daemon);
    assert!(RawClient::connect(&daemon.name).frame().is_none());
    // One with a greeting stays, however long it sends nothing else.
    assert!(matches!(greeted.call(&Request::Status, &[]).0, Response::Status(_)));
}

/// A process with as many silent connections as it may have.
pub fn run_silent() {
    let socket = RuntimeDir::for_user().socket(&std::env::var("SOFTHCA_DAEMON").unwrap());
    let _silent: Vec<_> = (0..10).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    // The daemon has accepted them when it answers a later one.
    send_line("connected");
    while receive_line().is_some() {}
}

/// The threads and the open files of a process.
fn resources(pid: u32) -> [usize; 2] {
    ["task", "fd"].map(|kind| std::fs::read_dir(format!("/proc/{pid}/{kind}")).unwrap().count())
}

#[test]
fn many_devices_leave_nothing_behind_in_the_daemon() {
    const DEVICES: usize = 40;
    let daemon = TestDaemon::with(&[DIRECT[0], ("TEST_CLIENTS", "200")]);
    drop(daemon.open("alice").open());
    let before = resources(daemon.process.id());
    let devices: Vec<_> = (0..DEVICES).map(|_| daemon.open("alice")).collect();
    let contexts: Vec<_> = devices.iter().map(|device| device.open()).collect();
    assert!(resources(daemon.process.id())[1] > before[1] + 2 * DEVICES);
    drop((contexts, devices));
    // The RoCE and the link control socket of each slot stay: a slot is a position among the sockets of the address.
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        let [threads, files] = resources(daemon.process.id());
        // Threads of the control plane stay for a while.
        if threads < before[0] + DEVICES / 2 && files <= before[1] + 2 * DEVICES {
            break;
        }
        assert!(Instant::now() < deadline, "{before:?} before, {threads} threads and {files} files after");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A process with registered memory, for which the library handles SIGSEGV, as a C program has it.
#[allow(unsafe_code)]
pub fn run_signalled() {
    // SAFETY: no handler is installed. That of Rust programs takes the first signal for a fault.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
    let end = ConnectedHost::new(&Device::daemon_host(None, Some("alice")).unwrap(), 4096);
    send_line("ready");
    while receive_line().is_some() {}
    drop(end);
}

#[test]
fn a_sent_sigsegv_ends_a_program_at_once() {
    let daemon = TestDaemon::with(&DIRECT);
    let mut process = spawn("signalled", &daemon.name, &[]);
    assert_eq!(process.receive_line(), "ready");
    let pid = rustix::process::Pid::from_raw(process.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::SEGV).unwrap();
    assert_eq!(process.wait().signal(), Some(libc::SIGSEGV));
}

#[test]
fn memory_that_the_system_does_not_have_is_a_rejected_call() {
    let daemon = TestDaemon::with(&DIRECT);
    let direct = daemon.open("alice").open();
    let embedded = Device::embedded().unwrap().open();
    for context in [&direct, &embedded] {
        let domain = context.allocate_protection_domain().unwrap();
        // A system that always overcommits has it.
        if let Err(error) = domain.allocate_region(1 << 40, ALL_ACCESS) {
            assert_eq!(error.errno(), libc::ENOMEM, "{error}");
        }
        domain.allocate_region(4096, ALL_ACCESS).unwrap();
    }
}
