//! Connections of real queue pairs through the connection managers of their cards.

use super::RealTimeRun;
use crate::executor::{CmEvent, ConnectionManagers, Executor};
use crate::plan::PairPlan;
use crate::spec::Errno;
use crate::verbs::{conn_params, port_space};
use softhca::cm::{CmOption, CmState, Event, EventChannel, Id, RDMA_UDP_QKEY, UdParameters};
use softhca::{Error, ModifyQp, QpState, QpType, QueuePair};
use softhca_engine::Resource;
use softhca_fabric::Endpoint;
use softhca_queue::cm::RejectReason;
use softhca_wire::Psn;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

/// The channels and identifiers of all hosts.
#[derive(Default)]
pub(super) struct CmConnections {
    channels: BTreeMap<usize, EventChannel>,
    identifiers: BTreeMap<(usize, u32), Id>,
}

impl CmConnections {
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
            id.query().is_ok_and(|view| {
                matches!(
                    view.state,
                    CmState::ReqSent
                        | CmState::RepSent
                        | CmState::RepReceived
                        | CmState::DreqSent
                        | CmState::SidrReqSent
                        | CmState::TimeWait
                )
            })
        })
    }
}

/// Takes a new queue pair to where receives can be posted, as `rdma_create_qp` does; one of datagrams to RTS.
pub(super) fn init_for_cm(pair: &QueuePair, plan: &PairPlan) -> Result<(), Error> {
    let modify = ModifyQp::default().pkey_index(0).port(1);
    match plan.kind {
        QpType::Ud => {
            pair.modify(&modify.state(QpState::Init).qkey(RDMA_UDP_QKEY))?;
            pair.modify(&ModifyQp::default().state(QpState::ReadyToReceive))?;
            pair.modify(&ModifyQp::default().state(QpState::ReadyToSend).sq_psn(Psn::new(0)))?;
        }
        _ => drop(pair.modify(&modify.state(QpState::Init).access_flags(plan.access))?),
    }
    Ok(())
}

/// A new identifier of a host.
fn create_cm_id(stage: &mut RealTimeRun<'_>, host: usize, kind: QpType) -> Result<Id, Error> {
    let channel = match stage.connections.channels.get(&host) {
        Some(channel) => channel.clone(),
        None => {
            let channel = EventChannel::new(&stage.contexts[host])?;
            stage.connections.channels.insert(host, channel.clone());
            channel
        }
    };
    let id = channel.create_id_with_kind(port_space(kind), kind)?;
    stage.connections.identifiers.insert((host, id.handle()), id.clone());
    Ok(id)
}

fn listen(stage: &mut RealTimeRun<'_>, host: usize, kind: QpType, port: u16) -> Result<u32, Error> {
    let id = create_cm_id(stage, host, kind)?;
    id.bind(SocketAddr::new(stage.devices[host].address(), port))?;
    id.listen(0)?;
    Ok(id.handle())
}

fn connect(stage: &mut RealTimeRun<'_>, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Error> {
    let pair = stage.plan.pair_of(qp);
    let id = create_cm_id(stage, stage.plan.qps[qp].host, pair.kind)?;
    let there = stage.endpoint(stage.plan.qps[qp].peer).address;
    id.set_option(CmOption::AckTimeout(pair.timeout))?;
    id.set_option(CmOption::TypeOfService(pair.traffic_class))?;
    id.resolve_address(None, SocketAddr::new(there, port))?;
    id.resolve_route()?;
    id.connect(&conn_params(pair, stage.qps[qp].qpn, private_data))?;
    Ok(id.handle())
}

/// The identifier of this number on the host of a queue pair.
fn cm_id(stage: &RealTimeRun<'_>, qp: usize, id: u32) -> Result<Id, Error> {
    let gone = Error::NotFound { resource: Resource::CmIdentifier, number: id };
    stage.connections.id(stage.plan.qps[qp].host, id).ok_or(gone)
}

fn accept(stage: &mut RealTimeRun<'_>, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Error> {
    let (id, pair) = (cm_id(stage, qp, id)?, stage.plan.pair_of(qp));
    // The peer may send as soon as it has the REP: the queue pair is ready before.
    if !pair.kind.is_datagram() {
        make_ready(stage, qp, &id)?;
    }
    id.accept(&conn_params(pair, stage.qps[qp].qpn, private_data))
}

fn establish(stage: &mut RealTimeRun<'_>, qp: usize, id: u32) -> Result<(), Error> {
    let id = cm_id(stage, qp, id)?;
    make_ready(stage, qp, &id)?;
    id.establish()
}

/// Takes a queue pair to RTS with what the connection manager knows, and lets rules and traces know it.
fn make_ready(stage: &mut RealTimeRun<'_>, qp: usize, id: &Id) -> Result<(), Error> {
    let number = stage.qps[qp].qpn.value();
    let gone = Error::NotFound { resource: Resource::QueuePair, number };
    let pair = stage.qps[qp].pair.clone().ok_or(gone)?;
    for state in [QpState::ReadyToReceive, QpState::ReadyToSend] {
        pair.modify(&id.qp_attributes(state)?)?;
    }
    let own = pair.query()?.attributes;
    let responder = Endpoint { address: own.address_vector.dgid.ip(), qpn: own.dest_qpn };
    stage.qps[qp].sq_psn = own.sq_psn;
    stage.register_flow(qp, own.sq_psn, Some(responder));
    Ok(())
}

fn aim(stage: &mut RealTimeRun<'_>, qp: usize, target: UdParameters) -> Result<(), Error> {
    let side = &mut stage.qps[qp];
    let handle = side.domain.create_address_handle(target.address_vector)?;
    side.target = Some((handle, target.qpn, target.qkey));
    side.sq_psn = Psn::new(0);
    stage.register_flow(qp, Psn::new(0), None);
    Ok(())
}

fn to_errno(error: Error) -> Errno {
    Errno::from_number(error.errno())
}

impl ConnectionManagers for RealTimeRun<'_> {
    fn listen(&mut self, host: usize, kind: QpType, port: u16) -> Result<u32, Errno> {
        listen(self, host, kind, port).map_err(to_errno)
    }

    fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno> {
        connect(self, qp, port, private_data).map_err(to_errno)
    }

    fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno> {
        accept(self, qp, id, private_data).map_err(to_errno)
    }

    fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno> {
        let id = self.connections.id(self.plan.qps[qp].host, id).ok_or(Errno::EINVAL)?;
        id.reject_with_reason(RejectReason(reason), private_data).map_err(to_errno)
    }

    fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        establish(self, qp, id).map_err(to_errno)
    }

    fn set_datagram_target(&mut self, qp: usize, target: UdParameters) -> Result<(), Errno> {
        aim(self, qp, target).map_err(to_errno)
    }

    fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        if let Some(pair) = &self.qps[qp].pair {
            // One that is in the error state already is as good.
            let _ = pair.modify(&ModifyQp::default().state(QpState::Error));
        }
        let id = self.connections.id(self.plan.qps[qp].host, id).ok_or(Errno::EINVAL)?;
        id.disconnect().map_err(to_errno)
    }

    fn destroy_cm_ids(&mut self, host: usize) {
        self.connections.close(host);
    }
}

impl RealTimeRun<'_> {
    /// Brings the programs what they are told of connections; tells whether there was anything.
    pub(super) fn deliver_cm_events(&mut self, start: Instant, play: &mut Executor<'_>) -> bool {
        let mut is_any = false;
        for (host, channel) in self.connections.channels.clone() {
            while let Ok(Some(event)) = channel.poll() {
                is_any = true;
                let news = self.cm_event(host, event);
                play.on_cm_event(start.elapsed().as_nanos() as u64, news, self);
            }
        }
        is_any
    }

    fn cm_event(&mut self, host: usize, event: Event) -> CmEvent {
        let (asked, target) = (event.offer().map(|offer| offer.qpn), event.target());
        let peer = event.id.peer_address().map(|peer| peer.ip());
        let asking = (0..self.qps.len()).find(|qp| {
            let Endpoint { address, qpn } = self.endpoint(*qp);
            Some(qpn) == asked && Some(address) == peer
        });
        let Event { id, listener, kind, status, private_data, .. } = event;
        let (number, listener) = (id.handle(), listener.map(|listener| listener.handle()));
        self.connections.identifiers.insert((host, number), id);
        CmEvent { host, id: number, listener, active_qp: asking, kind, status, private_data, target }
    }
}
