//! The HCA: its state, timers and doorbells.

mod transmit;

use crate::cm::{CmCall, ConnectionManager};
use crate::core::hca_state::HcaState;
use crate::core::peer_window::PeerWindow;
use crate::core::process_faults::HELD_COMPLETIONS;
use crate::core::random::{Random, next_random};
use crate::core::table::Table;
use crate::transport::ib::QueuePair;
use crate::{
    AsyncEvent, ClientId, Context, Counters, DeviceLimits, Event, Instant, LinkReject, Peer, PortState,
    QpState, Reason, Settings,
};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_queue::{AckRecords, DoorbellConsumer};
use softhca_wire::{Gid, Qpn, QpnSlot};

/// An application of the HCA: the owner of its resources.
pub(crate) struct Client {
    pub doorbell: DoorbellConsumer,
    /// The address of the next region whose address the HCA chooses: the same in every run.
    pub next_iova: u64,
    /// The device was removed while the application had it open: its calls fail, also when the device is back.
    pub has_lost_device: bool,
}

/// The HCA.
#[repr(C)]
pub struct Hca {
    pub(crate) queue_pairs: Table<QueuePair>,
    pub(crate) state: HcaState,
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) next_client: u32,
    pub(crate) limits: DeviceLimits,
    pub(crate) cm: ConnectionManager,
    rung_qps: Vec<Qpn>,
}

impl Hca {
    /// Creates an HCA. GID 0 is the address of its port.
    pub fn new(settings: Settings, gids: Vec<Gid>) -> Hca {
        let limits = DeviceLimits::HCA;
        // A sequence of its own: the tags of keys and numbers do not reveal the first QPN.
        let start = next_random(&mut (settings.seed ^ 0x7170_6e5f_6d61_736b));
        let mut queue_pairs = Table::new(limits.max_qp, 2);
        if settings.qpn_slot != QpnSlot::ALL {
            queue_pairs = queue_pairs.with_slot(settings.qpn_slot);
        }
        queue_pairs.set_seed(start);
        Hca {
            queue_pairs,
            state: HcaState::new(settings, gids, &limits),
            clients: BTreeMap::new(),
            next_client: 0,
            limits,
            cm: ConnectionManager::new(settings.seed, settings.qpn_slot),
            rung_qps: Vec::new(),
        }
    }

    /// Takes queue pair numbers, keys, communication IDs and initial PSNs from a secret instead of the seed. A peer
    /// that has seen some of them cannot predict others. The HCA has no resources yet.
    pub fn with_secret(mut self, secret: [u64; 2]) -> Hca {
        let mut random = Random::keyed(secret);
        self.queue_pairs.set_secret(random.draw());
        self.state.protection.mask_keys(random.draw());
        self.cm.set_secret([random.draw(), random.draw()]);
        self.state.random = random;
        self
    }

    pub(crate) fn cm_call<'a, 'c>(&'a mut self, ctx: &'a mut Context<'c>) -> CmCall<'a, 'c> {
        CmCall { cm: &mut self.cm, hca: &mut self.state, ctx }
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.state.counters
    }

    /// Records the last ACK of each queue pair from now on, before the application can see what it completes.
    pub fn set_ack_records(&mut self, records: AckRecords) {
        self.state.ack_records = Some(records);
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.state.settings
    }

    /// The GID table.
    pub fn gids(&self) -> &[Gid] {
        &self.state.gids
    }

    /// Counts packets that this machine's network stack delivered out of order and the driver has sorted.
    pub fn count_reordered(&mut self, packets: u64) {
        self.state.counters.host_reordered += packets;
    }

    /// Counts a rejected link control message.
    pub fn count_link_reject(&mut self, reason: LinkReject) {
        let counters = &mut self.state.counters;
        *match reason {
            LinkReject::Version(_) => &mut counters.link_version_err,
            LinkReject::Malformed | LinkReject::NoSuchPort => &mut counters.link_malformed_err,
            LinkReject::BadToken => &mut counters.link_token_err,
            LinkReject::Stale => &mut counters.link_stale_err,
            LinkReject::OutOfBounds | LinkReject::TooManyPeers => &mut counters.link_bounds_err,
        } += 1;
    }

    /// Logs rejected link control messages.
    pub fn log_link_rejects(
        &mut self,
        ctx: &mut Context<'_>,
        peer: IpAddr,
        reason: LinkReject,
        messages: u64,
    ) {
        ctx.emit(Event::LinkMessageRejected { peer, reason, messages });
    }

    /// Sets the number of grants that link control has revoked.
    pub fn set_revoked_grants(&mut self, revoked: u64) {
        self.state.counters.link_grants_revoked = revoked;
    }

    /// The peer does not respond: suspends the timers of its connections.
    pub fn stall(&mut self, peer: impl Into<Peer>) {
        self.state.stalled_peers.insert(peer.into());
    }

    /// The peer responds again: restarts the timers of its connections.
    pub fn resume(&mut self, ctx: &mut Context<'_>, peer: impl Into<Peer>) {
        let peer = peer.into();
        // The host may have had another number of processes when the peer stalled.
        let is_same =
            |stalled: &Peer| stalled.address == peer.address && stalled.slot.number == peer.slot.number;
        let stalled = self.state.stalled_peers.len();
        self.state.stalled_peers.retain(|stalled| !is_same(stalled));
        if self.state.stalled_peers.len() == stalled {
            return;
        }
        for qpn in self.queue_pairs.numbers(|qp| qp.is_connected_to(peer)) {
            if let Some(qp) = self.queue_pairs.get_mut(qpn) {
                qp.restart_timers(&mut self.state, ctx);
            }
        }
        self.cm_call(ctx).resume(peer);
    }

    /// The port at `peer` has no link control, or has one again. A foreign peer gets a window of unacknowledged packets
    /// and its own recovery mode.
    pub fn set_foreign(&mut self, ctx: &mut Context<'_>, peer: IpAddr, is_foreign: bool) {
        if is_foreign == self.state.peer_windows.contains_key(&peer) {
            return;
        }
        if is_foreign {
            let Settings { foreign_window: window, foreign_recovery: recovery, .. } = self.state.settings;
            self.state.peer_windows.insert(peer, PeerWindow::new(window));
            ctx.emit(Event::ForeignPeerDetected { peer, recovery, window });
        } else if let Some(window) = self.state.peer_windows.remove(&peer) {
            self.state.transmit_queue.extend(window.waiting);
        }
        for qpn in self.queue_pairs.numbers(|qp| qp.addressing.destination == peer) {
            if let Some(qp) = self.queue_pairs.get_mut(qpn) {
                qp.requester.windowed = 0;
                qp.update_window(&mut self.state, false);
            }
        }
    }

    /// The time of the next [`Hca::expire`].
    pub fn next_timeout(&self) -> Option<Instant> {
        match (self.state.timers.next(), self.state.pacing_timers.next()) {
            (Some(timer), Some(pacer)) => Some(timer.min(pacer)),
            (timer, pacer) => timer.or(pacer),
        }
    }

    /// Whether an operation of a client waits for a time to pass: a retransmission, a message of the connection manager
    /// or a held completion. Entries of [`Hca::next_timeout`] that expire without effect do not count.
    pub fn has_pending_timer(&self) -> bool {
        let waits = |qp: &QueuePair| qp.requester.ack_deadline.or(qp.requester.rnr_wait_until).is_some();
        !self.queue_pairs.numbers(waits).is_empty()
            || self.cm.has_deadline()
            || self.state.faults.as_ref().is_some_and(|faults| faults.holds_completions())
    }

    /// Handles all timers that expire by `ctx.now`.
    pub fn expire(&mut self, ctx: &mut Context<'_>) {
        while let Some((at, qpn)) = self.state.pacing_timers.pop(ctx.now) {
            let Some(qp) = self.queue_pairs.get_mut(qpn.value()) else { continue };
            if qp.pacing_timer_at == Some(at) {
                qp.pacing_timer_at = None;
                qp.schedule_transmit(&mut self.state);
            }
        }
        while let Some((at, qpn)) = self.state.timers.pop(ctx.now) {
            if qpn == Qpn::GSI {
                self.cm_call(ctx).expire(at);
                continue;
            }
            if qpn == HELD_COMPLETIONS {
                self.state.release_held_completions(ctx);
                continue;
            }
            let Some(qp) = self.queue_pairs.get_mut(qpn.value()) else { continue };
            if qp.timer_at == Some(at) {
                qp.timer_at = None;
                qp.expire(&mut self.state, ctx);
            }
        }
        self.handle_cq_overflows(ctx);
    }

    /// Processes the doorbells of all clients: schedules or flushes new work requests.
    pub fn process_doorbells(&mut self, ctx: &mut Context<'_>) {
        let mut rung = core::mem::take(&mut self.rung_qps);
        for (id, client) in &mut self.clients {
            client.doorbell.drain(&mut rung);
            for qpn in rung.drain(..) {
                let Some(qp) = self.queue_pairs.get_mut(qpn.value()) else { continue };
                if qp.client != *id {
                    continue;
                }
                if let Some(ring) = &qp.requester.ring {
                    ring.clear_doorbell();
                }
                match qp.state {
                    QpState::Error => {
                        qp.flush_send_queue(&mut self.state, ctx);
                        qp.flush_receive_queue(&mut self.state, ctx);
                    }
                    QpState::SendQueueError => qp.flush_send_queue(&mut self.state, ctx),
                    _ => qp.schedule_transmit(&mut self.state),
                }
            }
        }
        self.rung_qps = rung;
        self.handle_cq_overflows(ctx);
    }

    /// Fails the queue pairs of overflowed completion queues, and those whose completions faults made fail.
    #[inline]
    pub(crate) fn handle_cq_overflows(&mut self, ctx: &mut Context<'_>) {
        if !self.state.overflowed_cqs.is_empty() {
            self.fail_overflowed_cqs(ctx);
        }
        if self.state.faults.is_some() {
            self.fail_injected_qps(ctx);
        }
    }

    fn fail_overflowed_cqs(&mut self, ctx: &mut Context<'_>) {
        while let Some(cq) = self.state.overflowed_cqs.pop() {
            let state = &self.state;
            let users = self
                .queue_pairs
                .numbers(|qp| qp.send_cq == Some(cq) || qp.effective_recv_cq(state) == Some(cq));
            for qpn in users {
                let Some(qp) = self.queue_pairs.get_mut(qpn) else { continue };
                if matches!(qp.state, QpState::Reset | QpState::Init | QpState::Error) {
                    continue;
                }
                let event = AsyncEvent::QueuePairFatal(qp.qpn);
                qp.enter_error(&mut self.state, ctx, Reason::CompletionQueueOverflow, Some(event));
            }
        }
    }

    /// The state of the port.
    pub fn port_state(&self) -> PortState {
        self.state.port_state
    }

    /// Sets the link state of the port and raises the port event. A port that is down drops received packets; the
    /// driver holds back or drops transmitted ones.
    pub fn set_port_state(&mut self, ctx: &mut Context<'_>, state: PortState) {
        if core::mem::replace(&mut self.state.port_state, state) != state {
            self.state.counters.link_downed += u64::from(state == PortState::Down);
            let event = match state {
                PortState::Down => AsyncEvent::PortDown,
                PortState::Active => AsyncEvent::PortActive,
            };
            self.raise_async_event(ctx, event);
        }
    }

    /// Raises an asynchronous event of the port or the device.
    pub fn raise_async_event(&mut self, ctx: &mut Context<'_>, event: AsyncEvent) {
        self.state.note_async_event(event.name());
        ctx.emit(Event::AsyncEventRaised { client: None, event });
    }

    /// Fails the connections to a peer that is dead.
    pub fn fail_peer(&mut self, ctx: &mut Context<'_>, peer: impl Into<Peer>) {
        let peer = peer.into();
        for qpn in self.waiting_for(peer) {
            if let Some(qp) = self.queue_pairs.get_mut(qpn) {
                qp.fail_oldest_wqe(
                    &mut self.state,
                    ctx,
                    softhca_types::CompletionStatus::RetryExceededError,
                    Reason::PeerUnreachable,
                );
            }
        }
        self.cm_call(ctx).fail_peer(peer);
        self.discard_orphaned_acks(peer);
        self.handle_cq_overflows(ctx);
    }

    /// A process has ended. Requests to it fail a little later, as after an ACK timeout. A program that has received
    /// all that it expects may end before its peer has polled its last completions.
    pub fn on_process_gone(&mut self, ctx: &mut Context<'_>, peer: Peer) {
        for qpn in self.waiting_for(peer) {
            if let Some(qp) = self.queue_pairs.get_mut(qpn)
                && !core::mem::replace(&mut qp.requester.peer_gone, true)
            {
                qp.restart_ack_timer(&mut self.state, ctx);
            }
        }
        self.cm.known_listeners.remove(peer);
        self.discard_orphaned_acks(peer);
    }

    /// The connected queue pairs with requests that a peer has not acknowledged.
    fn waiting_for(&self, peer: Peer) -> Vec<u32> {
        self.queue_pairs
            .numbers(|qp| qp.kind.is_reliable() && qp.is_connected_to(peer) && qp.requester.has_outstanding())
    }
}
