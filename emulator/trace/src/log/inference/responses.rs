//! The order of the responses to READs and atomics: which were asked for, and which were passed over.

use std::collections::{BTreeMap, VecDeque};

/// The most requests without a complete response that are followed.
const MAX_WINDOWS: usize = 1024;
/// The most skipped packets that are remembered.
const MAX_MISSING: usize = 8192;

const MIN_PATH_MTU: u32 = 256;

/// The packets of a response that were asked for and not captured yet, as positions.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: i64,
    next: i64,
    /// The bytes of a READ; none for an atomic.
    bytes: Option<u32>,
    /// Responses to an earlier transmission of the request may still come.
    is_repeated: bool,
}

impl Window {
    fn end(&self, path_mtu: Option<u32>) -> i64 {
        let packets = match (self.bytes, path_mtu) {
            (Some(bytes), Some(path_mtu)) => bytes.div_ceil(path_mtu).max(1),
            _ => 1,
        };
        self.first + i64::from(packets)
    }
}

/// The meaning of a captured response for its READ or atomic.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ResponseArrival {
    /// It is the next one, or comes after others that are missing.
    InOrder,
    /// It was passed over before, and not asked for again since.
    Late,
    /// It was captured before.
    Again,
}

/// Follows the responses to the requests of one flow.
#[derive(Debug, Default)]
pub(super) struct ResponseOrder {
    windows: VecDeque<Window>,
    /// Responses that later ones passed: the packet that passed.
    missing: BTreeMap<i64, usize>,
}

impl ResponseOrder {
    /// A request asks for the response from `position` on.
    pub fn ask(&mut self, position: i64, bytes: Option<u32>, path_mtu: Option<u32>, is_repeated: bool) {
        let window = Window { first: position, next: position, bytes, is_repeated };
        let end = window.end(path_mtu);
        if is_repeated {
            self.windows.retain(|old| old.first < position || old.end(path_mtu) > end);
            for old in self.windows.iter_mut().filter(|old| old.next > position) {
                (old.next, old.is_repeated) = (position.max(old.first), true);
            }
            self.missing.retain(|at, _| !(position..end).contains(at));
        }
        let at = self.windows.partition_point(|old| old.first <= position);
        self.windows.insert(at, window);
        if self.windows.len() > MAX_WINDOWS {
            self.windows.pop_front();
        }
    }

    /// Whether a READ that was asked for may have a response at `position`, which is no request then.
    pub fn may_hold(&self, position: i64, path_mtu: Option<u32>) -> bool {
        self.windows.iter().any(|window| {
            let path_mtu = path_mtu.or(Some(MIN_PATH_MTU));
            window.bytes.is_some() && (window.first + 1..window.end(path_mtu)).contains(&position)
        })
    }

    /// A response at `position` was captured in this packet. Responses are sent in order.
    pub fn respond(&mut self, position: i64, path_mtu: Option<u32>, packet: usize) -> ResponseArrival {
        if self.missing.remove(&position).is_some() {
            return ResponseArrival::Late;
        }
        let is_passed = |window: &Window| window.first <= position && position < window.next;
        if self.windows.iter().any(is_passed) {
            return ResponseArrival::Again;
        }
        let mut missing = Vec::new();
        let firsts: Vec<i64> = self.windows.iter().skip(1).map(|window| window.first).collect();
        for (at, window) in self.windows.iter_mut().enumerate() {
            if window.first > position {
                break;
            }
            let end = match path_mtu {
                // The response shows that it has this packet.
                None if window.bytes.is_some() && firsts.get(at).is_none_or(|next| position < *next) => {
                    position + 1
                }
                _ => window.end(path_mtu),
            };
            if !window.is_repeated {
                missing.push(window.next..position.min(end));
            }
            window.next = window.next.max(end.min(position + 1));
        }
        self.pass(missing.into_iter().flatten(), packet);
        self.windows.retain(|window| {
            window.is_repeated || window.next < window.end(path_mtu) || window.first + 64 > position
        });
        ResponseArrival::InOrder
    }

    /// An ACK of a request after `position`, in this packet: everything up to `position` was answered before.
    pub fn pass_over(&mut self, position: i64, path_mtu: Option<u32>, packet: usize) {
        let mut missing = Vec::new();
        for window in self.windows.iter_mut().filter(|window| !window.is_repeated) {
            let end = window.end(path_mtu);
            if end <= position {
                missing.push(window.next..end);
                window.next = end;
            }
        }
        self.pass(missing.into_iter().flatten(), packet);
    }

    fn pass(&mut self, missing: impl Iterator<Item = i64>, packet: usize) {
        let room = MAX_MISSING.saturating_sub(self.missing.len());
        self.missing.extend(missing.take(room).map(|at| (at, packet)));
    }

    /// The responses from `position` on that were passed over and not captured since.
    pub fn take_missing(&mut self, position: i64) -> BTreeMap<i64, usize> {
        self.missing.split_off(&position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTU: Option<u32> = Some(1024);

    #[test]
    fn responses_out_of_order_are_late_and_not_missing() {
        let mut order = ResponseOrder::default();
        order.ask(0, Some(4096), MTU, false);
        assert_eq!(order.respond(2, MTU, 10), ResponseArrival::InOrder);
        assert_eq!(order.respond(0, MTU, 11), ResponseArrival::Late);
        assert_eq!(order.respond(0, MTU, 12), ResponseArrival::Again);
        assert_eq!(order.respond(3, MTU, 13), ResponseArrival::InOrder);
        assert_eq!(order.take_missing(0), BTreeMap::from([(1, 10)]));
    }

    #[test]
    fn a_response_is_not_missing_before_the_path_mtu_is_known() {
        let mut order = ResponseOrder::default();
        order.ask(0, Some(2048), None, false);
        assert_eq!(order.respond(1, None, 10), ResponseArrival::InOrder);
        order.pass_over(2, MTU, 11);
        assert_eq!(order.take_missing(0), BTreeMap::from([(0, 10)]));
    }

    #[test]
    fn a_part_that_is_asked_for_again_is_not_missing_any_more() {
        let mut order = ResponseOrder::default();
        order.ask(0, Some(4096), MTU, false);
        order.ask(4, None, MTU, false);
        order.respond(0, MTU, 10);
        order.respond(4, MTU, 11);
        order.ask(1, Some(3072), MTU, true);
        assert_eq!(order.respond(1, MTU, 13), ResponseArrival::InOrder);
        assert!(order.take_missing(0).is_empty());
    }
}
