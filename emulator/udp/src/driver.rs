//! The real-time driver: one HCA, its sockets and its links, polled one bounded step at a time.
//!
//! The caller of [`Driver::poll`] drives: the driver has no thread and no lock. A poll processes doorbells and timers,
//! sends what the port admits, and receives what has arrived. The driver sends to a native peer only within the peer's
//! grants; receiving never waits for a grant. With [`Loopback::Internal`], the HCA receives its own packets from the
//! buffer in which it built them.

mod engine;
mod link;
mod receive;
mod transmit;

use crate::entropy::FlowSockets;
use crate::fault_injector::FaultInjector;
use crate::host_network::{HostNetwork, HostPort};
use crate::process_rings::ProcessRings;
use crate::system::WakeSet;
use crate::{
    Chunk, Entropy, HostSockets, LinkControl, LinkSecret, Loopback, OpenRings, OpenSendSocket, PeerPort,
    ReceiveMemory, RingPair, grant_budget,
};
use engine::Engine;
use link::Port;
use receive::{Arrival, Receiver};
use softhca_engine::{
    Attachments, ClientId, Command, Context, Counters, Hca, Instant, Memory, Peer, PortState, Reply,
    Settings, VerbsError,
};
use softhca_fabric::{EventSink, Flow, LinkState, Rule, RuleCounters, RuleId};
use softhca_queue::{AckRecords, HandedOverPacket, PacketChunk, RecordedAck};
use softhca_wire::link_control::Incarnation;
use softhca_wire::{AddressHeaders, Gid, QpnSlot, ROCE_PORT};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use transmit::Transmitter;

/// How many batches one poll may send before it receives: the HCA then receives its own packets while they are still in
/// the processor's cache.
const MAX_BATCHES_PER_POLL: usize = 4;
/// How far a rate-limited queue pair may catch up: about the wake-up latency of a thread.
const PACING_SLACK: Duration = Duration::from_micros(100);

/// The most polls that receive the last packets of another process: more than a full ring of ACKs takes.
const MAX_LAST_POLLS: usize = 4096;

/// While rings carry packets, sockets are read at this interval: every read is a system call.
const SOCKET_INTERVAL: Duration = Duration::from_micros(5);
/// For how long after a packet rings count as carrying packets.
const RINGS_ACTIVE: Duration = Duration::from_micros(100);

/// The most packets that are handed over together: fewer bytes than a message of the control protocol may have.
const MAX_HANDED_OVER: usize = 32;

/// How often counters are published.
const COUNTERS_INTERVAL: Duration = Duration::from_millis(1);

/// How the ICRC of received packets is checked.
///
/// The ICRC covers the IPv4 identification, which a socket does not report. Native ports use identifications 0 to 63,
/// which costs six bits of the ICRC's strength; a foreign port may use any, which costs sixteen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IcrcCheck {
    /// Accept only identifications 0 to 63.
    Strict,
    /// Strict for native peers, any identification for foreign peers.
    #[default]
    Auto,
    /// Do not check.
    Ignore,
}

/// The options of a driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct DriverOptions {
    /// The settings of the HCA.
    pub settings: Settings,
    /// How the ICRC is checked.
    pub icrc: IcrcCheck,
    /// How the UDP source port of packets is chosen.
    pub entropy: Entropy,
    /// How the host's traffic to itself is carried.
    pub loopback: Loopback,
}

/// One host in real time.
pub struct Driver<M> {
    engine: Engine<M>,
    port: Port,
    transmitter: Transmitter,
    receiver: Receiver,
    started: std::time::Instant,
    polled_at: Instant,
    sockets_polled_at: Instant,
    /// Link control messages could not be sent between polls.
    needs_poll: bool,
    /// The driver neither sends nor receives before this time.
    stalled_until: Instant,
    /// Hands packets for other slots over.
    hand_over: Option<HandOver>,
    /// Makes the counters visible to others.
    publish_counters: Option<PublishCounters>,
    counters_published_at: Instant,
}

/// Hands packets over to the slots that they are for. Returns those that no process takes.
pub type HandOver = Box<dyn FnMut(Vec<HandedOverPacket>) -> Vec<HandedOverPacket> + Send>;

/// Makes the counters of an HCA visible to others.
pub type PublishCounters = Box<dyn Fn(&Counters, &mut dyn Iterator<Item = (RuleId, RuleCounters)>) + Send>;

impl<M: Memory> Driver<M> {
    /// Drives a new HCA on these sockets.
    pub fn new(
        sockets: HostSockets,
        options: DriverOptions,
        memory: M,
        sink: Box<dyn EventSink + Send>,
    ) -> Driver<M> {
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
        }
        let flow_sockets = (options.entropy == Entropy::On).then(FlowSockets::default);
        let mut hca = Hca::new(settings, sockets.gids());
        if settings.seed == 0 {
            hca = hca.with_secret(crate::system::random_words());
        }
        Driver {
            engine: Engine { hca, memory, sink },
            port: Port::new(sockets, flow_sockets, links),
            transmitter: Transmitter::new(),
            receiver: Receiver::new(options.icrc),
            started: std::time::Instant::now(),
            polled_at: Instant::from_nanos(0),
            sockets_polled_at: Instant::from_nanos(0),
            needs_poll: false,
            stalled_until: Instant::from_nanos(0),
            hand_over: None,
            publish_counters: None,
            counters_published_at: Instant::from_nanos(0),
        }
    }

    /// The host's address, the first if it has two.
    pub fn address(&self) -> IpAddr {
        self.port.sockets.address()
    }

    /// The start of the driver's clock.
    pub(crate) fn started(&self) -> std::time::Instant {
        self.started
    }

    /// The time since the driver started.
    pub fn now(&self) -> Instant {
        now_since(self.started)
    }

    /// The start of the last poll.
    pub fn polled_at(&self) -> Instant {
        self.polled_at
    }

    /// The HCA.
    pub fn hca(&self) -> &Hca {
        &self.engine.hca
    }

    /// Records the last ACK of each queue pair, for the case that the process ends.
    pub fn set_ack_records(&mut self, records: AckRecords) {
        self.engine.hca.set_ack_records(records);
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

    /// Opens sockets that send to processes which share an address by `open`, in the network namespace of the host.
    pub fn set_send_socket_source(&mut self, open: OpenSendSocket) {
        self.port.send_sockets.open = Some(open);
    }

    /// Lets rings carry the packets to other processes of the host.
    pub fn set_ring_source(&mut self, open: OpenRings) {
        self.port.rings = Some(ProcessRings::new(self.port.links.slot().number, open));
    }

    /// Hands packets that arrive for another slot over by `hand_over`.
    pub fn set_hand_over(&mut self, hand_over: HandOver) {
        self.receiver.packets.hands_over = true;
        self.hand_over = Some(hand_over);
    }

    /// Hands the packets over that arrived for other slots. Drops those that no process takes: no queue pair has their QPN.
    fn hand_over_misdelivered(&mut self) {
        while !self.receiver.packets.misdelivered.is_empty()
            && let Some(hand_over) = &mut self.hand_over
        {
            let packets = &mut self.receiver.packets.misdelivered;
            let count = packets.len().min(MAX_HANDED_OVER);
            let rest = hand_over(packets.drain(..count).collect());
            self.receive_handed_over(&rest);
        }
    }

    /// Receives packets that arrived at another slot.
    pub fn receive_handed_over(&mut self, packets: &[HandedOverPacket]) {
        let now = self.now();
        let Driver { engine, port, receiver, .. } = self;
        let hands_over = std::mem::replace(&mut receiver.packets.hands_over, false);
        for HandedOverPacket { source, destination, traffic_class, bytes } in packets {
            let chunk =
                Chunk { source: *source, traffic_class: *traffic_class, segment_size: bytes.len(), bytes };
            let peer = port.links.sender(source.ip(), source.port());
            let arrival = Arrival { chunk, peer, destination: *destination, check: IcrcCheck::Ignore };
            receiver.packets.receive_chunk(now, arrival, engine, &mut port.links, port.network.as_ref());
        }
        receiver.packets.hands_over = hands_over;
        self.transmit_between_polls(now);
        self.engine.sink.flush();
    }

    /// Sends the last ACKs of a process that has ended: to other processes of the host at once, in the rings that it had,
    /// and to other hosts as they grant it. The rings are closed then.
    pub fn send_recorded_acks(
        &mut self,
        acks: impl Iterator<Item = RecordedAck>,
        rings: impl Iterator<Item = (u16, RingPair)>,
    ) -> io::Result<()> {
        self.set_ring_source(Box::new(|_| Err(io::ErrorKind::NotFound.into())));
        for (slot, rings) in rings {
            self.add_rings(slot, rings)?;
        }
        let count = self.control(|hca, ctx| acks.map(|ack| hca.queue_recorded_ack(ctx, &ack)).count());
        // Bounded: a process that does not read its ring keeps its ACK waiting.
        for _ in 0..count {
            if !self.engine.hca.has_pending_transmit() {
                break;
            }
            self.control(|_, _| ());
        }
        self.port.rings = None;
        Ok(())
    }

    /// Publishes the counters at least every millisecond of polling, before the thread sleeps, and, while there are fault
    /// rules, after every poll.
    pub fn set_publish_counters(&mut self, publish: PublishCounters) {
        self.publish_counters = Some(publish);
    }

    fn publish_counters(&mut self, now: Instant) {
        if let Some(publish) = &self.publish_counters {
            publish(
                self.engine.hca.counters(),
                &mut self.rules().map(|(rule, counters)| (rule.id, counters)),
            );
            self.counters_published_at = now;
        }
    }

    /// Adds rings that the process in a slot of this host asked for.
    pub fn add_rings(&mut self, slot: u16, rings: RingPair) -> io::Result<()> {
        let Some(own) = &mut self.port.rings else { return Ok(()) };
        match (own.add(slot, rings)?, &self.port.wake_set) {
            (Some(descriptor), Some(wake_set)) => wake_set.add(descriptor),
            _ => Ok(()),
        }
    }

    /// The process in a slot of this host is gone.
    pub fn remove_rings(&mut self, slot: u16) {
        let now = self.now();
        // The last packets of the process may have the ACK of its last message.
        let has_packets =
            |driver: &Driver<M>| driver.port.rings.as_ref().is_some_and(|rings| rings.has_packets_from(slot));
        for _ in 0..MAX_LAST_POLLS {
            if !has_packets(self) {
                break;
            }
            self.poll_rings(now);
        }
        if let Some(rings) = &mut self.port.rings {
            rings.remove(slot);
            rings.lost.push(slot);
        }
        self.fail_lost_processes(now);
    }

    /// Informs other processes of the host whether a packet must wake this one.
    pub(crate) fn set_asleep(&mut self, is_asleep: bool) {
        if let Some(rings) = &mut self.port.rings {
            rings.set_asleep(is_asleep);
        }
        if is_asleep {
            self.publish_counters(self.polled_at);
        }
    }

    /// Fails the connections to processes of this host that are gone.
    fn fail_lost_processes(&mut self, now: Instant) {
        let Driver { engine, port, .. } = self;
        let Some(rings) = &mut port.rings else { return };
        for slot in rings.lost.drain(..) {
            for sockets in port.sockets.by_address() {
                let address = sockets.address();
                let peer = Peer { address, slot: QpnSlot { number: slot, ..port.links.slot() } };
                engine.call(now, |hca, ctx| {
                    hca.on_process_gone(ctx, peer);
                    hca.unblock(ctx, address);
                });
            }
        }
    }

    /// Whether another process of the host has sent packets.
    pub(crate) fn has_packets_in_rings(&self) -> bool {
        self.port.rings.as_ref().is_some_and(ProcessRings::has_packets)
    }

    /// Whether the sockets are to be read in a poll that begins `now`.
    fn are_sockets_due(&self, now: Instant) -> bool {
        let are_rings_active = self
            .port
            .rings
            .as_ref()
            .and_then(|rings| rings.received_at)
            .is_some_and(|at| now.since(at) < RINGS_ACTIVE);
        !are_rings_active || now.since(self.sockets_polled_at) >= SOCKET_INTERVAL
    }

    /// Moves packets between this process and others of the host. Returns whether there were any.
    fn poll_rings(&mut self, now: Instant) -> bool {
        let Driver { engine, port, receiver, .. } = self;
        let Some(rings) = &mut port.rings else { return false };
        if rings.is_empty() && rings.lost.is_empty() {
            return false;
        }
        let (links, sockets, network) = (&mut port.links, &port.sockets, port.network.as_ref());
        let moved = rings.receive(|slot, chunk, bytes| {
            let Some(sockets) = sockets.by_address().nth(chunk.address.into()) else {
                // No process of this library sends that. It counts as malformed.
                let own = sockets.address();
                return engine
                    .call(now, |hca, ctx| hca.receive(ctx, &AddressHeaders::between(own, own), &[]));
            };
            let address = sockets.address();
            let PacketChunk { segment_size, traffic_class, .. } = chunk;
            let source = SocketAddr::new(address, ROCE_PORT);
            let chunk = Chunk { source, traffic_class, segment_size, bytes };
            let peer = PeerPort { address, slot };
            let arrival = Arrival { chunk, peer, destination: address, check: IcrcCheck::Ignore };
            receiver.packets.receive_chunk(now, arrival, engine, links, network);
        });
        if moved {
            rings.received_at = Some(now);
        }
        if rings.unblocked() {
            for sockets in port.sockets.by_address() {
                engine.call(now, |hca, ctx| hca.unblock(ctx, sockets.address()));
            }
        }
        if !rings.lost.is_empty() {
            self.fail_lost_processes(now);
        }
        moved
    }

    /// The memory behind memory regions.
    pub fn memory(&mut self) -> &mut M {
        &mut self.engine.memory
    }

    /// Executes a control verb: calls `act` with the HCA. It follows the work requests posted before it. Their packets and
    /// pending responses are sent before it where the port admits them; packets that it causes are sent at once.
    pub fn control<R>(&mut self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let now = self.now();
        self.engine.call(now, |hca, ctx| hca.process_doorbells(ctx));
        self.transmit_between_polls(now);
        let result = self.engine.call(now, act);
        let groups = || self.engine.hca.multicast_groups().map(Gid::ip);
        if !self.receiver.multicast.matches(groups()) {
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
        for _ in 0..MAX_BATCHES_PER_POLL {
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
        self.transmitter.fault_injector.get_or_insert_with(|| FaultInjector::new(seed))
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

    /// Stalls the device: it neither sends nor receives for this time, as if its host stood still.
    pub fn stall(&mut self, time: Duration) {
        let until = Instant::from_nanos(self.now().nanos() + time.as_nanos() as u64);
        self.stalled_until = self.stalled_until.max(until);
    }

    /// Attaches the host to a network: packets to the other attached hosts pass its switches instead of sockets, and
    /// packets from native peers on other machines pass the switch of this host. Multicast stays on sockets. Returns
    /// false if the network has no port for this host.
    pub fn attach_to_network(&mut self, network: Arc<HostNetwork>) -> bool {
        let rate = network.line_rate();
        self.port.network = HostPort::new(network, self.address());
        if let (Some(_), Some(rate)) = (&self.port.network, rate) {
            self.engine.hca.set_line_rate(rate.get());
        }
        self.port.network.is_some()
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
        self.engine.hca.has_pending_transmit() || self.transmitter.pending().is_some()
    }

    /// How long until [`Driver::poll`] has work even if nothing arrives.
    pub fn next_timeout(&self) -> Option<Duration> {
        let Driver { engine, port, transmitter, receiver, .. } = self;
        let now = self.now().nanos();
        if now < self.stalled_until.nanos() {
            return Some(Duration::from_nanos(self.stalled_until.nanos() - now));
        }
        if engine.hca.has_pending_transmit() || self.needs_poll {
            return Some(Duration::ZERO);
        }
        if let Some((batch, peer)) = transmitter.pending()
            && port.is_granted(batch, peer, now)
        {
            // The send buffer is full; on loopback it empties within microseconds.
            return Some(Duration::from_micros(20));
        }
        let faults = transmitter.fault_injector.as_ref();
        let timeouts = [
            engine.hca.next_timeout().map(Instant::nanos),
            port.links.next_timeout(),
            port.pauses.next_timeout(),
            faults.and_then(|faults| faults.next_timeout(|frame| port.is_blocked_on_grant(frame))),
            receiver.next_timeout(),
            port.network.as_ref().and_then(HostPort::next_timeout).map(|wait| now + wait),
        ];
        let next = timeouts.into_iter().flatten().min()?;
        Some(Duration::from_nanos(next.saturating_sub(now)))
    }

    /// One bounded step: sends a few batches, or lets the HCA receive them itself, and receives at most one batch.
    /// Returns whether any packet moved.
    ///
    /// The next poll acknowledges what this one receives: if the application responds to it, the ACK leaves in one send
    /// with the response, or after it, as [`Settings::response_order`] says.
    pub fn poll(&mut self) -> io::Result<bool> {
        let now = self.now();
        self.polled_at = now;
        if now < self.stalled_until {
            return Ok(false);
        }
        self.needs_poll = false;
        self.expire_pauses(now);
        let mut moved = self.poll_host_network(now) | self.poll_rings(now);
        self.engine.call(now, |hca, ctx| {
            hca.process_doorbells(ctx);
            if hca.next_timeout().is_some_and(|at| at <= now) {
                hca.expire(ctx);
            }
        });
        moved |= self.transmit(now)?;
        if self.are_sockets_due(now) {
            self.sockets_polled_at = now;
            let started = self.started;
            moved |= self.receiver.poll(now, || now_since(started), &mut self.engine, &mut self.port)?;
        }
        self.hand_over_misdelivered();
        self.engine.sink.flush();
        self.poll_links(now)?;
        // Received packets make room for new grants; sent packets may require some.
        self.port.transmit_link_messages(now.nanos())?;
        self.engine.sink.flush();
        let has_rules = self.transmitter.fault_injector.is_some();
        if has_rules || now.since(self.counters_published_at) >= COUNTERS_INTERVAL {
            self.publish_counters(now);
        }
        Ok(moved)
    }

    /// Reads the error queues of the sockets at the next poll.
    pub fn on_socket_error(&mut self) {
        self.port.on_socket_error();
    }
}

fn now_since(started: std::time::Instant) -> Instant {
    Instant::from_nanos(started.elapsed().as_nanos() as u64)
}
