//! Connection management of programs: listeners, pending requests and events.

use super::{Executor, FailedCall};
use crate::hosts::{CmEvent, Hosts};
use crate::plan::StepAction;
use crate::spec::Errno;
use softhca_engine::QpState;
use softhca_types::cm::EventType;
use std::collections::BTreeMap;

/// A connection management event that a program received.
#[derive(Clone, Debug)]
pub struct ObservedCmEvent {
    pub time_ns: u64,
    pub host: usize,
    /// Queue pair of the connection; none for a request without a waiting queue pair.
    pub qp: Option<usize>,
    pub kind: EventType,
    pub status: i32,
    /// Private data of the peer.
    pub private_data: Vec<u8>,
}

/// A request without a waiting queue pair.
#[derive(Clone, Debug)]
struct PendingRequest {
    host: usize,
    listener: u32,
    id: u32,
    active_qp: Option<usize>,
    private_data: Vec<u8>,
}

/// Reason code and private data of a rejection.
type Rejection = (u16, Vec<u8>);

/// The connections of all programs.
#[derive(Clone, Debug, Default)]
pub struct ConnectionTable {
    /// Listeners by host, service and port.
    listeners: BTreeMap<(usize, bool, u16), u32>,
    /// Listener and queue pair of each waiting queue pair.
    waiting: Vec<(u32, usize)>,
    /// Listener, queue pair and rejection of each program that rejected a request. It rejects later requests too.
    rejecting: Vec<(u32, usize, Rejection)>,
    /// Requests without a waiting queue pair.
    requests: Vec<PendingRequest>,
    by_id: BTreeMap<(usize, u32), usize>,
    by_qp: BTreeMap<usize, u32>,
    /// Queue pair and step of each step that waits for an event.
    steps: Vec<(usize, usize)>,
    /// Queue pairs that can send.
    ready: Vec<usize>,
    /// All received events.
    pub events: Vec<ObservedCmEvent>,
}

impl ConnectionTable {
    pub fn qp_of(&self, host: usize, id: u32) -> Option<usize> {
        self.by_id.get(&(host, id)).copied()
    }

    fn bind_id(&mut self, host: usize, id: u32, qp: usize) {
        self.by_id.insert((host, id), qp);
        self.by_qp.insert(qp, id);
    }
}

/// Whether an event completes a step.
fn completes_step(action: &StepAction, kind: EventType) -> bool {
    use EventType as E;
    match action {
        StepAction::Listen { .. } => kind == E::ConnectRequest,
        // A DREQ can arrive before the RTU. DISCONNECTED implies that the connection was established.
        StepAction::Connect { .. } | StepAction::Accept { .. } => {
            matches!(kind, E::Established | E::Rejected | E::Unreachable | E::ConnectError | E::Disconnected)
        }
        StepAction::Disconnect => kind == E::Disconnected,
        _ => false,
    }
}

impl Executor<'_> {
    /// Whether a queue pair can send: it was connected before the run, or its connection is established.
    pub(super) fn is_ready(&self, qp: usize) -> bool {
        !self.plan.pair_of(qp).uses_cm || self.log.connections.ready.contains(&qp)
    }

    /// Runs a connection management step.
    pub(super) fn run_cm_step(&mut self, now_ns: u64, step: usize, hosts: &mut Hosts<'_>) {
        let plan = self.plan;
        let (qp, action) = (plan.steps[step].qp, &plan.steps[step].action);
        let id = self.log.connections.by_qp.get(&qp).copied();
        let done = match (action, id) {
            _ if hosts.is_destroyed(qp) => Err(Errno::EINVAL),
            (StepAction::Listen { port }, _) => self.listen(now_ns, step, *port, hosts),
            (StepAction::Connect { port, private_data }, _) => {
                hosts.connect(qp, *port, private_data).map(|id| {
                    self.log.connections.bind_id(plan.qps[qp].host, id, qp);
                    self.log.connections.steps.push((qp, step));
                })
            }
            (StepAction::Accept { private_data }, Some(id)) => hosts.accept(qp, id, private_data).map(|()| {
                self.log.connections.ready.push(qp);
                self.log.connections.steps.push((qp, step));
                // The passive side of SIDR receives no further event.
                if plan.pair_of(qp).kind.is_datagram() {
                    self.complete_steps(now_ns, qp, EventType::Established, hosts);
                }
            }),
            (StepAction::Reject { reason, private_data }, Some(id)) => {
                if let Some(listener) = self.listener_of(qp) {
                    self.log.connections.rejecting.push((listener, qp, (*reason, private_data.clone())));
                }
                hosts.reject(qp, id, *reason, private_data)
            }
            (StepAction::Disconnect, Some(id)) => {
                let done = hosts.disconnect(qp, id);
                if done.is_ok() {
                    self.log.connections.steps.push((qp, step));
                }
                done
            }
            // No request arrived, or no connection was requested.
            _ => Err(Errno::EINVAL),
        };
        if let Err(errno) = done {
            self.log.failed_calls.push(FailedCall { time_ns: now_ns, host: plan.qps[qp].host, errno });
            self.log.pending_completions[step] = 0;
        }
    }

    /// Makes a queue pair wait for a request at a port.
    fn listen(&mut self, now_ns: u64, step: usize, port: u16, hosts: &mut Hosts<'_>) -> Result<(), Errno> {
        let qp = self.plan.steps[step].qp;
        let (host, kind) = (self.plan.qps[qp].host, self.plan.pair_of(qp).kind);
        let key = (host, kind.is_datagram(), port);
        let listener = match self.log.connections.listeners.get(&key) {
            Some(listener) => *listener,
            None => hosts.listen(host, kind, port)?,
        };
        self.log.connections.listeners.insert(key, listener);
        self.log.connections.waiting.push((listener, qp));
        self.log.connections.steps.push((qp, step));
        let fits = |request: &PendingRequest| request.host == host && request.listener == listener;
        if let Some(place) = self.log.connections.requests.iter().position(fits) {
            let request = self.log.connections.requests.remove(place);
            self.dispatch_request(now_ns, request, hosts);
        }
        Ok(())
    }

    /// Assigns a request to a waiting queue pair: the peer of the active queue pair, if the request identifies it.
    fn dispatch_request(&mut self, now_ns: u64, request: PendingRequest, hosts: &mut Hosts<'_>) {
        let PendingRequest { host, listener, id, active_qp, .. } = request;
        let plan = self.plan;
        let is_it = |at: u32, qp: usize| {
            at == listener
                && plan.qps[qp].host == host
                && active_qp.is_none_or(|active_qp| plan.qps[active_qp].peer == qp)
        };
        let kind = EventType::ConnectRequest;
        let rejecting = self.log.connections.rejecting.iter().find(|(at, qp, _)| is_it(*at, *qp)).cloned();
        let qp = match (self.log.connections.waiting.iter().position(|(at, qp)| is_it(*at, *qp)), &rejecting)
        {
            (Some(place), _) => self.log.connections.waiting.remove(place).1,
            (None, Some((_, qp, _))) => *qp,
            (None, None) => return self.log.connections.requests.push(request),
        };
        self.log.connections.bind_id(host, id, qp);
        let private_data = request.private_data;
        let event = ObservedCmEvent { time_ns: now_ns, host, qp: Some(qp), kind, status: 0, private_data };
        self.log.connections.events.push(event);
        self.complete_steps(now_ns, qp, kind, hosts);
        if let Some((_, _, (reason, private_data))) = rejecting
            && let Err(errno) = hosts.reject(qp, id, reason, &private_data)
        {
            self.log.failed_calls.push(FailedCall { time_ns: now_ns, host, errno });
        }
    }

    fn listener_of(&self, qp: usize) -> Option<u32> {
        let plan = self.plan;
        let (host, is_datagram) = (plan.qps[qp].host, plan.pair_of(qp).kind.is_datagram());
        let port = plan.steps.iter().find_map(|step| match step.action {
            StepAction::Listen { port } if step.qp == qp => Some(port),
            _ => None,
        })?;
        self.log.connections.listeners.get(&(host, is_datagram, port)).copied()
    }

    /// Processes an event of the connection manager of a host.
    pub(super) fn on_cm_event(&mut self, now_ns: u64, event: CmEvent, hosts: &mut Hosts<'_>) {
        let CmEvent { host, id, listener, active_qp, mut kind, mut status, private_data, target } = event;
        if let (EventType::ConnectRequest, Some(listener)) = (kind, listener) {
            return self.dispatch_request(
                now_ns,
                PendingRequest { host, listener, id, active_qp, private_data },
                hosts,
            );
        }
        let Some(qp) = self.log.connections.qp_of(host, id) else { return };
        let outcome = match (kind, target) {
            (EventType::ConnectResponse, _) => hosts.establish(qp, id),
            (EventType::Established, Some(target)) => hosts.set_datagram_target(qp, target),
            _ => Ok(()),
        };
        match (kind, outcome) {
            (EventType::ConnectResponse | EventType::Established, Ok(())) => {
                kind = EventType::Established;
                self.log.connections.ready.push(qp);
            }
            (_, Err(errno)) => {
                self.log.failed_calls.push(FailedCall { time_ns: now_ns, host, errno });
                (kind, status) = (EventType::ConnectError, -errno.0);
            }
            _ => {}
        }
        self.log.connections.events.push(ObservedCmEvent {
            time_ns: now_ns,
            host,
            qp: Some(qp),
            kind,
            status,
            private_data,
        });
        match kind {
            // Like librdmacm: stop the queue pair of a failed connection.
            EventType::Rejected | EventType::Unreachable | EventType::ConnectError
                if !self.plan.pair_of(qp).kind.is_datagram() =>
            {
                let _ = hosts.modify(qp, QpState::Error, false);
            }
            // Like most programs: disconnect too.
            EventType::Disconnected => {
                let _ = hosts.disconnect(qp, id);
            }
            _ => {}
        }
        self.complete_steps(now_ns, qp, kind, hosts);
    }

    /// Completes the steps that wait for an event of a queue pair.
    fn complete_steps(&mut self, now_ns: u64, qp: usize, kind: EventType, hosts: &mut Hosts<'_>) {
        let plan = self.plan;
        let (over, left) = std::mem::take(&mut self.log.connections.steps)
            .into_iter()
            .partition(|(at, step)| *at == qp && completes_step(&plan.steps[*step].action, kind));
        self.log.connections.steps = left;
        for (_, step) in over {
            self.log.pending_completions[step] = 0;
            self.schedule_dependents(now_ns, step, hosts);
        }
    }
}
