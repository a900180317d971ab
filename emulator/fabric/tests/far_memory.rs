//! Memory with expensive accesses: the engine batches the accesses of several packets without any other
//! change.

mod bare;

use bare::{RIGHTS, reliable};
use core::net::{IpAddr, Ipv4Addr};
use softhca_engine::{
    AckPolicy, AtomicOperation, ClientId, Context, CqId, DeviceLimits, Event, Hca, Instant, Memory,
    MemoryFault, MemoryId, MemoryLocation, MemoryRegion, QpRings, Settings,
};
use softhca_fabric::SparseMemory;
use softhca_queue::{
    CompletionConsumer, DoorbellProducer, Operation, ReceiveProducer, ReceiveWorkRequest, RemoteAddress,
    SendFlags, SendImmOrInvalidate, SendProducer, SendWorkRequest, Sge, completion_ring, doorbell_ring,
    receive_ring, send_ring,
};
use softhca_wire::{Gid, Icrc, LocalKey, Mtu, Psn, Qpn, RemoteKey};
use std::cell::Cell;

const SIZE: u64 = 1 << 20;

/// Near or far memory, inaccessible from some byte on.
struct Reached {
    store: SparseMemory,
    is_far: bool,
    end: u64,
    accesses: Cell<usize>,
}

impl Reached {
    fn check(&self, offset: u64, length: usize) -> Result<(), MemoryFault> {
        self.accesses.set(self.accesses.get() + 1);
        if offset + length as u64 <= self.end { Ok(()) } else { Err(MemoryFault) }
    }
}

impl Memory for Reached {
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.check(offset, into.len())?;
        self.store.read(memory, offset, into)
    }

    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.check(offset, from.len())?;
        self.store.write(memory, offset, from)
    }

    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault> {
        self.store.atomic(memory, offset, operation)
    }

    fn prefers_batches(&self) -> bool {
        self.is_far
    }

    fn read_batch(&self, places: &[MemoryLocation], into: &mut [u8], stride: usize) -> bool {
        self.accesses.set(self.accesses.get() + 1);
        for (place, to) in places.iter().zip(into.chunks_mut(stride)) {
            let is_there = place.offset + place.length as u64 <= self.end;
            if !is_there || self.store.read(place.memory, place.offset, &mut to[..place.length]).is_err() {
                into.fill(0xee);
                return false;
            }
        }
        true
    }

    fn write_batch(&mut self, places: &[MemoryLocation], from: &[&[u8]]) -> usize {
        self.accesses.set(self.accesses.get() + 1);
        for (index, (place, from)) in places.iter().zip(from).enumerate() {
            let is_there = place.offset + place.length as u64 <= self.end;
            if !is_there || self.store.write(place.memory, place.offset, from).is_err() {
                return index;
            }
        }
        places.len()
    }
}

/// As text. Omits the bytes of flushed requests, which are undefined.
fn told(what: &dyn std::fmt::Debug) -> String {
    let text = format!("{what:?}");
    match text.split_once("byte_len: ") {
        Some((before, after)) if before.contains("status: WrFlushError") => {
            format!("{before}{}", after.trim_start_matches(|digit: char| digit.is_ascii_digit()))
        }
        _ => text,
    }
}

struct Card {
    hca: Hca,
    place: Reached,
    events: Vec<String>,
    client: ClientId,
    cq: CqId,
    completions: CompletionConsumer,
    doorbell: DoorbellProducer,
    memory: MemoryId,
    key: RemoteKey,
    number: Qpn,
    sends: SendProducer,
    receives: ReceiveProducer,
    address: IpAddr,
}

impl Card {
    fn new(last: u8, is_far: bool, end: u64) -> Card {
        let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, last));
        let settings = Settings { ack_policy: AckPolicy::Coalesce, ..Settings::default() };
        let mut hca = Hca::new(settings, vec![Gid::from(address)]);
        let (doorbell, heard) = doorbell_ring(DeviceLimits::HCA.max_qp);
        let client = hca.open_client(heard).unwrap();
        let domain = hca.allocate_protection_domain(client).unwrap();
        let (producer, completions) = completion_ring(4096);
        let cq = hca.create_completion_queue(client, producer).unwrap();
        let mut store = SparseMemory::default();
        let memory = store.allocate(SIZE);
        let bytes: Vec<u8> = (0..SIZE).map(|at| (at * u64::from(last) % 251) as u8).collect();
        store.write(memory, 0, &bytes).unwrap();
        let region = MemoryRegion { client, pd: domain, iova: 0, length: SIZE, access_flags: RIGHTS, memory };
        let key = hca.register_memory_region(region).unwrap();
        let (sends, taken) = send_ring(128, 4, 0);
        let (receives, given) = receive_ring(128, 4);
        let rings = QpRings { send: Some(taken), receive: Some(given) };
        let number = hca.create_queue_pair(client, reliable(domain, cq), rings).unwrap();
        let place = Reached { store, is_far, end, accesses: Cell::new(0) };
        let events = Vec::new();
        Card {
            hca,
            place,
            events,
            client,
            cq,
            completions,
            doorbell,
            memory,
            key,
            number,
            sends,
            receives,
            address,
        }
    }

    fn connect(&mut self, peer: (Gid, Qpn), mtu: Mtu) {
        let mut ctx = Context {
            now: Instant::ZERO,
            memory: &mut self.place,
            events: &mut |now, event: &Event| self.events.push(told(&(now, event))),
        };
        let first = Psn::new(0xff_fff0);
        bare::connect(&mut self.hca, &mut ctx, (self.client, self.number), peer, mtu, first);
        assert_ne!(self.cq, CqId(0));
    }

    /// Up to three entries with `length` bytes in total, anywhere in the region.
    fn entries(&self, dice: &mut Dice, length: u32) -> Vec<Sge> {
        let count = dice.below(3) + 1;
        let mut left = length;
        (0..count)
            .map(|index| {
                let size = if index + 1 == count { left } else { dice.below(u64::from(left) + 1) as u32 };
                left -= size;
                let address = dice.below(SIZE - u64::from(size));
                Sge { address, length: size, lkey: LocalKey(self.key.0) }
            })
            .collect()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE as usize];
        self.place.store.read(self.memory, 0, &mut bytes).unwrap();
        bytes
    }
}

/// Sends all pending packets of `from` to `to`, in batches as a socket with GRO delivers them.
fn exchange(now: Instant, from: &mut Card, to: &mut Card) -> usize {
    let mut buffer = vec![0xdd; 65_507];
    let mut packets = 0;
    let mut ctx = Context {
        now,
        memory: &mut from.place,
        events: &mut |now, event: &Event| from.events.push(told(&(now, event))),
    };
    from.hca.process_doorbells(&mut ctx);
    loop {
        let mut ctx = Context {
            now,
            memory: &mut from.place,
            events: &mut |now, event: &Event| from.events.push(told(&(now, event))),
        };
        let Some(run) = from.hca.transmit(&mut ctx, &mut (), &mut buffer, 64) else { return packets };
        let mut frames = vec![];
        for packet in buffer[..run.bytes].chunks_mut(run.segment_size) {
            Icrc::write(&run.addressing, packet);
            frames.push(Icrc::split(packet).unwrap().0);
        }
        packets += frames.len();
        let mut placed = 0;
        for (index, frame) in frames.iter().enumerate() {
            let mut ctx = Context {
                now,
                memory: &mut to.place,
                events: &mut |now, event: &Event| to.events.push(told(&(now, event))),
            };
            if placed == 0 && ctx.memory.prefers_batches() {
                placed = to.hca.place_batch(&mut ctx, &run.addressing, &mut frames[index..].iter().copied());
            }
            if placed > 0 {
                placed -= 1;
                to.hca.receive_placed(&mut ctx, &run.addressing, frame);
            } else {
                to.hca.receive(&mut ctx, &run.addressing, frame);
            }
        }
    }
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }
}

/// Started requests, other events, memory and completions of both HCAs.
type Outcome = ([Vec<String>; 2], [Vec<String>; 2], [Vec<u8>; 2], [Vec<String>; 2]);

fn play(seed: u64, is_far: bool, ends: [u64; 2]) -> (Outcome, usize, usize) {
    let mut dice = Dice(seed);
    let mut a = Card::new(1, is_far, ends[0]);
    let mut b = Card::new(2, is_far, ends[1]);
    let mtu = [Mtu::B256, Mtu::B1024, Mtu::B4096][dice.below(3) as usize];
    a.connect((Gid::from(b.address), b.number), mtu);
    b.connect((Gid::from(a.address), a.number), mtu);
    let mut packets = 0;
    for round in 1..=6 {
        // Occasionally many short messages of one kind.
        let series = (dice.below(2) == 0).then(|| (dice.below(600) as u32, dice.below(4)));
        for id in 0..if series.is_some() { 12 } else { 4 } {
            let (length, choice) = series.unwrap_or_else(|| match dice.below(4) {
                0 => (dice.below(600) as u32, dice.below(4)),
                _ => (dice.below(120_000) as u32, dice.below(4)),
            });
            let entries = a.entries(&mut dice, length);
            let address = dice.below(SIZE - u64::from(length));
            let remote = RemoteAddress { address, rkey: b.key };
            let operation = match choice {
                0 => Operation::Write { remote, imm_data: None },
                1 => Operation::Write { remote, imm_data: Some(7) },
                2 => Operation::Read { remote },
                _ => Operation::Send(SendImmOrInvalidate::None),
            };
            let room = b.entries(&mut dice, length + 64);
            b.receives.enqueue(&ReceiveWorkRequest { wr_id: id, sg_list: &room }).unwrap();
            let _ = b.receives.publish();
            let mut request = SendWorkRequest::new(id, operation, &entries);
            request.flags = SendFlags::SIGNALED;
            a.sends.enqueue(&request).unwrap();
            a.sends.publish();
            a.sends.ring(&a.doorbell, a.number);
        }
        let now = Instant::from_nanos(round * 1_000);
        loop {
            let moved = exchange(now, &mut a, &mut b) + exchange(now, &mut b, &mut a);
            packets += moved;
            if moved == 0 {
                break;
            }
        }
    }
    let accesses = a.place.accesses.get() + b.place.accesses.get();
    let bytes = [a.bytes(), b.bytes()];
    let completed = |card: &mut Card| -> Vec<String> {
        std::iter::from_fn(|| card.completions.pop()).map(|completion| told(&completion)).collect()
    };
    let completions = [completed(&mut a), completed(&mut b)];
    // With far memory, requests start early.
    let split = |events: Vec<String>| -> (Vec<String>, Vec<String>) {
        events.into_iter().partition(|event| event.contains("WqeFetched"))
    };
    let ((a_taken, a_told), (b_taken, b_told)) = (split(a.events), split(b.events));
    (([a_taken, b_taken], [a_told, b_told], bytes, completions), packets, accesses)
}

#[test]
fn far_memory_changes_only_the_number_of_accesses() {
    let (mut near_accesses, mut far_accesses) = (0, 0);
    for seed in 1..=60 {
        let (near, packets, accesses) = play(seed, false, [SIZE; 2]);
        near_accesses += accesses;
        let (far, far_packets, accesses) = play(seed, true, [SIZE; 2]);
        far_accesses += accesses;
        assert!(near == far && packets == far_packets, "seed {seed}");
    }
    assert!(far_accesses * 3 < near_accesses, "{far_accesses} accesses instead of {near_accesses}");
}

#[test]
fn inaccessible_memory_fails_the_packet_that_accesses_it() {
    let mut failed = 0;
    for seed in 1..=120 {
        let end = Dice(seed + 1_000).below(SIZE);
        let ends = if seed % 2 == 0 { [end, SIZE] } else { [SIZE, end] };
        let (near, ..) = play(seed, false, ends);
        let (far, ..) = play(seed, true, ends);
        for (near, far) in near.1.iter().zip(&far.1) {
            for (near, far) in near.iter().zip(far) {
                assert_eq!(near, far, "seed {seed}");
            }
            assert_eq!(near.len(), far.len(), "events, seed {seed}");
        }
        assert_eq!(near.3, far.3, "completions, seed {seed}");
        assert!(near.2 == far.2, "memory, seed {seed}");
        assert!(far.0[0].starts_with(&near.0[0]), "requests taken, seed {seed}");
        failed += usize::from(near.1.iter().flatten().any(|event| event.contains("Unreachable")));
    }
    assert!(failed > 40, "only {failed} of 120 runs met the end of memory");
}
