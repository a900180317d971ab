//! The kinds of resources.

softhca_wire::named_enum! {
    /// A kind of resource, for messages.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[allow(missing_docs, reason = "each variant is the resource of its name")]
    pub enum Resource {
        Client => "client",
        ProtectionDomain => "protection domain",
        MemoryRegion => "memory region",
        MemoryWindow => "memory window",
        CompletionQueue => "completion queue",
        SharedReceiveQueue => "shared receive queue",
        QueuePair => "queue pair",
        AddressHandle => "address handle",
        XrcDomain => "XRC domain",
        MulticastGroup => "multicast group",
        CmIdentifier => "connection identifier",
        CmChannel => "event channel",
        CmPort => "port",
    }
}
