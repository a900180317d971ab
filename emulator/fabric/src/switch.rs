//! A switch: ports with a queue per priority, a shared buffer, ECN marking and PFC.
//!
//! A switch makes decisions and counts; [`crate::network::Network`] moves the frames.

use crate::Seed;
use crate::frame_pool::{FramePool, NO_SLOT};
use crate::pfc::{PauseGenerator, PauseState, PfcSettings};
use crate::{Direction, FrameDropReason, LinkId, PER_BILLION};
use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;
use softhca_types::PortCounters;

/// ECN marking (RED) of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EcnMarking {
    /// Kmin: up to this queue depth in bytes nothing is marked.
    pub kmin: u64,
    /// Kmax: from this queue depth in bytes on every packet is marked.
    pub kmax: u64,
    /// Pmax: the marking probability just below `kmax` in parts per billion; it rises linearly from `kmin`.
    pub pmax_per_billion: u32,
}

impl EcnMarking {
    /// Kmin 5 KB, Kmax 200 KB, Pmax 1 %: the parameters of the DCQCN paper.
    pub const DCQCN_PAPER: EcnMarking =
        EcnMarking { kmin: 5_000, kmax: 200_000, pmax_per_billion: PER_BILLION / 100 };

    /// The marking probability at a queue depth in parts per billion.
    pub const fn probability(&self, depth: u64) -> u32 {
        if depth <= self.kmin {
            0
        } else if depth >= self.kmax {
            PER_BILLION
        } else {
            let span = (self.kmax - self.kmin) as u128;
            (self.pmax_per_billion as u128 * (depth - self.kmin) as u128 / span) as u32
        }
    }
}

impl Default for EcnMarking {
    fn default() -> EcnMarking {
        EcnMarking::DCQCN_PAPER
    }
}

/// The watchdog's action on a stalled queue.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WatchdogAction {
    /// Drops queued and arriving frames.
    #[default]
    Drop,
    /// Ignores the pause and forwards.
    Forward,
}

/// The PFC watchdog: detects queues that a pause keeps from draining.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PfcWatchdog {
    /// How long a queue may stall.
    pub detection_time: Duration,
    /// How long the port must receive no pause frames before the watchdog restores the queue.
    pub restoration_time: Duration,
    /// The action during the stall.
    pub action: WatchdogAction,
}

impl Default for PfcWatchdog {
    /// 200 ms each, as common switch software does.
    fn default() -> PfcWatchdog {
        let time = Duration::from_millis(200);
        PfcWatchdog { detection_time: time, restoration_time: time, action: WatchdogAction::Drop }
    }
}

/// The scheduling of priorities at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Scheduling {
    /// Strict priority: the highest unpaused priority first.
    #[default]
    Strict,
    /// Round robin, one frame each.
    RoundRobin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchSettings {
    /// Bytes of the shared buffer.
    pub buffer: u64,
    /// The limit of a queue of a lossy priority.
    pub queue_limit: u64,
    /// ECN marking; `None` disables it.
    pub ecn_marking: Option<EcnMarking>,
    /// PFC; `None` disables it.
    pub pfc: Option<PfcSettings>,
    /// The PFC watchdog; `None` disables it.
    pub watchdog: Option<PfcWatchdog>,
    /// The scheduling of priorities.
    pub scheduling: Scheduling,
    /// Emits a queue depth event whenever the depth crosses a multiple of this many bytes; zero disables it.
    pub sample_step: u64,
}

impl Default for SwitchSettings {
    fn default() -> SwitchSettings {
        SwitchSettings {
            buffer: 16 << 20,
            queue_limit: 1 << 20,
            ecn_marking: Some(EcnMarking::DCQCN_PAPER),
            pfc: Some(PfcSettings::default()),
            watchdog: None,
            scheduling: Scheduling::Strict,
            sample_step: 0,
        }
    }
}

/// The watchdog state of a port.
#[derive(Clone, Debug)]
pub(crate) struct WatchdogState {
    /// When each queue stalled; `u64::MAX` if it did not.
    pub stalled_since: [u64; 8],
    /// Bit mask of the queues that the watchdog acts on.
    pub active: u8,
    /// When the last pause frame arrived, per priority.
    pub last_pause: [u64; 8],
}

impl WatchdogState {
    fn new() -> Box<WatchdogState> {
        Box::new(WatchdogState { stalled_since: [u64::MAX; 8], active: 0, last_pause: [0; 8] })
    }
}

/// The queue of a priority at a port.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(crate) struct PriorityQueue {
    /// The first and the last slot of the queue; slots link to the next.
    first: u32,
    last: u32,
    /// Queued bytes, and their maximum.
    pub depth: u64,
    max_depth: u64,
    /// Bytes in the switch that entered at this port.
    pub ingress_bytes: u64,
}

impl PriorityQueue {
    const EMPTY: PriorityQueue =
        PriorityQueue { first: NO_SLOT, last: NO_SLOT, depth: 0, max_depth: 0, ingress_bytes: 0 };

    /// The number of frames; walks the list.
    pub fn len(&self, slots: &mut FramePool) -> u64 {
        let next = |slot: &u32| Some(slots.slot_mut(*slot).next).filter(|next| *next != NO_SLOT);
        core::iter::successors(Some(self.first).filter(|first| *first != NO_SLOT), next).count() as u64
    }
}

/// A port of a switch. The ports of a thousand-host network do not fit the cache: a frame touches only the
/// first cache line and one line of a queue.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct SwitchPort {
    pub link: LinkId,
    /// The egress direction on the link.
    pub direction: Direction,
    /// Bit mask of the non-empty queues.
    pub occupied: u8,
    /// An event for the free link is scheduled.
    pub waiting_for_link: bool,
    /// The last served priority.
    last_served: u8,
    pub pause_state: PauseState,
    pub pause_generator: PauseGenerator,
    pub sent_frames: u64,
    pub sent_bytes: u64,
    pub received_frames: u64,
    pub queues: [PriorityQueue; 8],
    /// Present if the switch has a watchdog.
    pub watchdog: Option<Box<WatchdogState>>,
    pub dropped_frames: u64,
    pub marked: u64,
    pub watchdog_fired: u64,
}

impl SwitchPort {
    fn new(link: LinkId, direction: Direction, settings: &SwitchSettings) -> SwitchPort {
        SwitchPort {
            link,
            direction,
            occupied: 0,
            waiting_for_link: false,
            last_served: 0,
            pause_state: PauseState::default(),
            pause_generator: PauseGenerator::default(),
            sent_frames: 0,
            sent_bytes: 0,
            received_frames: 0,
            queues: [PriorityQueue::EMPTY; 8],
            watchdog: settings.watchdog.map(|_| WatchdogState::new()),
            dropped_frames: 0,
            marked: 0,
            watchdog_fired: 0,
        }
    }

    /// The priority to serve next, if any.
    pub fn next_priority(&self, scheduling: Scheduling) -> Option<u8> {
        let may = self.occupied & !self.pause_state.mask();
        if may == 0 {
            return None;
        }
        Some(match scheduling {
            Scheduling::Strict => 7 - may.leading_zeros() as u8,
            Scheduling::RoundRobin => {
                let turned = may.rotate_right(u32::from(self.last_served) + 1);
                (turned.trailing_zeros() as u8 + self.last_served + 1) & 7
            }
        })
    }

    /// Removes the first frame of a queue.
    pub fn dequeue(&mut self, priority: u8, slots: &mut FramePool) -> Option<u32> {
        let queue = &mut self.queues[usize::from(priority)];
        let slot = Some(queue.first).filter(|first| *first != NO_SLOT)?;
        let frame = slots.slot_mut(slot);
        queue.first = frame.next;
        queue.depth -= u64::from(frame.bytes);
        if queue.first == NO_SLOT {
            self.occupied &= !(1 << priority);
        }
        self.last_served = priority;
        Some(slot)
    }
}

/// The routing table: a port or a set of ports for each host.
#[derive(Clone, Debug, Default)]
pub(crate) struct RoutingTable {
    /// The next hop, by host.
    pub next_hops: Vec<NextHop>,
    /// The ports of all sets, and the range of each set.
    ports: Vec<u16>,
    sets: Vec<(u32, u32)>,
    /// The ports of the multicast tree.
    pub flood: Vec<u16>,
}

/// A port number below [`NextHop::FIRST_SET`], or the index of a set of ports above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextHop(u16);

impl NextHop {
    /// The host is unreachable.
    pub const NONE: NextHop = NextHop(u16::MAX);
    const FIRST_SET: u16 = 1 << 15;
}

impl RoutingTable {
    /// The next hop over any of these ports.
    ///
    /// # Panics
    /// If there are more than 32,000 sets.
    pub fn add(&mut self, ports: &[u16]) -> NextHop {
        if let [only] = *ports
            && only < NextHop::FIRST_SET
        {
            return NextHop(only);
        }
        let is_same = |(start, end): &(u32, u32)| self.ports[*start as usize..*end as usize] == *ports;
        let set = self.sets.iter().position(is_same).unwrap_or_else(|| {
            let start = self.ports.len() as u32;
            self.ports.extend_from_slice(ports);
            self.sets.push((start, self.ports.len() as u32));
            self.sets.len() - 1
        });
        assert!(set < usize::from(u16::MAX - NextHop::FIRST_SET), "a switch with {set} sets of ports");
        NextHop(NextHop::FIRST_SET + set as u16)
    }

    #[inline]
    fn port_set(&self, way: NextHop) -> Option<&[u16]> {
        let (start, end) = *self.sets.get(usize::from(way.0 - NextHop::FIRST_SET))?;
        self.ports.get(start as usize..end as usize)
    }
}

#[derive(Clone, Debug)]
pub struct Switch {
    pub(crate) name: String,
    pub(crate) settings: SwitchSettings,
    pub(crate) ports: Vec<SwitchPort>,
    pub(crate) routes: RoutingTable,
    /// Bytes in all queues.
    pub(crate) buffer_used: u64,
    /// Makes ECMP choices differ between switches.
    pub(crate) ecmp_salt: u64,
}

impl Switch {
    pub(crate) fn new(name: &str, settings: SwitchSettings, salt: u64) -> Switch {
        let (ports, routes) = (Vec::new(), RoutingTable::default());
        Switch { name: name.into(), settings, ports, routes, buffer_used: 0, ecmp_salt: salt }
    }

    pub(crate) fn add_port(&mut self, link: LinkId, direction: Direction) -> u16 {
        self.ports.push(SwitchPort::new(link, direction, &self.settings));
        (self.ports.len() - 1) as u16
    }

    /// Changes the settings. Queued frames stay; new thresholds apply from the next frame on.
    pub(crate) fn set_settings(&mut self, settings: SwitchSettings) {
        self.settings = settings;
        for port in &mut self.ports {
            match settings.watchdog {
                None => port.watchdog = None,
                Some(_) => {
                    port.watchdog.get_or_insert_with(WatchdogState::new);
                }
            }
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn settings(&self) -> &SwitchSettings {
        &self.settings
    }

    /// The links at its ports and their egress directions.
    pub fn links(&self) -> impl Iterator<Item = (LinkId, Direction)> {
        self.ports.iter().map(|port| (port.link, port.direction))
    }

    /// Bytes in all queues.
    pub fn buffer_used(&self) -> u64 {
        self.buffer_used
    }

    /// Queued bytes of a priority at the port to a link; zero if the link is not connected to this switch.
    pub fn depth(&self, link: LinkId, priority: u8) -> u64 {
        let port = self.ports.iter().find(|port| port.link == link);
        port.map_or(0, |port| port.queues[usize::from(priority & 7)].depth)
    }

    /// Bit mask of the paused priorities at the port to a link.
    pub fn paused_priorities(&self, link: LinkId) -> u8 {
        self.ports.iter().find(|port| port.link == link).map_or(0, |port| port.pause_state.mask())
    }

    pub fn counters(&self, link: LinkId) -> Option<PortCounters> {
        let port = self.ports.iter().find(|port| port.link == link)?;
        Some(PortCounters {
            sent_frames: port.sent_frames,
            sent_bytes: port.sent_bytes,
            received_frames: port.received_frames,
            dropped_frames: port.dropped_frames,
            ecn_marked: port.marked,
            pauses_sent: port.pause_generator.sent(),
            pauses_received: port.pause_state.received(),
            paused_ns: port.pause_state.total_ns(),
            max_queue_bytes: port.queues.iter().map(|queue| queue.max_depth).max().unwrap_or(0),
            watchdog_fired: port.watchdog_fired,
        })
    }

    #[inline]
    pub(crate) fn egress_port(&self, host: u32, flow: u64) -> Option<u16> {
        let way = *self.routes.next_hops.get(host as usize)?;
        if way.0 < NextHop::FIRST_SET {
            return Some(way.0);
        }
        match *self.routes.port_set(way)? {
            [] => None,
            [only] => Some(only),
            ref ports => Some(ports[Seed(self.ecmp_salt).below(ports.len() as u64, &[flow]) as usize]),
        }
    }

    /// Whether the buffer has room for a frame.
    pub(crate) fn admit(
        &self,
        ingress: u16,
        egress: u16,
        priority: u8,
        bytes: u64,
    ) -> Result<(), FrameDropReason> {
        let at = usize::from(priority);
        let out = &self.ports[usize::from(egress)];
        if self.settings.watchdog.is_some_and(|watchdog| watchdog.action == WatchdogAction::Drop)
            && out.watchdog.as_ref().is_some_and(|guard| guard.active >> priority & 1 == 1)
        {
            return Err(FrameDropReason::Watchdog);
        }
        if self.buffer_used + bytes > self.settings.buffer {
            return Err(FrameDropReason::BufferFull);
        }
        match &self.settings.pfc {
            Some(flow) if flow.priorities >> priority & 1 == 1 => {
                let held = self.ports[usize::from(ingress)].queues[at].ingress_bytes;
                // The frame that crosses XOFF still counts against the pool; the headroom holds the frames
                // after it.
                let fits = held < flow.xoff || held + bytes <= flow.xoff + flow.headroom;
                if fits { Ok(()) } else { Err(FrameDropReason::HeadroomFull) }
            }
            _ if out.queues[at].depth + bytes > self.settings.queue_limit => Err(FrameDropReason::QueueFull),
            _ => Ok(()),
        }
    }

    /// Queues an admitted frame. Returns true if the ingress port must pause its sender.
    pub(crate) fn enqueue(
        &mut self,
        now: u64,
        egress: u16,
        priority: u8,
        slot: u32,
        slots: &mut FramePool,
    ) -> bool {
        let frame = slots.slot_mut(slot);
        frame.next = NO_SLOT;
        let (ingress, bytes) = (frame.ingress, u64::from(frame.bytes));
        self.buffer_used += bytes;
        let out = &mut self.ports[usize::from(egress)];
        out.occupied |= 1 << priority;
        let queue = &mut out.queues[usize::from(priority)];
        queue.depth += bytes;
        queue.max_depth = queue.max_depth.max(queue.depth);
        match queue.first {
            NO_SLOT => queue.first = slot,
            _ => slots.slot_mut(queue.last).next = slot,
        }
        queue.last = slot;
        let flow = self.settings.pfc.as_ref();
        let SwitchPort { pause_generator: ingress, queues, .. } = &mut self.ports[usize::from(ingress)];
        let held = &mut queues[usize::from(priority)].ingress_bytes;
        *held += bytes;
        ingress.on_enqueue(flow, now, priority, *held)
    }

    /// Accounts for a frame that left its queue. Returns true if the ingress port must resume its sender.
    pub(crate) fn release(&mut self, priority: u8, ingress: u16, bytes: u32) -> bool {
        let bytes = u64::from(bytes);
        self.buffer_used -= bytes;
        let flow = self.settings.pfc.as_ref();
        let SwitchPort { pause_generator: ingress, queues, .. } = &mut self.ports[usize::from(ingress)];
        let held = &mut queues[usize::from(priority)].ingress_bytes;
        *held -= bytes;
        ingress.on_dequeue(flow, priority, *held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(settings: SwitchSettings) -> Switch {
        let mut switch = Switch::new("s", settings, 1);
        for port in 0..3 {
            switch.add_port(LinkId(port), Direction::Forward);
        }
        switch
    }

    /// Queues a frame for the first port.
    fn enqueue(switch: &mut Switch, slots: &mut FramePool, priority: u8, bytes: u32) -> bool {
        let slot = slots.reserve();
        (slots.slot_mut(slot).ingress, slots.slot_mut(slot).bytes) = (1, bytes);
        switch.enqueue(0, 0, priority, slot, slots)
    }

    #[test]
    fn marking_probability_rises_linearly_and_then_jumps() {
        let marking = EcnMarking { kmin: 1_000, kmax: 2_000, pmax_per_billion: 100_000_000 };
        assert_eq!(
            [0, 1_000, 1_500, 1_999, 2_000].map(|depth| marking.probability(depth)),
            [0, 0, 50_000_000, 99_900_000, PER_BILLION]
        );
    }

    #[test]
    fn strict_scheduling_serves_the_highest_unpaused_priority() {
        let (mut switch, mut slots) = (switch(SwitchSettings::default()), FramePool::default());
        for priority in [1, 6, 3] {
            enqueue(&mut switch, &mut slots, priority, 100);
        }
        let port = &mut switch.ports[0];
        assert_eq!(port.next_priority(Scheduling::Strict), Some(6));
        port.pause_state.apply(0, 6, 10);
        assert_eq!(port.next_priority(Scheduling::Strict), Some(3));
    }

    #[test]
    fn round_robin_takes_turns() {
        let (mut switch, mut slots) = (switch(SwitchSettings::default()), FramePool::default());
        for _ in 0..2 {
            for priority in [1, 6, 3] {
                enqueue(&mut switch, &mut slots, priority, 100);
            }
        }
        let port = &mut switch.ports[0];
        let mut served = Vec::new();
        while let Some(priority) = port.next_priority(Scheduling::RoundRobin) {
            port.dequeue(priority, &mut slots);
            served.push(priority);
        }
        assert_eq!(served, [1, 3, 6, 1, 3, 6]);
    }

    #[test]
    fn lossless_priority_drops_only_beyond_its_headroom() {
        let flow = PfcSettings { xoff: 1_000, xon: 500, headroom: 250, ..PfcSettings::default() };
        let mut switch = switch(SwitchSettings { pfc: Some(flow), ..SwitchSettings::default() });
        let mut slots = FramePool::default();
        let mut reported = Vec::new();
        let mut fate = Vec::new();
        for _ in 0..13 {
            let admitted = switch.admit(1, 0, 3, 100);
            fate.push(admitted);
            if admitted.is_ok() {
                reported.push(enqueue(&mut switch, &mut slots, 3, 100));
            }
        }
        assert_eq!(fate.iter().filter(|fate| fate.is_ok()).count(), 12);
        assert_eq!(fate[12], Err(FrameDropReason::HeadroomFull));
        assert_eq!(reported.iter().position(|reported| *reported), Some(9), "{reported:?}");
        assert_eq!(switch.admit(2, 0, 3, 100), Ok(()), "another port has its own headroom");
        assert_eq!(switch.buffer_used(), 1_200);
    }

    #[test]
    fn lossy_priority_drops_beyond_its_queue_limit() {
        let mut switch =
            switch(SwitchSettings { queue_limit: 250, buffer: 400, ..SwitchSettings::default() });
        assert_eq!(switch.admit(1, 0, 7, 251), Err(FrameDropReason::QueueFull));
        enqueue(&mut switch, &mut FramePool::default(), 7, 250);
        assert_eq!(switch.admit(1, 2, 7, 151), Err(FrameDropReason::BufferFull));
        assert_eq!(switch.admit(1, 2, 7, 150), Ok(()));
    }

    #[test]
    fn ecmp_spreads_flows_and_keeps_each_on_one_path() {
        let mut switch = switch(SwitchSettings::default());
        switch.routes.next_hops = alloc::vec![switch.routes.add(&[0, 1, 2])];
        let mut counts = [0; 3];
        for flow in 0..3_000 {
            let port = switch.egress_port(0, flow).expect("a path");
            assert_eq!(switch.egress_port(0, flow), Some(port));
            counts[usize::from(port)] += 1;
        }
        assert!(counts.iter().all(|count| (900..1_100).contains(count)), "{counts:?}");
        assert_eq!(switch.egress_port(1, 0), None);
    }
}
