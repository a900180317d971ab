//! Where traffic goes that never has to leave its host.

/// Where goes what a host sends to itself. Multicast always goes through sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Loopback {
    /// Through its socket, as everything does: a capture of the machine's loopback interface shows it.
    #[default]
    Socket,
    /// From the card's sending half to its receiving half. The kernel never sees it, and no link leads there.
    Internal,
}

impl Loopback {
    /// All of them.
    pub const ALL: [Loopback; 2] = [Loopback::Socket, Loopback::Internal];

    /// Its name: `socket` or `card`.
    pub fn name(self) -> &'static str {
        match self {
            Loopback::Socket => "socket",
            Loopback::Internal => "card",
        }
    }

    /// The one with this name.
    pub fn from_name(name: &str) -> Option<Loopback> {
        Loopback::ALL.into_iter().find(|loopback| loopback.name() == name)
    }
}
