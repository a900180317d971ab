//! Numbers by which an application and a card name resources.

macro_rules! handle {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub struct $name(pub u32);)*
    };
}

handle! {
    /// Names an application of the card: the owner of its resources.
    ClientId,
    /// Names a protection domain.
    PdId,
    /// Names a completion queue.
    CqId,
    /// Names a shared receive queue.
    SrqId,
    /// Names an address handle.
    AhId,
    /// Names an XRC domain.
    XrcdId,
    /// Names one end of a connection being made, or a listener: an `rdma_cm_id`.
    CmId,
    /// Names a queue of connection management events.
    CmChannelId,
}
