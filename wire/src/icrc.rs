//! The invariant CRC (ICRC): covers all fields that routers do not change.
//!
//! The CRC masks the variant fields of the IP and UDP headers. It does cover the IPv4 identification, flags
//! and length, so [`AddressHeaders`] includes the identification.

use crate::{AddressHeaders, Bth, Grh, Ipv4, Lrh, Malformed};
use core::net::IpAddr;
use crc32fast::Hasher;

/// Bytes of the ICRC at the end of every packet.
pub const ICRC_LEN: usize = 4;

/// An ICRC in wire byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Icrc(pub [u8; ICRC_LEN]);

impl Icrc {
    /// The ICRC of `transport` (BTH to pad bytes) with these address headers.
    ///
    /// # Panics
    /// If `transport` is shorter than a BTH.
    #[inline]
    pub fn compute(addressing: &AddressHeaders, transport: &[u8]) -> Icrc {
        Self::compute_with_flags(addressing, Ipv4::DONT_FRAGMENT, transport)
    }

    /// Like [`Icrc::compute`], with the captured IPv4 flags and fragment offset. RoCE senders set only DF.
    pub fn compute_with_flags(addressing: &AddressHeaders, flags: u16, transport: &[u8]) -> Icrc {
        let mut masked = [0xff; 8 + 40 + 8 + Bth::LEN];
        let udp_length = (8 + transport.len() + ICRC_LEN) as u16;
        let at = match (addressing.source, addressing.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let ip: &mut [u8; 20] = (&mut masked[8..28]).try_into().expect("twenty bytes");
                ip[0] = 0x45;
                ip[2..4].copy_from_slice(&udp_length.wrapping_add(20).to_be_bytes());
                ip[4..6].copy_from_slice(&addressing.identification.to_be_bytes());
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
        udp[..2].copy_from_slice(&addressing.source_port.to_be_bytes());
        udp[2..4].copy_from_slice(&crate::ROCE_PORT.to_be_bytes());
        udp[4..6].copy_from_slice(&udp_length.to_be_bytes());
        let (bth, rest) = transport.split_at(Bth::LEN);
        masked[at + 8..at + 8 + Bth::LEN].copy_from_slice(bth);
        masked[at + 8 + 4] = 0xff;
        Self::finish(&masked[..at + 8 + Bth::LEN], rest)
    }

    /// The ICRC of a RoCE v1 packet: the masked GRH takes the place of the IP and UDP headers.
    ///
    /// # Panics
    /// If `transport` is shorter than a BTH.
    pub fn compute_v1(grh: &Grh, transport: &[u8]) -> Icrc {
        Self::compute_routed([0xff; Lrh::LEN], Some(grh), transport)
    }

    /// The ICRC of an InfiniBand packet. It covers the LRH except the virtual lane, which switches change.
    ///
    /// # Panics
    /// If `transport` is shorter than a BTH.
    pub fn compute_local(lrh: &Lrh, grh: Option<&Grh>, transport: &[u8]) -> Icrc {
        Self::compute_routed(Lrh { virtual_lane: 0xf, ..*lrh }.emit(), grh, transport)
    }

    /// The ICRC behind a masked LRH and perhaps a GRH.
    fn compute_routed(lrh: [u8; Lrh::LEN], grh: Option<&Grh>, transport: &[u8]) -> Icrc {
        let mut masked = [0xff; Lrh::LEN + Grh::LEN + Bth::LEN];
        masked[..Lrh::LEN].copy_from_slice(&lrh);
        let mut at = Lrh::LEN;
        if let Some(grh) = grh {
            let grh = Grh { traffic_class: 0xff, flow_label: 0xf_ffff, hop_limit: 0xff, ..*grh };
            grh.emit(&mut masked[at..]);
            at += Grh::LEN;
        }
        let (bth, rest) = transport.split_at(Bth::LEN);
        masked[at..at + Bth::LEN].copy_from_slice(bth);
        masked[at + 4] = 0xff;
        Self::finish(&masked[..at + Bth::LEN], rest)
    }

    /// The CRC of masked headers and the rest of the packet.
    fn finish(masked: &[u8], rest: &[u8]) -> Icrc {
        let mut hasher = Hasher::new();
        hasher.update(masked);
        hasher.update(rest);
        Icrc(hasher.finalize().to_le_bytes())
    }

    /// Writes the ICRC into the last four bytes of `packet` (BTH to ICRC).
    #[inline]
    pub fn write(addressing: &AddressHeaders, packet: &mut [u8]) {
        let (transport, icrc) = packet.split_at_mut(packet.len() - ICRC_LEN);
        icrc.copy_from_slice(&Icrc::compute(addressing, transport).0);
    }

    /// Whether `packet` (BTH to ICRC) ends with the correct ICRC for these address headers.
    #[inline]
    pub fn verify(addressing: &AddressHeaders, packet: &[u8]) -> bool {
        Icrc::split(packet).is_ok_and(|(transport, icrc)| icrc == Icrc::compute(addressing, transport))
    }

    /// The IPv4 identification below `limit` for which the ICRC of `packet` is correct, if any.
    ///
    /// For receivers that do not learn the identification, such as UDP sockets. The function tries the identification
    /// in `addressing` first, at the cost of [`Icrc::verify`]. It computes any other directly, because a CRC is linear.
    /// The difference between the received and the computed CRC is the difference between the identifications times a
    /// power of x. That power depends only on the packet's length.
    ///
    /// Each accepted identification lets one more of 2^32 corrupt packets pass. A limit of 64 (the segments of one
    /// send) lets 2^-26 of them pass, a limit of 65536 (senders that count) 2^-16.
    pub fn recover_identification(addressing: &AddressHeaders, packet: &[u8], limit: u32) -> Option<u16> {
        let (transport, icrc) = Icrc::split(packet).ok()?;
        let difference =
            u32::from_le_bytes(icrc.0) ^ u32::from_le_bytes(Icrc::compute(addressing, transport).0);
        let change = match (difference, addressing.source) {
            (0, _) => 0,
            (_, IpAddr::V4(_)) => {
                polynomial::message_change(difference, COVERED_AFTER_IDENTIFICATION + transport.len())?
            }
            (_, IpAddr::V6(_)) => return None,
        };
        let identification = addressing.identification ^ change;
        (u32::from(identification) < limit).then_some(identification)
    }

    /// Splits `packet` (BTH to ICRC) into the covered bytes and the ICRC.
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

/// Bytes that the ICRC covers between the IPv4 identification and the BTH.
const COVERED_AFTER_IDENTIFICATION: usize = 14 + 8;

/// CRC-32 as polynomial arithmetic over GF(2) modulo the generator. The most significant bit of a word is the
/// coefficient of x^0.
mod polynomial {
    const GENERATOR: u32 = 0xedb8_8320;
    const ONE: u32 = 1 << 31;

    /// At least the longest packet of the largest path MTU.
    const SPAN: usize = 4096 + 512;

    /// x^(-8i): removes i zero bytes.
    static INVERSE_POWERS: [u32; SPAN] = {
        let mut powers = [ONE; SPAN];
        let mut i = 1;
        while i < SPAN {
            let mut power = powers[i - 1];
            let mut bit = 0;
            while bit < 8 {
                power = if power & ONE != 0 { (power ^ GENERATOR) << 1 | 1 } else { power << 1 };
                bit += 1;
            }
            powers[i] = power;
            i += 1;
        }
        powers
    };

    /// The change to two bytes that changes the CRC by `difference` when `after` bytes follow them, if one
    /// exists.
    pub(super) fn message_change(mut difference: u32, after: usize) -> Option<u16> {
        // Two bytes m before n others contribute m * x^(8n + 32) to the CRC.
        let mut bytes = after + 4;
        while bytes >= SPAN {
            difference = without_bytes(difference, 4096);
            bytes -= 4096;
        }
        let change = without_bytes(difference, bytes);
        (change & 0xffff == 0).then_some(((change >> 16) as u16).swap_bytes())
    }

    /// `word` times x^(-8 * bytes), for `bytes` from 3 up to `SPAN`.
    fn without_bytes(word: u32, bytes: usize) -> u32 {
        let mut product = 0;
        // Byte k of the word has weight x^8k, so its factor is the power k entries earlier: four short,
        // independent multiplications.
        for (byte, mut factor) in
            word.to_be_bytes().into_iter().zip((0..4).map(|k| INVERSE_POWERS[bytes - k]))
        {
            for bit in (0..8).rev() {
                product ^= factor & 0u32.wrapping_sub(u32::from(byte) >> bit & 1);
                factor = factor >> 1 ^ GENERATOR & 0u32.wrapping_sub(factor & 1);
            }
        }
        product
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use core::net::Ipv4Addr;

    #[test]
    fn unknown_identification_is_recovered_for_every_length() {
        let addressing =
            AddressHeaders::between(Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::new(10, 0, 0, 2).into());
        for length in (Bth::LEN..5000).step_by(4).chain([65_000]) {
            let mut packet = vec![0x5a; length + ICRC_LEN];
            for identification in [0, 1, 2, 63, 64, 255, 256, 0x1234, 0xffff] {
                Icrc::write(&AddressHeaders { identification, ..addressing }, &mut packet);
                assert_eq!(
                    Icrc::recover_identification(&addressing, &packet, 1 << 16),
                    Some(identification),
                    "{length}"
                );
                let small = (identification < 64).then_some(identification);
                assert_eq!(Icrc::recover_identification(&addressing, &packet, 64), small);
                assert_eq!(Icrc::verify(&addressing, &packet), identification == 0);
            }
        }
    }

    #[test]
    fn damaged_packet_is_rarely_accepted_with_another_identification() {
        let addressing =
            AddressHeaders::between(Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::new(10, 0, 0, 2).into());
        let mut packet = vec![7; 1024];
        Icrc::write(&addressing, &mut packet);
        for bit in 0..packet.len() * 8 {
            packet[bit / 8] ^= 1 << (bit % 8);
            let masked = bit / 8 == 4;
            assert_eq!(Icrc::recover_identification(&addressing, &packet, 64).is_some(), masked, "bit {bit}");
            packet[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
