//! Declarative header layouts: each field has a byte offset and, where it shares a byte, a range of bits.

use crate::{Gid, PartitionKey, Psn, Qpn, QueueKey};

/// The position of a field. Bit 0 is the most significant bit of `byte`.
#[derive(Clone, Copy)]
pub(crate) struct BitSpan {
    pub(crate) byte: usize,
    pub(crate) bit: usize,
    pub(crate) width: usize,
}

/// A value stored in a span of bits.
pub(crate) trait Field {
    /// Default width in bits.
    const WIDTH: usize;
    fn read(bytes: &[u8], at: BitSpan) -> Self;
    fn write(&self, bytes: &mut [u8], at: BitSpan);
}

/// Reads up to 64 bits as a number.
pub(crate) fn read_bits(bytes: &[u8], at: BitSpan) -> u64 {
    let end = at.bit + at.width;
    let span = &bytes[at.byte..at.byte + end.div_ceil(8)];
    let all = span.iter().fold(0u128, |number, byte| number << 8 | u128::from(*byte));
    let number = all >> (span.len() * 8 - end);
    (number & ((1 << at.width) - 1)) as u64
}

/// Writes a number into these bits and leaves the others unchanged.
pub(crate) fn write_bits(number: u64, bytes: &mut [u8], at: BitSpan) {
    let end = at.bit + at.width;
    let span = &mut bytes[at.byte..at.byte + end.div_ceil(8)];
    let shift = span.len() * 8 - end;
    let mask = ((1u128 << at.width) - 1) << shift;
    let value = u128::from(number) << shift & mask;
    for (index, byte) in span.iter_mut().rev().enumerate() {
        *byte = *byte & !((mask >> (8 * index)) as u8) | (value >> (8 * index)) as u8;
    }
}

/// Implements [`Field`] for types that convert to and from a number.
macro_rules! number_field {
    ($($kind:ty, $width:literal, $from:expr, $to:expr;)*) => {$(
        impl $crate::layout::Field for $kind {
            const WIDTH: usize = $width;
            fn read(bytes: &[u8], at: $crate::layout::BitSpan) -> Self {
                $from($crate::layout::read_bits(bytes, at))
            }
            fn write(&self, bytes: &mut [u8], at: $crate::layout::BitSpan) {
                $crate::layout::write_bits($to(*self), bytes, at);
            }
        }
    )*};
}
pub(crate) use number_field;

number_field! {
    bool, 1, |n| n != 0, u64::from;
    u8, 8, |n| n as u8, u64::from;
    u16, 16, |n| n as u16, u64::from;
    u32, 32, |n| n as u32, u64::from;
    u64, 64, |n| n, |n| n;
    Qpn, 24, |n| Qpn::new(n as u32), |n: Qpn| n.value().into();
    Psn, 24, |n| Psn::new(n as u32), |n: Psn| n.value().into();
    QueueKey, 32, |n| QueueKey(n as u32), |n: QueueKey| n.0.into();
    PartitionKey, 16, |n| PartitionKey(n as u16), |n: PartitionKey| n.0.into();
}

impl<const N: usize> Field for [u8; N] {
    const WIDTH: usize = N * 8;
    fn read(bytes: &[u8], at: BitSpan) -> Self {
        *bytes[at.byte..].first_chunk().expect("the field lies inside the message")
    }
    fn write(&self, bytes: &mut [u8], at: BitSpan) {
        bytes[at.byte..at.byte + N].copy_from_slice(self);
    }
}

impl Field for Gid {
    const WIDTH: usize = 128;
    fn read(bytes: &[u8], at: BitSpan) -> Self {
        Gid(Field::read(bytes, at))
    }
    fn write(&self, bytes: &mut [u8], at: BitSpan) {
        self.0.write(bytes, at);
    }
}

/// Declares a struct and its wire layout, and optionally its text with the fields in braces. Bits without a field are
/// reserved: written as zero, ignored when parsed.
macro_rules! layout {
    (
        $(#[$doc:meta])*
        pub struct $name:ident: $length:literal bytes $(, $text:literal)? {
            $( $(#[$field_doc:meta])* $field:ident: $kind:ty = $byte:literal $([$from:literal .. $to:literal])?, )*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
        pub struct $name { $( $(#[$field_doc])* pub $field: $kind, )* }

        impl $crate::layout::Field for $name {
            const WIDTH: usize = $length * 8;
            fn read(bytes: &[u8], at: $crate::layout::BitSpan) -> Self {
                let bytes = &bytes[at.byte..];
                $name { $( $field: $crate::layout::Field::read(bytes, $crate::layout::bit_span!($kind, $byte $([$from .. $to])?)), )* }
            }
            fn write(&self, bytes: &mut [u8], at: $crate::layout::BitSpan) {
                let bytes = &mut bytes[at.byte..];
                $( $crate::layout::Field::write(&self.$field, bytes, $crate::layout::bit_span!($kind, $byte $([$from .. $to])?)); )*
            }
        }

        $crate::display::display!($name { $($field),* } $($text)?);
    };
}
pub(crate) use layout;

macro_rules! bit_span {
    ($kind:ty, $byte:literal) => {
        $crate::layout::BitSpan { byte: $byte, bit: 0, width: <$kind as $crate::layout::Field>::WIDTH }
    };
    ($kind:ty, $byte:literal [$from:literal .. $to:literal]) => {
        $crate::layout::BitSpan { byte: $byte, bit: $from, width: $to - $from }
    };
}
pub(crate) use bit_span;

/// The span of a struct that starts at the first byte.
pub(crate) const START: BitSpan = BitSpan { byte: 0, bit: 0, width: 0 };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_changes_only_its_bits_and_read_returns_them() {
        for (byte, bit, width) in [(0, 0, 64), (1, 5, 3), (2, 0, 20), (2, 26, 6), (3, 7, 1), (0, 4, 64)] {
            let at = BitSpan { byte, bit, width };
            let mut bytes = [0xff; 12];
            write_bits(0, &mut bytes, at);
            let cleared: u32 = bytes.iter().map(|byte| byte.count_zeros()).sum();
            assert_eq!(cleared as usize, width);
            let number = 0x9bcd_ef01_2345_678b & (u64::MAX >> (64 - width));
            write_bits(number, &mut bytes, at);
            assert_eq!(read_bits(&bytes, at), number);
        }
    }
}
