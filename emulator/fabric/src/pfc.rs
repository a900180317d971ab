//! Priority flow control (PFC, IEEE 802.1Qbb): the paused port, and the buffer that generates pauses.

use alloc::boxed::Box;
use core::num::NonZeroU64;
use softhca_wire::{MacAddress, Pfc};

/// Bit times in a quantum of pause time.
pub const QUANTUM_BITS: u64 = 512;

/// The rate that defines the quantum on a link without a rate.
const DEFAULT_RATE: u64 = 100_000_000_000;

/// The duration of quanta on a link of this rate in nanoseconds, rounded down. A link without a rate counts
/// at 100 Gb/s.
///
/// ```
/// use core::num::NonZeroU64;
/// use softhca_fabric::pause_ns;
/// assert_eq!(pause_ns(65_535, NonZeroU64::new(40_000_000_000)), 838_848);
/// ```
pub const fn pause_ns(quanta: u16, bits_per_second: Option<NonZeroU64>) -> u64 {
    let rate = match bits_per_second {
        Some(rate) => rate.get(),
        None => DEFAULT_RATE,
    };
    ((quanta as u128 * QUANTUM_BITS as u128 * 1_000_000_000) / rate as u128) as u64
}

/// PFC thresholds per ingress port and priority, in bytes of buffered frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PfcSettings {
    /// Bit mask of the lossless priorities.
    pub priorities: u8,
    /// The port pauses its sender at this fill level.
    pub xoff: u64,
    /// The port resumes its sender at this fill level.
    pub xon: u64,
    /// Bytes beyond `xoff` for frames in flight when the pause is sent.
    pub headroom: u64,
    /// The pause time in each pause frame. The port refreshes the pause after half that time.
    pub quanta: u16,
}

impl PfcSettings {
    /// The headroom for lossless operation of a link. It holds the frames in flight during one round trip, a frame that
    /// the sender has started, and a frame that delays the pause frame.
    pub fn headroom_for(bits_per_second: u64, delay_ns: u64, largest_frame: u64) -> u64 {
        const PAUSE_FRAME: u64 = 84;
        let flying = u128::from(bits_per_second) * u128::from(2 * delay_ns) / 8_000_000_000;
        flying as u64 + 2 * largest_frame + PAUSE_FRAME
    }
}

impl Default for PfcSettings {
    /// Priorities 0 to 5; XOFF at 256 KiB, above the marking threshold Kmax; headroom for 100 Gb/s over 2 µs.
    fn default() -> PfcSettings {
        PfcSettings {
            priorities: 0b0011_1111,
            xoff: 256 << 10,
            xon: 224 << 10,
            headroom: 64 << 10,
            quanta: u16::MAX,
        }
    }
}

/// The effect of a pause frame on a priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseChange {
    /// The priority is paused, or stays paused for longer.
    Stopped,
    /// The priority resumed.
    Resumed,
    /// The priority was not paused.
    Unchanged,
}

/// Paused priorities of a port.
#[derive(Clone, Debug, Default)]
pub struct PauseState {
    mask: u8,
    /// Boxed: most ports are never paused, and every frame reads the mask.
    history: Option<Box<PauseHistory>>,
}

/// Pause times and counters per priority.
#[derive(Clone, Debug, Default)]
struct PauseHistory {
    until: [u64; 8],
    since: [u64; 8],
    total_ns: [u64; 8],
    received: [u64; 8],
}

impl PauseState {
    /// Bit mask of the lossless priorities.
    #[inline]
    pub fn mask(&self) -> u8 {
        self.mask
    }

    /// Applies a pause frame; zero resumes the priority.
    pub fn apply(&mut self, now: u64, priority: u8, for_ns: u64) -> PauseChange {
        let (at, bit) = (usize::from(priority), 1 << priority);
        let past = self.history.get_or_insert_default();
        past.received[at] += 1;
        let was = self.mask & bit != 0;
        if for_ns == 0 {
            self.end(now, priority);
            return if was { PauseChange::Resumed } else { PauseChange::Unchanged };
        }
        if !was {
            self.mask |= bit;
            past.since[at] = now;
        }
        past.until[at] = now.saturating_add(for_ns);
        PauseChange::Stopped
    }

    /// When the pause of a priority expires.
    pub fn until(&self, priority: u8) -> u64 {
        self.history.as_ref().map_or(0, |past| past.until[usize::from(priority)])
    }

    /// When the next pause expires, if any.
    pub fn next_end(&self) -> Option<u64> {
        (0..8).filter(|priority| self.mask >> priority & 1 == 1).map(|priority| self.until(priority)).min()
    }

    /// Total paused time per priority.
    pub fn total_ns(&self) -> [u64; 8] {
        self.history.as_ref().map_or([0; 8], |past| past.total_ns)
    }

    /// Pause frames received per priority.
    pub fn received(&self) -> [u64; 8] {
        self.history.as_ref().map_or([0; 8], |past| past.received)
    }

    /// Ends the pause of a priority.
    pub fn end(&mut self, now: u64, priority: u8) {
        if self.mask & 1 << priority != 0 {
            self.mask &= !(1 << priority);
            let past = self.history.get_or_insert_default();
            past.total_ns[usize::from(priority)] += now - past.since[usize::from(priority)];
        }
    }

    /// Ends expired pauses and returns their priorities.
    pub fn expire(&mut self, now: u64) -> u8 {
        let over = (0..8).filter(|priority| self.mask >> priority & 1 == 1 && self.until(*priority) <= now);
        let over = over.fold(0, |mask, priority| mask | 1 << priority);
        (0..8).filter(|priority| over >> priority & 1 == 1).for_each(|priority| self.end(now, priority));
        over
    }
}

/// The pauses that an ingress port has requested. The owner of the buffer tracks its fill level.
#[derive(Clone, Debug, Default)]
pub(crate) struct PauseGenerator {
    stopped: u8,
    /// Boxed: most ports never send pauses.
    requests: Option<Box<PauseRequests>>,
}

/// Pause requests per priority.
#[derive(Clone, Debug, Default)]
struct PauseRequests {
    refresh_at: [u64; 8],
    stopped_at: [u64; 8],
    sent: [u64; 8],
}

impl PauseGenerator {
    pub fn is_stopped(&self, priority: u8) -> bool {
        self.stopped >> priority & 1 == 1
    }

    /// A frame entered the buffer, which now holds `held` bytes of its priority. Returns true if the port
    /// must pause its sender.
    pub fn on_enqueue(&mut self, flow: Option<&PfcSettings>, now: u64, priority: u8, held: u64) -> bool {
        let stops = flow.is_some_and(|flow| flow.priorities >> priority & 1 == 1 && held >= flow.xoff);
        if !stops || self.is_stopped(priority) {
            return false;
        }
        self.stop(now, priority);
        true
    }

    pub fn stop(&mut self, now: u64, priority: u8) {
        self.stopped |= 1 << priority;
        self.requests.get_or_insert_default().stopped_at[usize::from(priority)] = now;
    }

    /// A frame left the buffer, which still holds `held` bytes of its priority. Returns true if the port must
    /// resume its sender.
    pub fn on_dequeue(&mut self, flow: Option<&PfcSettings>, priority: u8, held: u64) -> bool {
        let resumes = flow.is_none_or(|flow| held <= flow.xon);
        if !resumes || self.stopped >> priority & 1 == 0 {
            return false;
        }
        self.stopped &= !(1 << priority);
        true
    }

    pub fn resume(&mut self, priority: u8) {
        self.stopped &= !(1 << priority);
    }

    /// When the current pause of a priority began.
    pub fn stopped_at(&self, priority: u8) -> u64 {
        self.requests.as_ref().map_or(0, |asked| asked.stopped_at[usize::from(priority)])
    }

    /// When to refresh the pause of a priority.
    pub fn refresh_at(&self, priority: u8) -> u64 {
        self.requests.as_ref().map_or(0, |asked| asked.refresh_at[usize::from(priority)])
    }

    /// Schedules the refresh of a pause.
    pub fn schedule_refresh(&mut self, priority: u8, at: u64) {
        self.requests.get_or_insert_default().refresh_at[usize::from(priority)] = at;
    }

    /// Counts a sent pause frame.
    pub fn count_sent(&mut self, priority: u8) {
        self.requests.get_or_insert_default().sent[usize::from(priority)] += 1;
    }

    /// Pause frames sent per priority, including resumes.
    pub fn sent(&self) -> [u64; 8] {
        self.requests.as_ref().map_or([0; 8], |asked| asked.sent)
    }
}

pub(crate) fn pause_frame(source: MacAddress, priority: u8, quanta: u16) -> Pfc {
    let mut pause = [None; 8];
    pause[usize::from(priority)] = Some(quanta);
    Pfc { source, pause }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quanta_are_512_bit_times() {
        assert_eq!(pause_ns(1, NonZeroU64::new(1_000_000_000)), 512);
        assert_eq!(pause_ns(65_535, NonZeroU64::new(100_000_000_000)), 335_539);
        assert_eq!(pause_ns(0, None), 0);
    }

    #[test]
    fn pause_ends_by_expiry_or_resume() {
        let mut pauses = PauseState::default();
        assert_eq!(pauses.apply(10, 3, 100), PauseChange::Stopped);
        assert_eq!(pauses.apply(20, 3, 100), PauseChange::Stopped);
        assert_eq!((pauses.mask(), pauses.until(3)), (0b1000, 120));
        assert_eq!(pauses.next_end(), Some(120));
        assert_eq!(pauses.expire(119), 0);
        assert_eq!(pauses.expire(120), 0b1000);
        assert_eq!(pauses.apply(130, 3, 0), PauseChange::Unchanged);
        pauses.apply(200, 3, 50);
        assert_eq!(pauses.apply(210, 3, 0), PauseChange::Resumed);
        assert_eq!((pauses.total_ns()[3], pauses.received()[3]), (110 + 10, 5));
    }

    #[test]
    fn sender_is_paused_once_and_resumed_once() {
        let flow = PfcSettings { xoff: 100, xon: 50, ..PfcSettings::default() };
        let mut ingress = PauseGenerator::default();
        let reported = [40, 80, 120, 160].map(|held| ingress.on_enqueue(Some(&flow), 0, 3, held));
        assert_eq!(reported, [false, false, true, false]);
        let reported = [120, 80, 40, 0].map(|held| ingress.on_dequeue(Some(&flow), 3, held));
        assert_eq!(reported, [false, false, true, false]);
        assert!(!ingress.on_enqueue(Some(&flow), 0, 7, 1_000), "priority 7 may lose frames");
    }
}
