//! The priorities that each peer has paused.
//!
//! Each link is paused on its own: a pause stops traffic to the peer that sent it, and no other.

use softhca_fabric::{FabricEvent, HostId, LinkId, Node, PauseChange, PauseEndReason, PauseState, pause_ns};
use softhca_wire::link_control::Pause;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU64;

/// The one host and the one link of a driver in its events.
const NODE: Node = Node::Host(HostId(0));
const LINK: LinkId = LinkId(0);

/// The paused priorities of each peer, and until when.
#[derive(Debug, Default)]
pub(crate) struct PeerPauses {
    peers: BTreeMap<IpAddr, PauseState>,
}

impl PeerPauses {
    /// Applies a pause of a peer and emits the changes. Returns whether a priority resumed.
    pub fn apply(
        &mut self,
        peer: IpAddr,
        pause: &Pause,
        now: u64,
        mut emit: impl FnMut(FabricEvent),
    ) -> bool {
        let mut resumed = false;
        let pauses = self.peers.entry(peer).or_default();
        for (priority, quanta) in (0..8u8).zip(pause.quanta) {
            if pause.classes >> priority & 1 == 0 {
                continue;
            }
            let for_ns = pause_ns(quanta, NonZeroU64::new(pause.rate));
            let change = pauses.apply(now, priority, for_ns);
            let until_ns = now.saturating_add(for_ns);
            emit(FabricEvent::PauseReceived { node: NODE, link: LINK, priority, quanta, until_ns });
            if change == PauseChange::Resumed {
                resumed = true;
                let reason = PauseEndReason::Resumed;
                emit(FabricEvent::PauseEnded { node: NODE, link: LINK, priority, reason });
            }
        }
        resumed
    }

    /// Removes the pauses of a dead peer. Returns whether one was active.
    pub fn remove_peer(&mut self, peer: IpAddr) -> bool {
        self.peers.remove(&peer).is_some_and(|pauses| pauses.mask() != 0)
    }

    /// Ends the pauses whose time is over and emits that. Returns the peers that may be sent to again.
    pub fn expire(&mut self, now: u64, mut emit: impl FnMut(FabricEvent)) -> Vec<IpAddr> {
        let mut resumed = Vec::new();
        for (peer, pauses) in &mut self.peers {
            let expired = pauses.expire(now);
            for priority in (0..8).filter(|priority| expired >> priority & 1 == 1) {
                emit(FabricEvent::PauseEnded {
                    node: NODE,
                    link: LINK,
                    priority,
                    reason: PauseEndReason::Expired,
                });
            }
            if expired != 0 {
                resumed.push(*peer);
            }
        }
        resumed
    }

    /// The priorities that a peer has paused, as a mask.
    pub fn mask(&self, peer: IpAddr) -> u8 {
        self.peers.get(&peer).map_or(0, PauseState::mask)
    }

    /// When the first pause ends.
    pub fn next_timeout(&self) -> Option<u64> {
        self.peers.values().filter_map(PauseState::next_end).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn peer(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(127, 0, 0, last))
    }

    fn pause(priority: usize, quanta: u16) -> Pause {
        let mut pause = Pause { classes: 1 << priority, quanta: [9; 8], rate: 1_000_000_000 };
        pause.quanta[priority] = quanta;
        pause
    }

    #[test]
    fn pause_stops_traffic_to_its_sender_only() {
        let mut pauses = PeerPauses::default();
        let mut events = Vec::new();
        assert!(!pauses.apply(peer(2), &pause(3, 10), 0, |event| events.push(event)));
        assert!(!pauses.apply(peer(3), &pause(3, 20), 0, |event| events.push(event)));
        assert_eq!([2, 3, 4].map(|last| pauses.mask(peer(last))), [0b1000, 0b1000, 0]);
        assert_eq!(pauses.next_timeout(), Some(5_120));
        assert_eq!(pauses.expire(5_120, |event| events.push(event)), [peer(2)]);
        assert_eq!([2, 3].map(|last| pauses.mask(peer(last))), [0, 0b1000]);
        assert!(pauses.apply(peer(3), &pause(3, 0), 6_000, |event| events.push(event)));
        assert_eq!((pauses.mask(peer(3)), pauses.next_timeout()), (0, None));
        let ends = |event: &&FabricEvent| matches!(event, FabricEvent::PauseEnded { .. });
        assert_eq!((events.len(), events.iter().filter(ends).count()), (5, 2));
    }

    #[test]
    fn longest_possible_pause_ends_with_its_peer() {
        let mut pauses = PeerPauses::default();
        let stop = Pause { classes: 0xffff, quanta: [u16::MAX; 8], rate: 1 };
        pauses.apply(peer(2), &stop, u64::MAX - 1, |_| ());
        assert_eq!(pauses.mask(peer(2)), 0xff);
        assert!(pauses.remove_peer(peer(2)) && !pauses.remove_peer(peer(2)));
        assert_eq!((pauses.mask(peer(2)), pauses.next_timeout()), (0, None));
    }
}
