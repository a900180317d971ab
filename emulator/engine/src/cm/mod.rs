//! The connection manager of a card (IBA volume 1, chapter 12), with the addressing of the RDMA CM.
//!
//! It speaks through QP1, which every port has: messages come from [`Hca::receive`](crate::Hca::receive), leave
//! through [`Hca::transmit`](crate::Hca::transmit), and its deadlines stand in the card's timers. It changes no
//! queue pair: applications do, with the attributes that it tells them. What applications hear waits in
//! channels until they take it.

mod address;
mod call;
mod channel;
mod connect;
mod disconnect;
mod event;
mod identifier;
mod lifetime;
mod mad_queue;
mod ports;
mod receive;
mod sidr;

pub use event::{CmDropReason, CmFailure, CmMessageKind};

use crate::hca_state::HcaState;
use crate::{ClientId, CmChannelId, CmId, Context, Event, Instant};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use core::net::IpAddr;
use core::time::Duration;
use identifier::{AwaitedReply, CmIdentifier, SentMad};
use mad_queue::MadQueue;
use ports::Ports;
use softhca_queue::cm::{self as api, CmState, EventParameters, EventType};
use softhca_wire::cm::{CommunicationId, Message};
use softhca_wire::{Gid, Qpn};

/// Identifiers of a card.
const MAX_IDENTIFIERS: usize = 65_536;
/// Identifiers of one application.
const MAX_IDENTIFIERS_PER_CLIENT: usize = 32_768;
/// Channels of one application.
const MAX_CHANNELS_PER_CLIENT: usize = 4_096;
/// Connections of gone identifiers that are remembered; the oldest are forgotten first.
const MAX_TIME_WAITS: usize = 65_536;
/// How long a card may take to acknowledge, as an exponent.
const TARGET_ACK_DELAY: u8 = 15;
/// The exponent of the longest time that an MRA is granted.
const MAX_MRA_TIMEOUT: u8 = 24;

const ETIMEDOUT: i32 = 110;
const EHOSTUNREACH: i32 = 113;

struct Channel {
    client: ClientId,
    events: VecDeque<api::Event>,
    users: usize,
}

/// A connection whose identifier is gone, until no message about it can be on its way.
struct TimeWait {
    peer: IpAddr,
    remote_comm_id: CommunicationId,
}

/// The connection manager.
pub(crate) struct ConnectionManager {
    seed: u64,
    channels: BTreeMap<CmChannelId, Channel>,
    identifiers: BTreeMap<CmId, CmIdentifier>,
    next_channel: u32,
    next_identifier: u32,
    ports: Ports,
    /// Identifiers by the name that they have on the wire.
    by_local_comm_id: BTreeMap<CommunicationId, CmId>,
    /// Identifiers by what the peer calls the connection.
    by_remote_comm_id: BTreeMap<(IpAddr, CommunicationId), CmId>,
    /// Identifiers by the queue pair at the other side.
    by_remote_qpn: BTreeMap<(IpAddr, Qpn), CmId>,
    time_waits: BTreeMap<CommunicationId, TimeWait>,
    time_wait_deadlines: BTreeSet<(Instant, CommunicationId)>,
    deadlines: BTreeSet<(Instant, CmId)>,
    /// The earliest entry of the card's timers that is for the connection manager.
    timer_at: Option<Instant>,
    pub mad_queue: MadQueue,
}

impl ConnectionManager {
    /// The ports at which somebody takes requests.
    pub fn listening_ports(&self) -> impl Iterator<Item = u16> {
        self.ports.listening_ports()
    }

    pub fn new(seed: u64) -> ConnectionManager {
        ConnectionManager {
            seed: seed ^ 0x636d_5f69_6473_2121,
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
        }
    }

    /// The next number that the seed decides.
    fn next_random(&mut self) -> u64 {
        let mut z = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.seed = z;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A name for a connection that no other has, and none had lately.
    fn allocate_comm_id(&mut self) -> CommunicationId {
        loop {
            let name = CommunicationId(self.next_random() as u32);
            if name.0 != 0
                && !self.by_local_comm_id.contains_key(&name)
                && !self.time_waits.contains_key(&name)
            {
                return name;
            }
        }
    }

    /// How many identifiers and channels there are, and how many ended connections are remembered.
    pub fn resource_counts(&self) -> [usize; 3] {
        [self.identifiers.len(), self.channels.len(), self.time_waits.len()]
    }

    /// Puts an event into the channel of its identifier.
    fn raise_event(&mut self, ctx: &mut Context<'_>, event: api::Event) {
        let Some(identifier) = self.identifiers.get(&event.id) else { return };
        let (client, number) = (identifier.client, identifier.channel);
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let (id, kind, status) = (event.id, event.event_type, event.status);
        channel.events.push_back(event);
        ctx.emit(Event::CmEventRaised { client, channel: number, id, kind, status });
    }

    fn raise_simple_event(&mut self, ctx: &mut Context<'_>, id: CmId, kind: EventType, status: i32) {
        let private_data = alloc::vec::Vec::new();
        self.raise_event(
            ctx,
            api::Event {
                id,
                listener: None,
                event_type: kind,
                status,
                private_data,
                parameters: EventParameters::None,
            },
        );
    }

    /// Changes an identifier's state.
    fn set_state(&mut self, ctx: &mut Context<'_>, id: CmId, to: CmState) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        let from = core::mem::replace(&mut identifier.state, to);
        if from != to {
            ctx.emit(Event::CmStateChanged { id, from, to });
        }
    }

    /// Sets the deadline of an identifier, or takes it away.
    fn set_deadline(&mut self, card: &mut HcaState, id: CmId, at: Option<Instant>) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        if let Some(old) = identifier.deadline.take() {
            self.deadlines.remove(&(old, id));
        }
        identifier.deadline = at;
        if let Some(at) = at {
            self.deadlines.insert((at, id));
        }
        self.arm_timer(card);
    }

    /// Makes sure that the card's timers wake the connection manager for its earliest deadline.
    fn arm_timer(&mut self, card: &mut HcaState) {
        let earliest =
            [self.deadlines.first().map(|(at, _)| *at), self.time_wait_deadlines.first().map(|(at, _)| *at)];
        let Some(wanted) = earliest.into_iter().flatten().min() else { return };
        if self.timer_at.is_none_or(|at| wanted < at) {
            self.timer_at = Some(wanted);
            card.timers.push(wanted, Qpn::GSI);
        }
    }

    /// Does what was due, if the timer at `at` is the one that counts.
    pub fn expire(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, at: Instant) {
        if self.timer_at != Some(at) {
            return;
        }
        self.timer_at = None;
        while let Some((at, id)) = self.deadlines.first().copied().filter(|(at, _)| *at <= ctx.now) {
            self.deadlines.remove(&(at, id));
            if let Some(identifier) = self.identifiers.get_mut(&id) {
                identifier.deadline = None;
                self.on_deadline(card, ctx, id);
            }
        }
        while let Some((at, name)) =
            self.time_wait_deadlines.first().copied().filter(|(at, _)| *at <= ctx.now)
        {
            self.time_wait_deadlines.remove(&(at, name));
            self.time_waits.remove(&name);
        }
        self.arm_timer(card);
    }

    /// The deadline of an identifier passed: its message goes out again, or its wait is over.
    fn on_deadline(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        if identifier.state == CmState::TimeWait {
            self.set_state(ctx, id, CmState::Closed);
            self.remove_connection(id);
            return self.raise_simple_event(ctx, id, EventType::TimewaitExit, 0);
        }
        let peer = identifier.peer_address();
        let Some(unanswered) = &mut identifier.awaited_reply else { return };
        // A port that does not answer now is no reason to give up: its time stands still.
        let stalled = card.stalled_peers.contains(&peer);
        if unanswered.retries_left == 0 && !stalled {
            return self.fail_connection(card, ctx, id, CmFailure::TimedOut);
        }
        if !stalled {
            unanswered.retries_left -= 1;
            let SentMad { addressing: envelope, datagram } = *unanswered.message;
            self.mad_queue.push(card, ctx, Some(id), envelope, datagram, true);
        }
        let at = ctx.now.plus(card.settings.cm.reply_timeout());
        self.set_deadline(card, id, Some(at));
    }

    /// No answer will come any more.
    fn fail_connection(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, id: CmId, failure: CmFailure) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        let state = identifier.state;
        identifier.awaited_reply = None;
        self.set_deadline(card, id, None);
        ctx.emit(Event::CmFailed { id, failure });
        let status = match failure {
            CmFailure::TimedOut => -ETIMEDOUT,
            CmFailure::PeerUnreachable => -EHOSTUNREACH,
        };
        match state {
            CmState::DreqSent => {
                self.enter_time_wait(card, ctx, id);
                self.raise_simple_event(ctx, id, EventType::Disconnected, status);
            }
            CmState::ReqSent | CmState::RepSent | CmState::SidrReqSent => {
                if state != CmState::SidrReqSent && failure == CmFailure::TimedOut {
                    self.send_rej(card, ctx, id, softhca_wire::cm::RejectReason::TIMEOUT, &[]);
                }
                self.set_state(ctx, id, CmState::Closed);
                self.remove_connection(id);
                self.raise_simple_event(ctx, id, EventType::Unreachable, status);
            }
            _ => {}
        }
    }

    /// The port at `peer` is gone: nothing that waits for it will be answered.
    pub fn fail_peer(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, peer: IpAddr) {
        let waiting = |(_, identifier): &(&CmId, &CmIdentifier)| {
            identifier.awaited_reply.is_some() && identifier.peer_address() == peer
        };
        let affected: alloc::vec::Vec<CmId> =
            self.identifiers.iter().filter(waiting).map(|(id, _)| *id).collect();
        self.mad_queue.discard(peer);
        for id in affected {
            self.fail_connection(card, ctx, id, CmFailure::PeerUnreachable);
        }
    }

    /// The port at `peer` answers again: what waits for it starts anew.
    pub fn resume(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, peer: IpAddr) {
        let waiting = |(_, identifier): &(&CmId, &CmIdentifier)| {
            identifier.awaited_reply.is_some() && identifier.peer_address() == peer
        };
        let affected: alloc::vec::Vec<CmId> =
            self.identifiers.iter().filter(waiting).map(|(id, _)| *id).collect();
        let at = ctx.now.plus(card.settings.cm.reply_timeout());
        for id in affected {
            self.set_deadline(card, id, Some(at));
        }
    }

    /// Keeps a connection's queue pair and names apart from new ones for as long as old packets may live.
    fn enter_time_wait(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        identifier.awaited_reply = None;
        let wait = time_wait_duration(identifier.ack_timeout);
        self.set_state(ctx, id, CmState::TimeWait);
        self.set_deadline(card, id, Some(ctx.now.plus(wait)));
    }

    /// Takes an identifier's connection out of the tables of names.
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

    /// Remembers a connection whose identifier goes.
    fn remember_time_wait(&mut self, card: &mut HcaState, id: CmId, until: Instant) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        if self.time_waits.len() >= MAX_TIME_WAITS
            && let Some(oldest) = self.time_wait_deadlines.pop_first()
        {
            self.time_waits.remove(&oldest.1);
        }
        let (peer, remote, name) =
            (identifier.peer_address(), identifier.remote_comm_id, identifier.local_comm_id);
        self.time_waits.insert(name, TimeWait { peer, remote_comm_id: remote });
        self.time_wait_deadlines.insert((until, name));
        self.arm_timer(card);
    }

    /// Sends a message of an identifier that wants an answer, until one comes.
    fn send_with_retries(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        id: CmId,
        message: impl Into<Message>,
        transaction: u64,
    ) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        let envelope = identifier.addressing();
        let datagram = softhca_wire::cm::Datagram::new(transaction, message);
        let message = alloc::boxed::Box::new(SentMad { addressing: envelope, datagram });
        let times = card.settings.cm;
        identifier.awaited_reply = Some(AwaitedReply { message, retries_left: times.max_retries });
        self.mad_queue.push(card, ctx, Some(id), envelope, datagram, false);
        self.set_deadline(card, id, Some(ctx.now.plus(times.reply_timeout())));
    }

    /// Sends a message of an identifier once.
    fn send(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        id: CmId,
        message: impl Into<Message>,
        transaction: u64,
    ) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let datagram = softhca_wire::cm::Datagram::new(transaction, message);
        self.mad_queue.push(card, ctx, Some(id), identifier.addressing(), datagram, false);
    }

    /// An answer came: nothing is to be sent again.
    fn stop_retries(&mut self, card: &mut HcaState, id: CmId) {
        if let Some(identifier) = self.identifiers.get_mut(&id) {
            identifier.awaited_reply = None;
        }
        self.set_deadline(card, id, None);
    }
}

/// How long a connection is remembered after its end (IBA 12.9.8.4).
fn time_wait_duration(ack_timeout: u8) -> Duration {
    Duration::from_nanos(4096 << (ack_timeout & 0x1f).min(24))
}

/// The GID of an address, and its index in the table, if the card has it.
fn find_gid(card: &HcaState, address: IpAddr) -> Option<(Gid, u8)> {
    let gid = Gid::from(address);
    card.gids.iter().position(|own| *own == gid).map(|index| (gid, index as u8))
}
