//! Identifiers of hosts, links and switches.

/// Identifies a host.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// Identifies a link.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

/// Identifies a switch.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwitchId(pub u32);

/// The end of a link.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    Host(HostId),
    Switch(SwitchId),
}

impl Node {
    /// The host, if this is one.
    pub const fn host(self) -> Option<HostId> {
        match self {
            Node::Host(host) => Some(host),
            Node::Switch(_) => None,
        }
    }

    /// The switch, if this is one.
    pub const fn switch(self) -> Option<SwitchId> {
        match self {
            Node::Switch(switch) => Some(switch),
            Node::Host(_) => None,
        }
    }
}

impl From<HostId> for Node {
    fn from(host: HostId) -> Node {
        Node::Host(host)
    }
}

impl From<SwitchId> for Node {
    fn from(switch: SwitchId) -> Node {
        Node::Switch(switch)
    }
}
