//! A peer that behaves as Linux rxe does: it counts IPv4 identifications up, and its link control port is closed.

use crate::loopback::harness::{Application, Host, QUARTER, RIGHTS, Recorder, drive, free_address};
use softhca_engine::{AddressVector, Event, Instant, ModifyQp, QpState, QpType, Recovery, Settings};
use softhca_fabric::{EventSink, NetworkEvent};
use softhca_types::{Operation, RemoteAddress, SendImmOrInvalidate};
use softhca_udp::{
    Driver, DriverOptions, HostSockets, Loopback, PeerPort, PeerState, SlotGroup, SocketOptions,
    wait_readable,
};
use softhca_wire::{
    AddressHeaders, Bth, Gid, ICRC_LEN, Icrc, Mtu, Opcode, Psn, Qpn, QpnSlot, ROCE_PORT, TransportHeader,
};
use std::net::{IpAddr, UdpSocket};
use std::sync::{Arc, Mutex};

/// The QPN of the foreign peer.
const PEER_QP: Qpn = Qpn::new(0x11);
/// Fewer polls than those in which a silent peer becomes foreign: each counts at most 200 ms of three seconds.
const POLLS: usize = 14;

struct ForeignPeer {
    socket: UdpSocket,
    address: IpAddr,
    next_identification: u16,
    next_psn: Psn,
}

impl ForeignPeer {
    fn new() -> ForeignPeer {
        let address = free_address();
        let socket = UdpSocket::bind((address, ROCE_PORT)).unwrap();
        socket.set_nonblocking(true).unwrap();
        ForeignPeer { socket, address, next_identification: 40_000, next_psn: Psn::new(0) }
    }

    /// Sends an unreliable message of eight bytes.
    fn send(&mut self, to: IpAddr, qp: Qpn) {
        let send_only = Opcode::all().find(|opcode| opcode.to_string() == "UC SEND_ONLY").unwrap();
        let mut packet = [7; Bth::LEN + 8 + ICRC_LEN];
        TransportHeader::new(Bth::new(send_only, qp, self.next_psn)).emit(&mut packet);
        let mut addressing = AddressHeaders::between(self.address, to);
        (addressing.source_port, addressing.identification) = (ROCE_PORT, self.next_identification);
        Icrc::write(&addressing, &mut packet);
        self.socket.send_to(&packet, (to, ROCE_PORT)).unwrap();
        self.next_identification += 1;
        self.next_psn = self.next_psn.plus(1);
    }

    fn has_received(&self) -> bool {
        self.socket.recv(&mut [0; 4096]).is_ok()
    }
}

#[test]
fn the_first_packets_of_a_foreign_peer_are_received() {
    const MESSAGES: u64 = 8;
    let mut peer = ForeignPeer::new();
    let mut host = Host::new(Loopback::Socket, Recovery::Fatal);
    let mut pair = host.application.add_pair(&mut host.driver, QpType::Uc);
    let modify = ModifyQp::default();
    let receive = modify
        .state(QpState::ReadyToReceive)
        .address_vector(AddressVector::to(Gid::from(peer.address)))
        .path_mtu(Mtu::B1024)
        .dest_qpn(PEER_QP)
        .rq_psn(Psn::new(0));
    let init = modify.state(QpState::Init).pkey_index(0).port(1).access_flags(RIGHTS);
    let client = host.application.client;
    for step in [init, receive] {
        host.driver.control(|hca, ctx| hca.modify_queue_pair(ctx, client, pair.qp, &step).unwrap());
    }
    for id in 0..MESSAGES {
        host.application.receive(&mut pair, id, QUARTER, 64);
        peer.send(host.driver.address(), pair.qp);
    }
    assert_eq!(host.driver.links().state(peer.address.into()), None, "not known before its first packet");
    let received = host.completions(MESSAGES as usize);
    assert!(received.iter().map(|(_, id, _)| *id).eq(0..MESSAGES), "{received:?}");
    assert_eq!(host.driver.hca().counters().rx_icrc_encapsulated, 0);
}

/// Records the recovery modes of queue pairs.
#[derive(Clone, Default)]
struct RecoveryRecorder(Arc<Mutex<Vec<Recovery>>>);

impl EventSink for RecoveryRecorder {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Hca { event: Event::QpConfigured { configuration, .. }, .. } = event {
            self.0.lock().unwrap().push(configuration.recovery);
        }
    }
}

#[test]
fn every_process_of_a_host_detects_a_foreign_peer_by_itself() {
    let peer = ForeignPeer::new();
    let address = free_address();
    let slot_0 = HostSockets::bind(address, SocketOptions::default()).unwrap();
    let mut group = SlotGroup::new(&slot_0, SocketOptions::default()).unwrap();
    let slot = QpnSlot { number: 1, bits: QpnSlot::BITS };
    let sockets = HostSockets::adopt(group.slot(slot.number).unwrap().descriptors().unwrap()).unwrap();
    // Its socket is the newest. The kernel gives it the errors that concern the shared ports.
    group.add_slot().unwrap();
    let settings = Settings {
        qpn_slot: slot,
        recovery: Recovery::Fatal,
        foreign_recovery: Recovery::GoBackN,
        ..Settings::default()
    };
    let recoveries = RecoveryRecorder::default();
    let options = DriverOptions { settings, loopback: Loopback::Internal, ..DriverOptions::default() };
    let mut driver = Driver::new(sockets, options, Box::new(recoveries.clone()));
    let application = Application::open(&mut driver);
    let mut pair = application.add_pair(&mut driver, QpType::Rc);
    application.connect(&mut driver, &pair, peer.address, PEER_QP);
    application.post(&mut pair, 1, Operation::Send(SendImmOrInvalidate::None), 0, 64);
    let mut polls = 0;
    while !peer.has_received() {
        assert!(polls < POLLS, "{:?}", driver.links().state(peer.address.into()));
        polls += 1;
        driver.poll().unwrap();
        wait_readable(&driver.descriptors(), driver.next_timeout()).unwrap();
    }
    assert_eq!(driver.links().state(peer.address.into()), Some(PeerState::Foreign));
    assert_eq!(*recoveries.0.lock().unwrap(), [Recovery::Fatal, Recovery::Fatal, Recovery::GoBackN]);
}

/// The driver of a slot of a host, and the memory and queues of its application.
fn host_in_slot(sockets: HostSockets, number: u16) -> Host {
    let qpn_slot = QpnSlot { number, bits: QpnSlot::BITS };
    let settings = Settings { qpn_slot, ..Settings::default() };
    let options = DriverOptions { settings, loopback: Loopback::Internal, ..DriverOptions::default() };
    let recorder = Recorder::default();
    let mut driver = Driver::new(sockets, options, Box::new(recorder.clone()));
    let application = Application::open(&mut driver);
    Host { driver, application, recorder }
}

#[test]
fn a_process_that_asks_from_its_own_socket_finds_a_native_peer() {
    let [mut near, mut far] = [(); 2].map(|()| {
        let slot_0 = HostSockets::bind(free_address(), SocketOptions::default()).unwrap();
        let group = SlotGroup::new(&slot_0, SocketOptions::default()).unwrap();
        let slot_1 = HostSockets::adopt(group.slot(1).unwrap().descriptors().unwrap()).unwrap();
        (group, host_in_slot(slot_0, 0), host_in_slot(slot_1, 1))
    });
    let [mut from, to] = [&mut near, &mut far].map(|(_, _, host)| host.add_pair());
    let addresses = [&near, &far].map(|(_, _, host)| host.driver.address());
    near.2.connect(&from, addresses[1], to.qp);
    far.2.connect(&to, addresses[0], from.qp);
    let remote = RemoteAddress { address: QUARTER, rkey: far.2.application.key };
    near.2.fill(0, 64, 5);
    near.2.application.post(&mut from, 1, Operation::Write { remote, imm_data: None }, 0, 64);
    let mut completion = None;
    drive(&mut [&mut near.1, &mut near.2, &mut far.1, &mut far.2], |hosts| {
        completion = hosts[1].application.completions.pop();
        completion.is_some()
    });
    assert!(completion.unwrap().status.is_success());
    assert!(far.2.holds(QUARTER, 64, 5));
    for slot in [0, 1] {
        let peer = PeerPort { address: addresses[1], slot };
        assert_eq!(near.2.driver.links().state(peer), Some(PeerState::Alive), "slot {slot}");
    }
}
