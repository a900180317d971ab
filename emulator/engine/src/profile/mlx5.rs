//! NVIDIA ConnectX-5 and ConnectX-6 with the mlx5 driver.

use super::{AdaptiveRetransmission, Profile, RetryTiming, VendorError, WriteCheck, WriteCount};
use crate::Recovery;
use softhca_wire::NakCode;

const INFERRED: &str = "inferred: the card sends again, as measured; that it begins with the lost packet is the rule of the IBTA";
const MEASURED: &str =
    "measured on ConnectX-5 and ConnectX-6, RoCE v2 (unionxic/rdma-fault-characterization, October 2026)";
const ATTRIBUTES: &str = "ibv_devinfo -v of a ConnectX-5, firmware 16.23.1020 (open-mpi/ompi#6137)";

pub(super) const PROFILE: Profile = Profile {
    name: "mlx5",
    card: "NVIDIA ConnectX-5 and ConnectX-6",
    sources: &[
        (
            &[
                "vendor_err_flush",
                "vendor_err_bad_lkey",
                "vendor_err_sge_range",
                "vendor_err_local_write",
                "vendor_err_nak_invalid_request",
                "vendor_err_nak_remote_access",
                "vendor_err_rnr_retry",
                "vendor_err_ack_timeout",
                "nak_of_queue_pair_access",
                "write_check",
                "write_count",
                "counts_rejected_requests",
                "detects_dead_processes",
                "retry",
            ],
            MEASURED,
        ),
        (&["recovery"], INFERRED),
        (
            &[
                "vendor_id",
                "vendor_part_id",
                "max_qp",
                "max_qp_wr",
                "max_sge",
                "max_cq",
                "max_cqe",
                "max_mr",
                "max_pd",
                "max_qp_rd_atom",
            ],
            ATTRIBUTES,
        ),
    ],
    // The card retransmits; that it goes back to the lost packet was not measured.
    recovery: Recovery::GoBackN,
    vendor_id: 0x02c9,
    vendor_part_id: 4119,
    max_qp: 262_144,
    max_qp_wr: 32_768,
    max_sge: 30,
    max_cq: 16_777_216,
    max_cqe: 4_194_303,
    max_mr: 16_777_216,
    max_pd: 16_777_216,
    max_qp_rd_atom: 16,
    vendor_err_flush: VendorError::Code(0xf5),
    vendor_err_bad_lkey: VendorError::Code(0x52),
    vendor_err_sge_range: VendorError::Code(0x53),
    vendor_err_local_write: VendorError::Code(0x33),
    // Measured for a queue pair without REMOTE_WRITE. The requester sees the NAK only.
    vendor_err_nak_invalid_request: VendorError::Code(0x8a),
    vendor_err_nak_remote_access: VendorError::Code(0x88),
    vendor_err_rnr_retry: VendorError::Code(0x87),
    vendor_err_ack_timeout: VendorError::Code(0x81),
    nak_of_queue_pair_access: NakCode::InvalidRequest,
    write_check: WriteCheck::Packet,
    write_count: WriteCount::AfterQueuePairAccess,
    counts_rejected_requests: false,
    detects_dead_processes: false,
    // 4 to 11 adaptive retransmissions were seen, 8 with the counters. Their intervals are not known: they double here,
    // and their sum is fitted to the 3.66 s at timeout 14.
    retry: RetryTiming {
        min_exponent: 16,
        factor: 2,
        adaptive: Some(AdaptiveRetransmission { retransmissions: 8, per_mille: 817 }),
    },
    ..super::softhca::PROFILE
};
