//! A peer that behaves as Linux rxe does, on a network on which the kernel limits its ICMP errors: it counts IPv4
//! identifications up, and has no link control port.

use super::Role;
use libtest_mimic::Trial;
use softhca::{ConnectOptions, Device, EmbeddedOptions, Endpoint, QpType, ReceiveRequest, SendRequest};
use softhca_tests::process::{self, Process, TEST_TIMEOUT, receive_line, send_line};
use softhca_tests::{namespace, tools};
use softhca_wire::{
    AddressHeaders, Bth, Gid, ICRC_LEN, Icrc, Mtu, Opcode, Psn, Qpn, ROCE_PORT, TransportHeader,
};
use std::net::{IpAddr, UdpSocket};
use std::process::Command;

/// More programs than the kernel answers at once. It sends six errors to a host, then one per second.
const PROGRAMS: usize = 10;
/// Fewer questions than those after which a silent peer counts as foreign: two differ by at most 100 ms of three seconds.
const MAX_QUESTIONS: u64 = 25;
/// Messages of the peer before the program sends its first.
const MESSAGES: u64 = 8;
const PEER_QP: Qpn = Qpn::new(0x11);

pub const ROLES: &[Role] = &[("programs and rxe", run_programs), ("program", run_program), ("rxe", run_peer)];

pub fn trials() -> Vec<Trial> {
    vec![tools::needs_namespace("programs_one_after_another_find_a_peer_that_behaves_as_rxe", || {
        Process::start(&mut process::command(namespace::wrapper().unwrap(), "programs and rxe")).finish();
    })]
}

fn address(host: u8) -> IpAddr {
    IpAddr::from([10, 77, 0, host])
}

fn ip(arguments: &str) {
    assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
}

/// Each is a process of its own, which knows nothing of what those before it found out.
fn run_programs() {
    let mut peer = Process::start(&mut process::command(&["unshare", "--net"], "rxe"));
    assert_eq!(peer.receive_line(), "here");
    ip("link add alice0 type veth peer name bob0");
    ip(&format!("link set bob0 netns {}", peer.id()));
    ip("link set alice0 up");
    ip("addr add 10.77.0.1/24 dev alice0");
    peer.send_line("the link is up");
    for _ in 0..PROGRAMS {
        let mut program = Process::start(&mut process::command(&[], "program"));
        peer.send_line(&program.receive_line());
        assert_eq!(peer.receive_line(), "sent");
        program.send_line("go");
        let questions: u64 = peer.receive_line().parse().unwrap();
        assert!((1..MAX_QUESTIONS).contains(&questions), "{questions} questions");
        program.finish();
    }
    peer.send_line("end");
    peer.finish();
}

fn run_program() {
    let options = EmbeddedOptions { address: Some(address(1)), ..EmbeddedOptions::default() };
    let context = Device::embedded_with(options).unwrap().open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(32).unwrap();
    let region = domain.allocate_region(4096, softhca::AccessFlags::LOCAL_WRITE).unwrap();
    let pair = domain.create_queue_pair(QpType::Uc, &queue).build().unwrap();
    let path = ConnectOptions { path_mtu: Mtu::B1024, ..ConnectOptions::default() };
    pair.init(&path).unwrap();
    for id in 0..MESSAGES {
        pair.post_recv(&ReceiveRequest { wr_id: id, sg_list: &[region.sge(0, 64)] }).unwrap();
    }
    let peer = Endpoint { gid: Gid::from(address(2)), qpn: PEER_QP, psn: Psn::new(0) };
    pair.connect(&peer, &path).unwrap();
    send_line(&pair.endpoint().qpn.value().to_string());
    for id in 0..MESSAGES {
        let completion = queue.wait_for(TEST_TIMEOUT).expect("a message");
        assert!(completion.status.is_success() && completion.wr_id == id, "{completion:?}");
    }
    assert_eq!(context.counters().rx_icrc_encapsulated, 0);
    assert_eq!(receive_line().unwrap(), "go");
    pair.post_send(&SendRequest::send(9, &[region.sge(0, 64)])).unwrap();
    assert!(queue.wait_for(TEST_TIMEOUT).expect("a completion").status.is_success());
}

/// Datagrams to closed ports, here those that ask for link control.
fn questions() -> u64 {
    let text = std::fs::read_to_string("/proc/net/snmp").unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let names = lines.next().unwrap().split(' ');
    let mut values = names.zip(lines.next().unwrap().split(' '));
    values.find(|(name, _)| *name == "NoPorts").unwrap().1.parse().unwrap()
}

fn run_peer() {
    send_line("here");
    assert_eq!(receive_line().unwrap(), "the link is up");
    ip("link set bob0 up");
    ip("addr add 10.77.0.2/24 dev bob0");
    let socket = UdpSocket::bind((address(2), ROCE_PORT)).unwrap();
    socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let send_only = Opcode::all().find(|opcode| opcode.to_string() == "UC SEND_ONLY").unwrap();
    // They wrap while the programs run.
    let mut identification = u16::MAX - 20;
    let mut asked = 0;
    while let Some(line) = receive_line().filter(|line| line != "end") {
        let qp = Qpn::new(line.parse().unwrap());
        for psn in 0..MESSAGES as u32 {
            let mut packet = [7; Bth::LEN + 8 + ICRC_LEN];
            TransportHeader::new(Bth::new(send_only, qp, Psn::new(psn))).emit(&mut packet);
            let mut addressing = AddressHeaders::between(address(2), address(1));
            (addressing.source_port, addressing.identification) = (ROCE_PORT, identification);
            Icrc::write(&addressing, &mut packet);
            socket.send_to(&packet, (address(1), ROCE_PORT)).unwrap();
            identification = identification.wrapping_add(1);
        }
        send_line("sent");
        socket.recv(&mut [0; 2048]).expect("the first packet of the program");
        let before = std::mem::replace(&mut asked, questions());
        send_line(&(asked - before).to_string());
    }
}
