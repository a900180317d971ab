//! The scripts.

use super::stage::{KEY, Play, Script, requests};
use softhca::{
    Access, Action, AddressVector, Choice, Class, Classes, Operation, Path, QpKind, Recovery, RemoteAddress,
    RemoteKey, Repeat, RnrTimer, Selector, SendFlags, SendRequest, SendTrailer, Span, State,
};
use softhca_fabric::Sense;
use std::num::NonZeroU32;
use std::time::Duration;

fn every_operation(play: &mut Play) {
    play.b.receive(0, 8000);
    play.b.receive(1, 8000);
    play.b.receive(2, 8000);
    play.b.receive(3, 10);
    play.send(0, 3000);
    play.post(SendRequest::send_immediate(1, &[play.a.region.entry(0, 5)], 77));
    play.write(2, 5000);
    let write = Operation::Write { remote: play.b.region.remote(0), immediate: Some(99) };
    play.post(SendRequest::new(3, write, &[play.a.region.entry(0, 10)]));
    play.read(4, 4096);
    play.fetch_add(5);
    let old = [play.a.region.entry(0, 8)];
    play.post(SendRequest::compare_swap(6, &old, play.b.region.remote(8), 3, 4));
    play.post(SendRequest::send(7, &[]).flags(SendFlags::empty()).inline(b""));
    play.write(8, 0);
    play.a.completions(8);
    play.b.completions(4);
}

fn invalidating_send(play: &mut Play) {
    let window = play.b.domain.allocate_window(softhca::WindowKind::Type2).unwrap();
    let new_key = RemoteKey(window.key().0 & !0xff | 0x5a);
    let bind = softhca::BindWindow {
        window: window.key(),
        new_key,
        region: play.b.region.local_key(),
        address: play.b.region.address(),
        length: 64,
        access: Access::REMOTE_WRITE,
    };
    play.b.pair.post(&SendRequest::new(1, Operation::BindWindow(bind), &[])).unwrap();
    play.b.completions(1);
    let remote = RemoteAddress { address: play.b.region.address(), key: new_key };
    play.b.receive(0, 64);
    play.post(SendRequest::write(1, &[play.a.region.entry(0, 64)], remote));
    let send = Operation::Send(SendTrailer::Invalidate(new_key));
    play.post(SendRequest::new(2, send, &[play.a.region.entry(0, 8)]));
    play.b.completions(1);
    play.post(SendRequest::write(3, &[play.a.region.entry(0, 64)], remote));
    play.write(4, 100);
    play.a.completions(4);
    play.b.event();
}

fn unreliable_messages(play: &mut Play) {
    play.b.receive(0, 8000);
    play.b.receive(1, 8000);
    play.send(0, 3000);
    play.write(1, 3000);
    play.post(SendRequest::send_immediate(2, &[play.a.region.entry(0, 5)], 77));
    play.a.completions(3);
    play.b.completions(2);
}

/// UC forgets the message that lacks a packet, and goes on.
fn unreliable_loss(play: &mut Play) {
    play.on_request(1, Action::Drop);
    play.b.receive(0, 8000);
    play.b.receive(1, 8000);
    play.send(0, 3000);
    play.send(1, 3000);
    play.send(2, 100);
    play.a.completions(3);
    play.b.completions(2);
}

fn datagrams(play: &mut Play) {
    for id in 0..3 {
        play.b.receive(id, 2000);
    }
    play.on_request(1, Action::Drop);
    let vector = AddressVector::to(play.b.pair.endpoint().gid);
    let handle = play.a.domain.create_address_handle(vector).unwrap();
    for id in 0..4 {
        let entries = [play.a.region.entry(0, 100 + id as u32)];
        play.a.pair.post(&SendRequest::send(id, &entries).to(&handle, play.b.pair.number(), KEY)).unwrap();
    }
    play.a.completions(4);
    play.b.completions(3);
}

fn extended_connection(play: &mut Play) {
    play.b.receive(0, 8000);
    play.b.receive(1, 8000);
    play.send(0, 3000);
    play.write(1, 3000);
    play.read(2, 3000);
    play.fetch_add(3);
    play.send(4, 10);
    play.a.completions(5);
    play.b.completions(2);
}

/// The middle of a message is lost, and more work waits behind it.
fn lost_request(play: &mut Play) {
    play.on_request(1, Action::Drop);
    play.write(1, 4000);
    play.write(2, 10);
    play.a.completions(2);
}

fn fatal_loss(play: &mut Play) {
    lost_request(play);
    play.b.event();
}

/// Nothing follows the packet that is lost: only time can tell.
fn lost_tail(play: &mut Play) {
    play.on_request(3, Action::Drop);
    play.write(1, 4000);
    play.a.completions(1);
}

fn lost_answer_of_a_read(play: &mut Play) {
    play.on_answer(1, Action::Drop);
    play.read(1, 4000);
    play.write(2, 100);
    play.a.completions(2);
}

fn lost_answer_of_an_atomic(play: &mut Play) {
    play.on_answer(0, Action::Drop);
    play.fetch_add(1);
    play.fetch_add(2);
    play.a.completions(2);
}

fn lost_read_request(play: &mut Play) {
    play.on_request(1, Action::Drop);
    play.write(1, 100);
    play.read(2, 3000);
    play.write(3, 100);
    play.a.completions(3);
}

/// An acknowledgement that a later one covers.
fn lost_acknowledgement(play: &mut Play) {
    let selector = Selector {
        classes: Some(Classes::Only(Class::Ack)),
        psn: Some(Span::exactly(0)),
        sense: Some(Sense::Response),
        ..requests()
    };
    play.rule(false, selector, Repeat::times(1), Action::Drop);
    play.write(1, 100);
    play.write(2, 100);
    play.a.completions(2);
}

fn duplicates(play: &mut Play) {
    let first = Selector { transmission: Some(Span::exactly(1)), ..requests() };
    play.rule(true, first, Repeat::default(), Action::Duplicate { copies: 1 });
    play.b.receive(0, 8000);
    play.send(0, 3000);
    play.write(1, 100);
    play.fetch_add(2);
    play.read(3, 3000);
    play.a.completions(4);
    play.b.completions(1);
}

fn held_back(play: &mut Play) {
    let action = Action::Reorder { by: NonZeroU32::new(1).unwrap(), within_ns: 50_000_000 };
    play.on_request(1, action);
    play.write(1, 4000);
    play.write(2, 100);
    play.a.completions(2);
}

fn fatal_reorder(play: &mut Play) {
    held_back(play);
    play.b.event();
}

fn corrupted(play: &mut Play) {
    let place = softhca_fabric::Place::PayloadBit(7);
    play.on_request(0, Action::Corrupt { place, seal: softhca_fabric::Seal::Stale });
    play.write(1, 3000);
    play.a.completions(1);
}

/// One message after the other: of two losses in one window, time decides whether the second is refused.
fn probable_loss(play: &mut Play) {
    let one_in_five = Repeat::choice(Choice::Chance { per_billion: 200_000_000 });
    let first = Selector { transmission: Some(Span::exactly(1)), ..requests() };
    play.rule(true, first, one_in_five, Action::Drop);
    for id in 0..30 {
        play.write(id, 2000);
        play.a.completions(1);
    }
}

fn receiver_becomes_ready(play: &mut Play) {
    play.send(0, 2000);
    play.write(1, 100);
    while play.b.context.counters().sent_rnr_err == 0 {
        assert_eq!(play.a.queue.wait_for(Duration::from_millis(1)), None);
    }
    play.b.receive(0, 4000);
    play.a.completions(2);
    play.b.completions(1);
}

fn receiver_is_never_ready(play: &mut Play) {
    play.send(0, 100);
    play.write(1, 100);
    play.a.completions(2);
}

fn forbidden_write(play: &mut Play) {
    let remote = RemoteAddress { key: RemoteKey(0x00ba_d000), ..play.b.region.remote(0) };
    play.write(0, 100);
    play.post(SendRequest::write(1, &[play.a.region.entry(0, 2000)], remote));
    play.write(2, 100);
    play.a.completions(3);
    play.b.event();
}

fn read_out_of_bounds(play: &mut Play) {
    let remote = play.b.region.remote((1 << 20) - 100);
    play.post(SendRequest::read(1, &[play.a.region.entry(0, 2000)], remote));
    play.a.completions(1);
    play.b.event();
}

fn message_too_long(play: &mut Play) {
    play.b.receive(0, 100);
    play.b.receive(1, 100);
    play.send(0, 3000);
    play.a.completions(1);
    play.b.completions(2);
}

fn local_protection(play: &mut Play) {
    play.write(1, 100);
    let mut entry = play.a.region.entry(0, 100);
    entry.key = softhca::LocalKey(0x00ba_d000);
    play.post(SendRequest::write(2, &[entry], play.b.region.remote(0)));
    play.write(3, 100);
    play.a.completions(3);
}

/// The application itself stops the queue pair.
fn asked_to_stop(play: &mut Play) {
    play.b.receive(0, 100);
    play.b.receive(1, 100);
    play.write(0, 100);
    play.a.completions(1);
    play.b.pair.modify(&softhca::Modify::default().state(State::Error)).unwrap();
    play.b.completions(2);
}

fn both_directions(play: &mut Play) {
    for id in 0..10 {
        play.a.receive(100 + id, 4000);
        play.b.receive(id, 4000);
    }
    for id in 0..10 {
        play.send(id, 3000);
        let entries = [play.b.region.entry(0, 2000)];
        play.b.pair.post(&SendRequest::send(id, &entries)).unwrap();
    }
    play.a.completions(20);
    play.b.completions(20);
}

pub fn scripts() -> Vec<Script> {
    use Recovery::{Fatal, GoBack0, GoBackN};
    // Long enough that nothing is sent again before all of a script is posted, on a busy machine too.
    let quick = |path: &mut Path| (path.timeout, path.retry_count) = (16, 7);
    let patient = |path: &mut Path| path.retry_count = 1;
    let few_tries = |path: &mut Path| (path.rnr_retry, path.min_rnr_timer) = (2, RnrTimer::new(5));
    let soon_ready = |path: &mut Path| path.min_rnr_timer = RnrTimer::new(14);
    let mut scripts = vec![
        Script::new("every operation", every_operation),
        Script::new("send with invalidate", invalidating_send),
        Script::new("unreliable connection", unreliable_messages).kind(QpKind::Uc),
        Script::new("unreliable connection, loss", unreliable_loss).kind(QpKind::Uc),
        Script::new("datagrams, one of them lost", datagrams).kind(QpKind::Ud),
        Script::new("extended connection", extended_connection).kind(QpKind::XrcInitiator),
        Script::new("a lost packet is fatal", fatal_loss),
        Script::new("a lost tail is fatal in time", lost_tail).path(patient),
        Script::new("a lost READ answer is fatal", lost_answer_of_a_read),
        Script::new("a lost atomic answer is fatal", lost_answer_of_an_atomic),
        Script::new("a lost READ request is fatal", lost_read_request),
        Script::new("a lost acknowledgement is covered", lost_acknowledgement),
        Script::new("reordering is fatal", fatal_reorder),
        Script::new("a corrupted packet is a lost one", corrupted),
        Script::new("the receiver becomes ready", receiver_becomes_ready).path(soon_ready),
        Script::new("the receiver is never ready", receiver_is_never_ready).path(few_tries),
        Script::new("a forbidden WRITE", forbidden_write),
        Script::new("a READ out of bounds", read_out_of_bounds),
        Script::new("a message too long for its receive", message_too_long),
        Script::new("local memory that is not there", local_protection),
        Script::new("stopped by its owner", asked_to_stop),
        Script::new("both directions at once", both_directions),
    ];
    for recovery in [Fatal, GoBackN, GoBack0] {
        scripts.push(Script::new("duplicates", duplicates).recovery(recovery));
    }
    for recovery in [GoBackN, GoBack0] {
        let more = [
            Script::new("a lost packet is sent again", lost_request),
            Script::new("a lost tail is sent again", lost_tail),
            Script::new("a lost READ answer is asked for again", lost_answer_of_a_read),
            Script::new("a lost atomic answer is repeated", lost_answer_of_an_atomic),
            Script::new("a lost READ request is sent again", lost_read_request),
            Script::new("reordering costs a retransmission", held_back),
            Script::new("a corrupted packet is sent again", corrupted),
            Script::new("some of many are lost", probable_loss),
        ];
        scripts.extend(more.map(|script| script.recovery(recovery).path(quick)));
    }
    scripts
}
