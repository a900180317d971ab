//! How many packets of each sort a capture has.

use crate::{Contents, Packet};
use std::fmt;

/// Counts of packets. Its text is the last line of `softhca trace`, which programs read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Tally {
    /// Records.
    pub packets: u64,
    /// RoCE packets whose ICRC is right.
    pub intact: u64,
    /// RoCE packets whose ICRC is wrong.
    pub damaged: u64,
    /// RoCE packets that are not well formed, whatever their ICRC.
    pub malformed: u64,
}

impl Tally {
    /// Counts one packet.
    pub fn count(&mut self, packet: &Packet<'_>) {
        self.packets += 1;
        match &packet.contents {
            Contents::Roce(roce) if roce.intact => self.intact += 1,
            Contents::Roce(_) => self.damaged += 1,
            Contents::Malformed(..) => self.malformed += 1,
            Contents::Pause(_) | Contents::Other(_) => {}
        }
    }

    /// RoCE packets of every sort.
    pub const fn roce(&self) -> u64 {
        self.intact + self.damaged + self.malformed
    }

    /// Whether every RoCE packet is well formed and intact.
    pub const fn is_clean(&self) -> bool {
        self.damaged == 0 && self.malformed == 0
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} packets, {} roce, {} icrc ok, {} icrc bad, {} malformed",
            self.packets,
            self.roce(),
            self.intact,
            self.damaged,
            self.malformed
        )
    }
}
