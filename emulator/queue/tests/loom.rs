//! Rings, doorbells and the sleep flag in every interleaving, and with every reordering that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p softhca-queue --test loom`
#![cfg(loom)]

use loom::thread;
use softhca_queue::{
    SendConsumer, SendProducer, SharedWords, SleepFlag, completion_ring, doorbell_ring, receive_ring,
    send_ring,
};
use softhca_types::{
    Completion, CompletionFlags, CompletionOpcode, CompletionStatus, CqNotify, Operation, ReceiveWorkRequest,
    SendImmOrInvalidate, SendWorkRequest,
};
use softhca_wire::Qpn;

const QPN: Qpn = Qpn::new(3);

fn post(send: &mut SendProducer, wr_id: u64) {
    send.enqueue(&SendWorkRequest::new(wr_id, Operation::Send(SendImmOrInvalidate::None), &[])).unwrap();
    send.publish();
}

/// Dequeues everything that is visible.
fn drain(consumer: &mut SendConsumer, into: &mut Vec<u64>) {
    let (mut sges, mut inline) = (Vec::new(), Vec::new());
    while let Some(request) = consumer.dequeue(&mut sges, &mut inline).unwrap() {
        into.push(request.unwrap().wr_id);
        consumer.retire();
    }
}

fn completion(wr_id: u64) -> Completion {
    Completion {
        wr_id,
        status: CompletionStatus::Success,
        opcode: CompletionOpcode::Send,
        flags: CompletionFlags::empty(),
        byte_len: 0,
        imm_data: 0,
        qpn: QPN,
        src_qp: QPN,
        service_level: 0,
        route: Default::default(),
        vendor_error: 0,
        timestamp: 0,
    }
}

#[test]
fn an_hca_that_falls_asleep_sees_the_doorbell_or_is_woken() {
    loom::model(|| {
        let (mut send, mut consumer) = send_ring(2, 0, 0);
        let (producer, mut doorbells) = doorbell_ring(1);
        let flag = SleepFlag::new(SharedWords::heap(SleepFlag::WORDS));
        let application = thread::spawn({
            let flag = flag.clone();
            move || {
                post(&mut send, 1);
                send.ring(&producer, QPN);
                flag.is_set()
            }
        });
        flag.set();
        let mut seen = Vec::new();
        if doorbells.pop() == Some(QPN) {
            consumer.clear_doorbell();
            drain(&mut consumer, &mut seen);
        }
        let wakes = application.join().unwrap();
        assert!(wakes || seen == [1], "the HCA sleeps, and no thread wakes it");
    });
}

#[test]
fn a_post_while_the_doorbell_is_pending_is_not_lost() {
    loom::model(|| {
        let (mut send, mut consumer) = send_ring(2, 0, 0);
        let (producer, mut doorbells) = doorbell_ring(1);
        let application = thread::spawn(move || {
            for wr_id in 1..=2 {
                post(&mut send, wr_id);
                send.ring(&producer, QPN);
            }
        });
        let mut seen = Vec::new();
        let mut poll = || {
            while doorbells.pop().is_some() {
                consumer.clear_doorbell();
                drain(&mut consumer, &mut seen);
            }
        };
        poll();
        application.join().unwrap();
        poll();
        assert_eq!(seen, [1, 2]);
    });
}

#[test]
fn two_threads_ring_for_two_queue_pairs() {
    loom::model(|| {
        let (producer, mut doorbells) = doorbell_ring(2);
        let threads = [4, 5].map(|number| {
            let producer = producer.clone();
            let (mut send, consumer) = send_ring(1, 0, 0);
            let thread = thread::spawn(move || {
                post(&mut send, number.into());
                send.ring(&producer, Qpn::new(number));
            });
            (thread, consumer)
        });
        let mut rung = Vec::new();
        rung.extend(doorbells.drain());
        let mut consumers = threads.map(|(thread, consumer)| {
            thread.join().unwrap();
            consumer
        });
        rung.extend(doorbells.drain());
        rung.sort();
        assert_eq!(rung, [Qpn::new(4), Qpn::new(5)]);
        let mut seen = Vec::new();
        consumers.iter_mut().for_each(|consumer| drain(consumer, &mut seen));
        assert_eq!(seen, [4, 5]);
    });
}

#[test]
fn a_completion_is_polled_or_notified() {
    loom::model(|| {
        let (mut producer, mut consumer) = completion_ring(1);
        let hca = thread::spawn(move || {
            producer.push(&completion(7)).unwrap();
            producer.claim_notification(false)
        });
        let mut polled = consumer.pop();
        if polled.is_none() {
            consumer.request_notification(CqNotify::NextCompletion);
            polled = consumer.pop();
        }
        let notifies = hca.join().unwrap();
        assert!(notifies || polled == Some(completion(7)), "the application sleeps, and nothing notifies it");
    });
}

#[test]
fn a_receive_posted_during_the_flush_is_flushed() {
    loom::model(|| {
        let (mut producer, mut consumer) = receive_ring(1, 0);
        let application = thread::spawn(move || {
            producer.enqueue(&ReceiveWorkRequest { wr_id: 9, sg_list: &[] }).unwrap();
            producer.publish()
        });
        consumer.request_doorbell(true);
        let flushed = consumer.dequeue(&mut Vec::new()).unwrap();
        let rings = application.join().unwrap();
        assert!(rings || flushed == Some(9), "the receive stays in the queue");
    });
}
