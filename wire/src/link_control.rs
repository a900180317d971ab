//! Link control between two SoftHCA ports: peer discovery, receiver-driven grants and priority pauses.
//!
//! Link control is not RoCE and has its own UDP port. All messages have the same size, so that no reply is longer
//! than its query. Each message is self-contained, so loss, duplication and reordering are harmless: amounts are
//! cumulative, and the newest message supersedes all earlier ones. Amounts count from the first exchange between
//! the two [`Incarnation`]s in a message.
//!
//! A port gives each peer an unpredictable [`Token`] in its HELLO, and accepts from that peer only messages that carry
//! it. Such a message proves that its sender receives datagrams at its address. HELLO without the token changes
//! nothing; it is answered with a HELLO that carries the token.

use crate::{MacAddress, Malformed, Pfc};
use core::fmt;
use core::num::NonZeroU64;

/// The UDP port of link control.
pub const LINK_PORT: u16 = 4792;

/// The first bytes of every message.
const MAGIC: u32 = u32::from_be_bytes(*b"SHLC");
/// The supported protocol version.
const VERSION: u8 = 3;
/// Offset of the body.
const BODY_OFFSET: usize = 40;

/// The incarnation of a port on a link. A peer that returns with a higher number has lost its state, because
/// it restarted or because it considered the link dead. A lower number marks an old message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub NonZeroU64);

impl Incarnation {
    /// The incarnation with this number. Zero means "unknown" on the wire, so it becomes one.
    pub const fn new(number: u64) -> Incarnation {
        match NonZeroU64::new(number) {
            Some(number) => Incarnation(number),
            None => Incarnation(NonZeroU64::MIN),
        }
    }

    /// The next incarnation.
    pub const fn next(self) -> Incarnation {
        Incarnation(self.0.saturating_add(1))
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// The proof that a sender receives at its address: an unpredictable number that the receiver gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub NonZeroU64);

impl Token {
    /// The token with this number. Zero means "unknown" on the wire, so it becomes one.
    pub const fn new(number: u64) -> Token {
        match NonZeroU64::new(number) {
            Some(number) => Token(number),
            None => Token(NonZeroU64::MIN),
        }
    }
}

/// The processes at both ends of a link. The processes of one host share its address; the high bits of a QPN are
/// the slot of its process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Slots {
    /// The sender's slot.
    pub source: u16,
    /// The receiver's slot.
    pub destination: u16,
    /// How many high bits of the sender's QPNs are the slot; zero for a host with one process.
    pub bits: u8,
    /// The UDP port that the sender's RoCE packets to the receiver come from.
    pub source_port: u16,
}

/// The most slot bits: a QPN has 24 bits, and a process needs some of them.
const MAX_SLOT_BITS: u8 = 16;

crate::named_enum! {
    /// Whether a message requests a reply or is one.
    #[repr(u8)]
    pub enum ExchangeKind {
        /// The receiver must reply.
        Query = 0 => "?",
        /// The reply; it requires no further reply.
        Reply = 1 => "!",
    }
}

impl ExchangeKind {
    fn parse(byte: u8) -> Result<ExchangeKind, Malformed> {
        let known = ExchangeKind::ALL.get(usize::from(byte)).copied();
        known.ok_or(Malformed::Field { what: "link exchange", value: byte.into() })
    }
}

/// The sender's use of its grants and its demand. Amounts are bytes of kernel socket-buffer charge. `consumed
/// + returned` is the part of the granted total that the sender has used up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GrantRequest {
    /// Charged for sent frames, including those sent before the first grant.
    pub consumed: u64,
    /// Returned unused, or revoked.
    pub returned: u64,
    /// The grant total that the blocked frame needs; at most `consumed + returned` if no frame is blocked.
    pub needed: u64,
    /// The grant total that the sender wants.
    pub wanted: u64,
}

/// The receiver's grant to a sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The upper limit for `consumed + returned`. Never decreases.
    pub granted: u64,
    /// The latest `returned` that the receiver has seen. A higher total than the sender's own revokes the
    /// difference.
    pub returned: u64,
    /// The largest unused grant that the sender may keep; the sender must return the excess, which other
    /// senders need.
    pub max_unused: u64,
}

/// A keepalive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Heartbeat {
    /// Query or reply.
    pub exchange: ExchangeKind,
    /// Chosen by the sender of the query; the reply repeats it.
    pub stamp: u64,
    /// In a reply, [`Grant::returned`]: nobody uses a revoked grant after it.
    pub returned: u64,
}

/// The introduction of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hello {
    /// Query or reply.
    pub exchange: ExchangeKind,
    /// The token that the receiver must use towards the sender.
    pub token: Token,
    /// The bytes that the sender can grant in all.
    pub budget: u64,
    /// The machine of the sender, if it accepts packets without an ICRC from ports on the same machine.
    pub machine: Option<NonZeroU64>,
}

/// The statement of slot 0 that a slot of its host has no process. It answers a message to that slot which, because of
/// that, arrived at slot 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Vacancy {
    /// The slot.
    pub slot: u16,
    /// The incarnation of the slot's port that the message was for.
    pub incarnation: Incarnation,
}

/// The content of a priority flow control frame (IEEE 802.1Qbb).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pause {
    /// Valid entries of `quanta`: bit n for priority n. The upper byte is reserved.
    pub classes: u16,
    /// Pause time in quanta of 512 bit times; zero resumes.
    pub quanta: [u16; 8],
    /// The link rate that defines the bit time, in bits per second; zero for 100 Gb/s. The two ports of an
    /// emulated link may have different rates.
    pub rate: u64,
}

impl Pause {
    /// The pause request in a PFC frame, for a link of this rate.
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

    /// The PFC frame for this request, sent by the port with this MAC address.
    pub fn to_pfc(&self, source: MacAddress) -> Pfc {
        let quanta = |priority: usize| (self.classes >> priority & 1 == 1).then(|| self.quanta[priority]);
        Pfc { source, pause: core::array::from_fn(quanta) }
    }

    /// Adds a later request; where both name a priority, the later one wins.
    pub fn merge(&mut self, later: &Pause) {
        self.rate = later.rate;
        self.classes |= later.classes;
        for priority in (0..8).filter(|priority| later.classes >> priority & 1 == 1) {
            self.quanta[priority] = later.quanta[priority];
        }
    }
}

/// Whether a port sends frames in PSN order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameOrder {
    /// In order: a receiver may undo reordering by the host's network stack.
    #[default]
    InOrder = 0,
    /// A fault rule at the sender reorders frames: a receiver must preserve the arrival order.
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

/// The body of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each variant is the message of its type")]
pub enum Body {
    Hello(Hello),
    Request(GrantRequest),
    Grant(Grant),
    Heartbeat(Heartbeat),
    Pause(Pause),
    Vacancy(Vacancy),
}

/// One link control datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// The sender's incarnation.
    pub sender: Incarnation,
    /// The receiver's incarnation, if the sender knows it.
    pub receiver: Option<Incarnation>,
    /// The token that the receiver gave the sender, if the sender knows it.
    pub token: Option<Token>,
    /// The processes at both ends.
    pub slots: Slots,
    /// The order of the sender's frames.
    pub frame_order: FrameOrder,
    /// The body.
    pub body: Body,
}

impl Message {
    /// Bytes of every message on the wire.
    pub const LEN: usize = 72;
    /// Offset of the receiver's slot: two bytes, most significant first.
    pub const DESTINATION_SLOT_OFFSET: usize = 10;

    /// Parses a datagram.
    pub fn parse(bytes: &[u8]) -> Result<Message, Malformed> {
        // The version first: another version may have another length.
        if let [a, b, c, d, version, ..] = *bytes
            && u32::from_be_bytes([a, b, c, d]) == MAGIC
            && version != VERSION
        {
            return Err(Malformed::Version { what: "link", version });
        }
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
        let [_version, kind] = fields.read_array();
        let order = FrameOrder::parse(fields.u8())?;
        let bits = fields.u8();
        let slots =
            Slots { bits, source: fields.u16(), destination: fields.u16(), source_port: fields.u16() };
        if bits > MAX_SLOT_BITS || u32::from(slots.source) >> bits != 0 {
            return Err(Malformed::Field { what: "link slot", value: slots.source.into() });
        }
        fields.skip_reserved(16)?;
        let sender = NonZeroU64::new(fields.u64())
            .map(Incarnation)
            .ok_or(Malformed::Field { what: "link incarnation", value: 0 })?;
        let receiver = NonZeroU64::new(fields.u64()).map(Incarnation);
        let token = NonZeroU64::new(fields.u64()).map(Token);
        let body = match kind {
            1 => Body::Hello(Hello {
                token: NonZeroU64::new(fields.u64())
                    .map(Token)
                    .ok_or(Malformed::Field { what: "link token", value: 0 })?,
                budget: fields.u64(),
                exchange: ExchangeKind::parse(fields.u8())?,
                machine: NonZeroU64::new(fields.u64()),
            }),
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
                returned: fields.u64(),
                exchange: ExchangeKind::parse(fields.u8())?,
            }),
            5 => Body::Pause(Pause {
                classes: fields.u16(),
                quanta: core::array::from_fn(|_| fields.u16()),
                rate: fields.u64(),
            }),
            6 => Body::Vacancy(Vacancy {
                incarnation: NonZeroU64::new(fields.u64())
                    .map(Incarnation)
                    .ok_or(Malformed::Field { what: "link incarnation", value: 0 })?,
                slot: fields.u16(),
            }),
            _ => return Err(Malformed::Field { what: "link message kind", value: kind.into() }),
        };
        fields.skip_reserved(Self::LEN)?;
        Ok(Message { sender, receiver, token, slots, frame_order: order, body })
    }

    /// The datagram's bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let mut at = BODY_OFFSET;
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        let kind = match self.body {
            Body::Hello(hello) => {
                put(&hello.token.0.get().to_be_bytes());
                put(&hello.budget.to_be_bytes());
                put(&[hello.exchange as u8]);
                put(&hello.machine.map_or(0, NonZeroU64::get).to_be_bytes());
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
                put(&heartbeat.returned.to_be_bytes());
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
            Body::Vacancy(vacancy) => {
                put(&vacancy.incarnation.0.get().to_be_bytes());
                put(&vacancy.slot.to_be_bytes());
                6
            }
        };
        bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
        let Slots { source, destination, bits, source_port } = self.slots;
        bytes[4..8].copy_from_slice(&[VERSION, kind, self.frame_order as u8, bits]);
        for (field, value) in bytes[8..14].chunks_mut(2).zip([source, destination, source_port]) {
            field.copy_from_slice(&value.to_be_bytes());
        }
        let receiver = self.receiver.map_or(0, |receiver| receiver.0.get());
        let token = self.token.map_or(0, |token| token.0.get());
        for (field, value) in bytes[16..BODY_OFFSET].chunks_mut(8).zip([self.sender.0.get(), receiver, token])
        {
            field.copy_from_slice(&value.to_be_bytes());
        }
        bytes
    }
}

/// Reads the fields of a message in sequence.
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

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.read_array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.read_array())
    }

    /// Skips the bytes before `end`, which must be zero.
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
            Body::Hello(hello) => write!(f, "HELLO{} {}", hello.exchange, self.sender),
            Body::Request(r) => write!(
                f,
                "REQUEST consumed={} returned={} needed={} wanted={}",
                r.consumed, r.returned, r.needed, r.wanted
            ),
            Body::Grant(g) => {
                write!(f, "GRANT granted={} returned={} keep={}", g.granted, g.returned, g.max_unused)
            }
            Body::Heartbeat(heartbeat) => {
                write!(f, "HEARTBEAT{} {}", heartbeat.exchange, heartbeat.stamp)
            }
            Body::Pause(pause) => pause.fmt(f),
            Body::Vacancy(vacancy) => write!(f, "VACANCY {} {}", vacancy.slot, vacancy.incarnation),
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
            (exchange.clone(), 1u64.., any::<[u64; 2]>()).prop_map(|(exchange, token, [budget, machine])| {
                let (token, machine) = (Token::new(token), NonZeroU64::new(machine));
                Body::Hello(Hello { exchange, token, budget, machine })
            }),
            any::<[u64; 4]>().prop_map(|[consumed, returned, needed, wanted]| {
                Body::Request(GrantRequest { consumed, returned, needed, wanted })
            }),
            any::<[u64; 3]>().prop_map(|[granted, returned, max_unused]| {
                Body::Grant(Grant { granted, returned, max_unused })
            }),
            (exchange, any::<[u64; 2]>()).prop_map(|(exchange, [stamp, returned])| {
                Body::Heartbeat(Heartbeat { exchange, stamp, returned })
            }),
            any::<(u16, [u16; 8], u64)>().prop_map(|(classes, quanta, rate)| Body::Pause(Pause {
                classes,
                quanta,
                rate
            })),
            (any::<u16>(), 1u64..).prop_map(|(slot, incarnation)| {
                Body::Vacancy(Vacancy { slot, incarnation: Incarnation::new(incarnation) })
            }),
        ]
    }

    proptest! {
        #[test]
        fn emitted_message_parses_to_the_same_value(
            sender in 1u64..,
            (receiver, token) in any::<(u64, u64)>(),
            (bits, source, destination, source_port) in (0..=MAX_SLOT_BITS, any::<u16>(), any::<u16>(), any::<u16>()),
            changed in any::<bool>(),
            body in bodies(),
        ) {
            let source = (u32::from(source) & ((1 << bits) - 1)) as u16;
            let message = Message {
                sender: Incarnation::new(sender),
                receiver: NonZeroU64::new(receiver).map(Incarnation),
                token: NonZeroU64::new(token).map(Token),
                slots: Slots { source, destination, bits, source_port },
                frame_order: if changed { FrameOrder::Reordered } else { FrameOrder::InOrder },
                body,
            };
            prop_assert_eq!(Message::parse(&message.emit()), Ok(message));
        }

        #[test]
        fn parsed_message_emits_the_same_bytes(kind in 0u8..8, mut tail in proptest::collection::vec(any::<u8>(), Message::LEN - 6)) {
            tail[0] &= 1;
            tail[1] &= 31;
            tail[8..10].fill(0);
            let mut bytes = [b"SHLC".as_slice(), &[VERSION, kind], &tail].concat();
            if let Ok(message) = Message::parse(&bytes) {
                prop_assert_eq!(&message.emit()[..], &bytes);
                prop_assert!(!message.to_string().is_empty());
            }
            bytes.pop();
            prop_assert!(Message::parse(&bytes).is_err());
        }
    }

    const HELLO: Body = Body::Hello(Hello {
        exchange: ExchangeKind::Query,
        token: Token::new(0),
        budget: 79_872,
        machine: None,
    });

    fn message(body: Body) -> Message {
        let (sender, slots) = (Incarnation::new(0xbee), Slots::default());
        Message { sender, receiver: None, token: None, slots, frame_order: FrameOrder::InOrder, body }
    }

    #[test]
    fn slot_beyond_the_slot_bits_is_rejected() {
        let slots =
            |bits, source| Message { slots: Slots { bits, source, ..Slots::default() }, ..message(HELLO) };
        assert!(Message::parse(&slots(9, 511).emit()).is_ok());
        for (bits, source) in [(0, 1), (9, 512), (17, 0), (255, 0)] {
            assert!(Message::parse(&slots(bits, source).emit()).is_err(), "slot {source} of {bits} bits");
        }
    }

    #[test]
    fn other_versions_and_protocols_are_rejected() {
        let mut bytes = message(HELLO).emit();
        // Version 2 had a HELLO without a machine.
        bytes[4] = 2;
        assert_eq!(Message::parse(&bytes), Err(Malformed::Version { what: "link", version: 2 }));
        bytes[4] = 1;
        // Version 1 had shorter messages.
        for bytes in [&bytes[..], &bytes[..64]] {
            assert_eq!(Message::parse(bytes), Err(Malformed::Version { what: "link", version: 1 }));
        }
        bytes[0] = 0;
        assert!(matches!(Message::parse(&bytes), Err(Malformed::Field { what: "link magic", .. })));
    }

    #[test]
    fn message_displays_as_one_line() {
        let display = |body| message(body).to_string();
        assert_eq!(display(HELLO), "HELLO? bee");
        let grant = Grant { granted: 8448, returned: 0, max_unused: 8448 };
        assert_eq!(display(Body::Grant(grant)), "GRANT granted=8448 returned=0 keep=8448");
        let pause = Pause { classes: 0b1001, quanta: [0xffff, 1, 1, 0, 1, 1, 1, 1], rate: 0 };
        assert_eq!(display(Body::Pause(pause)), "PAUSE 0:65535 3:0");
    }

    #[test]
    fn pause_round_trips_through_a_pfc_frame() {
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
