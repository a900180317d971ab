//! A mistake has the same error value on every back end: embedded, simulated and in a daemon.

use super::process::TestDaemon;
use softhca::cm::{ConnectionParameters, EventChannel, PortSpace};
use softhca::{
    AccessFlags, AddressVector, CmId, ConnectOptions, Device, Error, Gid, ModifyQp, Mtu, Psn, QpState,
    QpType, Qpn, QueueKey, ReceiveRequest, SendRequest, VerbsError, sim::World,
};
use std::net::IpAddr;

/// The error without the numbers that an HCA chooses.
fn normalized(mut error: Error) -> String {
    match &mut error {
        Error::InvalidState { qpn, .. }
        | Error::Verbs(
            VerbsError::InvalidTransition { qpn, .. } | VerbsError::InvalidAttributes { qpn, .. },
        ) => *qpn = Qpn::new(0),
        Error::Verbs(VerbsError::InvalidCmState { id, .. }) => *id = CmId(0),
        Error::Verbs(VerbsError::NotFound { number, .. } | VerbsError::Busy { number, .. }) => *number = 0,
        _ => {}
    }
    format!("{error:?}: {error}")
}

/// Makes mistakes on a device, and returns their errors in order.
fn mistakes(device: &Device) -> Vec<String> {
    let mut errors = Vec::new();
    let mut record = |result: Result<(), Error>| match result {
        Err(Error::DaemonRejected { errno, message }) => panic!("not an error of a verb: {errno}, {message}"),
        Err(error) => errors.push(normalized(error)),
        Ok(()) => panic!("mistake {} succeeds", errors.len()),
    };
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let cq = context.create_completion_queue(16).unwrap();
    for cqe in [0, 1 << 22] {
        record(context.create_completion_queue(cqe).map(|_| ()));
        record(cq.resize(cqe));
    }
    let qp = |qp_type| domain.create_queue_pair(qp_type, &cq);
    for builder in [
        qp(QpType::Rc).max_send_wr(1 << 20),
        qp(QpType::Rc).max_recv_wr(1 << 20),
        qp(QpType::Rc).max_send_sge(33),
        qp(QpType::Rc).max_recv_sge(33),
        qp(QpType::Rc).max_inline_data(1025),
    ] {
        record(builder.build().map(|_| ()));
    }
    record(domain.create_shared_receive_queue(0, 1).map(|_| ()));
    record(domain.create_shared_receive_queue(8, 33).map(|_| ()));
    let srq = domain.create_shared_receive_queue(8, 1).unwrap();
    record(srq.set_limit(9));
    record(qp(QpType::Uc).shared_receive_queue(&srq).build().map(|_| ()));
    record(domain.allocate_region(64, AccessFlags::REMOTE_WRITE).map(|_| ()));

    let (rc, ud) = (qp(QpType::Rc).build().unwrap(), qp(QpType::Ud).build().unwrap());
    let modify = ModifyQp::default();
    let init = modify.state(QpState::Init).pkey_index(0).port(1).access_flags(AccessFlags::empty());
    record(rc.modify(&modify.state(QpState::ReadyToSend)).map(|_| ()));
    record(rc.modify(&modify.state(QpState::Init)).map(|_| ()));
    record(rc.modify(&init.qkey(QueueKey(1))).map(|_| ()));
    record(rc.modify(&init.port(2)).map(|_| ()));
    rc.modify(&init).unwrap();
    let peer = AddressVector::to(Gid::from(device.address()));
    for address_vector in [
        AddressVector::to(Gid::default()),
        AddressVector { sgid_index: 200, ..peer },
        AddressVector::to(Gid::from("fd00::1".parse::<IpAddr>().unwrap())),
    ] {
        let rtr = modify.state(QpState::ReadyToReceive).dest_qpn(Qpn::new(7)).rq_psn(Psn::new(0));
        let rtr = rtr.max_dest_rd_atomic(1).min_rnr_timer(softhca::RnrTimer::new(1)).path_mtu(Mtu::B256);
        record(rc.modify(&rtr.address_vector(address_vector)).map(|_| ()));
        record(domain.create_address_handle(address_vector).map(|_| ()));
    }
    let group = Gid::from("239.1.2.3".parse::<IpAddr>().unwrap());
    record(rc.attach_multicast(group));
    record(ud.attach_multicast(Gid::from(device.address())));
    record(ud.detach_multicast(group));

    let (send, receive) = (SendRequest::send(1, &[]), ReceiveRequest { wr_id: 1, sg_list: &[] });
    let fresh = qp(QpType::Rc).max_send_wr(1).max_recv_wr(1).build().unwrap();
    record(fresh.post_send(&send));
    record(fresh.post_recv(&receive));
    fresh.modify(&init).unwrap();
    record(fresh.post_send(&send));
    record(fresh.post_send_list(&[send, send]));
    fresh.post_recv(&receive).unwrap();
    record(fresh.post_recv(&receive));
    record(fresh.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[softhca::Sge::default(); 5] }));
    fresh.connect(&fresh.endpoint(), &ConnectOptions::default()).unwrap();
    record(fresh.post_send(&SendRequest::send(1, &[]).inline_data(&[0; 65])));
    record(srq.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[softhca::Sge::default(); 2] }));

    let channel = EventChannel::new(&context).unwrap();
    let id = || channel.create_id(PortSpace::Tcp).unwrap();
    record(id().connect(&ConnectionParameters::default()));
    record(id().accept(&ConnectionParameters::default()));
    record(id().listen(1).and_then(|()| id().disconnect()));
    record(id().bind("10.9.9.9:1".parse().unwrap()));
    record(id().resolve_address(None, "[fd00::1]:1".parse().unwrap()));
    let listener = id();
    listener.bind("0.0.0.0:7471".parse().unwrap()).unwrap();
    listener.listen(1).unwrap();
    record(id().bind("0.0.0.0:7471".parse().unwrap()));
    errors
}

#[test]
fn the_same_mistake_is_the_same_error_on_every_back_end() {
    let daemon = TestDaemon::start();
    let in_daemon = mistakes(&daemon.open("alice"));
    let embedded = mistakes(&Device::embedded().unwrap());
    let simulated = mistakes(&World::new(1).device("alice"));
    assert_eq!(in_daemon, embedded);
    assert_eq!(simulated, embedded);
}
