//! The PSNs of the requests of one flow in a capture: which are new, which were sent before, which are missing.

use softhca_wire::{Mtu, Opcode, Operation, Position, Psn};

/// More missing ranges than these are forgotten, oldest first.
const MAX_GAPS: usize = 1024;

/// A request as its headers describe it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestHeaders {
    pub opcode: Opcode,
    pub psn: Psn,
    pub payload: u32,
    /// The length in the RETH.
    pub dma_length: Option<u32>,
}

/// How a request relates to those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// It is the next one.
    Next,
    /// PSNs before it were not seen.
    AfterGap { first: Psn, count: u32 },
    /// It was not seen before, but later ones were.
    Fills,
    /// It was seen before.
    Again,
}

impl Arrival {
    /// Whether a later PSN was seen before it.
    pub const fn is_behind(self) -> bool {
        matches!(self, Arrival::Fills | Arrival::Again)
    }
}

/// The PSNs that were seen.
#[derive(Debug, Default)]
pub(crate) struct RequestSequence {
    first: Option<Psn>,
    /// The PSN after the highest.
    next: Option<Psn>,
    /// How many PSNs there are from the first to `next`.
    length: i64,
    /// Payload of the packets before the last of a message.
    path_mtu: Option<u32>,
    /// The last request, if it is a READ whose number of PSNs is not known.
    unsized_read: Option<(Psn, u32)>,
    /// PSNs that were not seen: the first and their number.
    gaps: Vec<(Psn, u32)>,
}

impl RequestSequence {
    pub fn first(&self) -> Option<Psn> {
        self.first
    }

    pub fn next(&self) -> Option<Psn> {
        self.next
    }

    pub fn path_mtu(&self) -> Option<u32> {
        self.path_mtu
    }

    /// The distance of a PSN from the first one, counted through wraps; none before the first request.
    pub fn position(&self, psn: Psn) -> Option<i64> {
        Some(self.length + i64::from(psn.distance(self.next?)))
    }

    /// The PSN at a distance from the first one.
    pub fn psn_at(&self, position: i64) -> Option<Psn> {
        let next = self.next?;
        let behind = self.length - position;
        Some(if behind >= 0 { next.minus(behind as u32) } else { next.plus(-behind as u32) })
    }

    /// Whether a PSN up to the highest was seen.
    pub fn has_seen(&self, psn: Psn) -> bool {
        self.position(psn).is_some_and(|position| (0..self.length).contains(&position))
            && !self.gaps.iter().any(|(first, count)| psn.is_within(*first, *count))
    }

    /// The payload of a packet that does not end its message is the path MTU.
    pub fn learn_path_mtu(&mut self, payload: u32) {
        if self.path_mtu.is_none() && Mtu::from_bytes(payload).is_some() {
            self.path_mtu = Some(payload);
            if let Some((psn, length)) = self.unsized_read.take() {
                self.extend_to(psn.plus(psns_of_read(length, payload)));
            }
        }
    }

    fn extend_to(&mut self, next: Psn) {
        let Some(old) = self.next else { return };
        if old.is_before(next) {
            self.length += i64::from(next.distance(old));
            self.next = Some(next);
        }
    }

    /// PSNs up to `next` are known to exist although no packet showed them.
    pub fn skip_to(&mut self, next: Psn) {
        self.unsized_read = None;
        if let Some(old) = self.next.filter(|old| old.is_before(next)) {
            self.add_gap(old, next.since(old));
            self.extend_to(next);
        }
    }

    /// A response shows that the last request, a READ, has PSNs up to this one at least. Returns whether it is a READ
    /// whose number of PSNs is not known.
    pub fn extend_read(&mut self, psn: Psn) -> bool {
        let is_unsized = self.unsized_read.is_some();
        if is_unsized {
            self.extend_to(psn.plus(1));
        }
        is_unsized
    }

    /// The response to the last request, a READ whose number of PSNs is not known, ends with this PSN.
    pub fn end_read(&mut self, psn: Psn) {
        if self.unsized_read.take_if(|(read, _)| !psn.is_before(*read)).is_some() {
            self.extend_to(psn.plus(1));
        }
    }

    fn add_gap(&mut self, first: Psn, count: u32) {
        if self.gaps.len() == MAX_GAPS {
            self.gaps.remove(0);
        }
        self.gaps.push((first, count));
    }

    /// Takes a request whose PSN only shows whether it was sent before.
    pub fn record_unsequenced(&mut self, psn: Psn) -> Arrival {
        self.first.get_or_insert(psn);
        if self.next.is_some_and(|next| psn.is_before(next)) {
            return Arrival::Again;
        }
        self.next = Some(psn.plus(1));
        Arrival::Next
    }

    /// Takes the next request of the capture.
    pub fn record(&mut self, request: &RequestHeaders) -> Arrival {
        let RequestHeaders { opcode, psn, payload, dma_length } = *request;
        if matches!(opcode.position(), Position::First | Position::Middle) {
            self.learn_path_mtu(payload);
        }
        let read_length = dma_length.filter(|_| opcode.operation() == Operation::ReadRequest);
        let count_of = |path_mtu: Option<u32>| match (read_length, path_mtu) {
            (Some(length), Some(path_mtu)) => psns_of_read(length, path_mtu),
            _ => 1,
        };
        let Some(mut next) = self.next else {
            let count = count_of(self.path_mtu);
            (self.first, self.next, self.length) = (Some(psn), Some(psn.plus(count)), i64::from(count));
            self.unsized_read = read_length.filter(|_| self.path_mtu.is_none()).map(|length| (psn, length));
            return Arrival::Next;
        };
        if let Some((read, length)) = self.unsized_read
            && next.is_before(psn)
            && opcode.position().starts_message()
        {
            // The PSN after a READ shows how many packets its response has.
            let distance = psn.distance(read) as u32;
            let fits = |mtu: &u32| psns_of_read(length, *mtu) == distance;
            if let Some(path_mtu) = [256, 512, 1024, 2048, 4096].into_iter().find(fits) {
                self.learn_path_mtu(path_mtu);
                next = self.next.unwrap_or(next);
            }
        }
        if psn.is_before(next) {
            let count = count_of(self.path_mtu);
            return if self.fill(psn, count) { Arrival::Fills } else { Arrival::Again };
        }
        let arrival = match psn.distance(next) as u32 {
            0 => Arrival::Next,
            missing => {
                self.add_gap(next, missing);
                Arrival::AfterGap { first: next, count: missing }
            }
        };
        self.extend_to(psn.plus(count_of(self.path_mtu)));
        self.unsized_read = read_length.filter(|_| self.path_mtu.is_none()).map(|length| (psn, length));
        arrival
    }

    /// Removes PSNs from the missing ones; returns whether the first was one of them.
    fn fill(&mut self, psn: Psn, count: u32) -> bool {
        if !self.gaps.iter().any(|(first, missing)| psn.is_within(*first, *missing)) {
            return false;
        }
        let gaps = std::mem::take(&mut self.gaps);
        for (first, missing) in gaps {
            // Where the PSNs begin and end in this gap.
            let start = psn.distance(first).clamp(0, missing as i32) as u32;
            let end = psn.plus(count).distance(first).clamp(0, missing as i32) as u32;
            let parts = match start < end {
                true => [(first, start), (first.plus(end), missing - end)],
                false => [(first, missing), (first, 0)],
            };
            self.gaps.extend(parts.into_iter().filter(|(_, count)| *count > 0));
        }
        true
    }
}

/// The PSNs that a READ takes: one for each packet of its response, and at least one.
fn psns_of_read(length: u32, path_mtu: u32) -> u32 {
    length.div_ceil(path_mtu).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: Opcode, psn: u32, payload: u32, dma_length: Option<u32>) -> RequestHeaders {
        RequestHeaders { opcode, psn: Psn::new(psn), payload, dma_length }
    }

    fn middle(sequence: &mut RequestSequence, psn: u32) -> Arrival {
        let opcode = Opcode::all()
            .find(|opcode| opcode.operation() == Operation::Write && opcode.position() == Position::Middle)
            .expect("WRITE_MIDDLE");
        sequence.record(&request(opcode, psn, 1024, None))
    }

    fn read(sequence: &mut RequestSequence, psn: u32, length: u32) -> Arrival {
        let opcode =
            Opcode::all().find(|opcode| opcode.operation() == Operation::ReadRequest).expect("READ_REQUEST");
        sequence.record(&request(opcode, psn, 0, Some(length)))
    }

    #[test]
    fn gaps_are_found_and_filled_across_the_wrap() {
        let mut sequence = RequestSequence::default();
        let psns = [0xff_fffe, 0xff_ffff, 3, 1, 1, 0, 4];
        let arrivals = psns.map(|psn| middle(&mut sequence, psn));
        let gap = Arrival::AfterGap { first: Psn::new(0), count: 3 };
        let expected = [
            Arrival::Next,
            Arrival::Next,
            gap,
            Arrival::Fills,
            Arrival::Again,
            Arrival::Fills,
            Arrival::Next,
        ];
        assert_eq!(arrivals, expected);
        assert!(!sequence.has_seen(Psn::new(2)) && sequence.has_seen(Psn::new(3)));
        assert_eq!(sequence.position(Psn::new(2)), Some(4));
        assert_eq!(sequence.psn_at(4), Some(Psn::new(2)));
    }

    #[test]
    fn a_read_takes_a_psn_for_each_packet_of_its_response() {
        let mut sequence = RequestSequence::default();
        // Four packets of 1024 bytes: the next request shows the path MTU.
        assert_eq!(read(&mut sequence, 10, 4000), Arrival::Next);
        assert_eq!(read(&mut sequence, 14, 4000), Arrival::Next);
        assert_eq!(sequence.path_mtu(), Some(1024));
        assert_eq!(middle(&mut sequence, 18), Arrival::Next);
        // A READ that resumes in the middle was requested before.
        assert_eq!(read(&mut sequence, 16, 1952), Arrival::Again);
        // No path MTU explains this distance.
        let mut sequence = RequestSequence::default();
        read(&mut sequence, 10, 4000);
        let gap = Arrival::AfterGap { first: Psn::new(11), count: 2 };
        assert_eq!(read(&mut sequence, 13, 4000), gap);
    }

    /// A request after a READ of one packet is not taken for the next one.
    #[test]
    fn the_end_of_a_response_shows_the_next_psn() {
        let mut sequence = RequestSequence::default();
        read(&mut sequence, 10, 500);
        sequence.end_read(Psn::new(10));
        assert_eq!(middle(&mut sequence, 12), Arrival::AfterGap { first: Psn::new(11), count: 1 });
    }

    #[test]
    fn a_response_shows_the_path_mtu() {
        let mut sequence = RequestSequence::default();
        read(&mut sequence, 10, 4000);
        sequence.learn_path_mtu(2048);
        assert_eq!(read(&mut sequence, 12, 4000), Arrival::Next);
    }
}
