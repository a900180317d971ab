//! How a host's traffic to itself is carried.

/// How a host's traffic to itself is carried. Multicast always uses sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Loopback {
    /// Through its socket, like all other traffic: a capture of the machine's loopback interface shows it.
    #[default]
    Socket,
    /// Inside the HCA, from transmit to receive. The kernel does not see it, and it uses no link.
    Internal,
}

impl Loopback {
    /// All values.
    pub const ALL: [Loopback; 2] = [Loopback::Socket, Loopback::Internal];

    /// Its name: `socket` or `internal`.
    pub fn name(self) -> &'static str {
        match self {
            Loopback::Socket => "socket",
            Loopback::Internal => "internal",
        }
    }

    /// The value with this name.
    pub fn from_name(name: &str) -> Option<Loopback> {
        Loopback::ALL.into_iter().find(|loopback| loopback.name() == name)
    }
}
