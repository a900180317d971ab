//! What fields of entries are made of: packets, memory, queues, what a fault did.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::net::IpAddr;

/// A word of a fixed set, or what a reader found in its place.
pub type Keyword = Cow<'static, str>;

/// A packet in an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketData {
    /// Service and opcode: `RC WRITE_FIRST`.
    pub opcode: Keyword,
    /// Its PSN.
    pub psn: u32,
    /// The queue pair that it is for.
    pub dest_qp: u32,
    /// Bytes of payload.
    pub payload: u32,
    /// `ack`, `rnr-nak`, or `nak/` and its code, where it has an AETH.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub syndrome: Option<Keyword>,
    /// How long an RNR NAK asks to wait, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rnr_wait: Option<u64>,
    /// The other host.
    pub peer: IpAddr,
}

/// A packet that something happened to in the fabric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricPacketData {
    /// Who sent it.
    pub source: IpAddr,
    /// Whom it is for.
    pub destination: IpAddr,
    /// The queue pair that it is for, unless it is malformed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dest_qp: Option<u32>,
    /// Its PSN, unless it is malformed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub psn: Option<u32>,
}

/// A piece of memory in an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SgeData {
    /// The region.
    pub lkey: u32,
    /// The first byte.
    pub address: u64,
    /// How many bytes.
    pub length: u32,
}

/// A completion queue in an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionQueueData {
    /// Its number.
    pub cq: u32,
    /// How many completions it holds.
    pub cqe: u32,
}

/// What a fault did to a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum EffectData {
    /// It was lost.
    Dropped {
        /// And with it so many duplicates.
        copies: u64,
    },
    /// Others were made of it.
    Duplicated {
        /// How many.
        copies: u32,
    },
    /// It was held back.
    Reordered {
        /// Behind how many others.
        behind: u32,
    },
    /// It takes longer.
    Delayed {
        /// How many nanoseconds longer.
        ns: u64,
    },
    /// One bit was flipped.
    Corrupted {
        /// Counted from the highest bit of the BTH's first byte.
        bit: u32,
        /// `stale` or `repaired`: what became of the ICRC.
        icrc: Keyword,
    },
    /// It carries a congestion mark now.
    MarkedCe,
    /// A field has another value now.
    Rewritten {
        /// The field.
        field: Keyword,
        /// Its old value.
        from: u64,
        /// Its new value.
        to: u64,
    },
    /// It took the link down.
    LinkCut {
        /// `one-way` or `both-ways`.
        scope: Keyword,
        /// Until when, in nanoseconds since the start.
        until: u64,
    },
}
