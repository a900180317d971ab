//! A switch: ports with a queue per priority, one buffer that they share, marking, and who is to be paused.
//!
//! A switch decides and counts; [`crate::Network`] moves the frames.

use crate::pause::{FlowControl, Ingress, Pauses};
use crate::seed::Seed;
use crate::slots::{NONE, Slots};
use crate::{CableId, Direction, LossCause, PER_BILLION};
use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;
use softhca_queue::PortCounters;

/// Random early marking of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marking {
    /// Up to so many bytes waiting nothing is marked.
    pub least: u64,
    /// From so many bytes on everything is marked.
    pub most: u64,
    /// How many packets in a billion are marked just below `most`; from `least` on it rises in a line.
    pub per_billion: u32,
}

impl Marking {
    /// Kmin 5 KB, Kmax 200 KB, Pmax 1 %: the set of the DCQCN paper.
    pub const PAPER: Marking = Marking { least: 5_000, most: 200_000, per_billion: PER_BILLION / 100 };

    /// How many packets in a billion are marked behind so many bytes.
    pub const fn chance(&self, depth: u64) -> u32 {
        if depth <= self.least {
            0
        } else if depth >= self.most {
            PER_BILLION
        } else {
            let span = (self.most - self.least) as u128;
            (self.per_billion as u128 * (depth - self.least) as u128 / span) as u32
        }
    }
}

impl Default for Marking {
    fn default() -> Marking {
        Marking::PAPER
    }
}

/// What a watchdog does with a queue that stood still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Remedy {
    /// Loses what waits and what comes.
    #[default]
    Drop,
    /// Sends in spite of the pause.
    Forward,
}

/// Looks for queues that a pause keeps from moving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watchdog {
    /// How long a queue may stand still.
    pub after: Duration,
    /// How long no pause frame must have come before the queue is trusted again.
    pub restore: Duration,
    /// What is done meanwhile.
    pub remedy: Remedy,
}

impl Default for Watchdog {
    /// 200 ms each, the usual figures of switch software.
    fn default() -> Watchdog {
        let time = Duration::from_millis(200);
        Watchdog { after: time, restore: time, remedy: Remedy::Drop }
    }
}

/// Which of its priorities a port serves first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Scheduling {
    /// The highest that may send.
    #[default]
    Strict,
    /// One frame of each in turn.
    RoundRobin,
}

/// What is set once per switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchSettings {
    /// Bytes that all queues share.
    pub buffer: u64,
    /// Bytes that a queue of a priority outside of flow control may hold.
    pub queue_limit: u64,
    /// Marks packets of senders that react to marks; none marks nothing.
    pub marking: Option<Marking>,
    /// Pauses senders before frames are lost; none lets frames be lost.
    pub flow_control: Option<FlowControl>,
    /// Looks for queues that stand still; none lets them.
    pub watchdog: Option<Watchdog>,
    /// Which priority goes first.
    pub scheduling: Scheduling,
    /// Tells the depth of queues whenever it passes a multiple of so many bytes; zero does not.
    pub sample_step: u64,
}

impl Default for SwitchSettings {
    fn default() -> SwitchSettings {
        SwitchSettings {
            buffer: 16 << 20,
            queue_limit: 1 << 20,
            marking: Some(Marking::PAPER),
            flow_control: Some(FlowControl::default()),
            watchdog: None,
            scheduling: Scheduling::Strict,
            sample_step: 0,
        }
    }
}

/// The watchdog's notes of one port.
#[derive(Clone, Debug)]
pub(crate) struct Guard {
    /// Since when each queue stands still; the end of time if it does not.
    pub since: [u64; 8],
    /// The queues that it acts on.
    pub active: u8,
    /// When the last pause frame came for each.
    pub paused_at: [u64; 8],
}

impl Guard {
    fn idle() -> Box<Guard> {
        Box::new(Guard { since: [u64::MAX; 8], active: 0, paused_at: [0; 8] })
    }
}

/// What a port does for one priority.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(crate) struct Queue {
    /// The slots of the first and the last frame that wait to leave; those between follow each other.
    first: u32,
    last: u32,
    /// Their bytes, and the most that there were.
    pub depth: u64,
    deepest: u64,
    /// Bytes in the switch that came by this port.
    pub held: u64,
}

impl Queue {
    const EMPTY: Queue = Queue { first: NONE, last: NONE, depth: 0, deepest: 0, held: 0 };

    /// How many frames there are, counted one by one.
    pub fn len(&self, slots: &mut Slots) -> u64 {
        let next = |slot: &u32| Some(slots.at(*slot).next).filter(|next| *next != NONE);
        core::iter::successors(Some(self.first).filter(|first| *first != NONE), next).count() as u64
    }
}

/// A port of a switch. With a thousand hosts, ports do not fit the caches: what a frame touches is the first line and
/// one of a queue.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct SwitchPort {
    pub cable: CableId,
    /// Which way frames leave.
    pub direction: Direction,
    /// The queues that hold frames.
    pub occupied: u8,
    /// The port will be looked at when its line is free.
    pub waits: bool,
    /// The priority that was served last.
    served: u8,
    pub pauses: Pauses,
    pub ingress: Ingress,
    pub sent_frames: u64,
    pub sent_bytes: u64,
    pub received_frames: u64,
    pub queues: [Queue; 8],
    /// There is one if the switch has a watchdog.
    pub guard: Option<Box<Guard>>,
    pub lost_frames: u64,
    pub marked: u64,
    pub watchdog_fired: u64,
}

impl SwitchPort {
    fn new(cable: CableId, direction: Direction, settings: &SwitchSettings) -> SwitchPort {
        SwitchPort {
            cable,
            direction,
            occupied: 0,
            waits: false,
            served: 0,
            pauses: Pauses::default(),
            ingress: Ingress::default(),
            sent_frames: 0,
            sent_bytes: 0,
            received_frames: 0,
            queues: [Queue::EMPTY; 8],
            guard: settings.watchdog.map(|_| Guard::idle()),
            lost_frames: 0,
            marked: 0,
            watchdog_fired: 0,
        }
    }

    /// The priority to be served next, if one may send.
    pub fn next_priority(&self, scheduling: Scheduling) -> Option<u8> {
        let may = self.occupied & !self.pauses.mask();
        if may == 0 {
            return None;
        }
        Some(match scheduling {
            Scheduling::Strict => 7 - may.leading_zeros() as u8,
            Scheduling::RoundRobin => {
                let turned = may.rotate_right(u32::from(self.served) + 1);
                (turned.trailing_zeros() as u8 + self.served + 1) & 7
            }
        })
    }

    /// Takes the next frame of a queue out.
    pub fn pop(&mut self, priority: u8, slots: &mut Slots) -> Option<u32> {
        let queue = &mut self.queues[usize::from(priority)];
        let slot = Some(queue.first).filter(|first| *first != NONE)?;
        let frame = slots.at(slot);
        queue.first = frame.next;
        queue.depth -= u64::from(frame.bytes);
        if queue.first == NONE {
            self.occupied &= !(1 << priority);
        }
        self.served = priority;
        Some(slot)
    }
}

/// How a switch finds the way: for each host a port, or a set of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routes {
    /// By host: the way to it.
    pub by_host: Vec<Way>,
    /// The ports of all sets, and where in them each set begins and ends.
    ports: Vec<u16>,
    sets: Vec<(u32, u32)>,
    /// The ports of the tree that datagrams for groups take.
    pub flood: Vec<u16>,
}

/// The port that leads to a host, which is below [`Way::SETS`]; or, from there on, a set of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way(u16);

impl Way {
    /// The host cannot be reached.
    pub const NONE: Way = Way(u16::MAX);
    const SETS: u16 = 1 << 15;
}

impl Routes {
    /// The way over any of these ports.
    ///
    /// # Panics
    /// If there are more than 32,000 sets.
    pub fn add(&mut self, ports: &[u16]) -> Way {
        if let [only] = *ports
            && only < Way::SETS
        {
            return Way(only);
        }
        let is_same = |(start, end): &(u32, u32)| self.ports[*start as usize..*end as usize] == *ports;
        let set = self.sets.iter().position(is_same).unwrap_or_else(|| {
            let start = self.ports.len() as u32;
            self.ports.extend_from_slice(ports);
            self.sets.push((start, self.ports.len() as u32));
            self.sets.len() - 1
        });
        assert!(set < usize::from(u16::MAX - Way::SETS), "a switch with {set} sets of ports");
        Way(Way::SETS + set as u16)
    }

    /// The ports of a set.
    #[inline]
    fn set(&self, way: Way) -> Option<&[u16]> {
        let (start, end) = *self.sets.get(usize::from(way.0 - Way::SETS))?;
        self.ports.get(start as usize..end as usize)
    }
}

/// A switch.
#[derive(Clone, Debug)]
pub struct Switch {
    pub(crate) name: String,
    pub(crate) settings: SwitchSettings,
    pub(crate) ports: Vec<SwitchPort>,
    pub(crate) routes: Routes,
    /// Bytes in all queues.
    pub(crate) used: u64,
    /// Makes the choice of a path differ from switch to switch.
    pub(crate) salt: u64,
}

impl Switch {
    pub(crate) fn new(name: &str, settings: SwitchSettings, salt: u64) -> Switch {
        let (ports, routes) = (Vec::new(), Routes::default());
        Switch { name: name.into(), settings, ports, routes, used: 0, salt }
    }

    pub(crate) fn add_port(&mut self, cable: CableId, direction: Direction) -> u16 {
        self.ports.push(SwitchPort::new(cable, direction, &self.settings));
        (self.ports.len() - 1) as u16
    }

    /// Goes on with other settings. What waits keeps waiting; thresholds count from the next frame on.
    pub(crate) fn change(&mut self, settings: SwitchSettings) {
        self.settings = settings;
        for port in &mut self.ports {
            match settings.watchdog {
                None => port.guard = None,
                Some(_) => {
                    port.guard.get_or_insert_with(Guard::idle);
                }
            }
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its settings.
    pub fn settings(&self) -> &SwitchSettings {
        &self.settings
    }

    /// The cables at its ports, and which way they lead from here.
    pub fn cables(&self) -> impl Iterator<Item = (CableId, Direction)> {
        self.ports.iter().map(|port| (port.cable, port.direction))
    }

    /// Bytes in all queues.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Bytes that wait to leave over a cable with this priority; zero if the cable is not the switch's.
    pub fn depth(&self, cable: CableId, priority: u8) -> u64 {
        let port = self.ports.iter().find(|port| port.cable == cable);
        port.map_or(0, |port| port.queues[usize::from(priority & 7)].depth)
    }

    /// The priorities that may not leave over a cable now, as a mask.
    pub fn paused(&self, cable: CableId) -> u8 {
        self.ports.iter().find(|port| port.cable == cable).map_or(0, |port| port.pauses.mask())
    }

    /// What the port at a cable counted.
    pub fn counters(&self, cable: CableId) -> Option<PortCounters> {
        let port = self.ports.iter().find(|port| port.cable == cable)?;
        Some(PortCounters {
            sent_frames: port.sent_frames,
            sent_bytes: port.sent_bytes,
            received_frames: port.received_frames,
            lost_frames: port.lost_frames,
            marked: port.marked,
            pauses_sent: port.ingress.sent(),
            pauses_received: port.pauses.received(),
            paused_ns: port.pauses.total_ns(),
            deepest: port.queues.iter().map(|queue| queue.deepest).max().unwrap_or(0),
            watchdog_fired: port.watchdog_fired,
        })
    }

    /// The port that a packet of a flow leaves by.
    #[inline]
    pub(crate) fn egress(&self, host: u32, flow: u64) -> Option<u16> {
        let way = *self.routes.by_host.get(host as usize)?;
        if way.0 < Way::SETS {
            return Some(way.0);
        }
        match *self.routes.set(way)? {
            [] => None,
            [only] => Some(only),
            ref ports => Some(ports[Seed(self.salt).below(ports.len() as u64, &[flow]) as usize]),
        }
    }

    /// Whether the buffer takes a frame.
    pub(crate) fn admits(
        &self,
        ingress: u16,
        egress: u16,
        priority: u8,
        bytes: u64,
    ) -> Result<(), LossCause> {
        let at = usize::from(priority);
        let out = &self.ports[usize::from(egress)];
        if self.settings.watchdog.is_some_and(|watchdog| watchdog.remedy == Remedy::Drop)
            && out.guard.as_ref().is_some_and(|guard| guard.active >> priority & 1 == 1)
        {
            return Err(LossCause::Watchdog);
        }
        if self.used + bytes > self.settings.buffer {
            return Err(LossCause::BufferFull);
        }
        match &self.settings.flow_control {
            Some(flow) if flow.priorities >> priority & 1 == 1 => {
                let held = self.ports[usize::from(ingress)].queues[at].held;
                // The frame that passes XOFF is the last that the pool takes; the headroom is for what follows.
                let fits = held < flow.xoff || held + bytes <= flow.xoff + flow.headroom;
                if fits { Ok(()) } else { Err(LossCause::HeadroomFull) }
            }
            _ if out.queues[at].depth + bytes > self.settings.queue_limit => Err(LossCause::QueueFull),
            _ => Ok(()),
        }
    }

    /// Queues a frame that was admitted. True if its sender is to be told to stop.
    pub(crate) fn enqueue(
        &mut self,
        now: u64,
        egress: u16,
        priority: u8,
        slot: u32,
        slots: &mut Slots,
    ) -> bool {
        let frame = slots.at(slot);
        frame.next = NONE;
        let (ingress, bytes) = (frame.ingress, u64::from(frame.bytes));
        self.used += bytes;
        let out = &mut self.ports[usize::from(egress)];
        out.occupied |= 1 << priority;
        let queue = &mut out.queues[usize::from(priority)];
        queue.depth += bytes;
        queue.deepest = queue.deepest.max(queue.depth);
        match queue.first {
            NONE => queue.first = slot,
            _ => slots.at(queue.last).next = slot,
        }
        queue.last = slot;
        let flow = self.settings.flow_control.as_ref();
        let SwitchPort { ingress, queues, .. } = &mut self.ports[usize::from(ingress)];
        let held = &mut queues[usize::from(priority)].held;
        *held += bytes;
        ingress.fill(flow, now, priority, *held)
    }

    /// A frame left its queue. True if its sender is to be told to go on.
    pub(crate) fn release(&mut self, priority: u8, ingress: u16, bytes: u32) -> bool {
        let bytes = u64::from(bytes);
        self.used -= bytes;
        let flow = self.settings.flow_control.as_ref();
        let SwitchPort { ingress, queues, .. } = &mut self.ports[usize::from(ingress)];
        let held = &mut queues[usize::from(priority)].held;
        *held -= bytes;
        ingress.release(flow, priority, *held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(settings: SwitchSettings) -> Switch {
        let mut switch = Switch::new("s", settings, 1);
        for port in 0..3 {
            switch.add_port(CableId(port), Direction::Forward);
        }
        switch
    }

    /// Queues a frame for the first port.
    fn enqueue(switch: &mut Switch, slots: &mut Slots, priority: u8, bytes: u32) -> bool {
        let slot = slots.reserve();
        (slots.at(slot).ingress, slots.at(slot).bytes) = (1, bytes);
        switch.enqueue(0, 0, priority, slot, slots)
    }

    #[test]
    fn the_chance_of_a_mark_rises_in_a_line_and_then_jumps() {
        let marking = Marking { least: 1_000, most: 2_000, per_billion: 100_000_000 };
        assert_eq!(
            [0, 1_000, 1_500, 1_999, 2_000].map(|depth| marking.chance(depth)),
            [0, 0, 50_000_000, 99_900_000, PER_BILLION]
        );
    }

    #[test]
    fn strict_scheduling_serves_the_highest_priority_that_may_send() {
        let (mut switch, mut slots) = (switch(SwitchSettings::default()), Slots::default());
        for priority in [1, 6, 3] {
            enqueue(&mut switch, &mut slots, priority, 100);
        }
        let port = &mut switch.ports[0];
        assert_eq!(port.next_priority(Scheduling::Strict), Some(6));
        port.pauses.apply(0, 6, 10);
        assert_eq!(port.next_priority(Scheduling::Strict), Some(3));
    }

    #[test]
    fn round_robin_takes_turns() {
        let (mut switch, mut slots) = (switch(SwitchSettings::default()), Slots::default());
        for _ in 0..2 {
            for priority in [1, 6, 3] {
                enqueue(&mut switch, &mut slots, priority, 100);
            }
        }
        let port = &mut switch.ports[0];
        let mut served = Vec::new();
        while let Some(priority) = port.next_priority(Scheduling::RoundRobin) {
            port.pop(priority, &mut slots);
            served.push(priority);
        }
        assert_eq!(served, [1, 3, 6, 1, 3, 6]);
    }

    #[test]
    fn a_lossless_priority_loses_only_what_its_headroom_does_not_hold() {
        let flow = FlowControl { xoff: 1_000, xon: 500, headroom: 250, ..FlowControl::default() };
        let mut switch = switch(SwitchSettings { flow_control: Some(flow), ..SwitchSettings::default() });
        let mut slots = Slots::default();
        let mut told = Vec::new();
        let mut fate = Vec::new();
        for _ in 0..13 {
            let admitted = switch.admits(1, 0, 3, 100);
            fate.push(admitted);
            if admitted.is_ok() {
                told.push(enqueue(&mut switch, &mut slots, 3, 100));
            }
        }
        assert_eq!(fate.iter().filter(|fate| fate.is_ok()).count(), 12);
        assert_eq!(fate[12], Err(LossCause::HeadroomFull));
        assert_eq!(told.iter().position(|told| *told), Some(9), "{told:?}");
        assert_eq!(switch.admits(2, 0, 3, 100), Ok(()), "another port has its own headroom");
        assert_eq!(switch.used(), 1_200);
    }

    #[test]
    fn other_priorities_lose_what_their_queue_does_not_hold() {
        let mut switch =
            switch(SwitchSettings { queue_limit: 250, buffer: 400, ..SwitchSettings::default() });
        assert_eq!(switch.admits(1, 0, 7, 251), Err(LossCause::QueueFull));
        enqueue(&mut switch, &mut Slots::default(), 7, 250);
        assert_eq!(switch.admits(1, 2, 7, 151), Err(LossCause::BufferFull));
        assert_eq!(switch.admits(1, 2, 7, 150), Ok(()));
    }

    #[test]
    fn flows_spread_over_equal_paths_and_each_keeps_its_own() {
        let mut switch = switch(SwitchSettings::default());
        switch.routes.by_host = alloc::vec![switch.routes.add(&[0, 1, 2])];
        let mut counts = [0; 3];
        for flow in 0..3_000 {
            let port = switch.egress(0, flow).expect("a path");
            assert_eq!(switch.egress(0, flow), Some(port));
            counts[usize::from(port)] += 1;
        }
        assert!(counts.iter().all(|count| (900..1_100).contains(count)), "{counts:?}");
        assert_eq!(switch.egress(1, 0), None);
    }
}
