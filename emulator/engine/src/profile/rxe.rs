//! The Linux software card, rdma_rxe.

use super::{InvalidateAnswer, Profile, VendorError};
use crate::Recovery;
use softhca_types::{CompletionStatus, Errno};
use softhca_wire::NakCode;

const CAPTURED: &str = "captures of Linux 6.1, which the tests replay";
const SOURCE: &str = "source of the Linux driver, drivers/infiniband/sw/rxe";

pub(super) const PROFILE: Profile = Profile {
    name: "rxe",
    card: "Linux rdma_rxe",
    sources: &[
        (&["recovery", "nak_of_long_send", "answer_to_failed_invalidate"], CAPTURED),
        (
            &[
                "vendor_err_flush",
                "vendor_err_bad_lkey",
                "vendor_err_sge_range",
                "vendor_err_local_write",
                "vendor_err_nak_invalid_request",
                "vendor_err_nak_remote_access",
                "vendor_err_nak_remote_operation",
                "vendor_err_rnr_retry",
                "vendor_err_ack_timeout",
                "vendor_err_other",
                "nak_of_queue_pair_access",
                "receive_of_rejected_write",
                "write_check",
                "counts_rejected_requests",
                "grh_flag_on_connections",
                "detects_dead_processes",
                "errno_of_bound_region",
                "retry",
                "max_sge",
                "max_cqe",
                "max_qp_rd_atom",
                "max_mcast_grp",
                "max_mcast_qp_attach",
                "local_ca_ack_delay",
            ],
            SOURCE,
        ),
    ],
    recovery: Recovery::GoBackN,
    max_cqe: 32_767,
    max_mcast_grp: 8_192,
    max_mcast_qp_attach: 56,
    vendor_err_flush: VendorError::Code(0),
    vendor_err_bad_lkey: VendorError::Code(0),
    vendor_err_sge_range: VendorError::Code(0),
    vendor_err_local_write: VendorError::Code(0),
    vendor_err_nak_invalid_request: VendorError::Code(0),
    vendor_err_nak_remote_access: VendorError::Code(0),
    vendor_err_nak_remote_operation: VendorError::Code(0),
    vendor_err_rnr_retry: VendorError::Code(0),
    vendor_err_ack_timeout: VendorError::Code(0),
    vendor_err_other: VendorError::Code(0),
    nak_of_queue_pair_access: NakCode::InvalidRequest,
    nak_of_long_send: NakCode::RemoteOperationalError,
    receive_of_rejected_write: CompletionStatus::RemoteAccessError,
    answer_to_failed_invalidate: InvalidateAnswer::Ack,
    counts_rejected_requests: false,
    grh_flag_on_connections: true,
    detects_dead_processes: false,
    errno_of_bound_region: Errno::EINVAL,
    ..super::softhca::PROFILE
};
