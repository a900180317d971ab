//! The queue pairs of a plan in a world: created, connected, and with bytes to send in their memory.

use super::cm;
use crate::plan::Plan;
use crate::verbs::{DATAGRAM_QKEY, MAX_PATTERN_BYTES, fill_pattern, region_length};
use softhca_engine::{AddressVector, CqId, PdId};
use softhca_fabric::{ConnectOptions, Endpoint, Flow, HostId, QpOptions, World};
use softhca_queue::{AccessFlags, UdDestination};
use softhca_wire::{Gid, Qpn, RemoteKey};

/// A queue pair of the plan in the world.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimQueuePair {
    pub host: HostId,
    pub qpn: Qpn,
    pub cq: CqId,
    pub key: RemoteKey,
    pub base: u64,
    pub area: u64,
    /// Where datagrams go.
    pub datagram: UdDestination,
    pub domain: PdId,
    pub peer: usize,
    pub is_destroyed: bool,
}

/// Makes the queue pairs of a plan; the error says which could not be made.
pub(super) fn create_queue_pairs(plan: &Plan, world: &mut World) -> Result<Vec<SimQueuePair>, String> {
    let mut sides = Vec::new();
    let failed = |what: &str, name: &str, why: String| format!("{name}: cannot {what}: {why}");
    for qp in &plan.qps {
        let pair = &plan.pairs[qp.pair];
        let host = HostId(qp.host as u32);
        let mut verbs = world.verbs(host);
        let error = |what: &str| {
            let (what, name) = (what.to_owned(), qp.name.clone());
            move |why: softhca_engine::VerbsError| failed(&what, &name, why.to_string())
        };
        let domain = verbs.allocate_protection_domain().map_err(error("allocate a domain"))?;
        let (key, base) = verbs
            .register_memory(domain, region_length(pair.area_bytes), pair.access | AccessFlags::LOCAL_WRITE)
            .map_err(error("register memory"))?;
        let cq = verbs.create_completion_queue(pair.cqe).map_err(error("create a completion queue"))?;
        let receives = pair.posted_receives.max(128);
        let options =
            QpOptions { max_send_wr: pair.max_send_wr, max_recv_wr: receives, ..QpOptions::default() };
        let qpn =
            verbs.create_queue_pair(pair.kind, domain, cq, options).map_err(error("create a queue pair"))?;
        let (area, peer, datagram) = (pair.area_bytes, qp.peer, UdDestination::default());
        sides.push(SimQueuePair {
            host,
            qpn,
            cq,
            key,
            base,
            area,
            datagram,
            domain,
            peer,
            is_destroyed: false,
        });
    }
    for pair in &plan.pairs {
        let [a, b] = pair.qps;
        let ends = [sides[a], sides[b]];
        if pair.uses_cm {
            for side in ends {
                cm::init_for_cm(world, side.host, side.qpn, pair)
                    .map_err(|why| failed("prepare", &plan.qps[a].name, why.to_string()))?;
            }
            continue;
        }
        let roles = pair.qps.map(|qp| Some(Plan::role_of(qp)));
        let name = |why: softhca_engine::VerbsError| failed("connect", &plan.qps[a].name, why.to_string());
        if pair.kind.is_datagram() {
            for side in 0..2 {
                let (here, there) = (ends[side], ends[1 - side]);
                let peer = Gid::from(world.host(there.host).address());
                let vector = AddressVector { traffic_class: pair.traffic_class, ..AddressVector::to(peer) };
                let mut verbs = world.verbs(here.host);
                verbs.start_datagrams(here.qpn, DATAGRAM_QKEY, pair.sq_psns[side]).map_err(name)?;
                let handle = verbs.create_address_handle(here.domain, vector).map_err(name)?;
                sides[pair.qps[side]].datagram =
                    UdDestination { ah: handle.0, remote_qpn: there.qpn, remote_qkey: DATAGRAM_QKEY };
                let address = world.host(here.host).address();
                let requester = Endpoint { address, qpn: here.qpn };
                let (role, first_psn) = (Plan::role_of(pair.qps[side]), pair.sq_psns[side]);
                world.flows_mut().insert(Flow { id: role, requester, responder: None, first_psn });
            }
            continue;
        }
        let connection = ConnectOptions {
            path_mtu: pair.mtu,
            first_psns: pair.sq_psns,
            access: pair.access,
            max_rd_atomic: pair.max_rd_atomic,
            timeout: pair.timeout,
            retry_count: pair.retry_count,
            rnr_retry: pair.rnr_retry,
            min_rnr_timer: pair.min_rnr_timer,
            traffic_class: pair.traffic_class,
            flow_ids: roles,
            service_level: 0,
        };
        world.connect((ends[0].host, ends[0].qpn), (ends[1].host, ends[1].qpn), &connection).map_err(name)?;
    }
    for (index, side) in sides.iter().enumerate() {
        if side.area <= MAX_PATTERN_BYTES {
            let bytes = fill_pattern(index, side.area as usize);
            world.verbs(side.host).write_memory(side.key, side.base, &bytes);
        }
    }
    Ok(sides)
}
