//! The queue pairs of a plan in a world: created, connected, and with bytes to send in their memory.

use super::meeting;
use crate::plan::Plan;
use crate::verbs::{LARGEST_FILLED, QUEUE_KEY, pattern, region_length};
use softhca_engine::{AddressVector, CqId, PdId};
use softhca_fabric::{Connection, Endpoint, Flow, HostId, QpOptions, World};
use softhca_queue::{Access, Datagram};
use softhca_wire::{Gid, Qpn, RemoteKey};

/// A queue pair of the plan in the world.
#[derive(Clone, Copy, Debug)]
pub(super) struct Side {
    pub host: HostId,
    pub qpn: Qpn,
    pub cq: CqId,
    pub key: RemoteKey,
    pub base: u64,
    pub area: u64,
    /// Where datagrams go.
    pub datagram: Datagram,
    pub domain: PdId,
    pub peer: usize,
    pub is_gone: bool,
}

/// Makes the queue pairs of a plan; the error says which could not be made.
pub(super) fn create_queue_pairs(plan: &Plan, world: &mut World) -> Result<Vec<Side>, String> {
    let mut sides = Vec::new();
    let failed = |what: &str, name: &str, why: String| format!("{name}: cannot {what}: {why}");
    for qp in &plan.qps {
        let pair = &plan.pairs[qp.pair];
        let host = HostId(qp.host as u32);
        let mut verbs = world.on(host);
        let error = |what: &str| {
            let (what, name) = (what.to_owned(), qp.name.clone());
            move |why: softhca_engine::Error| failed(&what, &name, why.to_string())
        };
        let domain = verbs.allocate_domain().map_err(error("allocate a domain"))?;
        let (key, base) = verbs
            .register(domain, region_length(pair.area), pair.access | Access::LOCAL_WRITE)
            .map_err(error("register memory"))?;
        let cq =
            verbs.create_completion_queue(pair.completions).map_err(error("create a completion queue"))?;
        let receives = pair.receives.max(128);
        let options = QpOptions { sends: pair.sends, receives, ..QpOptions::default() };
        let qpn =
            verbs.create_queue_pair(pair.kind, domain, cq, options).map_err(error("create a queue pair"))?;
        let (area, peer, datagram) = (pair.area, qp.peer, Datagram::default());
        sides.push(Side { host, qpn, cq, key, base, area, datagram, domain, peer, is_gone: false });
    }
    for pair in &plan.pairs {
        let [a, b] = pair.qps;
        let ends = [sides[a], sides[b]];
        if pair.by_cm {
            for side in ends {
                meeting::prepare(world, side.host, side.qpn, pair)
                    .map_err(|why| failed("prepare", &plan.qps[a].name, why.to_string()))?;
            }
            continue;
        }
        let roles = pair.qps.map(|qp| Some(Plan::role(qp)));
        let name = |why: softhca_engine::Error| failed("connect", &plan.qps[a].name, why.to_string());
        if pair.kind.is_datagram() {
            for side in 0..2 {
                let (here, there) = (ends[side], ends[1 - side]);
                let peer = Gid::from(world.host(there.host).address());
                let vector = AddressVector { traffic_class: pair.traffic_class, ..AddressVector::to(peer) };
                let mut verbs = world.on(here.host);
                verbs.start_datagrams(here.qpn, QUEUE_KEY, pair.psns[side]).map_err(name)?;
                let handle = verbs.create_address_handle(here.domain, vector).map_err(name)?;
                sides[pair.qps[side]].datagram =
                    Datagram { address_handle: handle.0, queue_pair: there.qpn, queue_key: QUEUE_KEY };
                let address = world.host(here.host).address();
                let requester = Endpoint { address, qpn: here.qpn };
                let (role, first_psn) = (Plan::role(pair.qps[side]), pair.psns[side]);
                world.flows_mut().insert(Flow { role, requester, responder: None, first_psn });
            }
            continue;
        }
        let connection = Connection {
            mtu: pair.mtu,
            psns: pair.psns,
            access: pair.access,
            reads: pair.reads,
            timeout: pair.timeout,
            retry_count: pair.retry_count,
            rnr_retry: pair.rnr_retry,
            min_rnr_timer: pair.min_rnr_timer,
            traffic_class: pair.traffic_class,
            roles,
            service_level: 0,
        };
        world.connect((ends[0].host, ends[0].qpn), (ends[1].host, ends[1].qpn), &connection).map_err(name)?;
    }
    for (index, side) in sides.iter().enumerate() {
        if side.area <= LARGEST_FILLED {
            let bytes = pattern(index, side.area as usize);
            world.on(side.host).write(side.key, side.base, &bytes);
        }
    }
    Ok(sides)
}
