//! The first header of a captured frame, by the registry of tcpdump.org.

use softhca_wire::{EtherType, FirstHeader, Malformed};

/// The link types that can carry RoCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkType {
    Ethernet,
    /// IP of either version without a link header.
    Ip,
    /// Four bytes of address family, then IP: the loopback of BSD and macOS.
    Loopback,
    /// Linux's header for the interface `any`.
    LinuxSll,
    /// The second version of that.
    LinuxSll2,
}

impl LinkType {
    const LOOPBACK_LEN: usize = 4;
    const LINUX_SLL_LEN: usize = 16;
    const LINUX_SLL2_LEN: usize = 20;

    /// The link type with this number, if it can carry RoCE.
    pub const fn from_number(number: u16) -> Option<LinkType> {
        Some(match number {
            0 | 108 => LinkType::Loopback,
            1 => LinkType::Ethernet,
            12 | 14 | 101 | 228 | 229 => LinkType::Ip,
            113 => LinkType::LinuxSll,
            276 => LinkType::LinuxSll2,
            _ => return None,
        })
    }

    /// Takes off what this crate understands and `wire` does not.
    pub(super) fn strip_link_header(self, bytes: &[u8]) -> Result<(FirstHeader, &[u8]), Malformed> {
        let needed = match self {
            LinkType::Ethernet => return Ok((FirstHeader::Ethernet, bytes)),
            LinkType::Ip => return Ok((FirstHeader::Ip, bytes)),
            LinkType::Loopback => Self::LOOPBACK_LEN,
            LinkType::LinuxSll => Self::LINUX_SLL_LEN,
            LinkType::LinuxSll2 => Self::LINUX_SLL2_LEN,
        };
        let available = bytes.len();
        let (header, rest) = bytes.split_at_checked(needed).ok_or(Malformed::Truncated {
            what: "cooked header",
            needed,
            available,
        })?;
        let kind =
            |at: usize| FirstHeader::Payload(EtherType(u16::from_be_bytes([header[at], header[at + 1]])));
        let link = match self {
            LinkType::LinuxSll => kind(14),
            LinkType::LinuxSll2 => kind(0),
            _ => FirstHeader::Ip,
        };
        Ok((link, rest))
    }
}
