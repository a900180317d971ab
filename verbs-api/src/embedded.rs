//! A card in this process: callers drive it when they poll, a thread of its own when nobody does.

use crate::backend::{Result, Runtime, check_process};
#[cfg(target_os = "linux")]
use crate::daemon::direct::DirectHost;
use crate::exit_cards;
use crate::local_backend::{CardRuntime, EventBus, LocalClient};
use crate::memory::MemoryBlock;
use crate::notifier::Notifier;
use crate::real_clock::real_now;
use crate::recording::DeviceRecordings;
use crate::{Device, EndpointExchange, Entropy, Error, IcrcCheck, Loopback, Settings, VerbsError};
use softhca_engine::{
    AckPolicy, Attachments, Command, Context, DeviceLimits, Hca, Instant, MemoryId, Reply, ResponseOrder,
};
use softhca_fabric::{
    EventSink, Flow, LinkSettings, NetworkEvent, ReceiverSettings, Rule, RuleCounters, RuleId,
    SwitchSettings, Topology,
};
use softhca_queue::{SharedWords, SleepFlag};
#[cfg(target_os = "linux")]
use softhca_types::{ModifyQp, cm, reply};
use softhca_udp::{
    DrivePolicy, Driver, DriverOptions, HostNetwork, HostSockets, ProcessIdentity, ReceiveMemory,
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
        let driver = DriverOptions { settings, icrc, entropy, loopback };
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

/// A card in this process, on real sockets: callers drive it when they poll.
pub(crate) struct EmbeddedRuntime {
    driver: Arc<SharedDriver>,
    client: LocalClient,
    process: ProcessIdentity,
    recordings: Arc<DeviceRecordings>,
    /// The host of a daemon that gave this process its sockets.
    #[cfg(target_os = "linux")]
    direct: Option<Arc<DirectHost>>,
}

/// Starts a card on sockets that a daemon gave this process.
#[cfg(target_os = "linux")]
pub(crate) fn start_direct(
    driver: Driver,
    event_bus: Arc<EventBus>,
    host: DirectHost,
) -> Result<EmbeddedRuntime> {
    let driver = share(driver)?;
    host.attach(&driver);
    let client = open_client(&driver, event_bus)?;
    Ok(EmbeddedRuntime {
        driver,
        client,
        process: ProcessIdentity::current(),
        recordings: Arc::default(),
        direct: Some(Arc::new(host)),
    })
}

/// Starts the thread of a card.
fn share(driver: Driver) -> Result<Arc<SharedDriver>> {
    let sleep_flag = SleepFlag::new(SharedWords::heap(SleepFlag::WORDS));
    let card = SharedDriver::start(driver, DrivePolicy::Callers, sleep_flag)
        .map(Arc::new)
        .map_err(|source| Error::System { what: "starting the card's thread", source })?;
    exit_cards::add(&card);
    Ok(card)
}

fn open_client(driver: &SharedDriver, event_bus: Arc<EventBus>) -> Result<LocalClient> {
    let open = |doorbell| driver.control(|driver| driver.control(|hca, _| hca.open_client(doorbell)));
    LocalClient::open(event_bus, open)
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
    let driver = share(driver)?;
    if let Some(descriptor) = network.as_ref().and_then(|network| network.wake_descriptor(address)) {
        let listen = driver.add_wake_source(descriptor);
        listen.map_err(|source| Error::System { what: "listening to the card's switch", source })?;
    }
    Ok(EmbeddedRuntime {
        client: open_client(&driver, event_bus)?,
        driver,
        process: ProcessIdentity::current(),
        recordings: Arc::new(recordings),
        #[cfg(target_os = "linux")]
        direct: None,
    })
}

impl EmbeddedRuntime {
    /// Executes a control verb in a process of a daemon's host.
    #[cfg(target_os = "linux")]
    fn execute_direct(
        &self,
        host: &DirectHost,
        command: Command,
        attachments: &mut Attachments,
    ) -> Result<Reply> {
        let client = self.client.id;
        host.check_limit(&command)?;
        let (creates, destroys) = (command.creates(), command.destroys());
        let ready = command.qp_ready_to_receive().or(command.qp_ready_to_send());
        let reply = self.driver.control(|driver| driver.execute(client, command, attachments))?;
        host.count(creates, destroys);
        host.on_command(ready, |qpn| {
            self.driver.control(|driver| driver.hca().query_queue_pair(client, qpn))
        })?;
        Ok(reply)
    }

    /// Executes a call to the connection manager in a process of a daemon's host.
    #[cfg(target_os = "linux")]
    fn execute_direct_cm(&self, host: &DirectHost, command: cm::Command) -> Result<cm::Reply> {
        host.execute_cm(command, |command| {
            let reply = self.execute_direct(host, Command::Cm(command), &mut Attachments::default())?;
            Ok(reply!(reply, Reply::Cm(reply) => reply))
        })
    }

    #[cfg(target_os = "linux")]
    fn host(&self) -> Option<&DirectHost> {
        self.direct.as_deref()
    }
}

impl Runtime for EmbeddedRuntime {
    fn check_process(&self) -> Result<()> {
        check_process(&self.process)
    }

    #[cfg(target_os = "linux")]
    fn is_alive(&self) -> bool {
        self.host().is_none_or(DirectHost::is_alive)
    }

    fn device_name(&self) -> &str {
        #[cfg(target_os = "linux")]
        if let Some(host) = self.host() {
            return &host.device.device_name;
        }
        "softhca0"
    }

    fn limits(&self) -> DeviceLimits {
        #[cfg(target_os = "linux")]
        if let Some(host) = self.host() {
            return host.limits();
        }
        DeviceLimits::HCA
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
        #[cfg(target_os = "linux")]
        if let Some(host) = self.host() {
            return host.resolve_host(name);
        }
        let _ = name;
        None
    }

    fn drive(&self) -> bool {
        self.driver.drive()
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
        EmbeddedRuntime {
            driver: self.driver.clone(),
            client,
            process: self.process,
            recordings: self.recordings.clone(),
            #[cfg(target_os = "linux")]
            direct: self.direct.clone(),
        }
    }
    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        self.driver.control(|driver| driver.control(act))
    }

    fn execute_command(&self, command: Command, attachments: &mut Attachments) -> Result<Reply> {
        #[cfg(target_os = "linux")]
        if let Some(host) = self.host() {
            // Only what frees resources, and the events that are left, still work without the daemon.
            let is_refused = !host.is_alive()
                && command.destroys().is_none()
                && !matches!(command, Command::Cm(cm::Command::GetEvent(_)));
            let result = match &command {
                _ if is_refused => Err(host.gone()),
                Command::Cm(command) => self.execute_direct_cm(host, command.clone()).map(Reply::Cm),
                // The daemon is to know each state before the next step.
                Command::TransitionQueuePair(transition) if host.has_roles() => {
                    let manage = |_: &mut (), command| self.execute_direct_cm(host, command);
                    let modify = |_: &mut (), attributes: &ModifyQp| {
                        let (qpn, modify) = (transition.qpn, *attributes);
                        let command = Command::ModifyQueuePair { qpn, modify };
                        self.execute_direct(host, command, attachments).map(drop)
                    };
                    transition.execute(&mut (), manage, modify).map(Reply::Cm)
                }
                // The daemon notifies all processes of the host.
                Command::RaiseEvent { object: None, .. } | Command::NoteTrigger(_) => host.request(command),
                _ => self.execute_direct(host, command, attachments),
            };
            // The daemon may have ended since, and the device failed with it.
            return match result {
                Err(Error::Verbs(VerbsError::DeviceFailed)) if !host.is_alive() => Err(host.gone()),
                result => result,
            };
        }
        Ok(self.driver.control(|driver| driver.execute(self.client.id, command, attachments))?)
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
}
