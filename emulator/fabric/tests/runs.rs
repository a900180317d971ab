//! What goes into one send: a lone answer may go before its acknowledgement, unless others want to send.

mod bare;

use bare::{RIGHTS, reliable};
use core::net::{IpAddr, Ipv4Addr};
use softhca_engine::{Answers, Context, Hca, Instant, Limits, QpRings, Region, Settings};
use softhca_fabric::Store;
use softhca_queue::{
    CompletionConsumer, DoorbellProducer, Operation, Receive, ReceiveProducer, SendProducer, SendRequest,
    SendTrailer, Sge, completion_ring, doorbell, receive_ring, send_ring,
};
use softhca_wire::{Gid, Icrc, LocalKey, Mtu, Opcode, Psn, Qpn, Transport};

/// A card with connections to one other card.
struct Card {
    hca: Hca,
    memory: Store,
    key: LocalKey,
    doorbell: DoorbellProducer,
    ends: Vec<End>,
    _completions: CompletionConsumer,
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
    fn new(last: u8, ends: usize, answers: Answers) -> Card {
        let settings = Settings { answers, ..Settings::default() };
        let mut hca = Hca::new(settings, vec![gid(last)]);
        let (doorbell, heard) = doorbell(Limits::CARD.queue_pairs as u32);
        let client = hca.open_client(heard).unwrap();
        let domain = hca.allocate_domain(client).unwrap();
        let (producer, _completions) = completion_ring(64);
        let cq = hca.create_completion_queue(client, producer).unwrap();
        let mut memory = Store::default();
        let block = memory.allocate(4096);
        let key = hca
            .register(Region { client, domain, base: 0, length: 4096, access: RIGHTS, memory: block })
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
        // Both cards number their queue pairs alike: each is connected with its namesake.
        for End { number, .. } in &ends {
            let mut ctx = Context { now: Instant::ZERO, memory: &mut memory, events: &mut () };
            let peer = (gid(3 - last), *number);
            bare::connect(&mut hca, &mut ctx, (client, *number), peer, Mtu::B1024, Psn::new(7));
        }
        Card { hca, memory, key: LocalKey(key.0), doorbell, ends, _completions }
    }

    fn send_on_every_end(&mut self) {
        let entry = [Sge { address: 0, length: 64, key: self.key }];
        for End { number, sends, .. } in &mut self.ends {
            sends.place(&SendRequest::new(1, Operation::Send(SendTrailer::None), &entry)).unwrap();
            sends.publish();
            sends.ring(&self.doorbell, *number);
        }
    }

    fn receive_on_every_end(&mut self) {
        let scatter = [Sge { address: 0, length: 64, key: self.key }];
        for End { receives, .. } in &mut self.ends {
            receives.place(&Receive { id: 2, scatter: &scatter }).unwrap();
            let _ = receives.publish();
        }
    }

    /// Sends everything, to `peer` if there is one, and says which opcodes each send had.
    fn flush(&mut self, mut peer: Option<&mut Card>) -> Vec<Vec<Opcode>> {
        let (now, mut sent, mut buffer) = (Instant::ZERO, vec![], vec![0; 65_507]);
        self.hca.ring(&mut Context { now, memory: &mut self.memory, events: &mut () });
        loop {
            let mut ctx = Context { now, memory: &mut self.memory, events: &mut () };
            let Some(run) = self.hca.transmit(&mut ctx, &mut (), &mut buffer, 64) else { return sent };
            let mut opcodes = vec![];
            for packet in buffer[..run.bytes].chunks_mut(run.segment) {
                Icrc::seal(&run.envelope, packet);
                let (transport, _) = Icrc::split(packet).unwrap();
                opcodes.push(Transport::parse(transport).unwrap().header.bth.opcode);
                if let Some(peer) = &mut peer {
                    let mut ctx = Context { now, memory: &mut peer.memory, events: &mut () };
                    peer.hca.receive(&mut ctx, &run.envelope, transport);
                }
            }
            sent.push(opcodes);
        }
    }
}

/// What a card sends that got a request on each of so many connections, and answers all of them at once.
fn sends(connections: usize, answers: Answers) -> Vec<Vec<String>> {
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
fn a_lone_answer_goes_before_its_acknowledgement_if_it_shall() {
    assert_eq!(sends(1, Answers::Ahead), [["RC SEND_ONLY"], ["RC ACKNOWLEDGE"]]);
    assert_eq!(sends(1, Answers::WithAcknowledgement), [["RC SEND_ONLY", "RC ACKNOWLEDGE"]]);
}

#[test]
fn acknowledgements_go_in_one_send_with_the_answers_while_others_wait() {
    let sends = sends(3, Answers::Ahead);
    assert_eq!(sends[..2], [["RC SEND_ONLY", "RC ACKNOWLEDGE"]; 2]);
    assert_eq!(sends[2..], [["RC SEND_ONLY"], ["RC ACKNOWLEDGE"]]);
}
