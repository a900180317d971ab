//! Handles of resources.

macro_rules! handle {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub struct $name(pub u32);)*
    };
}

handle! {
    /// A client of the HCA, which owns resources.
    ClientId,
    /// A protection domain.
    PdId,
    /// A completion queue.
    CqId,
    /// A shared receive queue.
    SrqId,
    /// An address handle.
    AhId,
    /// An XRC domain.
    XrcdId,
    /// A communication identifier: an `rdma_cm_id`.
    CmId,
    /// An event channel of the connection manager: an `rdma_event_channel`.
    CmChannelId,
}
