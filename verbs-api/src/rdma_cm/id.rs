//! Identifiers.

use super::{
    CmOption, DATAGRAM_KEY, Event, EventChannel, EventKind, Parameters, PortSpace, RejectReason, View,
    resolve,
};
use crate::{Context, Error, Gid, Modify, QpKind, QueuePair, State};
use parking_lot::Mutex;
use softhca_engine::CmId;
use softhca_queue::cm::{Advance, Call, Reply, Then};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The states that the queue pair of a connection goes through when that comes to stand.
const CONNECTED: [State; 2] = [State::ReadyToReceive, State::ReadyToSend];

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
    last: Mutex<Option<Heard>>,
}

/// An event of a synchronous identifier, without its handle.
#[derive(Clone)]
struct Heard {
    private_data: Vec<u8>,
    detail: super::Detail,
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
            last: Mutex::default(),
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
    pub fn number(&self) -> u32 {
        self.inner.id.0
    }

    fn call(&self, call: Call) -> Result<Reply, Error> {
        self.channel().backend().cm(call)
    }

    /// Waits until a synchronous call is done.
    fn done(&self, kind: EventKind) -> Result<(), Error> {
        if !self.inner.synchronous.load(Ordering::Relaxed) {
            return Ok(());
        }
        let event = self.channel().wait()?.expect(kind)?;
        let Event { private_data, detail, .. } = event;
        *self.inner.last.lock() = Some(Heard { private_data, detail });
        Ok(())
    }

    /// The private data of the event that ended the last call of a synchronous identifier.
    pub fn private_data(&self) -> Vec<u8> {
        self.inner.last.lock().as_ref().map(|heard| heard.private_data.clone()).unwrap_or_default()
    }

    /// The rest of that event.
    pub fn detail(&self) -> super::Detail {
        self.inner.last.lock().as_ref().map_or(super::Detail::None, |heard| heard.detail)
    }

    /// Sets an option.
    pub fn set_option(&self, option: CmOption) -> Result<(), Error> {
        self.call(Call::SetOption { id: self.inner.id, option }).map(|_| ())
    }

    /// Binds an address of the host; port 0 takes any.
    pub fn bind(&self, address: SocketAddr) -> Result<(), Error> {
        self.call(Call::Bind { id: self.inner.id, address }).map(|_| ())
    }

    /// Finds out which address to send from: [`EventKind::AddressResolved`].
    pub fn resolve_address(&self, source: Option<SocketAddr>, destination: SocketAddr) -> Result<(), Error> {
        self.call(Call::ResolveAddress { id: self.inner.id, source, destination })?;
        self.done(EventKind::AddressResolved)
    }

    /// Finds the path: [`EventKind::RouteResolved`].
    pub fn resolve_route(&self) -> Result<(), Error> {
        let mtu = self.channel().backend().active_mtu();
        self.call(Call::ResolveRoute { id: self.inner.id, mtu })?;
        self.done(EventKind::RouteResolved)
    }

    /// Takes requests from now on, of which `backlog` may wait; zero for as many as the card allows.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        self.call(Call::Listen { id: self.inner.id, backlog }).map(|_| ())
    }

    /// The next request of a synchronous listener: a synchronous identifier of its own.
    pub fn get_request(&self) -> Result<Id, Error> {
        let event = self.channel().wait()?.expect(EventKind::ConnectRequest)?;
        let Event { id, private_data, detail, .. } = event;
        id.migrate(&EventChannel::new(&self.context())?)?;
        id.inner.synchronous.store(true, Ordering::Relaxed);
        *id.inner.last.lock() = Some(Heard { private_data, detail });
        Ok(id)
    }

    /// Connects a queue pair of this identifier's transport, or names the one where its datagrams arrive. It
    /// goes to INIT, so that receives can be posted; one of datagrams to RTS.
    pub fn attach(&self, pair: &QueuePair) -> Result<(), Error> {
        let states: &[State] = match pair.kind() {
            QpKind::Ud => &[State::Init, State::ReadyToReceive, State::ReadyToSend],
            _ => &[State::Init],
        };
        self.advance(pair, states, Then::Nothing)?;
        *self.inner.queue_pair.lock() = Some(pair.clone());
        Ok(())
    }

    /// Takes the queue pair through states, and then does what it is made ready for.
    fn advance(&self, pair: &QueuePair, states: &[State], then: Then) -> Result<(), Error> {
        let advance = Advance::new(self.inner.id, pair.number(), states, then);
        self.channel().backend().advance_queue_pair(&advance)
    }

    /// The queue pair that is attached.
    pub fn queue_pair(&self) -> Option<QueuePair> {
        self.inner.queue_pair.lock().clone()
    }

    /// Lets go of the queue pair.
    pub fn detach(&self) -> Option<QueuePair> {
        self.inner.queue_pair.lock().take()
    }

    /// What takes the queue pair of this connection to a state, for callers who change it themselves.
    pub fn attributes(&self, state: State) -> Result<Modify, Error> {
        match self.call(Call::Attributes { id: self.inner.id, state })? {
            Reply::Attributes(modify) => Ok(modify),
            _ => unreachable!("the card answers with attributes"),
        }
    }

    /// The caller's parameters with the number of the attached queue pair.
    fn complete(&self, parameters: &Parameters) -> Parameters {
        let mut parameters = parameters.clone();
        if let Some(pair) = self.queue_pair() {
            parameters.queue_pair = pair.number();
            parameters.shared_receive_queue |= pair.has_shared_receive_queue();
        }
        parameters
    }

    /// Asks the peer for a connection, or for its datagram queue pair: [`EventKind::Established`].
    pub fn connect(&self, parameters: &Parameters) -> Result<(), Error> {
        self.call(Call::Connect { id: self.inner.id, parameters: self.complete(parameters) })?;
        self.done(EventKind::Established)
    }

    /// Accepts a request: [`EventKind::Established`] tells that the peer knows. A request of datagrams is
    /// answered with that, and no event follows.
    pub fn accept(&self, parameters: &Parameters) -> Result<(), Error> {
        let mut parameters = self.complete(parameters);
        let kind = match self.queue_pair() {
            Some(pair) => pair.kind(),
            None => self.view()?.kind,
        };
        if kind == QpKind::Ud {
            parameters.queue_key = parameters.queue_key.or(Some(DATAGRAM_KEY));
            return self.call(Call::Accept { id: self.inner.id, parameters }).map(|_| ());
        }
        // The peer may send as soon as it has the REP: the queue pair is ready before.
        match self.queue_pair() {
            Some(pair) => {
                let reads = Some((parameters.responder_resources, parameters.initiator_depth));
                let (id, queue_pair, states) = (self.inner.id, pair.number(), CONNECTED.into());
                let advance = Advance { id, queue_pair, states, reads, then: Then::Accept(parameters) };
                self.channel().backend().advance_queue_pair(&advance)?;
            }
            None => {
                self.call(Call::Accept { id: self.inner.id, parameters })?;
            }
        }
        self.done(EventKind::Established)
    }

    /// Takes the queue pair of an accepted request to RTS, and tells the peer.
    pub(super) fn complete_connection(&self) -> Result<(), Error> {
        match self.queue_pair() {
            Some(pair) => self.advance(&pair, &CONNECTED, Then::Establish),
            None => self.establish(),
        }
    }

    /// Refuses a request.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        self.reject_for(RejectReason::CONSUMER, private_data)
    }

    /// Refuses a request, for a reason of the specification's list.
    pub fn reject_for(&self, reason: RejectReason, private_data: &[u8]) -> Result<(), Error> {
        let private_data = private_data.to_vec();
        self.call(Call::Reject { id: self.inner.id, reason, private_data }).map(|_| ())
    }

    /// Tells the peer that the connection stands, after [`EventKind::ConnectResponse`]; or the card, that the
    /// queue pair heard from its peer although no RTU came.
    pub fn establish(&self) -> Result<(), Error> {
        self.call(Call::Establish(self.inner.id)).map(|_| ())
    }

    /// Ends the connection: the queue pair stops, and both sides hear [`EventKind::Disconnected`].
    pub fn disconnect(&self) -> Result<(), Error> {
        match self.connected_queue_pair() {
            Some(pair) => self.advance(&pair, &[State::Error], Then::Disconnect)?,
            None => self.call(Call::Disconnect(self.inner.id)).map(|_| ())?,
        }
        self.done(EventKind::Disconnected)
    }

    /// The queue pair, unless it is one of datagrams, which has other peers.
    fn connected_queue_pair(&self) -> Option<QueuePair> {
        self.queue_pair().filter(|pair| pair.kind() != QpKind::Ud)
    }

    /// Stops the queue pair of a connection that is over.
    pub(super) fn stop_queue_pair(&self) {
        if let Some(pair) = self.connected_queue_pair() {
            // One that is in RESET or in the error state already is as good.
            let _ = pair.modify(&Modify::default().state(State::Error));
        }
    }

    /// Moves the identifier and its events to another channel of the same device.
    pub fn migrate(&self, channel: &EventChannel) -> Result<(), Error> {
        let old = self.channel();
        if old == *channel {
            return Ok(());
        }
        channel.add(self);
        let moved = Call::Migrate { id: self.inner.id, channel: channel.inner.id };
        if let Err(error) = self.call(moved) {
            channel.remove(self.inner.id);
            return Err(error);
        }
        *self.inner.channel.lock() = channel.clone();
        old.remove(self.inner.id);
        Ok(())
    }

    /// What may be known of it.
    pub fn view(&self) -> Result<View, Error> {
        match self.call(Call::Query(self.inner.id))? {
            Reply::View(view) => Ok(view),
            _ => unreachable!("the card answers with a view"),
        }
    }

    /// Its own address, if it has one.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.view().ok()?.local
    }

    /// The other side's, if there is one.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.view().ok()?.peer
    }

    /// Joins a multicast group: the attached queue pair is a member when [`EventKind::MulticastJoin`] is taken.
    pub fn join_multicast(&self, group: IpAddr) -> Result<(), Error> {
        self.call(Call::Join { id: self.inner.id, group })?;
        self.done(EventKind::MulticastJoin)
    }

    /// Leaves a multicast group.
    pub fn leave_multicast(&self, group: IpAddr) -> Result<(), Error> {
        self.call(Call::Leave { id: self.inner.id, group })?;
        match self.queue_pair() {
            Some(pair) => pair.detach_multicast(Gid::from(group)),
            None => Ok(()),
        }
    }

    /// Finds address and path to a peer given as `host:port`, one after the other, for async code.
    pub(super) async fn reach(&self, peer: &str) -> Result<(), Error> {
        let channel = self.channel();
        self.resolve_address(None, resolve(channel.context(), peer)?)?;
        channel.next().await?.expect(EventKind::AddressResolved)?;
        self.resolve_route()?;
        channel.next().await?.expect(EventKind::RouteResolved)?;
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let channel = self.channel.lock();
        channel.remove(self.id);
        let _ = channel.backend().cm(Call::Destroy(self.id));
    }
}
