//! Injected faults of processes: calls that fail, completions that are changed, held or not notified, asynchronous
//! events with their consequences.

use crate::core::hca::Hca;
use crate::core::hca_state::HcaState;
use crate::core::processes::ObservedCall;
use crate::core::reason::is_failure;
use crate::core::transport::Transport;
use crate::{
    AsyncEvent, ClientId, Context, CqId, Event, InjectedPoint, Instant, PortState, QpState, Reason, SrqId,
    VerbsError, VerbsResult,
};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use softhca_types::{
    CallSite, Command, Completion, FaultHit, FaultTrigger, InjectedEvent, ProgramAction, ProgramFaults,
    Reply, Resource, cm,
};
use softhca_wire::Qpn;

/// A burst that does not fill up is released after this time.
const BURST_TIMEOUT_NS: u64 = 1_000_000_000;
/// The owner of the timer that releases held completions: no queue pair has this number.
pub(crate) const HELD_COMPLETIONS: Qpn = Qpn::new(0);

/// Completions that faults changed or held. It exists while a process has faults.
#[derive(Default)]
pub(crate) struct InjectedCompletions {
    pub held: BTreeMap<CqId, VecDeque<HeldCompletion>>,
    /// Queue pairs whose completions were made to fail, and that have not entered ERR yet.
    failed_qps: Vec<(Qpn, u32)>,
}

/// A completion that waits, with all later ones of its queue behind it.
pub(crate) struct HeldCompletion {
    completion: Completion,
    reason: Reason,
    faults: CqeFaults,
    due: Instant,
    /// It is due at once when so many wait.
    burst: Option<u32>,
}

/// The faults that concern the write of a CQE.
#[derive(Clone, Copy, Default)]
pub(crate) struct CqeFaults {
    pub overflow: bool,
    pub drop_notification: bool,
}

impl<T: Transport> Hca<T> {
    /// Sets the faults of the process of a client.
    pub(crate) fn set_process_faults(&mut self, ctx: &Context<'_>, client: ClientId, faults: ProgramFaults) {
        self.state.faults.get_or_insert_default();
        self.state.processes.set_faults(ctx.now, client, faults);
    }

    /// Forgets a client that is gone. With the last process that has faults, a port that they took down comes up, and a
    /// device that they removed returns.
    pub(crate) fn forget_process(&mut self, ctx: &mut Context<'_>, client: ClientId) {
        if self.state.processes.close_client(client) {
            self.end_device_faults(ctx);
            self.state.faults.take_if(|faults| faults.held.is_empty() && faults.failed_qps.is_empty());
        }
    }

    /// Counts a call, and fails it or replies to it if a fault says so.
    pub(crate) fn inject_into_call(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        command: &Command,
        call_site: Option<CallSite>,
    ) -> VerbsResult<Option<Reply>> {
        let Some((verb, object)) = command.call() else { return Ok(None) };
        let Some(call) = self.state.processes.on_call(ctx.now, client, verb, object) else { return Ok(None) };
        let ObservedCall { process, role, point, target } = call;
        let qp = match object {
            Some((Resource::QueuePair, number)) => Qpn::new(number),
            _ => Qpn::default(),
        };
        if let Some(role) = role {
            let state = self.queue_pairs.get_mut(qp.value()).map(|pair| pair.state);
            let (object, nth) = (point.object, point.nth);
            ctx.emit(Event::VerbCalled { process, verb, object, nth, qp, role, call_site, state });
        }
        let Some(FaultHit { rule, action: effect, .. }) = point.hit else { return Ok(None) };
        let injected = InjectedPoint::Call(verb);
        ctx.emit(Event::FaultInjected { rule, point: injected, object: point.object, qp, effect });
        match effect {
            ProgramAction::Fail(errno) => Err(VerbsError::Injected { verb, errno, rule }),
            ProgramAction::Kill => Err(VerbsError::InjectedKill { verb, rule }),
            ProgramAction::Raise(event) => {
                if event.object().is_none() {
                    self.state.processes.on_event_raised(event);
                }
                self.raise_injected_event(ctx, event, target);
                Ok(None)
            }
            ProgramAction::Unmap(_) => {
                if let Some(rkey) = target {
                    self.state.objects.protection.revoke_memory(rkey);
                }
                Ok(None)
            }
            ProgramAction::CmEvent(event, status) => {
                if let Some((Resource::CmIdentifier, id)) = object {
                    T::raise_cm_event(self, ctx, crate::CmId(id), event, status);
                }
                Ok(Some(Reply::Cm(cm::Reply::Done)))
            }
            _ => Ok(None),
        }
    }

    /// The event of the whole device that a fault of a process raised in the last call.
    pub fn take_raised_event(&mut self) -> Option<InjectedEvent> {
        self.state.processes.take_raised_event()
    }

    /// Something happened outside of the device that faults of processes may wait for.
    pub fn note_trigger(&mut self, trigger: &FaultTrigger) {
        self.state.processes.on_trigger(trigger);
    }

    /// Notes an object that a call created.
    pub(crate) fn note_created(&mut self, client: ClientId, reply: &Reply) {
        if let Some((kind, number)) = reply.created() {
            self.state.processes.on_created(client, kind, number);
        }
    }

    /// Queue pairs whose completions a fault made fail enter ERR, as after a failure of their own.
    pub(crate) fn fail_injected_qps(&mut self, ctx: &mut Context<'_>) {
        while let Some((qpn, rule)) = self.state.faults.as_mut().and_then(|all| all.failed_qps.pop()) {
            if let Some(qp) = self.queue_pairs.get_mut(qpn.value())
                && !matches!(qp.state, QpState::Reset | QpState::Init | QpState::Error)
            {
                T::enter_error(qp, &mut self.state, ctx, Reason::Injected { rule }, None);
            }
        }
    }

    /// Raises an asynchronous event with its consequences.
    pub fn raise_injected_event(&mut self, ctx: &mut Context<'_>, event: InjectedEvent, object: Option<u32>) {
        let plain = match event {
            InjectedEvent::PortErr | InjectedEvent::PortActive => {
                self.state.health.port_fault = event == InjectedEvent::PortErr;
                let state = if self.state.health.port_fault { PortState::Down } else { PortState::Active };
                return self.set_port_state(ctx, state);
            }
            InjectedEvent::GidChange => AsyncEvent::GidChange,
            InjectedEvent::LidChange => AsyncEvent::LidChange,
            InjectedEvent::PkeyChange => AsyncEvent::PkeyChange,
            InjectedEvent::DeviceFatal => return self.fail_device(ctx),
            InjectedEvent::DeviceRemoved => {
                // A program that gets the event of the failed device can see why.
                self.set_device_removed(true);
                self.fail_device(ctx);
                self.clients.values_mut().for_each(|client| client.has_lost_device = true);
                T::on_device_removed(self, ctx);
                return;
            }
            InjectedEvent::DeviceReturned => return self.restore_device(),
            InjectedEvent::QpFatal => {
                let Some(qp) = object.and_then(|number| self.queue_pairs.get_mut(number)) else { return };
                let event = AsyncEvent::QueuePairFatal(qp.qpn);
                T::enter_error(qp, &mut self.state, ctx, Reason::DeviceFailed, Some(event));
                return;
            }
            InjectedEvent::CqErr => {
                let cq = CqId(object.unwrap_or(0));
                let Some(queue) = self.state.objects.completion_queues.get_mut(cq.0) else { return };
                queue.failed = true;
                let client = Some(queue.client);
                self.state.objects.overflowed_cqs.push(cq);
                ctx.emit(Event::AsyncEventRaised { client, event: AsyncEvent::CompletionQueueError(cq) });
                return self.handle_cq_overflows(ctx);
            }
            InjectedEvent::SrqLimitReached => {
                let srq = SrqId(object.unwrap_or(0));
                let Some(queue) = self.state.objects.shared_receive_queues.get_mut(srq.0) else { return };
                let client = Some(queue.client);
                ctx.emit(Event::AsyncEventRaised { client, event: AsyncEvent::SharedReceiveQueueLimit(srq) });
                return;
            }
        };
        self.raise_async_event(ctx, plain);
    }

    /// A device that was removed returns. Programs that had it open must open it again.
    fn restore_device(&mut self) {
        self.state.health.device_failed &= !self.state.health.device_removed;
        self.set_device_removed(false);
    }

    fn set_device_removed(&mut self, is_removed: bool) {
        self.state.health.device_removed = is_removed;
        self.state.processes.set_device_removed(is_removed);
    }

    /// Ends the faults of the device that last: a removed device returns, and a port that is down comes up.
    pub fn end_device_faults(&mut self, ctx: &mut Context<'_>) {
        self.restore_device();
        if core::mem::take(&mut self.state.health.port_fault) {
            self.set_port_state(ctx, PortState::Active);
        }
    }

    /// Ends the faults of all processes, and those of the device that last. Completions that they hold stay held.
    pub fn heal(&mut self, ctx: &mut Context<'_>) {
        self.state.processes.stop_faults();
        self.end_device_faults(ctx);
    }

    /// Whether the device is removed.
    pub fn is_removed(&self) -> bool {
        self.state.health.device_removed
    }

    /// Whether control verbs fail, until all clients have closed the device.
    pub fn has_failed(&self) -> bool {
        self.state.health.device_failed
    }

    /// Whether this client must open the device again: it was removed and is back.
    pub fn must_reopen(&self, client: ClientId) -> bool {
        let has_lost = |client: &crate::core::hca::Client| client.has_lost_device;
        !self.is_removed() && self.clients.get(&client).is_some_and(has_lost)
    }

    /// The device fails: every queue pair enters ERR, and control verbs fail from now on. It is reset when nothing uses it.
    pub fn fail_device(&mut self, ctx: &mut Context<'_>) {
        if core::mem::replace(&mut self.state.health.device_failed, !self.clients.is_empty()) {
            return;
        }
        self.raise_async_event(ctx, AsyncEvent::DeviceFatal);
        for qpn in self.queue_pairs.numbers(|qp| qp.state != QpState::Reset) {
            if let Some(qp) = self.queue_pairs.get_mut(qpn) {
                T::enter_error(qp, &mut self.state, ctx, Reason::DeviceFailed, None);
            }
        }
        self.handle_cq_overflows(ctx);
    }
}

impl HcaState {
    /// Posts a CQE that faults may change or hold.
    pub(crate) fn post_completion_with_faults(
        &mut self,
        ctx: &mut Context<'_>,
        cq: CqId,
        mut completion: Completion,
        mut reason: Reason,
    ) {
        let client = self.objects.completion_queues.get(cq.0).map(|queue| queue.client);
        let Some(all) = &mut self.faults else { return };
        let observe = |client| self.processes.on_completion(ctx.now, client, completion.qpn);
        let (hits, object) = client.map(observe).unwrap_or_default();
        let mut faults = CqeFaults::default();
        let (mut due, mut burst) = (ctx.now, None);
        for FaultHit { rule, action: effect, .. } in hits {
            let (point, qp) = (InjectedPoint::Completion, completion.qpn);
            ctx.emit(Event::FaultInjected { rule, point, object, qp, effect });
            match effect {
                ProgramAction::SetStatus(status, vendor_error) => {
                    reason = Reason::Injected { rule };
                    (completion.status, completion.route) = (status, Default::default());
                    completion.vendor_error = vendor_error.unwrap_or(reason.code());
                    if is_failure(status) {
                        all.failed_qps.push((completion.qpn, rule));
                    }
                }
                ProgramAction::Hold(ns) => due = Instant::from_nanos(due.nanos().saturating_add(ns)),
                ProgramAction::Burst(count) => {
                    burst = Some(count);
                    due = Instant::from_nanos(ctx.now.nanos() + BURST_TIMEOUT_NS);
                }
                ProgramAction::OverflowCq => faults.overflow = true,
                ProgramAction::DropNotification => faults.drop_notification = true,
                _ => {}
            }
        }
        // A completion queue is in order: those behind a held one wait too.
        let is_held = all.held.get(&cq).is_some_and(|queue| !queue.is_empty());
        if due <= ctx.now && burst.is_none() && !is_held {
            return self.write_cqe(ctx, cq, completion, reason, faults);
        }
        let held = HeldCompletion { completion, reason, faults, due, burst };
        all.held.entry(cq).or_default().push_back(held);
        self.timers.push(due.max(ctx.now), HELD_COMPLETIONS);
        self.release_held_completions(ctx);
    }

    /// Writes the held CQEs that are due.
    pub(crate) fn release_held_completions(&mut self, ctx: &mut Context<'_>) {
        let Some(all) = &mut self.faults else { return };
        let mut released = Vec::new();
        for (cq, queue) in &mut all.held {
            let full = |held: &HeldCompletion, waiting: usize| {
                held.burst.is_some_and(|count| waiting >= count as usize)
            };
            let is_full = queue.front().is_some_and(|held| full(held, queue.len()));
            while let Some(held) = queue.front()
                && (is_full || held.due <= ctx.now)
                && let Some(held) = queue.pop_front()
            {
                released.push((*cq, held));
            }
        }
        all.held.retain(|_, queue| !queue.is_empty());
        for (cq, held) in released {
            self.write_cqe(ctx, cq, held.completion, held.reason, held.faults);
        }
    }

    /// Forgets the held CQEs of a completion queue that is destroyed.
    pub(crate) fn discard_held_completions(&mut self, cq: CqId) {
        if let Some(all) = &mut self.faults {
            all.held.remove(&cq);
        }
    }
}
