//! MADs in segments: the sender's transfer and the receiver's assembly (IBA 13.6).

use alloc::vec::Vec;
use softhca_wire::{MadHeader, RmppHeader, RmppKind};

pub type Datagram = [u8; MadHeader::DATAGRAM_LEN];

/// How many segments a receiver lets the sender send before the next ACK.
const WINDOW: u32 = 64;
/// The first bytes of a MAD, which an ACK repeats.
const ACK_LEN: usize = 36;
/// The response time that segments state: 4.096 µs · 2^18 is about a second.
const RESPONSE_TIME: u8 = 18;
/// The bit of responses in a method.
const RESPONSE: u8 = 0x80;

/// Whether a MAD is part of a transfer.
pub fn is_active(mad: &Datagram) -> bool {
    let header = RmppHeader::of(mad);
    RmppHeader::data_offset(mad[1]).is_some() && header.version == 1 && header.is_active
}

/// Whether a program asks for segments. It states neither the version nor the kind: OpenSM sets this flag only.
pub fn wants_segments(mad: &Datagram) -> bool {
    RmppHeader::data_offset(mad[1]).is_some() && RmppHeader::of(mad).is_active
}

/// A MAD that its sender segments.
pub struct Transfer {
    mad: Vec<u8>,
    data_offset: usize,
    acknowledged: u32,
    window: u32,
}

impl Transfer {
    /// A transfer of a MAD; `None` if its class has none, or the MAD lacks a part of its header.
    pub fn new(mad: &[u8]) -> Option<Transfer> {
        let data_offset = RmppHeader::data_offset(*mad.get(1)?)?;
        // One segment is sent before the receiver has said how many it takes.
        (mad.len() >= data_offset).then(|| Transfer {
            mad: mad.into(),
            data_offset,
            acknowledged: 0,
            window: 1,
        })
    }

    fn segments(&self) -> u32 {
        let data = self.mad.len() - self.data_offset;
        data.div_ceil(MadHeader::DATAGRAM_LEN - self.data_offset).max(1) as u32
    }

    /// The segments that may be sent and are not acknowledged.
    pub fn due(&self) -> impl Iterator<Item = Datagram> + '_ {
        (self.acknowledged + 1..=self.window.min(self.segments())).map(|number| self.segment(number))
    }

    fn segment(&self, number: u32) -> Datagram {
        let count = self.segments();
        let room = MadHeader::DATAGRAM_LEN - self.data_offset;
        let start = self.data_offset + (number as usize - 1) * room;
        let data = &self.mad[start.min(self.mad.len())..self.mad.len().min(start + room)];
        let mut segment = [0; MadHeader::DATAGRAM_LEN];
        segment[..self.data_offset].copy_from_slice(&self.mad[..self.data_offset]);
        segment[self.data_offset..][..data.len()].copy_from_slice(data);
        // Lengths count the header of the class in every segment.
        let class_header = (self.data_offset - ACK_LEN) as u32;
        let length = match number {
            _ if number == count => class_header + data.len() as u32,
            1 => count * class_header + (self.mad.len() - self.data_offset) as u32,
            _ => 0,
        };
        let header = RmppHeader {
            version: 1,
            kind: RmppKind::DATA,
            response_time: RESPONSE_TIME,
            is_last: number == count,
            is_first: number == 1,
            is_active: true,
            status: 0,
            segment: number,
            length,
        };
        header.write_to(&mut segment);
        segment
    }

    /// Handles an ACK. Returns whether the transfer is complete, or `None` if the ACK says nothing new.
    pub fn acknowledge(&mut self, ack: &RmppHeader) -> Option<bool> {
        if ack.segment > self.window.min(self.segments()) || ack.length < self.window {
            return None;
        }
        if ack.segment <= self.acknowledged && ack.length == self.window {
            return None;
        }
        self.acknowledged = self.acknowledged.max(ack.segment);
        self.window = ack.length.min(self.segments());
        Some(self.acknowledged == self.segments())
    }
}

/// A MAD of which segments arrive.
pub struct Assembly {
    first: Datagram,
    data: Vec<u8>,
    received: u32,
    window: u32,
}

/// The reaction to a segment.
pub enum Assembled {
    /// Nothing, or this ACK.
    Waits(Option<Datagram>),
    /// The MAD is complete.
    Complete(Datagram, Vec<u8>),
    /// The transfer cannot go on; the sender gets the reason.
    Failed(Datagram),
}

impl Assembly {
    /// An assembly that starts with a segment.
    pub fn new(first: &Datagram) -> Assembly {
        Assembly { first: *first, data: Vec::new(), received: 0, window: 1 }
    }

    /// Handles a segment, up to this many bytes of data.
    pub fn receive(&mut self, segment: &Datagram, limit: usize) -> Assembled {
        let header = RmppHeader::of(segment);
        let Some(offset) = RmppHeader::data_offset(segment[1]) else { return Assembled::Waits(None) };
        if header.segment != self.received + 1 {
            // Lost or repeated: the sender learns what has arrived.
            return Assembled::Waits(Some(self.ack(segment)));
        }
        let room = MadHeader::DATAGRAM_LEN - offset;
        let class_header = offset - ACK_LEN;
        // A last segment that states an impossible length is taken as full.
        let stated = (header.length as usize).checked_sub(class_header).filter(|length| *length <= room);
        let length = if header.is_last { stated.unwrap_or(room) } else { room };
        if self.data.len() + length > limit {
            return Assembled::Failed(reply(segment, RmppKind::ABORT, TOO_MANY_SEGMENTS, self.received, 0));
        }
        self.received += 1;
        self.data.extend_from_slice(&segment[offset..offset + length]);
        if header.is_last {
            self.window = self.received;
            let mut mad = self.first[..offset].to_vec();
            mad.append(&mut self.data);
            return Assembled::Complete(self.ack(segment), mad);
        }
        let needs_ack = self.received == self.window;
        if needs_ack {
            self.window = self.received.saturating_add(WINDOW);
        }
        Assembled::Waits(needs_ack.then(|| self.ack(segment)))
    }

    fn ack(&self, segment: &Datagram) -> Datagram {
        reply(segment, RmppKind::ACK, 0, self.received, self.window)
    }
}

/// The status of an abort: more segments than the receiver takes.
const TOO_MANY_SEGMENTS: u8 = 122;

fn reply(segment: &Datagram, kind: RmppKind, status: u8, number: u32, length: u32) -> Datagram {
    let mut mad = [0; MadHeader::DATAGRAM_LEN];
    mad[..ACK_LEN].copy_from_slice(&segment[..ACK_LEN]);
    mad[3] ^= RESPONSE;
    let header = RmppHeader {
        version: 1,
        kind,
        response_time: RESPONSE_TIME,
        is_last: false,
        is_first: false,
        is_active: true,
        status,
        segment: number,
        length,
    };
    header.write_to(&mut mad);
    mad
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mad(length: usize) -> Vec<u8> {
        let mut mad: Vec<u8> = (0..length).map(|index| index as u8).collect();
        (mad[0], mad[1], mad[2], mad[3]) = (1, 3, 2, 0x92);
        mad
    }

    /// Carries a transfer over a link that loses the packets with these numbers.
    fn carry(bytes: &[u8], lost: &[usize]) -> (Vec<u8>, usize) {
        let mut transfer = Transfer::new(bytes).expect("a class with RMPP");
        let mut assembly = None;
        let mut sent = 0;
        let mut is_lost = || {
            sent += 1;
            lost.contains(&sent)
        };
        for _ in 0..1000 {
            let mut acks = Vec::new();
            for segment in transfer.due().collect::<Vec<_>>() {
                if is_lost() {
                    continue;
                }
                match assembly.get_or_insert_with(|| Assembly::new(&segment)).receive(&segment, 1 << 20) {
                    Assembled::Waits(ack) => acks.extend(ack),
                    Assembled::Complete(_, mad) => return (mad, sent),
                    Assembled::Failed(_) => panic!("within the limit"),
                }
            }
            for ack in acks {
                if !is_lost() {
                    transfer.acknowledge(&RmppHeader::of(&ack));
                }
            }
        }
        panic!("the transfer does not end");
    }

    proptest! {
        #[test]
        fn every_mad_arrives_as_it_was_sent(length in 56usize..60_000, lost in prop::collection::vec(1usize..400, 0..20)) {
            let bytes = mad(length);
            let (received, _) = carry(&bytes, &lost);
            // The RMPP header is the first segment's.
            prop_assert_eq!(&received[..24], &bytes[..24]);
            prop_assert_eq!(&received[36..], &bytes[36..]);
        }

        #[test]
        fn no_packet_panics(packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 256), 1..20)) {
            let mut transfer = Transfer::new(&mad(2000)).expect("a class with RMPP");
            let mut assembly = None;
            for packet in packets {
                let mut packet: Datagram = packet.try_into().expect("256 bytes");
                packet[1] = 3;
                transfer.acknowledge(&RmppHeader::of(&packet));
                prop_assert!(transfer.due().count() <= 10);
                assembly.get_or_insert_with(|| Assembly::new(&packet)).receive(&packet, 500);
            }
        }
    }

    #[test]
    fn lengths_are_those_of_the_specification() {
        let transfer = Transfer::new(&mad(56 + 450)).expect("a class with RMPP");
        let headers: Vec<RmppHeader> =
            (1..=3).map(|number| RmppHeader::of(&transfer.segment(number))).collect();
        assert_eq!(
            headers.iter().map(|header| header.length).collect::<Vec<_>>(),
            [3 * 20 + 450, 0, 20 + 50]
        );
        assert_eq!(
            headers.iter().map(|header| (header.is_first, header.is_last)).collect::<Vec<_>>(),
            [(true, false), (false, false), (false, true)]
        );
    }

    #[test]
    fn a_mad_beyond_the_limit_is_aborted() {
        let transfer = Transfer::new(&mad(56 + 1000)).expect("a class with RMPP");
        let mut assembly = Assembly::new(&transfer.segment(1));
        for number in 1..=2 {
            assert!(matches!(assembly.receive(&transfer.segment(number), 500), Assembled::Waits(_)));
        }
        let Assembled::Failed(abort) = assembly.receive(&transfer.segment(3), 500) else {
            panic!("an abort")
        };
        assert_eq!((RmppHeader::of(&abort).kind, abort[3]), (RmppKind::ABORT, 0x12));
    }
}
