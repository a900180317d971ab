//! What programs do with the connection manager: who waits for a request, who asked whom, and what they heard.

use super::{Failed, Hosts, Play};
use crate::language::Errno;
use crate::plan::Deed;
use softhca_engine::{QpKind, State};
use softhca_queue::cm::{DatagramTarget, EventKind};
use std::collections::BTreeMap;

/// The connection managers of all hosts. Queue pairs and hosts are named by their place in the plan.
pub trait ConnectionManagers {
    /// Takes requests at a port of a host, for queue pairs of this kind; returns the listener's identifier.
    fn listen(&mut self, host: usize, kind: QpKind, port: u16) -> Result<u32, Errno>;
    /// Asks the host of a queue pair's peer for a connection; returns the identifier.
    fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno>;
    /// Takes a queue pair to RTS and accepts the request that an identifier stands for.
    fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno>;
    /// Refuses a request.
    fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno>;
    /// Takes a queue pair whose request was accepted to RTS, and tells the other side.
    fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno>;
    /// Lets a datagram queue pair send to the one that was found.
    fn aim(&mut self, qp: usize, target: DatagramTarget) -> Result<(), Errno>;
    /// Stops a queue pair and ends its connection, or agrees to its end.
    fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno>;
    /// Lets go of everything that a host's program has of the connection manager.
    fn close(&mut self, host: usize);
}

/// Something that the connection manager of a host tells its program.
#[derive(Clone, Debug)]
pub struct News {
    /// The host.
    pub host: usize,
    /// The identifier that it is about; of a request a new one.
    pub id: u32,
    /// The listener that a request came to.
    pub listener: Option<u32>,
    /// The queue pair that asks for a connection.
    pub asking: Option<usize>,
    /// What happened.
    pub kind: EventKind,
    /// Zero, a negative errno, or the reason of a refusal.
    pub status: i32,
    /// What the other side's program sent.
    pub private_data: Vec<u8>,
    /// Where datagrams go.
    pub target: Option<DatagramTarget>,
}

/// Something that a program heard of a connection.
#[derive(Clone, Debug)]
pub struct Heard {
    /// When.
    pub time_ns: u64,
    /// On which host.
    pub host: usize,
    /// Of the connection of which queue pair; none for a request that no queue pair waits for.
    pub qp: Option<usize>,
    /// What.
    pub kind: EventKind,
    /// How.
    pub status: i32,
    /// With which words of the other side.
    pub private_data: Vec<u8>,
}

/// A request that waits for a queue pair.
#[derive(Clone, Debug)]
struct Request {
    host: usize,
    listener: u32,
    id: u32,
    asking: Option<usize>,
    private_data: Vec<u8>,
}

/// Why a program refuses requests, and its words.
type Refusal = (u16, Vec<u8>);

/// The connections of all programs.
#[derive(Clone, Debug, Default)]
pub struct Connections {
    /// The listeners by host, whether they are of datagrams, and port.
    listeners: BTreeMap<(usize, bool, u16), u32>,
    /// The queue pairs that wait for a request, each with the listener on its host.
    waiting: Vec<(u32, usize)>,
    /// The queue pairs that refused a request, with the listener and their answer: they refuse the next as well.
    refusing: Vec<(u32, usize, Refusal)>,
    /// Requests that no queue pair waited for.
    requests: Vec<Request>,
    by_id: BTreeMap<(usize, u32), usize>,
    by_qp: BTreeMap<usize, u32>,
    /// The steps that wait for an event of a queue pair's connection.
    steps: Vec<(usize, usize)>,
    /// Queue pairs that may send.
    ready: Vec<usize>,
    /// Everything that programs heard.
    pub heard: Vec<Heard>,
}

impl Connections {
    /// The queue pair that an identifier of a host connects.
    pub fn qp_of(&self, host: usize, id: u32) -> Option<usize> {
        self.by_id.get(&(host, id)).copied()
    }

    fn give(&mut self, host: usize, id: u32, qp: usize) {
        self.by_id.insert((host, id), qp);
        self.by_qp.insert(qp, id);
    }
}

/// Whether an event of its connection ends a step.
fn ends(deed: &Deed, kind: EventKind) -> bool {
    use EventKind as E;
    match deed {
        Deed::Listen { .. } => kind == E::ConnectRequest,
        // A DREQ may come before the RTU: who hears that the connection is over knows that it stood.
        Deed::Connect { .. } | Deed::Accept { .. } => {
            matches!(kind, E::Established | E::Rejected | E::Unreachable | E::ConnectError | E::Disconnected)
        }
        Deed::Disconnect => kind == E::Disconnected,
        _ => false,
    }
}

impl Play<'_> {
    /// Whether a queue pair may send: its connection stands, or it was connected before the run.
    pub(super) fn is_ready(&self, qp: usize) -> bool {
        !self.plan.pair_of(qp).by_cm || self.account.connections.ready.contains(&qp)
    }

    /// Does a step of the connection manager.
    pub(super) fn do_connecting(&mut self, now_ns: u64, step: usize, hosts: &mut dyn Hosts) {
        let plan = self.plan;
        let (qp, deed) = (plan.steps[step].qp, &plan.steps[step].deed);
        let id = self.account.connections.by_qp.get(&qp).copied();
        let done = match (deed, id) {
            _ if self.sides[qp].is_gone => Err(Errno::EINVAL),
            (Deed::Listen { port }, _) => self.listen(now_ns, step, *port, hosts),
            (Deed::Connect { port, private_data }, _) => hosts.connect(qp, *port, private_data).map(|id| {
                self.account.connections.give(plan.qps[qp].host, id, qp);
                self.account.connections.steps.push((qp, step));
            }),
            (Deed::Accept { private_data }, Some(id)) => hosts.accept(qp, id, private_data).map(|()| {
                self.account.connections.ready.push(qp);
                self.account.connections.steps.push((qp, step));
                // Nobody tells that a datagram queue pair's name has arrived.
                if plan.pair_of(qp).kind.is_datagram() {
                    self.end_steps(now_ns, qp, EventKind::Established);
                }
            }),
            (Deed::Reject { reason, private_data }, Some(id)) => {
                if let Some(listener) = self.listener_of(qp) {
                    self.account.connections.refusing.push((listener, qp, (*reason, private_data.clone())));
                }
                hosts.reject(qp, id, *reason, private_data)
            }
            (Deed::Disconnect, Some(id)) => {
                let done = hosts.disconnect(qp, id);
                if done.is_ok() {
                    self.account.connections.steps.push((qp, step));
                }
                done
            }
            // No request came, or nothing was asked for.
            _ => Err(Errno::EINVAL),
        };
        if let Err(errno) = done {
            self.account.failed.push(Failed { time_ns: now_ns, host: plan.qps[qp].host, errno });
            self.account.step_left[step] = 0;
        }
    }

    /// Lets a queue pair wait for a request at a port.
    fn listen(&mut self, now_ns: u64, step: usize, port: u16, hosts: &mut dyn Hosts) -> Result<(), Errno> {
        let qp = self.plan.steps[step].qp;
        let (host, kind) = (self.plan.qps[qp].host, self.plan.pair_of(qp).kind);
        let key = (host, kind.is_datagram(), port);
        let listener = match self.account.connections.listeners.get(&key) {
            Some(listener) => *listener,
            None => hosts.listen(host, kind, port)?,
        };
        self.account.connections.listeners.insert(key, listener);
        self.account.connections.waiting.push((listener, qp));
        self.account.connections.steps.push((qp, step));
        let fits = |request: &Request| request.host == host && request.listener == listener;
        if let Some(place) = self.account.connections.requests.iter().position(fits) {
            let request = self.account.connections.requests.remove(place);
            self.take_request(now_ns, request, hosts);
        }
        Ok(())
    }

    /// Gives a request to the queue pair that waits for it: the peer of the one that asks, where the request says.
    fn take_request(&mut self, now_ns: u64, request: Request, hosts: &mut dyn Hosts) {
        let Request { host, listener, id, asking, .. } = request;
        let plan = self.plan;
        let is_it = |at: u32, qp: usize| {
            at == listener
                && plan.qps[qp].host == host
                && asking.is_none_or(|asking| plan.qps[asking].peer == qp)
        };
        let kind = EventKind::ConnectRequest;
        let refusing = self.account.connections.refusing.iter().find(|(at, qp, _)| is_it(*at, *qp)).cloned();
        let qp =
            match (self.account.connections.waiting.iter().position(|(at, qp)| is_it(*at, *qp)), &refusing) {
                (Some(place), _) => self.account.connections.waiting.remove(place).1,
                (None, Some((_, qp, _))) => *qp,
                (None, None) => return self.account.connections.requests.push(request),
            };
        self.account.connections.give(host, id, qp);
        let private_data = request.private_data;
        let heard = Heard { time_ns: now_ns, host, qp: Some(qp), kind, status: 0, private_data };
        self.account.connections.heard.push(heard);
        self.end_steps(now_ns, qp, kind);
        if let Some((_, _, (reason, words))) = refusing
            && let Err(errno) = hosts.reject(qp, id, reason, &words)
        {
            self.account.failed.push(Failed { time_ns: now_ns, host, errno });
        }
    }

    /// The listener that a queue pair waits or waited at.
    fn listener_of(&self, qp: usize) -> Option<u32> {
        let plan = self.plan;
        let (host, is_datagram) = (plan.qps[qp].host, plan.pair_of(qp).kind.is_datagram());
        let port = plan.steps.iter().find_map(|step| match step.deed {
            Deed::Listen { port } if step.qp == qp => Some(port),
            _ => None,
        })?;
        self.account.connections.listeners.get(&(host, is_datagram, port)).copied()
    }

    /// The connection manager of a host tells its program something.
    pub fn told(&mut self, now_ns: u64, news: News, hosts: &mut dyn Hosts) {
        let News { host, id, listener, asking, mut kind, mut status, private_data, target } = news;
        if let (EventKind::ConnectRequest, Some(listener)) = (kind, listener) {
            return self.take_request(now_ns, Request { host, listener, id, asking, private_data }, hosts);
        }
        let Some(qp) = self.account.connections.qp_of(host, id) else { return };
        let outcome = match (kind, target) {
            (EventKind::ConnectResponse, _) => hosts.establish(qp, id),
            (EventKind::Established, Some(target)) => hosts.aim(qp, target),
            _ => Ok(()),
        };
        match (kind, outcome) {
            (EventKind::ConnectResponse | EventKind::Established, Ok(())) => {
                kind = EventKind::Established;
                self.account.connections.ready.push(qp);
            }
            (_, Err(errno)) => {
                self.account.failed.push(Failed { time_ns: now_ns, host, errno });
                (kind, status) = (EventKind::ConnectError, -errno.number());
            }
            _ => {}
        }
        self.account.connections.heard.push(Heard {
            time_ns: now_ns,
            host,
            qp: Some(qp),
            kind,
            status,
            private_data,
        });
        match kind {
            // As librdmacm does: the queue pair of a connection that will not be is stopped.
            EventKind::Rejected | EventKind::Unreachable | EventKind::ConnectError
                if !self.plan.pair_of(qp).kind.is_datagram() =>
            {
                let _ = hosts.modify(qp, State::Error, false);
            }
            // As every program does: it lets go of its end, too.
            EventKind::Disconnected => {
                let _ = hosts.disconnect(qp, id);
            }
            _ => {}
        }
        self.end_steps(now_ns, qp, kind);
    }

    /// An event of a queue pair's connection ends the steps that wait for it.
    fn end_steps(&mut self, now_ns: u64, qp: usize, kind: EventKind) {
        let plan = self.plan;
        let (over, left) = std::mem::take(&mut self.account.connections.steps)
            .into_iter()
            .partition(|(at, step)| *at == qp && ends(&plan.steps[*step].deed, kind));
        self.account.connections.steps = left;
        for (_, step) in over {
            self.account.step_left[step] = 0;
            self.start_followers(now_ns, step);
        }
    }
}
