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

/// A port that sends, and the ports of slots 0 and 1 of a host.
struct SharedHost {
    near: LinkControl,
    slots: [LinkControl; 2],
    now: u64,
}

impl SharedHost {
    const PROCESS: PeerPort = PeerPort { address: ADDRESSES[1], slot: 1 };

    fn connected() -> SharedHost {
        let mut slots = [port(2), port(3)];
        for (number, port) in slots.iter_mut().enumerate() {
            port.set_slot(QpnSlot { number: number as u16, bits: QpnSlot::BITS });
        }
        let mut host = SharedHost { near: port(1), slots, now: 0 };
        for peer in [ADDRESSES[1].into(), SharedHost::PROCESS] {
            while !host.near.may_send(peer, CHARGE, host.now) {
                host.run(MILLISECOND, Some);
                assert!(host.now < 1000 * MILLISECOND, "no grant");
            }
        }
        host
    }

    /// Delivers messages for this time. `route` gives the slot whose port gets those for a slot, if one does.
    fn run(&mut self, duration: u64, route: impl Fn(usize) -> Option<usize>) {
        let end = self.now + duration;
        while self.now < end {
            self.now += MILLISECOND;
            for message in sent(&mut self.near, self.now) {
                if let Some(slot) = route(message.slots.destination.into()) {
                    deliver(&[message], 0, &mut self.slots[slot], self.now);
                }
            }
            for slot in 0..2 {
                let messages = sent(&mut self.slots[slot], self.now);
                if route(slot) == Some(slot) {
                    deliver(&messages, 1, &mut self.near, self.now);
                }
            }
        }
    }

    fn state(&self) -> Option<PeerState> {
        self.near.state(SharedHost::PROCESS)
    }
}

#[test]
fn a_stopped_process_is_not_dead_while_its_host_answers() {
    let mut host = SharedHost::connected();
    host.run(60_000 * MILLISECOND, |slot| (slot == 0).then_some(0));
    assert_eq!(host.state(), Some(PeerState::Stalled));
    host.run(3000 * MILLISECOND, Some);
    assert_eq!(host.state(), Some(PeerState::Alive), "the process runs again");
    host.run(20_000 * MILLISECOND, |_| None);
    assert_eq!(host.state(), Some(PeerState::Dead), "the host is gone");
}

#[test]
fn slot_0_reports_the_end_of_a_process_whose_slot_is_closed() {
    let mut host = SharedHost::connected();
    // Nothing of what the slot sent at the end of its process has arrived.
    host.run(60_000 * MILLISECOND, |slot| (slot == 0).then_some(0));
    assert_eq!(host.state(), Some(PeerState::Stalled));
    host.run(3000 * MILLISECOND, |_| Some(0));
    assert_eq!(host.state(), Some(PeerState::Dead));
    assert_eq!(host.near.state(ADDRESSES[1].into()), Some(PeerState::Alive));
}

#[test]
fn a_vacancy_concerns_only_the_port_that_it_names() {
    let mut host = SharedHost::connected();
    let body =
        |slot, incarnation| Body::Vacancy(Vacancy { slot, incarnation: Incarnation::new(incarnation) });
    let peer = &host.slots[0].peers[&ADDRESSES[0].into()];
    let message =
        |body| peer.message(slots(host.slots[0].slot, ADDRESSES[0].into()), FrameOrder::InOrder, body);
    // An earlier port of the slot, slot 0 itself, and a slot that this port does not know.
    let others = [message(body(1, 2)), message(body(0, 2)), message(body(7, 3))];
    deliver(&others, 1, &mut host.near, host.now);
    // A process cannot speak for another.
    let forged = Message { slots: Slots { source: 1, ..others[0].slots }, ..message(body(1, 3)) };
    deliver(&[forged], 1, &mut host.near, host.now);
    assert_eq!(host.state(), Some(PeerState::Alive));
    let current = message(body(1, 3));
    deliver(&[current], 1, &mut host.near, host.now);
    assert_eq!(host.state(), Some(PeerState::Dead));
}
