//! Connections of a world's queue pairs through the connection manager, as a program with librdmacm makes them.

use super::{SimQueuePair, Simulation};
use crate::executor::{CmEvent, ConnectionManagers, Executor};
use crate::plan::{PairPlan, Plan};
use crate::spec::Errno;
use crate::verbs::{conn_params, port_space};
use softhca_engine::{CmChannelId, CmId, ModifyQp, QpState, QpType, VerbsError};
use softhca_fabric::{Endpoint, Flow, HostId, World};
use softhca_queue::UdDestination;
use softhca_queue::cm::{
    CmOption, Command, Event, EventParameters, RDMA_UDP_QKEY, RejectReason, Reply, UdParameters,
};
use softhca_wire::{Psn, Qpn};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

/// The channels and identifiers of all hosts, and what the plan says of their connections.
pub(super) struct CmConnections {
    channels: BTreeMap<usize, CmChannelId>,
    identifiers: Vec<(usize, CmId)>,
    addresses: Vec<IpAddr>,
    pairs: Vec<PairPlan>,
}

impl CmConnections {
    pub fn new(plan: &Plan) -> CmConnections {
        CmConnections {
            channels: BTreeMap::new(),
            identifiers: Vec::new(),
            addresses: plan.hosts.iter().map(|host| host.address).collect(),
            pairs: (0..plan.qps.len()).map(|qp| plan.pair_of(qp).clone()).collect(),
        }
    }

    /// Takes the identifiers of a host out.
    pub fn take_ids(&mut self, host: usize) -> Vec<CmId> {
        let (gone, left): (Vec<_>, Vec<_>) = self.identifiers.drain(..).partition(|(at, _)| *at == host);
        self.identifiers = left;
        gone.into_iter().map(|(_, id)| id).collect()
    }
}

/// Takes a new queue pair to where receives can be posted, as `rdma_create_qp` does; one of datagrams to RTS.
pub(super) fn init_for_cm(
    world: &mut World,
    host: HostId,
    qpn: Qpn,
    pair: &PairPlan,
) -> Result<(), VerbsError> {
    let mut verbs = world.verbs(host);
    match pair.kind {
        QpType::Ud => verbs.start_datagrams(qpn, RDMA_UDP_QKEY, Psn::new(0)),
        _ => {
            let modify =
                ModifyQp::default().state(QpState::Init).pkey_index(0).port(1).access_flags(pair.access);
            verbs.modify_queue_pair(qpn, modify).map(|_| ())
        }
    }
}

/// A new identifier of a host.
fn create_cm_id(simulation: &mut Simulation, host: usize, kind: QpType) -> Result<CmId, VerbsError> {
    let mut verbs = simulation.world.verbs(HostId(host as u32));
    let channel = match simulation.connections.channels.get(&host) {
        Some(channel) => *channel,
        None => match verbs.cm(Command::CreateEventChannel)? {
            Reply::EventChannel(channel) => *simulation.connections.channels.entry(host).or_insert(channel),
            _ => unreachable!("the card answers with a channel"),
        },
    };
    let Reply::Id(id) =
        verbs.cm(Command::CreateId { channel, port_space: port_space(kind), qp_type: kind })?
    else {
        unreachable!("the card answers with an identifier")
    };
    simulation.connections.identifiers.push((host, id));
    Ok(id)
}

fn listen(simulation: &mut Simulation, host: usize, kind: QpType, port: u16) -> Result<u32, VerbsError> {
    let id = create_cm_id(simulation, host, kind)?;
    let address = SocketAddr::new(simulation.connections.addresses[host], port);
    let mut verbs = simulation.world.verbs(HostId(host as u32));
    verbs.cm(Command::BindAddress { id, address })?;
    verbs.cm(Command::Listen { id, backlog: 0 })?;
    Ok(id.0)
}

fn connect(
    simulation: &mut Simulation,
    qp: usize,
    port: u16,
    private_data: &[u8],
) -> Result<u32, VerbsError> {
    let SimQueuePair { host, qpn, peer, .. } = simulation.qps[qp];
    let pair = simulation.connections.pairs[qp].clone();
    let id = create_cm_id(simulation, host.0 as usize, pair.kind)?;
    let there = simulation.qps[peer].host.0 as usize;
    let destination = SocketAddr::new(simulation.connections.addresses[there], port);
    let mut verbs = simulation.world.verbs(host);
    for option in [CmOption::AckTimeout(pair.timeout), CmOption::TypeOfService(pair.traffic_class)] {
        verbs.cm(Command::SetOption { id, option })?;
    }
    verbs.cm(Command::ResolveAddress { id, source: None, destination })?;
    verbs.cm(Command::ResolveRoute { id, path_mtu: pair.mtu })?;
    verbs.cm(Command::Connect { id, parameters: conn_params(&pair, qpn, private_data) })?;
    Ok(id.0)
}

fn accept(simulation: &mut Simulation, qp: usize, id: CmId, private_data: &[u8]) -> Result<(), VerbsError> {
    let SimQueuePair { host, qpn, .. } = simulation.qps[qp];
    let pair = simulation.connections.pairs[qp].clone();
    // The peer may send as soon as it has the REP: the queue pair is ready before.
    if !pair.kind.is_datagram() {
        make_ready(simulation, qp, id)?;
    }
    let parameters = conn_params(&pair, qpn, private_data);
    simulation.world.verbs(host).cm(Command::Accept { id, parameters }).map(|_| ())
}

fn establish(simulation: &mut Simulation, qp: usize, id: CmId) -> Result<(), VerbsError> {
    make_ready(simulation, qp, id)?;
    simulation.world.verbs(simulation.qps[qp].host).cm(Command::Establish(id)).map(|_| ())
}

/// Takes a queue pair to RTS with what the connection manager knows, and lets rules and traces know it.
fn make_ready(simulation: &mut Simulation, qp: usize, id: CmId) -> Result<(), VerbsError> {
    let SimQueuePair { host, qpn, .. } = simulation.qps[qp];
    let mut verbs = simulation.world.verbs(host);
    for state in [QpState::ReadyToReceive, QpState::ReadyToSend] {
        let Reply::QpAttributes(modify) = verbs.cm(Command::InitQpAttributes { id, state })? else {
            unreachable!("the card answers with attributes")
        };
        verbs.modify_queue_pair(qpn, modify)?;
    }
    let own = verbs.attributes(qpn)?;
    let responder = Endpoint { address: own.address_vector.dgid.ip(), qpn: own.dest_qpn };
    register_flow(simulation, qp, own.sq_psn, Some(responder));
    Ok(())
}

/// Lets rules and traces know a queue pair that got ready to send.
fn register_flow(simulation: &mut Simulation, qp: usize, first_psn: Psn, responder: Option<Endpoint>) {
    let SimQueuePair { host, qpn, .. } = simulation.qps[qp];
    let requester = Endpoint { address: simulation.connections.addresses[host.0 as usize], qpn };
    let role = Plan::role_of(qp);
    simulation.world.flows_mut().insert(Flow { id: role, requester, responder, first_psn });
    let mut watcher = simulation.recorder.borrow_mut();
    watcher.record.add_queue_pair(qp, requester, first_psn);
    let watcher = &mut *watcher;
    let ladders = watcher.ladders.as_mut().map(|ladders| ladders.names_mut());
    for cast in [Some(&mut watcher.cast), Some(watcher.log.names_mut()), ladders].into_iter().flatten() {
        cast.set_first_psn(requester, first_psn);
        cast.set_role(role, requester);
        if let Some(responder) = responder {
            cast.connect(requester, responder);
        }
    }
}

fn aim(simulation: &mut Simulation, qp: usize, target: UdParameters) -> Result<(), VerbsError> {
    let SimQueuePair { host, domain, .. } = simulation.qps[qp];
    let handle = simulation.world.verbs(host).create_address_handle(domain, target.address_vector)?;
    let (queue_pair, queue_key) = (target.qpn, target.qkey);
    simulation.qps[qp].datagram =
        UdDestination { ah: handle.0, remote_qpn: queue_pair, remote_qkey: queue_key };
    register_flow(simulation, qp, Psn::new(0), None);
    Ok(())
}

fn to_errno(error: VerbsError) -> Errno {
    Errno::from_number(error.errno())
}

impl ConnectionManagers for Simulation {
    fn listen(&mut self, host: usize, kind: QpType, port: u16) -> Result<u32, Errno> {
        listen(self, host, kind, port).map_err(to_errno)
    }

    fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno> {
        connect(self, qp, port, private_data).map_err(to_errno)
    }

    fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno> {
        accept(self, qp, CmId(id), private_data).map_err(to_errno)
    }

    fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno> {
        let (id, reason, private_data) = (CmId(id), RejectReason(reason), private_data.to_vec());
        let call = Command::Reject { id, reason, private_data };
        self.world.verbs(self.qps[qp].host).cm(call).map(|_| ()).map_err(to_errno)
    }

    fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        establish(self, qp, CmId(id)).map_err(to_errno)
    }

    fn set_datagram_target(&mut self, qp: usize, target: UdParameters) -> Result<(), Errno> {
        aim(self, qp, target).map_err(to_errno)
    }

    fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        let mut verbs = self.world.verbs(self.qps[qp].host);
        // One that is in the error state already is as good.
        let _ = verbs.modify_queue_pair(self.qps[qp].qpn, ModifyQp::default().state(QpState::Error));
        verbs.cm(Command::Disconnect(CmId(id))).map(|_| ()).map_err(to_errno)
    }

    fn destroy_cm_ids(&mut self, host: usize) {
        for id in self.connections.take_ids(host) {
            // A request that nobody answered went with its listener.
            let _ = self.world.verbs(HostId(host as u32)).cm(Command::DestroyId(id));
        }
    }
}

impl Simulation {
    /// Brings the programs what they are told of connections; tells whether there was anything.
    pub(super) fn deliver_cm_events(&mut self, play: &mut Executor<'_>) -> bool {
        let news = std::mem::take(&mut self.recorder.borrow_mut().ready_cm_channels);
        let is_any = !news.is_empty();
        for (host, channel) in news {
            while let Ok(Reply::Event(Some(event), _)) = self.world.verbs(host).cm(Command::GetEvent(channel))
            {
                let news = self.cm_event(host.0 as usize, event);
                play.on_cm_event(self.world.now().nanos(), news, self);
            }
        }
        is_any
    }

    fn cm_event(&mut self, host: usize, event: Event) -> CmEvent {
        let Event { id, listener, event_type: kind, status, private_data, parameters: detail } = event;
        if listener.is_some() {
            self.connections.identifiers.push((host, id));
        }
        let asking = match detail {
            EventParameters::Connection(offer) => self
                .qps
                .iter()
                .position(|side| side.qpn == offer.qpn && self.qps[side.peer].host.0 as usize == host),
            _ => None,
        };
        let target = match detail {
            EventParameters::Ud(target) => Some(target),
            _ => None,
        };
        let (id, listener) = (id.0, listener.map(|listener| listener.0));
        CmEvent { host, id, listener, active_qp: asking, kind, status, private_data, target }
    }
}
