use super::*;
use std::net::Ipv4Addr;

const ADDRESSES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2)), IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3))];
const CHARGE: u64 = 4096;

fn port(incarnation: u64) -> LinkControl {
    LinkControl::new(Incarnation::new(incarnation), LinkSecret::from_system(), 1 << 20, 0)
}

/// Takes what a port sends now.
fn sent(from: &mut LinkControl, now: u64) -> Vec<Message> {
    if from.next_timeout().is_some_and(|at| at <= now) {
        from.expire(now);
    }
    std::iter::from_fn(|| from.transmit(now)).map(|(_, message)| message).collect()
}

fn deliver(messages: &[Message], from: usize, to: &mut LinkControl, now: u64) {
    for message in messages {
        let _ = to.on_message(ADDRESSES[from], message, now);
    }
}

#[test]
fn no_frame_is_reordered_before_the_peer_knows() {
    let [mut near, mut far] = [port(1), port(2)];
    let mut now = 0;
    let peer = PeerPort::from(ADDRESSES[1]);
    while !near.may_send(peer, CHARGE, now) {
        now += MILLISECOND;
        assert!(now < 1000 * MILLISECOND, "no grant");
        deliver(&sent(&mut near, now), 0, &mut far, now);
        deliver(&sent(&mut far, now), 1, &mut near, now);
    }
    // The reply to a heartbeat is on its way when the order changes.
    let replies = loop {
        now += MILLISECOND;
        near.may_send(peer, CHARGE, now);
        deliver(&sent(&mut near, now), 0, &mut far, now);
        let replies = sent(&mut far, now);
        if replies.iter().any(|message| matches!(message.body, Body::Heartbeat(_))) {
            break replies;
        }
    };
    near.announce_reordering();
    deliver(&replies, 1, &mut near, now);
    assert!(!near.may_send(peer, CHARGE, now), "the peer does not know yet");
    assert!(far.transmits_in_order(ADDRESSES[0].into()));
    while !near.may_send(peer, CHARGE, now) {
        now += MILLISECOND;
        deliver(&sent(&mut near, now), 0, &mut far, now);
        deliver(&sent(&mut far, now), 1, &mut near, now);
    }
    assert!(!far.transmits_in_order(ADDRESSES[0].into()), "the peer knows before the first frame");
}
