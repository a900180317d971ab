//! The same on real cards, with calls that wait.

use softhca::cm::{ConnectionParameters, Endpoint, EventType, Hints, address_info, create_endpoint};
use softhca::{AccessFlags, Device, Error, ReceiveRequest, SendRequest};

#[test]
fn real_cards_connect_with_blocking_calls_and_endpoints() {
    let [server, client] = [(); 2].map(|()| Device::embedded().unwrap().open());
    let hints = Hints { passive: true, ..Hints::default() };
    let info = address_info(&server, None, "7471", &hints).unwrap();
    let listening = create_endpoint(&server, &info, 8).unwrap();
    listening.id.listen(0).unwrap();
    let address = server.address().to_string();
    let serving = std::thread::spawn(move || {
        let endpoint = Endpoint::from_request(listening.id.get_request()?, 8)?;
        let region = endpoint.protection_domain.allocate_region(16, AccessFlags::LOCAL_WRITE)?;
        let pair = endpoint.queue_pair.as_ref().expect("a connection has one");
        pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[region.sge(0, 16)] })?;
        endpoint.id.accept(&ConnectionParameters::default())?;
        assert_eq!(endpoint.recv_cq.wait()?.byte_len, 3);
        assert_eq!(region.read_at(0, 3), b"abc");
        endpoint.id.channel().wait()?.expect(EventType::Disconnected)?;
        endpoint.id.disconnect().or(Ok::<(), Error>(()))
    });
    let info = address_info(&client, Some(&address), "7471", &Hints::default()).unwrap();
    let endpoint = create_endpoint(&client, &info, 8).unwrap();
    endpoint.id.connect(&ConnectionParameters::default()).unwrap();
    let pair = endpoint.queue_pair.as_ref().unwrap();
    pair.post_send(&SendRequest::send(1, &[]).inline_data(b"abc")).unwrap();
    assert!(endpoint.send_cq.wait().unwrap().status.is_success());
    endpoint.id.disconnect().unwrap();
    serving.join().unwrap().unwrap();
}

#[test]
fn an_address_without_a_card_is_unreachable_at_once() {
    let context = Device::embedded().unwrap().open();
    let endpoint = |port: &str| {
        let info = address_info(&context, Some("127.0.0.253"), port, &Hints::default()).unwrap();
        create_endpoint(&context, &info, 8).unwrap()
    };
    let error = endpoint("7471").id.connect(&ConnectionParameters::default()).unwrap_err();
    assert!(matches!(error, Error::Connection { kind: EventType::Unreachable, .. }), "{error}");
}
