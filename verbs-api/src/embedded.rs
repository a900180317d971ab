//! A card in this process: callers drive it when they poll, a thread of its own when nobody does.

use crate::backend::{Result, Runtime, check_process};
use crate::exit_cards;
use crate::local_backend::{CardRuntime, EventBus, LocalClient};
use crate::memory::MemoryBlock;
use crate::notifier::Notifier;
use crate::real_clock::real_now;
use crate::recording::DeviceRecordings;
use crate::{
    Device, EndpointExchange, Entropy, Error, IcrcCheck, IcrcMode, Loopback, Placement, Settings, VerbsError,
};
use softhca_engine::{
    AckPolicy, Attachments, Command, Context, DeviceLimits, Hca, Instant, MemoryId, Profile, Reply,
    ResponseOrder,
};
use softhca_fabric::{
    EventSink, Flow, LinkSettings, NetworkEvent, ReceiverSettings, Rule, RuleCounters, RuleId,
    SwitchSettings, Topology,
};
use softhca_queue::{SharedWords, SleepFlag};
use softhca_udp::{
    DrivePolicy, Driver, DriverOptions, HostNetwork, HostSockets, PollGate, ProcessIdentity, ReceiveMemory,
    SharedDriver, SocketOptions, bind_host,
};
use softhca_wire::Mtu;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A switch before the port of an embedded card, of its own: what arrives passes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortSwitch {
    /// The links of the switch: to the device and to its peers.
    pub line: LinkSettings,
    /// The thresholds at which the switch marks packets with ECN and sends PFC pauses.
    pub settings: SwitchSettings,
    /// How fast the device's port receives. It pauses the switch before it drops a packet.
    pub receiver: ReceiverSettings,
}

/// The options of an embedded device. Every field has a default:
///
/// ```
/// use softhca::{Device, EmbeddedOptions, Recovery};
///
/// let mut options = EmbeddedOptions::default();
/// options.settings.recovery = Recovery::GoBackN;
/// let device = Device::embedded_with(options)?;
/// # Ok::<(), softhca::Error>(())
/// ```
pub struct EmbeddedOptions {
    /// The host's address; without one, `SOFTHCA_ADDRESS` or the first of 127.0.0.2, 127.0.0.3, … that is free.
    pub address: Option<IpAddr>,
    /// The host's IPv6 address beside an IPv4 one: its GID 1. Without one, a host on a network takes that of its
    /// interface, if there is one and it is free.
    pub ipv6: Option<Ipv6Addr>,
    /// The source port of packets: one for all, or one for each flow, as routers with ECMP expect.
    pub entropy: Entropy,
    /// How traffic of the host to itself is carried.
    pub loopback: Loopback,
    /// The settings of the card. With a seed of 0, keys and numbers are unpredictable: the operating system's random
    /// number generator decides them.
    pub settings: Settings,
    /// How the invariant CRC of arriving packets is checked.
    pub icrc: IcrcCheck,
    /// When packets have an invariant CRC; without a mode, what `SOFTHCA_ICRC` says (`always` or `offload`), else
    /// `always`.
    pub icrc_mode: Option<IcrcMode>,
    /// How many bytes of receive buffer to ask for. Linux doubles it, and gives less where it is above the
    /// system's limit (`net.core.rmem_max`) and the process has no CAP_NET_ADMIN.
    pub receive_buffer: u32,
    /// Whether the card has link control. Without it, the card is a foreign peer for others, and every peer is foreign
    /// for it: packets may be lost.
    pub link_control: bool,
    /// A switch in front of the port, which queues, marks and pauses packets of native peers. `None`: no switch.
    pub switch: Option<PortSwitch>,
    /// A file for the event log of the device, which `softhca why` reads; without one, that of `SOFTHCA_LOG`. All devices
    /// of the process with the same path share the file. `%p` stands for the number of the process.
    pub log: Option<PathBuf>,
    /// A file for a capture of the packets that the device sends; without one, that of `SOFTHCA_CAPTURE`. As `log`.
    pub capture: Option<PathBuf>,
    /// Receives every event and every packet of the device, on the thread that drives it.
    pub event_sink: Box<dyn EventSink + Send>,
}

impl Default for EmbeddedOptions {
    fn default() -> EmbeddedOptions {
        EmbeddedOptions {
            address: None,
            ipv6: None,
            entropy: Entropy::Off,
            loopback: Loopback::Socket,
            settings: Settings {
                ack_policy: AckPolicy::Coalesce,
                response_order: ResponseOrder::ResponseFirst,
                min_ack_timeout: Duration::from_millis(500),
                ..Settings::default()
            },
            icrc: IcrcCheck::default(),
            icrc_mode: None,
            receive_buffer: SocketOptions::default().receive_buffer as u32,
            link_control: true,
            switch: None,
            log: None,
            capture: None,
            event_sink: Box::new(()),
        }
    }
}

impl Device {
    /// Creates a device in this process, on a free loopback address. It needs no daemon, no privileges and no setup.
    pub fn embedded() -> Result<Device> {
        Device::embedded_with(EmbeddedOptions::default())
    }

    /// Creates a device in this process with options.
    pub fn embedded_with(options: EmbeddedOptions) -> Result<Device> {
        if options.settings.placement != Placement::InOrder {
            let why = "only simulated devices place data in another order than `in-order`";
            return Err(VerbsError::Invalid { what: "placement", why }.into());
        }
        let receive_buffer = options.receive_buffer as usize;
        let buffers = SocketOptions { receive_buffer, ..SocketOptions::default() };
        let sockets = match options.address {
            Some(address) => HostSockets::bind_dual_stack(address, options.ipv6, buffers)?,
            None => match options.ipv6 {
                None => bind_host(buffers)?,
                ipv6 => bind_host(buffers)?.with_ipv6(ipv6, buffers)?,
            },
        };
        let sockets = if options.link_control { sockets } else { sockets.without_link_control(buffers)? };
        let EmbeddedOptions { settings, icrc, entropy, loopback, .. } = options;
        let icrc_mode = match options.icrc_mode {
            Some(mode) => mode,
            None => IcrcMode::from_environment()
                .map_err(|source| Error::System { what: "reading the environment", source })?,
        };
        let driver = DriverOptions { settings, icrc, icrc_mode, entropy, loopback };
        let recordings = DeviceRecordings::open(options.log, options.capture, sockets.address())?;
        let card = start(sockets, driver, options.switch, recordings, options.event_sink)?;
        let address = card.driver.control(|driver| driver.address());
        Ok(Device::new(Arc::new(card), address))
    }

    /// The fill level of the receive buffers of an embedded device's sockets and the datagrams that they dropped: RoCE
    /// first, then link control. `None` for other devices.
    pub fn receive_buffer_usage(&self) -> Result<Option<[ReceiveMemory; 2]>> {
        self.backend.receive_buffer_usage()
    }
}

/// Passes events to the event bus and to another sink.
pub(crate) struct EventForwarder {
    pub event_bus: Arc<EventBus>,
    pub forward_to: Box<dyn EventSink + Send>,
}

impl EventSink for EventForwarder {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Hca { event, .. } = event {
            self.event_bus.dispatch(event);
        }
        self.forward_to.on_event(now, event);
    }

    fn is_enabled(&self) -> bool {
        self.forward_to.is_enabled()
    }

    fn flush(&mut self) {
        self.forward_to.flush();
    }
}

/// The host of a card. By default the process is a host of its own.
pub(crate) trait CardHost: Send + Sync {
    fn is_alive(&self) -> bool {
        true
    }
    fn device_name(&self) -> &str {
        "softhca0"
    }
    /// The limits, if they are not those of the profile.
    fn limits(&self) -> Option<DeviceLimits> {
        None
    }
    fn resolve_host(&self, name: &str) -> Option<IpAddr> {
        let _ = name;
        None
    }
    /// The card has a driver from now on.
    fn attach(&self, driver: &Arc<SharedDriver>) {
        let _ = driver;
    }
    /// Executes a control verb.
    fn execute(
        &self,
        card: &EmbeddedRuntime,
        command: Command,
        attachments: &mut Attachments,
    ) -> Result<Reply> {
        card.execute_in_card(command, attachments)
    }
}

struct OwnHost;

impl CardHost for OwnHost {}

/// A card in this process, on real sockets: callers drive it when they poll.
pub(crate) struct EmbeddedRuntime {
    pub driver: Arc<SharedDriver>,
    pub client: LocalClient,
    process: ProcessIdentity,
    recordings: Arc<DeviceRecordings>,
    host: Arc<dyn CardHost>,
}

/// Builds the switch before the card with this address.
fn build_switch(
    switch: &PortSwitch,
    address: IpAddr,
    recordings: &DeviceRecordings,
) -> Result<Arc<HostNetwork>> {
    let (topology, sink) = (Topology::Star { hosts: 1 }, recordings.switch_sink());
    let network =
        HostNetwork::with_sink(0, &[address], &topology, switch.line, switch.settings, sink).map_err(
            |error| Error::System { what: "building the card's switch", source: io::Error::other(error) },
        )?;
    recordings.name_network(&network);
    network.set_receiver(address, switch.receiver);
    Ok(network)
}

/// Starts a card on these sockets.
fn start(
    sockets: HostSockets,
    options: DriverOptions,
    switch: Option<PortSwitch>,
    recordings: DeviceRecordings,
    sink: Box<dyn EventSink + Send>,
) -> Result<EmbeddedRuntime> {
    let event_bus = Arc::new(EventBus::default());
    let sink = EventForwarder { event_bus: event_bus.clone(), forward_to: recordings.sink(sink) };
    let address = sockets.address();
    let network = switch.map(|switch| build_switch(&switch, address, &recordings)).transpose()?;
    let mut driver = Driver::new(sockets, options, Box::new(sink));
    if let Some(network) = &network {
        driver.attach_to_network(network.clone());
    }
    let card = EmbeddedRuntime::start(driver, event_bus, Arc::new(recordings), Arc::new(OwnHost))?;
    if let Some(descriptor) = network.as_ref().and_then(|network| network.wake_descriptor(address)) {
        let listen = card.driver.add_wake_source(descriptor);
        listen.map_err(|source| Error::System { what: "listening to the card's switch", source })?;
    }
    Ok(card)
}

impl EmbeddedRuntime {
    /// Starts the thread of a card.
    pub fn start(
        driver: Driver,
        event_bus: Arc<EventBus>,
        recordings: Arc<DeviceRecordings>,
        host: Arc<dyn CardHost>,
    ) -> Result<EmbeddedRuntime> {
        let sleep_flag = SleepFlag::new(SharedWords::heap(SleepFlag::WORDS));
        let driver = SharedDriver::start(driver, DrivePolicy::Callers, sleep_flag)
            .map(Arc::new)
            .map_err(|source| Error::System { what: "starting the card's thread", source })?;
        exit_cards::add(&driver);
        let open = |doorbell| driver.control(|driver| driver.control(|hca, _| hca.open_client(doorbell)));
        let client = LocalClient::open(event_bus, open)?;
        host.attach(&driver);
        Ok(EmbeddedRuntime { driver, client, process: ProcessIdentity::current(), recordings, host })
    }

    /// Executes a control verb without its host.
    pub fn execute_in_card(&self, command: Command, attachments: &mut Attachments) -> Result<Reply> {
        Ok(self.driver.control(|driver| driver.execute(self.client.id, command, attachments))?)
    }
}

impl Runtime for EmbeddedRuntime {
    fn check_process(&self) -> Result<()> {
        check_process(&self.process)
    }

    fn is_alive(&self) -> bool {
        self.host.is_alive()
    }

    fn device_name(&self) -> &str {
        self.host.device_name()
    }

    fn profile(&self) -> &'static Profile {
        self.driver.control(|driver| driver.hca().settings().profile)
    }

    fn limits(&self) -> DeviceLimits {
        self.host.limits().unwrap_or_else(|| self.profile().limits())
    }

    fn receive_buffer_usage(&self) -> Result<Option<[ReceiveMemory; 2]>> {
        let used = self.driver.control(|driver| driver.receive_memory());
        used.map(Some).map_err(|source| Error::System { what: "asking the card's sockets", source })
    }

    fn stall(&self, time: Duration) -> Result<()> {
        self.driver.control(|driver| driver.stall(time));
        Ok(())
    }

    fn add_rule(&self, seed: u64, rule: Rule) {
        self.driver.control(|driver| driver.add_rule(seed, rule));
    }

    fn name_rule(&self, rule: RuleId, name: &str) {
        self.recordings.name_rule(rule, name);
    }

    fn add_flow(&self, seed: u64, flow: Flow) {
        self.driver.control(|driver| driver.add_flow(seed, flow));
    }

    fn rules(&self) -> Vec<(Rule, RuleCounters)> {
        self.driver
            .control(|driver| driver.rules().map(|(rule, counters)| (rule.clone(), counters)).collect())
    }

    fn active_mtu(&self) -> Mtu {
        self.driver.control(|driver| driver.hca().settings().mtu)
    }

    fn resolve_host(&self, name: &str) -> Option<IpAddr> {
        self.host.resolve_host(name)
    }

    fn drive(&self) -> bool {
        self.driver.drive()
    }

    fn poll_gate(&self) -> Option<Arc<PollGate>> {
        Some(self.driver.poll_gate())
    }

    fn hand_over(&self) {
        self.driver.hand_over();
    }

    fn allow_silent_waits(&self) {
        self.driver.allow_silent_waits();
    }

    fn now(&self) -> Instant {
        real_now()
    }

    fn spin_wait(&self, notifier: &Notifier, seen: u64) -> bool {
        self.driver.spin(|| notifier.count() != seen)
    }

    fn wait(&self, notifier: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        notifier.wait(seen, until.map(|until| until.since(real_now())))
    }

    fn wait_readable(&self, descriptors: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
        self.driver.wait_readable(descriptors, timeout)
    }

    fn random(&self) -> u64 {
        softhca_udp::random_words()[0]
    }

    fn endpoint_exchange(&self) -> EndpointExchange {
        EndpointExchange::process_wide()
    }
}

impl CardRuntime for EmbeddedRuntime {
    fn client(&self) -> &LocalClient {
        &self.client
    }

    fn with_client(&self, client: LocalClient) -> EmbeddedRuntime {
        let (driver, recordings, host) = (self.driver.clone(), self.recordings.clone(), self.host.clone());
        EmbeddedRuntime { driver, client, process: self.process, recordings, host }
    }

    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        self.driver.control(|driver| driver.control(act))
    }

    fn execute_command(&self, command: Command, attachments: &mut Attachments) -> Result<Reply> {
        self.host.execute(self, command, attachments)
    }

    fn add_memory(&self, block: Arc<MemoryBlock>) -> MemoryId {
        self.driver.control(|driver| driver.memory().add(block))
    }

    fn remove_memory(&self, memory: MemoryId) {
        self.driver.control(|driver| driver.memory().remove(memory));
    }

    fn on_doorbell(&self) {
        self.driver.on_doorbell();
    }
}
