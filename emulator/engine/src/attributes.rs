//! Queue pair attributes, and which of them each state transition needs and allows.

use crate::{AddressVector, Error};
use core::fmt;
use softhca_queue::Access;
use softhca_wire::{Mtu, Psn, Qpn, QueueKey, RnrTimer, Service};

/// What a queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QpKind {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// The sending half of an extended reliable connection.
    XrcInitiator,
    /// The receiving half of an extended reliable connection.
    XrcTarget,
    /// The general services interface, QP1.
    Gsi,
}

impl QpKind {
    /// The service whose opcodes it sends and takes.
    #[inline]
    pub const fn service(self) -> Service {
        match self {
            QpKind::Rc => Service::Rc,
            QpKind::Uc => Service::Uc,
            QpKind::Ud | QpKind::Gsi => Service::Ud,
            QpKind::XrcInitiator | QpKind::XrcTarget => Service::Xrc,
        }
    }

    /// Whether it has acknowledgements.
    #[inline]
    pub const fn is_reliable(self) -> bool {
        self.service().is_reliable()
    }

    /// Whether every message names its destination.
    #[inline]
    pub const fn is_datagram(self) -> bool {
        matches!(self, QpKind::Ud | QpKind::Gsi)
    }
}

/// The state of a queue pair (IBA figure 124).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are those of the specification")]
pub enum State {
    Reset,
    Init,
    ReadyToReceive,
    ReadyToSend,
    SendQueueDrained,
    SendQueueError,
    Error,
}

impl State {
    /// Every state, in the order of `enum ibv_qp_state`.
    pub const ALL: [State; 7] = [
        State::Reset,
        State::Init,
        State::ReadyToReceive,
        State::ReadyToSend,
        State::SendQueueDrained,
        State::SendQueueError,
        State::Error,
    ];

    /// The short name that verbs people use.
    pub const fn name(self) -> &'static str {
        match self {
            State::Reset => "RESET",
            State::Init => "INIT",
            State::ReadyToReceive => "RTR",
            State::ReadyToSend => "RTS",
            State::SendQueueDrained => "SQD",
            State::SendQueueError => "SQE",
            State::Error => "ERR",
        }
    }

    /// Whether requests of a peer are taken.
    #[inline]
    pub const fn receives(self) -> bool {
        matches!(
            self,
            State::ReadyToReceive | State::ReadyToSend | State::SendQueueDrained | State::SendQueueError
        )
    }

    /// Whether responses of a peer are taken.
    #[inline]
    pub const fn takes_responses(self) -> bool {
        matches!(self, State::ReadyToSend | State::SendQueueDrained)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[allow(missing_docs, reason = "the names are those of the verbs")]
mod mask {
    bitflags::bitflags! {
    /// Which attributes a call sets. The bits are those of `enum ibv_qp_attr_mask`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct AttributeMask: u32 {
        const STATE = 1;
        const CUR_STATE = 1 << 1;
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        const ACCESS_FLAGS = 1 << 3;
        const PKEY_INDEX = 1 << 4;
        const PORT = 1 << 5;
        const QKEY = 1 << 6;
        const AV = 1 << 7;
        const PATH_MTU = 1 << 8;
        const TIMEOUT = 1 << 9;
        const RETRY_CNT = 1 << 10;
        const RNR_RETRY = 1 << 11;
        const RQ_PSN = 1 << 12;
        const MAX_QP_RD_ATOMIC = 1 << 13;
        const ALT_PATH = 1 << 14;
        const MIN_RNR_TIMER = 1 << 15;
        const SQ_PSN = 1 << 16;
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        const PATH_MIG_STATE = 1 << 18;
        const CAP = 1 << 19;
        const DEST_QPN = 1 << 20;
        const RATE_LIMIT = 1 << 25;
    }
    }
}
pub use mask::AttributeMask;

impl fmt::Display for AttributeMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("nothing");
        }
        for (index, (name, _)) in self.iter_names().enumerate() {
            write!(f, "{}{name}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// The attributes that a queue pair has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the attribute of its name")]
pub struct Attributes {
    pub access: Access,
    pub partition_index: u16,
    pub port: u8,
    pub queue_key: QueueKey,
    pub path: AddressVector,
    pub mtu: Mtu,
    pub destination: Qpn,
    pub receive_psn: Psn,
    pub send_psn: Psn,
    /// Reads and atomics that this side may have outstanding.
    pub max_reads_out: u8,
    /// Reads and atomics that the peer may have outstanding here.
    pub max_reads_in: u8,
    pub min_rnr_timer: RnrTimer,
    /// The exponent of 4.096 µs; zero waits for ever.
    pub timeout: u8,
    pub retry_count: u8,
    /// Seven means for ever.
    pub rnr_retry: u8,
    pub notify_drained: bool,
    pub rate_limit: u32,
}

impl Attributes {
    /// Those of a queue pair in RESET.
    pub(crate) fn reset(mtu: Mtu) -> Attributes {
        Attributes {
            access: Access::empty(),
            partition_index: 0,
            port: 1,
            queue_key: QueueKey(0),
            path: AddressVector::default(),
            mtu,
            destination: Qpn::new(0),
            receive_psn: Psn::new(0),
            send_psn: Psn::new(0),
            max_reads_out: 0,
            max_reads_in: 0,
            min_rnr_timer: RnrTimer::new(0),
            timeout: 0,
            retry_count: 0,
            rnr_retry: 0,
            notify_drained: false,
            rate_limit: 0,
        }
    }

    /// How long to wait for an acknowledgement, or `None` for ever.
    pub fn ack_timeout(&self) -> Option<core::time::Duration> {
        (self.timeout > 0).then(|| core::time::Duration::from_nanos(4096 << (self.timeout & 0x1f)))
    }
}

macro_rules! modify {
    ($($(#[doc = $doc:literal])* $field:ident: $kind:ty = $flag:ident,)*) => {
        /// A change of attributes: what is `Some` is set.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Modify {
            $($(#[doc = $doc])* pub $field: Option<$kind>,)*
        }

        impl Modify {
            /// Which attributes are set.
            pub fn mask(&self) -> AttributeMask {
                let mut mask = AttributeMask::empty();
                $(if self.$field.is_some() { mask |= AttributeMask::$flag; })*
                mask
            }

            $($(#[doc = $doc])*
            pub fn $field(mut self, value: $kind) -> Modify {
                self.$field = Some(value);
                self
            })*
        }
    };
}

modify! {
    /// The state to go to.
    state: State = STATE,
    /// The state that the caller believes the queue pair to be in.
    current_state: State = CUR_STATE,
    /// Raise an event when the send queue has drained.
    notify_drained: bool = EN_SQD_ASYNC_NOTIFY,
    /// What the peer may do.
    access: Access = ACCESS_FLAGS,
    /// The index of the partition key.
    partition_index: u16 = PKEY_INDEX,
    /// The port; a card has one.
    port: u8 = PORT,
    /// The key that datagrams must have.
    queue_key: QueueKey = QKEY,
    /// Where the peer is.
    path: AddressVector = AV,
    /// Payload bytes per packet.
    mtu: Mtu = PATH_MTU,
    /// The exponent of 4.096 µs that an acknowledgement may take.
    timeout: u8 = TIMEOUT,
    /// How often to try again.
    retry_count: u8 = RETRY_CNT,
    /// How often to try again when the receiver is not ready; 7 means for ever.
    rnr_retry: u8 = RNR_RETRY,
    /// The first PSN to expect.
    receive_psn: Psn = RQ_PSN,
    /// Reads and atomics that this side may have outstanding.
    max_reads_out: u8 = MAX_QP_RD_ATOMIC,
    /// How long a peer is told to wait when no receive is posted.
    min_rnr_timer: RnrTimer = MIN_RNR_TIMER,
    /// The first PSN to send.
    send_psn: Psn = SQ_PSN,
    /// Reads and atomics that the peer may have outstanding here.
    max_reads_in: u8 = MAX_DEST_RD_ATOMIC,
    /// The peer's queue pair.
    destination: Qpn = DEST_QPN,
    /// The most that the queue pair sends, in kbit/s; zero is no limit.
    rate_limit: u32 = RATE_LIMIT,
    /// An alternate path. There is no path migration here: accepted where the specification allows it.
    alternate: () = ALT_PATH,
    /// The path migration state, likewise.
    migration: () = PATH_MIG_STATE,
}

/// What a transition needs and what it allows besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Attributes that must be given.
    pub required: AttributeMask,
    /// Attributes that may be given.
    pub optional: AttributeMask,
}

/// The transition that a caller may ask for (IBA table 91), if there is one.
pub fn transition(kind: QpKind, from: State, to: State) -> Option<Transition> {
    use AttributeMask as M;
    use QpKind as K;
    use State::*;
    let datagram = kind.is_datagram();
    let connected = M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
    let migration = M::ALT_PATH | M::PATH_MIG_STATE;
    let responder_rnr = if matches!(kind, K::Rc | K::XrcTarget) { M::MIN_RNR_TIMER } else { M::empty() };
    let (required, optional) = match (from, to) {
        (_, Reset | Error) => (M::empty(), M::empty()),
        (Reset, Init) if kind == K::Gsi => (M::PKEY_INDEX | M::QKEY, M::PORT),
        (Reset, Init) if datagram => (M::PKEY_INDEX | M::PORT | M::QKEY, M::empty()),
        (Reset, Init) => (connected, M::empty()),
        (Init, Init) if datagram => (M::empty(), M::PKEY_INDEX | M::PORT | M::QKEY),
        (Init, Init) => (M::empty(), connected),
        (Init, ReadyToReceive) if datagram => (M::empty(), M::PKEY_INDEX | M::QKEY),
        (Init, ReadyToReceive) => {
            let required = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
            let responder = match kind {
                K::Rc | K::XrcTarget => M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
                _ => M::empty(),
            };
            (required | responder, M::ALT_PATH | M::ACCESS_FLAGS | M::PKEY_INDEX)
        }
        (ReadyToReceive, ReadyToSend) => {
            let required = match kind {
                K::Rc | K::XrcInitiator => {
                    M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC
                }
                K::XrcTarget => M::TIMEOUT | M::SQ_PSN,
                _ => M::SQ_PSN,
            };
            let optional = match datagram {
                true => M::CUR_STATE | M::QKEY,
                false => M::CUR_STATE | M::ACCESS_FLAGS | migration | responder_rnr,
            };
            (required, optional | M::RATE_LIMIT)
        }
        (ReadyToSend, ReadyToSend) | (SendQueueDrained, ReadyToSend) => match datagram {
            true => (M::empty(), M::CUR_STATE | M::QKEY | M::RATE_LIMIT),
            false => (M::empty(), M::CUR_STATE | M::ACCESS_FLAGS | migration | responder_rnr | M::RATE_LIMIT),
        },
        (SendQueueError, ReadyToSend) => match kind {
            K::Ud | K::Gsi => (M::empty(), M::CUR_STATE | M::QKEY),
            K::Uc => (M::empty(), M::CUR_STATE | M::ACCESS_FLAGS),
            _ => return None,
        },
        (ReadyToSend, SendQueueDrained) => (M::empty(), M::EN_SQD_ASYNC_NOTIFY),
        (SendQueueDrained, SendQueueDrained) => {
            let common = M::AV | M::ACCESS_FLAGS | M::PKEY_INDEX | migration;
            let optional = match kind {
                K::Ud | K::Gsi => M::PKEY_INDEX | M::QKEY,
                K::Uc => common,
                K::Rc => {
                    common
                        | M::PORT
                        | M::TIMEOUT
                        | M::RETRY_CNT
                        | M::RNR_RETRY
                        | M::MAX_QP_RD_ATOMIC
                        | M::MAX_DEST_RD_ATOMIC
                        | M::MIN_RNR_TIMER
                }
                K::XrcInitiator => {
                    common | M::PORT | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC
                }
                K::XrcTarget => common | M::PORT | M::TIMEOUT | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
            };
            (M::empty(), optional)
        }
        _ => return None,
    };
    Some(Transition { required, optional: optional | M::STATE })
}

/// Checks a change against the table and the ranges of its values.
pub(crate) fn check(queue_pair: Qpn, kind: QpKind, from: State, modify: &Modify) -> Result<State, Error> {
    if let Some(believed) = modify.current_state
        && believed != from
        // A send queue error comes by itself: the caller may not have seen it yet.
        && !(believed == State::ReadyToSend && from == State::SendQueueError)
    {
        return Err(Error::Invalid { what: "current state", why: "the queue pair is in another state" });
    }
    let to = modify.state.unwrap_or(from);
    let Some(Transition { required, optional }) = transition(kind, from, to) else {
        return Err(Error::Transition { queue_pair, from, to });
    };
    let given = modify.mask();
    let (missing, forbidden) = (required - given, given - required - optional);
    // What is set when everything is torn down does not matter (IBA: "ignored").
    let ignored = matches!(to, State::Reset | State::Error);
    if !missing.is_empty() || !forbidden.is_empty() && !ignored {
        return Err(Error::Attributes { queue_pair, from, to, missing, forbidden });
    }
    if modify.port.is_some_and(|port| port != 1) {
        return Err(Error::Invalid { what: "port", why: "the card has one port, number 1" });
    }
    if modify.partition_index.is_some_and(|index| index != 0) {
        return Err(Error::Invalid { what: "P_Key index", why: "the table has one entry, index 0" });
    }
    for (what, value, limit) in [
        ("timeout", modify.timeout, 31),
        ("retry count", modify.retry_count, 7),
        ("RNR retry count", modify.rnr_retry, 7),
        ("max_rd_atomic", modify.max_reads_out, crate::Limits::CARD.reads),
        ("max_dest_rd_atomic", modify.max_reads_in, crate::Limits::CARD.reads),
    ] {
        if let Some(value) = value.filter(|value| *value > limit) {
            return Err(Error::TooLarge { what, value: value.into(), limit: limit.into() });
        }
    }
    Ok(to)
}

impl Attributes {
    pub(crate) fn apply(&mut self, modify: &Modify) {
        macro_rules! set {
            ($($field:ident),*) => { $(if let Some(value) = modify.$field { self.$field = value; })* };
        }
        set!(
            notify_drained,
            access,
            partition_index,
            port,
            queue_key,
            path,
            mtu,
            timeout,
            retry_count,
            rnr_retry,
            receive_psn,
            max_reads_out,
            min_rnr_timer,
            send_psn,
            max_reads_in,
            destination,
            rate_limit
        );
    }
}
