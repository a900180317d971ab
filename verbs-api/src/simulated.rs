//! A card on a host of a world: virtual time advances between awaits, or when a blocking call outside of host
//! code has to wait.

use crate::backend::{Result, Runtime};
use crate::executor::Executor;
use crate::local_backend::{CardRuntime, EventBus, LocalClient};
use crate::memory::MemoryBlock;
use crate::notifier::Notifier;
use crate::placement::{Choices, HostPlacement};
use crate::{Device, EndpointExchange, RemoteKey, Settings};
use parking_lot::{Mutex, MutexGuard};
use softhca_engine::{
    Attachments, ClientId, Command, Context, Hca, Instant, MemoryId, PayloadMode, Placement, Profile, Reply,
};
use softhca_fabric::{
    Endpoint, EventSink, Flow, FlowId, HostId, NetworkEvent, Rule, RuleCounters, RuleId, World,
    simulated_memory,
};
use softhca_wire::Mtu;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The events of a [`SimulatedFabric`]: to the applications that wait for them, then to a sink.
pub struct FabricSink {
    event_buses: Vec<Arc<EventBus>>,
    forward_to: Box<dyn EventSink + Send>,
}

impl EventSink for FabricSink {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Hca { host, event } = event {
            self.event_buses[host.0 as usize].dispatch(event);
        }
        self.forward_to.on_event(now, event);
    }

    fn flush(&mut self) {
        self.forward_to.flush();
    }
}

/// Hosts, links and switches under a virtual clock, with a device on each host.
///
/// The caller builds the network and advances its time, through [`SimulatedFabric::with`]. Tests of programs are simpler with
/// [`World`](crate::sim::World), which does both.
#[derive(Clone)]
pub struct SimulatedFabric {
    world: Arc<Mutex<World<FabricSink>>>,
    endpoint_exchange: EndpointExchange,
    choices: Arc<Mutex<Choices>>,
}

/// How the queue pairs of a simulated device get the flow IDs that rules select.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlowIds {
    /// In the order in which they become ready to send, from zero.
    Automatic,
    /// With [`Device::add_flow`].
    ByCaller,
}

impl SimulatedFabric {
    /// A network without hosts. The seed determines queue pair numbers, keys and all random draws.
    pub fn new(seed: u64) -> SimulatedFabric {
        let sink = FabricSink { event_buses: Vec::new(), forward_to: Box::new(()) };
        let world = Arc::new(Mutex::new(World::with_sink(seed, sink)));
        let choices = Arc::new(Mutex::new(Choices::by_seed(seed)));
        SimulatedFabric { world, endpoint_exchange: EndpointExchange::new(), choices }
    }

    /// Sends all further events to `sink`, which must not call verbs.
    pub fn set_sink(&self, sink: impl EventSink + Send + 'static) {
        self.world.lock().sink().forward_to = Box::new(sink);
    }

    /// Adds a host. The n-th host has the ID n, counted from zero.
    pub fn add_host(&self, name: &str, address: IpAddr, settings: Settings) -> Device {
        let host = self.world.lock().add_host_at(name, address, settings);
        self.device(host, FlowIds::ByCaller)
    }

    /// The device of a new host.
    pub(crate) fn device(&self, host: HostId, flow_ids: FlowIds) -> Device {
        let event_bus = Arc::new(EventBus::default());
        let mut world = self.world.lock();
        world.sink().event_buses.push(event_bus.clone());
        let (address, settings) = (world.host(host).address(), *world.host(host).hca().settings());
        let placement = (settings.placement != Placement::InOrder
            && settings.payload_mode == PayloadMode::Carried)
            .then(|| {
                let name = world.host(host).name();
                HostPlacement::new(settings.placement, host.0, name, self.choices.clone())
            });
        if let Some(placement) = &placement {
            world.memory(host).set_placement_order(placement.clone());
        }
        let open = |doorbell| world.with_hca(host, |hca, _| hca.open_client(doorbell));
        let client = LocalClient::open(event_bus, open).expect("a new HCA has room for a client");
        drop(world);
        let (fabric, random_draws) = (self.clone(), AtomicU64::new(0));
        Device::new(
            Arc::new(SimulatedHost { fabric, host, client, flow_ids, random_draws, placement }),
            address,
        )
    }

    /// The place where hosts exchange endpoints.
    pub(crate) fn endpoint_exchange(&self) -> EndpointExchange {
        self.endpoint_exchange.clone()
    }

    /// The choices of devices whose placement is not in order.
    pub(crate) fn choices(&self) -> MutexGuard<'_, Choices> {
        self.choices.lock()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, World<FabricSink>> {
        self.world.lock()
    }

    /// Calls `act` with the network. It must not call verbs.
    pub fn with<R>(&self, act: impl FnOnce(&mut World<FabricSink>) -> R) -> R {
        act(&mut self.world.lock())
    }

    /// Unmaps the memory of a region without deregistering it: accesses of the device fault.
    pub fn unmap(&self, device: &Device, rkey: RemoteKey) -> Result<()> {
        if let Some((host, client)) = device.backend.simulated_client() {
            let mut world = self.world.lock();
            let region = world.with_hca(host, |hca, _| hca.query_memory_region(client, rkey))?;
            world.memory(host).unmap(region.memory);
        }
        Ok(())
    }
}

/// A card in virtual time, on a host of a world.
pub(crate) struct SimulatedHost {
    fabric: SimulatedFabric,
    host: HostId,
    client: LocalClient,
    flow_ids: FlowIds,
    random_draws: AtomicU64,
    /// Absent if data becomes visible in order.
    placement: Option<Arc<HostPlacement>>,
}

impl Runtime for SimulatedHost {
    fn stall(&self, time: Duration) -> Result<()> {
        let mut fabric = self.fabric.lock();
        let until = Instant::from_nanos(fabric.now().nanos() + time.as_nanos() as u64);
        fabric.stall(self.host, until);
        Ok(())
    }

    /// Puts a rule on every link that leaves the host. The seed of the world replaces `_seed`.
    fn add_rule(&self, _seed: u64, rule: Rule) {
        let mut fabric = self.fabric.lock();
        for (link, direction) in fabric.host(self.host).links().to_vec() {
            let mut rule = rule.clone();
            rule.selector.direction = Some(direction);
            fabric.add_rule(link, rule);
        }
    }

    /// Lets rules know a queue pair by its role.
    fn add_flow(&self, _seed: u64, flow: Flow) {
        self.fabric.lock().flows_mut().insert(flow);
    }

    /// The rules on the links that leave the host.
    fn rules(&self) -> Vec<(Rule, RuleCounters)> {
        let fabric = self.fabric.lock();
        let mut found: Vec<(RuleId, Rule, RuleCounters)> = Vec::new();
        for (link, direction) in fabric.host(self.host).links() {
            let leaving = fabric.link(*link).rules();
            for (rule, counters) in leaving.filter(|(rule, _)| rule.selector.direction == Some(*direction)) {
                match found.iter_mut().find(|(id, ..)| *id == rule.id) {
                    Some((.., sum)) => {
                        sum.matched += counters.matched;
                        sum.fired += counters.fired;
                    }
                    None => found.push((rule.id, rule.clone(), counters)),
                }
            }
        }
        found.into_iter().map(|(_, rule, counters)| (rule, counters)).collect()
    }

    fn profile(&self) -> &'static Profile {
        self.fabric.lock().host(self.host).hca().settings().profile
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

    fn wait(&self, notifier: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        loop {
            if notifier.count() != seen {
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
                    panic!("no event is scheduled in this World: the wait would never end")
                }
            }
        }
    }

    fn random(&self) -> u64 {
        let draw = self.random_draws.fetch_add(1, Ordering::Relaxed);
        self.fabric.lock().draw(&[0x7073_6e73, self.host.0.into(), draw])
    }

    fn endpoint_exchange(&self) -> EndpointExchange {
        self.fabric.endpoint_exchange()
    }

    fn simulated_client(&self) -> Option<(HostId, ClientId)> {
        Some((self.host, self.client.id))
    }
}

impl CardRuntime for SimulatedHost {
    fn client(&self) -> &LocalClient {
        &self.client
    }

    fn with_client(&self, client: LocalClient) -> SimulatedHost {
        let random_draws = AtomicU64::new(self.random_draws.load(Ordering::Relaxed));
        let SimulatedHost { ref fabric, host, flow_ids, ref placement, .. } = *self;
        let (fabric, placement) = (fabric.clone(), placement.clone());
        SimulatedHost { fabric, host, client, flow_ids, random_draws, placement }
    }

    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        self.fabric.lock().with_hca(self.host, act)
    }

    /// Rules select packets by flow ID, and by PSNs relative to the first of a queue pair.
    fn execute_command(&self, command: Command, attachments: &mut Attachments) -> Result<Reply> {
        let client = self.client.id;
        let started = command.qp_ready_to_send().filter(|_| self.flow_ids == FlowIds::Automatic);
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

    fn allocate_block(&self, length: usize) -> Result<Arc<MemoryBlock>> {
        let payload_mode = self.fabric.lock().host(self.host).hca().settings().payload_mode;
        let block = simulated_memory(length as u64, payload_mode);
        Ok(match &self.placement {
            Some(placement) => placement.wrap(block),
            None => block,
        })
    }

    fn add_memory(&self, block: Arc<MemoryBlock>) -> MemoryId {
        self.fabric.lock().memory(self.host).add(block)
    }

    fn remove_memory(&self, memory: MemoryId) {
        self.fabric.lock().memory(self.host).remove(memory);
    }

    fn on_doorbell(&self) {
        self.control(|_, _| ());
    }
}
