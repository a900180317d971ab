//! Events that outlive their delivery, and their place in a recording of several cards and networks.

use crate::{
    Direction, FabricEvent, Fault, FaultEffect, HostId, LinkId, NetworkEvent, Node, Stage, SwitchId,
};
use alloc::vec::Vec;
use softhca_engine::{Event, Instant};
use softhca_wire::{AddressHeaders, Pfc};

/// The hosts, switches and links of a recording before those of one card or network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdOffsets {
    /// Hosts with the ports of other machines, and as many switches.
    pub nodes: u32,
    pub links: u32,
}

impl IdOffsets {
    /// The card of a host in real time. Its link has the number of the host, and both ends of the link are the host.
    pub const fn of_card(HostId(host): HostId) -> IdOffsets {
        IdOffsets { nodes: host, links: host }
    }

    pub const fn host(self, HostId(host): HostId) -> HostId {
        HostId(host + self.nodes)
    }

    pub const fn link(self, LinkId(link): LinkId) -> LinkId {
        LinkId(link + self.links)
    }

    pub const fn node(self, node: Node) -> Node {
        match node {
            Node::Host(host) => Node::Host(self.host(host)),
            Node::Switch(SwitchId(switch)) => Node::Switch(SwitchId(switch + self.nodes)),
        }
    }
}

/// A [`NetworkEvent`] that recordings contain, as a value.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq)]
pub enum OwnedEvent {
    Hca { host: HostId, event: Event },
    Frame { link: LinkId, direction: Direction, addressing: AddressHeaders, packet: Vec<u8> },
    PauseFrame { link: LinkId, direction: Direction, stage: Stage, pause: Pfc },
    Fault { link: LinkId, fault: Fault },
    Fabric(FabricEvent),
}

impl OwnedEvent {
    /// The event of a card, if recordings contain it. They contain the packets that a card sends, not those that it
    /// receives.
    pub fn new(event: &NetworkEvent<'_>) -> Option<OwnedEvent> {
        Some(match *event {
            NetworkEvent::Hca { host, event } => OwnedEvent::Hca { host, event: *event },
            NetworkEvent::Frame { link, direction, stage: Stage::Admitted, addressing, packet } => {
                OwnedEvent::Frame { link, direction, addressing: *addressing, packet: packet.to_vec() }
            }
            NetworkEvent::PauseFrame { link, direction, stage, pause } => {
                OwnedEvent::PauseFrame { link, direction, stage, pause: *pause }
            }
            NetworkEvent::Fault { link, fault } => OwnedEvent::Fault { link, fault: *fault },
            NetworkEvent::Fabric(event) => OwnedEvent::Fabric(event),
            _ => return None,
        })
    }

    /// Gives the event the numbers and the clock of a recording. The clock of the recording was `now` when that of the card
    /// or network was `at`.
    pub fn move_to(&mut self, offsets: IdOffsets, at: Instant, now: Instant) {
        let moved = |time_ns: u64| now.nanos().saturating_add(time_ns.saturating_sub(at.nanos()));
        match self {
            OwnedEvent::Hca { host, event } => {
                *host = offsets.host(*host);
                if let Event::RnrWaitStarted { until, .. } = event {
                    *until = Instant::from_nanos(moved(until.nanos()));
                }
            }
            OwnedEvent::Fault { link, fault } => {
                *link = offsets.link(*link);
                if let FaultEffect::LinkTakenDown { until_ns, .. } = &mut fault.effect {
                    *until_ns = moved(*until_ns);
                }
            }
            OwnedEvent::Fabric(event) => {
                *event.node_mut() = offsets.node(event.node());
                *event.link_mut() = offsets.link(*event.link_mut());
                if let FabricEvent::PauseReceived { until_ns, .. } = event {
                    *until_ns = moved(*until_ns);
                }
            }
            OwnedEvent::Frame { link, .. } | OwnedEvent::PauseFrame { link, .. } => {
                *link = offsets.link(*link);
            }
        }
    }

    /// The event, for a sink.
    pub fn as_event(&self) -> NetworkEvent<'_> {
        match self {
            OwnedEvent::Hca { host, event } => NetworkEvent::Hca { host: *host, event },
            OwnedEvent::Frame { link, direction, addressing, packet } => {
                let (link, direction, stage) = (*link, *direction, Stage::Admitted);
                NetworkEvent::Frame { link, direction, stage, addressing, packet }
            }
            OwnedEvent::PauseFrame { link, direction, stage, pause } => {
                NetworkEvent::PauseFrame { link: *link, direction: *direction, stage: *stage, pause }
            }
            OwnedEvent::Fault { link, fault } => NetworkEvent::Fault { link: *link, fault },
            OwnedEvent::Fabric(event) => NetworkEvent::Fabric(*event),
        }
    }
}
