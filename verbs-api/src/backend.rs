//! What the verbs need of a card, wherever it is.

use crate::async_events::AsyncEventQueue;
use crate::memory::MemoryBlock;
use crate::notifier::Notifier;
use crate::{EndpointExchange, Error};
use softhca_engine::{
    AddressVector, AhId, CmChannelId, Counters, CqId, Instant, MemoryWindowType, ModifyQp, PdId, PortState,
    QpInitAttributes, QpSnapshot, QpState, SrqId, SrqInitAttributes, XrcdId,
};
use softhca_queue::{AccessFlags, CompletionConsumer, ReceiveProducer, SendProducer, SrqAttributes, cm};
use softhca_wire::{Gid, Mtu, Qpn, RemoteKey};
use std::net::IpAddr;
use std::sync::Arc;

/// The sizes of a queue pair's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QpCapabilities {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_sge: usize,
    pub max_inline_data: usize,
}

/// The application's ends of a new queue pair.
pub(crate) struct NewQueuePair {
    pub qpn: Qpn,
    pub send_queue: Option<SendProducer>,
    pub recv_queue: Option<ReceiveProducer>,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// A card that an application uses. Work is posted and completed through rings; this is everything else.
pub(crate) trait Backend: Send + Sync {
    /// Refuses in a process that was forked from the one that the card belongs to. Every verb asks this before
    /// it takes a lock, which somebody may have held when the process was forked, or touches what is shared.
    fn check_process(&self) -> Result<()> {
        Ok(())
    }
    /// The same for verbs that cannot fail.
    ///
    /// # Panics
    /// In a child.
    fn assert_same_process(&self) {
        if let Err(error) = self.check_process() {
            panic!("{error}");
        }
    }

    fn gids(&self) -> Vec<Gid>;
    /// Whether the card is there.
    fn is_alive(&self) -> bool {
        true
    }
    fn counters(&self) -> Counters;

    fn allocate_protection_domain(&self) -> Result<PdId>;
    fn free_protection_domain(&self, domain: PdId) -> Result<()>;

    /// Memory for a region that the card allocates.
    fn allocate_memory(&self, length: usize) -> Result<Arc<MemoryBlock>> {
        Ok(Arc::new(MemoryBlock::new(length)))
    }
    /// Registers a block; without a base, the card assigns the address.
    fn register_memory(
        &self,
        domain: PdId,
        base: Option<u64>,
        length: u64,
        block: Arc<MemoryBlock>,
        access: AccessFlags,
    ) -> Result<(RemoteKey, u64)>;
    /// Changes what is `Some` of a region: its domain, its bytes with their base, its rights.
    fn reregister_memory(
        &self,
        key: RemoteKey,
        domain: Option<PdId>,
        translation: Option<(u64, Arc<MemoryBlock>)>,
        access: Option<AccessFlags>,
    ) -> Result<RemoteKey>;
    fn deregister_memory(&self, key: RemoteKey) -> Result<()>;
    fn allocate_memory_window(&self, domain: PdId, kind: MemoryWindowType) -> Result<RemoteKey>;
    fn free_memory_window(&self, key: RemoteKey) -> Result<()>;

    /// Creates a completion queue; `news` is told of each notification that the application asked for.
    fn create_completion_queue(&self, slots: u32, news: Arc<Notifier>) -> Result<(CqId, CompletionConsumer)>;
    fn resize_completion_queue(&self, cq: CqId, slots: u32) -> Result<CompletionConsumer>;
    fn destroy_completion_queue(&self, cq: CqId) -> Result<()>;

    fn create_shared_receive_queue(
        &self,
        init: SrqInitAttributes,
        slots: u32,
        entries: usize,
    ) -> Result<(SrqId, ReceiveProducer)>;
    fn set_srq_limit(&self, srq: SrqId, limit: u32) -> Result<()>;
    fn query_shared_receive_queue(&self, srq: SrqId) -> Result<SrqAttributes>;
    fn destroy_shared_receive_queue(&self, srq: SrqId) -> Result<()>;

    fn open_xrc_domain(&self) -> Result<XrcdId>;
    fn close_xrc_domain(&self, domain: XrcdId) -> Result<()>;

    fn create_address_handle(&self, domain: PdId, vector: AddressVector) -> Result<AhId>;
    fn destroy_address_handle(&self, handle: AhId) -> Result<()>;

    fn create_queue_pair(&self, init: QpInitAttributes, sizes: QpCapabilities) -> Result<NewQueuePair>;
    fn modify_queue_pair(&self, number: Qpn, modify: &ModifyQp) -> Result<QpState>;
    fn query_queue_pair(&self, number: Qpn) -> Result<QpSnapshot>;
    fn destroy_queue_pair(&self, number: Qpn) -> Result<()>;
    fn attach_multicast(&self, number: Qpn, group: Gid) -> Result<()>;
    fn detach_multicast(&self, number: Qpn, group: Gid) -> Result<()>;

    /// Creates a channel of connection management; `news` is told of each event.
    fn create_cm_channel(&self, news: Arc<Notifier>) -> Result<CmChannelId>;
    fn destroy_cm_channel(&self, channel: CmChannelId) -> Result<()>;
    /// Any other call to the connection manager.
    fn cm(&self, call: cm::Command) -> Result<cm::Reply>;
    /// Has a queue pair follow its connection.
    fn advance_queue_pair(&self, advance: &cm::QpTransition) -> Result<()> {
        for state in &advance.states {
            let asked = cm::Command::InitQpAttributes { id: advance.id, state: *state };
            let cm::Reply::QpAttributes(attributes) = self.cm(asked)? else {
                unreachable!("the card answers with attributes")
            };
            let moved = self.modify_queue_pair(advance.qpn, &advance.limit_rd_atomic(attributes));
            if *state != QpState::Error {
                moved?;
            }
        }
        advance.final_command().map_or(Ok(()), |call| self.cm(call).map(|_| ()))
    }
    /// The largest path MTU that the network carries.
    fn active_mtu(&self) -> Mtu;
    /// The state of the card's port.
    fn port_state(&self) -> PortState;
    /// The address of the host with this name, among those that the card's own host knows.
    fn resolve_host(&self, name: &str) -> Option<IpAddr>;

    /// The asynchronous events that nobody took.
    fn async_events(&self) -> &AsyncEventQueue;

    /// Rings for a queue pair whose queue got work.
    fn ring_doorbell(&self, number: Qpn, send: &SendProducer);
    /// Lets the card get on, on the time of a caller that found nothing in this completion queue.
    fn drive(&self, queue: CqId);

    /// The time by which the card's owner waits.
    fn now(&self) -> Instant;
    /// Drives for a moment, where callers drive, until `news` counted past `seen`: what they wait for may be about to
    /// happen.
    fn spin_wait(&self, news: &Notifier, seen: u64) {
        let _ = (news, seen);
    }
    /// Blocks until `news` counted past `seen`. False if `until` came first.
    fn wait(&self, news: &Notifier, seen: u64, until: Option<Instant>) -> bool;
    /// A random number, or one that a seed decides.
    fn random(&self) -> u64;
    /// Where applications on cards of this kind meet.
    fn endpoint_exchange(&self) -> EndpointExchange;
}
