//! A card in this process: callers drive it when they poll, a thread of its own when nobody does.

use crate::backend::Result;
use crate::local_backend::{CardRuntime, EventBus, LocalBackend};
use crate::memory::{MemoryBlock, MemoryTable};
use crate::notifier::Notifier;
use crate::time::real_now;
use crate::{EndpointExchange, Error, PortSwitch};
use softhca_engine::{Attachments, ClientId, Command, Context, Hca, Instant, MemoryId, Reply, VerbsError};
use softhca_fabric::{EventSink, Flow, NetworkEvent, Rule, RuleCounters, Topology};
use softhca_queue::SharedWords;
use softhca_udp::{
    DrivePolicy, Driver, DriverOptions, HostNetwork, HostSockets, ProcessIdentity, ReceiveMemory,
    SharedDriver,
};
use softhca_wire::Mtu;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// How long a caller that waits for an event of a connection drives before it sleeps.
const CM_SPIN_TIME: Duration = Duration::from_micros(50);

/// Reads the card's events for the board, and passes everything on.
struct EventForwarder {
    event_bus: Arc<EventBus>,
    forward_to: Box<dyn EventSink + Send>,
}

impl EventSink for EventForwarder {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Hca { event, .. } = event {
            self.event_bus.dispatch(event);
        }
        self.forward_to.on_event(now, event);
    }
}

/// A card in this process, on real sockets.
pub(crate) type EmbeddedBackend = LocalBackend<EmbeddedRuntime>;

/// The station of an embedded card: callers drive it when they poll.
pub(crate) struct EmbeddedRuntime {
    driver: SharedDriver<MemoryTable>,
    process: ProcessIdentity,
}

/// Builds the switch before the card with this address.
fn build_switch(switch: &PortSwitch, address: IpAddr) -> Result<Arc<HostNetwork>> {
    let topology = Topology::Star { hosts: 1 };
    let backbone =
        HostNetwork::new(0, &[address], &topology, switch.line, switch.settings).map_err(|error| {
            Error::System { what: "building the card's switch", source: io::Error::other(error) }
        })?;
    backbone.set_receiver(address, switch.receiver);
    Ok(backbone)
}

/// Starts a card on these sockets.
pub(crate) fn start(
    sockets: HostSockets,
    options: DriverOptions,
    switch: Option<PortSwitch>,
    sink: Box<dyn EventSink + Send>,
) -> Result<EmbeddedBackend> {
    let board = Arc::new(EventBus::default());
    let reader = EventForwarder { event_bus: board.clone(), forward_to: sink };
    let address = sockets.address();
    let backbone = switch.map(|switch| build_switch(&switch, address)).transpose()?;
    let mut driver = Driver::new(sockets, options, MemoryTable::default(), Box::new(reader));
    if let Some(backbone) = &backbone {
        driver.attach_to_network(backbone.clone());
    }
    let station = SharedDriver::start(driver, DrivePolicy::Callers, SharedWords::heap(1))
        .map_err(|source| Error::System { what: "starting the card's thread", source })?;
    if let Some(bell) = backbone.as_ref().and_then(|backbone| backbone.wake_descriptor(address)) {
        let listen = station.add_wake_source(bell);
        listen.map_err(|source| Error::System { what: "listening to the card's switch", source })?;
    }
    LocalBackend::new(EmbeddedRuntime { driver: station, process: ProcessIdentity::current() }, board)
}

/// Refuses in a child of the process that `mark` stands for.
pub(crate) fn check_process(mark: &ProcessIdentity) -> Result<()> {
    if mark.is_current() { Ok(()) } else { Err(Error::Forked { parent: mark.pid }) }
}

impl EmbeddedRuntime {
    pub fn address(&self) -> IpAddr {
        self.driver.control(|driver| driver.address())
    }

    pub fn receive_buffer_usage(&self) -> Result<[ReceiveMemory; 2]> {
        self.driver
            .control(|driver| driver.receive_memory())
            .map_err(|source| Error::System { what: "asking the card's sockets", source })
    }

    pub fn add_rule(&self, seed: u64, rule: Rule) {
        self.driver.control(|driver| driver.add_rule(seed, rule));
    }

    pub fn add_flow(&self, seed: u64, flow: Flow) {
        self.driver.control(|driver| driver.add_flow(seed, flow));
    }

    pub fn rules(&self) -> Vec<(Rule, RuleCounters)> {
        self.driver.control(|driver| driver.rules().map(|(rule, tally)| (rule.clone(), tally)).collect())
    }
}

impl CardRuntime for EmbeddedRuntime {
    fn check_process(&self) -> Result<()> {
        check_process(&self.process)
    }

    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        self.driver.control(|driver| driver.control(act))
    }

    fn execute(
        &self,
        client: ClientId,
        command: Command,
        attachments: &mut Attachments,
    ) -> std::result::Result<Reply, VerbsError> {
        self.driver.control(|driver| driver.execute(client, command, attachments))
    }

    fn add_memory(&self, block: Arc<MemoryBlock>) -> MemoryId {
        self.driver.control(|driver| driver.memory().add(block))
    }

    fn remove_memory(&self, memory: MemoryId) {
        self.driver.control(|driver| driver.memory().remove(memory));
    }

    fn on_doorbell(&self) {
        self.driver.wake();
    }

    fn active_mtu(&self) -> Mtu {
        self.driver.control(|driver| driver.hca().settings().mtu)
    }

    fn resolve_host(&self, _: &str) -> Option<IpAddr> {
        None
    }

    fn drive(&self) {
        self.driver.drive();
    }

    fn now(&self) -> Instant {
        real_now()
    }

    fn spin_wait(&self, news: &Notifier, seen: u64) {
        let until = std::time::Instant::now() + CM_SPIN_TIME;
        while news.count() == seen {
            if std::time::Instant::now() >= until {
                return self.driver.hand_over();
            }
            self.driver.drive();
        }
    }

    fn wait(&self, news: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        news.wait(seen, until.map(|until| until.since(real_now())))
    }

    fn random(&self) -> u64 {
        RandomState::new().hash_one(0)
    }

    fn endpoint_exchange(&self) -> EndpointExchange {
        EndpointExchange::process_wide()
    }
}
