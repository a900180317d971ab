//! Connections of a world's queue pairs through the connection manager, as a program with librdmacm makes them.

use super::{Side, Theatre};
use crate::language::Errno;
use crate::plan::{PairPlan, Plan};
use crate::play::{ConnectionManagers, News, Play};
use crate::verbs::{parameters, space};
use softhca_engine::{CmChannelId, CmId, Error, Modify, QpKind, State};
use softhca_fabric::{Endpoint, Flow, HostId, World};
use softhca_queue::Datagram;
use softhca_queue::cm::{Call, CmOption, DATAGRAM_KEY, DatagramTarget, Detail, Event, RejectReason, Reply};
use softhca_wire::{Psn, Qpn};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

/// The channels and identifiers of all hosts, and what the plan says of their connections.
pub(super) struct Meetings {
    channels: BTreeMap<usize, CmChannelId>,
    identifiers: Vec<(usize, CmId)>,
    addresses: Vec<IpAddr>,
    pairs: Vec<PairPlan>,
}

impl Meetings {
    pub fn new(plan: &Plan) -> Meetings {
        Meetings {
            channels: BTreeMap::new(),
            identifiers: Vec::new(),
            addresses: plan.hosts.iter().map(|host| host.address).collect(),
            pairs: (0..plan.qps.len()).map(|qp| plan.pair_of(qp).clone()).collect(),
        }
    }

    /// Takes the identifiers of a host out.
    pub fn forget(&mut self, host: usize) -> Vec<CmId> {
        let (gone, left): (Vec<_>, Vec<_>) = self.identifiers.drain(..).partition(|(at, _)| *at == host);
        self.identifiers = left;
        gone.into_iter().map(|(_, id)| id).collect()
    }
}

/// Takes a new queue pair to where receives can be posted, as `rdma_create_qp` does; one of datagrams to RTS.
pub(super) fn prepare(world: &mut World, host: HostId, qpn: Qpn, pair: &PairPlan) -> Result<(), Error> {
    let mut verbs = world.on(host);
    match pair.kind {
        QpKind::Ud => verbs.start_datagrams(qpn, DATAGRAM_KEY, Psn::new(0)),
        _ => {
            let modify = Modify::default().state(State::Init).partition_index(0).port(1).access(pair.access);
            verbs.modify(qpn, modify).map(|_| ())
        }
    }
}

/// A new identifier of a host.
fn create(theatre: &mut Theatre, host: usize, kind: QpKind) -> Result<CmId, Error> {
    let mut verbs = theatre.world.on(HostId(host as u32));
    let channel = match theatre.meetings.channels.get(&host) {
        Some(channel) => *channel,
        None => match verbs.cm(Call::CreateChannel)? {
            Reply::Channel(channel) => *theatre.meetings.channels.entry(host).or_insert(channel),
            _ => unreachable!("the card answers with a channel"),
        },
    };
    let Reply::Id(id) = verbs.cm(Call::Create { channel, space: space(kind), kind })? else {
        unreachable!("the card answers with an identifier")
    };
    theatre.meetings.identifiers.push((host, id));
    Ok(id)
}

fn listen(theatre: &mut Theatre, host: usize, kind: QpKind, port: u16) -> Result<u32, Error> {
    let id = create(theatre, host, kind)?;
    let address = SocketAddr::new(theatre.meetings.addresses[host], port);
    let mut verbs = theatre.world.on(HostId(host as u32));
    verbs.cm(Call::Bind { id, address })?;
    verbs.cm(Call::Listen { id, backlog: 0 })?;
    Ok(id.0)
}

fn connect(theatre: &mut Theatre, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Error> {
    let Side { host, qpn, peer, .. } = theatre.sides[qp];
    let pair = theatre.meetings.pairs[qp].clone();
    let id = create(theatre, host.0 as usize, pair.kind)?;
    let there = theatre.sides[peer].host.0 as usize;
    let destination = SocketAddr::new(theatre.meetings.addresses[there], port);
    let mut verbs = theatre.world.on(host);
    for option in [CmOption::AckTimeout(pair.timeout), CmOption::TypeOfService(pair.traffic_class)] {
        verbs.cm(Call::SetOption { id, option })?;
    }
    verbs.cm(Call::ResolveAddress { id, source: None, destination })?;
    verbs.cm(Call::ResolveRoute { id, mtu: pair.mtu })?;
    verbs.cm(Call::Connect { id, parameters: parameters(&pair, qpn, private_data) })?;
    Ok(id.0)
}

fn accept(theatre: &mut Theatre, qp: usize, id: CmId, private_data: &[u8]) -> Result<(), Error> {
    let Side { host, qpn, .. } = theatre.sides[qp];
    let pair = theatre.meetings.pairs[qp].clone();
    // The peer may send as soon as it has the REP: the queue pair is ready before.
    if !pair.kind.is_datagram() {
        make_ready(theatre, qp, id)?;
    }
    let parameters = parameters(&pair, qpn, private_data);
    theatre.world.on(host).cm(Call::Accept { id, parameters }).map(|_| ())
}

fn establish(theatre: &mut Theatre, qp: usize, id: CmId) -> Result<(), Error> {
    make_ready(theatre, qp, id)?;
    theatre.world.on(theatre.sides[qp].host).cm(Call::Establish(id)).map(|_| ())
}

/// Takes a queue pair to RTS with what the connection manager knows, and lets rules and traces know it.
fn make_ready(theatre: &mut Theatre, qp: usize, id: CmId) -> Result<(), Error> {
    let Side { host, qpn, .. } = theatre.sides[qp];
    let mut verbs = theatre.world.on(host);
    for state in [State::ReadyToReceive, State::ReadyToSend] {
        let Reply::Attributes(modify) = verbs.cm(Call::Attributes { id, state })? else {
            unreachable!("the card answers with attributes")
        };
        verbs.modify(qpn, modify)?;
    }
    let own = verbs.attributes(qpn)?;
    let responder = Endpoint { address: own.path.destination.ip(), qpn: own.destination };
    introduce(theatre, qp, own.send_psn, Some(responder));
    Ok(())
}

/// Lets rules and traces know a queue pair that got ready to send.
fn introduce(theatre: &mut Theatre, qp: usize, first_psn: Psn, responder: Option<Endpoint>) {
    let Side { host, qpn, .. } = theatre.sides[qp];
    let requester = Endpoint { address: theatre.meetings.addresses[host.0 as usize], qpn };
    let role = Plan::role(qp);
    theatre.world.flows_mut().insert(Flow { role, requester, responder, first_psn });
    let mut watcher = theatre.watcher.borrow_mut();
    watcher.record.know(qp, requester, first_psn);
    let watcher = &mut *watcher;
    let ladders = watcher.ladders.as_mut().map(|ladders| ladders.cast_mut());
    for cast in [Some(&mut watcher.cast), Some(watcher.log.cast_mut()), ladders].into_iter().flatten() {
        cast.start_at(requester, first_psn);
        cast.give_role(role, requester);
        if let Some(responder) = responder {
            cast.connect(requester, responder);
        }
    }
}

fn aim(theatre: &mut Theatre, qp: usize, target: DatagramTarget) -> Result<(), Error> {
    let Side { host, domain, .. } = theatre.sides[qp];
    let handle = theatre.world.on(host).create_address_handle(domain, target.path)?;
    let (queue_pair, queue_key) = (target.queue_pair, target.queue_key);
    theatre.sides[qp].datagram = Datagram { address_handle: handle.0, queue_pair, queue_key };
    introduce(theatre, qp, Psn::new(0), None);
    Ok(())
}

fn refused(error: Error) -> Errno {
    Errno::of(error.errno())
}

impl ConnectionManagers for Theatre {
    fn listen(&mut self, host: usize, kind: QpKind, port: u16) -> Result<u32, Errno> {
        listen(self, host, kind, port).map_err(refused)
    }

    fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno> {
        connect(self, qp, port, private_data).map_err(refused)
    }

    fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno> {
        accept(self, qp, CmId(id), private_data).map_err(refused)
    }

    fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno> {
        let (id, reason, private_data) = (CmId(id), RejectReason(reason), private_data.to_vec());
        let call = Call::Reject { id, reason, private_data };
        self.world.on(self.sides[qp].host).cm(call).map(|_| ()).map_err(refused)
    }

    fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        establish(self, qp, CmId(id)).map_err(refused)
    }

    fn aim(&mut self, qp: usize, target: DatagramTarget) -> Result<(), Errno> {
        aim(self, qp, target).map_err(refused)
    }

    fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        let mut verbs = self.world.on(self.sides[qp].host);
        // One that is in the error state already is as good.
        let _ = verbs.modify(self.sides[qp].qpn, Modify::default().state(State::Error));
        verbs.cm(Call::Disconnect(CmId(id))).map(|_| ()).map_err(refused)
    }

    fn close(&mut self, host: usize) {
        for id in self.meetings.forget(host) {
            // A request that nobody answered went with its listener.
            let _ = self.world.on(HostId(host as u32)).cm(Call::Destroy(id));
        }
    }
}

impl Theatre {
    /// Brings the programs what they are told of connections; tells whether there was anything.
    pub(super) fn hand_over_news(&mut self, play: &mut Play<'_>) -> bool {
        let news = std::mem::take(&mut self.watcher.borrow_mut().news);
        let is_any = !news.is_empty();
        for (host, channel) in news {
            while let Ok(Reply::Event(Some(event), _)) = self.world.on(host).cm(Call::Take(channel)) {
                let news = self.read(host.0 as usize, event);
                play.told(self.world.now().nanos(), news, self);
            }
        }
        is_any
    }

    fn read(&mut self, host: usize, event: Event) -> News {
        let Event { id, listener, kind, status, private_data, detail } = event;
        if listener.is_some() {
            self.meetings.identifiers.push((host, id));
        }
        let asking = match detail {
            Detail::Connection(offer) => self.sides.iter().position(|side| {
                side.qpn == offer.queue_pair && self.sides[side.peer].host.0 as usize == host
            }),
            _ => None,
        };
        let target = match detail {
            Detail::Datagram(target) => Some(target),
            _ => None,
        };
        let (id, listener) = (id.0, listener.map(|listener| listener.0));
        News { host, id, listener, asking, kind, status, private_data, target }
    }
}
