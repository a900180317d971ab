//! How a host's traffic to itself is carried.

softhca_wire::named_enum! {
    /// How a host's traffic to itself is carried. Multicast always uses sockets.
    #[derive(Default)]
    pub enum Loopback {
        /// Through its socket, like all other traffic: a capture of the machine's loopback interface shows it.
        #[default]
        Socket => "socket",
        /// Inside the HCA, from transmit to receive. The kernel does not see it, and it uses no link.
        Internal => "internal",
    }
}
