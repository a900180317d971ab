//! The connection manager of an HCA (IBA volume 1, chapter 12), with the addressing of the RDMA CM.
//!
//! It communicates through QP1 of the port: messages arrive in [`Hca::receive`](crate::Hca::receive), leave in
//! [`Hca::transmit`](crate::Hca::transmit), and its deadlines are entries of the HCA's timers. It modifies no queue
//! pair; applications do, with the attributes that it computes. Events wait in channels until the application reads
//! them.

mod address;
mod call;
mod channel;
mod connect;
mod disconnect;
mod early_requests;
mod identifier;
mod lifetime;
mod mad_queue;
mod ports;
mod receive;
mod records;
mod sidr;
mod slots;

pub use slots::MadOwner;

use crate::core::hca_state::HcaState;
use crate::core::random::Random;
use crate::{
    ClientId, CmChannelId, CmDropReason, CmFailure, CmId, CmMessageKind, Context, Event, Instant, Peer,
};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;
use identifier::{AwaitedReply, CmIdentifier, SentMad};
use mad_queue::{MadQueue, SOURCE_PORT};
use ports::Ports;
use softhca_types::cm::{self as api, CmState, EventParameters, EventType};
use softhca_wire::cm::{CommunicationId, Datagram, Message, RejectReason};
use softhca_wire::{AddressHeaders, Gid, Qpn, QpnSlot};

/// The maximum number of identifiers of an HCA.
const MAX_IDENTIFIERS: usize = 65_536;
/// The maximum number of identifiers of a client.
const MAX_IDENTIFIERS_PER_CLIENT: usize = 32_768;
/// The numbers of the identifiers of a process, where several share an address.
const IDENTIFIERS_PER_SLOT: u32 = 1_000_000;
/// The maximum number of channels of a client.
const MAX_CHANNELS_PER_CLIENT: u32 = 4_096;
/// The maximum number of connections in time wait; the oldest ones leave first.
const MAX_TIME_WAITS: usize = 65_536;
/// The exponent of the HCA's ACK delay.
const TARGET_ACK_DELAY: u8 = 15;
/// The exponent of the longest accepted MRA timeout.
const MAX_MRA_TIMEOUT: u8 = 24;

const ETIMEDOUT: i32 = 110;
const EHOSTUNREACH: i32 = 113;

/// The connection manager in a call of its HCA.
pub(crate) struct CmCall<'a, 'c> {
    pub cm: &'a mut ConnectionManager,
    pub hca: &'a mut HcaState,
    pub ctx: &'a mut Context<'c>,
}

struct Channel {
    client: ClientId,
    events: VecDeque<api::Event>,
    users: usize,
}

/// A connection in time wait whose identifier no longer exists.
struct TimeWait {
    peer: IpAddr,
    remote_comm_id: CommunicationId,
}

/// The connection manager.
pub(crate) struct ConnectionManager {
    random: Random,
    channels: BTreeMap<CmChannelId, Channel>,
    identifiers: BTreeMap<CmId, CmIdentifier>,
    next_channel: u32,
    next_identifier: u32,
    ports: Ports,
    /// Identifiers by local communication ID.
    by_local_comm_id: BTreeMap<CommunicationId, CmId>,
    /// Identifiers by the peer's address and communication ID.
    by_remote_comm_id: BTreeMap<(IpAddr, CommunicationId), CmId>,
    /// Identifiers by the peer's address and queue pair.
    by_remote_qpn: BTreeMap<(IpAddr, Qpn), CmId>,
    time_waits: BTreeMap<CommunicationId, TimeWait>,
    time_wait_deadlines: BTreeSet<(Instant, CommunicationId)>,
    deadlines: BTreeSet<(Instant, CmId)>,
    /// The connection manager's valid entry in the HCA's timers.
    timer_at: Option<Instant>,
    pub mad_queue: MadQueue,
    /// The numbers of this process, which its communication IDs and identifiers have in common.
    slot: QpnSlot,
}

impl ConnectionManager {
    /// The ports with a listener.
    pub fn listening_ports(&self) -> impl Iterator<Item = u16> {
        self.ports.listening_ports()
    }

    pub fn new(seed: u64, slot: QpnSlot) -> ConnectionManager {
        ConnectionManager {
            random: Random::Seeded(seed ^ 0x636d_5f69_6473_2121),
            channels: BTreeMap::new(),
            identifiers: BTreeMap::new(),
            next_channel: 1,
            next_identifier: 1,
            ports: Ports::default(),
            by_local_comm_id: BTreeMap::new(),
            by_remote_comm_id: BTreeMap::new(),
            by_remote_qpn: BTreeMap::new(),
            time_waits: BTreeMap::new(),
            time_wait_deadlines: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            timer_at: None,
            mad_queue: MadQueue::default(),
            slot,
        }
    }

    pub fn set_secret(&mut self, secret: [u64; 2]) {
        self.random = Random::keyed(secret);
        if self.slot.number != 0 {
            // The identifiers of a process that had the slot before should have other numbers in a log.
            self.next_identifier = self.next_random() as u32;
        }
    }

    /// A number for a new identifier: each process of a host has its own, so that a log tells them apart.
    fn allocate_identifier(&mut self) -> CmId {
        loop {
            let number = self.next_identifier;
            self.next_identifier = number.wrapping_add(1);
            let id = match self.slot {
                QpnSlot::ALL => CmId(number),
                QpnSlot { number: slot, .. } => {
                    CmId(u32::from(slot) * IDENTIFIERS_PER_SLOT + number % IDENTIFIERS_PER_SLOT)
                }
            };
            if !self.identifiers.contains_key(&id) {
                return id;
            }
        }
    }

    fn next_random(&mut self) -> u64 {
        self.random.draw()
    }

    /// A communication ID that is neither in use nor in time wait.
    fn allocate_comm_id(&mut self) -> CommunicationId {
        loop {
            let QpnSlot { number, bits } = self.slot;
            let high_bits = (u64::from(number) << (32 - bits)) as u32;
            let comm_id = CommunicationId(high_bits | self.next_random() as u32 >> bits);
            if comm_id.0 != 0
                && !self.by_local_comm_id.contains_key(&comm_id)
                && !self.time_waits.contains_key(&comm_id)
            {
                return comm_id;
            }
        }
    }

    /// The number of identifiers, channels and connections in time wait.
    pub fn resource_counts(&self) -> [usize; 3] {
        [self.identifiers.len(), self.channels.len(), self.time_waits.len()]
    }

    /// Whether an identifier waits for a reply, or for the end of its time wait.
    pub fn has_deadline(&self) -> bool {
        !self.deadlines.is_empty()
    }

    /// The identifiers that wait for a reply of `peer`.
    fn waiting_for(&self, peer: Peer) -> Vec<CmId> {
        let waiting = |(_, identifier): &(&CmId, &CmIdentifier)| {
            let awaited = identifier.awaited_reply.as_ref();
            awaited.is_some_and(|awaited| peer.contains(identifier.peer_address(), awaited.target()))
        };
        self.identifiers.iter().filter(waiting).map(|(id, _)| *id).collect()
    }

    /// Removes the connection of an identifier from the lookup tables.
    fn remove_connection(&mut self, id: CmId) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let peer = identifier.peer_address();
        if self.by_local_comm_id.get(&identifier.local_comm_id) == Some(&id) {
            self.by_local_comm_id.remove(&identifier.local_comm_id);
        }
        if self.by_remote_comm_id.get(&(peer, identifier.remote_comm_id)) == Some(&id) {
            self.by_remote_comm_id.remove(&(peer, identifier.remote_comm_id));
        }
        if self.by_remote_qpn.get(&(peer, identifier.remote_qpn)) == Some(&id) {
            self.by_remote_qpn.remove(&(peer, identifier.remote_qpn));
        }
    }
}

impl CmCall<'_, '_> {
    /// Queues an event in the channel of its identifier.
    fn raise_event(&mut self, event: api::Event) {
        let Some(identifier) = self.cm.identifiers.get(&event.id) else { return };
        let (client, number) = (identifier.client, identifier.channel);
        if self.hca.processes.slot(client).is_some() {
            return;
        }
        let Some(channel) = self.cm.channels.get_mut(&number) else { return };
        let (id, kind, status) = (event.id, event.event_type, event.status);
        channel.events.push_back(event);
        self.ctx.emit(Event::CmEventRaised { client, channel: number, id, event: kind, status });
    }

    fn raise_simple_event(&mut self, id: CmId, kind: EventType, status: i32) {
        self.raise_event(api::Event { status, ..simple_event(id, kind) });
    }

    /// Raises an event that a fault injects in place of the result of a call. A failed connection is closed.
    pub fn raise_injected(&mut self, id: CmId, event: EventType, status: i32) {
        use EventType::{ConnectError, Disconnected, Rejected, Unreachable};
        if matches!(event, ConnectError | Disconnected | Rejected | Unreachable) {
            self.set_state(id, CmState::Closed);
        }
        self.raise_simple_event(id, event, status);
    }

    /// Raises the event of a device that is removed on every identifier.
    pub fn raise_device_removal(&mut self) {
        for id in self.cm.identifiers.keys().copied().collect::<Vec<_>>() {
            self.raise_simple_event(id, EventType::DeviceRemoval, 0);
        }
    }

    /// Changes the state of an identifier.
    fn set_state(&mut self, id: CmId, to: CmState) {
        let Some(identifier) = self.cm.identifiers.get_mut(&id) else { return };
        let from = core::mem::replace(&mut identifier.state, to);
        match identifier.to_record(id) {
            Some(connection) => self.hca.processes.record_connection(&connection),
            None => self.hca.processes.clear_connection(id),
        }
        // The process that reserves a port logs the state of its own identifier.
        if from != to && self.hca.processes.slot(identifier.client).is_none() {
            self.ctx.emit(Event::CmStateChanged { id, from, to });
        }
        if from == CmState::Bound {
            self.serve_early_requests(id);
        }
    }

    /// Sets or clears the deadline of an identifier.
    fn set_deadline(&mut self, id: CmId, at: Option<Instant>) {
        let Some(identifier) = self.cm.identifiers.get_mut(&id) else { return };
        if let Some(old) = identifier.deadline.take() {
            self.cm.deadlines.remove(&(old, id));
        }
        identifier.deadline = at;
        if let Some(at) = at {
            self.cm.deadlines.insert((at, id));
        }
        self.arm_timer();
    }

    /// Arms the HCA's timers for the earliest deadline.
    fn arm_timer(&mut self) {
        let earliest = [
            self.cm.deadlines.first().map(|(at, _)| *at),
            self.cm.time_wait_deadlines.first().map(|(at, _)| *at),
        ];
        let Some(wanted) = earliest.into_iter().flatten().min() else { return };
        if self.cm.timer_at.is_none_or(|at| wanted < at) {
            self.cm.timer_at = Some(wanted);
            self.hca.timers.push(wanted, Qpn::GSI);
        }
    }

    /// Handles expired deadlines, if the timer entry at `at` is the valid one.
    pub fn expire(&mut self, at: Instant) {
        if self.cm.timer_at != Some(at) {
            return;
        }
        self.cm.timer_at = None;
        while let Some((at, id)) = self.cm.deadlines.first().copied().filter(|(at, _)| *at <= self.ctx.now) {
            self.cm.deadlines.remove(&(at, id));
            if let Some(identifier) = self.cm.identifiers.get_mut(&id) {
                identifier.deadline = None;
                self.on_deadline(id);
            }
        }
        while let Some((at, comm_id)) =
            self.cm.time_wait_deadlines.first().copied().filter(|(at, _)| *at <= self.ctx.now)
        {
            self.cm.time_wait_deadlines.remove(&(at, comm_id));
            self.cm.time_waits.remove(&comm_id);
        }
        self.arm_timer();
    }

    /// The deadline of an identifier expired: retransmits its message, ends its time wait, or rejects the requests that
    /// waited for a listener.
    fn on_deadline(&mut self, id: CmId) {
        let Some(identifier) = self.cm.identifiers.get_mut(&id) else { return };
        if identifier.state == CmState::Bound {
            return self.serve_early_requests(id);
        }
        if identifier.state == CmState::TimeWait {
            self.set_state(id, CmState::Closed);
            self.cm.remove_connection(id);
            return self.raise_simple_event(id, EventType::TimewaitExit, 0);
        }
        let peer = identifier.peer_address();
        let Some(unanswered) = &mut identifier.awaited_reply else { return };
        // The timers of a stalled port are suspended.
        let target = unanswered.target();
        let stalled = self.hca.peers.stalled.iter().any(|stalled| stalled.contains(peer, target));
        if unanswered.retries_left == 0 && !stalled {
            return self.fail_connection(id, CmFailure::TimedOut);
        }
        if !stalled {
            unanswered.retries_left -= 1;
            let SentMad { addressing, datagram } = *unanswered.message;
            self.push_mad(Some(id), addressing, datagram, true);
        }
        let at = self.ctx.now.plus(self.hca.settings.cm.reply_timeout());
        self.set_deadline(id, Some(at));
    }

    /// Fails a connection whose message stays unanswered.
    fn fail_connection(&mut self, id: CmId, failure: CmFailure) {
        let Some(identifier) = self.cm.identifiers.get_mut(&id) else { return };
        let state = identifier.state;
        identifier.awaited_reply = None;
        self.set_deadline(id, None);
        self.ctx.emit(Event::CmFailed { id, reason: failure });
        let status = match failure {
            CmFailure::TimedOut => -ETIMEDOUT,
            CmFailure::PeerUnreachable => -EHOSTUNREACH,
        };
        match state {
            CmState::DreqSent => {
                self.enter_time_wait(id);
                self.raise_simple_event(id, EventType::Disconnected, status);
            }
            CmState::ReqSent | CmState::RepSent | CmState::SidrReqSent => {
                if state != CmState::SidrReqSent && failure == CmFailure::TimedOut {
                    self.send_rej(id, RejectReason::TIMEOUT, &[]);
                }
                self.set_state(id, CmState::Closed);
                self.cm.remove_connection(id);
                self.raise_simple_event(id, EventType::Unreachable, status);
            }
            _ => {}
        }
    }

    /// Fails all pending requests to `peer`, whose port is dead.
    pub fn fail_peer(&mut self, peer: Peer) {
        self.hca.processes.on_peer_gone(peer);
        self.cm.mad_queue.discard(peer);
        for id in self.cm.waiting_for(peer) {
            self.fail_connection(id, CmFailure::PeerUnreachable);
        }
    }

    /// The port at `peer` responds again: restarts the timeouts of its messages.
    pub fn resume(&mut self, peer: Peer) {
        let at = self.ctx.now.plus(self.hca.settings.cm.reply_timeout());
        for id in self.cm.waiting_for(peer) {
            self.set_deadline(id, Some(at));
        }
    }

    /// Enters time wait: the queue pair and communication IDs are not reused while old packets may be in flight.
    fn enter_time_wait(&mut self, id: CmId) {
        let Some(identifier) = self.cm.identifiers.get_mut(&id) else { return };
        identifier.awaited_reply = None;
        let wait = time_wait_duration(identifier.ack_timeout);
        self.set_state(id, CmState::TimeWait);
        self.set_deadline(id, Some(self.ctx.now.plus(wait)));
    }

    /// Keeps a connection in time wait after its identifier is destroyed.
    fn remember_time_wait(&mut self, id: CmId, until: Instant) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        if self.cm.time_waits.len() >= MAX_TIME_WAITS
            && let Some(oldest) = self.cm.time_wait_deadlines.pop_first()
        {
            self.cm.time_waits.remove(&oldest.1);
        }
        let (peer, remote, comm_id) =
            (identifier.peer_address(), identifier.remote_comm_id, identifier.local_comm_id);
        self.cm.time_waits.insert(comm_id, TimeWait { peer, remote_comm_id: remote });
        self.cm.time_wait_deadlines.insert((until, comm_id));
        self.arm_timer();
    }

    /// Sends a message and retransmits it until a reply arrives.
    fn send_with_retries(&mut self, id: CmId, message: impl Into<Message>, transaction: u64) {
        let Some(identifier) = self.cm.identifiers.get_mut(&id) else { return };
        let addressing = identifier.addressing();
        let datagram = Datagram::new(transaction, message);
        let message = Box::new(SentMad { addressing, datagram });
        let times = self.hca.settings.cm;
        identifier.awaited_reply = Some(AwaitedReply { message, retries_left: times.max_retries });
        self.push_mad(Some(id), addressing, datagram, false);
        self.set_deadline(id, Some(self.ctx.now.plus(times.reply_timeout())));
    }

    /// Sends a message once.
    fn send(&mut self, id: CmId, message: impl Into<Message>, transaction: u64) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let datagram = Datagram::new(transaction, message);
        self.push_mad(Some(id), identifier.addressing(), datagram, false);
    }

    /// Replies to a message that belongs to no identifier.
    fn reply(&mut self, addressing: &AddressHeaders, transaction: u64, message: impl Into<Message>) {
        let addressing = AddressHeaders {
            source_port: SOURCE_PORT,
            traffic_class: addressing.traffic_class & !3,
            ..AddressHeaders::between(addressing.destination, addressing.source)
        };
        self.push_mad(None, addressing, Datagram::new(transaction, message), false);
    }

    /// Queues a MAD of an identifier.
    fn push_mad(&mut self, id: Option<CmId>, addressing: AddressHeaders, datagram: Datagram, again: bool) {
        self.cm.mad_queue.push(self.hca, self.ctx, id, addressing, datagram, again);
    }

    /// Reports a dropped CM message.
    fn emit_dropped(&mut self, id: Option<CmId>, message: CmMessageKind, peer: IpAddr, reason: CmDropReason) {
        self.ctx.emit(Event::CmDropped { id, message, peer, reason });
    }

    /// A reply arrived: stops the retransmission.
    fn stop_retries(&mut self, id: CmId) {
        if let Some(identifier) = self.cm.identifiers.get_mut(&id) {
            identifier.awaited_reply = None;
        }
        self.set_deadline(id, None);
    }
}

/// A successful event without private data and parameters.
fn simple_event(id: CmId, event_type: EventType) -> api::Event {
    let (private_data, parameters) = (Vec::new(), EventParameters::None);
    api::Event { id, listener: None, event_type, status: 0, private_data, parameters }
}

/// The duration of time wait (IBA 12.9.8.4).
fn time_wait_duration(ack_timeout: u8) -> Duration {
    Duration::from_nanos(4096 << (ack_timeout & 0x1f).min(24))
}

/// The GID of an address and its index in the GID table.
fn find_gid(hca: &HcaState, address: IpAddr) -> Option<(Gid, u8)> {
    let gid = Gid::from(address);
    hca.gids.iter().position(|own| *own == gid).map(|index| (gid, index as u8))
}
