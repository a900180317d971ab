//! How many of everything a card offers.

/// The limits that device attributes report.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the device attribute of its name")]
pub struct Limits {
    pub clients: usize,
    pub queue_pairs: usize,
    pub completion_queues: usize,
    pub shared_receive_queues: usize,
    pub protection_domains: usize,
    /// Regions and windows together.
    pub keys: usize,
    pub address_handles: usize,
    pub xrc_domains: usize,
    pub multicast_groups: usize,
    pub multicast_attachments: usize,
    pub work_requests: u32,
    pub entries: usize,
    pub inline: usize,
    pub completions: u32,
    pub reads: u8,
    pub message: u32,
}

impl Limits {
    /// What every card offers.
    pub const CARD: Limits = Limits {
        clients: 1024,
        queue_pairs: 32_768,
        completion_queues: 32_768,
        shared_receive_queues: 8_192,
        protection_domains: 8_192,
        keys: 65_000,
        address_handles: 32_768,
        xrc_domains: 1_024,
        multicast_groups: 1_024,
        multicast_attachments: 256,
        work_requests: 16_384,
        entries: 32,
        inline: 1_024,
        completions: 131_072,
        reads: 128,
        message: 1 << 31,
    };
}
