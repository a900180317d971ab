//! A hostile client of an HCA: it writes arbitrary words to its rings, rings arbitrary doorbells, changes the state of
//! its queue pair and receives arbitrary packets. The HCA must not panic, and another client must not notice.

#![no_main]

#[path = "../../emulator/fabric/tests/bare/mod.rs"]
mod bare;

use bare::{reliable, steps};
use libfuzzer_sys::fuzz_target;
use softhca_engine::{
    ClientId, Context, Event, Hca, Instant, MemoryObjects, ModifyQp, QpRings, QpState, Settings,
};
use softhca_queue::{
    CompletionProducer, DoorbellConsumer, DoorbellProducer, ReceiveConsumer, ReceiveProducer, SendConsumer,
    SendProducer, SharedWords,
};
use softhca_wire::{AddressHeaders, Gid, Mtu, Psn, Qpn};
use std::net::IpAddr;
use std::sync::atomic::Ordering;

const SLOTS: u32 = 4;

/// A client with a connected queue pair: its number, its queue pair and its words.
fn open(hca: &mut Hca, memory: &mut MemoryObjects) -> (ClientId, Qpn, [SharedWords; 4]) {
    let doorbell = SharedWords::heap(DoorbellProducer::words(8));
    let client = hca.open_client(DoorbellConsumer::new(doorbell.clone(), 8)).expect("room");
    let sends = SharedWords::heap(SendProducer::layout(SLOTS, 2, 16).words());
    let receives = SharedWords::heap(ReceiveProducer::layout(SLOTS, 2).words());
    let completions = SharedWords::heap(CompletionProducer::layout(16).words());
    let pd = hca.allocate_protection_domain(client).expect("room");
    let cq =
        hca.create_completion_queue(client, CompletionProducer::new(completions.clone(), 16)).expect("room");
    let rings = QpRings {
        send: Some(SendConsumer::new(sends.clone(), SLOTS, 2, 16)),
        receive: Some(ReceiveConsumer::new(receives.clone(), SLOTS, 2)),
    };
    let qp = hca.create_queue_pair(client, reliable(pd, cq), rings).expect("room");
    let mut sink = |_, _: &Event| {};
    let mut context = Context { now: Instant::ZERO, memory, events: &mut sink };
    let peer = Gid::from(IpAddr::from([10, 0, 0, 2]));
    for step in steps((peer, Qpn::new(0x77)), Mtu::B1024, Psn::new(0)) {
        hca.modify_queue_pair(&mut context, client, qp, &step).expect("a connected queue pair");
    }
    (client, qp, [sends, receives, completions, doorbell])
}

fuzz_target!(|actions: Vec<(u8, u8, u64)>| {
    let mut hca = Hca::new(Settings::default(), vec![Gid::from(IpAddr::from([10, 0, 0, 1]))]);
    let mut memory = MemoryObjects::default();
    let (client, qp, words) = open(&mut hca, &mut memory);
    let (other, other_qp, _) = open(&mut hca, &mut memory);
    let addressing = AddressHeaders::between([10, 0, 0, 2].into(), [10, 0, 0, 1].into());
    let mut buffer = [0; 8192];
    for (index, (action, place, value)) in actions.into_iter().enumerate() {
        let mut sink = |_, _: &Event| {};
        let now = Instant::from_nanos(index as u64 * 1000);
        let mut context = Context { now, memory: &mut memory, events: &mut sink };
        match action % 8 {
            ring @ 0..4 => {
                let ring = &words[usize::from(ring)];
                ring[usize::from(place) % ring.len()].store(value, Ordering::Relaxed);
            }
            4 => {
                // Its own doorbell, so that the words matter.
                (8..16).for_each(|slot| words[3][slot].store(u64::from(qp.value()) + 1, Ordering::Relaxed));
                hca.process_doorbells(&mut context);
            }
            5 => {
                while hca.transmit(&mut context, &mut (), &mut buffer, 1 + usize::from(place % 4)).is_some() {
                }
            }
            6 => {
                let state =
                    [QpState::Error, QpState::Reset, QpState::SendQueueDrained][usize::from(place) % 3];
                let _ = hca.modify_queue_pair(&mut context, client, qp, &ModifyQp::default().state(state));
            }
            _ => {
                let mut packet = [0; 32];
                packet[..8].copy_from_slice(&value.to_be_bytes());
                packet[0] = place;
                packet[5..8].copy_from_slice(&qp.value().to_be_bytes()[1..]);
                packet[8..16].copy_from_slice(&value.rotate_left(32).to_be_bytes());
                hca.receive(&mut context, &addressing, &packet);
            }
        }
    }
    assert_eq!(hca.query_queue_pair(other, other_qp).expect("it exists").state, QpState::ReadyToSend);
    let mut sink = |_, _: &Event| {};
    let mut context = Context { now: Instant::from_nanos(1 << 40), memory: &mut memory, events: &mut sink };
    hca.close_client(&mut context, client);
});
