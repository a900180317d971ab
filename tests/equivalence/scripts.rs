//! The scripts.

use super::harness::{QUEUE_KEY, Script, ScriptRun, requests};
use softhca::{
    AccessFlags, Action, AddressVector, Choice, ConnectOptions, InclusiveRange, Operation, PacketClass,
    PacketClasses, QpState, QpType, Recovery, RemoteAddress, RemoteKey, Repeat, RnrTimer, Selector,
    SendFlags, SendImmOrInvalidate, SendRequest,
};
use softhca_fabric::PacketType;
use std::num::NonZeroU32;
use std::time::Duration;

fn every_operation(play: &mut ScriptRun) {
    play.b.post_receive(0, 8000);
    play.b.post_receive(1, 8000);
    play.b.post_receive(2, 8000);
    play.b.post_receive(3, 10);
    play.send(0, 3000);
    play.post(SendRequest::send_with_imm(1, &[play.a.region.sge(0, 5)], 77));
    play.write(2, 5000);
    let write = Operation::Write { remote: play.b.region.remote_address(0), imm_data: Some(99) };
    play.post(SendRequest::new(3, write, &[play.a.region.sge(0, 10)]));
    play.read(4, 4096);
    play.fetch_add(5);
    let old = [play.a.region.sge(0, 8)];
    play.post(SendRequest::compare_and_swap(6, &old, play.b.region.remote_address(8), 3, 4));
    play.post(SendRequest::send(7, &[]).flags(SendFlags::empty()).inline_data(b""));
    play.write(8, 0);
    play.a.wait_completions(8);
    play.b.wait_completions(4);
}

fn invalidating_send(play: &mut ScriptRun) {
    let window = play.b.domain.allocate_memory_window(softhca::MemoryWindowType::Type2).unwrap();
    let new_key = RemoteKey(window.rkey().0 & !0xff | 0x5a);
    let bind = softhca::MemoryWindowBind {
        mw_rkey: window.rkey(),
        new_rkey: new_key,
        mr_lkey: play.b.region.lkey(),
        address: play.b.region.address(),
        length: 64,
        access: AccessFlags::REMOTE_WRITE,
    };
    play.b.qp.post_send(&SendRequest::new(1, Operation::BindMemoryWindow(bind), &[])).unwrap();
    play.b.wait_completions(1);
    let remote = RemoteAddress { address: play.b.region.address(), rkey: new_key };
    play.b.post_receive(0, 64);
    play.post(SendRequest::rdma_write(1, &[play.a.region.sge(0, 64)], remote));
    let send = Operation::Send(SendImmOrInvalidate::Invalidate(new_key));
    play.post(SendRequest::new(2, send, &[play.a.region.sge(0, 8)]));
    play.b.wait_completions(1);
    play.post(SendRequest::rdma_write(3, &[play.a.region.sge(0, 64)], remote));
    play.write(4, 100);
    play.a.wait_completions(4);
    play.b.wait_async_event();
}

fn unreliable_messages(play: &mut ScriptRun) {
    play.b.post_receive(0, 8000);
    play.b.post_receive(1, 8000);
    play.send(0, 3000);
    play.write(1, 3000);
    play.post(SendRequest::send_with_imm(2, &[play.a.region.sge(0, 5)], 77));
    play.a.wait_completions(3);
    play.b.wait_completions(2);
}

/// UC forgets the message that lacks a packet, and goes on.
fn unreliable_loss(play: &mut ScriptRun) {
    play.fault_on_request(1, Action::Drop);
    play.b.post_receive(0, 8000);
    play.b.post_receive(1, 8000);
    play.send(0, 3000);
    play.send(1, 3000);
    play.send(2, 100);
    play.a.wait_completions(3);
    play.b.wait_completions(2);
}

fn datagrams(play: &mut ScriptRun) {
    for id in 0..3 {
        play.b.post_receive(id, 2000);
    }
    play.fault_on_request(1, Action::Drop);
    let vector = AddressVector::to(play.b.qp.endpoint().gid);
    let handle = play.a.domain.create_address_handle(vector).unwrap();
    for id in 0..4 {
        let entries = [play.a.region.sge(0, 100 + id as u32)];
        play.a
            .qp
            .post_send(&SendRequest::send(id, &entries).ud_address(&handle, play.b.qp.qpn(), QUEUE_KEY))
            .unwrap();
    }
    play.a.wait_completions(4);
    play.b.wait_completions(3);
}

fn xrc(play: &mut ScriptRun) {
    play.b.post_receive(0, 8000);
    play.b.post_receive(1, 8000);
    play.send(0, 3000);
    play.write(1, 3000);
    play.read(2, 3000);
    play.fetch_add(3);
    play.send(4, 10);
    play.a.wait_completions(5);
    play.b.wait_completions(2);
}

/// The middle of a message is lost, and more work waits behind it.
fn lost_request(play: &mut ScriptRun) {
    play.fault_on_request(1, Action::Drop);
    play.write(1, 4000);
    play.write(2, 10);
    play.a.wait_completions(2);
}

fn fatal_loss(play: &mut ScriptRun) {
    lost_request(play);
    play.b.wait_async_event();
}

/// Nothing follows the packet that is lost: only time can tell.
fn lost_tail(play: &mut ScriptRun) {
    play.fault_on_request(3, Action::Drop);
    play.write(1, 4000);
    play.a.wait_completions(1);
}

fn lost_read_response(play: &mut ScriptRun) {
    play.fault_on_response(1, Action::Drop);
    play.read(1, 4000);
    play.write(2, 100);
    play.a.wait_completions(2);
}

fn lost_atomic_response(play: &mut ScriptRun) {
    play.fault_on_response(0, Action::Drop);
    play.fetch_add(1);
    play.fetch_add(2);
    play.a.wait_completions(2);
}

fn lost_read_request(play: &mut ScriptRun) {
    play.fault_on_request(1, Action::Drop);
    play.write(1, 100);
    play.read(2, 3000);
    play.write(3, 100);
    play.a.wait_completions(3);
}

/// An acknowledgement that a later one covers.
fn lost_ack(play: &mut ScriptRun) {
    let selector = Selector {
        classes: Some(PacketClasses::Only(PacketClass::Ack)),
        psn: Some(InclusiveRange::exactly(0)),
        packet_type: Some(PacketType::Response),
        ..requests()
    };
    play.add_rule(false, selector, Repeat::times(1), Action::Drop);
    play.write(1, 100);
    play.write(2, 100);
    play.a.wait_completions(2);
}

fn duplicates(play: &mut ScriptRun) {
    let first = Selector { transmission: Some(InclusiveRange::exactly(1)), ..requests() };
    play.add_rule(true, first, Repeat::default(), Action::Duplicate { copies: 1 });
    play.b.post_receive(0, 8000);
    play.send(0, 3000);
    play.write(1, 100);
    play.fetch_add(2);
    play.read(3, 3000);
    play.a.wait_completions(4);
    play.b.wait_completions(1);
}

fn reordered(play: &mut ScriptRun) {
    let action = Action::Reorder { by: NonZeroU32::new(1).unwrap(), within_ns: 50_000_000 };
    play.fault_on_request(1, action);
    play.write(1, 4000);
    play.write(2, 100);
    play.a.wait_completions(2);
}

fn fatal_reorder(play: &mut ScriptRun) {
    reordered(play);
    play.b.wait_async_event();
}

fn corrupted(play: &mut ScriptRun) {
    let place = softhca_fabric::BitPosition::PayloadBit(7);
    play.fault_on_request(0, Action::Corrupt { bit: place, icrc: softhca_fabric::IcrcPolicy::Stale });
    play.write(1, 3000);
    play.a.wait_completions(1);
}

/// One message after the other: of two losses in one window, time decides whether the second is refused.
fn probable_loss(play: &mut ScriptRun) {
    let one_in_five = Repeat::choice(Choice::Probability { per_billion: 200_000_000 });
    let first = Selector { transmission: Some(InclusiveRange::exactly(1)), ..requests() };
    play.add_rule(true, first, one_in_five, Action::Drop);
    for id in 0..30 {
        play.write(id, 2000);
        play.a.wait_completions(1);
    }
}

fn receiver_becomes_ready(play: &mut ScriptRun) {
    play.send(0, 2000);
    play.write(1, 100);
    while play.b.context.counters().sent_rnr_err == 0 {
        assert_eq!(play.a.cq.wait_for(Duration::from_millis(1)), None);
    }
    play.b.post_receive(0, 4000);
    play.a.wait_completions(2);
    play.b.wait_completions(1);
}

fn receiver_is_never_ready(play: &mut ScriptRun) {
    play.send(0, 100);
    play.write(1, 100);
    play.a.wait_completions(2);
}

fn write_with_unknown_rkey(play: &mut ScriptRun) {
    let remote = RemoteAddress { rkey: RemoteKey(0x00ba_d000), ..play.b.region.remote_address(0) };
    play.write(0, 100);
    play.post(SendRequest::rdma_write(1, &[play.a.region.sge(0, 2000)], remote));
    play.write(2, 100);
    play.a.wait_completions(3);
    play.b.wait_async_event();
}

fn read_out_of_bounds(play: &mut ScriptRun) {
    let remote = play.b.region.remote_address((1 << 20) - 100);
    play.post(SendRequest::rdma_read(1, &[play.a.region.sge(0, 2000)], remote));
    play.a.wait_completions(1);
    play.b.wait_async_event();
}

fn message_too_long(play: &mut ScriptRun) {
    play.b.post_receive(0, 100);
    play.b.post_receive(1, 100);
    play.send(0, 3000);
    play.a.wait_completions(1);
    play.b.wait_completions(2);
}

fn unknown_lkey(play: &mut ScriptRun) {
    play.write(1, 100);
    let mut entry = play.a.region.sge(0, 100);
    entry.lkey = softhca::LocalKey(0x00ba_d000);
    play.post(SendRequest::rdma_write(2, &[entry], play.b.region.remote_address(0)));
    play.write(3, 100);
    play.a.wait_completions(3);
}

/// The application itself stops the queue pair.
fn moved_to_error(play: &mut ScriptRun) {
    play.b.post_receive(0, 100);
    play.b.post_receive(1, 100);
    play.write(0, 100);
    play.a.wait_completions(1);
    play.b.qp.modify(&softhca::ModifyQp::default().state(QpState::Error)).unwrap();
    play.b.wait_completions(2);
}

fn both_directions(play: &mut ScriptRun) {
    for id in 0..10 {
        play.a.post_receive(100 + id, 4000);
        play.b.post_receive(id, 4000);
    }
    for id in 0..10 {
        play.send(id, 3000);
        let entries = [play.b.region.sge(0, 2000)];
        play.b.qp.post_send(&SendRequest::send(id, &entries)).unwrap();
    }
    play.a.wait_completions(20);
    play.b.wait_completions(20);
}

pub fn scripts() -> Vec<Script> {
    use Recovery::{Fatal, GoBack0, GoBackN};
    // Long enough that nothing is sent again before all of a script is posted, on a busy machine too.
    let quick = |path: &mut ConnectOptions| (path.timeout, path.retry_cnt) = (16, 7);
    let patient = |path: &mut ConnectOptions| path.retry_cnt = 1;
    let few_tries = |path: &mut ConnectOptions| (path.rnr_retry, path.min_rnr_timer) = (2, RnrTimer::new(5));
    let soon_ready = |path: &mut ConnectOptions| path.min_rnr_timer = RnrTimer::new(14);
    let mut scripts = vec![
        Script::new("every operation", every_operation),
        Script::new("send with invalidate", invalidating_send),
        Script::new("unreliable connection", unreliable_messages).kind(QpType::Uc),
        Script::new("unreliable connection, loss", unreliable_loss).kind(QpType::Uc),
        Script::new("datagrams, one of them lost", datagrams).kind(QpType::Ud),
        Script::new("extended connection", xrc).kind(QpType::XrcInitiator),
        Script::new("a lost packet is fatal", fatal_loss),
        Script::new("a lost tail is fatal in time", lost_tail).path(patient),
        Script::new("a lost READ answer is fatal", lost_read_response),
        Script::new("a lost atomic answer is fatal", lost_atomic_response),
        Script::new("a lost READ request is fatal", lost_read_request),
        Script::new("a lost acknowledgement is covered", lost_ack),
        Script::new("reordering is fatal", fatal_reorder),
        Script::new("a corrupted packet is a lost one", corrupted),
        Script::new("the receiver becomes ready", receiver_becomes_ready).path(soon_ready),
        Script::new("the receiver is never ready", receiver_is_never_ready).path(few_tries),
        Script::new("a forbidden WRITE", write_with_unknown_rkey),
        Script::new("a READ out of bounds", read_out_of_bounds),
        Script::new("a message too long for its receive", message_too_long),
        Script::new("local memory that is not there", unknown_lkey),
        Script::new("stopped by its owner", moved_to_error),
        Script::new("both directions at once", both_directions),
    ];
    for recovery in [Fatal, GoBackN, GoBack0] {
        scripts.push(Script::new("duplicates", duplicates).recovery(recovery));
    }
    for recovery in [GoBackN, GoBack0] {
        let more = [
            Script::new("a lost packet is sent again", lost_request),
            Script::new("a lost tail is sent again", lost_tail),
            Script::new("a lost READ answer is asked for again", lost_read_response),
            Script::new("a lost atomic answer is repeated", lost_atomic_response),
            Script::new("a lost READ request is sent again", lost_read_request),
            Script::new("reordering costs a retransmission", reordered),
            Script::new("a corrupted packet is sent again", corrupted),
            Script::new("some of many are lost", probable_loss),
        ];
        scripts.extend(more.map(|script| script.recovery(recovery).path(quick)));
    }
    scripts
}
