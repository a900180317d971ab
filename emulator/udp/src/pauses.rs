//! The priorities that the port may not send now, because peers paused them.

use softhca_fabric::pause_ns;
use softhca_wire::link::Pause;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU64;

/// Who paused which priority, and until when.
#[derive(Debug)]
pub(crate) struct Pauses {
    until: BTreeMap<(IpAddr, u8), u64>,
    /// The rate at which quanta count.
    rate: Option<NonZeroU64>,
}

impl Pauses {
    pub fn new(rate: Option<NonZeroU64>) -> Pauses {
        Pauses { until: BTreeMap::new(), rate }
    }

    /// A pause of a peer: quanta of zero let a priority go on.
    pub fn apply(&mut self, peer: IpAddr, pause: &Pause, now: u64) {
        for (priority, quanta) in (0..8u8).zip(pause.quanta) {
            if pause.classes >> priority & 1 == 0 {
                continue;
            }
            match quanta {
                0 => self.until.remove(&(peer, priority)),
                _ => self.until.insert((peer, priority), now + pause_ns(quanta, self.rate)),
            };
        }
    }

    /// A peer is gone, and its pauses with it.
    pub fn forget(&mut self, peer: IpAddr) {
        self.until.retain(|(by, _), _| *by != peer);
    }

    /// Lets go what has waited long enough.
    pub fn expire(&mut self, now: u64) {
        self.until.retain(|_, until| *until > now);
    }

    /// The priorities that are stopped.
    pub fn mask(&self) -> u8 {
        self.until.keys().fold(0, |mask, (_, priority)| mask | 1 << priority)
    }

    /// When the first pause is over.
    pub fn next_timeout(&self) -> Option<u64> {
        self.until.values().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn a_priority_goes_on_when_nobody_pauses_it_any_more() {
        let peer = |last| IpAddr::V4(Ipv4Addr::new(127, 0, 0, last));
        let pause = |priority: usize, quanta| {
            let mut pause = Pause { classes: 1 << priority, quanta: [9; 8] };
            pause.quanta[priority] = quanta;
            pause
        };
        let mut pauses = Pauses::new(NonZeroU64::new(1_000_000_000));
        pauses.apply(peer(2), &pause(3, 10), 0);
        pauses.apply(peer(3), &pause(3, 20), 0);
        pauses.apply(peer(3), &pause(5, 1), 0);
        assert_eq!((pauses.mask(), pauses.next_timeout()), (0b10_1000, Some(512)));
        pauses.expire(5_120);
        assert_eq!(pauses.mask(), 0b1000);
        pauses.apply(peer(3), &pause(3, 0), 6_000);
        assert_eq!((pauses.mask(), pauses.next_timeout()), (0, None));
        pauses.apply(peer(3), &pause(0, 10), 6_000);
        pauses.forget(peer(3));
        assert_eq!(pauses.mask(), 0);
    }
}
