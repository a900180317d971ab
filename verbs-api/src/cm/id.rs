//! Identifiers.

use super::{
    CmOption, ConnectionParameters, Event, EventChannel, EventType, IdSnapshot, PortSpace, RDMA_UDP_QKEY,
    RejectReason, resolve,
};
use crate::{Context, Error, Gid, ModifyQp, Mtu, QpState, QpType, QueuePair};
use parking_lot::Mutex;
use softhca_engine::CmId;
use softhca_queue::cm::{Command, FollowUp, QpTransition, Reply};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The states that the queue pair of a connection goes through when that comes to stand.
const CONNECT_STATES: [QpState; 2] = [QpState::ReadyToReceive, QpState::ReadyToSend];

/// One end of a connection, or a listener: an `rdma_cm_id`.
///
/// Every clone is the same identifier. When the last is dropped, a request that was not answered is refused,
/// and a connection that stands is ended.
#[derive(Clone)]
pub struct Id {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub id: CmId,
    channel: Mutex<EventChannel>,
    queue_pair: Mutex<Option<QueuePair>>,
    /// Calls wait until they are done.
    synchronous: AtomicBool,
    /// What ended the last call of a synchronous identifier.
    last_event: Mutex<Option<LastEvent>>,
}

/// An event of a synchronous identifier, without its handle.
#[derive(Clone)]
struct LastEvent {
    private_data: Vec<u8>,
    detail: super::EventParameters,
}

/// Two handles are equal if they are of the same identifier.
impl PartialEq for Id {
    fn eq(&self, other: &Id) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Id {}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Id({:#x})", self.inner.id.0)
    }
}

impl Id {
    pub(super) fn new(id: CmId, channel: EventChannel) -> Id {
        let inner = Inner {
            id,
            channel: Mutex::new(channel),
            queue_pair: Mutex::default(),
            synchronous: AtomicBool::new(false),
            last_event: Mutex::default(),
        };
        Id { inner: Arc::new(inner) }
    }

    /// Creates an identifier with a channel of its own, whose calls wait until they are done.
    pub fn synchronous(context: &Context, space: PortSpace) -> Result<Id, Error> {
        let id = EventChannel::new(context)?.create_id(space)?;
        id.inner.synchronous.store(true, Ordering::Relaxed);
        Ok(id)
    }

    /// The channel that its events come to.
    pub fn channel(&self) -> EventChannel {
        self.inner.channel.lock().clone()
    }

    /// The device.
    pub fn context(&self) -> Context {
        self.channel().context().clone()
    }

    /// The number that the card has for it.
    pub fn handle(&self) -> u32 {
        self.inner.id.0
    }

    fn call(&self, call: Command) -> Result<Reply, Error> {
        self.channel().backend().execute_cm(call)
    }

    /// Waits until a synchronous call is done.
    fn wait_if_synchronous(&self, kind: EventType) -> Result<(), Error> {
        if !self.inner.synchronous.load(Ordering::Relaxed) {
            return Ok(());
        }
        let event = self.channel().wait()?.expect(kind)?;
        let Event { private_data, detail, .. } = event;
        *self.inner.last_event.lock() = Some(LastEvent { private_data, detail });
        Ok(())
    }

    /// The private data of the event that ended the last call of a synchronous identifier.
    pub fn private_data(&self) -> Vec<u8> {
        self.inner.last_event.lock().as_ref().map(|heard| heard.private_data.clone()).unwrap_or_default()
    }

    /// The rest of that event.
    pub fn detail(&self) -> super::EventParameters {
        self.inner.last_event.lock().as_ref().map_or(super::EventParameters::None, |heard| heard.detail)
    }

    /// Sets an option.
    pub fn set_option(&self, option: CmOption) -> Result<(), Error> {
        self.call(Command::SetOption { id: self.inner.id, option }).map(|_| ())
    }

    /// Binds an address of the host; port 0 takes any.
    pub fn bind(&self, address: SocketAddr) -> Result<(), Error> {
        self.call(Command::BindAddress { id: self.inner.id, address }).map(|_| ())
    }

    /// Finds out which address to send from: [`EventType::AddressResolved`].
    pub fn resolve_address(&self, source: Option<SocketAddr>, destination: SocketAddr) -> Result<(), Error> {
        self.call(Command::ResolveAddress { id: self.inner.id, source, destination })?;
        self.wait_if_synchronous(EventType::AddressResolved)
    }

    /// Finds the path: [`EventType::RouteResolved`].
    pub fn resolve_route(&self) -> Result<(), Error> {
        self.resolve_route_with_path_mtu(self.channel().backend().active_mtu())
    }

    /// Finds a path with this path MTU: [`EventType::RouteResolved`].
    pub fn resolve_route_with_path_mtu(&self, path_mtu: Mtu) -> Result<(), Error> {
        self.call(Command::ResolveRoute { id: self.inner.id, path_mtu })?;
        self.wait_if_synchronous(EventType::RouteResolved)
    }

    /// Takes requests from now on, of which `backlog` may wait; zero for as many as the card allows.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        self.call(Command::Listen { id: self.inner.id, backlog }).map(|_| ())
    }

    /// The next request of a synchronous listener: a synchronous identifier of its own.
    pub fn get_request(&self) -> Result<Id, Error> {
        let event = self.channel().wait()?.expect(EventType::ConnectRequest)?;
        let Event { id, private_data, detail, .. } = event;
        id.migrate(&EventChannel::new(&self.context())?)?;
        id.inner.synchronous.store(true, Ordering::Relaxed);
        *id.inner.last_event.lock() = Some(LastEvent { private_data, detail });
        Ok(id)
    }

    /// Connects a queue pair of this identifier's transport, or names the one where its datagrams arrive. It
    /// goes to INIT, so that receives can be posted; one of datagrams to RTS.
    pub fn attach_queue_pair(&self, pair: &QueuePair) -> Result<(), Error> {
        let states: &[QpState] = match pair.kind() {
            QpType::Ud => &[QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend],
            _ => &[QpState::Init],
        };
        self.advance(pair, states, FollowUp::None)?;
        *self.inner.queue_pair.lock() = Some(pair.clone());
        Ok(())
    }

    /// Takes the queue pair through states, and then does what it is made ready for.
    fn advance(&self, pair: &QueuePair, states: &[QpState], then: FollowUp) -> Result<(), Error> {
        let advance = QpTransition::new(self.inner.id, pair.qpn(), states, then);
        self.channel().backend().execute(softhca_queue::Command::TransitionQueuePair(advance))?;
        states.last().into_iter().for_each(|state| pair.set_state(*state));
        Ok(())
    }

    /// The queue pair that is attached.
    pub fn queue_pair(&self) -> Option<QueuePair> {
        self.inner.queue_pair.lock().clone()
    }

    /// Lets go of the queue pair.
    pub fn detach_queue_pair(&self) -> Option<QueuePair> {
        self.inner.queue_pair.lock().take()
    }

    /// What takes the queue pair of this connection to a state, for callers who change it themselves.
    pub fn qp_attributes(&self, state: QpState) -> Result<ModifyQp, Error> {
        match self.call(Command::InitQpAttributes { id: self.inner.id, state })? {
            Reply::QpAttributes(modify) => Ok(modify),
            _ => unreachable!("the card answers with attributes"),
        }
    }

    /// The caller's parameters with the number of the attached queue pair.
    fn with_queue_pair(&self, parameters: &ConnectionParameters) -> ConnectionParameters {
        let mut parameters = parameters.clone();
        if let Some(pair) = self.queue_pair() {
            parameters.qpn = pair.qpn();
            parameters.srq |= pair.has_shared_receive_queue();
        }
        parameters
    }

    /// Asks the peer for a connection, or for its datagram queue pair: [`EventType::Established`].
    pub fn connect(&self, parameters: &ConnectionParameters) -> Result<(), Error> {
        self.call(Command::Connect { id: self.inner.id, parameters: self.with_queue_pair(parameters) })?;
        self.wait_if_synchronous(EventType::Established)
    }

    /// Accepts a request: [`EventType::Established`] tells that the peer knows. A request of datagrams is
    /// answered with that, and no event follows.
    pub fn accept(&self, parameters: &ConnectionParameters) -> Result<(), Error> {
        let mut parameters = self.with_queue_pair(parameters);
        let kind = match self.queue_pair() {
            Some(pair) => pair.kind(),
            None => self.query()?.qp_type,
        };
        if kind == QpType::Ud {
            parameters.qkey = parameters.qkey.or(Some(RDMA_UDP_QKEY));
            return self.call(Command::Accept { id: self.inner.id, parameters }).map(|_| ());
        }
        // The peer may send as soon as it has the REP: the queue pair is ready before.
        match self.queue_pair() {
            Some(pair) => {
                let reads = Some((parameters.responder_resources, parameters.initiator_depth));
                let (id, queue_pair, states) = (self.inner.id, pair.qpn(), CONNECT_STATES.into());
                let advance = QpTransition {
                    id,
                    qpn: queue_pair,
                    states,
                    rd_atomic: reads,
                    follow_up: FollowUp::Accept(parameters),
                };
                self.channel().backend().execute(softhca_queue::Command::TransitionQueuePair(advance))?;
                CONNECT_STATES.last().into_iter().for_each(|state| pair.set_state(*state));
            }
            None => {
                self.call(Command::Accept { id: self.inner.id, parameters })?;
            }
        }
        self.wait_if_synchronous(EventType::Established)
    }

    /// Takes the queue pair of an accepted request to RTS, and tells the peer.
    pub(super) fn complete_connection(&self) -> Result<(), Error> {
        match self.queue_pair() {
            Some(pair) => self.advance(&pair, &CONNECT_STATES, FollowUp::Establish),
            None => self.establish(),
        }
    }

    /// Refuses a request.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        self.reject_with_reason(RejectReason::CONSUMER, private_data)
    }

    /// Refuses a request, for a reason of the specification's list.
    pub fn reject_with_reason(&self, reason: RejectReason, private_data: &[u8]) -> Result<(), Error> {
        let private_data = private_data.to_vec();
        self.call(Command::Reject { id: self.inner.id, reason, private_data }).map(|_| ())
    }

    /// Tells the peer that the connection stands, after [`EventType::ConnectResponse`]; or the card, that the
    /// queue pair heard from its peer although no RTU came.
    pub fn establish(&self) -> Result<(), Error> {
        self.call(Command::Establish(self.inner.id)).map(|_| ())
    }

    /// Ends the connection: the queue pair stops, and both sides hear [`EventType::Disconnected`].
    pub fn disconnect(&self) -> Result<(), Error> {
        match self.connected_queue_pair() {
            Some(pair) => self.advance(&pair, &[QpState::Error], FollowUp::Disconnect)?,
            None => self.call(Command::Disconnect(self.inner.id)).map(|_| ())?,
        }
        self.wait_if_synchronous(EventType::Disconnected)
    }

    /// The queue pair, unless it is one of datagrams, which has other peers.
    fn connected_queue_pair(&self) -> Option<QueuePair> {
        self.queue_pair().filter(|pair| pair.kind() != QpType::Ud)
    }

    /// Stops the queue pair of a connection that is over.
    pub(super) fn stop_queue_pair(&self) {
        if let Some(pair) = self.connected_queue_pair() {
            // One that is in RESET or in the error state already is as good.
            let _ = pair.modify(&ModifyQp::default().state(QpState::Error));
        }
    }

    /// Moves the identifier and its events to another channel of the same device.
    pub fn migrate(&self, channel: &EventChannel) -> Result<(), Error> {
        let old = self.channel();
        if old == *channel {
            return Ok(());
        }
        channel.add(self);
        let moved = Command::MigrateId { id: self.inner.id, channel: channel.inner.id };
        if let Err(error) = self.call(moved) {
            channel.remove(self.inner.id);
            return Err(error);
        }
        *self.inner.channel.lock() = channel.clone();
        old.remove(self.inner.id);
        Ok(())
    }

    /// What may be known of it.
    pub fn query(&self) -> Result<IdSnapshot, Error> {
        match self.call(Command::QueryId(self.inner.id))? {
            Reply::Query(view) => Ok(view),
            _ => unreachable!("the card answers with a view"),
        }
    }

    /// Its own address, if it has one.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.query().ok()?.local
    }

    /// The other side's, if there is one.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.query().ok()?.peer
    }

    /// Joins a multicast group: the attached queue pair is a member when [`EventType::MulticastJoin`] is taken.
    pub fn join_multicast(&self, group: IpAddr) -> Result<(), Error> {
        self.call(Command::JoinMulticast { id: self.inner.id, group })?;
        self.wait_if_synchronous(EventType::MulticastJoin)
    }

    /// Leaves a multicast group.
    pub fn leave_multicast(&self, group: IpAddr) -> Result<(), Error> {
        self.call(Command::LeaveMulticast { id: self.inner.id, group })?;
        match self.queue_pair() {
            Some(pair) => pair.detach_multicast(Gid::from(group)),
            None => Ok(()),
        }
    }

    /// Finds address and path to a peer given as `host:port`, one after the other, for async code.
    pub(super) async fn resolve_peer(&self, peer: &str) -> Result<(), Error> {
        let channel = self.channel();
        self.resolve_address(None, resolve(channel.context(), peer)?)?;
        channel.next().await?.expect(EventType::AddressResolved)?;
        self.resolve_route()?;
        channel.next().await?.expect(EventType::RouteResolved)?;
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let channel = self.channel.lock();
        channel.remove(self.id);
        let _ = channel.backend().execute_cm(Command::DestroyId(self.id));
    }
}
