//! Traps that wait for a TrapRepress, and are repeated until then.

use crate::PortId;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use softhca_wire::smp::{Notice, TrapNumber};

/// A trap that was sent and not repressed.
struct PendingTrap {
    notice: Notice,
    transaction_id: u64,
    repeat_at: u64,
}

/// At most one trap of each number per port.
#[derive(Default)]
pub struct Traps {
    pending: BTreeMap<(PortId, u16), PendingTrap>,
    last_transaction: u64,
}

impl Traps {
    /// Stores a trap to be sent now. It replaces an older one of the same number at the same port, and is then sent when
    /// that would have been repeated: what a manager cannot repress must not keep it busy.
    pub fn raise(&mut self, port: PortId, notice: Notice, now: u64) {
        self.last_transaction += 1;
        let key = (port, notice.header.trap.0);
        let repeat_at = self.pending.get(&key).map_or(now, |older| older.repeat_at);
        self.pending.insert(key, PendingTrap { notice, transaction_id: self.last_transaction, repeat_at });
    }

    /// Ends a trap of a node.
    pub fn repress(&mut self, node: usize, transaction_id: u64) {
        self.pending.retain(|(port, _), trap| port.node != node || trap.transaction_id != transaction_id);
    }

    /// Ends a trap that nobody can receive.
    pub fn discard(&mut self, port: PortId, number: TrapNumber) {
        self.pending.remove(&(port, number.0));
    }

    /// The traps that are due, which are repeated after the time that `interval` returns for a port.
    pub fn due(&mut self, now: u64, interval: impl Fn(PortId) -> u64) -> Vec<(PortId, Notice, u64)> {
        let mut due = Vec::new();
        for ((port, _), trap) in self.pending.iter_mut().filter(|(_, trap)| trap.repeat_at <= now) {
            trap.repeat_at = now + interval(*port);
            due.push((*port, trap.notice, trap.transaction_id));
        }
        due
    }

    /// When the next trap is due.
    pub fn next_timeout(&self) -> Option<u64> {
        self.pending.values().map(|trap| trap.repeat_at).min()
    }
}
