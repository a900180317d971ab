//! The states of a communication identifier.

softhca_wire::named_enum! {
    /// The state of a communication identifier.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub enum CmState {
        /// New.
        Idle => "idle",
        /// The identifier has a local address.
        Bound => "bound",
        /// The destination address is resolved.
        AddressResolved => "address resolved",
        /// The route is resolved.
        RouteResolved => "route resolved",
        /// The identifier accepts connect requests.
        Listening => "listening",
        /// A REQ was sent.
        ReqSent => "REQ sent",
        /// A REQ was received and waits for the application.
        ReqReceived => "REQ received",
        /// A REP was sent.
        RepSent => "REP sent",
        /// A REP was received and waits until the queue pair is ready.
        RepReceived => "REP received",
        /// The connection is established.
        Established => "established",
        /// A DREQ was sent.
        DreqSent => "DREQ sent",
        /// A DREQ was received and waits for the application.
        DreqReceived => "DREQ received",
        /// The connection ended; packets of it may still be in the network.
        TimeWait => "time-wait",
        /// A SIDR_REQ was sent.
        SidrReqSent => "SIDR_REQ sent",
        /// A SIDR_REQ was received and waits for the application.
        SidrReqReceived => "SIDR_REQ received",
        /// A SIDR_REP was received or sent.
        SidrResolved => "resolved",
        /// Rejected, timed out or closed.
        Closed => "closed",
    }
}
