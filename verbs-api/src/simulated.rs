//! A card on a host of a world: virtual time goes on between awaits, or when a blocking call outside of host
//! code has to wait.

use crate::Rendezvous;
use crate::executor::Executor;
use crate::local::{Local, Seat};
use crate::memory::{Adopted, Block};
use crate::notifier::Notifier;
use crate::report::Reporter;
use parking_lot::Mutex;
use softhca_engine::{Context, Hca, Instant, MemoryId, QpView};
use softhca_fabric::{Endpoint, Flow, HostId, Role, Rule, RuleId, Tally};
use softhca_wire::Mtu;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The world that simulated cards share.
pub(crate) type Fabric = softhca_fabric::World<Reporter>;

/// A card in virtual time.
pub(crate) type Simulated = Local<Desk>;

/// A host of a world.
pub(crate) struct Desk {
    pub fabric: Arc<Mutex<Fabric>>,
    pub host: HostId,
    pub rendezvous: Rendezvous,
    pub draws: AtomicU64,
}

impl Desk {
    /// Puts a rule on every cable that leaves the host.
    pub fn add_rule(&self, rule: &Rule) {
        let mut fabric = self.fabric.lock();
        for (cable, direction) in fabric.host(self.host).cables().to_vec() {
            let mut rule = rule.clone();
            rule.selector.direction = Some(direction);
            fabric.add_rule(cable, rule);
        }
    }

    /// Lets rules know a queue pair by its role.
    pub fn add_flow(&self, flow: Flow) {
        self.fabric.lock().flows_mut().insert(flow);
    }

    /// The rules on the cables that leave the host.
    pub fn rules(&self) -> Vec<(Rule, Tally)> {
        let fabric = self.fabric.lock();
        let mut found: Vec<(RuleId, Rule, Tally)> = Vec::new();
        for (cable, direction) in fabric.host(self.host).cables() {
            let leaving = fabric.cable(*cable).rules();
            for (rule, tally) in leaving.filter(|(rule, _)| rule.selector.direction == Some(*direction)) {
                match found.iter_mut().find(|(id, ..)| *id == rule.id) {
                    Some((.., sum)) => {
                        sum.matched += tally.matched;
                        sum.fired += tally.fired;
                    }
                    None => found.push((rule.id, rule.clone(), tally)),
                }
            }
        }
        found.into_iter().map(|(_, rule, tally)| (rule, tally)).collect()
    }
}

impl Seat for Desk {
    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        self.fabric.lock().with_card(self.host, act)
    }

    fn add_memory(&self, block: Arc<Block>) -> MemoryId {
        self.fabric.lock().memory(self.host).adopt(Box::new(Adopted(block)))
    }

    fn remove_memory(&self, memory: MemoryId) {
        self.fabric.lock().memory(self.host).free(memory);
    }

    fn hear(&self) {
        self.control(|_, _| ());
    }

    /// Rules count PSNs from the first of each queue pair; roles are given in the order of starting.
    fn started(&self, view: &QpView) {
        let mut fabric = self.fabric.lock();
        let peer =
            Endpoint { address: view.attributes.path.destination.ip(), qpn: view.attributes.destination };
        let responder = (!view.kind.is_datagram()).then_some(peer);
        let requester = Endpoint { address: fabric.host(self.host).address(), qpn: view.number };
        let role = Role(fabric.flows().iter().map(|flow| flow.role.0 + 1).max().unwrap_or(0));
        fabric.flows_mut().insert(Flow { role, requester, responder, first_psn: view.attributes.send_psn });
    }

    fn active_mtu(&self) -> Mtu {
        Mtu::B4096
    }

    fn host_named(&self, name: &str) -> Option<IpAddr> {
        let fabric = self.fabric.lock();
        fabric.hosts().find(|(_, host)| host.name() == name).map(|(_, host)| host.address())
    }

    fn drive(&self) {
        match Executor::current() {
            Some(executor) => executor.note_empty_poll(),
            None => {
                self.fabric.lock().step();
            }
        }
    }

    fn now(&self) -> Instant {
        self.fabric.lock().now()
    }

    fn wait(&self, news: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        loop {
            if news.count() != seen {
                return true;
            }
            let mut fabric = self.fabric.lock();
            match (fabric.next_event_at(), until) {
                (Some(at), Some(until)) if at > until => {
                    fabric.run_until(until);
                    return false;
                }
                (Some(_), _) => {
                    fabric.step();
                }
                (None, Some(until)) => {
                    fabric.run_until(until);
                    return false;
                }
                (None, None) => {
                    panic!("nothing is left to happen in this World: what is waited for will never come")
                }
            }
        }
    }

    fn random(&self) -> u64 {
        let draw = self.draws.fetch_add(1, Ordering::Relaxed);
        self.fabric.lock().draw(&[0x7073_6e73, self.host.0.into(), draw])
    }

    fn rendezvous(&self) -> Rendezvous {
        self.rendezvous.clone()
    }
}
