//! What programs do with the connection manager: who waits for a request, who asked whom, and what they heard.

use super::{Executor, FailedCall, Hosts};
use crate::plan::StepAction;
use crate::spec::Errno;
use softhca_engine::{QpState, QpType};
use softhca_queue::cm::{EventType, UdParameters};
use std::collections::BTreeMap;

/// The connection managers of all hosts. Queue pairs and hosts are named by their place in the plan.
pub trait ConnectionManagers {
    /// Takes requests at a port of a host, for queue pairs of this kind; returns the listener's identifier.
    fn listen(&mut self, host: usize, kind: QpType, port: u16) -> Result<u32, Errno>;
    /// Asks the host of a queue pair's peer for a connection; returns the identifier.
    fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno>;
    /// Takes a queue pair to RTS and accepts the request that an identifier stands for.
    fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno>;
    /// Refuses a request.
    fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno>;
    /// Takes a queue pair whose request was accepted to RTS, and tells the other side.
    fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno>;
    /// Lets a datagram queue pair send to the one that was found.
    fn set_datagram_target(&mut self, qp: usize, target: UdParameters) -> Result<(), Errno>;
    /// Stops a queue pair and ends its connection, or agrees to its end.
    fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno>;
    /// Lets go of everything that a host's program has of the connection manager.
    fn destroy_cm_ids(&mut self, host: usize);
}

/// Something that the connection manager of a host tells its program.
#[derive(Clone, Debug)]
pub struct CmEvent {
    /// The host.
    pub host: usize,
    /// The identifier that it is about; of a request a new one.
    pub id: u32,
    /// The listener that a request came to.
    pub listener: Option<u32>,
    /// The queue pair that asks for a connection.
    pub active_qp: Option<usize>,
    /// What happened.
    pub kind: EventType,
    /// Zero, a negative errno, or the reason of a refusal.
    pub status: i32,
    /// What the other side's program sent.
    pub private_data: Vec<u8>,
    /// Where datagrams go.
    pub target: Option<UdParameters>,
}

/// Something that a program heard of a connection.
#[derive(Clone, Debug)]
pub struct ObservedCmEvent {
    /// When.
    pub time_ns: u64,
    /// On which host.
    pub host: usize,
    /// Of the connection of which queue pair; none for a request that no queue pair waits for.
    pub qp: Option<usize>,
    /// What.
    pub kind: EventType,
    /// How.
    pub status: i32,
    /// With which words of the other side.
    pub private_data: Vec<u8>,
}

/// A request that waits for a queue pair.
#[derive(Clone, Debug)]
struct PendingRequest {
    host: usize,
    listener: u32,
    id: u32,
    active_qp: Option<usize>,
    private_data: Vec<u8>,
}

/// Why a program refuses requests, and its words.
type Rejection = (u16, Vec<u8>);

/// The connections of all programs.
#[derive(Clone, Debug, Default)]
pub struct ConnectionTable {
    /// The listeners by host, whether they are of datagrams, and port.
    listeners: BTreeMap<(usize, bool, u16), u32>,
    /// The queue pairs that wait for a request, each with the listener on its host.
    waiting: Vec<(u32, usize)>,
    /// The queue pairs that refused a request, with the listener and their answer: they refuse the next as well.
    rejecting: Vec<(u32, usize, Rejection)>,
    /// Requests that no queue pair waited for.
    requests: Vec<PendingRequest>,
    by_id: BTreeMap<(usize, u32), usize>,
    by_qp: BTreeMap<usize, u32>,
    /// The steps that wait for an event of a queue pair's connection.
    steps: Vec<(usize, usize)>,
    /// Queue pairs that may send.
    ready: Vec<usize>,
    /// Everything that programs heard.
    pub events: Vec<ObservedCmEvent>,
}

impl ConnectionTable {
    /// The queue pair that an identifier of a host connects.
    pub fn qp_of(&self, host: usize, id: u32) -> Option<usize> {
        self.by_id.get(&(host, id)).copied()
    }

    fn bind_id(&mut self, host: usize, id: u32, qp: usize) {
        self.by_id.insert((host, id), qp);
        self.by_qp.insert(qp, id);
    }
}

/// Whether an event of its connection ends a step.
fn completes_step(deed: &StepAction, kind: EventType) -> bool {
    use EventType as E;
    match deed {
        StepAction::Listen { .. } => kind == E::ConnectRequest,
        // A DREQ may come before the RTU: who hears that the connection is over knows that it stood.
        StepAction::Connect { .. } | StepAction::Accept { .. } => {
            matches!(kind, E::Established | E::Rejected | E::Unreachable | E::ConnectError | E::Disconnected)
        }
        StepAction::Disconnect => kind == E::Disconnected,
        _ => false,
    }
}

impl Executor<'_> {
    /// Whether a queue pair may send: its connection stands, or it was connected before the run.
    pub(super) fn is_ready(&self, qp: usize) -> bool {
        !self.plan.pair_of(qp).uses_cm || self.log.connections.ready.contains(&qp)
    }

    /// Does a step of the connection manager.
    pub(super) fn run_cm_step(&mut self, now_ns: u64, step: usize, hosts: &mut dyn Hosts) {
        let plan = self.plan;
        let (qp, deed) = (plan.steps[step].qp, &plan.steps[step].action);
        let id = self.log.connections.by_qp.get(&qp).copied();
        let done = match (deed, id) {
            _ if self.qps[qp].is_destroyed => Err(Errno::EINVAL),
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
                // Nobody tells that a datagram queue pair's name has arrived.
                if plan.pair_of(qp).kind.is_datagram() {
                    self.complete_steps(now_ns, qp, EventType::Established);
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
            // No request came, or nothing was asked for.
            _ => Err(Errno::EINVAL),
        };
        if let Err(errno) = done {
            self.log.failed_calls.push(FailedCall { time_ns: now_ns, host: plan.qps[qp].host, errno });
            self.log.pending_completions[step] = 0;
        }
    }

    /// Lets a queue pair wait for a request at a port.
    fn listen(&mut self, now_ns: u64, step: usize, port: u16, hosts: &mut dyn Hosts) -> Result<(), Errno> {
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

    /// Gives a request to the queue pair that waits for it: the peer of the one that asks, where the request says.
    fn dispatch_request(&mut self, now_ns: u64, request: PendingRequest, hosts: &mut dyn Hosts) {
        let PendingRequest { host, listener, id, active_qp: asking, .. } = request;
        let plan = self.plan;
        let is_it = |at: u32, qp: usize| {
            at == listener
                && plan.qps[qp].host == host
                && asking.is_none_or(|asking| plan.qps[asking].peer == qp)
        };
        let kind = EventType::ConnectRequest;
        let refusing = self.log.connections.rejecting.iter().find(|(at, qp, _)| is_it(*at, *qp)).cloned();
        let qp = match (self.log.connections.waiting.iter().position(|(at, qp)| is_it(*at, *qp)), &refusing) {
            (Some(place), _) => self.log.connections.waiting.remove(place).1,
            (None, Some((_, qp, _))) => *qp,
            (None, None) => return self.log.connections.requests.push(request),
        };
        self.log.connections.bind_id(host, id, qp);
        let private_data = request.private_data;
        let heard = ObservedCmEvent { time_ns: now_ns, host, qp: Some(qp), kind, status: 0, private_data };
        self.log.connections.events.push(heard);
        self.complete_steps(now_ns, qp, kind);
        if let Some((_, _, (reason, words))) = refusing
            && let Err(errno) = hosts.reject(qp, id, reason, &words)
        {
            self.log.failed_calls.push(FailedCall { time_ns: now_ns, host, errno });
        }
    }

    /// The listener that a queue pair waits or waited at.
    fn listener_of(&self, qp: usize) -> Option<u32> {
        let plan = self.plan;
        let (host, is_datagram) = (plan.qps[qp].host, plan.pair_of(qp).kind.is_datagram());
        let port = plan.steps.iter().find_map(|step| match step.action {
            StepAction::Listen { port } if step.qp == qp => Some(port),
            _ => None,
        })?;
        self.log.connections.listeners.get(&(host, is_datagram, port)).copied()
    }

    /// The connection manager of a host tells its program something.
    pub fn on_cm_event(&mut self, now_ns: u64, news: CmEvent, hosts: &mut dyn Hosts) {
        let CmEvent { host, id, listener, active_qp: asking, mut kind, mut status, private_data, target } =
            news;
        if let (EventType::ConnectRequest, Some(listener)) = (kind, listener) {
            return self.dispatch_request(
                now_ns,
                PendingRequest { host, listener, id, active_qp: asking, private_data },
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
                (kind, status) = (EventType::ConnectError, -(errno as i32));
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
            // As librdmacm does: the queue pair of a connection that will not be is stopped.
            EventType::Rejected | EventType::Unreachable | EventType::ConnectError
                if !self.plan.pair_of(qp).kind.is_datagram() =>
            {
                let _ = hosts.modify(qp, QpState::Error, false);
            }
            // As every program does: it lets go of its end, too.
            EventType::Disconnected => {
                let _ = hosts.disconnect(qp, id);
            }
            _ => {}
        }
        self.complete_steps(now_ns, qp, kind);
    }

    /// An event of a queue pair's connection ends the steps that wait for it.
    fn complete_steps(&mut self, now_ns: u64, qp: usize, kind: EventType) {
        let plan = self.plan;
        let (over, left) = std::mem::take(&mut self.log.connections.steps)
            .into_iter()
            .partition(|(at, step)| *at == qp && completes_step(&plan.steps[*step].action, kind));
        self.log.connections.steps = left;
        for (_, step) in over {
            self.log.pending_completions[step] = 0;
            self.schedule_dependents(now_ns, step);
        }
    }
}
