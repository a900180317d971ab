//! The scripts.

use super::harness::{QUEUE_KEY, Script, ScriptRun, requests};
use softhca::{
    AccessFlags, AddressVector, ConnectOptions, Operation, QpState, QpType, Recovery, RemoteAddress,
    RemoteKey, RnrTimer, SendFlags, SendImmOrInvalidate, SendRequest,
    fault::{Action, Choice, InclusiveRange, PacketClass, PacketClasses, Repeat, Selector},
};
use softhca_fabric::PacketType;
use std::num::NonZeroU32;
use std::time::Duration;

fn every_operation(run: &mut ScriptRun) {
    run.b.post_receive(0, 8000);
    run.b.post_receive(1, 8000);
    run.b.post_receive(2, 8000);
    run.b.post_receive(3, 10);
    run.send(0, 3000);
    run.post(SendRequest::send_with_imm(1, &[run.a.region.sge(0, 5)], 77));
    run.write(2, 5000);
    let write = Operation::Write { remote: run.b.region.remote_address(0), imm_data: Some(99) };
    run.post(SendRequest::new(3, write, &[run.a.region.sge(0, 10)]));
    run.read(4, 4096);
    run.fetch_add(5);
    let old = [run.a.region.sge(0, 8)];
    run.post(SendRequest::compare_and_swap(6, &old, run.b.region.remote_address(8), 3, 4));
    run.post(SendRequest::send(7, &[]).flags(SendFlags::empty()).inline_data(b""));
    run.write(8, 0);
    run.a.wait_completions(8);
    run.b.wait_completions(4);
}

fn invalidating_send(run: &mut ScriptRun) {
    let window = run.b.domain.allocate_memory_window(softhca::MemoryWindowType::Type2).unwrap();
    let new_key = RemoteKey(window.rkey().0 & !0xff | 0x5a);
    let bind = softhca::MemoryWindowBind {
        mw_rkey: window.rkey(),
        new_rkey: new_key,
        mr_lkey: run.b.region.lkey(),
        address: run.b.region.address(),
        length: 64,
        access: AccessFlags::REMOTE_WRITE,
    };
    run.b.qp.post_send(&SendRequest::new(1, Operation::BindMemoryWindow(bind), &[])).unwrap();
    run.b.wait_completions(1);
    let remote = RemoteAddress { address: run.b.region.address(), rkey: new_key };
    run.b.post_receive(0, 64);
    run.post(SendRequest::rdma_write(1, &[run.a.region.sge(0, 64)], remote));
    let send = Operation::Send(SendImmOrInvalidate::Invalidate(new_key));
    run.post(SendRequest::new(2, send, &[run.a.region.sge(0, 8)]));
    run.b.wait_completions(1);
    run.post(SendRequest::rdma_write(3, &[run.a.region.sge(0, 64)], remote));
    run.write(4, 100);
    run.a.wait_completions(4);
    run.b.wait_async_event();
}

fn unreliable_messages(run: &mut ScriptRun) {
    run.b.post_receive(0, 8000);
    run.b.post_receive(1, 8000);
    run.send(0, 3000);
    run.write(1, 3000);
    run.post(SendRequest::send_with_imm(2, &[run.a.region.sge(0, 5)], 77));
    run.a.wait_completions(3);
    run.b.wait_completions(2);
}

/// UC drops the message with the missing packet and continues.
fn unreliable_loss(run: &mut ScriptRun) {
    run.fault_on_request(1, Action::Drop);
    run.b.post_receive(0, 8000);
    run.b.post_receive(1, 8000);
    run.send(0, 3000);
    run.send(1, 3000);
    run.send(2, 100);
    run.a.wait_completions(3);
    run.b.wait_completions(2);
}

fn datagrams(run: &mut ScriptRun) {
    for id in 0..3 {
        run.b.post_receive(id, 2000);
    }
    run.fault_on_request(1, Action::Drop);
    let vector = AddressVector::to(run.b.qp.endpoint().gid);
    let handle = run.a.domain.create_address_handle(vector).unwrap();
    for id in 0..4 {
        let entries = [run.a.region.sge(0, 100 + id as u32)];
        run.a
            .qp
            .post_send(&SendRequest::send(id, &entries).ud_address(&handle, run.b.qp.qpn(), QUEUE_KEY))
            .unwrap();
    }
    run.a.wait_completions(4);
    run.b.wait_completions(3);
}

fn xrc(run: &mut ScriptRun) {
    run.b.post_receive(0, 8000);
    run.b.post_receive(1, 8000);
    run.send(0, 3000);
    run.write(1, 3000);
    run.read(2, 3000);
    run.fetch_add(3);
    run.send(4, 10);
    run.a.wait_completions(5);
    run.b.wait_completions(2);
}

/// The middle of a message is lost, and more requests are queued after it.
fn lost_request(run: &mut ScriptRun) {
    run.fault_on_request(1, Action::Drop);
    run.write(1, 4000);
    run.write(2, 10);
    run.a.wait_completions(2);
}

fn fatal_loss(run: &mut ScriptRun) {
    lost_request(run);
    run.b.wait_async_event();
}

/// No packet follows the lost one: only the ACK timeout detects the loss.
fn lost_tail(run: &mut ScriptRun) {
    run.fault_on_request(3, Action::Drop);
    run.write(1, 4000);
    run.a.wait_completions(1);
}

fn lost_read_response(run: &mut ScriptRun) {
    run.fault_on_response(1, Action::Drop);
    run.read(1, 4000);
    run.write(2, 100);
    run.a.wait_completions(2);
}

fn lost_atomic_response(run: &mut ScriptRun) {
    run.fault_on_response(0, Action::Drop);
    run.fetch_add(1);
    run.fetch_add(2);
    run.a.wait_completions(2);
}

fn lost_read_request(run: &mut ScriptRun) {
    run.fault_on_request(1, Action::Drop);
    run.write(1, 100);
    run.read(2, 3000);
    run.write(3, 100);
    run.a.wait_completions(3);
}

/// A lost ACK that a later one covers.
fn lost_ack(run: &mut ScriptRun) {
    let selector = Selector {
        classes: Some(PacketClasses::Only(PacketClass::Ack)),
        psn: Some(InclusiveRange::exactly(0)),
        packet_type: Some(PacketType::Response),
        ..requests()
    };
    run.add_rule(false, selector, Repeat::times(1), Action::Drop);
    run.write(1, 100);
    run.write(2, 100);
    run.a.wait_completions(2);
}

fn duplicates(run: &mut ScriptRun) {
    let first = Selector { transmission: Some(InclusiveRange::exactly(1)), ..requests() };
    run.add_rule(true, first, Repeat::default(), Action::Duplicate { copies: 1 });
    run.b.post_receive(0, 8000);
    run.send(0, 3000);
    run.write(1, 100);
    run.fetch_add(2);
    run.read(3, 3000);
    run.a.wait_completions(4);
    run.b.wait_completions(1);
}

fn reordered(run: &mut ScriptRun) {
    let action = Action::Reorder { by: NonZeroU32::new(1).unwrap(), within_ns: 50_000_000 };
    run.fault_on_request(1, action);
    run.write(1, 4000);
    run.write(2, 100);
    run.a.wait_completions(2);
}

fn fatal_reorder(run: &mut ScriptRun) {
    reordered(run);
    run.b.wait_async_event();
}

fn corrupted(run: &mut ScriptRun) {
    let place = softhca_fabric::BitPosition::PayloadBit(7);
    run.fault_on_request(0, Action::Corrupt { bit: place, icrc: softhca_fabric::IcrcPolicy::Stale });
    run.write(1, 3000);
    run.a.wait_completions(1);
}

/// One message at a time: with two losses in one window, timing decides whether the second causes a NAK.
fn probable_loss(run: &mut ScriptRun) {
    let one_in_five = Repeat::choice(Choice::Probability { per_billion: 200_000_000 });
    let first = Selector { transmission: Some(InclusiveRange::exactly(1)), ..requests() };
    run.add_rule(true, first, one_in_five, Action::Drop);
    for id in 0..30 {
        run.write(id, 2000);
        run.a.wait_completions(1);
    }
}

fn receiver_becomes_ready(run: &mut ScriptRun) {
    run.send(0, 2000);
    run.write(1, 100);
    while run.b.context.counters().sent_rnr_err == 0 {
        assert_eq!(run.a.cq.wait_for(Duration::from_millis(1)), None);
    }
    run.b.post_receive(0, 4000);
    run.a.wait_completions(2);
    run.b.wait_completions(1);
}

fn receiver_is_never_ready(run: &mut ScriptRun) {
    run.send(0, 100);
    run.write(1, 100);
    run.a.wait_completions(2);
}

fn write_with_unknown_rkey(run: &mut ScriptRun) {
    let remote = RemoteAddress { rkey: RemoteKey(0x00ba_d000), ..run.b.region.remote_address(0) };
    run.write(0, 100);
    run.post(SendRequest::rdma_write(1, &[run.a.region.sge(0, 2000)], remote));
    run.write(2, 100);
    run.a.wait_completions(3);
    run.b.wait_async_event();
}

fn read_out_of_bounds(run: &mut ScriptRun) {
    let remote = run.b.region.remote_address((1 << 20) - 100);
    run.post(SendRequest::rdma_read(1, &[run.a.region.sge(0, 2000)], remote));
    run.a.wait_completions(1);
    run.b.wait_async_event();
}

fn message_too_long(run: &mut ScriptRun) {
    run.b.post_receive(0, 100);
    run.b.post_receive(1, 100);
    run.send(0, 3000);
    run.a.wait_completions(1);
    run.b.wait_completions(2);
}

fn unknown_lkey(run: &mut ScriptRun) {
    run.write(1, 100);
    let mut entry = run.a.region.sge(0, 100);
    entry.lkey = softhca::LocalKey(0x00ba_d000);
    run.post(SendRequest::rdma_write(2, &[entry], run.b.region.remote_address(0)));
    run.write(3, 100);
    run.a.wait_completions(3);
}

/// The application moves the queue pair to the error state.
fn moved_to_error(run: &mut ScriptRun) {
    run.b.post_receive(0, 100);
    run.b.post_receive(1, 100);
    run.write(0, 100);
    run.a.wait_completions(1);
    run.b.qp.modify(&softhca::ModifyQp::default().state(QpState::Error)).unwrap();
    run.b.wait_completions(2);
}

fn both_directions(run: &mut ScriptRun) {
    for id in 0..10 {
        run.a.post_receive(100 + id, 4000);
        run.b.post_receive(id, 4000);
    }
    for id in 0..10 {
        run.send(id, 3000);
        let entries = [run.b.region.sge(0, 2000)];
        run.b.qp.post_send(&SendRequest::send(id, &entries)).unwrap();
    }
    run.a.wait_completions(20);
    run.b.wait_completions(20);
}

pub fn scripts() -> Vec<Script> {
    use Recovery::{Fatal, GoBack0, GoBackN};
    // Long enough that nothing is retransmitted before the whole script is posted, even on a busy machine.
    let quick = |path: &mut ConnectOptions| (path.timeout, path.retry_cnt) = (16, 7);
    let patient = |path: &mut ConnectOptions| path.retry_cnt = 1;
    let few_tries = |path: &mut ConnectOptions| (path.rnr_retry, path.min_rnr_timer) = (2, RnrTimer::new(5));
    // Seven retries are infinite: the receiver is ready as soon as its thread runs.
    let soon_ready = |path: &mut ConnectOptions| {
        (path.min_rnr_timer, path.rnr_retry) = (RnrTimer::new(14), 7);
    };
    let mut scripts = vec![
        Script::new("every operation", every_operation),
        Script::new("send with invalidate", invalidating_send),
        Script::new("unreliable connection", unreliable_messages).kind(QpType::Uc),
        Script::new("unreliable connection, loss", unreliable_loss).kind(QpType::Uc),
        Script::new("datagrams, one of them lost", datagrams).kind(QpType::Ud),
        Script::new("XRC", xrc).kind(QpType::XrcInitiator),
        Script::new("a lost packet is fatal", fatal_loss),
        Script::new("a lost last packet times out", lost_tail).path(patient),
        Script::new("a lost READ response is fatal", lost_read_response),
        Script::new("a lost atomic response is fatal", lost_atomic_response),
        Script::new("a lost READ request is fatal", lost_read_request),
        Script::new("a lost ACK is covered", lost_ack),
        Script::new("reordering is fatal", fatal_reorder),
        Script::new("a corrupted packet is dropped", corrupted),
        Script::new("the receiver becomes ready", receiver_becomes_ready).path(soon_ready),
        Script::new("the receiver is never ready", receiver_is_never_ready).path(few_tries),
        Script::new("a WRITE with an unknown rkey", write_with_unknown_rkey),
        Script::new("a READ out of bounds", read_out_of_bounds),
        Script::new("a message too long for its receive", message_too_long),
        Script::new("an unknown lkey", unknown_lkey),
        Script::new("moved to the error state", moved_to_error),
        Script::new("both directions at once", both_directions),
    ];
    for recovery in [Fatal, GoBackN, GoBack0] {
        scripts.push(Script::new("duplicates", duplicates).recovery(recovery));
    }
    for recovery in [GoBackN, GoBack0] {
        let more = [
            Script::new("a lost packet is retransmitted", lost_request),
            Script::new("a lost last packet is retransmitted", lost_tail),
            Script::new("a lost READ response is requested again", lost_read_response),
            Script::new("a lost atomic response is repeated", lost_atomic_response),
            Script::new("a lost READ request is retransmitted", lost_read_request),
            Script::new("reordering costs a retransmission", reordered),
            Script::new("a corrupted packet is retransmitted", corrupted),
            Script::new("random loss", probable_loss),
        ];
        scripts.extend(more.map(|script| script.recovery(recovery).path(quick)));
    }
    scripts
}
