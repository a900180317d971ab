//! How many packets of each sort a capture has.

use crate::{Packet, PacketContents};
use std::fmt;

/// Counts of packets. Its text is the last line of `softhca trace`, which programs read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PacketCounts {
    /// Records.
    pub packets: u64,
    /// RoCE packets whose ICRC is right.
    pub icrc_ok: u64,
    /// RoCE packets whose ICRC is wrong.
    pub icrc_bad: u64,
    /// RoCE packets that are not well formed, whatever their ICRC.
    pub malformed: u64,
    /// Malformed packets that the snap length of the capture cut.
    pub cut: u64,
}

impl PacketCounts {
    /// Counts one packet.
    pub fn add(&mut self, packet: &Packet<'_>) {
        self.packets += 1;
        match &packet.contents {
            PacketContents::Roce(roce) if roce.icrc_ok => self.icrc_ok += 1,
            PacketContents::Roce(_) => self.icrc_bad += 1,
            PacketContents::Malformed(..) => {
                self.malformed += 1;
                self.cut += u64::from(packet.contents.is_cut());
            }
            PacketContents::Pause(_) | PacketContents::Other(_) => {}
        }
    }

    /// RoCE packets of every sort.
    pub const fn roce(&self) -> u64 {
        self.icrc_ok + self.icrc_bad + self.malformed
    }

    /// Whether every RoCE packet is well formed and intact.
    pub const fn is_clean(&self) -> bool {
        self.icrc_bad == 0 && self.malformed == 0
    }
}

/// The sentence about packets that the snap length of a capture cut.
pub(crate) fn cut_text(cut: u64) -> String {
    let (packets, were) = if cut == 1 { ("packet", "was") } else { ("packets", "were") };
    format!(
        "{cut} malformed {packets} {were} cut by the snap length of the capture. Capture whole packets (tcpdump -s 0) to have them analysed."
    )
}

impl fmt::Display for PacketCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.cut > 0 {
            writeln!(f, "{}", cut_text(self.cut))?;
        }
        write!(
            f,
            "{} packets, {} roce, {} icrc ok, {} icrc bad, {} malformed",
            self.packets,
            self.roce(),
            self.icrc_ok,
            self.icrc_bad,
            self.malformed
        )
    }
}
