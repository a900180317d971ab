//! The local route header (LRH): the first header of every InfiniBand packet (IBA 7.7).

use crate::display::display;
use crate::malformed::header_bytes;
use crate::smp::Lid;
use crate::{Bth, Grh, ICRC_LEN, Malformed};

/// The local route header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Lrh {
    /// The virtual lane on the link, 4 bits: 15 for subnet management.
    pub virtual_lane: u8,
    /// The service level, 4 bits.
    pub service_level: u8,
    /// A GRH follows. Without it, the BTH follows.
    pub has_grh: bool,
    /// The destination.
    pub dlid: Lid,
    /// The source.
    pub slid: Lid,
    /// Words of four bytes from this header to the ICRC, 11 bits.
    pub words: u16,
}

impl Lrh {
    /// Bytes on the wire.
    pub const LEN: usize = 8;
    /// The longest packet from this header to the ICRC: 11 bits count its words.
    pub const MAX_PACKET: usize = 0x7ff * 4;

    /// The length from this header to the ICRC of a packet with so many bytes from the BTH to the ICRC.
    pub const fn packet_length(has_grh: bool, transport: usize) -> usize {
        Lrh::LEN + if has_grh { Grh::LEN } else { 0 } + transport
    }

    /// Parses the header at the start of `bytes`. Raw packets, which have no BTH, are not supported.
    pub fn parse(bytes: &[u8]) -> Result<Lrh, Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "LRH")?;
        let invalid = |what, value: u64| Err(Malformed::Field { what, value });
        if b[0] & 0xf != 0 {
            return Err(Malformed::Version { what: "LRH link", version: b[0] & 0xf });
        }
        if b[1] & 0b1100 != 0 || b[4] & 0xf8 != 0 {
            return invalid("reserved bits of the LRH", u64::from(b[1] & 0b1100 | b[4] & 0xf8));
        }
        let has_grh = match b[1] & 3 {
            3 => true,
            2 => false,
            raw => return invalid("LRH link next header", raw.into()),
        };
        let half = |at: usize| u16::from_be_bytes([b[at], b[at + 1]]);
        let header = Lrh {
            virtual_lane: b[0] >> 4,
            service_level: b[1] >> 4,
            has_grh,
            dlid: Lid(half(2)),
            words: half(4),
            slid: Lid(half(6)),
        };
        let shortest = Lrh::packet_length(has_grh, Bth::LEN + ICRC_LEN);
        match usize::from(header.words) * 4 {
            length if length < shortest => {
                Err(Malformed::Length { what: "LRH packet", stated: length, actual: shortest })
            }
            _ => Ok(header),
        }
    }

    /// The bytes of the header.
    pub fn emit(&self) -> [u8; Lrh::LEN] {
        let next_header = if self.has_grh { 3 } else { 2 };
        let ([d0, d1], [s0, s1]) = (self.dlid.0.to_be_bytes(), self.slid.0.to_be_bytes());
        let [w0, w1] = (self.words & 0x7ff).to_be_bytes();
        [self.virtual_lane << 4, self.service_level << 4 | next_header, d0, d1, w0, w1, s0, s1]
    }
}

display!(Lrh { slid, dlid, service_level, virtual_lane } "LID {slid} > LID {dlid} sl={service_level} vl={virtual_lane}");
