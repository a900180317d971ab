//! A device with a native peer, simulated by the test, that sends frames out of PSN order or responds late.

use softhca::{
    AsyncEvent, CompletionQueue, ConnectOptions, Context, Device, Endpoint, Gid, Psn, QpState, QpType, Qpn,
    QueuePair, ReceiveRequest, SendRequest,
};
use softhca_tests::process::TEST_TIMEOUT;
use softhca_udp::{
    HostSockets, LinkControl, LinkSecret, ReceiveBatch, RoceSocket, SocketOptions, bind_host, grant_budget,
};
use softhca_wire::link_control::{Body, Incarnation, Message};
use softhca_wire::{AddressHeaders, Bth, ICRC_LEN, Icrc, Opcode, PartitionKey};
use std::time::{Duration, Instant};

const FIRST_PSN: u32 = 100;
const FRAME_BYTES: usize = Bth::LEN + ICRC_LEN;

/// A device with a queue pair, connected to a port that the test simulates.
struct Harness {
    context: Context,
    cq: CompletionQueue,
    qp: QueuePair,
    device_address: std::net::IpAddr,
    port: HostSockets,
    links: LinkControl,
    batch: ReceiveBatch,
    started: Instant,
    /// The port answers no heartbeat and revokes its grants.
    is_unresponsive: bool,
    /// Datagrams that the device sent to the RoCE port.
    frames: usize,
}

impl Harness {
    fn new() -> Harness {
        let device = Device::embedded().unwrap();
        let port = bind_host(SocketOptions::default()).unwrap();
        let context = device.open();
        let queue = context.create_completion_queue(64).unwrap();
        let pair = context
            .allocate_protection_domain()
            .unwrap()
            .create_queue_pair(QpType::Rc, &queue)
            .build()
            .unwrap();
        pair.init(&ConnectOptions::default()).unwrap();
        for id in 0..16 {
            pair.post_recv(&ReceiveRequest { wr_id: id, sg_list: &[] }).unwrap();
        }
        let (gid, queue_pair) = (Gid::from(port.address()), Qpn::new(0x42));
        pair.connect(
            &Endpoint { gid, qpn: queue_pair, psn: Psn::new(FIRST_PSN) },
            &ConnectOptions::default(),
        )
        .unwrap();
        let links = LinkControl::new(
            Incarnation::new(1),
            LinkSecret::from_system(),
            grant_budget(port.roce.receive_buffer()),
            0,
        );
        let card = device.address();
        let (batch, started) = (ReceiveBatch::new(), Instant::now());
        Harness {
            context,
            cq: queue,
            qp: pair,
            device_address: card,
            port,
            links,
            batch,
            started,
            is_unresponsive: false,
            frames: 0,
        }
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Polls link control once; reads and discards packets of the device.
    fn poll(&mut self) {
        let now = self.now();
        for socket in [&self.port.link, &self.port.roce] {
            socket.receive(&mut self.batch).unwrap();
            for chunk in self.batch.chunks() {
                if socket.local_address() == self.port.roce.local_address() {
                    self.links.record_received(chunk.source.ip().into(), chunk.charge(), now);
                    self.frames += chunk.datagrams().count();
                    continue;
                }
                for datagram in chunk.datagrams() {
                    let message = Message::parse(datagram.bytes).expect("link control");
                    if !self.is_unresponsive || !matches!(message.body, Body::Heartbeat(_)) {
                        let _ = self.links.on_message(datagram.source.ip(), &message, now);
                    }
                }
            }
        }
        if self.links.next_timeout().is_some_and(|at| at <= now) {
            self.links.expire(now);
        }
        while let Some((to, mut message)) = self.links.transmit(now) {
            if let Body::Grant(grant) = &mut message.body
                && self.is_unresponsive
            {
                grant.max_unused = 0;
            }
            self.port.link.send_batch(to.address, 0, Message::LEN, &message.emit()).unwrap();
        }
    }

    /// Polls until `held` returns true.
    fn poll_until(&mut self, what: &str, mut held: impl FnMut(&mut Harness) -> bool) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !held(self) {
            self.poll();
            std::thread::sleep(Duration::from_micros(200));
            assert!(Instant::now() < deadline, "{what}");
        }
    }

    /// Sends empty SENDs with these relative PSNs in one call, so that nothing comes between them.
    fn send(&mut self, psns: &[u32]) {
        let opcode = Opcode::all().find(|opcode| opcode.to_string() == "RC SEND_ONLY").unwrap();
        let mut run = vec![0; psns.len() * FRAME_BYTES];
        for (index, (frame, psn)) in run.chunks_mut(FRAME_BYTES).zip(psns).enumerate() {
            let bth = Bth {
                opcode,
                solicited_event: false,
                migration_request: false,
                pad: 0,
                pkey: PartitionKey::DEFAULT,
                reserved_byte: 0,
                destination_qp: self.qp.qpn(),
                ack_request: false,
                reserved_bits: 0,
                psn: Psn::new(FIRST_PSN + psn),
            };
            bth.emit(frame);
            let mut addressing = AddressHeaders::between(self.port.address(), self.device_address);
            addressing.source_port = self.port.roce.local_address().port();
            addressing.identification = self.port.roce.identification(index);
            Icrc::write(&addressing, frame);
        }
        let (card, count) = (self.device_address, psns.len());
        let price = |socket: &RoceSocket| socket.batch_charge(card, FRAME_BYTES, count);
        self.poll_until("no grant came", |harness| {
            let now = harness.now();
            harness.links.may_send(card.into(), price(&harness.port.roce), now)
        });
        let (now, price) = (self.now(), price(&self.port.roce));
        assert_eq!(self.port.roce.send_batch(card, 0, FRAME_BYTES, &run).unwrap(), count);
        self.links.record_sent(card.into(), price, now);
    }

    fn receive(&mut self, count: usize) {
        let mut received = 0;
        self.poll_until("a message never came", |harness| {
            while let Some(completion) = harness.cq.poll() {
                assert!(completion.status.is_success(), "{completion:?}");
                received += 1;
            }
            received == count
        });
    }

    fn expect_fatal_error(&mut self) {
        self.poll_until("the queue pair never failed", |harness| {
            harness.qp.state().unwrap() == QpState::Error
        });
        let event = self.context.wait_async_event(TEST_TIMEOUT);
        assert_eq!(event, Some(AsyncEvent::QueuePairFatal(self.qp.qpn())));
    }
}

#[test]
fn frames_reordered_by_the_host_are_put_in_order() {
    let mut harness = Harness::new();
    harness.send(&[0, 2, 1, 5, 4, 3, 6]);
    harness.receive(7);
    let counters = harness.context.counters();
    assert_eq!((counters.host_reordered, counters.out_of_sequence), (3, 0));
    assert_eq!(harness.qp.state().unwrap(), QpState::ReadyToSend);
}

#[test]
fn a_missing_frame_is_still_treated_as_lost() {
    let mut harness = Harness::new();
    harness.send(&[0, 2, 3]);
    harness.expect_fatal_error();
    let counters = harness.context.counters();
    assert_eq!((counters.host_reordered, counters.out_of_sequence), (0, 1));
}

#[test]
fn reordering_by_a_fault_rule_is_preserved() {
    let mut harness = Harness::new();
    harness.send(&[0, 1]);
    harness.receive(2);
    harness.links.announce_reordering();
    harness.send(&[3, 2]);
    harness.expect_fatal_error();
    let counters = harness.context.counters();
    assert_eq!((counters.host_reordered, counters.out_of_sequence), (0, 1));
}

#[test]
fn an_expired_grant_is_requested_again() {
    let mut harness = Harness::new();
    harness.is_unresponsive = true;
    harness.qp.post_send(&SendRequest::send(1, &[])).unwrap();
    // The device gets a grant, cannot use it, returns it, and after a while needs no more.
    let enough = Instant::now() + Duration::from_secs(2);
    harness.poll_until("time stands still", |_| Instant::now() >= enough);
    assert_eq!(harness.frames, 0, "no frame is sent to a port that has not responded");
    harness.is_unresponsive = false;
    harness.poll_until("nothing was sent any more", |harness| harness.frames > 0);
}
