//! The packets in one send: a single response may precede its ACK, unless other queue pairs have packets to
//! send. Also the packets sent for a destroyed queue pair.

use super::bare::{self, RIGHTS, reliable};
use core::net::{IpAddr, Ipv4Addr};
use softhca_engine::{
    ClientId, Context, DeviceLimits, Hca, Instant, MemoryObjects, MemoryRegion, ModifyQp, QpRings, QpState,
    ResponseOrder, Settings, TransmitGate,
};
use softhca_queue::{
    CompletionConsumer, DoorbellProducer, MemoryBlock, ReceiveProducer, SendProducer, completion_ring,
    doorbell_ring, receive_ring, send_ring,
};
use softhca_types::{
    CompletionStatus, Operation, ReceiveWorkRequest, SendImmOrInvalidate, SendWorkRequest, Sge,
};
use softhca_wire::{AddressHeaders, Gid, Icrc, LocalKey, Mtu, Opcode, Psn, Qpn, TransportPacket};
use std::sync::Arc;

/// An HCA with connections to another one.
struct Card {
    hca: Hca,
    client: ClientId,
    memory: MemoryObjects,
    key: LocalKey,
    doorbell: DoorbellProducer,
    ends: Vec<End>,
    completions: CompletionConsumer,
}

struct End {
    number: Qpn,
    sends: SendProducer,
    receives: ReceiveProducer,
}

fn gid(last: u8) -> Gid {
    Gid::from(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)))
}

impl Card {
    fn new(last: u8, ends: usize, answers: ResponseOrder) -> Card {
        let settings = Settings { response_order: answers, ..Settings::default() };
        let mut hca = Hca::new(settings, vec![gid(last)]);
        let (doorbell, heard) = doorbell_ring(DeviceLimits::HCA.max_qp);
        let client = hca.open_client(heard).unwrap();
        let domain = hca.allocate_protection_domain(client).unwrap();
        let (producer, completions) = completion_ring(64);
        let cq = hca.create_completion_queue(client, producer).unwrap();
        let mut memory = MemoryObjects::default();
        let block = memory.add(Arc::new(MemoryBlock::new(4096)));
        let key = hca
            .register_memory_region(MemoryRegion {
                client,
                pd: domain,
                iova: 0,
                length: 4096,
                access_flags: RIGHTS,
                memory: block,
            })
            .unwrap();
        let make = |_| {
            let (sends, taken) = send_ring(8, 1, 0);
            let (receives, given) = receive_ring(8, 1);
            let rings = QpRings { send: Some(taken), receive: Some(given) };
            End {
                number: hca.create_queue_pair(client, reliable(domain, cq), rings).unwrap(),
                sends,
                receives,
            }
        };
        let ends: Vec<End> = (0..ends).map(make).collect();
        // Queue pairs with the same QPN are connected.
        for End { number, .. } in &ends {
            let mut ctx = Context { now: Instant::ZERO, memory: &mut memory, events: &mut |_, _| {} };
            let peer = (gid(3 - last), *number);
            bare::connect(&mut hca, &mut ctx, (client, *number), peer, Mtu::B1024, Psn::new(7));
        }
        Card { hca, client, memory, key: LocalKey(key.0), doorbell, ends, completions }
    }

    fn send_on_every_end(&mut self) {
        let entry = [Sge { address: 0, length: 64, lkey: self.key }];
        for End { number, sends, .. } in &mut self.ends {
            sends
                .enqueue(&SendWorkRequest::new(1, Operation::Send(SendImmOrInvalidate::None), &entry))
                .unwrap();
            sends.publish();
            sends.ring(&self.doorbell, *number);
        }
    }

    fn receive_on_every_end(&mut self) {
        let scatter = [Sge { address: 0, length: 64, lkey: self.key }];
        for End { receives, .. } in &mut self.ends {
            receives.enqueue(&ReceiveWorkRequest { wr_id: 2, sg_list: &scatter }).unwrap();
            let _ = receives.publish();
        }
    }

    /// Transmits all packets, to `peer` if given. Returns the opcodes of each send.
    fn flush(&mut self, peer: Option<&mut Card>) -> Vec<Vec<Opcode>> {
        self.flush_through(&mut (), peer)
    }

    fn flush_through(
        &mut self,
        gate: &mut dyn TransmitGate,
        mut peer: Option<&mut Card>,
    ) -> Vec<Vec<Opcode>> {
        let (now, mut sent, mut buffer) = (Instant::ZERO, vec![], vec![0; 65_507]);
        self.hca.process_doorbells(&mut Context { now, memory: &mut self.memory, events: &mut |_, _| {} });
        loop {
            let mut ctx = Context { now, memory: &mut self.memory, events: &mut |_, _| {} };
            let Some(run) = self.hca.transmit(&mut ctx, gate, &mut buffer, 64) else { return sent };
            let mut opcodes = vec![];
            for packet in buffer[..run.bytes].chunks_mut(run.segment_size) {
                Icrc::write(&run.addressing, packet);
                let (transport, _) = Icrc::split(packet).unwrap();
                opcodes.push(TransportPacket::parse(transport).unwrap().header.bth.opcode);
                if let Some(peer) = &mut peer {
                    let mut ctx = Context { now, memory: &mut peer.memory, events: &mut |_, _| {} };
                    peer.hca.receive(&mut ctx, &run.addressing, transport);
                }
            }
            sent.push(opcodes);
        }
    }
}

/// The sends of an HCA that received a request on each connection and responds to all at once.
fn sends(connections: usize, answers: ResponseOrder) -> Vec<Vec<String>> {
    let (mut asking, mut answering) =
        (Card::new(1, connections, answers), Card::new(2, connections, answers));
    answering.receive_on_every_end();
    asking.send_on_every_end();
    asking.flush(Some(&mut answering));
    answering.send_on_every_end();
    let sent = answering.flush(None);
    sent.into_iter().map(|run| run.iter().map(ToString::to_string).collect()).collect()
}

#[test]
fn single_response_precedes_its_ack_if_configured() {
    assert_eq!(sends(1, ResponseOrder::ResponseFirst), [["RC SEND_ONLY"], ["RC ACKNOWLEDGE"]]);
    assert_eq!(sends(1, ResponseOrder::WithAck), [["RC SEND_ONLY", "RC ACKNOWLEDGE"]]);
}

#[test]
fn acks_and_responses_share_a_send_while_others_wait() {
    let sends = sends(3, ResponseOrder::ResponseFirst);
    assert_eq!(sends[..2], [["RC SEND_ONLY", "RC ACKNOWLEDGE"]; 2]);
    assert_eq!(sends[2..], [["RC SEND_ONLY"], ["RC ACKNOWLEDGE"]]);
}

/// Blocks everything.
struct Closed;

impl TransmitGate for Closed {
    fn allowed_packets(&mut self, _: &AddressHeaders, _: Qpn, _: usize, _: bool) -> usize {
        0
    }
}

#[test]
fn an_ack_that_waited_for_the_gate_precedes_a_request_posted_meanwhile() {
    for order in [ResponseOrder::ResponseFirst, ResponseOrder::WithAck] {
        let (mut asking, mut answering) = (Card::new(1, 1, order), Card::new(2, 1, order));
        answering.receive_on_every_end();
        asking.send_on_every_end();
        asking.flush(Some(&mut answering));
        assert!(answering.flush_through(&mut Closed, None).is_empty());
        answering.send_on_every_end();
        let mut ctx = Context { now: Instant::ZERO, memory: &mut answering.memory, events: &mut |_, _| {} };
        answering.hca.unblock(&mut ctx, gid(1).ip());
        let sent: Vec<String> = answering.flush(None).concat().iter().map(ToString::to_string).collect();
        assert_eq!(sent, ["RC ACKNOWLEDGE", "RC SEND_ONLY"]);
    }
}

#[derive(Clone, Copy, Debug)]
enum Ending {
    Changed(QpState),
    Destroyed,
}

/// An HCA that cannot send a pending ACK and destroys its queue pair, and the HCA that waits for the ACK.
fn ended(ending: Ending) -> [Card; 2] {
    let answers = ResponseOrder::WithAck;
    let (mut asking, mut answering) = (Card::new(1, 1, answers), Card::new(2, 1, answers));
    answering.receive_on_every_end();
    asking.send_on_every_end();
    asking.flush(Some(&mut answering));
    assert!(answering.flush_through(&mut Closed, None).is_empty());
    let (number, client) = (answering.ends[0].number, answering.client);
    let mut ctx = Context { now: Instant::ZERO, memory: &mut answering.memory, events: &mut |_, _| {} };
    match ending {
        Ending::Changed(state) => {
            let modify = ModifyQp::default().state(state);
            answering.hca.modify_queue_pair(&mut ctx, client, number, &modify).unwrap();
        }
        Ending::Destroyed => answering.hca.destroy_queue_pair(&mut ctx, client, number).unwrap(),
    }
    assert!(answering.flush_through(&mut Closed, None).is_empty());
    assert!(answering.hca.has_orphaned_acks(), "{ending:?}");
    [asking, answering]
}

#[test]
fn destroyed_queue_pair_detaches_its_ack() {
    for ending in [Ending::Changed(QpState::Error), Ending::Changed(QpState::Reset), Ending::Destroyed] {
        let [mut asking, mut answering] = ended(ending);
        let mut ctx = Context { now: Instant::ZERO, memory: &mut answering.memory, events: &mut |_, _| {} };
        answering.hca.unblock(&mut ctx, gid(1).ip());
        let sent = answering.flush(Some(&mut asking));
        assert_eq!(sent.concat().iter().map(ToString::to_string).collect::<Vec<_>>(), ["RC ACKNOWLEDGE"]);
        assert!(!answering.hca.has_orphaned_acks());
        let completion = asking.completions.pop().expect("the request is acknowledged");
        assert_eq!(completion.status, CompletionStatus::Success, "{ending:?}");
    }
}

#[test]
fn orphaned_acks_to_a_dead_port_are_discarded() {
    let [_, mut answering] = ended(Ending::Destroyed);
    let mut ctx = Context { now: Instant::ZERO, memory: &mut answering.memory, events: &mut |_, _| {} };
    answering.hca.fail_peer(&mut ctx, gid(1).ip());
    assert!(!answering.hca.has_orphaned_acks());
    assert!(answering.flush(None).is_empty());
}

#[test]
fn new_connection_discards_orphaned_acks_of_an_earlier_one() {
    let [_, mut answering] = ended(Ending::Changed(QpState::Reset));
    let (number, client) = (answering.ends[0].number, answering.client);
    let mut ctx = Context { now: Instant::ZERO, memory: &mut answering.memory, events: &mut |_, _| {} };
    bare::connect(&mut answering.hca, &mut ctx, (client, number), (gid(1), number), Mtu::B1024, Psn::new(7));
    assert!(!answering.hca.has_orphaned_acks());
}

#[test]
fn requests_to_a_process_that_ended_fail_after_a_delay() {
    let mut asking = Card::new(1, 1, ResponseOrder::WithAck);
    asking.send_on_every_end();
    asking.flush(None);
    let mut ctx = Context { now: Instant::ZERO, memory: &mut asking.memory, events: &mut |_, _| {} };
    asking.hca.on_process_gone(&mut ctx, gid(2).ip().into());
    asking.hca.expire(&mut ctx);
    assert_eq!(asking.hca.next_timeout(), Some(Instant::from_nanos(500_000_000)));
    // Another packet to the process does not extend the delay.
    ctx.now = Instant::from_nanos(100_000_000);
    asking.hca.on_process_gone(&mut ctx, gid(2).ip().into());
    ctx.now = Instant::from_nanos(500_000_000);
    asking.hca.expire(&mut ctx);
    let number = asking.ends[0].number;
    assert_eq!(asking.hca.query_queue_pair(asking.client, number).unwrap().state, QpState::Error);
}
