//! The HCA: its state, timers and doorbells.

mod transmit;

use crate::core::hca_state::HcaState;
use crate::core::injection::HELD_COMPLETIONS;
use crate::core::processes::Processes;
use crate::core::queue_pair::QueuePair;
use crate::core::random::{Random, next_random};
use crate::core::table::Table;
use crate::core::transport::Transport;
use crate::core::{Context, Event, Instant, LinkReject, Reason, Settings};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_queue::DoorbellConsumer;
use softhca_types::{AsyncEvent, ClientId, Counters, DeviceLimits, PortState, QpState};
use softhca_wire::{Gid, Qpn, QpnSlot};

/// An application of the HCA: the owner of its resources.
pub(crate) struct Client {
    pub doorbell: DoorbellConsumer,
    /// The address of the next region whose address the HCA chooses: the same in every run.
    pub next_iova: u64,
    /// The device was removed while the application had it open: its calls fail, also when the device is back.
    pub has_lost_device: bool,
}

/// The HCA, with its transport.
#[repr(C)]
pub struct Hca<T: Transport> {
    pub(crate) queue_pairs: Table<QueuePair<T>>,
    pub(crate) state: HcaState,
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) next_client: u32,
    pub(crate) limits: DeviceLimits,
    pub(crate) transport: T,
}

impl<T: Transport> Hca<T> {
    /// Creates an HCA. GID 0 is the address of its port.
    pub fn new(settings: Settings, gids: Vec<Gid>) -> Hca<T> {
        let limits = settings.profile.limits();
        // A sequence of its own: the tags of keys and numbers do not reveal the first QPN.
        let start = next_random(&mut (settings.seed ^ 0x7170_6e5f_6d61_736b));
        let mut queue_pairs = Table::new(limits.max_qp, 2);
        if settings.qpn_slot != QpnSlot::ALL {
            queue_pairs = queue_pairs.with_slot(settings.qpn_slot);
        }
        queue_pairs.set_seed(start);
        Hca {
            queue_pairs,
            transport: T::new(&settings),
            state: HcaState::new(settings, gids, &limits),
            clients: BTreeMap::new(),
            next_client: 0,
            limits,
        }
    }

    /// Takes queue pair numbers, keys, communication IDs and initial PSNs from a secret instead of the seed. A peer
    /// that has seen some of them cannot predict others. The HCA has no resources yet.
    pub fn with_secret(mut self, secret: [u64; 2]) -> Hca<T> {
        let mut random = Random::keyed(secret);
        self.queue_pairs.set_secret(random.draw());
        self.state.objects.protection.mask_keys(random.draw());
        self.transport.set_secret([random.draw(), random.draw()]);
        self.state.objects.random = random;
        self
    }

    /// Informs the processes of the host from now on. The HCA has no resources yet.
    pub fn set_processes(&mut self, processes: Box<dyn Processes>) {
        self.state.processes = processes;
    }

    /// Whether somebody listens to the events of packets, of work requests and of memory, which are most of all events.
    #[inline]
    pub fn set_observed(&mut self, is_observed: bool) {
        self.state.is_observed = is_observed;
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.state.counters
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.state.settings
    }

    /// The limits in the device attributes.
    pub fn limits(&self) -> &DeviceLimits {
        &self.limits
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
        !self.queue_pairs.numbers(T::has_deadline).is_empty()
            || self.transport.has_management_deadline()
            || self.state.faults.as_ref().is_some_and(|faults| !faults.held.is_empty())
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
                T::expire_management(self, ctx, at);
                continue;
            }
            if qpn == HELD_COMPLETIONS {
                self.state.release_held_completions(ctx);
                continue;
            }
            let Some(qp) = self.queue_pairs.get_mut(qpn.value()) else { continue };
            if qp.timer_at == Some(at) {
                qp.timer_at = None;
                T::expire(qp, &mut self.state, ctx);
            }
        }
        self.handle_cq_overflows(ctx);
    }

    /// Processes the doorbells of all clients: schedules or flushes new work requests.
    pub fn process_doorbells(&mut self, ctx: &mut Context<'_>) {
        for (id, client) in &mut self.clients {
            for qpn in client.doorbell.drain() {
                let Some(qp) = self.queue_pairs.get_mut(qpn.value()) else { continue };
                if qp.client != *id {
                    continue;
                }
                T::on_doorbell(qp, &mut self.state, ctx);
            }
        }
        self.handle_cq_overflows(ctx);
    }

    /// Fails the queue pairs of overflowed completion queues, and those whose completions faults made fail.
    #[inline]
    pub(crate) fn handle_cq_overflows(&mut self, ctx: &mut Context<'_>) {
        if !self.state.objects.overflowed_cqs.is_empty() {
            self.fail_overflowed_cqs(ctx);
        }
        if self.state.faults.is_some() {
            self.fail_injected_qps(ctx);
        }
    }

    fn fail_overflowed_cqs(&mut self, ctx: &mut Context<'_>) {
        while let Some(cq) = self.state.objects.overflowed_cqs.pop() {
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
                T::enter_error(qp, &mut self.state, ctx, Reason::CompletionQueueOverflow, Some(event));
            }
        }
    }

    /// The state of the port.
    pub fn port_state(&self) -> PortState {
        self.state.health.port_state
    }

    /// Sets the link state of the port and raises the port event. A port that is down drops received packets; the
    /// driver holds back or drops transmitted ones.
    pub fn set_port_state(&mut self, ctx: &mut Context<'_>, state: PortState) {
        if core::mem::replace(&mut self.state.health.port_state, state) != state {
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
        self.state.processes.on_async_event(event.name());
        ctx.emit(Event::AsyncEventRaised { client: None, event });
    }
}
