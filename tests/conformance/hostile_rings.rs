//! Clients that write garbage to the rings that they share with the HCA.

use softhca_engine::{
    AsyncEvent, ClientId, Context, CqId, Event, Hca, Instant, MemoryObjects, ModifyQp, PdId,
    QpInitAttributes, QpRings, QpState, Settings, SrqInitAttributes,
};
use softhca_queue::{
    CompletionConsumer, CompletionProducer, DoorbellConsumer, DoorbellProducer, ReceiveConsumer,
    ReceiveProducer, SendConsumer, SendProducer, SharedWords,
};
use softhca_tests::bare::{reliable, steps};
use softhca_wire::{AddressHeaders, Bth, Gid, Mtu, Opcode, Psn, Qpn, TransportHeader};
use std::net::IpAddr;
use std::sync::atomic::Ordering;

const SLOTS: u32 = 4;

/// One client of an HCA, with direct access to its rings.
struct RawClient {
    hca: Hca,
    store: MemoryObjects,
    events: Vec<Event>,
    client: ClientId,
    qp: Qpn,
    sends: SharedWords,
    receives: SharedWords,
    completions: SharedWords,
    doorbell: SharedWords,
    polled: CompletionConsumer,
}

fn address(last: u8) -> Gid {
    Gid::from(IpAddr::from([10, 0, 0, last]))
}

impl RawClient {
    fn new() -> RawClient {
        RawClient::with(false)
    }

    /// A client whose queue pair uses a shared receive queue or its own.
    fn with(shared: bool) -> RawClient {
        let mut hca = Hca::new(Settings::default(), vec![address(1)]);
        let doorbell = SharedWords::heap(DoorbellProducer::words(8));
        let client = hca.open_client(DoorbellConsumer::new(doorbell.clone(), 8)).unwrap();
        let sends = SharedWords::heap(SendProducer::layout(SLOTS, 2, 16).words());
        let receives = SharedWords::heap(ReceiveProducer::layout(SLOTS, 2).words());
        let completions = SharedWords::heap(CompletionProducer::layout(64).words());
        let polled = CompletionConsumer::new(completions.clone(), 64);
        let domain: PdId = hca.allocate_protection_domain(client).unwrap();
        let producer = CompletionProducer::new(completions.clone(), 64);
        let cq: CqId = hca.create_completion_queue(client, producer).unwrap();
        let mut receive = Some(ReceiveConsumer::new(receives.clone(), SLOTS, 2));
        let shared_receive_queue = shared.then(|| {
            let init = SrqInitAttributes { pd: domain, srq_limit: 0, xrc: None };
            hca.create_shared_receive_queue(client, init, receive.take().unwrap()).unwrap()
        });
        let init = QpInitAttributes { srq: shared_receive_queue, sq_sig_all: true, ..reliable(domain, cq) };
        let rings = QpRings { send: Some(SendConsumer::new(sends.clone(), SLOTS, 2, 16)), receive };
        let qp = hca.create_queue_pair(client, init, rings).unwrap();
        let (store, events) = (MemoryObjects::default(), Vec::new());
        let mut client =
            RawClient { hca, store, events, client, qp, sends, receives, completions, doorbell, polled };
        for step in steps((address(2), Qpn::new(0x77)), Mtu::B1024, Psn::new(0)) {
            client.modify(step);
        }
        client
    }

    fn with_hca<R>(&mut self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let events = &mut self.events;
        let mut sink = |_, event: &Event| events.push(*event);
        let memory = &mut self.store;
        act(&mut self.hca, &mut Context { now: Instant::ZERO, memory, events: &mut sink })
    }

    fn modify(&mut self, modify: ModifyQp) {
        let (client, qp) = (self.client, self.qp);
        self.with_hca(|hca, ctx| hca.modify_queue_pair(ctx, client, qp, &modify)).unwrap();
    }

    /// Rings every doorbell and processes them.
    fn process_doorbells(&mut self) {
        self.doorbell[8].store(u64::from(self.qp.value()) + 1, Ordering::SeqCst);
        // The consumer position is not known here, so write every slot.
        for slot in 8..16 {
            self.doorbell[slot].store(u64::from(self.qp.value()) + 1, Ordering::SeqCst);
        }
        let mut buffer = [0; 8192];
        self.with_hca(|hca, ctx| {
            hca.process_doorbells(ctx);
            while hca.transmit(ctx, &mut (), &mut buffer, 1).is_some() {}
        });
    }

    fn state(&self) -> QpState {
        self.hca.query_queue_pair(self.client, self.qp).unwrap().state
    }

    fn outcomes(&mut self) -> Vec<&'static str> {
        std::iter::from_fn(|| self.polled.pop()).map(|c| c.status.name()).collect()
    }
}

#[test]
fn an_invalid_send_index_stops_that_queue_pair_with_an_event() {
    for index in [5, 1 << 32, u64::MAX] {
        let mut client = RawClient::new();
        client.sends[0].store(index, Ordering::SeqCst);
        client.process_doorbells();
        assert_eq!(client.state(), QpState::Error);
        let fatal = Event::AsyncEventRaised {
            client: Some(client.client),
            event: AsyncEvent::QueuePairFatal(client.qp),
        };
        assert!(client.events.contains(&fatal), "{:?}", client.events);
        assert!(client.events.iter().any(|event| matches!(event, Event::ClientFaulted { .. })));
        client.process_doorbells();
    }
}

#[test]
fn an_index_that_goes_back_stops_the_queue_pair() {
    let mut client = RawClient::new();
    client.sends[0].store(2, Ordering::SeqCst);
    client.process_doorbells();
    client.sends[0].store(1, Ordering::SeqCst);
    client.process_doorbells();
    assert_eq!(client.state(), QpState::Error);
}

#[test]
fn an_operation_that_does_not_exist_is_a_local_error() {
    let mut client = RawClient::new();
    // Slots start after three cache lines; the second word holds kind, flags and size.
    client.sends[24 + 1].store(0xee, Ordering::SeqCst);
    client.sends[0].store(2, Ordering::SeqCst);
    client.process_doorbells();
    assert_eq!(client.outcomes(), ["LOC_QP_OP_ERR", "WR_FLUSH_ERR"]);
    assert_eq!(client.state(), QpState::Error);
}

#[test]
fn random_words_in_a_slot_never_panic() {
    let mut word = 1u64;
    for round in 0..2000 {
        let mut client = RawClient::new();
        for slot in client.sends[24..].iter().chain(&client.receives[24..]) {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            slot.store(word.rotate_left(29), Ordering::Relaxed);
        }
        // Usually a valid kind, and any size.
        for slot in 0..SLOTS as usize {
            let kind = (word >> (slot * 8)) % 11;
            let stride = SendProducer::layout(SLOTS, 2, 16).stride as usize;
            let control = &client.sends[24 + slot * stride + 1];
            let old = control.load(Ordering::Relaxed);
            control.store(old & !0xff | kind, Ordering::Relaxed);
        }
        client.sends[0].store(u64::from(SLOTS), Ordering::SeqCst);
        client.receives[0].store(u64::from(SLOTS), Ordering::SeqCst);
        client.process_doorbells();
        client.modify(ModifyQp::default().state(QpState::Error));
        client.process_doorbells();
        assert_eq!(client.outcomes().len(), 2 * SLOTS as usize, "round {round}");
    }
}

#[test]
fn an_invalid_receive_index_is_reported_when_the_queue_is_flushed() {
    let mut client = RawClient::new();
    client.receives[0].store(99, Ordering::SeqCst);
    client.modify(ModifyQp::default().state(QpState::Error));
    assert!(client.events.iter().any(|event| matches!(event, Event::ClientFaulted { .. })));
    client.process_doorbells();
    assert_eq!(client.outcomes(), Vec::<&str>::new());
}

#[test]
fn a_wrong_consumer_index_affects_no_other_client() {
    for lie in [1, 1000, u64::MAX] {
        let mut client = RawClient::new();
        client.completions[8].store(lie, Ordering::SeqCst);
        client.sends[24 + 1].store(0xee, Ordering::SeqCst);
        client.sends[0].store(1, Ordering::SeqCst);
        client.process_doorbells();
        assert_eq!(client.state(), QpState::Error);
    }
}

#[test]
fn a_doorbell_for_another_clients_queue_pair_is_ignored() {
    let mut client = RawClient::new();
    let words = SharedWords::heap(DoorbellProducer::words(8));
    client.hca.open_client(DoorbellConsumer::new(words.clone(), 8)).unwrap();
    client.sends[0].store(u64::MAX, Ordering::SeqCst);
    for (slot, number) in (8..16).zip([client.qp.value(), 0, 1, 0xff_ffff, 5, 6, 7, 8]) {
        words[slot].store(u64::from(number) + 1, Ordering::SeqCst);
    }
    client.with_hca(|hca, ctx| hca.process_doorbells(ctx));
    assert_eq!(client.state(), QpState::ReadyToSend, "the doorbell of another client is ignored");
}

#[test]
fn an_invalid_srq_index_stops_its_queue_pair_with_an_srq_event() {
    let mut client = RawClient::with(true);
    client.receives[0].store(99, Ordering::SeqCst);
    let opcode = Opcode::all().find(|opcode| opcode.name() == "SEND_ONLY").unwrap();
    let mut packet = [0; 16];
    TransportHeader::new(Bth::new(opcode, client.qp, Psn::new(0))).emit(&mut packet);
    let addressing = AddressHeaders::between(address(2).ip(), address(1).ip());
    client.with_hca(|hca, ctx| hca.receive(ctx, &addressing, &packet));
    assert_eq!(client.state(), QpState::Error);
    let raised: Vec<AsyncEvent> = client
        .events
        .iter()
        .filter_map(
            |event| if let Event::AsyncEventRaised { event, .. } = event { Some(*event) } else { None },
        )
        .collect();
    let [AsyncEvent::SharedReceiveQueueError(_), AsyncEvent::QueuePairFatal(qp), ..] = raised[..] else {
        panic!("{raised:?}")
    };
    assert_eq!(qp, client.qp);
}
