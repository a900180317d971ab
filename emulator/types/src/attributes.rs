//! Queue pair attributes.

use crate::{AccessFlags, AddressVector};
use core::fmt;
use softhca_wire::{Mtu, Psn, Qpn, QueueKey, RnrTimer, Service};

/// The type of a queue pair (`enum ibv_qp_type`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QpType {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// The initiator of an extended reliable connection (XRC).
    XrcInitiator,
    /// The target of an extended reliable connection (XRC).
    XrcTarget,
    /// The general services interface, QP1.
    Gsi,
}

impl QpType {
    /// The transport service whose opcodes the queue pair uses.
    #[inline]
    pub const fn service(self) -> Service {
        match self {
            QpType::Rc => Service::Rc,
            QpType::Uc => Service::Uc,
            QpType::Ud | QpType::Gsi => Service::Ud,
            QpType::XrcInitiator | QpType::XrcTarget => Service::Xrc,
        }
    }

    /// Whether the service acknowledges packets.
    #[inline]
    pub const fn is_reliable(self) -> bool {
        self.service().is_reliable()
    }

    /// Whether every work request has its own destination.
    #[inline]
    pub const fn is_datagram(self) -> bool {
        matches!(self, QpType::Ud | QpType::Gsi)
    }
}

softhca_wire::named_enum! {
    /// The state of a queue pair (IBA figure 124).
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    #[allow(missing_docs, reason = "the names are those of the specification")]
    // In the order of `enum ibv_qp_state`, by their short names in the verbs documentation.
    pub enum QpState {
        Reset => "RESET",
        Init => "INIT",
        #[cfg_attr(feature = "serde", serde(rename = "rtr"))]
        ReadyToReceive => "RTR",
        #[cfg_attr(feature = "serde", serde(rename = "rts"))]
        ReadyToSend => "RTS",
        #[cfg_attr(feature = "serde", serde(rename = "sqd"))]
        SendQueueDrained => "SQD",
        #[cfg_attr(feature = "serde", serde(rename = "sqe"))]
        SendQueueError => "SQE",
        Error => "ERR",
    }
}

impl QpState {
    /// Whether the responder accepts requests.
    #[inline]
    pub const fn accepts_requests(self) -> bool {
        matches!(
            self,
            QpState::ReadyToReceive
                | QpState::ReadyToSend
                | QpState::SendQueueDrained
                | QpState::SendQueueError
        )
    }

    /// Whether the requester accepts responses.
    #[inline]
    pub const fn accepts_responses(self) -> bool {
        matches!(self, QpState::ReadyToSend | QpState::SendQueueDrained)
    }
}

#[allow(missing_docs, reason = "the names are those of the verbs")]
mod mask {
    bitflags::bitflags! {
    /// A set of attributes. The bits are those of `enum ibv_qp_attr_mask`.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct QpAttributeMask: u32 {
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
pub use mask::QpAttributeMask;

impl fmt::Display for QpAttributeMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (index, (name, _)) in self.iter_names().enumerate() {
            write!(f, "{}{name}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// The attributes of a queue pair (`struct ibv_qp_attr`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the attribute of its name")]
pub struct QpAttributes {
    pub access_flags: AccessFlags,
    pub pkey_index: u16,
    pub port: u8,
    pub qkey: QueueKey,
    pub address_vector: AddressVector,
    pub path_mtu: Mtu,
    pub dest_qpn: Qpn,
    pub rq_psn: Psn,
    pub sq_psn: Psn,
    /// The most outstanding READs and atomics as requester.
    pub max_rd_atomic: u8,
    /// The most outstanding READs and atomics as responder.
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: RnrTimer,
    /// The ACK timeout is 4.096 µs times two to this power; zero disables it.
    pub timeout: u8,
    pub retry_count: u8,
    /// Seven means without limit.
    pub rnr_retry: u8,
    pub sqd_async_notify: bool,
    pub rate_limit: u32,
}

impl QpAttributes {
    /// The attributes of a queue pair in RESET.
    pub fn reset(mtu: Mtu) -> QpAttributes {
        QpAttributes {
            access_flags: AccessFlags::empty(),
            pkey_index: 0,
            port: 1,
            qkey: QueueKey(0),
            address_vector: AddressVector::default(),
            path_mtu: mtu,
            dest_qpn: Qpn::new(0),
            rq_psn: Psn::new(0),
            sq_psn: Psn::new(0),
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: RnrTimer::new(0),
            timeout: 0,
            retry_count: 0,
            rnr_retry: 0,
            sqd_async_notify: false,
            rate_limit: 0,
        }
    }
}

macro_rules! modify {
    ($($(#[doc = $doc:literal])* $field:ident: $kind:ty = $flag:ident,)*) => {
        /// The arguments of `ibv_modify_qp`: attributes that are `Some` are set.
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct ModifyQp {
            $($(#[doc = $doc])* pub $field: Option<$kind>,)*
        }

        impl ModifyQp {
            /// The attributes that are set.
            pub fn mask(&self) -> QpAttributeMask {
                let mut mask = QpAttributeMask::empty();
                $(if self.$field.is_some() { mask |= QpAttributeMask::$flag; })*
                mask
            }

            $($(#[doc = $doc])*
            pub fn $field(mut self, value: $kind) -> ModifyQp {
                self.$field = Some(value);
                self
            })*
        }
    };
}

modify! {
    /// The new state.
    state: QpState = STATE,
    /// The state that the caller expects the queue pair to be in.
    current_state: QpState = CUR_STATE,
    /// Raise an event when the send queue has drained.
    sqd_async_notify: bool = EN_SQD_ASYNC_NOTIFY,
    /// The remote operations that the queue pair allows.
    access_flags: AccessFlags = ACCESS_FLAGS,
    /// The index of the P_Key.
    pkey_index: u16 = PKEY_INDEX,
    /// The port number; the HCA has one port.
    port: u8 = PORT,
    /// The Q_Key that incoming datagrams must have.
    qkey: QueueKey = QKEY,
    /// The address of the peer.
    address_vector: AddressVector = AV,
    /// The path MTU: the most payload bytes of a packet.
    path_mtu: Mtu = PATH_MTU,
    /// The exponent of the ACK timeout.
    timeout: u8 = TIMEOUT,
    /// How often the requester retransmits after a timeout or sequence NAK.
    retry_count: u8 = RETRY_CNT,
    /// How often the requester retries after an RNR NAK; 7 means without limit.
    rnr_retry: u8 = RNR_RETRY,
    /// The first PSN that the responder expects.
    rq_psn: Psn = RQ_PSN,
    /// The most outstanding READs and atomics as requester.
    max_rd_atomic: u8 = MAX_QP_RD_ATOMIC,
    /// The wait time in RNR NAKs.
    min_rnr_timer: RnrTimer = MIN_RNR_TIMER,
    /// The first PSN that the requester sends.
    sq_psn: Psn = SQ_PSN,
    /// The most outstanding READs and atomics as responder.
    max_dest_rd_atomic: u8 = MAX_DEST_RD_ATOMIC,
    /// The queue pair of the peer.
    dest_qpn: Qpn = DEST_QPN,
    /// The rate limit in kbit/s; zero means none.
    rate_limit: u32 = RATE_LIMIT,
    /// The alternate path. Path migration is not implemented; the attribute is accepted where the specification allows it.
    alt_path: () = ALT_PATH,
    /// The path migration state. Accepted in the same way.
    path_mig_state: () = PATH_MIG_STATE,
}

impl ModifyQp {
    /// The change without the attributes that a queue pair of this type ignores, as in Linux. An XRC initiator ignores
    /// a responder's attributes, an XRC target a requester's. Programs pass the attributes of RC for both.
    pub fn without_ignored(mut self, kind: QpType) -> ModifyQp {
        match kind {
            QpType::XrcInitiator => (self.max_dest_rd_atomic, self.min_rnr_timer) = (None, None),
            QpType::XrcTarget => {
                (self.max_rd_atomic, self.retry_count, self.rnr_retry) = (None, None, None);
            }
            _ => {}
        }
        self
    }
}

impl QpAttributes {
    /// Applies the attributes that are set in `modify`.
    pub fn apply(&mut self, modify: &ModifyQp) {
        macro_rules! set {
            ($($field:ident),*) => { $(if let Some(value) = modify.$field { self.$field = value; })* };
        }
        set!(
            sqd_async_notify,
            access_flags,
            pkey_index,
            port,
            qkey,
            address_vector,
            path_mtu,
            timeout,
            retry_count,
            rnr_retry,
            rq_psn,
            max_rd_atomic,
            min_rnr_timer,
            sq_psn,
            max_dest_rd_atomic,
            dest_qpn,
            rate_limit
        );
    }
}
