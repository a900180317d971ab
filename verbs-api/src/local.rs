//! A card in this process, whoever drives it: the control verbs are calls, the rings are on the heap.

use crate::Rendezvous;
use crate::backend::{Backend, NewQueuePair, Result, Sizes};
use crate::events::EventQueue;
use crate::memory::Block;
use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::{
    AddressVector, AhId, ClientId, CmChannelId, Context, Counters, CqId, Event, Hca, Instant, Limits,
    MemoryId, Modify, PdId, PortState, QpInit, QpKind, QpRings, QpView, Region, SharedReceiveView, SrqId,
    SrqInit, State, WindowKind, XrcdId,
};
use softhca_queue::{
    Access, CompletionConsumer, DoorbellProducer, ReceiveProducer, SendProducer, cm, completion_ring,
    doorbell, receive_ring, send_ring,
};
use softhca_wire::{Gid, Mtu, Qpn, RemoteKey};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

/// Where the card's news for the application is put up.
#[derive(Default)]
pub(crate) struct Board {
    queues: Mutex<BTreeMap<CqId, Arc<Notifier>>>,
    events: EventQueue,
    cm_channels: Mutex<BTreeMap<CmChannelId, Arc<Notifier>>>,
}

impl Board {
    /// Takes note of an event, if it is news.
    pub fn put_up(&self, event: &Event) {
        match event {
            Event::Notified { cq } => {
                let queue = self.queues.lock().get(cq).cloned();
                if let Some(queue) = queue {
                    queue.notify();
                }
            }
            Event::Raised { event, .. } => self.events.push(*event),
            Event::CmRaised { channel, .. } => {
                let channel = self.cm_channels.lock().get(channel).cloned();
                if let Some(channel) = channel {
                    channel.notify();
                }
            }
            _ => {}
        }
    }
}

/// What a card sits in: who drives it, where its memory is, which time it lives in.
pub(crate) trait Seat: Send + Sync + 'static {
    /// As in [`Backend`].
    fn check_process(&self) -> Result<()> {
        Ok(())
    }
    /// Calls `act` with the card: a control verb.
    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R;
    /// Makes a block known to the card.
    fn add_memory(&self, block: Arc<Block>) -> MemoryId;
    /// Makes it forget one.
    fn remove_memory(&self, memory: MemoryId);
    /// Refuses if the network does not bring what is sent to a group that was just joined.
    fn check_group(&self, group: Gid) -> Result<()> {
        let _ = group;
        Ok(())
    }
    /// A doorbell rang.
    fn hear(&self);
    /// A queue pair may send from now on.
    fn started(&self, view: &QpView) {
        let _ = view;
    }
    /// As in [`Backend`].
    fn active_mtu(&self) -> Mtu;
    /// As in [`Backend`].
    fn host_named(&self, name: &str) -> Option<IpAddr>;
    /// As in [`Backend`].
    fn drive(&self);
    /// As in [`Backend`].
    fn now(&self) -> Instant;
    /// As in [`Backend`].
    fn attend(&self, news: &Notifier, seen: u64) {
        let _ = (news, seen);
    }
    /// As in [`Backend`].
    fn wait(&self, news: &Notifier, seen: u64, until: Option<Instant>) -> bool;
    /// As in [`Backend`].
    fn random(&self) -> u64;
    /// As in [`Backend`].
    fn rendezvous(&self) -> Rendezvous;
}

/// A card in this process.
pub(crate) struct Local<S: Seat> {
    pub seat: S,
    board: Arc<Board>,
    client: ClientId,
    doorbell: DoorbellProducer,
    /// Where the next region that the card allocates begins: the same in every run.
    next_address: Mutex<u64>,
}

impl<S: Seat> Local<S> {
    /// An application on the card in `seat`, whose events go to `board`.
    pub fn new(seat: S, board: Arc<Board>) -> Result<Local<S>> {
        let (doorbell, heard) = doorbell(Limits::CARD.queue_pairs as u32);
        let client = seat.control(|hca, _| hca.open_client(heard))?;
        Ok(Local { seat, board, client, doorbell, next_address: Mutex::new(0x1000_0000) })
    }

    fn control<R>(
        &self,
        act: impl FnOnce(&mut Hca, &mut Context<'_>, ClientId) -> std::result::Result<R, softhca_engine::Error>,
    ) -> Result<R> {
        self.seat.check_process()?;
        Ok(self.seat.control(|hca, ctx| act(hca, ctx, self.client))?)
    }
}

impl<S: Seat> Backend for Local<S> {
    fn check_process(&self) -> Result<()> {
        self.seat.check_process()
    }

    fn gids(&self) -> Vec<Gid> {
        self.control(|hca, _, _| Ok(hca.gids().to_vec())).unwrap_or_default()
    }

    fn counters(&self) -> Counters {
        self.control(|hca, _, _| Ok(*hca.counters())).unwrap_or_default()
    }

    fn allocate_domain(&self) -> Result<PdId> {
        self.control(|hca, _, client| hca.allocate_domain(client))
    }

    fn free_domain(&self, domain: PdId) -> Result<()> {
        self.control(|hca, _, client| hca.free_domain(client, domain))
    }

    fn register(
        &self,
        domain: PdId,
        base: Option<u64>,
        length: u64,
        block: Arc<Block>,
        access: Access,
    ) -> Result<(RemoteKey, u64)> {
        self.seat.check_process()?;
        let mut next = self.next_address.lock();
        let base = base.unwrap_or(*next);
        let memory = self.seat.add_memory(block);
        let region = Region { client: self.client, domain, base, length, access, memory };
        match self.control(|hca, _, _| hca.register(region)) {
            Ok(key) => {
                // The next region begins on a page of its own, behind a page that belongs to nobody.
                *next += length.next_multiple_of(4096) + 4096;
                let base = if access.contains(Access::ZERO_BASED) { 0 } else { base };
                Ok((key, base))
            }
            Err(error) => {
                self.seat.remove_memory(memory);
                Err(error)
            }
        }
    }

    fn reregister(
        &self,
        key: RemoteKey,
        domain: Option<PdId>,
        translation: Option<(u64, Arc<Block>)>,
        access: Option<Access>,
    ) -> Result<RemoteKey> {
        self.check_process()?;
        let translation =
            translation.map(|(base, block)| (base, block.len() as u64, self.seat.add_memory(block)));
        let mut moved_from = None;
        let result = self.control(|hca, _, client| {
            let mut region = hca.region(client, key)?;
            region.domain = domain.unwrap_or(region.domain);
            region.access = access.unwrap_or(region.access);
            if let Some((base, length, memory)) = translation {
                moved_from = Some(region.memory);
                (region.base, region.length, region.memory) = (base, length, memory);
            }
            hca.reregister(client, key, region)
        });
        let unused = if result.is_ok() { moved_from } else { translation.map(|(_, _, memory)| memory) };
        if let Some(memory) = unused {
            self.seat.remove_memory(memory);
        }
        result
    }

    fn deregister(&self, key: RemoteKey) -> Result<()> {
        let region = self.control(|hca, _, client| hca.deregister(client, key))?;
        self.seat.remove_memory(region.memory);
        Ok(())
    }

    fn allocate_window(&self, domain: PdId, kind: WindowKind) -> Result<RemoteKey> {
        self.control(|hca, _, client| hca.allocate_window(client, domain, kind))
    }

    fn free_window(&self, key: RemoteKey) -> Result<()> {
        self.control(|hca, _, client| hca.free_window(client, key))
    }

    fn create_completion_queue(&self, slots: u32, news: Arc<Notifier>) -> Result<(CqId, CompletionConsumer)> {
        let (producer, consumer) = completion_ring(slots);
        let cq = self.control(|hca, _, client| hca.create_completion_queue(client, producer))?;
        self.board.queues.lock().insert(cq, news);
        Ok((cq, consumer))
    }

    fn resize_completion_queue(&self, cq: CqId, slots: u32) -> Result<CompletionConsumer> {
        let (producer, consumer) = completion_ring(slots);
        self.control(|hca, _, client| hca.resize_completion_queue(client, cq, producer))?;
        Ok(consumer)
    }

    fn destroy_completion_queue(&self, cq: CqId) -> Result<()> {
        self.control(|hca, _, client| hca.destroy_completion_queue(client, cq))?;
        self.board.queues.lock().remove(&cq);
        Ok(())
    }

    fn create_shared_receive_queue(
        &self,
        init: SrqInit,
        slots: u32,
        entries: usize,
    ) -> Result<(SrqId, ReceiveProducer)> {
        let (producer, consumer) = receive_ring(slots, entries);
        let srq = self.control(|hca, _, client| hca.create_shared_receive_queue(client, init, consumer))?;
        Ok((srq, producer))
    }

    fn arm_shared_receive_queue(&self, srq: SrqId, limit: u32) -> Result<()> {
        self.control(|hca, ctx, client| hca.arm_shared_receive_queue(ctx, client, srq, limit))
    }

    fn query_shared_receive_queue(&self, srq: SrqId) -> Result<SharedReceiveView> {
        self.control(|hca, _, client| hca.query_shared_receive_queue(client, srq))
    }

    fn destroy_shared_receive_queue(&self, srq: SrqId) -> Result<()> {
        self.control(|hca, _, client| hca.destroy_shared_receive_queue(client, srq))
    }

    fn open_xrc_domain(&self) -> Result<XrcdId> {
        self.control(|hca, _, client| hca.open_xrc_domain(client))
    }

    fn close_xrc_domain(&self, domain: XrcdId) -> Result<()> {
        self.control(|hca, _, client| hca.close_xrc_domain(client, domain))
    }

    fn create_address_handle(&self, domain: PdId, vector: AddressVector) -> Result<AhId> {
        self.control(|hca, _, client| hca.create_address_handle(client, domain, vector))
    }

    fn destroy_address_handle(&self, handle: AhId) -> Result<()> {
        self.control(|hca, _, client| hca.destroy_address_handle(client, handle))
    }

    fn create_queue_pair(&self, init: QpInit, sizes: Sizes) -> Result<NewQueuePair> {
        let Sizes { sends, receives, entries, inline } = sizes;
        let mut rings = QpRings::default();
        let (mut send, mut receive) = (None, None);
        if init.kind != QpKind::XrcTarget {
            let (producer, consumer) = send_ring(sends, entries, inline);
            (send, rings.send) = (Some(producer), Some(consumer));
        }
        let receives_itself = !matches!(init.kind, QpKind::XrcInitiator | QpKind::XrcTarget);
        if receives_itself && init.shared_receive_queue.is_none() {
            let (producer, consumer) = receive_ring(receives, entries);
            (receive, rings.receive) = (Some(producer), Some(consumer));
        }
        let number = self.control(|hca, _, client| hca.create_queue_pair(client, init, rings))?;
        Ok(NewQueuePair { number, send, receive })
    }

    fn modify_queue_pair(&self, number: Qpn, modify: &Modify) -> Result<State> {
        let state = self.control(|hca, ctx, client| hca.modify_queue_pair(ctx, client, number, modify))?;
        if state == State::ReadyToSend && modify.send_psn.is_some() {
            self.seat.started(&self.query_queue_pair(number)?);
        }
        Ok(state)
    }

    fn query_queue_pair(&self, number: Qpn) -> Result<QpView> {
        self.control(|hca, _, client| hca.query_queue_pair(client, number))
    }

    fn destroy_queue_pair(&self, number: Qpn) -> Result<()> {
        self.control(|hca, ctx, client| hca.destroy_queue_pair(ctx, client, number))
    }

    fn attach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        self.control(|hca, _, client| hca.attach_multicast(client, number, group))?;
        self.seat.check_group(group).inspect_err(|_| {
            let _ = self.detach_multicast(number, group);
        })
    }

    fn detach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        self.control(|hca, _, client| hca.detach_multicast(client, number, group))
    }

    fn create_cm_channel(&self, news: Arc<Notifier>) -> Result<CmChannelId> {
        match self.cm(cm::Call::CreateChannel)? {
            cm::Reply::Channel(channel) => {
                self.board.cm_channels.lock().insert(channel, news);
                Ok(channel)
            }
            _ => unreachable!("the card answers with a channel"),
        }
    }

    fn destroy_cm_channel(&self, channel: CmChannelId) -> Result<()> {
        self.board.cm_channels.lock().remove(&channel);
        self.cm(cm::Call::DestroyChannel(channel)).map(|_| ())
    }

    fn cm(&self, call: cm::Call) -> Result<cm::Reply> {
        self.control(|hca, ctx, client| hca.cm(ctx, client, call))
    }

    fn active_mtu(&self) -> Mtu {
        self.seat.active_mtu()
    }

    fn port_state(&self) -> PortState {
        self.control(|hca, _, _| Ok(hca.port())).unwrap_or(PortState::Down)
    }

    fn host_named(&self, name: &str) -> Option<IpAddr> {
        self.seat.host_named(name)
    }

    fn events(&self) -> &EventQueue {
        &self.board.events
    }

    fn ring(&self, number: Qpn, send: &SendProducer) {
        send.ring(&self.doorbell, number);
        self.seat.hear();
    }

    fn drive(&self, _: CqId) {
        self.seat.drive();
    }

    fn now(&self) -> Instant {
        self.seat.now()
    }

    fn attend(&self, news: &Notifier, seen: u64) {
        self.seat.attend(news, seen);
    }

    fn wait(&self, news: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        self.seat.wait(news, seen, until)
    }

    fn random(&self) -> u64 {
        self.seat.random()
    }

    fn rendezvous(&self) -> Rendezvous {
        self.seat.rendezvous()
    }
}
