//! A card in this process, whoever drives it: the control verbs are calls, the rings are on the heap.

use crate::EndpointExchange;
use crate::async_events::AsyncEventQueue;
use crate::backend::{Backend, NewQueuePair, QpCapabilities, Result};
use crate::memory::MemoryBlock;
use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::{
    AddressVector, AhId, ClientId, CmChannelId, Context, Counters, CqId, DeviceLimits, Event, Hca, Instant,
    MemoryId, MemoryRegion, MemoryWindowType, ModifyQp, PdId, PortState, QpInitAttributes, QpRings,
    QpSnapshot, QpState, QpType, SrqAttributes, SrqId, SrqInitAttributes, XrcdId,
};
use softhca_queue::{
    AccessFlags, CompletionConsumer, DoorbellProducer, ReceiveProducer, SendProducer, cm, completion_ring,
    doorbell_ring, receive_ring, send_ring,
};
use softhca_wire::{Gid, Mtu, Qpn, RemoteKey};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

/// Where the card's news for the application is put up.
#[derive(Default)]
pub(crate) struct EventBus {
    completion_queues: Mutex<BTreeMap<CqId, Arc<Notifier>>>,
    async_events: AsyncEventQueue,
    cm_channels: Mutex<BTreeMap<CmChannelId, Arc<Notifier>>>,
}

impl EventBus {
    /// Takes note of an event, if it is news.
    pub fn dispatch(&self, event: &Event) {
        match event {
            Event::CompletionNotified { cq } => {
                let queue = self.completion_queues.lock().get(cq).cloned();
                if let Some(queue) = queue {
                    queue.notify();
                }
            }
            Event::AsyncEventRaised { event, .. } => self.async_events.push(*event),
            Event::CmEventRaised { channel, .. } => {
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
pub(crate) trait CardRuntime: Send + Sync + 'static {
    /// As in [`Backend`].
    fn check_process(&self) -> Result<()> {
        Ok(())
    }
    /// Calls `act` with the card: a control verb.
    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R;
    /// Makes a block known to the card.
    fn add_memory(&self, block: Arc<MemoryBlock>) -> MemoryId;
    /// Makes it forget one.
    fn remove_memory(&self, memory: MemoryId);
    /// Refuses if the network does not bring what is sent to a group that was just joined.
    fn check_multicast_group(&self, group: Gid) -> Result<()> {
        let _ = group;
        Ok(())
    }
    /// A doorbell rang.
    fn on_doorbell(&self);
    /// A queue pair may send from now on.
    fn on_ready_to_send(&self, view: &QpSnapshot) {
        let _ = view;
    }
    /// As in [`Backend`].
    fn active_mtu(&self) -> Mtu;
    /// As in [`Backend`].
    fn resolve_host(&self, name: &str) -> Option<IpAddr>;
    /// As in [`Backend`].
    fn drive(&self);
    /// As in [`Backend`].
    fn now(&self) -> Instant;
    /// As in [`Backend`].
    fn spin_wait(&self, news: &Notifier, seen: u64) {
        let _ = (news, seen);
    }
    /// As in [`Backend`].
    fn wait(&self, news: &Notifier, seen: u64, until: Option<Instant>) -> bool;
    /// As in [`Backend`].
    fn random(&self) -> u64;
    /// As in [`Backend`].
    fn endpoint_exchange(&self) -> EndpointExchange;
}

/// A card in this process.
pub(crate) struct LocalBackend<S: CardRuntime> {
    pub runtime: S,
    event_bus: Arc<EventBus>,
    client: ClientId,
    doorbell: DoorbellProducer,
    /// Where the next region that the card allocates begins: the same in every run.
    next_address: Mutex<u64>,
}

impl<S: CardRuntime> LocalBackend<S> {
    /// An application on the card in `seat`, whose events go to `board`.
    pub fn new(seat: S, board: Arc<EventBus>) -> Result<LocalBackend<S>> {
        let (doorbell, heard) = doorbell_ring(DeviceLimits::HCA.max_qp as u32);
        let client = seat.control(|hca, _| hca.open_client(heard))?;
        Ok(LocalBackend {
            runtime: seat,
            event_bus: board,
            client,
            doorbell,
            next_address: Mutex::new(0x1000_0000),
        })
    }

    fn control<R>(
        &self,
        act: impl FnOnce(
            &mut Hca,
            &mut Context<'_>,
            ClientId,
        ) -> std::result::Result<R, softhca_engine::VerbsError>,
    ) -> Result<R> {
        self.runtime.check_process()?;
        Ok(self.runtime.control(|hca, ctx| act(hca, ctx, self.client))?)
    }
}

impl<S: CardRuntime> Backend for LocalBackend<S> {
    fn check_process(&self) -> Result<()> {
        self.runtime.check_process()
    }

    fn gids(&self) -> Vec<Gid> {
        self.control(|hca, _, _| Ok(hca.gids().to_vec())).unwrap_or_default()
    }

    fn counters(&self) -> Counters {
        self.control(|hca, _, _| Ok(*hca.counters())).unwrap_or_default()
    }

    fn allocate_protection_domain(&self) -> Result<PdId> {
        self.control(|hca, _, client| hca.allocate_protection_domain(client))
    }

    fn free_protection_domain(&self, domain: PdId) -> Result<()> {
        self.control(|hca, _, client| hca.free_protection_domain(client, domain))
    }

    fn register_memory(
        &self,
        domain: PdId,
        base: Option<u64>,
        length: u64,
        block: Arc<MemoryBlock>,
        access: AccessFlags,
    ) -> Result<(RemoteKey, u64)> {
        self.runtime.check_process()?;
        let mut next = self.next_address.lock();
        let base = base.unwrap_or(*next);
        let memory = self.runtime.add_memory(block);
        let region = MemoryRegion {
            client: self.client,
            pd: domain,
            iova: base,
            length,
            access_flags: access,
            memory,
        };
        match self.control(|hca, _, _| hca.register_memory_region(region)) {
            Ok(key) => {
                // The next region begins on a page of its own, behind a page that belongs to nobody.
                *next += length.next_multiple_of(4096) + 4096;
                let base = if access.contains(AccessFlags::ZERO_BASED) { 0 } else { base };
                Ok((key, base))
            }
            Err(error) => {
                self.runtime.remove_memory(memory);
                Err(error)
            }
        }
    }

    fn reregister_memory(
        &self,
        key: RemoteKey,
        domain: Option<PdId>,
        translation: Option<(u64, Arc<MemoryBlock>)>,
        access: Option<AccessFlags>,
    ) -> Result<RemoteKey> {
        self.check_process()?;
        let translation =
            translation.map(|(base, block)| (base, block.len() as u64, self.runtime.add_memory(block)));
        let mut moved_from = None;
        let result = self.control(|hca, _, client| {
            let mut region = hca.query_memory_region(client, key)?;
            region.pd = domain.unwrap_or(region.pd);
            region.access_flags = access.unwrap_or(region.access_flags);
            if let Some((base, length, memory)) = translation {
                moved_from = Some(region.memory);
                (region.iova, region.length, region.memory) = (base, length, memory);
            }
            hca.reregister_memory_region(client, key, region)
        });
        let unused = if result.is_ok() { moved_from } else { translation.map(|(_, _, memory)| memory) };
        if let Some(memory) = unused {
            self.runtime.remove_memory(memory);
        }
        result
    }

    fn deregister_memory(&self, key: RemoteKey) -> Result<()> {
        let region = self.control(|hca, _, client| hca.deregister_memory_region(client, key))?;
        self.runtime.remove_memory(region.memory);
        Ok(())
    }

    fn allocate_memory_window(&self, domain: PdId, kind: MemoryWindowType) -> Result<RemoteKey> {
        self.control(|hca, _, client| hca.allocate_memory_window(client, domain, kind))
    }

    fn free_memory_window(&self, key: RemoteKey) -> Result<()> {
        self.control(|hca, _, client| hca.free_memory_window(client, key))
    }

    fn create_completion_queue(&self, slots: u32, news: Arc<Notifier>) -> Result<(CqId, CompletionConsumer)> {
        let (producer, consumer) = completion_ring(slots);
        let cq = self.control(|hca, _, client| hca.create_completion_queue(client, producer))?;
        self.event_bus.completion_queues.lock().insert(cq, news);
        Ok((cq, consumer))
    }

    fn resize_completion_queue(&self, cq: CqId, slots: u32) -> Result<CompletionConsumer> {
        let (producer, consumer) = completion_ring(slots);
        self.control(|hca, _, client| hca.resize_completion_queue(client, cq, producer))?;
        Ok(consumer)
    }

    fn destroy_completion_queue(&self, cq: CqId) -> Result<()> {
        self.control(|hca, _, client| hca.destroy_completion_queue(client, cq))?;
        self.event_bus.completion_queues.lock().remove(&cq);
        Ok(())
    }

    fn create_shared_receive_queue(
        &self,
        init: SrqInitAttributes,
        slots: u32,
        entries: usize,
    ) -> Result<(SrqId, ReceiveProducer)> {
        let (producer, consumer) = receive_ring(slots, entries);
        let srq = self.control(|hca, _, client| hca.create_shared_receive_queue(client, init, consumer))?;
        Ok((srq, producer))
    }

    fn set_srq_limit(&self, srq: SrqId, limit: u32) -> Result<()> {
        self.control(|hca, ctx, client| hca.arm_shared_receive_queue(ctx, client, srq, limit))
    }

    fn query_shared_receive_queue(&self, srq: SrqId) -> Result<SrqAttributes> {
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

    fn create_queue_pair(&self, init: QpInitAttributes, sizes: QpCapabilities) -> Result<NewQueuePair> {
        let QpCapabilities {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_sge: entries,
            max_inline_data: inline,
        } = sizes;
        let mut rings = QpRings::default();
        let (mut send, mut receive) = (None, None);
        if init.qp_type != QpType::XrcTarget {
            let (producer, consumer) = send_ring(sends, entries, inline);
            (send, rings.send) = (Some(producer), Some(consumer));
        }
        let receives_itself = !matches!(init.qp_type, QpType::XrcInitiator | QpType::XrcTarget);
        if receives_itself && init.srq.is_none() {
            let (producer, consumer) = receive_ring(receives, entries);
            (receive, rings.receive) = (Some(producer), Some(consumer));
        }
        let number = self.control(|hca, _, client| hca.create_queue_pair(client, init, rings))?;
        Ok(NewQueuePair { qpn: number, send_queue: send, recv_queue: receive })
    }

    fn modify_queue_pair(&self, number: Qpn, modify: &ModifyQp) -> Result<QpState> {
        let state = self.control(|hca, ctx, client| hca.modify_queue_pair(ctx, client, number, modify))?;
        if state == QpState::ReadyToSend && modify.sq_psn.is_some() {
            self.runtime.on_ready_to_send(&self.query_queue_pair(number)?);
        }
        Ok(state)
    }

    fn query_queue_pair(&self, number: Qpn) -> Result<QpSnapshot> {
        self.control(|hca, _, client| hca.query_queue_pair(client, number))
    }

    fn destroy_queue_pair(&self, number: Qpn) -> Result<()> {
        self.control(|hca, ctx, client| hca.destroy_queue_pair(ctx, client, number))
    }

    fn attach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        self.control(|hca, _, client| hca.attach_multicast(client, number, group))?;
        self.runtime.check_multicast_group(group).inspect_err(|_| {
            let _ = self.detach_multicast(number, group);
        })
    }

    fn detach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        self.control(|hca, _, client| hca.detach_multicast(client, number, group))
    }

    fn create_cm_channel(&self, news: Arc<Notifier>) -> Result<CmChannelId> {
        match self.cm(cm::Command::CreateEventChannel)? {
            cm::Reply::EventChannel(channel) => {
                self.event_bus.cm_channels.lock().insert(channel, news);
                Ok(channel)
            }
            _ => unreachable!("the card answers with a channel"),
        }
    }

    fn destroy_cm_channel(&self, channel: CmChannelId) -> Result<()> {
        self.event_bus.cm_channels.lock().remove(&channel);
        self.cm(cm::Command::DestroyEventChannel(channel)).map(|_| ())
    }

    fn cm(&self, call: cm::Command) -> Result<cm::Reply> {
        self.control(|hca, ctx, client| hca.execute_cm(ctx, client, call))
    }

    fn active_mtu(&self) -> Mtu {
        self.runtime.active_mtu()
    }

    fn port_state(&self) -> PortState {
        self.control(|hca, _, _| Ok(hca.port_state())).unwrap_or(PortState::Down)
    }

    fn resolve_host(&self, name: &str) -> Option<IpAddr> {
        self.runtime.resolve_host(name)
    }

    fn async_events(&self) -> &AsyncEventQueue {
        &self.event_bus.async_events
    }

    fn ring_doorbell(&self, number: Qpn, send: &SendProducer) {
        send.ring(&self.doorbell, number);
        self.runtime.on_doorbell();
    }

    fn drive(&self, _: CqId) {
        self.runtime.drive();
    }

    fn now(&self) -> Instant {
        self.runtime.now()
    }

    fn spin_wait(&self, news: &Notifier, seen: u64) {
        self.runtime.spin_wait(news, seen);
    }

    fn wait(&self, news: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        self.runtime.wait(news, seen, until)
    }

    fn random(&self) -> u64 {
        self.runtime.random()
    }

    fn endpoint_exchange(&self) -> EndpointExchange {
        self.runtime.endpoint_exchange()
    }
}
