//! Hosts with non-loopback addresses, in a network namespace: both IP versions, the MTU of the interface, the second
//! GID, the source port of flows.

use super::Role;
use libtest_mimic::Trial;
use softhca::{
    AccessFlags, AddressVector, ConnectOptions, Context, Device, EmbeddedOptions, Entropy, Mtu, QpType, Qpn,
    QueueKey, QueuePair, ReceiveRequest, SendRequest,
    fault::Stage,
    trace::{EventSink, NetworkEvent},
};
use softhca_engine::Instant;
use softhca_tests::tools;
use softhca_wire::{AddressHeaders, Gid};
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const QUEUE_KEY: QueueKey = QueueKey(0x1234);
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(60);

/// Three addresses of each IP version on an interface with the given MTU. Loopback needs a route for IPv6 multicast.
const NETWORK_SETUP: &str = "ip link set lo mtu \"$MTU\" up && \
    for n in 1 2 3; do ip addr add 10.77.0.$n/24 dev lo; ip -6 addr add fd77::$n/128 dev lo nodad; done && \
    ip -6 route add local ff00::/8 dev lo && \
    exec \"$0\"";

/// The roles of this binary inside the namespace.
pub const ROLES: &[Role] =
    &[("both", both_versions), ("jumbo", jumbo_frames), ("entropy", entropy), ("flow-label", flow_label)];

pub fn trials() -> Vec<Trial> {
    vec![
        tools::needs("unshare", "a_host_on_a_network_has_two_gids_and_its_mtu", || run("both", 1500)),
        tools::needs("unshare", "jumbo_frames_carry_the_largest_packets", || run("jumbo", 9000)),
        tools::needs("unshare", "with_entropy_flows_leave_from_ports_of_their_own", || run("entropy", 1500)),
        tools::needs("unshare", "the_flow_label_of_an_address_vector_is_that_of_its_packets", || {
            run("flow-label", 1500)
        }),
    ]
}

/// Runs this program in a role, in a namespace.
fn run(role: &str, mtu: u32) {
    let mut command = Command::new("unshare");
    command
        .args(["--map-root-user", "--net", "sh", "-c", NETWORK_SETUP])
        .arg(std::env::current_exe().unwrap());
    let output = command.env("SOFTHCA_TEST_ROLE", role).env("MTU", mtu.to_string()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

type SharedAddressing = Arc<Mutex<Vec<AddressHeaders>>>;

/// Records the address headers of sent packets.
struct AddressingSink(SharedAddressing);

impl EventSink for AddressingSink {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Frame { stage: Stage::Admitted, addressing, .. } = *event {
            self.0.lock().unwrap().push(*addressing);
        }
    }
}

fn open_device(address: &str, ipv6: Option<&str>, entropy: Entropy) -> (Device, SharedAddressing) {
    let seen = SharedAddressing::default();
    let options = EmbeddedOptions {
        address: Some(address.parse().unwrap()),
        ipv6: ipv6.map(|ipv6| ipv6.parse().unwrap()),
        entropy,
        event_sink: Box::new(AddressingSink(seen.clone())),
        ..EmbeddedOptions::default()
    };
    (Device::embedded_with(options).unwrap(), seen)
}

fn gid(text: &str) -> Gid {
    Gid::from(text.parse::<IpAddr>().unwrap())
}

/// Writes and reads 10,000 bytes from one context to another, over their GIDs at `index`.
fn transfer(from: &Context, to: &Context, index: u8, mtu: Mtu) -> QueuePair {
    let rights = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let make = |context: &Context| {
        let domain = context.allocate_protection_domain().unwrap();
        let queue = context.create_completion_queue(16).unwrap();
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build().unwrap();
        (domain.allocate_region(20_000, rights).unwrap(), queue, pair)
    };
    let (source, queue, sender) = make(from);
    let (target, _, receiver) = make(to);
    let path = ConnectOptions { path_mtu: mtu, ..ConnectOptions::default() };
    sender.connect(&receiver.endpoint_with_gid_index(index).unwrap(), &path).unwrap();
    receiver.connect(&sender.endpoint_with_gid_index(index).unwrap(), &path).unwrap();
    let bytes: Vec<u8> = (0..10_000u32).map(|n| (n % 251) as u8).collect();
    source.write_at(0, &bytes);
    sender
        .post_send(&SendRequest::rdma_write(1, &[source.sge(0, 10_000)], target.remote_address(7)))
        .unwrap();
    sender
        .post_send(&SendRequest::rdma_read(2, &[source.sge(10_000, 10_000)], target.remote_address(7)))
        .unwrap();
    for id in [1, 2] {
        let completion = queue.wait_for(COMPLETION_TIMEOUT).expect("a completion");
        assert!(completion.wr_id == id && completion.status.is_success(), "{completion:?}");
    }
    assert_eq!(target.read_at(7, 10_000), bytes);
    assert_eq!(source.read_at(10_000, 10_000), bytes);
    sender
}

fn both_versions() {
    // The first uses the address of its interface, the second the next free one, the third a configured one.
    let (first, seen) = open_device("10.77.0.1", None, Entropy::Off);
    let (second, _) = open_device("10.77.0.2", None, Entropy::Off);
    let ipv6 = first.open().gid(1).expect("the interface has an IPv6 address");
    let free = if ipv6 == gid("fd77::1") { "fd77::2" } else { "fd77::1" };
    let (third, _) = open_device("10.77.0.3", Some(free), Entropy::Off);
    for device in [&first, &second, &third] {
        assert_eq!(device.port_attributes().active_mtu, Mtu::B1024);
        assert_eq!(device.port_attributes().max_mtu, Mtu::B4096);
    }
    let [first, second, third] = [first, second, third].map(|device| device.open());
    assert_eq!(first.gid(0), Some(gid("10.77.0.1")));
    assert!(ipv6.to_string().starts_with("fd77::"), "{ipv6}");
    assert_eq!((second.gid(0), second.gid(1)), (Some(gid("10.77.0.2")), Some(gid("fe80::5efe:a4d:2"))));
    assert_eq!((third.gid(2), third.gid(3)), (Some(gid("fe80::5efe:a4d:3")), None));
    assert_eq!((third.gid(0), third.gid(1)), (Some(gid("10.77.0.3")), Some(gid(free))));
    for (index, source) in [(0, gid("10.77.0.1")), (1, ipv6)] {
        seen.lock().unwrap().clear();
        transfer(&first, &third, index, Mtu::B1024);
        let seen = seen.lock().unwrap();
        assert!(!seen.is_empty() && seen.iter().all(|addressing| Gid::from(addressing.source) == source));
        assert!(seen.iter().all(|addressing| addressing.source_port == 4791));
    }
    transfer(&second, &first, 0, Mtu::B512);
    // A path MTU above that of the interface is rejected with the limit.
    let domain = first.allocate_protection_domain().unwrap();
    let queue = first.create_completion_queue(4).unwrap();
    let pair = domain.create_queue_pair(QpType::Rc, &queue).build().unwrap();
    let error = pair
        .connect(&pair.endpoint(), &ConnectOptions { path_mtu: Mtu::B2048, ..ConnectOptions::default() })
        .unwrap_err();
    assert!(error.to_string().contains("1024"), "{error}");
}

fn jumbo_frames() {
    let (first, _) = open_device("10.77.0.1", Some("fd77::1"), Entropy::Off);
    let (second, _) = open_device("10.77.0.2", Some("fd77::2"), Entropy::Off);
    assert_eq!(first.port_attributes().active_mtu, Mtu::B4096);
    let [first, second] = [first.open(), second.open()];
    transfer(&first, &second, 0, Mtu::B4096);
    transfer(&first, &second, 1, Mtu::B4096);
    for group in ["239.7.7.7", "ff15::7"] {
        multicast(&first, &second, gid(group));
    }
}

/// Sends a datagram of maximum size from one device to a group with a member on each.
fn multicast(from: &Context, to: &Context, group: Gid) {
    let make = |context: &Context| {
        let domain = context.allocate_protection_domain().unwrap();
        let queue = context.create_completion_queue(16).unwrap();
        let pair = domain.create_queue_pair(QpType::Ud, &queue).build().unwrap();
        let region = domain.allocate_region(40 + 4096, AccessFlags::LOCAL_WRITE).unwrap();
        pair.start_ud(QUEUE_KEY).unwrap();
        (domain, region, queue, pair)
    };
    let sender = make(from);
    let members = [make(from), make(to)];
    for (_, region, _, pair) in &members {
        pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[region.sge(0, 40 + 4096)] }).unwrap();
        pair.attach_multicast(group).unwrap();
    }
    let (domain, region, queue, pair) = &sender;
    let source_index = from.gid_index_for(group);
    let vector = AddressVector { sgid_index: source_index, ..AddressVector::to(group) };
    let handle = domain.create_address_handle(vector).unwrap();
    let bytes: Vec<u8> = (0..4096u32).map(|n| (n % 253) as u8).collect();
    region.write_at(0, &bytes);
    let gather = [region.sge(0, 4096)];
    let send = SendRequest::send(2, &gather).ud_address(&handle, Qpn::MULTICAST, QUEUE_KEY);
    pair.post_send(&send).unwrap();
    assert!(queue.wait_for(COMPLETION_TIMEOUT).expect("a completion").status.is_success());
    for (_, region, queue, _) in &members {
        let completion = queue.wait_for(COMPLETION_TIMEOUT).expect("a datagram");
        assert!(completion.wr_id == 1 && completion.byte_len == 40 + 4096, "{completion:?}");
        assert_eq!(region.read_at(40, 4096), bytes);
    }
}

/// Sends datagrams with flow labels to a plain socket, which sees the label of each packet.
fn flow_label() {
    let peer = UdpSocket::bind("[fd77::3]:4791").unwrap();
    receive_flow_labels(&peer);
    let (device, _) = open_device("10.77.0.1", Some("fd77::1"), Entropy::Off);
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(16).unwrap();
    let pair = domain.create_queue_pair(QpType::Ud, &queue).build().unwrap();
    pair.start_ud(QUEUE_KEY).unwrap();
    let region = domain.allocate_region(64, AccessFlags::LOCAL_WRITE).unwrap();
    let gather = [region.sge(0, 64)];
    for label in [0xabcde, 1, 0xf_ffff] {
        let to = gid("fd77::3");
        let vector = AddressVector { sgid_index: 1, flow_label: label, ..AddressVector::to(to) };
        let handle = domain.create_address_handle(vector).unwrap();
        pair.post_send(&SendRequest::send(1, &gather).ud_address(&handle, Qpn::new(5), QUEUE_KEY)).unwrap();
        assert!(queue.wait_for(COMPLETION_TIMEOUT).expect("a completion").status.is_success());
        assert_eq!(next_flow_label(&peer), label);
    }
}

#[allow(unsafe_code)]
fn receive_flow_labels(socket: &UdpSocket) {
    socket.set_read_timeout(Some(COMPLETION_TIMEOUT)).unwrap();
    let on: libc::c_int = 1;
    let length = size_of_val(&on) as libc::socklen_t;
    let descriptor = socket.as_raw_fd();
    // SAFETY: the value outlives the call and has the given length.
    let result = unsafe {
        let value = std::ptr::from_ref(&on).cast();
        libc::setsockopt(descriptor, libc::IPPROTO_IPV6, libc::IPV6_FLOWINFO, value, length)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// The flow label of the next datagram.
#[allow(unsafe_code)]
fn next_flow_label(socket: &UdpSocket) -> u32 {
    let mut bytes = [0u8; 2048];
    let mut control = [0u64; 32];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: a message header is pointers, which may be null, and integers.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&mut part, 1);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control) as _);
    // SAFETY: the header points to buffers of their true lengths, which outlive the call.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut header, 0) };
    assert!(received > 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel has filled the control messages; the data of a flow label has four bytes.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(&header);
        while !at.is_null() {
            if ((*at).cmsg_level, (*at).cmsg_type) == (libc::IPPROTO_IPV6, libc::IPV6_FLOWINFO) {
                let value: u32 = std::ptr::read_unaligned(libc::CMSG_DATA(at).cast());
                return u32::from_be(value) & 0xf_ffff;
            }
            at = libc::CMSG_NXTHDR(&header, at);
        }
    }
    panic!("a datagram without a flow label")
}

fn entropy() {
    let (first, seen) = open_device("10.77.0.1", Some("fd77::1"), Entropy::On);
    let (second, _) = open_device("10.77.0.2", Some("fd77::2"), Entropy::On);
    let [first, second] = [first.open(), second.open()];
    for index in [0, 1] {
        let mut ports = Vec::new();
        for _ in 0..3 {
            seen.lock().unwrap().clear();
            let _pair = transfer(&first, &second, index, Mtu::B1024);
            let seen = seen.lock().unwrap();
            let port = seen[0].source_port;
            assert!(port >= 0xc000 && seen.iter().all(|addressing| addressing.source_port == port));
            ports.push(port);
        }
        ports.dedup();
        assert!(ports.len() > 1, "different queue pairs are different flows: {ports:?}");
    }
}
