//! The roles of queue pairs, by which fault rules select their packets.

use crate::command_error::CommandError;
use crate::host::DaemonHost;
use crate::host_rules::RuleChange;
use parking_lot::Mutex;
use softhca_engine::{QpSnapshot, QpType};
use softhca_fabric::{Endpoint, Flow, FlowId};
use softhca_wire::Qpn;
use std::sync::Arc;

/// The most roles that wait for a queue pair or have one.
const MAX_ROLES: usize = 1024;

/// The roles that wait for a queue pair, and those that are assigned.
#[derive(Default)]
pub(crate) struct QpRoles {
    inner: Mutex<RoleTable>,
}

#[derive(Default)]
struct RoleTable {
    /// The seed of random decisions on hosts without rules.
    seed: u64,
    unassigned: Vec<(String, QpType, FlowId)>,
    assigned: Vec<(String, Qpn, FlowId)>,
}

impl QpRoles {
    /// Reserves roles for the next queue pairs of a host.
    pub fn reserve(
        &self,
        host: &DaemonHost,
        seed: u64,
        roles: Vec<(QpType, u32)>,
    ) -> Result<(), CommandError> {
        let mut inner = self.inner.lock();
        if inner.unassigned.len() + inner.assigned.len() + roles.len() > MAX_ROLES {
            return Err(CommandError::new(
                libc::ENOMEM,
                format!("at most {MAX_ROLES} roles can wait for a queue pair or have one"),
            ));
        }
        inner.seed = seed;
        let name = &host.device.name;
        inner
            .unassigned
            .extend(roles.into_iter().map(|(qp_type, role)| (name.clone(), qp_type, FlowId(role))));
        Ok(())
    }

    /// Whether no role is reserved or assigned.
    pub fn is_idle(&self) -> bool {
        let inner = self.inner.lock();
        inner.unassigned.is_empty() && inner.assigned.is_empty()
    }

    pub fn remove_host(&self, host: &str) {
        let mut inner = self.inner.lock();
        inner.unassigned.retain(|(other, ..)| other != host);
        inner.assigned.retain(|(other, ..)| other != host);
    }

    /// Assigns the next reserved role of its type to a queue pair that entered RTR. Call it with the driver locked, so
    /// that roles are assigned in the order of the transitions.
    pub fn assign(&self, host: &str, qp: &QpSnapshot) {
        let mut inner = self.inner.lock();
        let fits = |(other, qp_type, _): &(String, QpType, FlowId)| other == host && *qp_type == qp.qp_type;
        if let Some(index) = inner.unassigned.iter().position(fits) {
            let (name, _, role) = inner.unassigned.remove(index);
            inner.assigned.retain(|(other, number, _)| *other != name || *number != qp.qpn);
            inner.assigned.push((name, qp.qpn, role));
        }
    }

    /// Adds the flow of a queue pair that entered RTS, when its first PSN is known, to the rules of every host.
    pub fn publish_flow(&self, hosts: &[Arc<DaemonHost>], host: &DaemonHost, qp: &QpSnapshot) {
        let first_psn = qp.attributes.sq_psn;
        let is_same =
            |(other, number, _): &&(String, Qpn, FlowId)| *other == host.device.name && *number == qp.qpn;
        // Release the lock before locking a driver: `assign` is called with a driver locked.
        let (assigned, seed) = {
            let inner = self.inner.lock();
            (inner.assigned.iter().find(is_same).cloned(), inner.seed)
        };
        let Some((_, qpn, role)) = assigned else { return };
        let source = host.driver.control(|driver| {
            let gids = driver.hca().gids();
            gids.get(usize::from(qp.attributes.address_vector.sgid_index)).map(|gid| gid.ip())
        });
        let requester = Endpoint { address: source.unwrap_or(host.device.address), qpn };
        let responder = (!qp.qp_type.is_datagram()).then(|| Endpoint {
            address: qp.attributes.address_vector.dgid.ip(),
            qpn: qp.attributes.dest_qpn,
        });
        let flow = Flow { id: role, requester, responder, first_psn };
        let change = RuleChange::AddFlows { seed, flows: vec![flow] };
        for host in hosts {
            host.driver.control(|driver| driver.add_flow(seed, flow));
            if let Some(slots) = &host.slots {
                tokio::task::block_in_place(|| slots.change_rules(&change));
            }
        }
    }
}
