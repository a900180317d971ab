//! The real-time driver: one HCA, its sockets and its links, polled one bounded step at a time.
//!
//! The caller of [`Driver::poll`] drives: the driver has no thread and no lock. A poll processes doorbells and timers,
//! sends what the port admits, and receives what has arrived. The driver sends to a native peer only within the peer's
//! grants; receiving never waits for a grant. With [`Loopback::Internal`], the HCA receives its own packets from the
//! buffer in which it built them.

mod engine;
mod link;
mod receive;
mod slot;
mod transmit;

use crate::entropy::FlowSockets;
use crate::fault_injector::FaultInjector;
use crate::host_network::{HostNetwork, HostPort};
use crate::process_rings::ProcessRings;
use crate::subnet_port::{SubnetLink, SubnetPort};
use crate::system::{WakeSet, machine_number, monotonic_nanos, replace_descriptor};
use crate::{Entropy, HostSockets, LinkControl, LinkSecret, Loopback, ReceiveMemory, grant_budget};
use engine::Engine;
use link::Port;
use receive::Receiver;
use softhca_control::{DeviceChange, HandedOverPacket};
use softhca_engine::{
    Attachments, ClientId, Command, Context, Counters, Hca, Instant, MemoryObjects, PortState, Reply,
    Settings, VerbsError,
};
use softhca_fabric::{EventSink, Flow, HostProcesses, LinkState, Rule, RuleCounters};
use softhca_queue::SharedWords;
use softhca_types::InjectedEvent;
use softhca_wire::Gid;
use softhca_wire::link_control::Incarnation;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use transmit::Transmitter;

/// How many batches one poll may send before it receives: the HCA then receives its own packets while they are still in
/// the processor's cache.
const MAX_BATCHES_PER_POLL: usize = 4;
/// How far a rate-limited queue pair may catch up: about the wake-up latency of a thread.
const PACING_SLACK: Duration = Duration::from_micros(100);

/// How often counters are published.
const COUNTERS_INTERVAL: Duration = Duration::from_millis(10);

/// How the ICRC of received packets is checked.
///
/// The ICRC covers the IPv4 identification, which a socket does not report. Native ports use identifications 0 to 63,
/// which costs six bits of the ICRC's strength; a foreign port may use any, which costs sixteen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IcrcCheck {
    /// Accept only identifications 0 to 63.
    Strict,
    /// Strict for native peers, any identification for foreign and for unknown peers.
    #[default]
    Auto,
    /// Do not check.
    Ignore,
}

/// When packets have an ICRC. Packets that stay in memory have none unless somebody records them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IcrcMode {
    /// Always.
    #[default]
    Always,
    /// Not between two ports on one machine that both have this mode, while nobody records packets and no rule changes
    /// them. Linux leaves the checksums of TCP out in the same case.
    Offload,
}

/// The variable that sets the [`IcrcMode`].
pub const ICRC_VARIABLE: &str = "SOFTHCA_ICRC";

impl IcrcMode {
    /// The mode of a host of a daemon: always if its traffic to itself uses sockets, where somebody may look at it, else
    /// that of the environment.
    pub fn of(loopback: Loopback) -> io::Result<IcrcMode> {
        let from_environment = IcrcMode::from_environment()?;
        Ok(if loopback == Loopback::Socket { IcrcMode::Always } else { from_environment })
    }

    /// The mode in `SOFTHCA_ICRC`, or the default.
    pub fn from_environment() -> io::Result<IcrcMode> {
        let Some(value) = std::env::var_os(ICRC_VARIABLE) else { return Ok(IcrcMode::default()) };
        match value.to_str() {
            Some("always" | "") => Ok(IcrcMode::Always),
            Some("offload") => Ok(IcrcMode::Offload),
            _ => {
                let why = format!("{ICRC_VARIABLE}={} is neither `always` nor `offload`", value.display());
                Err(io::Error::new(io::ErrorKind::InvalidInput, why))
            }
        }
    }
}

/// The options of a driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct DriverOptions {
    /// The settings of the HCA.
    pub settings: Settings,
    /// How the ICRC is checked.
    pub icrc: IcrcCheck,
    /// When packets have an ICRC.
    pub icrc_mode: IcrcMode,
    /// How the UDP source port of packets is chosen.
    pub entropy: Entropy,
    /// How the host's traffic to itself is carried.
    pub loopback: Loopback,
}

/// One host in real time.
pub struct Driver {
    engine: Engine,
    port: Port,
    transmitter: Transmitter,
    receiver: Receiver,
    started: Clock,
    polled_at: Instant,
    sockets_polled_at: Instant,
    /// When the last packet arrived at a socket.
    sockets_received_at: Instant,
    /// Link control messages could not be sent between polls.
    needs_poll: bool,
    /// The driver neither sends nor receives before this time.
    stalled_until: Instant,
    /// The driver has no sockets any more.
    is_closed: bool,
    /// Hands packets for other slots over.
    hand_over: Option<HandOver>,
    /// Makes the counters visible to others.
    publish_counters: Option<PublishCounters>,
    counters_published_at: Instant,
    /// The counters of fault rules, if the processes of a host share them.
    rule_counters: Option<SharedWords>,
    removal_flag: Arc<AtomicBool>,
}

/// Hands packets over to the slots that they are for. Returns those that no process takes.
pub type HandOver = Box<dyn FnMut(Vec<HandedOverPacket>) -> Vec<HandedOverPacket> + Send>;

/// Makes the counters of an HCA visible to others.
pub type PublishCounters = Box<dyn Fn(&Counters) + Send>;

impl Driver {
    /// Drives a new HCA on these sockets.
    pub fn new(sockets: HostSockets, options: DriverOptions, sink: Box<dyn EventSink + Send>) -> Driver {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::from_secs(1));
        let incarnation = Incarnation::new(wall.as_nanos() as u64);
        // The grants of all peers fit into the smallest of the receive buffers.
        let buffer = sockets.by_address().map(|sockets| sockets.roce.receive_buffer()).min().unwrap_or(0);
        let mut settings = options.settings;
        settings.mtu = settings.mtu.min(sockets.active_mtu());
        if let Some(control) = &mut settings.congestion.rate_control {
            control.allow_slack(PACING_SLACK);
        }
        let mut links = LinkControl::new(incarnation, LinkSecret::from_system(), grant_budget(buffer), 0);
        links.set_slot(settings.qpn_slot);
        let addresses = sockets.by_address().map(HostSockets::address);
        links.set_own_addresses(addresses, options.loopback == Loopback::Internal);
        if !sockets.has_link_control() {
            links.disable();
        } else if options.icrc_mode == IcrcMode::Offload && options.icrc == IcrcCheck::Auto {
            links.set_machine(machine_number());
        }
        let flow_sockets = (options.entropy == Entropy::On).then(FlowSockets::default);
        let mut hca = Hca::new(settings, sockets.gids());
        if settings.seed == 0 {
            hca = hca.with_secret(crate::system::random_words());
        }
        let processes = HostProcesses::default();
        let removal_flag = processes.removal_flag();
        let started = Clock::start();
        hca.set_processes(Box::new(processes));
        Driver {
            engine: Engine::new(hca, sink),
            port: Port::new(sockets, flow_sockets, links),
            transmitter: Transmitter::new(started),
            receiver: Receiver::new(options.icrc),
            started,
            polled_at: Instant::from_nanos(0),
            sockets_polled_at: Instant::from_nanos(0),
            sockets_received_at: Instant::from_nanos(0),
            needs_poll: false,
            stalled_until: Instant::from_nanos(0),
            is_closed: false,
            hand_over: None,
            publish_counters: None,
            removal_flag,
            counters_published_at: Instant::from_nanos(0),
            rule_counters: None,
        }
    }

    /// The host's address, the first if it has two.
    pub fn address(&self) -> IpAddr {
        self.port.sockets.address()
    }

    /// Whether the device is removed, for callers that do not wait for the driver.
    pub fn removal_flag(&self) -> Arc<AtomicBool> {
        self.removal_flag.clone()
    }

    /// The start of the driver's clock.
    pub(crate) fn started(&self) -> std::time::Instant {
        self.started.instant
    }

    /// The time since the driver started.
    pub fn now(&self) -> Instant {
        self.started.now()
    }

    /// The start of the last poll.
    pub fn polled_at(&self) -> Instant {
        self.polled_at
    }

    /// The HCA.
    pub fn hca(&self) -> &Hca {
        &self.engine.hca
    }

    /// The links to peer ports.
    pub fn links(&self) -> &LinkControl {
        &self.port.links
    }

    /// The host's sockets.
    pub fn sockets(&self) -> &HostSockets {
        &self.port.sockets
    }

    /// The fill level and the drops of the receive buffers: RoCE first, then link control.
    pub fn receive_memory(&self) -> io::Result<[ReceiveMemory; 2]> {
        let sockets = self.sockets();
        Ok([sockets.roce.receive_memory()?, sockets.link.receive_memory()?])
    }

    /// Publishes the counters at least every ten milliseconds of polling, and before the thread sleeps.
    pub fn set_publish_counters(&mut self, publish: PublishCounters) {
        self.publish_counters = Some(publish);
    }

    fn publish_counters(&mut self, now: Instant) {
        if let Some(publish) = &self.publish_counters {
            publish(self.engine.hca.counters());
            self.counters_published_at = now;
        }
    }

    /// The memory behind memory regions.
    pub fn memory(&mut self) -> &mut MemoryObjects {
        &mut self.engine.memory
    }

    /// Executes a control verb: calls `act` with the HCA. It follows the work requests posted before it. Their packets and
    /// pending responses are sent before it where the port admits them; packets that it causes are sent at once.
    pub fn control<R>(&mut self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let now = self.now();
        self.engine.observe();
        self.engine.call(now, |hca, ctx| hca.process_doorbells(ctx));
        self.transmit_between_polls(now);
        let result = self.engine.call(now, act);
        let groups = || self.engine.hca.multicast_groups().map(Gid::ip);
        if self.port.subnet.is_none() && !self.receiver.multicast.matches(groups()) {
            let groups = groups().collect();
            self.receiver.multicast.update(&groups, &self.port.sockets, self.port.wake_set.as_deref());
        }
        self.transmit_between_polls(now);
        self.engine.sink.flush();
        result
    }

    /// Executes a control verb. Joining a multicast group fails if the network rejects it.
    pub fn execute(
        &mut self,
        client: ClientId,
        command: Command,
        attachments: &mut Attachments,
    ) -> Result<Reply, VerbsError> {
        let joined = match command {
            Command::AttachMulticast { qpn, group } => Some((qpn, group)),
            _ => None,
        };
        let reply = self.control(|hca, ctx| hca.execute(ctx, client, command, attachments))?;
        if let Some((qpn, group)) = joined
            && let Some(error) = self.receiver.multicast.join_error(group.ip())
        {
            let address = group.ip();
            let error = match (error.kind(), error.raw_os_error()) {
                (io::ErrorKind::Unsupported, None) => VerbsError::NetworkUnreachable { address },
                (_, errno) => {
                    VerbsError::MulticastJoinFailed { group: address, errno: errno.unwrap_or(libc::ENODEV) }
                }
            };
            let _ = self.control(|hca, _| hca.detach_multicast(client, qpn, group));
            return Err(error);
        }
        Ok(reply)
    }

    /// As [`Driver::poll`], and sends the ACKs of what it received: for a thread that received packets while the
    /// application waited. Programs that wait for events expect the completion of a send before that of its answer.
    pub fn poll_and_acknowledge(&mut self) -> io::Result<bool> {
        let moved = self.poll()?;
        if moved {
            self.transmit_between_polls(self.polled_at);
            self.engine.sink.flush();
        }
        Ok(moved)
    }

    /// Sends what is ready and requests the grants that it needs.
    fn transmit_between_polls(&mut self, now: Instant) {
        let mut has_sent = false;
        for _ in 0..if self.is_closed { 0 } else { MAX_BATCHES_PER_POLL } {
            // A failing socket fails again in the next poll, which returns the error.
            if !self.engine.hca.has_pending_transmit() || !self.transmit(now).unwrap_or(false) {
                break;
            }
            has_sent = true;
        }
        if has_sent {
            self.needs_poll |= self.port.transmit_link_messages(now.nanos()).is_err();
        }
    }

    fn transmit(&mut self, now: Instant) -> io::Result<bool> {
        self.transmitter.poll(now, &mut self.engine, &mut self.port, &mut self.receiver.packets)
    }

    /// Adds every descriptor that is not in [`Driver::descriptors`] to a wake set.
    pub(crate) fn set_wake_set(&mut self, wake_set: Arc<WakeSet>) -> io::Result<()> {
        for sockets in self.port.sockets.by_address().skip(1) {
            wake_set.add(sockets.roce.as_fd())?;
            wake_set.add(sockets.link.as_fd())?;
        }
        self.receiver.multicast.add_to_wake_set(&wake_set)?;
        if let Some(rings) = &self.port.rings {
            rings.wake_descriptors().try_for_each(|descriptor| wake_set.add(descriptor))?;
        }
        self.port.wake_set = Some(wake_set);
        Ok(())
    }

    fn fault_injector(&mut self, seed: u64) -> &mut FaultInjector {
        if self.transmitter.fault_injector.take_if(|faults| faults.is_idle()).is_some() {
            self.port.links.announce_in_order();
        }
        let counters = &self.rule_counters;
        let new = || FaultInjector::new(seed, counters.clone());
        self.transmitter.fault_injector.get_or_insert_with(new)
    }

    /// Lets the drivers of a host share the counters of their fault rules, which are added in the same order.
    pub fn share_rule_counters(&mut self, counters: SharedWords) {
        self.rule_counters = Some(counters);
    }

    /// Adds a fault rule in front of the sockets. From now on the driver sends packets one at a time.
    pub fn add_rule(&mut self, seed: u64, rule: Rule) {
        let faults = self.fault_injector(seed);
        faults.add_rule(rule);
        if faults.link.may_reorder() {
            self.port.links.announce_reordering();
        }
    }

    /// Lets fault rules address a queue pair by its role.
    pub fn add_flow(&mut self, seed: u64, flow: Flow) {
        self.fault_injector(seed).flows.insert(flow);
    }

    /// The fault rules and their counters.
    pub fn rules(&self) -> impl Iterator<Item = (&Rule, RuleCounters)> {
        self.transmitter.fault_injector.iter().flat_map(|faults| faults.link.rules())
    }

    /// The flows that fault rules know.
    pub fn flows(&self) -> impl Iterator<Item = &Flow> {
        self.transmitter.fault_injector.iter().flat_map(|faults| faults.flows.iter())
    }

    /// Removes all fault rules and flows. Delayed packets are still sent, one at a time.
    pub fn clear_rules(&mut self) {
        if let Some(faults) = &mut self.transmitter.fault_injector {
            faults.clear();
        }
    }

    /// Takes the port down or brings it up. While it is down, packets in both directions are lost. Applications get an
    /// asynchronous event.
    pub fn set_port_state(&mut self, state: PortState) {
        let link = match state {
            PortState::Down => LinkState::Down,
            PortState::Active => LinkState::Up,
        };
        self.fault_injector(0).set_link_state(link);
        self.control(|hca, ctx| hca.set_port_state(ctx, state));
    }

    /// Applies a change of the device of the host to this card.
    pub fn change_device(&mut self, change: &DeviceChange) {
        match change {
            DeviceChange::PortState(state) => self.set_port_state(*state),
            DeviceChange::Event(event) => {
                self.control(|hca, ctx| hca.raise_injected_event(ctx, *event, None));
            }
            DeviceChange::Trigger(trigger) => self.engine.hca.note_trigger(trigger),
            DeviceChange::FaultsEnded => {
                self.control(|hca, ctx| hca.end_device_faults(ctx));
                self.set_port_state(PortState::Active);
            }
        }
    }

    /// The event of the whole device that a fault of a program raised in the last call.
    pub fn take_raised_event(&mut self) -> Option<InjectedEvent> {
        self.engine.hca.take_raised_event()
    }

    /// Whether the link is down, and not only the port.
    pub fn is_link_down(&self) -> bool {
        self.transmitter.fault_injector.as_ref().is_some_and(FaultInjector::is_down)
    }

    /// Gives the ports up for good, so that another card can have them. Nothing is sent or received any more. `copies` are
    /// copies of [`Driver::descriptors`].
    pub fn close(&mut self, copies: [BorrowedFd<'_>; 2]) -> io::Result<()> {
        self.is_closed = true;
        self.port.sockets.release_ports()?;
        let own = self.descriptors();
        copies.into_iter().zip(own).try_for_each(|(copy, own)| replace_descriptor(copy, own))
    }

    /// Stalls the device: it neither sends nor receives for this time, as if its host stood still.
    pub fn stall(&mut self, time: Duration) {
        let until = Instant::from_nanos(self.now().nanos() + time.as_nanos() as u64);
        self.stalled_until = self.stalled_until.max(until);
    }

    /// Attaches the host to a network. Packets to the other attached hosts pass its switches instead of sockets.
    /// Packets from native peers on other machines pass the switch of this host. Multicast stays on sockets. Returns
    /// false if the network has no port for this host.
    pub fn attach_to_network(&mut self, network: Arc<HostNetwork>) -> bool {
        let rate = network.line_rate();
        self.port.network = HostPort::new(network, self.address());
        if let (Some(_), Some(rate)) = (&self.port.network, rate) {
            self.engine.hca.set_line_rate(rate.get());
        }
        self.port.network.is_some()
    }

    /// Makes the port of the host one of an InfiniBand subnet, which carries all of its packets. Nobody has opened the device
    /// yet.
    pub fn attach_to_subnet(&mut self, mut link: Box<dyn SubnetLink>) {
        let now = self.now();
        if let Some(port) = link.changed_port() {
            self.engine.call(now, |hca, ctx| hca.set_infiniband_port(ctx, port));
        }
        self.port.subnet = Some(SubnetPort::new(link));
    }

    /// The priorities that a peer has paused, as a mask: the driver does not send them to it now.
    pub fn priorities_paused_by(&self, peer: IpAddr) -> u8 {
        self.port.pauses.mask(peer.into())
    }

    /// The descriptors that become readable when a datagram arrives for the first address.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        let sockets = self.sockets();
        [sockets.roce.as_fd(), sockets.link.as_fd()]
    }

    /// Whether a packet is ready to be sent.
    pub fn has_pending_transmit(&self) -> bool {
        !self.is_closed && (self.engine.hca.has_pending_transmit() || self.transmitter.pending().is_some())
    }

    /// Whether a fault rule holds packets back for a while.
    pub(crate) fn has_delayed_packets(&self) -> bool {
        self.transmitter.fault_injector.as_ref().is_some_and(FaultInjector::has_packets)
    }

    /// How long until [`Driver::poll`] has work even if nothing arrives.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.next_deadline().map(|at| Duration::from_nanos(at.nanos().saturating_sub(self.now().nanos())))
    }

    /// When [`Driver::poll`] has work even if nothing arrives. A time in the past: at once.
    pub fn next_deadline(&self) -> Option<Instant> {
        let Driver { engine, port, transmitter, receiver, .. } = self;
        if self.polled_at < self.stalled_until {
            return Some(self.stalled_until);
        }
        let hca = engine.hca.next_timeout();
        if self.is_closed {
            return hca;
        }
        let has_more = port.subnet.as_ref().is_some_and(|subnet| subnet.has_more);
        if engine.hca.has_pending_transmit() || self.needs_poll || has_more {
            return Some(self.polled_at);
        }
        if let Some((batch, peer)) = transmitter.pending()
            && let now = self.now()
            && port.is_granted(batch, peer, now.nanos())
        {
            // The send buffer is full; on loopback it empties within microseconds.
            return Some(now.plus(Duration::from_micros(20)));
        }
        let faults = transmitter.fault_injector.as_ref();
        let mut next = hca.map_or(u64::MAX, Instant::nanos);
        let mut consider = |timeout: Option<u64>| next = next.min(timeout.unwrap_or(u64::MAX));
        consider(port.links.next_timeout());
        consider(port.pauses.next_timeout());
        consider(port.rings.as_ref().and_then(ProcessRings::next_timeout));
        consider(faults.and_then(|faults| faults.next_timeout(|frame| port.is_blocked_on_grant(frame))));
        consider(receiver.next_timeout());
        if let Some(wait) = port.network.as_ref().and_then(HostPort::next_timeout) {
            consider(Some(self.now().nanos() + wait));
        }
        (next < u64::MAX).then_some(Instant::from_nanos(next))
    }

    /// One bounded step: sends a few batches, or lets the HCA receive them itself, and receives at most one batch.
    /// Returns whether any packet moved.
    ///
    /// The next poll acknowledges what this one receives. If the application responds, the ACK leaves in one send with
    /// the response or after it ([`Settings::response_order`]).
    pub fn poll(&mut self) -> io::Result<bool> {
        self.poll_step(true)
    }

    /// As [`Driver::poll`], while another thread sleeps on the sockets: does not read them.
    pub(crate) fn poll_without_sockets(&mut self) -> io::Result<bool> {
        self.poll_step(false)
    }

    fn poll_step(&mut self, reads_sockets: bool) -> io::Result<bool> {
        let mut now = self.now();
        self.polled_at = now;
        if now < self.stalled_until {
            return Ok(false);
        }
        self.needs_poll = false;
        self.engine.observe();
        self.expire_pauses(now);
        let mut moved = self.poll_host_network(now) | self.poll_subnet(now);
        self.prepare_rings(now);
        let has_expired = self.engine.hca.next_timeout().is_some_and(|at| at <= now);
        if has_expired || self.is_closed {
            // An answer that has arrived ends its timer.
            moved |= self.receive_from_rings(now) > 0;
        }
        self.engine.call(now, |hca, ctx| {
            hca.process_doorbells(ctx);
            if has_expired {
                hca.expire(ctx);
            }
        });
        if self.is_closed {
            self.engine.sink.flush();
            return Ok(false);
        }
        moved |= self.transmit(now)?;
        let received = self.receive_from_rings(now);
        moved |= received > 0;
        if received > 1 {
            // The sender of a stream waits for its ACK. That of one message leaves with the response.
            moved |= self.transmit(now)?;
        }
        if reads_sockets && self.are_sockets_due(now) {
            self.sockets_polled_at = now;
            let started = self.started;
            // Timers that the packets start must not run since the beginning of the poll.
            now = started.now();
            if self.receiver.poll(now, || started.now(), &mut self.engine, &mut self.port)? {
                self.sockets_received_at = now;
                moved = true;
            }
        }
        if !self.receiver.packets.misdelivered.is_empty() {
            self.hand_over_misdelivered();
        }
        if reads_sockets {
            self.poll_links(now)?;
        }
        // Received packets make room for new grants; sent packets may require some.
        self.port.transmit_link_messages(now.nanos())?;
        self.engine.sink.flush();
        if now.since(self.counters_published_at) >= COUNTERS_INTERVAL {
            self.publish_counters(now);
        }
        Ok(moved)
    }

    /// Reads the error queues of the sockets at the next poll.
    pub fn on_socket_error(&mut self) {
        self.port.on_socket_error();
    }
}

/// The clock of a driver, which begins at zero.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    /// The start, in the time of [`monotonic_nanos`].
    nanos: u64,
    /// The start.
    instant: std::time::Instant,
}

impl Clock {
    fn start() -> Clock {
        Clock { nanos: monotonic_nanos(), instant: std::time::Instant::now() }
    }

    #[inline]
    pub fn now(self) -> Instant {
        // On Linux both clocks are one, and the first is read with fewer instructions.
        Instant::from_nanos(match cfg!(target_os = "linux") {
            true => monotonic_nanos().saturating_sub(self.nanos),
            false => self.instant.elapsed().as_nanos() as u64,
        })
    }
}
