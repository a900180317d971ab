//! Why a packet was dropped.

softhca_wire::named_enum! {
    /// Why a packet was dropped.
    pub enum DropReason {
        /// The port has no link, or the link is down.
        LinkDown => "link down",
        /// The state of the port does not let the packet pass.
        PortState => "port state",
        /// No forwarding table has the destination.
        NoRoute => "no route",
        /// The packet reached a channel adapter that does not have the LID.
        WrongLid => "wrong LID",
        /// The packet passed more switches than any path has.
        TooManyHops => "too many hops",
        /// A directed route is impossible at this node.
        DirectedRoute => "invalid directed route",
        /// The packet is not one.
        Malformed => "malformed",
        /// The payload is longer than the MTU of a link.
        TooLong => "longer than the MTU",
        /// The service level has no virtual lane for data on a link.
        NoLane => "service level without a lane",
        /// A bit changed on the link.
        BitError => "bit error",
        /// VL 15 of the receiving port was full.
        NoRoom => "no room in VL 15",
        /// The M_Key is wrong.
        ManagementKey => "M_Key violation",
        /// The P_Key is wrong.
        PartitionKey => "P_Key violation",
        /// The Q_Key is wrong.
        QueueKey => "Q_Key violation",
        /// No agent takes the MAD, or no device is at the port.
        NoAgent => "no agent",
        /// The receiver's queue is full.
        QueueFull => "queue full",
    }
}
