use super::*;
use crate::{RoutingEngine, Topology};
use proptest::prelude::*;
use softhca_wire::smp::{Attribute, AttributeId, NodeInfo, SmInfo};

fn clients(topology: &str, has_manager: bool) -> MadClients {
    let mut subnet =
        Subnet::new(Topology::generate(topology).expect("a generator").expect("valid arguments"));
    let port = hca(&subnet, 0);
    let manager = has_manager.then(|| Manager::new(&mut subnet, port, RoutingEngine::MinHop));
    MadClients::new(subnet, manager)
}

fn hca(subnet: &Subnet, index: usize) -> PortId {
    PortId { node: subnet.topology().hcas().nth(index).expect("an HCA"), port: 1 }
}

fn open(clients: &mut MadClients, index: usize) -> ClientId {
    let port = hca(clients.subnet(), index);
    clients.open(port).expect("a port")
}

fn smi(methods: &[u8]) -> Registration {
    let bits = methods.iter().fold(0, |bits, method| bits | 1 << method);
    Registration { mgmt_class: 0x01, class_version: 1, methods: [bits, 0], oui: None, rmpp_version: 0 }
}

fn message(header: UserMadHeader, smp: Smp) -> Vec<u8> {
    [&header.emit(256)[..], &smp.emit()].concat()
}

fn parse(bytes: &[u8]) -> (UserMadHeader, Smp) {
    let (header, mad) = bytes.split_first_chunk().expect("a header");
    (UserMadHeader::parse(header), Smp::parse(mad).expect("an SMP"))
}

#[test]
fn a_response_returns_to_the_agent_that_asked() {
    let mut clients = clients("one-switch", true);
    let id = open(&mut clients, 1);
    let [_, agent] = [0, 1].map(|_| clients.register(id, smi(&[])).expect("an agent"));
    let lid = clients.subnet().port_info(hca(clients.subnet(), 1)).sm_lid;
    let header = UserMadHeader { agent, timeout_ms: 100, lid, ..UserMadHeader::default() };
    let smp = Smp::new(Method::GET, AttributeId::SmInfo, 0, 0x1234_5678_0000_0042);
    clients.send(id, &message(header, smp)).expect("sent");
    let (header, smp) = parse(&clients.next_received(id).expect("a response"));
    assert_eq!((header.agent, header.status, header.lid), (agent, 0, lid));
    assert_eq!(smp.transaction_id as u32, 0x42, "the lower half is the program's");
    assert_ne!(SmInfo::from_block(&smp.data).guid, 0);
    assert_eq!((clients.next_received(id), clients.next_timeout()), (None, None));
}

#[test]
fn a_lost_request_is_sent_again_and_then_fails() {
    let mut clients = clients("one-switch", true);
    let id = open(&mut clients, 1);
    let agent = clients.register(id, smi(&[])).expect("an agent");
    let header =
        UserMadHeader { agent, timeout_ms: 10, retries: 2, lid: Lid(99), ..UserMadHeader::default() };
    clients.send(id, &message(header, Smp::new(Method::GET, AttributeId::NodeInfo, 0, 1))).expect("sent");
    for (time, lost) in [(10, 2), (20, 3), (30, 3)] {
        assert_eq!(clients.next_timeout(), Some(time * MILLISECOND));
        clients.expire(time * MILLISECOND);
        assert_eq!(clients.subnet().dropped(DropReason::NoRoute), lost);
    }
    let bytes = clients.next_received(id).expect("the failed request");
    assert_eq!(bytes.len(), UserMadHeader::LEN + MadHeader::LEN);
    let header = UserMadHeader::parse(bytes.first_chunk().expect("a header"));
    assert_eq!((header.status, header.agent, header.lid), (TIMED_OUT, agent, Lid(99)));
    assert_eq!(clients.next_timeout(), None);
}

#[test]
fn a_request_goes_to_the_agent_with_its_method_and_is_rejected_without_one() {
    let mut clients = clients("one-switch", true);
    let (one, other) = (open(&mut clients, 1), open(&mut clients, 1));
    let manager = clients.register(one, smi(&[1, 2])).expect("an agent");
    assert_eq!(clients.register(other, smi(&[2])), Err(MadError::MethodInUse));
    assert!(clients.register(other, smi(&[5])).is_ok());
    let asker = open(&mut clients, 0);
    let agent = clients.register(asker, smi(&[])).expect("an agent");
    let lid = clients.subnet().port_info(hca(clients.subnet(), 1)).lid;
    let header = UserMadHeader { agent, timeout_ms: 100, lid, ..UserMadHeader::default() };
    let request = message(header, Smp::new(Method::GET, AttributeId::SmInfo, 0, 7));
    clients.send(asker, &request).expect("sent");
    let (header, _) = parse(&clients.next_received(one).expect("the request"));
    assert_eq!(header.agent, manager);
    assert_eq!(clients.readable().count(), 0);

    clients.close(one);
    clients.send(asker, &request).expect("sent");
    let (_, smp) = parse(&clients.next_received(asker).expect("a rejection"));
    assert_eq!((smp.method, smp.status), (Method::GET_RESP, Status::UNSUPPORTED_ATTRIBUTE));
}

#[test]
fn every_limit_holds() {
    let mut clients = clients("one-switch", false);
    let id = open(&mut clients, 0);
    for _ in 0..MAX_AGENTS {
        clients.register(id, smi(&[])).expect("an agent");
    }
    assert_eq!(clients.register(id, smi(&[])), Err(MadError::Limit));
    let header = UserMadHeader { agent: 0, timeout_ms: 100, lid: Lid(5), ..UserMadHeader::default() };
    for id_of_request in 0..MAX_REQUESTS as u64 {
        let smp = Smp::new(Method::GET, AttributeId::NodeInfo, 0, id_of_request);
        clients.send(id, &message(header, smp)).expect("sent");
    }
    let smp = Smp::new(Method::GET, AttributeId::NodeInfo, 0, u64::MAX);
    assert_eq!(clients.send(id, &message(header, smp)), Err(MadError::Limit));
    let long = [&header.emit(257)[..], &[1; 257]].concat();
    assert_eq!(clients.send(id, &long), Err(MadError::TooLong));
    assert_eq!(clients.send(id, &long[..64]), Err(MadError::Invalid));

    for _ in 1..MAX_CLIENTS {
        open(&mut clients, 0);
    }
    let port = hca(clients.subnet(), 0);
    assert_eq!(clients.open(port), Err(MadError::Limit));
    assert_eq!(clients.open(PortId { node: 999, port: 1 }), Err(MadError::Invalid));

    // A program that asks and never reads loses what exceeds its queue.
    let mut own = Smp::new(Method::GET, AttributeId::NodeInfo, 0, 1).directed(&[]);
    clients.unregister(id, 0).expect("an agent");
    clients.register(id, Registration { mgmt_class: 0x81, ..smi(&[]) }).expect("an agent");
    let header = UserMadHeader { lid: Lid::PERMISSIVE, ..header };
    for number in 0..MAX_RECEIVED as u64 + 5 {
        own.transaction_id = number;
        clients.send(id, &message(header, own)).expect("sent");
    }
    assert_eq!(clients.subnet().dropped(DropReason::QueueFull), 5);
    assert_eq!(
        NodeInfo::from_block(&parse(&clients.next_received(id).expect("a response")).1.data).local_port,
        1
    );
}

/// A program at a host, with an agent of subnet administration that takes every method.
fn administration(clients: &mut MadClients, index: usize, rmpp_version: u8) -> (ClientId, u32) {
    let id = open(clients, index);
    let registration =
        Registration { mgmt_class: 0x03, class_version: 2, methods: [!0; 2], oui: None, rmpp_version };
    (id, clients.register(id, registration).expect("an agent"))
}

/// A MAD of subnet administration with this many bytes of records.
fn records(method: u8, transaction: u64, active: bool, records: usize) -> Vec<u8> {
    let mut mad = alloc::vec![0; 56 + records];
    mad[..4].copy_from_slice(&[1, 3, 2, method]);
    mad[8..16].copy_from_slice(&transaction.to_be_bytes());
    mad[26] = active.into();
    mad[56..].iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8);
    mad
}

/// Sends a request of one program to another and its response of `length` bytes of records; returns the two IDs.
fn answer_in_segments(
    clients: &mut MadClients,
    rmpp_version: u8,
    length: usize,
) -> (ClientId, ClientId, Vec<u8>) {
    let (asker, agent) = administration(clients, 1, rmpp_version);
    let (server, server_agent) = administration(clients, 2, 1);
    let lids = [2, 1].map(|index| clients.subnet().port_info(hca(clients.subnet(), index)).lid);
    let to = |agent, lid, timeout_ms, mad: &[u8]| {
        let header =
            UserMadHeader { agent, timeout_ms, lid, qp: 1, q_key: 0x8001_0000, ..UserMadHeader::default() };
        [&header.emit(mad.len())[..], mad].concat()
    };
    clients.send(asker, &to(agent, lids[0], 1000, &records(0x12, 5, false, 200))).expect("sent");
    let request = clients.next_received(server).expect("the request");
    let transaction = u64::from_be_bytes(request[64 + 8..64 + 16].try_into().expect("eight bytes"));
    let response = records(0x92, transaction, true, length);
    clients.send(server, &to(server_agent, lids[1], 0, &response)).expect("sent");
    (asker, server, response)
}

#[test]
fn a_long_response_arrives_in_one_piece() {
    for length in [0, 1, 200, 201, 13_001, 300_000] {
        let mut clients = clients("one-switch:3", true);
        let (asker, server, response) = answer_in_segments(&mut clients, 1, length);
        let received = clients.next_received(asker).expect("the response");
        assert_eq!(received.len(), 64 + response.len(), "{length}");
        assert_eq!(received[64 + 56..], response[56..], "{length}");
        assert!(clients.next_received(asker).is_none() && clients.next_received(server).is_none());
        assert!(!clients.has_timeouts(), "the request and the transfer have ended");
    }
}

#[test]
fn an_agent_without_rmpp_receives_segments() {
    let mut clients = clients("one-switch:3", true);
    let (asker, _, _) = answer_in_segments(&mut clients, 0, 1000);
    let segment = clients.next_received(asker).expect("the first segment");
    assert_eq!((segment.len(), segment[64 + 25], segment[64 + 31]), (320, 1, 1));
    // Nobody acknowledges it, so the sender tries again and then gives up.
    for _ in 0..10 {
        clients.next_timeout().into_iter().for_each(|due| clients.expire(due));
    }
    assert!(!clients.has_timeouts());
}

#[test]
fn a_long_mad_needs_an_agent_with_rmpp() {
    let mut clients = clients("one-switch:3", true);
    let (id, agent) = administration(&mut clients, 1, 0);
    let header = UserMadHeader { agent, qp: 1, q_key: 0x8001_0000, lid: Lid(1), ..UserMadHeader::default() };
    let send =
        |clients: &mut MadClients, mad: &[u8]| clients.send(id, &[&header.emit(mad.len())[..], mad].concat());
    assert_eq!(send(&mut clients, &records(0x92, 1, true, 300)), Err(MadError::TooLong));
    let (id, agent) = administration(&mut clients, 2, 1);
    let header = UserMadHeader { agent, qp: 1, q_key: 0x8001_0000, lid: Lid(9), ..UserMadHeader::default() };
    let send =
        |clients: &mut MadClients, mad: &[u8]| clients.send(id, &[&header.emit(mad.len())[..], mad].concat());
    assert_eq!(send(&mut clients, &records(0x92, 1, false, 300)), Err(MadError::TooLong));
    assert_eq!(send(&mut clients, &records(0x92, 1, true, MAX_MAD)), Err(MadError::TooLong));
    for transaction in 0..MAX_TRANSFERS as u64 {
        assert_eq!(send(&mut clients, &records(0x92, transaction, true, 300)), Ok(()));
    }
    assert_eq!(send(&mut clients, &records(0x92, 99, true, 300)), Err(MadError::Limit));
}

#[test]
fn a_request_that_cannot_be_sent_returns_at_once() {
    let mut clients = clients("one-switch", true);
    let id = open(&mut clients, 1);
    let header = UserMadHeader { agent: 7, timeout_ms: 100, ..UserMadHeader::default() };
    clients.send_or_fail(id, &message(header, Smp::new(Method::GET, AttributeId::NodeInfo, 0, 1)));
    let bytes = clients.next_received(id).expect("the request");
    let header = UserMadHeader::parse(bytes.first_chunk().expect("a header"));
    assert_eq!((header.agent, header.status, bytes.len()), (7, 22, 64 + 24));
    clients.send_or_fail(id, &bytes[..10]);
    assert_eq!(clients.next_received(id), None);
}

proptest! {
    #[test]
    fn no_message_of_a_program_panics(messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..30)) {
        let mut clients = clients("ring:3", true);
        let id = open(&mut clients, 1);
        for class in [0x01, 0x81, 0x03, 0x32] {
            let registration = Registration { mgmt_class: class, class_version: 1, methods: [!0, !0], oui: Some([0; 3]), rmpp_version: 0 };
            clients.register(id, registration).expect("an agent");
        }
        for (round, mut bytes) in messages.into_iter().enumerate() {
            if let Some(agent) = bytes.first_chunk_mut::<4>() {
                *agent = u32::from(agent[0] & 3).to_ne_bytes();
            }
            if bytes.len() > 96 {
                bytes[8..20].fill(1);
                bytes[20..23].fill(0);
                bytes[23] &= 1;
                bytes[64] = 1;
                bytes[66] = 1;
            }
            let _ = clients.send(id, &bytes);
            clients.expire(round as u64 * MILLISECOND);
            while clients.next_received(id).is_some() {}
        }
    }
}
