//! Device limits.

/// The limits in the device attributes (`struct ibv_device_attr`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the device attribute of its name")]
pub struct DeviceLimits {
    pub max_clients: u32,
    pub max_qp: u32,
    pub max_cq: u32,
    pub max_srq: u32,
    pub max_pd: u32,
    /// Memory regions and memory windows together.
    pub max_mr: u32,
    pub max_ah: u32,
    pub max_xrcd: u32,
    pub max_mcast_grp: u32,
    pub max_mcast_qp_attach: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_inline_data: u32,
    pub max_cqe: u32,
    pub max_qp_rd_atom: u8,
    pub max_msg_sz: u32,
}

impl DeviceLimits {
    /// The length of the largest memory region (`max_mr_size`).
    pub const MAX_MR_SIZE: u64 = 1 << 46;

    /// The limits of every HCA.
    pub const HCA: DeviceLimits = DeviceLimits {
        max_clients: 4096,
        max_qp: 32_768,
        max_cq: 32_768,
        max_srq: 8_192,
        max_pd: 8_192,
        max_mr: 65_000,
        max_ah: 65_000,
        max_xrcd: 1_024,
        max_mcast_grp: 1_024,
        max_mcast_qp_attach: 256,
        max_qp_wr: 16_384,
        max_sge: 32,
        max_inline_data: 1_024,
        max_cqe: 4_194_303,
        max_qp_rd_atom: 128,
        max_msg_sz: 1 << 31,
    };
}
