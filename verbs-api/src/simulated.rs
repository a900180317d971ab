//! A card on a host of a world: virtual time goes on between awaits, or when a blocking call outside of host
//! code has to wait.

use crate::EndpointExchange;
use crate::executor::Executor;
use crate::local_backend::{CardRuntime, LocalBackend};
use crate::memory::{AdoptedBlock, MemoryBlock};
use crate::notifier::Notifier;
use crate::report::RunRecorder;
use parking_lot::Mutex;
use softhca_engine::{Attachments, ClientId, Command, Context, Hca, Instant, MemoryId, Reply, VerbsError};
use softhca_fabric::{Endpoint, Flow, FlowId, HostId, Rule, RuleCounters, RuleId};
use softhca_wire::Mtu;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The world that simulated cards share.
pub(crate) type Fabric = softhca_fabric::World<RunRecorder>;

/// A card in virtual time.
pub(crate) type SimulatedBackend = LocalBackend<SimulatedHost>;

/// A host of a world.
pub(crate) struct SimulatedHost {
    pub fabric: Arc<Mutex<Fabric>>,
    pub host: HostId,
    pub endpoint_exchange: EndpointExchange,
    pub random_draws: AtomicU64,
}

impl SimulatedHost {
    /// Puts a rule on every cable that leaves the host. The seed of the world replaces `_seed`.
    pub fn add_rule(&self, _seed: u64, rule: &Rule) {
        let mut fabric = self.fabric.lock();
        for (cable, direction) in fabric.host(self.host).links().to_vec() {
            let mut rule = rule.clone();
            rule.selector.direction = Some(direction);
            fabric.add_rule(cable, rule);
        }
    }

    /// Lets rules know a queue pair by its role.
    pub fn add_flow(&self, _seed: u64, flow: Flow) {
        self.fabric.lock().flows_mut().insert(flow);
    }

    /// The rules on the cables that leave the host.
    pub fn rules(&self) -> Vec<(Rule, RuleCounters)> {
        let fabric = self.fabric.lock();
        let mut found: Vec<(RuleId, Rule, RuleCounters)> = Vec::new();
        for (cable, direction) in fabric.host(self.host).links() {
            let leaving = fabric.link(*cable).rules();
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

impl CardRuntime for SimulatedHost {
    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        self.fabric.lock().with_hca(self.host, act)
    }

    /// Rules select packets by PSNs relative to the first of a queue pair, and by flow identifiers in the order in
    /// which queue pairs become ready to send.
    fn execute(
        &self,
        client: ClientId,
        command: Command,
        attachments: &mut Attachments,
    ) -> std::result::Result<Reply, VerbsError> {
        let started = command.qp_ready_to_send();
        let mut fabric = self.fabric.lock();
        let reply = fabric.with_hca(self.host, |hca, ctx| hca.execute(ctx, client, command, attachments))?;
        if let Some(qpn) = started {
            let host = fabric.host(self.host);
            let qp = host.hca().query_queue_pair(client, qpn)?;
            let requester = Endpoint { address: host.address(), qpn };
            let peer =
                Endpoint { address: qp.attributes.address_vector.dgid.ip(), qpn: qp.attributes.dest_qpn };
            let responder = (!qp.qp_type.is_datagram()).then_some(peer);
            let id = FlowId(fabric.flows().iter().map(|flow| flow.id.0 + 1).max().unwrap_or(0));
            let first_psn = qp.attributes.sq_psn;
            fabric.flows_mut().insert(Flow { id, requester, responder, first_psn });
        }
        Ok(reply)
    }

    fn add_memory(&self, block: Arc<MemoryBlock>) -> MemoryId {
        self.fabric.lock().memory(self.host).attach_external(Box::new(AdoptedBlock(block)))
    }

    fn remove_memory(&self, memory: MemoryId) {
        self.fabric.lock().memory(self.host).free(memory);
    }

    fn on_doorbell(&self) {
        self.control(|_, _| ());
    }

    fn active_mtu(&self) -> Mtu {
        Mtu::B4096
    }

    fn resolve_host(&self, name: &str) -> Option<IpAddr> {
        let fabric = self.fabric.lock();
        fabric.hosts().find(|(_, host)| host.name() == name).map(|(_, host)| host.address())
    }

    fn drive(&self) -> bool {
        match Executor::current() {
            Some(executor) => executor.count_empty_poll(),
            None => {
                self.fabric.lock().step();
            }
        }
        true
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
        let draw = self.random_draws.fetch_add(1, Ordering::Relaxed);
        self.fabric.lock().draw(&[0x7073_6e73, self.host.0.into(), draw])
    }

    fn endpoint_exchange(&self) -> EndpointExchange {
        self.endpoint_exchange.clone()
    }
}
