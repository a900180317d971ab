//! Identifiers and the ports that they are bound to.

use softhca::cm::{ConnectionParameters, EventChannel, EventType, PortSpace};
use softhca::sim::World;

#[test]
fn ports_belong_to_the_host() {
    let mut world = World::new(1);
    let context = world.device("host").open();
    let channel = EventChannel::new(&context).unwrap();
    let address = "0.0.0.0:7174".parse().unwrap();
    let first = channel.create_id(PortSpace::Tcp).unwrap();
    first.bind(address).unwrap();
    let second = channel.create_id(PortSpace::Tcp).unwrap();
    let error = second.bind(address).unwrap_err();
    assert_eq!(error.to_string(), "port 7174 of the tcp port space is in use on this host");
    assert_eq!(error.errno(), 98);
    channel.create_id(PortSpace::Udp).unwrap().bind(address).unwrap();
    drop(first);
    second.bind(address).unwrap();
    let foreign = channel.create_id(PortSpace::Tcp).unwrap();
    assert_eq!(foreign.bind("10.9.9.9:1".parse().unwrap()).unwrap_err().errno(), 99);
    assert_eq!(foreign.resolve_address(None, "[fd00::1]:1".parse().unwrap()).unwrap_err().errno(), 101);
    assert_eq!(foreign.connect(&ConnectionParameters::default()).unwrap_err().errno(), 22);
}

#[test]
fn an_identifier_moves_to_another_channel_with_its_events() {
    let mut world = World::new(1);
    let context = world.device("host").open();
    let [first, second] = [(); 2].map(|()| EventChannel::new(&context).unwrap());
    let id = first.create_id(PortSpace::Tcp).unwrap();
    id.resolve_address(None, "127.0.0.1:1".parse().unwrap()).unwrap();
    id.migrate(&second).unwrap();
    assert!(first.poll().unwrap().is_none());
    let event = second.poll().unwrap().unwrap();
    assert_eq!((event.kind, event.id), (EventType::AddressResolved, id));
}
