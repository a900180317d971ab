//! The invariant CRC: over everything that no router changes.
//!
//! The IP and UDP headers enter with the fields masked that change on the way; the IPv4 identification,
//! flags and length are not among them, which is why an [`Envelope`] names the identification.

use crate::{Bth, Envelope, Malformed};
use core::net::IpAddr;
use crc32fast::Hasher;

/// Bytes of the ICRC at the end of every packet.
pub const ICRC_LEN: usize = 4;

/// An invariant CRC as it stands on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Icrc(pub [u8; ICRC_LEN]);

impl Icrc {
    /// The CRC of `transport`, everything from the BTH to the pad bytes, inside of this envelope.
    ///
    /// # Panics
    /// If `transport` is shorter than a BTH.
    #[inline]
    pub fn compute(envelope: &Envelope, transport: &[u8]) -> Icrc {
        Self::compute_with_flags(envelope, DONT_FRAGMENT, transport)
    }

    /// The same with the IPv4 flags and fragment offset as captured; every RoCE sender sets DF alone.
    pub fn compute_with_flags(envelope: &Envelope, flags: u16, transport: &[u8]) -> Icrc {
        let mut masked = [0xff; 8 + 40 + 8 + Bth::LEN];
        let udp_length = (8 + transport.len() + ICRC_LEN) as u16;
        let at = match (envelope.source, envelope.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let ip: &mut [u8; 20] = (&mut masked[8..28]).try_into().expect("twenty bytes");
                ip[0] = 0x45;
                ip[2..4].copy_from_slice(&(udp_length + 20).to_be_bytes());
                ip[4..6].copy_from_slice(&envelope.identification.to_be_bytes());
                ip[6..8].copy_from_slice(&flags.to_be_bytes());
                ip[9] = 17;
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&destination.octets());
                28
            }
            (source, destination) => {
                let v6 = |address| match address {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                    IpAddr::V6(v6) => v6.octets(),
                };
                let ip: &mut [u8; 40] = (&mut masked[8..48]).try_into().expect("forty bytes");
                ip[0] = 0x6f;
                ip[4..6].copy_from_slice(&udp_length.to_be_bytes());
                ip[6] = 17;
                ip[8..24].copy_from_slice(&v6(source));
                ip[24..40].copy_from_slice(&v6(destination));
                48
            }
        };
        let udp = &mut masked[at..at + 8];
        udp[..2].copy_from_slice(&envelope.source_port.to_be_bytes());
        udp[2..4].copy_from_slice(&crate::ROCE_PORT.to_be_bytes());
        udp[4..6].copy_from_slice(&udp_length.to_be_bytes());
        let (bth, rest) = transport.split_at(Bth::LEN);
        masked[at + 8..at + 8 + Bth::LEN].copy_from_slice(bth);
        masked[at + 8 + 4] = 0xff;
        Self::finish(&masked[..at + 8 + Bth::LEN], rest)
    }

    /// The CRC of a packet whose masked headers are at hand.
    pub(crate) fn finish(masked: &[u8], rest: &[u8]) -> Icrc {
        let mut hasher = Hasher::new();
        hasher.update(masked);
        hasher.update(rest);
        Icrc(hasher.finalize().to_le_bytes())
    }

    /// Writes the CRC over the last four bytes of `packet`, which runs from the BTH to the ICRC.
    #[inline]
    pub fn seal(envelope: &Envelope, packet: &mut [u8]) {
        let (transport, icrc) = packet.split_at_mut(packet.len() - ICRC_LEN);
        icrc.copy_from_slice(&Icrc::compute(envelope, transport).0);
    }

    /// Splits `packet`, from the BTH to the ICRC, into the bytes before the CRC and the CRC.
    pub fn split(packet: &[u8]) -> Result<(&[u8], Icrc), Malformed> {
        match packet.split_last_chunk() {
            Some((transport, icrc)) if transport.len() >= Bth::LEN => Ok((transport, Icrc(*icrc))),
            _ => Err(Malformed::Truncated {
                what: "BTH and ICRC",
                needed: Bth::LEN + ICRC_LEN,
                available: packet.len(),
            }),
        }
    }
}

/// The IPv4 flags of every RoCE sender: don't fragment, offset zero.
pub const DONT_FRAGMENT: u16 = 0x4000;
