//! Fault rules on the cables of a daemon's hosts, and the roles of queue pairs that rules speak of.

use crate::client::RequestResult;
use crate::command_error::CommandError;
use crate::host::DaemonHost;
use crate::server::DaemonState;
use parking_lot::Mutex;
use softhca_engine::{QpSnapshot, QpType};
use softhca_fabric::{Endpoint, Flow, FlowId, Rule, RuleCounters};
use softhca_queue::control::{Response, decode, encode};
use softhca_wire::Qpn;
use std::sync::Arc;

/// The most rules of a host, and the most flows that wait for their queue pair.
const MAX_RULES: usize = 1024;

/// The roles that wait for a queue pair, and those that have one.
#[derive(Default)]
pub(crate) struct QpRoles {
    inner: Mutex<RoleTable>,
}

#[derive(Default)]
struct RoleTable {
    /// Decides draws where there is no rule yet.
    seed: u64,
    unassigned: Vec<(String, QpType, FlowId)>,
    assigned: Vec<(String, Qpn, FlowId)>,
}

fn malformed<T>(_: T) -> CommandError {
    CommandError::new(libc::EINVAL, "the rules or flows cannot be read: another version wrote them")
}

/// Puts rules on a host's cable.
pub(crate) fn add_rules(shared: &DaemonState, host: &DaemonHost, seed: u64, rules: &[u8]) -> RequestResult {
    let rules: Vec<(Rule, String)> = decode(rules).map_err(malformed)?;
    let there = host.driver.control(|driver| driver.rules().count());
    if there + rules.len() > MAX_RULES {
        return Err(CommandError::new(libc::ENOMEM, format!("a host has no more than {MAX_RULES} rules")));
    }
    for (rule, name) in rules {
        if !name.is_empty() {
            shared.recordings.name_rule(rule.id, &name);
        }
        host.driver.control(|driver| driver.add_rule(seed, rule));
    }
    Ok((Response::Done, Vec::new()))
}

/// Lets the rules of a host know queue pairs.
pub(crate) fn add_flows(host: &DaemonHost, seed: u64, flows: &[u8]) -> RequestResult {
    let flows: Vec<Flow> = decode(flows).map_err(malformed)?;
    host.driver.control(|driver| flows.into_iter().for_each(|flow| driver.add_flow(seed, flow)));
    Ok((Response::Done, Vec::new()))
}

/// The rules of a host and what they did.
pub(crate) fn rules(host: &DaemonHost) -> RequestResult {
    let rules: Vec<(Rule, RuleCounters)> =
        host.driver.control(|driver| driver.rules().map(|(rule, tally)| (rule.clone(), tally)).collect());
    Ok((Response::FaultRules(encode(&rules)), Vec::new()))
}

/// Takes everything away again.
pub(crate) fn clear_rules(shared: &DaemonState, host: &DaemonHost) -> RequestResult {
    shared.roles.remove_host(&host.device.name);
    host.driver.control(|driver| driver.clear_rules());
    Ok((Response::Done, Vec::new()))
}

impl QpRoles {
    /// Keeps roles for the next queue pairs of a host.
    pub fn reserve(
        &self,
        host: &DaemonHost,
        seed: u64,
        roles: Vec<(QpType, u32)>,
    ) -> Result<(), CommandError> {
        let mut inner = self.inner.lock();
        if inner.unassigned.len() + roles.len() > MAX_RULES {
            return Err(CommandError::new(libc::ENOMEM, format!("no more than {MAX_RULES} roles can wait")));
        }
        inner.seed = seed;
        let name = &host.device.name;
        inner.unassigned.extend(roles.into_iter().map(|(kind, role)| (name.clone(), kind, FlowId(role))));
        Ok(())
    }

    /// Whether no queue pair is waited for or followed.
    pub fn is_idle(&self) -> bool {
        let inner = self.inner.lock();
        inner.unassigned.is_empty() && inner.assigned.is_empty()
    }

    fn remove_host(&self, host: &str) {
        let mut inner = self.inner.lock();
        inner.unassigned.retain(|(other, ..)| other != host);
        inner.assigned.retain(|(other, ..)| other != host);
    }

    /// A queue pair became ready to receive: the first of its kind gets the role that waits. Called while its card
    /// is held, so that roles are given in the order in which the card tells of it.
    pub fn assign(&self, host: &str, view: &QpSnapshot) {
        let mut inner = self.inner.lock();
        let fits = |(other, kind, _): &(String, QpType, FlowId)| other == host && *kind == view.qp_type;
        if let Some(place) = inner.unassigned.iter().position(fits) {
            let (name, _, role) = inner.unassigned.remove(place);
            inner.assigned.retain(|(other, number, _)| *other != name || *number != view.qpn);
            inner.assigned.push((name, view.qpn, role));
        }
    }

    /// A queue pair became ready to send: the rules of every host know it from now on.
    pub fn publish_flow(&self, hosts: &[Arc<DaemonHost>], host: &DaemonHost, view: &QpSnapshot) {
        let first_psn = view.attributes.sq_psn;
        let is_it =
            |(other, number, _): &&(String, Qpn, FlowId)| *other == host.device.name && *number == view.qpn;
        // Let go before a card is asked for anything: roles are claimed while a card is held.
        let (given, seed) = {
            let inner = self.inner.lock();
            (inner.assigned.iter().find(is_it).cloned(), inner.seed)
        };
        let Some((_, number, role)) = given else { return };
        let source = host.driver.control(|driver| {
            let gids = driver.hca().gids();
            gids.get(usize::from(view.attributes.address_vector.sgid_index)).map(|gid| gid.ip())
        });
        let requester = Endpoint { address: source.unwrap_or(host.device.address), qpn: number };
        let responder = (!view.qp_type.is_datagram()).then(|| Endpoint {
            address: view.attributes.address_vector.dgid.ip(),
            qpn: view.attributes.dest_qpn,
        });
        let flow = Flow { id: role, requester, responder, first_psn };
        for host in hosts {
            host.driver.control(|driver| driver.add_flow(seed, flow));
        }
    }
}
