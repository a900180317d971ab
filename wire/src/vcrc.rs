//! The variant CRC (VCRC): covers a whole InfiniBand packet, and is made anew on every link (IBA 7.8.2).

/// Bytes of the VCRC at the end of every packet.
pub const VCRC_LEN: usize = 2;

/// x^16 + x^12 + x^3 + x + 1 (0x100B) with its bits reversed: a packet's bits count from the least significant one.
const POLYNOMIAL: u16 = 0xd008;
/// Bytes that one step of the computation covers.
const STEP: usize = 8;

/// The contribution of each byte value that so many bytes follow in a step.
static TABLES: [[u16; 256]; STEP] = {
    let mut tables = [[0; 256]; STEP];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u16;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 != 0 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut distance = 1;
    while distance < STEP {
        let mut byte = 0;
        while byte < 256 {
            let nearer: u16 = tables[distance - 1][byte];
            tables[distance][byte] = nearer >> 8 ^ tables[0][(nearer & 0xff) as usize];
            byte += 1;
        }
        distance += 1;
    }
    tables
};

/// A VCRC in wire byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Vcrc(pub [u8; VCRC_LEN]);

impl Vcrc {
    /// The VCRC of a packet from the LRH to the ICRC.
    pub fn compute(packet: &[u8]) -> Vcrc {
        let (steps, rest) = packet.as_chunks::<STEP>();
        let crc = steps.iter().fold(0xffff, |crc: u16, step| {
            let [low, high] = crc.to_le_bytes();
            let mut bytes = *step;
            bytes[0] ^= low;
            bytes[1] ^= high;
            let parts = bytes.iter().zip(TABLES.iter().rev());
            parts.fold(0, |crc, (byte, table)| crc ^ table[usize::from(*byte)])
        });
        let crc = rest.iter().fold(crc, |crc, byte| crc >> 8 ^ TABLES[0][usize::from(crc as u8 ^ byte)]);
        Vcrc((!crc).to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn steps_have_the_result_of_single_bits(packet in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut crc = 0xffffu16;
            for bit in packet.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1)) {
                let carry = crc as u8 & 1 ^ bit;
                crc = crc >> 1 ^ if carry != 0 { POLYNOMIAL } else { 0 };
            }
            prop_assert_eq!(Vcrc::compute(&packet), Vcrc((!crc).to_le_bytes()));
        }

        #[test]
        fn every_error_of_one_or_two_bits_is_found(
            packet in proptest::collection::vec(any::<u8>(), 24..300),
            bits in any::<[prop::sample::Index; 2]>(),
        ) {
            let mut damaged = packet.clone();
            let mut flip = |bit: usize| damaged[bit / 8] ^= 1 << (bit % 8);
            let bits = bits.map(|bit| bit.index(packet.len() * 8));
            flip(bits[0]);
            if bits[0] != bits[1] {
                flip(bits[1]);
            }
            prop_assert_ne!(Vcrc::compute(&packet), Vcrc::compute(&damaged));
        }
    }
}
