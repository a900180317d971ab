//! Clients that write nonsense into the rings that they share with the card.

use softhca_engine::{
    AsyncEvent, ClientId, Context, CqId, Event, Hca, Instant, ModifyQp, PdId, QpInitAttributes, QpRings,
    QpState, Settings, SrqInitAttributes,
};
use softhca_fabric::SparseMemory;
use softhca_queue::{
    CompletionConsumer, CompletionProducer, DoorbellConsumer, DoorbellProducer, ReceiveConsumer,
    ReceiveProducer, SendConsumer, SendProducer, SharedWords,
};
use softhca_tests::bare::{reliable, steps};
use softhca_wire::{AddressHeaders, Bth, Gid, Mtu, Opcode, Psn, Qpn, TransportHeader};
use std::net::IpAddr;
use std::sync::atomic::Ordering;

const SLOTS: u32 = 4;

/// One client of a card, with the words of everything that it shares.
struct RawClient {
    hca: Hca,
    store: SparseMemory,
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

    /// A card whose queue pair takes its receives from a shared queue, or from its own.
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
        let (store, events) = (SparseMemory::default(), Vec::new());
        let mut card =
            RawClient { hca, store, events, client, qp, sends, receives, completions, doorbell, polled };
        for step in steps((address(2), Qpn::new(0x77)), Mtu::B1024, Psn::new(0)) {
            card.modify(step);
        }
        card
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

    /// Lets the card look at everything.
    fn process_doorbells(&mut self) {
        self.doorbell[8].store(u64::from(self.qp.value()) + 1, Ordering::SeqCst);
        // The consumer goes round the ring; ring at every place.
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
fn an_impossible_send_index_stops_that_queue_pair_with_an_event() {
    for index in [5, 1 << 32, u64::MAX] {
        let mut card = RawClient::new();
        card.sends[0].store(index, Ordering::SeqCst);
        card.process_doorbells();
        assert_eq!(card.state(), QpState::Error);
        let fatal =
            Event::AsyncEventRaised { client: Some(card.client), event: AsyncEvent::QueuePairFatal(card.qp) };
        assert!(card.events.contains(&fatal), "{:?}", card.events);
        assert!(card.events.iter().any(|event| matches!(event, Event::ClientFaulted { .. })));
        card.process_doorbells();
    }
}

#[test]
fn an_index_that_goes_back_stops_the_queue_pair() {
    let mut card = RawClient::new();
    card.sends[0].store(2, Ordering::SeqCst);
    card.process_doorbells();
    card.sends[0].store(1, Ordering::SeqCst);
    card.process_doorbells();
    assert_eq!(card.state(), QpState::Error);
}

#[test]
fn an_operation_that_does_not_exist_is_a_local_error() {
    let mut card = RawClient::new();
    // Slots begin behind three cache lines; the second word is kind, flags and size.
    card.sends[24 + 1].store(0xee, Ordering::SeqCst);
    card.sends[0].store(2, Ordering::SeqCst);
    card.process_doorbells();
    assert_eq!(card.outcomes(), ["local-qp-operation", "flushed"]);
    assert_eq!(card.state(), QpState::Error);
}

#[test]
fn words_that_nobody_chose_in_a_slot_never_panic() {
    let mut word = 1u64;
    for round in 0..2000 {
        let mut card = RawClient::new();
        for slot in card.sends[24..].iter().chain(&card.receives[24..]) {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            slot.store(word.rotate_left(29), Ordering::Relaxed);
        }
        // A kind that exists, most of the time, and a size that may be anything.
        for slot in 0..SLOTS as usize {
            let kind = (word >> (slot * 8)) % 11;
            let stride = SendProducer::layout(SLOTS, 2, 16).stride as usize;
            let control = &card.sends[24 + slot * stride + 1];
            let old = control.load(Ordering::Relaxed);
            control.store(old & !0xff | kind, Ordering::Relaxed);
        }
        card.sends[0].store(u64::from(SLOTS), Ordering::SeqCst);
        card.receives[0].store(u64::from(SLOTS), Ordering::SeqCst);
        card.process_doorbells();
        card.modify(ModifyQp::default().state(QpState::Error));
        card.process_doorbells();
        assert_eq!(card.outcomes().len(), 2 * SLOTS as usize, "round {round}");
    }
}

#[test]
fn an_impossible_receive_index_is_told_when_the_queue_is_flushed() {
    let mut card = RawClient::new();
    card.receives[0].store(99, Ordering::SeqCst);
    card.modify(ModifyQp::default().state(QpState::Error));
    assert!(card.events.iter().any(|event| matches!(event, Event::ClientFaulted { .. })));
    card.process_doorbells();
    assert_eq!(card.outcomes(), Vec::<&str>::new());
}

#[test]
fn a_consumer_that_lies_about_what_it_polled_hurts_nobody_else() {
    for lie in [1, 1000, u64::MAX] {
        let mut card = RawClient::new();
        card.completions[8].store(lie, Ordering::SeqCst);
        card.sends[24 + 1].store(0xee, Ordering::SeqCst);
        card.sends[0].store(1, Ordering::SeqCst);
        card.process_doorbells();
        assert_eq!(card.state(), QpState::Error);
    }
}

#[test]
fn a_doorbell_for_somebody_elses_queue_pair_is_ignored() {
    let mut card = RawClient::new();
    let words = SharedWords::heap(DoorbellProducer::words(8));
    card.hca.open_client(DoorbellConsumer::new(words.clone(), 8)).unwrap();
    card.sends[0].store(u64::MAX, Ordering::SeqCst);
    for (slot, number) in (8..16).zip([card.qp.value(), 0, 1, 0xff_ffff, 5, 6, 7, 8]) {
        words[slot].store(u64::from(number) + 1, Ordering::SeqCst);
    }
    card.with_hca(|hca, ctx| hca.process_doorbells(ctx));
    assert_eq!(card.state(), QpState::ReadyToSend, "the other client's word does not count");
}

#[test]
fn an_impossible_index_of_a_shared_queue_stops_who_takes_from_it_with_an_event_for_the_queue() {
    let mut card = RawClient::with(true);
    card.receives[0].store(99, Ordering::SeqCst);
    let opcode = Opcode::all().find(|opcode| opcode.name() == "SEND_ONLY").unwrap();
    let mut packet = [0; 16];
    TransportHeader::new(Bth::new(opcode, card.qp, Psn::new(0))).emit(&mut packet);
    let envelope = AddressHeaders::between(address(2).ip(), address(1).ip());
    card.with_hca(|hca, ctx| hca.receive(ctx, &envelope, &packet));
    assert_eq!(card.state(), QpState::Error);
    let raised: Vec<AsyncEvent> = card
        .events
        .iter()
        .filter_map(
            |event| if let Event::AsyncEventRaised { event, .. } = event { Some(*event) } else { None },
        )
        .collect();
    let [AsyncEvent::SharedReceiveQueueError(_), AsyncEvent::QueuePairFatal(qp), ..] = raised[..] else {
        panic!("{raised:?}")
    };
    assert_eq!(qp, card.qp);
}
