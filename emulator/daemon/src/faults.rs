//! Fault rules on the cables of a daemon's hosts, and the roles of queue pairs that rules speak of.

use crate::client::Answer;
use crate::host::Host;
use crate::refusal::Refusal;
use crate::server::Shared;
use parking_lot::Mutex;
use softhca_engine::{Modify, QpKind, QpView, State};
use softhca_fabric::{Endpoint, Flow, Role, Rule, Tally};
use softhca_queue::control::{Reply, decode, encode};
use softhca_wire::Qpn;
use std::sync::Arc;

/// The most rules of a host, and the most flows that wait for their queue pair.
const MOST: usize = 1024;

/// The roles that wait for a queue pair, and those that have one.
#[derive(Default)]
pub(crate) struct Names {
    inner: Mutex<Roles>,
}

#[derive(Default)]
struct Roles {
    /// Decides draws where there is no rule yet.
    seed: u64,
    waiting: Vec<(String, QpKind, Role)>,
    given: Vec<(String, Qpn, Role)>,
}

fn malformed<T>(_: T) -> Refusal {
    Refusal::new(libc::EINVAL, "the rules or flows cannot be read: another version wrote them")
}

/// Puts rules on a host's cable.
pub(crate) fn add_rules(shared: &Shared, host: &Host, seed: u64, rules: &[u8]) -> Answer {
    let rules: Vec<(Rule, String)> = decode(rules).map_err(malformed)?;
    let there = host.station.control(|driver| driver.rules().count());
    if there + rules.len() > MOST {
        return Err(Refusal::new(libc::ENOMEM, format!("a host has no more than {MOST} rules")));
    }
    for (rule, name) in rules {
        if !name.is_empty() {
            shared.records.name_rule(rule.id, &name);
        }
        host.station.control(|driver| driver.add_rule(seed, rule));
    }
    Ok((Reply::Done, Vec::new()))
}

/// Lets the rules of a host know queue pairs.
pub(crate) fn add_flows(host: &Host, seed: u64, flows: &[u8]) -> Answer {
    let flows: Vec<Flow> = decode(flows).map_err(malformed)?;
    host.station.control(|driver| flows.into_iter().for_each(|flow| driver.add_flow(seed, flow)));
    Ok((Reply::Done, Vec::new()))
}

/// The rules of a host and what they did.
pub(crate) fn rules(host: &Host) -> Answer {
    let rules: Vec<(Rule, Tally)> =
        host.station.control(|driver| driver.rules().map(|(rule, tally)| (rule.clone(), tally)).collect());
    Ok((Reply::Rules(encode(&rules)), Vec::new()))
}

/// Takes everything away again.
pub(crate) fn clear(shared: &Shared, host: &Host) -> Answer {
    shared.names.forget(&host.card.name);
    host.station.control(|driver| driver.clear_rules());
    Ok((Reply::Done, Vec::new()))
}

impl Names {
    /// Keeps roles for the next queue pairs of a host.
    pub fn expect(&self, host: &Host, seed: u64, roles: Vec<(QpKind, u32)>) -> Result<(), Refusal> {
        let mut inner = self.inner.lock();
        if inner.waiting.len() + roles.len() > MOST {
            return Err(Refusal::new(libc::ENOMEM, format!("no more than {MOST} roles can wait")));
        }
        inner.seed = seed;
        let name = &host.card.name;
        inner.waiting.extend(roles.into_iter().map(|(kind, role)| (name.clone(), kind, Role(role))));
        Ok(())
    }

    /// Whether no queue pair is waited for or followed.
    pub fn is_idle(&self) -> bool {
        let inner = self.inner.lock();
        inner.waiting.is_empty() && inner.given.is_empty()
    }

    fn forget(&self, host: &str) {
        let mut inner = self.inner.lock();
        inner.waiting.retain(|(other, ..)| other != host);
        inner.given.retain(|(other, ..)| other != host);
    }

    /// A queue pair became ready to receive: the first of its kind gets the role that waits. Called while its card
    /// is held, so that roles are given in the order in which the card tells of it.
    pub fn claim(&self, host: &str, view: &QpView) {
        let mut inner = self.inner.lock();
        let fits = |(other, kind, _): &(String, QpKind, Role)| other == host && *kind == view.kind;
        if let Some(place) = inner.waiting.iter().position(fits) {
            let (name, _, role) = inner.waiting.remove(place);
            inner.given.retain(|(other, number, _)| *other != name || *number != view.number);
            inner.given.push((name, view.number, role));
        }
    }

    /// A queue pair was modified: the rules of every host know it when its first PSN is known.
    pub fn follow(&self, hosts: &[Arc<Host>], host: &Host, view: &QpView, modify: &Modify, state: State) {
        let (State::ReadyToSend, Some(first_psn)) = (state, modify.send_psn) else { return };
        let is_it =
            |(other, number, _): &&(String, Qpn, Role)| *other == host.card.name && *number == view.number;
        // Let go before a card is asked for anything: roles are claimed while a card is held.
        let (given, seed) = {
            let inner = self.inner.lock();
            (inner.given.iter().find(is_it).cloned(), inner.seed)
        };
        let Some((_, number, role)) = given else { return };
        let source = host.station.control(|driver| {
            let gids = driver.card().gids();
            gids.get(usize::from(view.attributes.path.source_index)).map(|gid| gid.ip())
        });
        let requester = Endpoint { address: source.unwrap_or(host.card.address), qpn: number };
        let responder = (!view.kind.is_datagram()).then(|| Endpoint {
            address: view.attributes.path.destination.ip(),
            qpn: view.attributes.destination,
        });
        let flow = Flow { role, requester, responder, first_psn };
        for host in hosts {
            host.station.control(|driver| driver.add_flow(seed, flow));
        }
    }
}
