//! The values of log entries, and how the values of events become them.

use crate::describe::kebab_case;
use serde::{Deserialize, Serialize};
use softhca_engine::{
    AsyncEvent, ClientId, CmChannelId, CmDropReason, CmFailure, CmId, CmMessageKind, CqId, DropReason,
    InjectedPoint, Instant, LinkReject, PacketSummary, QpState, QpType, RateCause, Reason, Recovery,
    RequestError, RetransmitCause,
};
use softhca_fabric::{FaultEffect, FrameDropReason, LinkId, PacketId, PauseEndReason};
use softhca_types::cm::{CmState, EventType};
use softhca_types::{
    AccessFlags, CallSite, Completion, CompletionFlags, CompletionOpcode, CorruptRing, ProgramAction, Sge,
    Verb,
};
use softhca_wire::{Mtu, Opcode, Psn, Qpn, Syndrome};
use std::borrow::Cow;
use std::net::IpAddr;
use std::time::Duration;

/// A word of a fixed set, or the word that a reader found in its place.
pub type Keyword = Cow<'static, str>;

/// A field of an event or of a value, as the reference page shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldSchema {
    /// The key.
    pub name: &'static str,
    /// The meaning.
    pub description: &'static str,
    /// The fields of its value, if that is an object.
    pub nested: &'static [FieldSchema],
    /// Whether the nested fields stand in its place.
    pub is_flat: bool,
}

impl FieldSchema {
    /// The schema of a field of type `T`.
    pub(super) const fn new<T: LogValue>(name: &'static str, description: &'static str) -> FieldSchema {
        FieldSchema { name, description, nested: T::FIELDS, is_flat: false }
    }
}

/// A value of a log entry.
pub trait LogValue {
    /// The schema of its fields, if it is an object.
    const FIELDS: &'static [FieldSchema] = &[];

    /// Whether an entry omits it.
    fn is_absent(&self) -> bool {
        false
    }
}

/// A value of an event.
pub trait LogField {
    /// Its form in the log.
    type Log: LogValue;

    /// The value in the log.
    fn log(&self) -> Self::Log;

    /// Why the event happened, as a sentence.
    fn trigger(&self) -> Option<String> {
        None
    }
}

impl<T: LogValue> LogValue for Option<T> {
    const FIELDS: &'static [FieldSchema] = T::FIELDS;

    fn is_absent(&self) -> bool {
        self.is_none()
    }
}

impl<T: LogField> LogField for Option<T> {
    type Log = Option<T::Log>;

    fn log(&self) -> Self::Log {
        self.as_ref().map(T::log)
    }
}

impl LogValue for Keyword {}
impl LogValue for String {}

macro_rules! plain {
    ($($type:ty),*) => {$(
        impl LogValue for $type {}
        impl LogField for $type {
            type Log = $type;
            fn log(&self) -> $type {
                *self
            }
        }
    )*};
}

plain!(bool, u8, u16, u32, u64, i32, i64, IpAddr);

/// Types whose log value is an expression of `value`, and the sentence that explains the event.
macro_rules! log_fields {
    ($($type:ty => $log:ty: |$value:ident| $expression:expr $(, trigger $trigger:expr)?;)*) => {$(
        impl LogField for $type {
            type Log = $log;
            fn log(&self) -> $log {
                let $value = self;
                $expression
            }
            $(fn trigger(&self) -> Option<String> {
                let $value = self;
                $trigger
            })?
        }
    )*};
}

log_fields! {
    Qpn => u32: |qp| qp.value();
    Psn => u32: |psn| psn.value();
    CqId => u32: |cq| cq.0;
    ClientId => u32: |client| client.0;
    CmId => u32: |id| id.0;
    CmChannelId => u32: |channel| channel.0;
    LinkId => u32: |link| link.0;
    Instant => u64: |time| time.nanos();
    Duration => u64: |time| time.as_nanos() as u64;
    Mtu => u32: |mtu| mtu.bytes();
    Opcode => Keyword: |opcode| opcode.to_string().into();
    CompletionOpcode => Keyword: |opcode| opcode.name().into();
    QpState => Keyword: |state| state.name().into();
    Recovery => Keyword: |recovery| recovery.name().into();
    AsyncEvent => Keyword: |event| event.name().into();
    InjectedPoint => Keyword: |point| point.name().into();
    Verb => Keyword: |verb| verb.name().into();
    CallSite => String: |site| site.to_string();
    ProgramAction => String: |action| action.to_string();
    CmMessageKind => Keyword: |message| message.name().into();
    EventType => Keyword: |event| event.name().into();
    CmState => Keyword: |state| kebab_case(state).into();
    CmFailure => Keyword: |failure| kebab_case(failure).into();
    RetransmitCause => Keyword: |cause| kebab_case(cause).into();
    RateCause => Keyword: |cause| kebab_case(cause).into();
    PauseEndReason => Keyword: |reason| kebab_case(reason).into();
    DropReason => Keyword: |reason| kebab_case(reason).into(), trigger Some(reason.to_string());
    RequestError => Keyword: |error| kebab_case(error).into(), trigger Some(error.to_string());
    CmDropReason => Keyword: |reason| kebab_case(reason).into(), trigger Some(reason.to_string());
    LinkReject => Keyword: |reason| kebab_case(reason).into(), trigger Some(reason.to_string());
    FrameDropReason => Keyword: |reason| kebab_case(reason).into(), trigger Some(reason.to_string());
    Reason => Keyword: |reason| kebab_case(reason).into(),
        trigger (*reason != Reason::None).then(|| reason.to_string());
    QpType => Keyword: |kind| kebab_case(kind).into();
    AccessFlags => String: |flags| {
        let names: Vec<&str> = flags.iter_names().map(|(name, _)| name).collect();
        names.join("|")
    };
    Sge => SgeData: |sge| SgeData { lkey: sge.lkey.0, address: sge.address, length: sge.length };
    (CqId, u32) => CompletionQueueData: |cq| CompletionQueueData { cq: cq.0.0, cqe: cq.1 };
    CorruptRing => CorruptRingData: |ring| CorruptRingData { index: ring.index, min: ring.min, max: ring.max },
        trigger Some(ring.to_string());
    PacketId => FabricPacketData: |packet| FabricPacketData {
        source: packet.source,
        destination: packet.destination,
        dest_qp: packet.bth.map(|(qpn, _)| qpn.value()),
        psn: packet.bth.map(|(_, psn)| psn.value()),
    };
    PacketSummary => PacketData: |packet| PacketData {
        opcode: packet.opcode.log(),
        psn: packet.psn.value(),
        dest_qp: packet.dest_qp.value(),
        payload: packet.payload_length,
        syndrome: packet.syndrome.map(|syndrome| match syndrome {
            Syndrome::Ack(_) => "ack".into(),
            Syndrome::RnrNak(_) => "rnr-nak".into(),
            Syndrome::Nak(_) => kebab_case(&syndrome).into(),
        }),
        rnr_wait: match packet.syndrome {
            Some(Syndrome::RnrNak(timer)) => Some(timer.nanoseconds()),
            _ => None,
        },
        peer: packet.peer,
    };
    Completion => CompletionData: |completion| {
        let has = |flag| completion.flags.contains(flag);
        let source = completion.src_qp.value();
        CompletionData {
            qp: completion.qpn.value(),
            wr_id: completion.wr_id,
            operation: completion.opcode.log(),
            status: completion.status.name().into(),
            bytes: completion.byte_len,
            imm_data: has(CompletionFlags::IMMEDIATE).then_some(completion.imm_data),
            invalidated_rkey: has(CompletionFlags::INVALIDATED).then_some(completion.imm_data),
            src_qp: (source != 0).then_some(source),
            vendor_err: completion.vendor_error,
        }
    };
    FaultEffect => EffectData: |effect| match *effect {
        FaultEffect::Dropped { copies } => EffectData::Dropped { copies },
        FaultEffect::Duplicated { copies } => EffectData::Duplicated { copies },
        FaultEffect::Reordered { by } => EffectData::Reordered { behind: by.get() },
        FaultEffect::Delayed { ns } => EffectData::Delayed { ns },
        FaultEffect::Corrupted { bit, icrc } => EffectData::Corrupted { bit, icrc: kebab_case(&icrc).into() },
        FaultEffect::MarkedCe => EffectData::MarkedCe,
        FaultEffect::Rewritten { field, from, to } => {
            EffectData::Rewritten { field: kebab_case(&field).into(), from, to }
        }
        FaultEffect::LinkTakenDown { directions, until_ns } => {
            EffectData::LinkTakenDown { directions: kebab_case(&directions).into(), until: until_ns }
        }
    };
}

/// Declares an object of the log, with the schema of its fields.
macro_rules! log_struct {
    ($(
        $(#[doc = $meaning:literal])+
        $struct:ident { $( $(#[doc = $about:literal])+ $field:ident: $type:ty, )* }
    )*) => {$(
        $(#[doc = $meaning])+
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub struct $struct {
            $( $(#[doc = $about])+ #[serde(skip_serializing_if = "LogValue::is_absent")] pub $field: $type, )*
        }

        impl LogValue for $struct {
            const FIELDS: &'static [FieldSchema] =
                &[$( FieldSchema::new::<$type>(stringify!($field), concat!($($about),+)), )*];
        }
    )*};
}
pub(super) use log_struct;

log_struct! {
    /// A packet.
    PacketData {
        /// Service and opcode: `RC WRITE_FIRST`.
        opcode: Keyword,
        /// The PSN.
        psn: u32,
        /// The destination queue pair.
        dest_qp: u32,
        /// Bytes of payload.
        payload: u32,
        /// `ack`, `rnr-nak`, or `nak/` and its code, if the packet has an AETH.
        syndrome: Option<Keyword>,
        /// The wait that an RNR NAK requests, in nanoseconds.
        rnr_wait: Option<u64>,
        /// The address of the other host.
        peer: IpAddr,
    }
    /// A packet that a switch or a host port handled.
    FabricPacketData {
        /// The source address.
        source: IpAddr,
        /// The destination address.
        destination: IpAddr,
        /// The destination queue pair, unless the packet is malformed.
        dest_qp: Option<u32>,
        /// The PSN, unless the packet is malformed.
        psn: Option<u32>,
    }
    /// A scatter/gather entry.
    SgeData {
        /// The local key.
        lkey: u32,
        /// The first byte.
        address: u64,
        /// The number of bytes.
        length: u32,
    }
    /// A completion queue.
    CompletionQueueData {
        /// Its number.
        cq: u32,
        /// The number of CQEs that it holds.
        cqe: u32,
    }
    /// A CQE.
    CompletionData {
        /// The queue pair.
        qp: u32,
        /// The id of the work request.
        wr_id: u64,
        /// The operation.
        operation: Keyword,
        /// The status.
        status: Keyword,
        /// Bytes transferred.
        bytes: u32,
        /// The immediate data, if any.
        imm_data: Option<u32>,
        /// The rkey that the message invalidated, if any.
        invalidated_rkey: Option<u32>,
        /// The sending queue pair of a datagram.
        src_qp: Option<u32>,
        /// The reason as a number.
        vendor_err: u32,
    }
    /// An invalid index of a ring.
    CorruptRingData {
        /// The index in shared memory.
        index: u64,
        /// The lowest valid index.
        min: u64,
        /// The highest valid index.
        max: u64,
    }
}

/// The effect of a fault on a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum EffectData {
    /// The packet was dropped, and so many duplicates with it.
    Dropped { copies: u64 },
    /// The packet was duplicated: the number of duplicates.
    Duplicated { copies: u32 },
    /// The packet was reordered: the number of packets that pass it.
    Reordered { behind: u32 },
    /// The packet was delayed: the additional delay in nanoseconds.
    Delayed { ns: u64 },
    /// One bit was flipped.
    Corrupted {
        /// The bit, counted from the highest bit of the first byte of the BTH.
        bit: u32,
        /// `stale` or `repaired`: whether the ICRC still matches.
        icrc: Keyword,
    },
    /// The packet got an ECN mark (CE).
    MarkedCe,
    /// A header field got another value.
    Rewritten { field: Keyword, from: u64, to: u64 },
    /// The packet took the link down.
    LinkTakenDown {
        /// `one-way` or `both-ways`.
        directions: Keyword,
        /// When the link comes up again, in nanoseconds since the start.
        until: u64,
    },
    /// The capture does not contain so many packets, although they arrived. Only inferred from a capture.
    NotCaptured { packets: u32 },
    /// The packet does not follow a rule of the transport: `message-boundary`, `path-mtu` or `psn-mismatch`. Only inferred
    /// from a capture.
    Irregular { code: Keyword },
}

impl LogValue for EffectData {}

/// The number of the queue pair, completion queue or shared receive queue of an asynchronous event.
pub(super) fn element(event: &AsyncEvent) -> Option<u32> {
    match *event {
        AsyncEvent::CompletionQueueError(cq) => Some(cq.0),
        AsyncEvent::SharedReceiveQueueError(srq) | AsyncEvent::SharedReceiveQueueLimit(srq) => Some(srq.0),
        _ => event.qpn().map(|qpn| qpn.value()),
    }
}
