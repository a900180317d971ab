//! The real-time driver: one engine, its sockets, its links, one bounded turn at a time.
//!
//! Whoever calls [`Driver::turn`] drives; there is no thread here and no lock. A turn hears doorbells and timers,
//! sends what may be sent, and takes what has arrived. Nothing is sent without a grant of its receiver, and
//! receiving never waits for one. What the host sends to itself may stay here: then a run is received as soon as it is
//! sealed, out of the buffer that it was built in, and nothing waits between the two halves.

mod receive;
mod transmit;

use crate::entropy::FlowSockets;
use crate::fault_injector::FaultInjector;
use crate::host_network::{HostNetwork, HostPort};
use crate::multicast::MulticastGroups;
use crate::pauses::PeerPauses;
use crate::reorder::ReorderBuffer;
use crate::system::WakeSet;
use crate::{
    Entropy, HostSockets, LinkChange, LinkControl, Loopback, NetworkErrorCause, PeerState, ReceiveBatch,
    ReceiveMemory, SendError, UnreachablePort, grant_budget,
};
use softhca_engine::{Context, Event, Hca, Instant, Memory, PacketBatch, PortState, Settings};
use softhca_fabric::{
    Direction, EventSink, Flow, HostId, LinkId, LinkState, NetworkEvent, Rule, RuleCounters, Stage,
};
use softhca_wire::link_control::{Incarnation, Message, Pause};
use softhca_wire::{AddressHeaders, Gid, MacAddress, Pfc};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How many runs one turn may send, so that receiving gets its share: what a card sends to itself is received while it is
/// still in the processor's cache.
const MAX_RUNS_PER_POLL: usize = 4;
/// How long link control may go unread, and its timers unheard, while a caller drives.
const LINK_POLL_INTERVAL: u64 = 20_000;
/// How often the error queues are asked while nothing says that they have something.
const ERROR_QUEUE_POLL_INTERVAL: u64 = 100_000_000;
/// How far a queue pair whose rate is limited may catch up: about as late as a thread wakes up.
const PACING_SLACK: Duration = Duration::from_micros(100);

/// The only host and the only link of a driver, as events number them.
const HOST: HostId = HostId(0);
const LINK: LinkId = LinkId(0);

/// Passes an event of the HCA to a sink.
#[inline]
fn emit_hca_event(sink: &mut dyn EventSink, now: Instant, event: &Event) {
    sink.on_event(now, &NetworkEvent::Hca { host: HOST, event });
}

/// The direction of frames that leave the port (`Admitted`) or enter it (`Delivered`).
fn direction(stage: Stage) -> Direction {
    if stage == Stage::Delivered { Direction::Backward } else { Direction::Forward }
}

fn frame_event<'a>(stage: Stage, addressing: &'a AddressHeaders, packet: &'a [u8]) -> NetworkEvent<'a> {
    NetworkEvent::Frame { link: LINK, direction: direction(stage), stage, addressing, packet }
}

fn pause_event(stage: Stage, pause: &Pfc) -> NetworkEvent<'_> {
    NetworkEvent::PauseFrame { link: LINK, direction: direction(stage), stage, pause }
}

/// How the invariant CRC of arriving packets is checked.
///
/// A socket does not tell the IPv4 identification that the CRC covers. Ports like ours use 0 to 63, which
/// costs six of its thirty-two bits; a port of another make may use any, which costs sixteen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IcrcCheck {
    /// Identifications 0 to 63 only.
    Strict,
    /// Strict towards ports that speak link control, any identification towards others.
    #[default]
    Auto,
    /// Not at all.
    Ignore,
}

/// What is set once per driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct DriverOptions {
    /// The settings of the card.
    pub settings: Settings,
    /// How the invariant CRC is checked.
    pub icrc: IcrcCheck,
    /// Which source port packets have.
    pub entropy: Entropy,
    /// Where goes what the host sends to itself.
    pub loopback: Loopback,
}

/// A run that the kernel did not take yet: sealed, and waiting in the buffer.
struct PendingRun {
    run: PacketBatch,
    /// Bytes of it that are gone already.
    sent_bytes: usize,
}

/// One host in real time.
pub struct Driver<M> {
    hca: Hca,
    memory: M,
    sockets: HostSockets,
    multicast: MulticastGroups,
    /// Opened as flows need them, if they may.
    flow_sockets: Option<FlowSockets>,
    /// What wakes the driver's thread besides the two sockets of the first address.
    wake_set: Option<Arc<WakeSet>>,
    links: LinkControl,
    sink: Box<dyn EventSink + Send>,
    started: std::time::Instant,
    icrc_check: IcrcCheck,
    batch: ReceiveBatch,
    link_batch: ReceiveBatch,
    /// The identifications of the chunk at hand.
    identifications: Vec<Option<u16>>,
    transmit_buffer: Box<[u8]>,
    pending_run: Option<PendingRun>,
    /// Destinations that wait for a grant, and the least that lets somebody send there.
    blocked_on_grant: BTreeMap<IpAddr, u64>,
    fault_injector: Option<FaultInjector>,
    reorder_buffer: ReorderBuffer,
    peer_pauses: PeerPauses,
    /// Destinations that wait for a pause to end.
    blocked_on_pause: BTreeSet<IpAddr>,
    host_port: Option<HostPort>,
    /// The pause frames that the backbone brought so far.
    network_pause_frames: u64,
    /// Destinations that wait for the line to the backbone.
    blocked_on_link: BTreeSet<IpAddr>,
    links_polled_at: u64,
    error_queues_polled_at: u64,
    polled_at: Instant,
    /// Something was sent between turns: the next one asks for the grants that it needs.
    needs_poll: bool,
}

impl<M: Memory> Driver<M> {
    /// Drives a new card on these sockets.
    pub fn new(
        sockets: HostSockets,
        options: DriverOptions,
        memory: M,
        sink: Box<dyn EventSink + Send>,
    ) -> Driver<M> {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::from_secs(1));
        let incarnation = Incarnation::new(wall.as_nanos() as u64);
        // Whatever was granted fits into either socket, if there are two.
        let buffer = sockets.by_address().map(|port| port.roce.receive_buffer()).min().unwrap_or(0);
        let budget = grant_budget(buffer);
        let mut settings = options.settings;
        settings.mtu = settings.mtu.min(sockets.active_mtu());
        if let Some(control) = &mut settings.congestion.rate_control {
            control.slack = control.slack.max(PACING_SLACK);
        }
        let mut links = LinkControl::new(incarnation, budget, 0);
        if options.loopback == Loopback::Internal {
            links.set_internal_addresses(sockets.by_address().map(HostSockets::address));
        }
        Driver {
            hca: Hca::new(settings, sockets.gids()),
            memory,
            links,
            sockets,
            multicast: MulticastGroups::default(),
            flow_sockets: (options.entropy == Entropy::On).then(FlowSockets::default),
            wake_set: None,
            sink,
            started: std::time::Instant::now(),
            icrc_check: options.icrc,
            batch: ReceiveBatch::new(),
            link_batch: ReceiveBatch::new(),
            identifications: Vec::new(),
            transmit_buffer: vec![0; crate::MAX_RUN_BYTES].into_boxed_slice(),
            pending_run: None,
            blocked_on_grant: BTreeMap::new(),
            fault_injector: None,
            reorder_buffer: ReorderBuffer::default(),
            peer_pauses: PeerPauses::default(),
            blocked_on_pause: BTreeSet::new(),
            host_port: None,
            network_pause_frames: 0,
            blocked_on_link: BTreeSet::new(),
            links_polled_at: 0,
            error_queues_polled_at: 0,
            polled_at: Instant::from_nanos(0),
            needs_poll: false,
        }
    }

    /// The host's address.
    pub fn address(&self) -> IpAddr {
        self.sockets.address()
    }

    /// When the card's time began.
    pub(crate) fn started(&self) -> std::time::Instant {
        self.started
    }

    /// The card's time.
    pub fn now(&self) -> Instant {
        Instant::from_nanos(self.started.elapsed().as_nanos() as u64)
    }

    /// When the last turn began, in the card's time.
    pub fn polled_at(&self) -> Instant {
        self.polled_at
    }

    /// The card.
    pub fn hca(&self) -> &Hca {
        &self.hca
    }

    /// The links to other ports.
    pub fn links(&self) -> &LinkControl {
        &self.links
    }

    /// The host's sockets.
    pub fn sockets(&self) -> &HostSockets {
        &self.sockets
    }

    /// How full the receive buffers are and what they dropped: first that of RoCE, then that of link control.
    pub fn receive_memory(&self) -> io::Result<[ReceiveMemory; 2]> {
        Ok([self.sockets.roce.receive_memory()?, self.sockets.link.receive_memory()?])
    }

    /// The memory behind regions.
    pub fn memory(&mut self) -> &mut M {
        &mut self.memory
    }

    /// Calls `act` with the card: a control verb. What was received before it is acknowledged before it, if that may be sent;
    /// what it has the card say leaves at once.
    pub fn control<R>(&mut self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let now = self.now();
        self.transmit_between_polls(now);
        let mut events = |now, event: &Event| emit_hca_event(&mut *self.sink, now, event);
        let result = act(&mut self.hca, &mut Context { now, memory: &mut self.memory, events: &mut events });
        if !self.multicast.matches(self.hca.multicast_groups().map(Gid::ip)) {
            let wanted = self.hca.multicast_groups().map(Gid::ip).collect();
            self.multicast.update(&wanted, &self.sockets, self.wake_set.as_deref());
        }
        self.transmit_between_polls(now);
        self.sink.flush();
        result
    }

    /// Sends what is ready, and asks for the grants that it needs.
    fn transmit_between_polls(&mut self, now: Instant) {
        let mut has_sent = false;
        for _ in 0..MAX_RUNS_PER_POLL {
            // A socket that fails does so again in the next turn, which tells.
            if !self.hca.has_pending_transmit() || !self.transmit(now).unwrap_or(false) {
                break;
            }
            has_sent = true;
        }
        if has_sent {
            self.needs_poll |= self.transmit_link_messages(now).is_err();
        }
    }

    /// Why the network does not bring what is sent to a group with members here, if so.
    pub fn multicast_join_error(&self, group: Gid) -> Option<io::Error> {
        let failure = self.multicast.join_error(group.ip())?;
        Some(io::Error::new(failure.kind(), failure.to_string()))
    }

    /// Lets `bells` ring when something arrives that is not at [`Driver::descriptors`].
    pub(crate) fn set_wake_set(&mut self, bells: Arc<WakeSet>) -> io::Result<()> {
        for port in self.sockets.by_address().skip(1) {
            bells.add(port.roce.as_fd())?;
            bells.add(port.link.as_fd())?;
        }
        self.multicast.add_to_wake_set(&bells)?;
        self.wake_set = Some(bells);
        Ok(())
    }

    /// Puts a fault rule on the cable before the socket. Frames go one by one from now on.
    pub fn add_rule(&mut self, seed: u64, rule: Rule) {
        let faults = self.fault_injector.get_or_insert_with(|| FaultInjector::new(seed));
        faults.add_rule(rule);
        if faults.link.may_reorder() {
            self.links.announce_reordering();
        }
    }

    /// Lets rules know a queue pair by its role.
    pub fn add_flow(&mut self, seed: u64, flow: Flow) {
        self.fault_injector.get_or_insert_with(|| FaultInjector::new(seed)).flows.insert(flow);
    }

    /// The rules on the cable, and how often each fired.
    pub fn rules(&self) -> impl Iterator<Item = (&Rule, RuleCounters)> {
        self.fault_injector.iter().flat_map(|faults| faults.link.rules())
    }

    /// Takes all rules and flows away. What they hold back still goes its way, one frame at a time.
    pub fn clear_rules(&mut self) {
        if let Some(faults) = &mut self.fault_injector {
            faults.clear();
        }
    }

    /// Takes the port down, or brings it up: what the card sends or gets meanwhile is lost, and its users are told.
    pub fn set_port_state(&mut self, state: PortState) {
        let link = match state {
            PortState::Down => LinkState::Down,
            PortState::Active => LinkState::Up,
        };
        self.fault_injector.get_or_insert_with(|| FaultInjector::new(0)).set_link_state(link);
        self.control(|hca, ctx| hca.set_port_state(ctx, state));
    }

    /// Puts a network between this host and the others that are plugged in: frames to them pass its switches and
    /// no socket. What comes from other machines that speak link control passes the switch of this host. False if the
    /// network has no place for this host. Datagrams for groups stay on sockets.
    pub fn attach_to_network(&mut self, backbone: Arc<HostNetwork>) -> bool {
        let rate = backbone.line_rate();
        self.host_port = HostPort::new(backbone, self.address());
        if let (Some(_), Some(rate)) = (&self.host_port, rate) {
            self.hca.set_line_rate(rate.get());
        }
        self.host_port.is_some()
    }

    /// Sends a priority flow control frame to a peer: its port stops these priorities towards this host, or lets them go
    /// on. It goes over the link once, and may be lost.
    pub fn pause_peer(&mut self, peer: IpAddr, pause: Pause) {
        let now = self.now();
        self.sink.on_event(
            now,
            &pause_event(Stage::Admitted, &pause.to_pfc(MacAddress::from_ip(self.sockets.address()))),
        );
        self.links.send_pause(peer, pause, now.nanos());
        self.process_link_events(now);
    }

    /// The priorities that a peer paused: nothing of them goes to it now.
    pub fn priorities_paused_by(&self, peer: IpAddr) -> u8 {
        self.peer_pauses.mask(peer)
    }

    /// Lets queue pairs try again that waited for a pause of these peers to end.
    fn unblock_paused(&mut self, now: Instant, peers: Vec<IpAddr>) {
        let Driver { hca, memory, sink, blocked_on_pause: at_pause, .. } = self;
        for peer in peers.into_iter().filter(|peer| at_pause.remove(peer)) {
            let mut events = |now, event: &Event| emit_hca_event(&mut **sink, now, event);
            hca.unblock(&mut Context { now, memory, events: &mut events }, peer);
        }
    }

    /// The descriptors that become readable when something arrives for the first address.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.sockets.roce.as_fd(), self.sockets.link.as_fd()]
    }

    /// Whether there is something that may be sent now.
    pub fn has_pending_transmit(&self) -> bool {
        self.hca.has_pending_transmit() || self.pending_run.is_some()
    }

    /// How long until [`Driver::turn`] has something to do although nothing arrives.
    pub fn next_timeout(&self) -> Option<Duration> {
        let now = self.now().nanos();
        if self.hca.has_pending_transmit() || self.needs_poll {
            return Some(Duration::ZERO);
        }
        if self.pending_run.as_ref().is_some_and(|unsent| self.is_granted(&unsent.run, now)) {
            // The send buffer is full; on loopback it empties within microseconds.
            return Some(Duration::from_micros(20));
        }
        let waits = |peer| self.blocked_on_grant.contains_key(&peer);
        let faults = self.fault_injector.as_ref().and_then(|faults| faults.next_timeout(waits));
        let card = self.hca.next_timeout().map(Instant::nanos);
        let held = self.reorder_buffer.next_timeout();
        let pauses = self.peer_pauses.next_timeout();
        let plug = self.host_port.as_ref();
        let arrival = plug.and_then(HostPort::ns_until_next_event).map(|wait| now + wait);
        let line =
            plug.filter(|_| !self.blocked_on_link.is_empty()).map(|plug| now + plug.ns_until_link_idle());
        let due = [card, self.links.next_timeout(), faults, held, pauses, arrival, line];
        let next = due.into_iter().flatten().min()?;
        Some(Duration::from_nanos(next.saturating_sub(now)))
    }

    /// Whether some of a run may be sent.
    fn is_granted(&self, run: &PacketBatch, now: u64) -> bool {
        let destination = run.addressing.destination;
        let allowance = self.links.allowance(destination, now);
        destination.is_multicast()
            || self.sockets.for_destination(destination).roce.max_segments_within(
                destination,
                run.segment_size,
                allowance,
            ) > 0
    }

    /// One bounded turn: a few runs are sent, or received by the card itself, and at most one batch is received. Says
    /// whether anything moved.
    ///
    /// What a turn receives is acknowledged by the next one: if it makes the application answer, the
    /// acknowledgement leaves in one send with the answer, or behind it, as [`Settings::answers`] says.
    pub fn poll(&mut self) -> io::Result<bool> {
        let now = self.now();
        self.polled_at = now;
        self.needs_poll = false;
        if self.peer_pauses.next_timeout().is_some_and(|at| at <= now.nanos()) {
            let Driver { peer_pauses: pauses, sink, .. } = self;
            let resumed =
                pauses.expire(now.nanos(), |event| sink.on_event(now, &NetworkEvent::Fabric(event)));
            self.unblock_paused(now, resumed);
        }
        let carried = self.poll_host_network(now);
        let mut events = |now, event: &Event| emit_hca_event(&mut *self.sink, now, event);
        let mut ctx = Context { now, memory: &mut self.memory, events: &mut events };
        self.hca.process_doorbells(&mut ctx);
        if self.hca.next_timeout().is_some_and(|at| at <= now) {
            self.hca.expire(&mut ctx);
        }
        let sent = self.transmit(now)?;
        let received = self.receive(now)?;
        self.sink.flush();
        self.poll_links(now)?;
        // What was received earns its senders new grants, what was sent may need some.
        self.transmit_link_messages(now)?;
        self.sink.flush();
        Ok(sent || received || carried)
    }

    /// Reads link control now and then, at once if somebody waits for a grant.
    fn poll_links(&mut self, now: Instant) -> io::Result<()> {
        let now_ns = now.nanos();
        if now_ns >= self.error_queues_polled_at + ERROR_QUEUE_POLL_INTERVAL {
            self.error_queues_polled_at = now_ns;
            self.poll_error_queues(now)?;
        }
        if now_ns < self.links_polled_at + LINK_POLL_INTERVAL && self.blocked_on_grant.is_empty() {
            return Ok(());
        }
        self.links_polled_at = now_ns;
        for port in self.sockets.by_address() {
            loop {
                port.link.receive(&mut self.link_batch)?;
                for datagram in self.link_batch.datagrams() {
                    if let Ok(message) = Message::parse(datagram.bytes) {
                        self.links.on_message(datagram.source.ip(), &message, now_ns);
                    }
                }
                if !self.link_batch.is_full() {
                    break;
                }
            }
        }
        if self.links.next_timeout().is_some_and(|at| at <= now_ns) {
            self.links.expire(now_ns);
        }
        self.process_link_events(now);
        Ok(())
    }

    /// Reads what the network said about earlier datagrams.
    fn poll_error_queues(&mut self, now: Instant) -> io::Result<()> {
        let Driver { sockets, flow_sockets, links, .. } = self;
        let both = sockets
            .by_address()
            .flat_map(|port| [(UnreachablePort::Roce, &port.roce), (UnreachablePort::Link, &port.link)]);
        let flows = flow_sockets.iter().flat_map(FlowSockets::iter);
        let flows = flows.map(|socket| (UnreachablePort::Roce, socket));
        for (port, socket) in both.chain(flows) {
            for _ in 0..64 {
                let Some(error) = socket.poll_error()? else { break };
                if let (Some(peer), NetworkErrorCause::PortUnreachable) = (error.peer, error.cause) {
                    links.on_unreachable(peer.ip(), port, now.nanos());
                }
            }
        }
        Ok(())
    }

    /// The network has something to say: reads it at the next turn.
    pub fn on_socket_error(&mut self) {
        self.error_queues_polled_at = 0;
    }

    /// Acts on what changed on the links.
    fn process_link_events(&mut self, now: Instant) {
        let mut resumed = Vec::new();
        let Driver {
            hca,
            memory,
            links,
            sink,
            blocked_on_grant: waiting,
            pending_run: unsent,
            reorder_buffer: held,
            peer_pauses: pauses,
            host_port: plug,
            ..
        } = self;
        while let Some(event) = links.poll_event() {
            sink.on_event(
                now,
                &NetworkEvent::PeerLinkChanged { peer: event.peer, change: event.change.name() },
            );
            let mut events = |now, event: &Event| emit_hca_event(&mut **sink, now, event);
            let mut ctx = Context { now, memory, events: &mut events };
            match event.change {
                LinkChange::StateChanged(PeerState::Stalled) => hca.stall(event.peer),
                LinkChange::StateChanged(PeerState::Dead) => {
                    held.remove_peer(event.peer);
                    unsent.take_if(|unsent| unsent.run.addressing.destination == event.peer);
                    if pauses.remove_peer(event.peer) {
                        resumed.push(event.peer);
                    }
                    if let Some(plug) = plug {
                        plug.discard_external(event.peer);
                    }
                    hca.resume(&mut ctx, event.peer);
                    hca.fail_peer(&mut ctx, event.peer);
                    // What has no connection to lose asks again.
                    if waiting.remove(&event.peer).is_some() {
                        hca.unblock(&mut ctx, event.peer);
                    }
                }
                LinkChange::Restarted => {
                    hca.discard_orphaned_acks(event.peer);
                    hca.resume(&mut ctx, event.peer);
                }
                LinkChange::StateChanged(_) => hca.resume(&mut ctx, event.peer),
                LinkChange::PauseReceived(pause) => {
                    hca.count_pause_frames(1);
                    sink.on_event(
                        now,
                        &pause_event(Stage::Delivered, &pause.to_pfc(MacAddress::from_ip(event.peer))),
                    );
                    let tell = |event| sink.on_event(now, &NetworkEvent::Fabric(event));
                    if pauses.apply(event.peer, &pause, now.nanos(), tell) {
                        resumed.push(event.peer);
                    }
                }
            }
        }
        // Whoever waits keeps asking: a grant that could not be used at once, because the peer had not answered a
        // heartbeat lately, was given back.
        waiting.retain(|peer, price| {
            let granted = links.may_send(*peer, *price, now.nanos());
            if granted {
                let mut events = |now, event: &Event| emit_hca_event(&mut **sink, now, event);
                let mut ctx = Context { now, memory, events: &mut events };
                hca.unblock(&mut ctx, *peer);
            }
            !granted
        });
        self.unblock_paused(now, resumed);
    }

    fn transmit_link_messages(&mut self, now: Instant) -> io::Result<()> {
        while let Some((peer, message)) = self.links.transmit(now.nanos()) {
            let bytes = message.emit();
            match self.sockets.for_destination_mut(peer).link.send_run(peer, 0, bytes.len(), &bytes) {
                // Every message is sent again until its purpose is reached: a lost one costs time only.
                Ok(_) | Err(SendError::WouldBlock | SendError::NoBuffers | SendError::TooLarge) => {}
                Err(SendError::SegmentationUnsupported) => {}
                Err(SendError::Other(error)) if is_peer_error(&error) => {}
                Err(SendError::Other(error)) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Whether an error speaks of one destination only: others may still be reached.
fn is_peer_error(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::AddrNotAvailable
            | io::ErrorKind::InvalidInput
    )
}
