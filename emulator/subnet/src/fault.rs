//! Faults of links, switches and management agents.

use crate::packet::{Mad, Packet};
use crate::performance::PortCounter;
use crate::topology::PortId;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use softhca_wire::smp::Smp;
use thiserror::Error;

/// The shortest time that a link stays down or up in [`Fault::Flap`], in nanoseconds.
pub const MIN_FLAP_TIME: u64 = 1_000_000;
/// The most faults that wait for their time.
pub const MAX_SCHEDULED: usize = 10_000;
/// The most responses of slow agents that wait for their time.
const MAX_DELAYED: usize = 4096;

/// A fault of a port, or of the node that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Fault {
    /// The link of the port breaks.
    LinkDown,
    /// The link of the port works again.
    LinkUp,
    /// The link goes down and up repeatedly.
    Flap {
        /// How long it is down, in nanoseconds.
        down: u64,
        /// How long it is up in between.
        up: u64,
        /// How often it goes down.
        times: u32,
    },
    /// A counter of the port grows, as by the errors of a bad cable.
    Count {
        /// The counter.
        counter: PortCounter,
        /// By how much.
        count: u64,
    },
    /// Every so many packets that arrive at the port, one has a bit error and is dropped. Zero ends that.
    BitErrors {
        /// The number of packets.
        every: u32,
    },
    /// Every so many SMPs that arrive at the port, one finds no room in VL 15 and is dropped. Zero ends that.
    LoseSmps {
        /// The number of SMPs.
        every: u32,
    },
    /// The agents of the node answer later.
    SlowAgent {
        /// By how many nanoseconds. Zero ends that.
        delay: u64,
    },
    /// The port's node has an M_Key that its manager does not know. It answers no request without it.
    ManagementKey {
        /// The key. Zero removes it.
        key: u64,
    },
    /// The switch reboots: its links are down, and it forgets all settings.
    Reboot {
        /// For how many nanoseconds the links are down.
        down: u64,
    },
}

/// Why a fault is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FaultError {
    /// The node has no such port.
    #[error("the node does not have this port")]
    NoPort,
    /// Nothing is at the other end.
    #[error("the port has no link")]
    NoLink,
    /// HCAs do not reboot.
    #[error("only a switch reboots; its port is 0")]
    NoSwitch,
    /// [`MAX_SCHEDULED`] is reached.
    #[error("{MAX_SCHEDULED} faults wait for their time already")]
    TooMany,
}

/// Something that happens at its time.
pub enum Due {
    /// A fault begins.
    Fault(PortId, Fault),
    /// A switch has rebooted.
    Started(usize),
    /// A slow agent answers.
    Response(PortId, Box<Packet>),
}

/// Which of the packets at a port are dropped.
#[derive(Clone, Copy, Default)]
struct Nth {
    every: u32,
    seen: u32,
}

impl Nth {
    fn hits(&mut self) -> bool {
        self.seen += 1;
        let hits = self.seen >= self.every;
        if hits {
            self.seen = 0;
        }
        hits
    }
}

/// The faults in effect, and what waits for its time.
#[derive(Default)]
pub struct Faults {
    /// By time, and in the order in which they were added.
    waiting: BTreeMap<(u64, u64), Due>,
    added: u64,
    responses: usize,
    bit_errors: BTreeMap<PortId, Nth>,
    lost_smps: BTreeMap<PortId, Nth>,
    delays: BTreeMap<usize, u64>,
    /// When each switch that reboots starts.
    rebooting: BTreeMap<usize, u64>,
}

impl Faults {
    /// When something happens next.
    pub fn next_timeout(&self) -> Option<u64> {
        self.waiting.first_key_value().map(|((at, _), _)| *at)
    }

    /// Removes the next thing that happens until `now`.
    pub fn pop_due(&mut self, now: u64) -> Option<Due> {
        let entry = self.waiting.first_entry().filter(|entry| entry.key().0 <= now)?;
        let due = entry.remove();
        self.responses -= usize::from(matches!(due, Due::Response(..)));
        Some(due)
    }

    fn push(&mut self, at: u64, due: Due) {
        self.added += 1;
        self.waiting.insert((at, self.added), due);
    }

    /// Adds a fault for its time.
    pub fn schedule(&mut self, at: u64, port: PortId, fault: Fault) -> Result<(), FaultError> {
        self.schedule_due(at, Due::Fault(port, fault))
    }

    fn schedule_due(&mut self, at: u64, due: Due) -> Result<(), FaultError> {
        if self.waiting.len() - self.responses >= MAX_SCHEDULED {
            return Err(FaultError::TooMany);
        }
        self.push(at, due);
        Ok(())
    }

    /// The node of a switch is down from now on, and starts at a time. A later reboot replaces an earlier one.
    pub fn reboot(&mut self, node: usize, at: u64) -> Result<(), FaultError> {
        self.schedule_due(at, Due::Started(node))?;
        self.rebooting.insert(node, at);
        Ok(())
    }

    /// Whether a switch that rebooted starts at `now`.
    pub fn starts(&mut self, node: usize, now: u64) -> bool {
        let starts = self.rebooting.get(&node).is_some_and(|at| *at <= now);
        if starts {
            self.rebooting.remove(&node);
        }
        starts
    }

    pub fn is_rebooting(&self, node: usize) -> bool {
        self.rebooting.contains_key(&node)
    }

    pub fn set_bit_errors(&mut self, port: PortId, every: u32) {
        set(&mut self.bit_errors, port, every);
    }

    pub fn set_lost_smps(&mut self, port: PortId, every: u32) {
        set(&mut self.lost_smps, port, every);
    }

    pub fn set_delay(&mut self, node: usize, delay: u64) {
        match delay {
            0 => drop(self.delays.remove(&node)),
            _ => drop(self.delays.insert(node, delay)),
        }
    }

    /// Whether a packet that arrives at a port has a bit error.
    pub fn has_bit_error(&mut self, port: PortId) -> bool {
        self.bit_errors.get_mut(&port).is_some_and(Nth::hits)
    }

    /// Whether an SMP that arrives at a port finds no room.
    pub fn loses_smp(&mut self, port: PortId) -> bool {
        self.lost_smps.get_mut(&port).is_some_and(Nth::hits)
    }

    /// When an agent answers a request that arrives now.
    pub fn answers_at(&self, node: usize, now: u64) -> Option<u64> {
        self.delays.get(&node).map(|delay| now.saturating_add(*delay))
    }

    /// Keeps the response of a slow agent for its time. Returns false if too many wait.
    pub fn delay(&mut self, at: PortId, response: &Packet, end: u64) -> bool {
        let has_room = self.responses < MAX_DELAYED;
        if has_room {
            self.responses += 1;
            self.push(end, Due::Response(at, Box::new(*response)));
        }
        has_room
    }

    /// Takes the response to an SMP if it waits, and is due until `end`.
    pub fn take_response(&mut self, transaction_id: u64, end: u64) -> Option<(PortId, Packet)> {
        let is_response = |due: &Due| match due {
            Due::Response(_, packet) => {
                smp_of(packet).is_some_and(|smp| smp.transaction_id == transaction_id)
            }
            _ => false,
        };
        let key = *self.waiting.range(..=(end, u64::MAX)).find(|(_, due)| is_response(due))?.0;
        self.responses -= 1;
        match self.waiting.remove(&key)? {
            Due::Response(at, packet) => Some((at, *packet)),
            _ => None,
        }
    }
}

fn smp_of(packet: &Packet) -> Option<&Smp> {
    match &packet.mad {
        Mad::Subnet(smp) => Some(smp),
        Mad::General(_) => None,
    }
}

fn set(faults: &mut BTreeMap<PortId, Nth>, port: PortId, every: u32) {
    match every {
        0 => drop(faults.remove(&port)),
        _ => drop(faults.insert(port, Nth { every, seen: 0 })),
    }
}
