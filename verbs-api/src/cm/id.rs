//! Identifiers.

use super::handles::{EventChannel, Id, IdInner, LastEvent};
use super::{
    CmOption, ConnectionParameters, Event, EventType, IdSnapshot, PortSpace, RDMA_UDP_QKEY, RejectReason,
    resolve,
};
use crate::{Context, Error, Gid, ModifyQp, Mtu, QpState, QpType, QueuePair};
use parking_lot::Mutex;
use softhca_engine::CmId;
use softhca_types::cm::{Command, FollowUp, QpTransition, Reply};
use softhca_types::reply;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The states that the queue pair of a connection goes through when that comes to stand.
const CONNECT_STATES: [QpState; 2] = [QpState::ReadyToReceive, QpState::ReadyToSend];

impl Id {
    pub(super) fn new(id: CmId, channel: EventChannel) -> Id {
        let inner = IdInner {
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

    /// The channel that delivers its events.
    pub fn channel(&self) -> EventChannel {
        self.inner.channel.lock().clone()
    }

    /// The device.
    pub fn context(&self) -> Context {
        self.channel().context().clone()
    }

    /// Its number on the device, as in logs.
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
        self.inner.last_event.lock().as_ref().map(|event| event.private_data.clone()).unwrap_or_default()
    }

    /// The parameters of that event.
    pub fn detail(&self) -> super::EventParameters {
        self.inner.last_event.lock().as_ref().map_or(super::EventParameters::None, |event| event.detail)
    }

    /// Sets an option, as `rdma_set_option` does: the type of service, the ACK timeout, address reuse.
    pub fn set_option(&self, option: CmOption) -> Result<(), Error> {
        self.call(Command::SetOption { id: self.inner.id, option }).map(|_| ())
    }

    /// Binds an address of the host; port 0 takes any free port.
    pub fn bind(&self, address: SocketAddr) -> Result<(), Error> {
        self.call(Command::BindAddress { id: self.inner.id, address }).map(|_| ())
    }

    /// Chooses the source address towards a destination. [`EventType::AddressResolved`] follows.
    pub fn resolve_address(&self, source: Option<SocketAddr>, destination: SocketAddr) -> Result<(), Error> {
        self.call(Command::ResolveAddress { id: self.inner.id, source, destination })?;
        self.wait_if_synchronous(EventType::AddressResolved)
    }

    /// Chooses the path, with the path MTU of the port. [`EventType::RouteResolved`] follows.
    pub fn resolve_route(&self) -> Result<(), Error> {
        self.resolve_route_with_path_mtu(self.channel().backend().active_mtu())
    }

    /// Chooses a path with this path MTU. [`EventType::RouteResolved`] follows.
    pub fn resolve_route_with_path_mtu(&self, path_mtu: Mtu) -> Result<(), Error> {
        self.call(Command::ResolveRoute { id: self.inner.id, path_mtu })?;
        self.wait_if_synchronous(EventType::RouteResolved)
    }

    /// Accepts requests from now on, each an [`EventType::ConnectRequest`]. At most `backlog` wait for an answer; zero is as
    /// many as the device allows.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        self.call(Command::Listen { id: self.inner.id, backlog }).map(|_| ())
    }

    /// Waits for the next request of a synchronous listener and returns its identifier, also synchronous.
    pub fn get_request(&self) -> Result<Id, Error> {
        let event = self.channel().wait()?.expect(EventType::ConnectRequest)?;
        let Event { id, private_data, detail, .. } = event;
        id.migrate(&EventChannel::new(&self.context())?)?;
        id.inner.synchronous.store(true, Ordering::Relaxed);
        *id.inner.last_event.lock() = Some(LastEvent { private_data, detail });
        Ok(id)
    }

    /// Gives the identifier its queue pair, in RESET and of the identifier's service type. The queue pair enters INIT, so that
    /// receives can be posted; one of datagrams enters RTS. Connection management does the other transitions.
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
        self.execute_transition(pair, QpTransition::new(self.inner.id, pair.qpn(), states, then))
    }

    fn execute_transition(&self, pair: &QueuePair, transition: QpTransition) -> Result<(), Error> {
        let last = transition.states.last().copied();
        self.channel().backend().execute(softhca_types::Command::TransitionQueuePair(transition))?;
        last.into_iter().for_each(|state| pair.set_state(state));
        Ok(())
    }

    /// The attached queue pair.
    pub fn queue_pair(&self) -> Option<QueuePair> {
        self.inner.queue_pair.lock().clone()
    }

    /// Detaches the queue pair and returns it. Its state stays as it is.
    pub fn detach_queue_pair(&self) -> Option<QueuePair> {
        self.inner.queue_pair.lock().take()
    }

    /// The attributes that take the queue pair of this connection to a state (`rdma_init_qp_attr`), for callers that call
    /// [`QueuePair::modify`] themselves.
    pub fn qp_attributes(&self, state: QpState) -> Result<ModifyQp, Error> {
        let attributes = self.call(Command::InitQpAttributes { id: self.inner.id, state })?;
        Ok(reply!(attributes, Reply::QpAttributes(modify) => modify))
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

    /// Sends a REQ to the listener, or a SIDR_REQ for its datagram queue pair. [`EventType::Established`] or
    /// [`EventType::Rejected`] follows.
    pub fn connect(&self, parameters: &ConnectionParameters) -> Result<(), Error> {
        self.call(Command::Connect { id: self.inner.id, parameters: self.with_queue_pair(parameters) })?;
        self.wait_if_synchronous(EventType::Established)
    }

    /// Accepts a request. [`EventType::Established`] follows when the peer has confirmed; for a request of datagrams no event
    /// follows.
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
                let rd_atomic = Some((parameters.responder_resources, parameters.initiator_depth));
                let then = FollowUp::Accept(parameters);
                let transition = QpTransition::new(self.inner.id, pair.qpn(), &CONNECT_STATES, then);
                self.execute_transition(&pair, QpTransition { rd_atomic, ..transition })?;
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

    /// Rejects a request.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        self.reject_with_reason(RejectReason::CONSUMER, private_data)
    }

    /// Rejects a request with a reason of the specification's list.
    pub fn reject_with_reason(&self, reason: RejectReason, private_data: &[u8]) -> Result<(), Error> {
        let private_data = private_data.to_vec();
        self.call(Command::Reject { id: self.inner.id, reason, private_data }).map(|_| ())
    }

    /// Sends the RTU after [`EventType::ConnectResponse`], for an identifier without a queue pair. On the passive side,
    /// establishes a connection whose RTU was lost (`rdma_notify`): its queue pair has received data.
    pub fn establish(&self) -> Result<(), Error> {
        self.call(Command::Establish(self.inner.id)).map(|_| ())
    }

    /// Ends the connection: the queue pair enters ERR, and both sides get [`EventType::Disconnected`].
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
            // A queue pair in RESET or in the error state is as good.
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

    /// Its state, addresses, service type and path.
    pub fn query(&self) -> Result<IdSnapshot, Error> {
        Ok(reply!(self.call(Command::QueryId(self.inner.id))?, Reply::Query(view) => view))
    }

    /// Its own address and port, if it is bound.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.query().ok()?.local
    }

    /// The address and port of the peer, if it has one.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.query().ok()?.peer
    }

    /// Joins a multicast group. [`EventType::MulticastJoin`] follows; from then on the attached queue pair is a member.
    pub fn join_multicast(&self, group: IpAddr) -> Result<(), Error> {
        self.call(Command::JoinMulticast { id: self.inner.id, group })?;
        self.wait_if_synchronous(EventType::MulticastJoin)
    }

    /// Leaves a multicast group. Datagrams of the group arrive no more.
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

impl Drop for IdInner {
    fn drop(&mut self) {
        let channel = self.channel.lock();
        channel.remove(self.id);
        let _ = channel.backend().execute_cm(Command::DestroyId(self.id));
    }
}
