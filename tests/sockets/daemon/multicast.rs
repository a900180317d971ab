//! Multicast over real sockets: every member on the machine receives a group's packets, in any device and process, except
//! for the queue pair that sent them.

use super::data::DEVICE_LOOPBACK;
use super::process::{Process, TEST_TIMEOUT, TestDaemon, receive_line, send_line, spawn};
use softhca::{
    AccessFlags, AddressVector, CompletionQueue, Context, Device, Gid, MemoryRegion, ProtectionDomain,
    QpType, QueueKey, QueuePair, ReceiveRequest, SendRequest,
};
use softhca_wire::Qpn;
use std::net::{IpAddr, Ipv6Addr};

pub const QUEUE_KEY: QueueKey = QueueKey(0x1122_3344);
const RECEIVE_BYTES: u32 = 40 + 64;

/// A UD queue pair with posted receives.
pub struct GroupMember {
    pub context: Context,
    domain: ProtectionDomain,
    sent: CompletionQueue,
    received: CompletionQueue,
    pub pair: QueuePair,
    region: MemoryRegion,
}

impl GroupMember {
    pub fn new(device: &Device) -> GroupMember {
        let context = device.open();
        let domain = context.allocate_protection_domain().unwrap();
        let [sent, received] = [(); 2].map(|()| context.create_completion_queue(64).unwrap());
        let builder = domain.create_queue_pair(QpType::Ud, &sent).recv_cq(&received);
        let pair = builder.build().unwrap();
        let region = domain.allocate_region(u64::from(17 * RECEIVE_BYTES), AccessFlags::LOCAL_WRITE).unwrap();
        pair.init_ud(QUEUE_KEY).unwrap();
        for id in 0..16 {
            let scatter = [region.sge(id * u64::from(RECEIVE_BYTES), RECEIVE_BYTES)];
            pair.post_recv(&ReceiveRequest { wr_id: id, sg_list: &scatter }).unwrap();
        }
        pair.start_ud(QUEUE_KEY).unwrap();
        GroupMember { context, domain, sent, received, pair, region }
    }

    fn member(device: &Device, group: Gid) -> GroupMember {
        let party = GroupMember::new(device);
        party.pair.attach_multicast(group).unwrap();
        party
    }

    fn send(&self, group: Gid, text: &str) {
        self.send_to(group, Qpn::MULTICAST, text);
    }

    pub fn send_to(&self, gid: Gid, qpn: Qpn, text: &str) {
        let source_index = self.context.gid_index_for(gid);
        let vector = AddressVector { sgid_index: source_index, ..AddressVector::to(gid) };
        let handle = self.domain.create_address_handle(vector).unwrap();
        let at = 16 * u64::from(RECEIVE_BYTES);
        self.region.write_at(at, text.as_bytes());
        let gather = [self.region.sge(at, text.len() as u32)];
        self.pair.post_send(&SendRequest::send(99, &gather).ud_address(&handle, qpn, QUEUE_KEY)).unwrap();
        let completion = self.sent.wait_for(TEST_TIMEOUT).expect("the send completes");
        assert!(completion.wr_id == 99 && completion.status.is_success(), "{completion:?}");
    }

    /// The next datagram.
    pub fn receive(&self) -> String {
        let completion = self.received.wait_for(TEST_TIMEOUT).expect("a datagram");
        assert!(completion.status.is_success() && completion.opcode.is_receive(), "{completion:?}");
        let bytes = self
            .region
            .read_at(completion.wr_id * u64::from(RECEIVE_BYTES) + 40, u64::from(completion.byte_len) - 40);
        String::from_utf8(bytes).unwrap()
    }
}

/// A group that no other test uses.
fn group(number: u8) -> Gid {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Gid::from(IpAddr::from([239, 128 | number, high, low]))
}

/// A member in a separate process, on an embedded or a daemon device. Prints every datagram.
pub fn run_member() {
    let device = match std::env::var("TEST_HOST").as_deref() {
        Ok(host) => Device::daemon_host(None, Some(host)).unwrap(),
        Err(_) => Device::embedded().unwrap(),
    };
    let group: Ipv6Addr = std::env::var("TEST_GROUP").unwrap().parse().unwrap();
    let party = GroupMember::member(&device, Gid(group.octets()));
    send_line("member");
    for _ in 0..2 {
        send_line(&party.receive());
    }
    while receive_line().is_some() {}
}

fn spawn_member(daemon: &str, host: Option<&str>, group: Gid) -> Process {
    let text = Ipv6Addr::from(group.0).to_string();
    let mut variables = vec![("TEST_GROUP", text.as_str())];
    variables.extend(host.map(|host| ("TEST_HOST", host)));
    let mut process = spawn("member", daemon, &variables);
    assert_eq!(process.receive_line(), "member");
    process
}

#[test]
fn every_member_except_the_sender_receives_a_packet() {
    let devices = [(); 3].map(|()| Device::embedded().unwrap());
    let group = group(0);
    let sender = GroupMember::member(&devices[0], group);
    let neighbor = GroupMember::member(&devices[0], group);
    let others = [GroupMember::member(&devices[1], group), GroupMember::member(&devices[2], group)];
    let mut stranger = spawn_member("none", None, group);
    sender.send(group, "one");
    others[0].send(group, "two");
    // The sender's queue pair receives the other's packet only; another one on the same device receives both.
    assert_eq!(sender.receive(), "two");
    for member in [&neighbor, &others[1]] {
        assert_eq!([member.receive(), member.receive()], ["one", "two"]);
    }
    assert_eq!(others[0].receive(), "one");
    assert_eq!([stranger.receive_line(), stranger.receive_line()], ["one", "two"]);
}

#[test]
fn a_detached_member_receives_nothing() {
    let device = Device::embedded().unwrap();
    let (first, second) = (group(1), group(2));
    let sender = GroupMember::new(&Device::embedded().unwrap());
    let detached = GroupMember::member(&device, first);
    detached.pair.attach_multicast(second).unwrap();
    let stayer = GroupMember::member(&device, first);
    sender.send(first, "both");
    assert_eq!([detached.receive(), stayer.receive()], ["both", "both"]);
    detached.pair.detach_multicast(first).unwrap();
    assert!(detached.pair.detach_multicast(first).is_err(), "it has already detached");
    sender.send(first, "stayer");
    assert_eq!(stayer.receive(), "stayer");
    drop(stayer);
    // The first group is empty; the second still works.
    sender.send(first, "nobody");
    sender.send(second, "second");
    assert_eq!(detached.receive(), "second");
    // A member that attaches again receives later packets.
    detached.pair.attach_multicast(first).unwrap();
    sender.send(first, "again");
    assert_eq!(detached.receive(), "again");
}

#[test]
pub fn groups_reach_the_clients_of_a_daemon_and_other_processes() {
    check_group_delivery(&TestDaemon::start(), group(3));
}

#[test]
fn groups_reach_the_clients_of_a_host_with_internal_loopback() {
    check_group_delivery(&TestDaemon::with(&DEVICE_LOOPBACK), group(4));
}

fn check_group_delivery(daemon: &TestDaemon, group: Gid) {
    let mut members = [
        spawn_member(&daemon.name, Some("alice"), group),
        spawn_member(&daemon.name, Some("alice"), group),
        spawn_member(&daemon.name, Some("bob"), group),
        spawn_member("none", None, group),
    ];
    let sender = GroupMember::member(&daemon.open("alice"), group);
    let other_process = GroupMember::member(&Device::embedded().unwrap(), group);
    sender.send(group, "from alice");
    assert_eq!(other_process.receive(), "from alice");
    other_process.send(group, "from other_process");
    assert_eq!(sender.receive(), "from other_process");
    for member in &mut members {
        assert_eq!([member.receive_line(), member.receive_line()], ["from alice", "from other_process"]);
    }
}

#[test]
fn non_multicast_gids_are_rejected() {
    let daemon = TestDaemon::start();
    for device in [Device::embedded().unwrap(), daemon.open("alice")] {
        let party = GroupMember::new(&device);
        let error = party.pair.attach_multicast(Gid::from(IpAddr::from([10, 0, 0, 1]))).unwrap_err();
        assert!(error.to_string().contains("multicast"), "{error}");
    }
}

#[test]
fn a_group_with_an_ipv6_address_reaches_cards_with_ipv4_addresses() {
    let daemon = TestDaemon::start();
    let group = Ipv6Addr::new(0xff01, 0, 0, 0x2c9, 0x8500, 0, std::process::id() as u16, 7);
    let group = Gid(group.octets());
    let sender = GroupMember::new(&Device::embedded().unwrap());
    let members =
        [Device::embedded().unwrap(), daemon.open("alice")].map(|device| GroupMember::member(&device, group));
    sender.send(group, "one");
    for member in &members {
        assert_eq!(member.receive(), "one");
        member.pair.detach_multicast(group).unwrap();
        assert!(member.pair.detach_multicast(group).is_err(), "it is not a member any more");
    }
}
