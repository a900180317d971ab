use super::*;
use softhca_udp::{ReceiveBatch, RoceSocket, bind_free_host};
use softhca_wire::cm::{CommunicationId, Req};
use softhca_wire::{
    AddressHeaders, Bth, Deth, ICRC_LEN, ImmOrInvalidate, Opcode, Operation, Position, Psn, Qpn, QueueKey,
    Service, TransportHeader,
};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// A REQ to the process in a slot, from a process whose communication IDs belong to slot 1.
fn request(slot: u16, source: SocketAddr, destination: IpAddr) -> HandedOverPacket {
    let opcode = Opcode::new(Service::Ud, Operation::Send, Position::Only, ImmOrInvalidate::None);
    let mut header = TransportHeader::new(Bth::new(opcode.unwrap(), Qpn::GSI, Psn::new(0)));
    header.deth = Some(Deth { qkey: QueueKey::GSI, source_qp: Qpn::GSI });
    let local_id = CommunicationId(1 << (32 - QpnSlot::BITS));
    let mut bytes = vec![0; Bth::LEN + Deth::LEN];
    header.emit(&mut bytes);
    bytes.extend(Datagram::new(1, Req { local_id, ..Req::default() }).emit());
    bytes.extend([0; ICRC_LEN]);
    Icrc::write(&AddressHeaders::between(source.ip(), destination), &mut bytes);
    HandedOverPacket { slot, source, destination, traffic_class: 0, bytes }
}

fn new_slots() -> (HostSockets, Arc<HostSlots>) {
    let sockets = bind_free_host(SocketOptions::default()).unwrap();
    let recordings = Recordings::new(Arc::default());
    let settings = Settings::default();
    let slots = HostSlots::new(&sockets, settings, Loopback::Internal, HostId(0), None, &recordings);
    (sockets, slots.unwrap())
}

/// The datagrams that wait in the first of a slot's sockets.
fn count_received(descriptors: io::Result<Vec<OwnedFd>>) -> usize {
    let socket = RoceSocket::adopt(descriptors.unwrap().remove(0)).unwrap();
    let mut batch = ReceiveBatch::new();
    socket.receive(&mut batch).unwrap();
    batch.chunks().count()
}

#[test]
fn a_port_that_other_hosts_may_ask_is_not_ended_in_advance() {
    let (_sockets, slots) = new_slots();
    let assign = || slots.assign(&Arc::default(), 1).unwrap().unwrap().lease;
    let prepared = || slots.table.lock().prepared.as_ref().map(|slot| slot.number);
    let mut leases: Vec<SlotLease> = (0..FRESH_SLOTS).map(|_| assign()).collect();
    let (mut first, second) = (leases.remove(0), leases.remove(0));
    let (first_number, second_number) = (first.slot.number, second.slot.number);
    first.has_sent_to_hosts = true;
    drop(first);
    slots.prepare_next();
    assert_eq!(prepared(), None);
    drop(second);
    slots.prepare_next();
    assert_eq!(prepared(), Some(second_number));
    assert_eq!((assign().slot.number, assign().slot.number), (second_number, first_number));
}

#[test]
fn a_process_gets_nothing_that_waited_in_the_sockets_of_its_slot() {
    let (sockets, slots) = new_slots();
    let sender = std::net::UdpSocket::bind((sockets.address(), 0)).unwrap();
    let send = || {
        let bytes = request(1, sender.local_addr().unwrap(), sockets.address()).bytes;
        // The attribute modifier has the slot.
        let at = PacketTarget::LISTENER_SLOT_OFFSET;
        let bytes = [&bytes[..at], &1_u32.to_be_bytes(), &bytes[at + 4..]].concat();
        sender.send_to(&bytes, (sockets.address(), ROCE_PORT)).unwrap();
    };
    send();
    let AssignedSlot { lease, page: _page, .. } = slots.assign(&Arc::default(), 1).unwrap().unwrap();
    assert_eq!(lease.slot.number, 1);
    assert_eq!(count_received(lease.descriptors()), 0);
    // A packet to the process arrives.
    send();
    assert_eq!(count_received(lease.descriptors()), 1);
}

#[test]
fn a_packet_that_is_longer_than_the_largest_is_not_handed_over() {
    let (sockets, slots) = new_slots();
    let queue = Arc::<NotificationQueue>::default();
    let lease = slots.assign(&queue, 1).unwrap().unwrap().lease;
    let source = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), 7);
    let good = request(lease.slot.number, source, sockets.address());
    let long = HandedOverPacket { bytes: vec![0; HandedOverPacket::MAX_BYTES + 1], ..good.clone() };
    let count = HandedOverPacket::MAX_IN_MESSAGE + 1;
    slots.hand_over([vec![long], vec![good; count]].concat());
    let counts = queue.drain().unwrap().into_iter().map(|notification| match notification {
        Notification::PacketsHandedOver { packets } => packets.len(),
        other => panic!("{other:?}"),
    });
    assert_eq!(counts.collect::<Vec<_>>(), [count - 1, 1]);
}

#[test]
fn a_request_within_a_host_comes_with_rings() {
    let (sockets, slots) = new_slots();
    let own = SocketAddr::new(sockets.address(), ROCE_PORT);
    let queues = [(); 2].map(|()| Arc::<NotificationQueue>::default());
    let leases = queues.each_ref().map(|queue| slots.assign(queue, 1).unwrap().unwrap().lease);
    let drain = |number: usize| Vec::from(queues[number].drain().unwrap());
    let hand_over = |source| {
        let packets = vec![request(leases[1].slot.number, source, own.ip())];
        assert_eq!(slots.hand_over(packets.clone()), []);
        Notification::PacketsHandedOver { packets }
    };
    // Another host uses the same numbers.
    let foreign = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), ROCE_PORT);
    let handed_over = hand_over(foreign);
    assert_eq!((drain(0), drain(1)), (vec![], vec![handed_over]));
    let handed_over = hand_over(own);
    let opened = [1, 0].map(|peer: usize| Notification::RingsOpened { slot: leases[peer].slot.number });
    assert_eq!((drain(0), drain(1)), (vec![opened[0].clone()], vec![opened[1].clone(), handed_over]));
    let handed_over = hand_over(own);
    assert_eq!((drain(0), drain(1)), (vec![], vec![handed_over]), "they exist");
    assert_eq!(leases[1].open_rings(leases[0].slot.number).unwrap().len(), 3);
    assert_eq!(drain(0), []);
}

#[test]
fn a_process_cannot_take_the_slots_of_others() {
    let (_sockets, slots) = new_slots();
    let assign = |pid| slots.assign(&Arc::default(), pid).unwrap();
    let mut own: Vec<_> = std::iter::from_fn(|| assign(1)).collect();
    assert_eq!(own.len(), PROCESS_SLOTS);
    let other = assign(2).expect("another process has slots");
    own.pop();
    assert!(assign(1).is_some() && assign(2).is_some());
    drop(other);
}

#[test]
fn a_slot_is_closed_when_nobody_needs_its_port_and_opens_for_the_next_process() {
    let (sockets, slots) = new_slots();
    let leases: Vec<_> =
        (0..FRESH_SLOTS).map(|_| slots.assign(&Arc::default(), 1).unwrap().unwrap()).collect();
    let first = leases[0].lease.slot.number;
    drop(leases);
    assert_eq!(slots.table.lock().vacant.len(), FRESH_SLOTS);
    slots.end_vacant();
    assert_eq!(slots.table.lock().vacant.len(), 0, "no other host needs them");
    // Slot 0 gets what is sent to a closed slot.
    let sender = std::net::UdpSocket::bind((sockets.address(), 0)).unwrap();
    let mut packet = request(first, sender.local_addr().unwrap(), sockets.address()).bytes;
    let at = PacketTarget::LISTENER_SLOT_OFFSET;
    packet[at..at + 4].copy_from_slice(&u32::from(first).to_be_bytes());
    let send = || sender.send_to(&packet, (sockets.address(), ROCE_PORT)).unwrap();
    send();
    assert_eq!(count_received(sockets.descriptors()), 1);
    let lease = slots.assign(&Arc::default(), 1).unwrap().unwrap().lease;
    assert_eq!(lease.slot.number, first);
    send();
    assert_eq!((count_received(sockets.descriptors()), count_received(lease.descriptors())), (0, 1));
}

/// The owner of a slot cannot give the packets of others to itself through its own sockets.
#[test]
#[allow(unsafe_code)]
fn the_sockets_of_a_slot_take_no_steering_filter() {
    use std::os::fd::AsRawFd;
    let (_sockets, slots) = new_slots();
    let lease = slots.assign(&Arc::default(), 1).unwrap().unwrap().lease;
    // Returns 1, the slot of the owner.
    let mut filter = [libc::sock_filter { code: libc::BPF_RET as u16, jt: 0, jf: 0, k: 1 }];
    let program = libc::sock_fprog { len: 1, filter: filter.as_mut_ptr() };
    for descriptor in lease.descriptors().unwrap() {
        for option in [libc::SO_ATTACH_REUSEPORT_CBPF, libc::SO_ATTACH_FILTER] {
            let (value, size) = ((&raw const program).cast(), size_of_val(&program) as libc::socklen_t);
            // SAFETY: the kernel copies the program, which outlives the call and has the stated length.
            let result =
                unsafe { libc::setsockopt(descriptor.as_raw_fd(), libc::SOL_SOCKET, option, value, size) };
            assert_eq!((result, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EPERM)));
        }
    }
}
