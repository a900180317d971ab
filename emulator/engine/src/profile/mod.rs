//! Profiles of cards: the facts in which cards differ, one file of data per card.
//!
//! A profile has a value for every fact. A fact that nobody has measured has the value of SoftHCA's own profile, and
//! [`Profile::source`] returns `None` for it. The engine reads the values; it never asks which card it is.

mod mlx5;
mod retry;
mod rxe;
mod softhca;
mod value;

pub use retry::{AdaptiveRetransmission, RetryTiming};
pub use value::FactValue;

use crate::{AccessError, Reason, Recovery};
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use softhca_types::{CompletionStatus, DeviceLimits, Errno};
use softhca_wire::NakCode;

/// The vendor error of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VendorError {
    /// SoftHCA's code of the reason.
    Reason,
    /// A code of the card.
    Code(u32),
}

/// The responder's answer to a SEND with invalidate whose key cannot be invalidated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidateAnswer {
    /// Neither ACK nor NAK (IBA 9.9.6.3, class J).
    Nothing,
    /// An ACK: the requester completes with success.
    Ack,
}

/// The part of a WRITE whose address range a packet must lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCheck {
    /// The whole message: the first packet fails, and the memory does not change.
    Message,
    /// The packet: earlier packets of the message have changed the memory.
    Packet,
}

/// When the responder counts a WRITE in `rx_write_requests`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCount {
    /// Before all checks.
    OnArrival,
    /// After the check of the queue pair's access flags, before that of the rkey.
    AfterQueuePairAccess,
}

macro_rules! facts {
    ($($(#[doc = $doc:literal])+ $field:ident: $kind:ty,)*) => {
        /// The facts about a card.
        #[derive(Debug, PartialEq, Eq)]
        pub struct Profile {
            /// The name in options and files.
            pub name: &'static str,
            /// The cards that the facts are about.
            pub card: &'static str,
            /// The sources of the known facts, each with the names of its facts.
            pub sources: &'static [(&'static [&'static str], &'static str)],
            $($(#[doc = $doc])+ pub $field: $kind,)*
        }

        impl Profile {
            /// Names and descriptions of all facts.
            pub const DESCRIPTIONS: &'static [(&'static str, &'static str)] =
                &[$((stringify!($field), concat!($($doc),+)),)*];

            /// The facts as text, in the order of [`Profile::DESCRIPTIONS`].
            pub fn values(&self) -> Vec<String> {
                vec![$(FactValue::text(&self.$field)),*]
            }
        }
    };
}

facts! {
    /// Loss recovery, unless the configuration of the device says otherwise.
    recovery: Recovery,
    /// Vendor ID in the device attributes.
    vendor_id: u32,
    /// Part ID in the device attributes.
    vendor_part_id: u32,
    /// `local_ca_ack_delay` in the device attributes.
    local_ca_ack_delay: u8,
    /// Maximum number of queue pairs.
    max_qp: u32,
    /// Maximum number of work requests of a queue.
    max_qp_wr: u32,
    /// Maximum number of SGEs of a work request.
    max_sge: u32,
    /// Maximum number of completion queues.
    max_cq: u32,
    /// Maximum size of a completion queue.
    max_cqe: u32,
    /// Maximum number of memory regions.
    max_mr: u32,
    /// Maximum number of protection domains.
    max_pd: u32,
    /// Maximum number of outstanding READs and atomics of a queue pair.
    max_qp_rd_atom: u32,
    /// Maximum number of multicast groups.
    max_mcast_grp: u32,
    /// Maximum number of queue pairs in a multicast group.
    max_mcast_qp_attach: u32,
    /// Vendor error of a flushed work request.
    vendor_err_flush: VendorError,
    /// Vendor error of a work request whose lkey no memory region has.
    vendor_err_bad_lkey: VendorError,
    /// Vendor error of an SGE that exceeds its memory region.
    vendor_err_sge_range: VendorError,
    /// Vendor error of a READ into a memory region without LOCAL_WRITE.
    vendor_err_local_write: VendorError,
    /// Vendor error of a NAK invalid request.
    vendor_err_nak_invalid_request: VendorError,
    /// Vendor error of a NAK remote access error.
    vendor_err_nak_remote_access: VendorError,
    /// Vendor error of a NAK remote operational error.
    vendor_err_nak_remote_operation: VendorError,
    /// Vendor error when all RNR retries are used.
    vendor_err_rnr_retry: VendorError,
    /// Vendor error when all retries after ACK timeouts are used, also if the peer's process is gone.
    vendor_err_ack_timeout: VendorError,
    /// Vendor error of all other failures.
    vendor_err_other: VendorError,
    /// NAK of a one-sided request that the access flags of the queue pair do not allow.
    nak_of_queue_pair_access: NakCode,
    /// NAK of a SEND that is longer than the receive.
    nak_of_long_send: NakCode,
    /// Status of the receive of a WRITE with immediate of one packet whose rkey is rejected.
    receive_of_rejected_write: CompletionStatus,
    /// Answer to a SEND with invalidate of a key that cannot be invalidated.
    answer_to_failed_invalidate: InvalidateAnswer,
    /// The range check of a WRITE of several packets.
    write_check: WriteCheck,
    /// When `rx_write_requests` counts a WRITE.
    write_count: WriteCount,
    /// Whether the responder counts the requests that it rejects with a NAK, except for RNR.
    counts_rejected_requests: bool,
    /// Whether completions of receives on connected queue pairs have the flag `IBV_WC_GRH`.
    grh_flag_on_connections: bool,
    /// Whether requests fail early if the peer's process is known to be gone.
    detects_dead_processes: bool,
    /// errno of deregistering a memory region with bound memory windows.
    errno_of_bound_region: Errno,
    /// ACK timeouts and retries.
    retry: RetryTiming,
}

impl Profile {
    /// All profiles. The first is the default.
    pub const ALL: [&'static Profile; 3] = [&softhca::PROFILE, &rxe::PROFILE, &mlx5::PROFILE];
    /// The profile of SoftHCA itself.
    pub const SOFTHCA: &'static Profile = &softhca::PROFILE;

    /// The names of all profiles.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Profile::ALL.iter().map(|profile| profile.name)
    }

    /// The profile with this name.
    pub fn from_name(name: &str) -> Option<&'static Profile> {
        Profile::ALL.into_iter().find(|profile| profile.name == name)
    }

    /// The source of a fact; `None` if it is not known about the card.
    pub fn source(&self, fact: &str) -> Option<&'static str> {
        self.sources.iter().find(|(facts, _)| facts.contains(&fact)).map(|(_, source)| *source)
    }

    /// The limits of a device: those of the card, as far as SoftHCA can keep them.
    pub fn limits(&self) -> DeviceLimits {
        let hca = DeviceLimits::HCA;
        DeviceLimits {
            max_qp: hca.max_qp.min(self.max_qp),
            max_qp_wr: hca.max_qp_wr.min(self.max_qp_wr),
            max_sge: hca.max_sge.min(self.max_sge),
            max_cq: hca.max_cq.min(self.max_cq),
            max_cqe: hca.max_cqe.min(self.max_cqe),
            max_mr: hca.max_mr.min(self.max_mr),
            max_pd: hca.max_pd.min(self.max_pd),
            max_qp_rd_atom: self.max_qp_rd_atom.min(hca.max_qp_rd_atom.into()) as u8,
            max_mcast_grp: hca.max_mcast_grp.min(self.max_mcast_grp),
            max_mcast_qp_attach: hca.max_mcast_qp_attach.min(self.max_mcast_qp_attach),
            ..hca
        }
    }

    /// The vendor error of a completion with this reason.
    #[inline]
    pub(crate) fn vendor_error(&self, reason: Reason) -> u32 {
        if reason == Reason::None {
            return 0;
        }
        let error = match reason {
            Reason::Flushed => self.vendor_err_flush,
            Reason::LocalAccess(AccessError::UnknownKey { .. } | AccessError::StaleKey { .. }) => {
                self.vendor_err_bad_lkey
            }
            Reason::LocalAccess(AccessError::OutOfBounds { .. }) => self.vendor_err_sge_range,
            Reason::LocalAccess(AccessError::InsufficientAccess { .. }) => self.vendor_err_local_write,
            Reason::Nak { code: NakCode::InvalidRequest, .. } => self.vendor_err_nak_invalid_request,
            Reason::Nak { code: NakCode::RemoteAccessError, .. } => self.vendor_err_nak_remote_access,
            Reason::Nak { .. } => self.vendor_err_nak_remote_operation,
            Reason::RnrRetryExceeded { .. } => self.vendor_err_rnr_retry,
            Reason::AckTimeout { .. } | Reason::PeerUnreachable => self.vendor_err_ack_timeout,
            _ => self.vendor_err_other,
        };
        match error {
            VendorError::Reason => reason.code(),
            VendorError::Code(code) => code,
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for &'static Profile {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<&'static Profile, D::Error> {
        let name = <String as serde::Deserialize>::deserialize(deserializer)?;
        Profile::from_name(&name).ok_or_else(|| {
            let names: Vec<&str> = Profile::names().collect();
            serde::de::Error::custom(alloc::format!(
                "unknown profile {name:?}, expected one of {}",
                names.join(", ")
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_is_found_by_its_name() {
        for profile in Profile::ALL {
            assert_eq!(Profile::from_name(profile.name), Some(profile));
        }
        assert_eq!(Profile::from_name("mlx6"), None);
        assert_eq!(Profile::ALL[0], Profile::SOFTHCA);
    }

    /// A value that differs from SoftHCA's is a claim about the card.
    #[test]
    fn every_fact_that_differs_has_a_source() {
        let own = Profile::SOFTHCA.values();
        for profile in Profile::ALL {
            let known = profile.sources.iter().flat_map(|(facts, _)| facts.iter());
            for fact in known {
                let exists = Profile::DESCRIPTIONS.iter().any(|(name, _)| name == fact);
                assert!(exists, "{profile}: the source of {fact:?}, which is no fact");
            }
            for ((name, _), (value, own)) in
                Profile::DESCRIPTIONS.iter().zip(profile.values().iter().zip(&own))
            {
                assert!(
                    value == own || profile.source(name).is_some(),
                    "{profile}: {name} is {value} without a source"
                );
            }
        }
    }

    #[test]
    fn limits_never_exceed_those_of_the_emulator() {
        for profile in Profile::ALL {
            let (limits, hca) = (profile.limits(), DeviceLimits::HCA);
            assert!(limits.max_qp <= hca.max_qp && limits.max_qp_wr <= hca.max_qp_wr, "{profile}");
            assert!(limits.max_sge <= hca.max_sge && limits.max_cqe <= hca.max_cqe, "{profile}");
        }
        assert_eq!(Profile::SOFTHCA.limits(), DeviceLimits::HCA);
    }
}
