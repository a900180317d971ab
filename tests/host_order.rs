//! What a card makes of a port of our own make, played by hand, that sends frames in another order than that of
//! their PSNs, or answers late.

use softhca::{
    AsyncEvent, CompletionQueue, Context, Device, Endpoint, Gid, Path, Psn, QpKind, Qpn, QueuePair,
    ReceiveRequest, SendRequest, State,
};
use softhca_tests::process::PATIENCE;
use softhca_udp::{Batch, HostSockets, Links, RoceSocket, SocketOptions, bind_host, budget};
use softhca_wire::link::{Body, Incarnation, Message};
use softhca_wire::{Bth, Envelope, ICRC_LEN, Icrc, Opcode, PartitionKey};
use std::time::{Duration, Instant};

const FIRST: u32 = 100;
const FRAME: usize = Bth::LEN + ICRC_LEN;

/// A card with a queue pair, connected to a port that the test plays.
struct Stage {
    context: Context,
    queue: CompletionQueue,
    pair: QueuePair,
    card: std::net::IpAddr,
    port: HostSockets,
    links: Links,
    batch: Batch,
    started: Instant,
    /// The port answers no heartbeat, and wants back what it grants.
    is_busy: bool,
    /// Datagrams that the card sent to the RoCE port.
    frames: usize,
}

impl Stage {
    fn new() -> Stage {
        let device = Device::embedded().unwrap();
        let port = bind_host(SocketOptions::default()).unwrap();
        let context = device.open();
        let queue = context.create_completion_queue(64).unwrap();
        let pair = context.allocate_domain().unwrap().queue_pair(QpKind::Rc, &queue).create().unwrap();
        for id in 0..16 {
            pair.post_receive(&ReceiveRequest { id, scatter: &[] }).unwrap();
        }
        let (gid, queue_pair) = (Gid::from(port.address()), Qpn::new(0x42));
        pair.connect(&Endpoint { gid, queue_pair, psn: Psn::new(FIRST) }, &Path::default()).unwrap();
        let links = Links::new(Incarnation::new(1), budget(port.roce.receive_buffer()), 0);
        let card = device.address();
        let (batch, started) = (Batch::new(), Instant::now());
        Stage { context, queue, pair, card, port, links, batch, started, is_busy: false, frames: 0 }
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// One turn of link control; what the card sends is read and forgotten.
    fn turn(&mut self) {
        let now = self.now();
        for socket in [&self.port.link, &self.port.roce] {
            socket.receive(&mut self.batch).unwrap();
            for chunk in self.batch.chunks() {
                if socket.local_address() == self.port.roce.local_address() {
                    self.links.received(chunk.source.ip(), chunk.charge(), now);
                    self.frames += chunk.datagrams().count();
                    continue;
                }
                for datagram in chunk.datagrams() {
                    let message = Message::parse(datagram.bytes).expect("link control");
                    if !self.is_busy || !matches!(message.body, Body::Heartbeat(_)) {
                        self.links.handle(datagram.source.ip(), &message, now);
                    }
                }
            }
        }
        if self.links.next_timeout().is_some_and(|at| at <= now) {
            self.links.expire(now);
        }
        while let Some((to, mut message)) = self.links.transmit(now) {
            if let Body::Grant(grant) = &mut message.body
                && self.is_busy
            {
                grant.keep = 0;
            }
            self.port.link.send_run(to, 0, Message::LEN, &message.emit()).unwrap();
        }
    }

    /// Turns until `held` says so.
    fn until(&mut self, what: &str, mut held: impl FnMut(&mut Stage) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !held(self) {
            self.turn();
            std::thread::sleep(Duration::from_micros(200));
            assert!(Instant::now() < deadline, "{what}");
        }
    }

    /// Empty SENDs with these PSNs, counted from the first, in one call: nothing can come between them.
    fn send(&mut self, psns: &[u32]) {
        let opcode = Opcode::all().find(|opcode| opcode.to_string() == "RC SEND_ONLY").unwrap();
        let mut run = vec![0; psns.len() * FRAME];
        for (index, (frame, psn)) in run.chunks_mut(FRAME).zip(psns).enumerate() {
            let bth = Bth {
                opcode,
                solicited: false,
                migration: false,
                pad: 0,
                partition: PartitionKey::DEFAULT,
                reserved: 0,
                destination: self.pair.number(),
                ack_request: false,
                reserved_psn: 0,
                psn: Psn::new(FIRST + psn),
            };
            bth.emit(frame);
            let mut envelope = Envelope::between(self.port.address(), self.card);
            envelope.source_port = self.port.roce.local_address().port();
            envelope.identification = self.port.roce.identification(index);
            Icrc::seal(&envelope, frame);
        }
        let (card, count) = (self.card, psns.len());
        let price = |socket: &RoceSocket| socket.run_charge(card, FRAME, count);
        self.until("no grant came", |stage| {
            let now = stage.now();
            stage.links.may_send(card, price(&stage.port.roce), now)
        });
        let (now, price) = (self.now(), price(&self.port.roce));
        assert_eq!(self.port.roce.send_run(card, 0, FRAME, &run).unwrap(), count);
        self.links.sent(card, price, now);
    }

    fn receive(&mut self, count: usize) {
        let mut received = 0;
        self.until("a message never came", |stage| {
            while let Some(completion) = stage.queue.poll() {
                assert!(completion.status.is_success(), "{completion:?}");
                received += 1;
            }
            received == count
        });
    }

    fn break_down(&mut self) {
        self.until("the queue pair never failed", |stage| stage.pair.state().unwrap() == State::Error);
        let event = self.context.wait_event(PATIENCE);
        assert_eq!(event, Some(AsyncEvent::QueuePairFatal(self.pair.number())));
    }
}

#[test]
fn what_a_host_mixed_up_is_put_in_order() {
    let mut stage = Stage::new();
    stage.send(&[0, 2, 1, 5, 4, 3, 6]);
    stage.receive(7);
    let counters = stage.context.counters();
    assert_eq!((counters.host_reordered, counters.out_of_sequence), (3, 0));
    assert_eq!(stage.pair.state().unwrap(), State::ReadyToSend);
}

#[test]
fn a_frame_that_does_not_come_is_lost_all_the_same() {
    let mut stage = Stage::new();
    stage.send(&[0, 2, 3]);
    stage.break_down();
    let counters = stage.context.counters();
    assert_eq!((counters.host_reordered, counters.out_of_sequence), (0, 1));
}

#[test]
fn an_order_that_a_rule_changed_is_left_as_it_is() {
    let mut stage = Stage::new();
    stage.send(&[0, 1]);
    stage.receive(2);
    stage.links.change_order();
    stage.send(&[3, 2]);
    stage.break_down();
    let counters = stage.context.counters();
    assert_eq!((counters.host_reordered, counters.out_of_sequence), (0, 1));
}

#[test]
fn a_grant_that_could_not_be_used_in_time_is_asked_for_again() {
    let mut stage = Stage::new();
    stage.is_busy = true;
    stage.pair.post(&SendRequest::send(1, &[])).unwrap();
    // The card is granted what it needs, may not use it, gives it back, and has no use for more after a while.
    let enough = Instant::now() + Duration::from_secs(2);
    stage.until("time stands still", |_| Instant::now() >= enough);
    assert_eq!(stage.frames, 0, "no frame is sent to a port that has not answered");
    stage.is_busy = false;
    stage.until("nothing was sent any more", |stage| stage.frames > 0);
}
