//! Event channels and identifiers: a channel knows its identifiers, and an identifier its channel.

use super::EventParameters;
use crate::notifier::Notifier;
use crate::{Context, QueuePair};
use parking_lot::Mutex;
use softhca_engine::{CmChannelId, CmId};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Weak};

/// Delivers the events of its identifiers, oldest first: `struct rdma_event_channel`.
#[derive(Clone)]
pub struct EventChannel {
    pub(super) inner: Arc<ChannelInner>,
}

pub(super) struct ChannelInner {
    pub context: Context,
    pub id: CmChannelId,
    pub notifier: Arc<Notifier>,
    /// The count of notifications when the card last had no event left: it has none until the count rises.
    pub drained_at: AtomicU64,
    pub identifiers: Mutex<BTreeMap<CmId, Weak<IdInner>>>,
}

crate::handle::handle!(EventChannel);

/// One end of a connection, or a listener: an `rdma_cm_id`.
///
/// Every clone is the same identifier. Dropping the last one rejects a request that was not answered, and ends an
/// established connection.
///
/// ```
/// use softhca::cm::{ConnectionParameters, EventChannel, EventType, PortSpace};
/// use softhca::{QpType, sim::World};
///
/// let mut world = World::new(1);
/// let [alice, bob] = ["alice", "bob"].map(|name| world.device(name).open());
/// let channel = EventChannel::new(&bob)?;
/// let listener = channel.create_id(PortSpace::Tcp)?;
/// listener.bind("0.0.0.0:7174".parse().unwrap())?;
/// listener.listen(0)?;
///
/// let answers = EventChannel::new(&alice)?;
/// let id = answers.create_id(PortSpace::Tcp)?;
/// id.resolve_address(None, (bob.address(), 7174).into())?;
/// answers.wait()?.expect(EventType::AddressResolved)?;
/// id.resolve_route()?;
/// answers.wait()?.expect(EventType::RouteResolved)?;
/// let queue = alice.create_completion_queue(16)?;
/// let pair = alice.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()?;
/// id.attach_queue_pair(&pair)?;
/// id.connect(&ConnectionParameters { private_data: b"hello".to_vec(), ..Default::default() })?;
/// let request = channel.wait()?.expect(EventType::ConnectRequest)?;
/// assert_eq!(&request.private_data[..5], b"hello");
/// # Ok::<(), softhca::Error>(())
/// ```
#[derive(Clone)]
pub struct Id {
    pub(super) inner: Arc<IdInner>,
}

pub(super) struct IdInner {
    pub id: CmId,
    pub channel: Mutex<EventChannel>,
    pub queue_pair: Mutex<Option<QueuePair>>,
    /// Calls wait until they are done.
    pub synchronous: AtomicBool,
    /// The event that ended the last call of a synchronous identifier.
    pub last_event: Mutex<Option<LastEvent>>,
}

/// An event of a synchronous identifier, without its handle.
#[derive(Clone)]
pub(super) struct LastEvent {
    pub private_data: Vec<u8>,
    pub detail: EventParameters,
}

crate::handle::handle!(Id);
