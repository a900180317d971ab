//! The priorities that each peer has paused.
//!
//! Each link is paused on its own: a pause stops traffic to the peer that sent it, and no other. A watchdog ends the
//! pause of a peer that never resumes.

use crate::PeerPort;
use softhca_fabric::{FabricEvent, HostId, LinkId, Node, PauseChange, PauseEndReason, PauseState, pause_ns};
use softhca_wire::link_control::Pause;
use std::collections::BTreeMap;
use std::num::NonZeroU64;

/// The one host and the one link of a driver in its events.
const NODE: Node = Node::Host(HostId(0));
const LINK: LinkId = LinkId(0);
/// How long a peer may keep a priority paused without a break: the longest pause of the slowest link.
const WATCHDOG_TIME: u64 = 4_000_000_000;
/// How long a peer must not pause a priority before the watchdog lets it pause the priority again.
const RESTORATION_TIME: u64 = 200_000_000;

/// The paused priorities of each peer, and until when.
#[derive(Debug, Default)]
pub(crate) struct PeerPauses {
    peers: BTreeMap<PeerPort, PeerPause>,
}

#[derive(Debug, Default)]
struct PeerPause {
    state: PauseState,
    /// When the watchdog ends the pause of each priority.
    watchdog_at: [u64; 8],
    /// Until when pauses of each priority are ignored.
    ignored_until: [u64; 8],
}

impl PeerPauses {
    /// Applies a pause of a peer and emits the changes. Returns whether a priority resumed.
    pub fn apply(
        &mut self,
        peer: PeerPort,
        pause: &Pause,
        now: u64,
        mut emit: impl FnMut(FabricEvent),
    ) -> bool {
        let mut resumed = false;
        let PeerPause { state, watchdog_at, ignored_until } = self.peers.entry(peer).or_default();
        for (priority, quanta) in (0..8u8).zip(pause.quanta) {
            let at = usize::from(priority);
            if pause.classes >> priority & 1 == 0 {
                continue;
            }
            let for_ns = pause_ns(quanta, NonZeroU64::new(pause.rate));
            if for_ns > 0 && now < ignored_until[at] {
                ignored_until[at] = now.saturating_add(RESTORATION_TIME);
                continue;
            }
            if state.mask() >> priority & 1 == 0 {
                watchdog_at[at] = now.saturating_add(WATCHDOG_TIME);
            }
            let change = state.apply(now, priority, for_ns);
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
    pub fn remove_peer(&mut self, peer: PeerPort) -> bool {
        self.peers.remove(&peer).is_some_and(|pause| pause.state.mask() != 0)
    }

    /// Ends the pauses whose time is over and emits that. Returns the peers that may be sent to again.
    pub fn expire(&mut self, now: u64, mut emit: impl FnMut(FabricEvent)) -> Vec<PeerPort> {
        let mut resumed = Vec::new();
        for (peer, PeerPause { state, watchdog_at, ignored_until }) in &mut self.peers {
            let before = state.mask();
            for priority in (0..8u8).filter(|priority| before >> priority & 1 == 1) {
                let at = usize::from(priority);
                let reason = if state.until(priority) <= now {
                    PauseEndReason::Expired
                } else if watchdog_at[at] <= now {
                    ignored_until[at] = now.saturating_add(RESTORATION_TIME);
                    PauseEndReason::WatchdogFired
                } else {
                    continue;
                };
                state.end(now, priority);
                emit(FabricEvent::PauseEnded { node: NODE, link: LINK, priority, reason });
            }
            if state.mask() != before {
                resumed.push(*peer);
            }
        }
        resumed
    }

    /// Whether no peer has paused a priority.
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// The priorities that a peer has paused, as a mask.
    pub fn mask(&self, peer: PeerPort) -> u8 {
        self.peers.get(&peer).map_or(0, |pause| pause.state.mask())
    }

    /// When the first pause ends.
    #[inline]
    pub fn next_timeout(&self) -> Option<u64> {
        if self.peers.is_empty() { None } else { self.first_end() }
    }

    fn first_end(&self) -> Option<u64> {
        let ends = self.peers.values().filter_map(|pause| {
            let watched = (0..8).filter(|priority| pause.state.mask() >> priority & 1 == 1);
            let watchdog = watched.map(|priority| pause.watchdog_at[priority]).min();
            Some(pause.state.next_end()?.min(watchdog?))
        });
        ends.min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(last: u8) -> PeerPort {
        PeerPort::from(std::net::IpAddr::from([127, 0, 0, last]))
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

    #[test]
    fn watchdog_ends_a_pause_that_is_refreshed_for_ever() {
        let mut pauses = PeerPauses::default();
        let mut reasons = Vec::new();
        let mut now = 0;
        while reasons.is_empty() {
            pauses.apply(peer(2), &pause(3, u16::MAX), now, |_| ());
            now = pauses.next_timeout().expect("a pause").min(now + 10_000_000);
            pauses.expire(now, |event| {
                if let FabricEvent::PauseEnded { reason, .. } = event {
                    reasons.push(reason);
                }
            });
            assert!(now <= WATCHDOG_TIME);
        }
        assert_eq!((reasons, now), (vec![PauseEndReason::WatchdogFired], WATCHDOG_TIME));
        // The peer continues, in vain; a peer that stops for a while is obeyed again.
        for _ in 0..100 {
            now += RESTORATION_TIME / 2;
            pauses.apply(peer(2), &pause(3, u16::MAX), now, |_| ());
            assert_eq!(pauses.mask(peer(2)), 0);
        }
        pauses.apply(peer(2), &pause(3, u16::MAX), now + RESTORATION_TIME, |_| ());
        assert_eq!(pauses.mask(peer(2)), 0b1000);
    }
}
