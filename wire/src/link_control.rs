//! Link control between two SoftHCA ports: who is there, how much may be sent, who is paused.
//!
//! Not RoCE: it has a UDP port of its own. Every message has the same size, stands alone, and may be lost,
//! repeated or reordered: amounts are cumulative, so that the last word is the whole truth. They count from
//! when the two [`Incarnation`]s named in a message met.

use crate::{MacAddress, Malformed, Pfc};
use core::fmt;
use core::num::NonZeroU64;

/// The UDP port of link control.
pub const LINK_PORT: u16 = 4792;

/// The first bytes of every message.
const MAGIC: u32 = u32::from_be_bytes(*b"SHLC");
/// The version that this build speaks.
const VERSION: u8 = 1;
/// Where the body begins.
const BODY_OFFSET: usize = 24;

/// One life of a port on a link. A peer that comes back with a higher number has forgotten everything, be it
/// that it started again or that it took us for dead; a lower number is an old message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub NonZeroU64);

impl Incarnation {
    /// The incarnation with this number; zero, which stands for "unknown", becomes one.
    pub const fn new(number: u64) -> Incarnation {
        match NonZeroU64::new(number) {
            Some(number) => Incarnation(number),
            None => Incarnation(NonZeroU64::MIN),
        }
    }

    /// The life after this one.
    pub const fn next(self) -> Incarnation {
        Incarnation(self.0.saturating_add(1))
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// Which half of a question and its answer a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ExchangeKind {
    /// The receiver shall answer.
    Query = 0,
    /// The answer; it wants none.
    Reply = 1,
}

impl ExchangeKind {
    fn parse(byte: u8) -> Result<ExchangeKind, Malformed> {
        match byte {
            0 => Ok(ExchangeKind::Query),
            1 => Ok(ExchangeKind::Reply),
            _ => Err(Malformed::Field { what: "link exchange", value: byte.into() }),
        }
    }

    const fn suffix(self) -> &'static str {
        match self {
            ExchangeKind::Query => "?",
            ExchangeKind::Reply => "!",
        }
    }
}

/// What a sender has used of its grants and what it would like. Amounts are bytes of kernel charge;
/// `consumed + returned` is how far the sender has come in what was granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GrantRequest {
    /// Used for frames that were sent, those before the first grant included.
    pub consumed: u64,
    /// Given back unused.
    pub returned: u64,
    /// How far grants must reach for the frame that waits; at most `consumed + returned` when none waits.
    pub needed: u64,
    /// How far the sender would like grants to reach.
    pub wanted: u64,
}

/// How far a sender may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Grant {
    /// How far `consumed + returned` may reach. Never less than in an earlier grant.
    pub granted: u64,
    /// The `returned` that the receiver has seen.
    pub returned: u64,
    /// How much the sender may hold unused; the rest is needed by others and shall be returned.
    pub max_unused: u64,
}

/// A sign of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Heartbeat {
    /// Question or answer.
    pub exchange: ExchangeKind,
    /// Chosen by who asks, repeated in the answer.
    pub stamp: u64,
}

/// The content of a priority flow control frame (IEEE 802.1Qbb).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pause {
    /// Which entries of `quanta` count, bit n for priority n. The upper byte is reserved.
    pub classes: u16,
    /// For how long, in units of 512 bit times; zero means go on.
    pub quanta: [u16; 8],
    /// The rate of the line whose bit times are meant, in bits per second; zero for 100 Gb/s. The two ends of a real
    /// cable have one rate, those of a link need not.
    pub rate: u64,
}

impl Pause {
    /// What a priority flow control frame asks for, on a line of this rate.
    pub fn from_pfc(frame: &Pfc, rate: u64) -> Pause {
        let mut pause = Pause { rate, ..Pause::default() };
        for (priority, quanta) in frame.pause.iter().enumerate() {
            if let Some(quanta) = quanta {
                pause.classes |= 1 << priority;
                pause.quanta[priority] = *quanta;
            }
        }
        pause
    }

    /// The frame that asks for this, from the port with that address.
    pub fn to_pfc(&self, source: MacAddress) -> Pfc {
        let quanta = |priority: usize| (self.classes >> priority & 1 == 1).then(|| self.quanta[priority]);
        Pfc { source, pause: core::array::from_fn(quanta) }
    }

    /// Asks for what `later` asks for too, which has the last word.
    pub fn merge(&mut self, later: &Pause) {
        self.rate = later.rate;
        self.classes |= later.classes;
        for priority in (0..8).filter(|priority| later.classes >> priority & 1 == 1) {
            self.quanta[priority] = later.quanta[priority];
        }
    }
}

/// Whether a port's frames leave in the order of their PSNs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameOrder {
    /// They do: what comes in another order was mixed up by a host.
    #[default]
    InOrder = 0,
    /// A fault rule before the port changes it: what arrives is what was meant.
    Reordered = 1,
}

impl FrameOrder {
    fn parse(byte: u8) -> Result<FrameOrder, Malformed> {
        match byte {
            0 => Ok(FrameOrder::InOrder),
            1 => Ok(FrameOrder::Reordered),
            _ => Err(Malformed::Field { what: "link order", value: byte.into() }),
        }
    }
}

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each variant is the message of its type")]
pub enum Body {
    /// I exist, in this incarnation.
    Hello(ExchangeKind),
    Request(GrantRequest),
    Grant(Grant),
    Heartbeat(Heartbeat),
    Pause(Pause),
}

/// One link control datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// The life of the port that sends.
    pub sender: Incarnation,
    /// The life of the port that is addressed, if the sender knows it.
    pub receiver: Option<Incarnation>,
    /// The order of the sender's frames.
    pub frame_order: FrameOrder,
    /// What is said.
    pub body: Body,
}

impl Message {
    /// Bytes on the wire, of every message.
    pub const LEN: usize = 64;

    /// Reads a whole datagram.
    pub fn parse(bytes: &[u8]) -> Result<Message, Malformed> {
        let b: &[u8; Self::LEN] = bytes.try_into().map_err(|_| Malformed::Length {
            what: "a link message",
            stated: Self::LEN,
            actual: bytes.len(),
        })?;
        let mut fields = FieldReader { bytes: b, at: 0 };
        let magic = u32::from_be_bytes(fields.read_array());
        if magic != MAGIC {
            return Err(Malformed::Field { what: "link magic", value: magic.into() });
        }
        let [version, kind] = fields.read_array();
        if version != VERSION {
            return Err(Malformed::Version { what: "link", version });
        }
        let order = FrameOrder::parse(fields.u8())?;
        fields.skip_reserved(8)?;
        let sender = NonZeroU64::new(fields.u64())
            .map(Incarnation)
            .ok_or(Malformed::Field { what: "link incarnation", value: 0 })?;
        let receiver = NonZeroU64::new(fields.u64()).map(Incarnation);
        let body = match kind {
            1 => Body::Hello(ExchangeKind::parse(fields.u8())?),
            2 => Body::Request(GrantRequest {
                consumed: fields.u64(),
                returned: fields.u64(),
                needed: fields.u64(),
                wanted: fields.u64(),
            }),
            3 => {
                Body::Grant(Grant { granted: fields.u64(), returned: fields.u64(), max_unused: fields.u64() })
            }
            4 => Body::Heartbeat(Heartbeat {
                stamp: fields.u64(),
                exchange: ExchangeKind::parse(fields.u8())?,
            }),
            5 => Body::Pause(Pause {
                classes: u16::from_be_bytes(fields.read_array()),
                quanta: core::array::from_fn(|_| u16::from_be_bytes(fields.read_array())),
                rate: fields.u64(),
            }),
            _ => return Err(Malformed::Field { what: "link message kind", value: kind.into() }),
        };
        fields.skip_reserved(Self::LEN)?;
        Ok(Message { sender, receiver, frame_order: order, body })
    }

    /// The datagram.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let mut at = BODY_OFFSET;
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        let kind = match self.body {
            Body::Hello(exchange) => {
                put(&[exchange as u8]);
                1
            }
            Body::Request(r) => {
                for field in [r.consumed, r.returned, r.needed, r.wanted] {
                    put(&field.to_be_bytes());
                }
                2
            }
            Body::Grant(g) => {
                for field in [g.granted, g.returned, g.max_unused] {
                    put(&field.to_be_bytes());
                }
                3
            }
            Body::Heartbeat(heartbeat) => {
                put(&heartbeat.stamp.to_be_bytes());
                put(&[heartbeat.exchange as u8]);
                4
            }
            Body::Pause(pause) => {
                put(&pause.classes.to_be_bytes());
                for quanta in pause.quanta {
                    put(&quanta.to_be_bytes());
                }
                put(&pause.rate.to_be_bytes());
                5
            }
        };
        bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[4..7].copy_from_slice(&[VERSION, kind, self.frame_order as u8]);
        bytes[8..16].copy_from_slice(&self.sender.0.get().to_be_bytes());
        bytes[16..BODY_OFFSET]
            .copy_from_slice(&self.receiver.map_or(0, |receiver| receiver.0.get()).to_be_bytes());
        bytes
    }
}

/// The fields of a message, one after the other.
struct FieldReader<'a> {
    bytes: &'a [u8; Message::LEN],
    at: usize,
}

impl FieldReader<'_> {
    fn read_array<const N: usize>(&mut self) -> [u8; N] {
        let field = self.bytes[self.at..].first_chunk().expect("every body fits into a message");
        self.at += N;
        *field
    }

    fn u8(&mut self) -> u8 {
        let [byte] = self.read_array();
        byte
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.read_array())
    }

    /// Passes the bytes before `end`, which must be zero.
    fn skip_reserved(&mut self, end: usize) -> Result<(), Malformed> {
        match self.bytes[self.at..end].iter().find(|byte| **byte != 0) {
            Some(byte) => Err(Malformed::Field { what: "reserved link byte", value: (*byte).into() }),
            None => {
                self.at = end;
                Ok(())
            }
        }
    }
}

impl fmt::Display for Pause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PAUSE")?;
        for (priority, quanta) in self.quanta.iter().enumerate() {
            if self.classes & 1 << priority != 0 {
                write!(f, " {priority}:{quanta}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.body {
            Body::Hello(exchange) => write!(f, "HELLO{} {}", exchange.suffix(), self.sender),
            Body::Request(r) => write!(
                f,
                "REQUEST consumed={} returned={} needed={} wanted={}",
                r.consumed, r.returned, r.needed, r.wanted
            ),
            Body::Grant(g) => {
                write!(f, "GRANT granted={} returned={} keep={}", g.granted, g.returned, g.max_unused)
            }
            Body::Heartbeat(heartbeat) => {
                write!(f, "HEARTBEAT{} {}", heartbeat.exchange.suffix(), heartbeat.stamp)
            }
            Body::Pause(pause) => pause.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use proptest::prelude::*;

    fn bodies() -> impl Strategy<Value = Body> {
        let exchange = prop_oneof![Just(ExchangeKind::Query), Just(ExchangeKind::Reply)];
        prop_oneof![
            exchange.clone().prop_map(Body::Hello),
            any::<[u64; 4]>().prop_map(|[consumed, returned, needed, wanted]| {
                Body::Request(GrantRequest { consumed, returned, needed, wanted })
            }),
            any::<[u64; 3]>().prop_map(|[granted, returned, max_unused]| {
                Body::Grant(Grant { granted, returned, max_unused })
            }),
            (exchange, any::<u64>())
                .prop_map(|(exchange, stamp)| Body::Heartbeat(Heartbeat { exchange, stamp })),
            any::<(u16, [u16; 8], u64)>().prop_map(|(classes, quanta, rate)| Body::Pause(Pause {
                classes,
                quanta,
                rate
            })),
        ]
    }

    proptest! {
        #[test]
        fn what_is_emitted_is_parsed(sender in 1u64.., receiver: u64, changed: bool, body in bodies()) {
            let message = Message {
                sender: Incarnation::new(sender),
                receiver: NonZeroU64::new(receiver).map(Incarnation),
                frame_order: if changed { FrameOrder::Reordered } else { FrameOrder::InOrder },
                body,
            };
            prop_assert_eq!(Message::parse(&message.emit()), Ok(message));
        }

        #[test]
        fn what_is_parsed_is_emitted(kind in 0u8..7, mut tail in proptest::collection::vec(any::<u8>(), 58)) {
            tail[0] &= 1;
            tail[1] = 0;
            let mut bytes = [b"SHLC".as_slice(), &[VERSION, kind], &tail].concat();
            if let Ok(message) = Message::parse(&bytes) {
                prop_assert_eq!(&message.emit()[..], &bytes);
                prop_assert!(!message.to_string().is_empty());
            }
            bytes.pop();
            prop_assert!(Message::parse(&bytes).is_err());
        }
    }

    #[test]
    fn other_versions_and_other_protocols_are_refused() {
        let (sender, body) = (Incarnation::new(7), Body::Hello(ExchangeKind::Query));
        let message = Message { sender, receiver: None, frame_order: FrameOrder::InOrder, body };
        let mut bytes = message.emit();
        bytes[4] = 2;
        assert_eq!(Message::parse(&bytes), Err(Malformed::Version { what: "link", version: 2 }));
        bytes[0] = 0;
        assert!(matches!(Message::parse(&bytes), Err(Malformed::Field { what: "link magic", .. })));
    }

    #[test]
    fn a_message_is_one_line() {
        let sender = Incarnation::new(0xbee);
        let say =
            |body| Message { sender, receiver: None, frame_order: FrameOrder::InOrder, body }.to_string();
        assert_eq!(say(Body::Hello(ExchangeKind::Query)), "HELLO? bee");
        let grant = Grant { granted: 8448, returned: 0, max_unused: 8448 };
        assert_eq!(say(Body::Grant(grant)), "GRANT granted=8448 returned=0 keep=8448");
        let pause = Pause { classes: 0b1001, quanta: [0xffff, 1, 1, 0, 1, 1, 1, 1], rate: 0 };
        assert_eq!(say(Body::Pause(pause)), "PAUSE 0:65535 3:0");
    }
    #[test]
    fn a_pause_is_what_its_frame_asks_for() {
        let source = MacAddress([2, 0, 0, 0, 0, 1]);
        let frame = |pause| Pfc { source, pause };
        let stop = frame([None, Some(9), None, Some(7), None, None, None, None]);
        let go = frame([None, None, None, Some(0), None, None, None, Some(1)]);
        let mut pause = Pause::from_pfc(&stop, 1_000);
        assert_eq!(pause.to_pfc(source), stop);
        pause.merge(&Pause::from_pfc(&go, 2_000));
        assert_eq!((pause.classes, pause.rate), (0b1000_1010, 2_000));
        let both = [None, Some(9), None, Some(0), None, None, None, Some(1)];
        assert_eq!(pause.to_pfc(source), frame(both));
    }
}
