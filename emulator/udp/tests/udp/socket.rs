//! Sockets over loopback.

use softhca_udp::{
    BindError, HostSockets, MAX_BATCH_BYTES, NetworkError, NetworkErrorCause, PortOwner, ReceiveBatch,
    RoceSocket, Segmentation, SendError, SocketOptions, Waker, charge, raw, wait_readable,
};
use softhca_wire::{AddressHeaders, Bth, ICRC_LEN, Icrc};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

fn open(address: IpAddr, segmentation: Segmentation) -> RoceSocket {
    let options = SocketOptions { segmentation, ..SocketOptions::default() };
    RoceSocket::bind(SocketAddr::new(address, 0), options).expect("a free port of a loopback address")
}

/// A loopback address that no other test uses.
fn loopback(last: u8) -> IpAddr {
    Ipv4Addr::new(127, 91, std::process::id() as u8, last).into()
}

/// Receives until `count` datagrams have arrived.
fn collect(socket: &RoceSocket, count: usize) -> Vec<(SocketAddr, u8, Vec<u8>)> {
    let mut batch = ReceiveBatch::new();
    let mut datagrams = Vec::new();
    while datagrams.len() < count {
        wait_readable(&[socket.as_fd()], None).expect("the socket can be polled");
        socket.receive(&mut batch).expect("the socket can be read");
        datagrams.extend(batch.datagrams().map(|d| (d.source, d.traffic_class, d.bytes.to_vec())));
    }
    datagrams
}

/// Sends a batch of `segments` packets of `size` bytes with ICRCs and verifies each at the receiver.
fn check_batch_arrives_with_icrcs(
    from: IpAddr,
    to: IpAddr,
    segmentation: Segmentation,
    size: usize,
    segments: usize,
) {
    let (mut sender, receiver) = (open(from, segmentation), open(to, segmentation));
    let addressing = |index| AddressHeaders {
        source_port: sender.local_address().port(),
        identification: sender.identification(index),
        ..AddressHeaders::between(from, to)
    };
    let last = Bth::LEN + ICRC_LEN;
    let mut batch = vec![0; (segments - 1) * size + last];
    for (index, packet) in batch.chunks_mut(size).enumerate() {
        packet.fill(index as u8);
        Icrc::write(&addressing(index), packet);
    }
    let addressings: Vec<AddressHeaders> = (0..segments).map(addressing).collect();
    let sent =
        sender.send_batch_to(receiver.local_address(), 0x6a, size, &batch).expect("loopback accepts a batch");
    assert_eq!(sent, segments);
    let datagrams = collect(&receiver, segments);
    assert_eq!(datagrams.len(), segments);
    for (index, (source, class, bytes)) in datagrams.iter().enumerate() {
        assert_eq!((*source, *class), (sender.local_address(), 0x6a));
        assert_eq!(bytes.len(), if index + 1 == segments { last } else { size });
        let (transport, icrc) = Icrc::split(bytes).expect("long enough");
        assert_eq!(transport[0], index as u8, "datagrams arrive in order");
        assert_eq!(icrc, Icrc::compute(&addressings[index], transport));
    }
}

#[test]
fn batch_arrives_as_datagrams_with_traffic_class_and_icrc() {
    for segmentation in [Segmentation::Gso, Segmentation::PerDatagram] {
        for (size, segments) in [(64, 64), (1082, 60), (4154, 15), (4154, 2)] {
            check_batch_arrives_with_icrcs(loopback(2), loopback(3), segmentation, size, segments);
        }
    }
}

#[test]
fn batch_arrives_over_ipv6() {
    let here = IpAddr::V6(Ipv6Addr::LOCALHOST);
    if RoceSocket::bind(SocketAddr::new(here, 0), SocketOptions::default()).is_err() {
        eprintln!("skipped: this machine has no ::1");
        return;
    }
    for segmentation in [Segmentation::Gso, Segmentation::PerDatagram] {
        check_batch_arrives_with_icrcs(here, here, segmentation, 4154, 15);
    }
}

/// Reads the identification that the kernel wrote, where raw sockets are allowed.
#[test]
#[cfg(target_os = "linux")]
fn kernel_writes_the_predicted_identification() {
    use socket2::{Domain, Protocol, Socket, Type};
    use std::io::Read;
    let to = loopback(5);
    let Ok(mut raw) = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP)) else {
        eprintln!("skipped: raw sockets need CAP_NET_RAW");
        return;
    };
    raw.bind(&SocketAddr::new(to, 0).into()).expect("a raw socket on loopback");
    for (segmentation, expected) in [(Segmentation::Gso, [0, 1, 2]), (Segmentation::PerDatagram, [0, 0, 0])] {
        let (mut sender, receiver) = (open(loopback(4), segmentation), open(to, segmentation));
        sender.send_batch_to(receiver.local_address(), 0, 100, &[7; 300]).expect("loopback accepts a batch");
        let mut seen = Vec::new();
        while seen.len() < 3 {
            let mut packet = [0; 65_536];
            let len = raw.read(&mut packet).expect("the raw socket can be read");
            let port = u16::from_be_bytes([packet[20], packet[21]]);
            if port == sender.local_address().port() {
                assert_eq!(packet[6] & 0x40, 0x40, "DF is set");
                let id = u16::from_be_bytes([packet[4], packet[5]]);
                // Loopback does not split a batch; its identification is that of the first segment.
                seen.extend((0..(len - 28) / 100).map(|segment| id + segment as u16));
            }
        }
        assert_eq!(seen, expected);
    }
}

#[test]
fn closed_port_is_reported_with_its_peer() {
    let mut sender = open(loopback(6), Segmentation::Gso);
    let receiver = open(loopback(7), Segmentation::Gso);
    let [closed, live] = [open(loopback(8), Segmentation::Gso).local_address(), receiver.local_address()];
    sender.send_batch_to(closed, 0, 64, &[0; 64]).expect("the port is not known to be closed");
    let ready = wait_readable(&[sender.as_fd()], None).expect("the socket can be polled");
    assert!(ready.error(0));
    // The error of one peer does not affect another.
    sender.send_batch_to(live, 0, 64, &[1; 128]).expect("the other port is open");
    assert_eq!(collect(&receiver, 2).len(), 2);
    let expected = NetworkError { peer: Some(closed), cause: NetworkErrorCause::PortUnreachable };
    assert_eq!(sender.poll_error().expect("the error queue can be read"), Some(expected));
    assert_eq!(sender.poll_error().expect("the error queue can be read"), None);
    let mut batch = ReceiveBatch::new();
    sender.receive(&mut batch).expect("an old error does not fail a receive");
    assert!(batch.is_empty());
}

#[test]
fn datagram_larger_than_the_path_mtu_is_rejected_with_the_mtu() {
    let mut sender = open(loopback(9), Segmentation::Gso);
    let receiver = open(loopback(10), Segmentation::Gso);
    let result =
        sender.send_batch_to(receiver.local_address(), 0, MAX_BATCH_BYTES, &vec![0; MAX_BATCH_BYTES]);
    if result.is_ok() {
        eprintln!("skipped: loopback accepts every datagram; try in a namespace with a smaller MTU");
        return;
    }
    assert!(matches!(result, Err(SendError::TooLarge)));
    let error =
        sender.poll_error().expect("the error queue can be read").expect("the error queue has an entry");
    assert!(matches!(error.cause, NetworkErrorCause::TooLarge { mtu: 1..65_535 }), "{error:?}");
}

#[test]
fn bind_error_names_the_owner_of_the_address() {
    let address = loopback(11);
    let host = HostSockets::bind(address, SocketOptions::default()).expect("the address is free");
    assert_eq!(host.address(), address);
    match HostSockets::bind(address, SocketOptions::default()) {
        Err(BindError::InUse { owner: PortOwner::Process { id, .. }, .. }) => {
            assert_eq!(id, std::process::id())
        }
        other => panic!("the second bind gave {other:?}"),
    }
    drop(host);
    HostSockets::bind(address, SocketOptions::default()).expect("the address is free again");
}

#[test]
fn hosts_bind_the_first_free_addresses() {
    let [first, second] =
        [(); 2].map(|()| softhca_udp::bind_host(SocketOptions::default()).expect("a free address"));
    assert!(first.address() < second.address());
    assert!(first.address() >= IpAddr::from([127, 0, 0, 2]));
}

#[test]
fn waker_ends_a_wait_once() {
    let waker = Waker::new().expect("a waker can be created");
    let idle = |timeout| wait_readable(&[waker.as_fd()], Some(timeout)).expect("a waker can be polled");
    assert!(idle(Duration::ZERO).is_empty());
    waker.wake();
    waker.wake();
    assert!(idle(Duration::from_secs(60)).readable(0));
    waker.clear();
    assert!(idle(Duration::from_micros(1)).is_empty());
}

#[test]
fn overflow_of_a_receive_buffer_is_counted() {
    let mut sender = open(loopback(12), Segmentation::PerDatagram);
    let options = SocketOptions { receive_buffer: 4096, ..SocketOptions::default() };
    let receiver = RoceSocket::bind(SocketAddr::new(loopback(13), 0), options).expect("a free port");
    for _ in 0..100 {
        sender
            .send_batch_to(receiver.local_address(), 0, 1024, &[0; 1024])
            .expect("the sender gets no error");
    }
    let memory = receiver.receive_memory().expect("SO_MEMINFO can be read");
    assert_eq!(memory.limit as usize, receiver.receive_buffer());
    assert!(memory.dropped > 0);
}

#[test]
#[cfg(target_os = "linux")]
fn kernel_charges_no_more_than_assumed() {
    for host in [loopback(14), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        if RoceSocket::bind(SocketAddr::new(host, 0), SocketOptions::default()).is_err() {
            eprintln!("skipped: this machine has no {host}");
            continue;
        }
        let boundaries = [16, 197, 198, 645, 646, 1669, 1670, 3717, 3718];
        for len in boundaries.into_iter().chain((20..=4224).step_by(61)) {
            for segments in [1, 2, 7, RoceSocket::max_batch_segments(len)] {
                let charged = raw::measure_charge(host, len, segments).expect("loopback accepts a batch");
                let assumed = charge(len, segments);
                assert!(charged <= assumed, "{segments} of {len} B to {host}: {charged}, not {assumed}");
            }
        }
    }
}
