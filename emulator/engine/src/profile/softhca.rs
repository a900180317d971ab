//! SoftHCA's own behaviour: the IBTA specification where it decides.

use super::{InvalidateAnswer, Profile, RetryTiming, VendorError, WriteCheck, WriteCount};
use crate::Recovery;
use softhca_types::{CompletionStatus, DeviceLimits, Errno};
use softhca_wire::NakCode;

const HCA: DeviceLimits = DeviceLimits::HCA;

pub(super) const PROFILE: Profile = Profile {
    name: "softhca",
    card: "SoftHCA",
    sources: &[],
    recovery: Recovery::Fatal,
    // No assigned vendor ID.
    vendor_id: 0x00ff_ffff,
    vendor_part_id: 0,
    local_ca_ack_delay: 15,
    max_qp: HCA.max_qp,
    max_qp_wr: HCA.max_qp_wr,
    max_sge: HCA.max_sge,
    max_cq: HCA.max_cq,
    max_cqe: HCA.max_cqe,
    max_mr: HCA.max_mr,
    max_pd: HCA.max_pd,
    max_qp_rd_atom: HCA.max_qp_rd_atom as u32,
    max_mcast_grp: HCA.max_mcast_grp,
    max_mcast_qp_attach: HCA.max_mcast_qp_attach,
    vendor_err_flush: VendorError::Reason,
    vendor_err_bad_lkey: VendorError::Reason,
    vendor_err_sge_range: VendorError::Reason,
    vendor_err_local_write: VendorError::Reason,
    vendor_err_nak_invalid_request: VendorError::Reason,
    vendor_err_nak_remote_access: VendorError::Reason,
    vendor_err_nak_remote_operation: VendorError::Reason,
    vendor_err_rnr_retry: VendorError::Reason,
    vendor_err_ack_timeout: VendorError::Reason,
    vendor_err_other: VendorError::Reason,
    nak_of_queue_pair_access: NakCode::RemoteAccessError,
    nak_of_long_send: NakCode::InvalidRequest,
    receive_of_rejected_write: CompletionStatus::LocalAccessError,
    answer_to_failed_invalidate: InvalidateAnswer::Nothing,
    write_check: WriteCheck::Message,
    write_count: WriteCount::OnArrival,
    counts_rejected_requests: true,
    grh_flag_on_connections: false,
    detects_dead_processes: true,
    errno_of_bound_region: Errno::EBUSY,
    retry: RetryTiming::IBTA,
};
