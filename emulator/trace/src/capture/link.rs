//! What a captured frame starts with, by the registry of tcpdump.org.

use softhca_wire::{EtherType, Link, Malformed};

/// The link types that can carry RoCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkType {
    /// Ethernet.
    Ethernet,
    /// IP of either version without a link header.
    Ip,
    /// Four bytes of address family, then IP: the loopback of BSD and macOS.
    Loopback,
    /// What Linux writes for the interface `any`.
    Cooked,
    /// The second version of that.
    Cooked2,
}

impl LinkType {
    const LOOPBACK_LEN: usize = 4;
    const COOKED_LEN: usize = 16;
    const COOKED2_LEN: usize = 20;

    /// The link type with this number, if it can carry RoCE.
    pub const fn from_number(number: u16) -> Option<LinkType> {
        Some(match number {
            0 | 108 => LinkType::Loopback,
            1 => LinkType::Ethernet,
            12 | 14 | 101 | 228 | 229 => LinkType::Ip,
            113 => LinkType::Cooked,
            276 => LinkType::Cooked2,
            _ => return None,
        })
    }

    /// Takes off what this crate understands and `wire` does not.
    pub(super) fn strip(self, bytes: &[u8]) -> Result<(Link, &[u8]), Malformed> {
        let needed = match self {
            LinkType::Ethernet => return Ok((Link::Ethernet, bytes)),
            LinkType::Ip => return Ok((Link::Ip, bytes)),
            LinkType::Loopback => Self::LOOPBACK_LEN,
            LinkType::Cooked => Self::COOKED_LEN,
            LinkType::Cooked2 => Self::COOKED2_LEN,
        };
        let available = bytes.len();
        let (header, rest) = bytes.split_at_checked(needed).ok_or(Malformed::Truncated {
            what: "cooked header",
            needed,
            available,
        })?;
        let kind = |at: usize| Link::Payload(EtherType(u16::from_be_bytes([header[at], header[at + 1]])));
        let link = match self {
            LinkType::Cooked => kind(14),
            LinkType::Cooked2 => kind(0),
            _ => Link::Ip,
        };
        Ok((link, rest))
    }
}
