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

/// Operations that are under way at once, each on a queue pair of its own.
const OUTSTANDING: usize = 8;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(operation), Some(count)) = (arguments.next(), arguments.next()) else {
        return println!("usage: instructions send|write COUNT [QUEUE PAIRS]");
    };
    let queue_pairs: usize =
        arguments.next().map_or(1, |text| text.parse().expect("a number of queue pairs"));
    let outstanding = OUTSTANDING.min(queue_pairs);
    let [mut a, mut b] =
        [1, 2].map(|host| Card::new(host, 64, if queue_pairs == 1 { 64 } else { queue_pairs - 1 }));
    // As a driver does whose events nobody records.
    for card in [&mut a, &mut b] {
        card.hca.set_observed(false);
    }
    for index in 0..queue_pairs {
        a.connect(index, &b, Mtu::B1024);
        b.connect(index, &a, Mtu::B1024);
    }
    let mut buffer = vec![0; 65_536];
    let count: usize = count.parse().expect("a number of operations");
    for first in (0..count).step_by(outstanding) {
        let now = Instant::from_nanos(first as u64 * 1_000);
        for card in [&mut a, &mut b] {
            if card.hca.next_timeout().is_some_and(|due| due <= now) {
                card.hca.expire(&mut Context { now, memory: &mut card.store, events: &mut |_, _| {} });
            }
        }
        for index in (first..first + outstanding).map(|number| number % queue_pairs) {
            let posted = match operation.as_str() {
                "send" => b.post_receive(index, 64) && a.post_send(index, 64),
                _ => a.post_write(index, &b, 64),
            };
            assert!(posted, "the queues have room");
        }
        exchange(now, &mut a, &mut b, &mut buffer);
        exchange(now, &mut b, &mut a, &mut buffer);
        for _ in 0..outstanding {
            assert!(a.completions.pop().is_some_and(|done| done.status.is_success()));
            assert_eq!(b.completions.pop().is_some(), operation == "send");
        }
    }
}
