//! End-to-end credits: the responder advertises its receives, and the requester limits its sends.

use softhca_engine::{EndToEndCredits, QpState};
use softhca_tests::pair::{Pair, Setup};
use softhca_wire::{Syndrome, TransportPacket};

fn with_credits() -> Pair {
    let mut setup = Setup::default();
    setup.settings.end_to_end_credits = EndToEndCredits::On;
    setup.build()
}

/// The credit codes of all ACKs, in order.
fn advertised_credits(pair: &Pair) -> Vec<u8> {
    let record = pair.recording.borrow();
    let aeth = |bytes: &[u8]| TransportPacket::parse(&bytes[..bytes.len() - 4]).unwrap().header.aeth;
    let codes = record.sent.iter().filter_map(|(_, frame)| match aeth(&frame.bytes)?.syndrome {
        Syndrome::Ack(code) => Some(code),
        _ => None,
    });
    codes.collect()
}

#[test]
fn acks_advertise_the_number_of_posted_receives() {
    let mut pair = with_credits();
    let a = pair.a;
    for id in 0..3 {
        pair.post_receive(id, 0, 100);
    }
    for id in 0..3 {
        pair.post_send(id, 0, 10);
        pair.run();
    }
    assert_eq!(advertised_credits(&pair), [2, 1, 0]);
    assert_eq!(pair.completion_statuses(a).len(), 3);
}

#[test]
fn credits_are_invalid_unless_enabled() {
    let mut pair = Pair::new();
    pair.post_receive(1, 0, 100);
    pair.post_send(1, 0, 10);
    pair.run();
    assert_eq!(advertised_credits(&pair), [31]);
}

#[test]
fn without_credits_a_message_is_probed_with_one_packet() {
    let mut pair = with_credits();
    let (a, b) = (pair.a, pair.b);
    pair.post_send(1, 0, 3000);
    pair.post_send(2, 0, 10);
    // The first RNR NAK arrives after 2 µs, the first retry much later.
    pair.world.run_for(std::time::Duration::from_micros(100));
    assert_eq!(pair.packets(), ["-> SEND_FIRST 0 1024B", "<- ACKNOWLEDGE 0 rnr wait=640us msn=0"]);
    pair.post_receive(1, 0, 4000);
    pair.post_receive(2, 0, 4000);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
    assert_eq!(pair.completions(b).iter().map(|c| c.byte_len).collect::<Vec<_>>(), [3000, 10]);
    assert_eq!(pair.state(a), QpState::ReadyToSend);
}

#[test]
fn writes_and_reads_need_no_credits() {
    let mut pair = with_credits();
    let a = pair.a;
    pair.post_write(1, 0, 0, 5000);
    pair.post_read(2, 0, 0, 5000);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
}

#[test]
fn many_messages_arrive_with_few_receives() {
    let mut pair = with_credits();
    let (a, b) = (pair.a, pair.b);
    for id in 0..20 {
        pair.post_send(id, 0, 2000);
    }
    let mut received = 0;
    while received < 20 {
        pair.post_receive(received, 0, 4000);
        pair.world.run_for(std::time::Duration::from_millis(2));
        received += pair.completions(b).len() as u64;
    }
    pair.run();
    let outcomes = pair.completion_statuses(a);
    assert_eq!(outcomes, (0..20).map(|id| (id, "SUCCESS")).collect::<Vec<_>>());
}
