//! Operations of two HCAs in one process, for a count of their instructions: `.ci/instructions`.
//!
//! Each operation includes the posts, both HCAs, the ACK, and the polls of its completions, without ICRC and sockets.

#[path = "../tests/bare/mod.rs"]
mod bare;
mod card;

use card::Card;
use softhca_engine::{Context, Instant};
use softhca_wire::{ICRC_LEN, Mtu};

/// Sends what `from` has to send to `to`.
fn exchange(now: Instant, from: &mut Card, to: &mut Card, buffer: &mut [u8]) {
    let mut ctx = Context { now, memory: &mut from.store, events: &mut |_, _| {} };
    from.hca.process_doorbells(&mut ctx);
    while let Some(batch) = from.hca.transmit(&mut ctx, &mut (), buffer, 64) {
        let mut ctx = Context { now, memory: &mut to.store, events: &mut |_, _| {} };
        for packet in buffer[..batch.bytes].chunks(batch.segment_size) {
            to.hca.receive(&mut ctx, &batch.addressing, &packet[..packet.len() - ICRC_LEN]);
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(operation), Some(count)) = (arguments.next(), arguments.next()) else {
        return println!("usage: instructions send|write COUNT");
    };
    let (mut a, mut b) = (Card::new(1, 64, 0), Card::new(2, 64, 0));
    // As a driver does whose events nobody records.
    for card in [&mut a, &mut b] {
        card.hca.set_observed(false);
    }
    a.connect(0, &b, Mtu::B1024);
    b.connect(0, &a, Mtu::B1024);
    let mut buffer = vec![0; 65_536];
    for turn in 0..count.parse().expect("a number of operations") {
        let now = Instant::from_nanos(turn * 1_000);
        let posted = match operation.as_str() {
            "send" => b.post_receive(0, 64) && a.post_send(0, 64),
            _ => a.post_write(0, &b, 64),
        };
        assert!(posted, "the queues have room");
        exchange(now, &mut a, &mut b, &mut buffer);
        exchange(now, &mut b, &mut a, &mut buffer);
        assert!(a.completions.pop().is_some_and(|done| done.status.is_success()));
        assert_eq!(b.completions.pop().is_some(), operation == "send");
    }
}
