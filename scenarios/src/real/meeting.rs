//! Connections of real queue pairs through the connection managers of their cards.

use super::Stage;
use crate::language::Errno;
use crate::plan::PairPlan;
use crate::play::{ConnectionManagers, News, Play};
use crate::verbs::{parameters, space};
use softhca::rdma_cm::{CmOption, CmState, DATAGRAM_KEY, DatagramTarget, Event, EventChannel, Id};
use softhca::{Error, Modify, QpKind, QueuePair, State};
use softhca_engine::Resource;
use softhca_fabric::Endpoint;
use softhca_queue::cm::RejectReason;
use softhca_wire::Psn;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

/// The channels and identifiers of all hosts.
#[derive(Default)]
pub(super) struct Meetings {
    channels: BTreeMap<usize, EventChannel>,
    identifiers: BTreeMap<(usize, u32), Id>,
}

impl Meetings {
    /// An identifier of a host.
    pub fn id(&self, host: usize, number: u32) -> Option<Id> {
        self.identifiers.get(&(host, number)).cloned()
    }

    /// Lets go of the identifiers of a host.
    pub fn close(&mut self, host: usize) {
        self.identifiers.retain(|(at, _), _| *at != host);
    }

    /// Whether a connection waits for an answer, or for the end of its packets.
    pub fn is_outstanding(&self) -> bool {
        self.identifiers.values().any(|id| {
            id.view().is_ok_and(|view| {
                matches!(
                    view.state,
                    CmState::RequestSent
                        | CmState::ReplySent
                        | CmState::ReplyReceived
                        | CmState::DisconnectSent
                        | CmState::ServiceRequestSent
                        | CmState::TimeWait
                )
            })
        })
    }
}

/// Takes a new queue pair to where receives can be posted, as `rdma_create_qp` does; one of datagrams to RTS.
pub(super) fn prepare(pair: &QueuePair, plan: &PairPlan) -> Result<(), Error> {
    let modify = Modify::default().partition_index(0).port(1);
    match plan.kind {
        QpKind::Ud => {
            pair.modify(&modify.state(State::Init).queue_key(DATAGRAM_KEY))?;
            pair.modify(&Modify::default().state(State::ReadyToReceive))?;
            pair.modify(&Modify::default().state(State::ReadyToSend).send_psn(Psn::new(0)))?;
        }
        _ => drop(pair.modify(&modify.state(State::Init).access(plan.access))?),
    }
    Ok(())
}

/// A new identifier of a host.
fn create(stage: &mut Stage<'_>, host: usize, kind: QpKind) -> Result<Id, Error> {
    let channel = match stage.meetings.channels.get(&host) {
        Some(channel) => channel.clone(),
        None => {
            let channel = EventChannel::new(&stage.contexts[host])?;
            stage.meetings.channels.insert(host, channel.clone());
            channel
        }
    };
    let id = channel.create_id_of(space(kind), kind)?;
    stage.meetings.identifiers.insert((host, id.number()), id.clone());
    Ok(id)
}

fn listen(stage: &mut Stage<'_>, host: usize, kind: QpKind, port: u16) -> Result<u32, Error> {
    let id = create(stage, host, kind)?;
    id.bind(SocketAddr::new(stage.devices[host].address(), port))?;
    id.listen(0)?;
    Ok(id.number())
}

fn connect(stage: &mut Stage<'_>, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Error> {
    let pair = stage.plan.pair_of(qp);
    let id = create(stage, stage.plan.qps[qp].host, pair.kind)?;
    let there = stage.endpoint(stage.plan.qps[qp].peer).address;
    id.set_option(CmOption::AckTimeout(pair.timeout))?;
    id.set_option(CmOption::TypeOfService(pair.traffic_class))?;
    id.resolve_address(None, SocketAddr::new(there, port))?;
    id.resolve_route()?;
    id.connect(&parameters(pair, stage.sides[qp].number, private_data))?;
    Ok(id.number())
}

/// The identifier of this number on the host of a queue pair.
fn known(stage: &Stage<'_>, qp: usize, id: u32) -> Result<Id, Error> {
    let gone = Error::Verb(softhca_engine::Error::NotFound { resource: Resource::CmIdentifier, number: id });
    stage.meetings.id(stage.plan.qps[qp].host, id).ok_or(gone)
}

fn accept(stage: &mut Stage<'_>, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Error> {
    let (id, pair) = (known(stage, qp, id)?, stage.plan.pair_of(qp));
    // The peer may send as soon as it has the REP: the queue pair is ready before.
    if !pair.kind.is_datagram() {
        make_ready(stage, qp, &id)?;
    }
    id.accept(&parameters(pair, stage.sides[qp].number, private_data))
}

fn establish(stage: &mut Stage<'_>, qp: usize, id: u32) -> Result<(), Error> {
    let id = known(stage, qp, id)?;
    make_ready(stage, qp, &id)?;
    id.establish()
}

/// Takes a queue pair to RTS with what the connection manager knows, and lets rules and traces know it.
fn make_ready(stage: &mut Stage<'_>, qp: usize, id: &Id) -> Result<(), Error> {
    let number = stage.sides[qp].number.value();
    let gone = Error::Verb(softhca_engine::Error::NotFound { resource: Resource::QueuePair, number });
    let pair = stage.sides[qp].pair.clone().ok_or(gone)?;
    for state in [State::ReadyToReceive, State::ReadyToSend] {
        pair.modify(&id.attributes(state)?)?;
    }
    let own = pair.query()?.attributes;
    let responder = Endpoint { address: own.path.destination.ip(), qpn: own.destination };
    stage.sides[qp].psn = own.send_psn;
    stage.introduce(qp, own.send_psn, Some(responder));
    Ok(())
}

fn aim(stage: &mut Stage<'_>, qp: usize, target: DatagramTarget) -> Result<(), Error> {
    let side = &mut stage.sides[qp];
    let handle = side.domain.create_address_handle(target.path)?;
    side.target = Some((handle, target.queue_pair, target.queue_key));
    side.psn = Psn::new(0);
    stage.introduce(qp, Psn::new(0), None);
    Ok(())
}

fn refused(error: Error) -> Errno {
    Errno::of(error.errno())
}

impl ConnectionManagers for Stage<'_> {
    fn listen(&mut self, host: usize, kind: QpKind, port: u16) -> Result<u32, Errno> {
        listen(self, host, kind, port).map_err(refused)
    }

    fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno> {
        connect(self, qp, port, private_data).map_err(refused)
    }

    fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno> {
        accept(self, qp, id, private_data).map_err(refused)
    }

    fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno> {
        let id = self.meetings.id(self.plan.qps[qp].host, id).ok_or(Errno::EINVAL)?;
        id.reject_for(RejectReason(reason), private_data).map_err(refused)
    }

    fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        establish(self, qp, id).map_err(refused)
    }

    fn aim(&mut self, qp: usize, target: DatagramTarget) -> Result<(), Errno> {
        aim(self, qp, target).map_err(refused)
    }

    fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        if let Some(pair) = &self.sides[qp].pair {
            // One that is in the error state already is as good.
            let _ = pair.modify(&Modify::default().state(State::Error));
        }
        let id = self.meetings.id(self.plan.qps[qp].host, id).ok_or(Errno::EINVAL)?;
        id.disconnect().map_err(refused)
    }

    fn close(&mut self, host: usize) {
        self.meetings.close(host);
    }
}

impl Stage<'_> {
    /// Brings the programs what they are told of connections; tells whether there was anything.
    pub(super) fn hand_over_news(&mut self, start: Instant, play: &mut Play<'_>) -> bool {
        let mut is_any = false;
        for (host, channel) in self.meetings.channels.clone() {
            while let Ok(Some(event)) = channel.poll() {
                is_any = true;
                let news = self.read(host, event);
                play.told(start.elapsed().as_nanos() as u64, news, self);
            }
        }
        is_any
    }

    fn read(&mut self, host: usize, event: Event) -> News {
        let (asked, target) = (event.offer().map(|offer| offer.queue_pair), event.target());
        let peer = event.id.peer_address().map(|peer| peer.ip());
        let asking = (0..self.sides.len()).find(|qp| {
            let Endpoint { address, qpn } = self.endpoint(*qp);
            Some(qpn) == asked && Some(address) == peer
        });
        let Event { id, listener, kind, status, private_data, .. } = event;
        let (number, listener) = (id.number(), listener.map(|listener| listener.number()));
        self.meetings.identifiers.insert((host, number), id);
        News { host, id: number, listener, asking, kind, status, private_data, target }
    }
}
