//! An HCA with queue pairs, for benchmarks.

#![allow(dead_code, reason = "not every benchmark needs all of it")]

use crate::bare::{self, RIGHTS, reliable};
use core::net::{IpAddr, Ipv4Addr};
use softhca_engine::{
    AckPolicy, ClientId, Context, CqId, DeviceLimits, Hca, Instant, MemoryObjects, MemoryRegion, PdId,
    QpRings, Settings,
};
use softhca_queue::{
    CompletionConsumer, DoorbellProducer, MemoryBlock, ReceiveProducer, SendProducer, completion_ring,
    doorbell_ring, receive_ring, send_ring,
};
use softhca_types::{
    Operation, ReceiveWorkRequest, RemoteAddress, SendFlags, SendImmOrInvalidate, SendWorkRequest, Sge,
};
use softhca_wire::{Gid, LocalKey, Mtu, Psn, Qpn, RemoteKey};
use std::sync::Arc;

/// An HCA with one connected queue pair and some idle ones.
pub struct Card {
    pub hca: Hca,
    pub store: MemoryObjects,
    client: ClientId,
    domain: PdId,
    cq: CqId,
    pub completions: CompletionConsumer,
    doorbell: DoorbellProducer,
    key: RemoteKey,
    queue_pairs: Vec<(Qpn, SendProducer, ReceiveProducer)>,
    address: IpAddr,
}

impl Card {
    pub fn new(last: u8, depth: u32, idle: usize) -> Card {
        let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, last));
        let settings = Settings { ack_policy: AckPolicy::Coalesce, ..Settings::default() };
        let mut hca = Hca::new(settings, vec![Gid::from(address)]);
        let (doorbell, heard) = doorbell_ring(DeviceLimits::HCA.max_qp);
        let client = hca.open_client(heard).unwrap();
        let domain = hca.allocate_protection_domain(client).unwrap();
        let (producer, completions) = completion_ring(4096);
        let cq = hca.create_completion_queue(client, producer).unwrap();
        let mut store = MemoryObjects::default();
        let memory = store.add(Arc::new(MemoryBlock::new(4 << 20)));
        let region =
            MemoryRegion { client, pd: domain, iova: 0, length: 4 << 20, access_flags: RIGHTS, memory };
        let key = hca.register_memory_region(region).unwrap();
        let mut card =
            Card { hca, store, client, domain, cq, completions, doorbell, key, queue_pairs: vec![], address };
        card.add_queue_pair(depth);
        for _ in 0..idle {
            card.add_queue_pair(16);
        }
        card
    }

    pub fn add_queue_pair(&mut self, depth: u32) {
        let (send, taken) = send_ring(depth, 1, 0);
        let (receives, receive) = receive_ring(1, 1);
        let init = reliable(self.domain, self.cq);
        let rings = QpRings { send: Some(taken), receive: Some(receive) };
        let number = self.hca.create_queue_pair(self.client, init, rings).unwrap();
        self.queue_pairs.push((number, send, receives));
    }

    pub fn connect(&mut self, index: usize, peer: &Card, mtu: Mtu) {
        let number = self.queue_pairs[index].0;
        let destination = peer.queue_pairs[index].0;
        let mut ctx = Context { now: Instant::ZERO, memory: &mut self.store, events: &mut |_, _| {} };
        let there = (Gid::from(peer.address), destination);
        bare::connect(&mut self.hca, &mut ctx, (self.client, number), there, mtu, Psn::new(0));
    }

    pub fn post_write(&mut self, index: usize, peer: &Card, length: u32) -> bool {
        let remote = RemoteAddress { address: 0, rkey: peer.key };
        self.post(index, Operation::Write { remote, imm_data: None }, length)
    }

    pub fn post_send(&mut self, index: usize, length: u32) -> bool {
        self.post(index, Operation::Send(SendImmOrInvalidate::None), length)
    }

    fn post(&mut self, index: usize, operation: Operation, length: u32) -> bool {
        let (number, ring, _) = &mut self.queue_pairs[index];
        let sge = [Sge { address: 0, length, lkey: LocalKey(self.key.0) }];
        let mut request = SendWorkRequest::new(0, operation, &sge);
        request.flags = SendFlags::SIGNALED;
        if ring.enqueue(&request).is_err() {
            return false;
        }
        ring.publish();
        ring.ring(&self.doorbell, *number);
        true
    }

    pub fn post_receive(&mut self, index: usize, length: u32) -> bool {
        let sge = [Sge { address: 0, length, lkey: LocalKey(self.key.0) }];
        let ring = &mut self.queue_pairs[index].2;
        let posted = ring.enqueue(&ReceiveWorkRequest { wr_id: 0, sg_list: &sge }).is_ok();
        posted && !ring.publish()
    }
}
