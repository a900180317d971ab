//! The order in which data becomes visible in the memory of a simulated host whose placement is not in order.
//!
//! Data that a card has received is hidden until something reads it: the read chooses, line by line, whether it sees the
//! data. So only choices are made that a program can notice. A read that would see equal bytes makes none.

use crate::executor::Executor;
use crate::memory::MemoryBlock;
use parking_lot::Mutex;
use softhca_engine::{AtomicOperation, Instant, MemoryFault, Placement, PlacementOrder};
use softhca_engine::{WriteOrigin, WriterRole};
use softhca_queue::ExternalMemory;
use softhca_types::Seed;
use softhca_wire::{Psn, Qpn};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The bytes that become visible together.
const LINE: u64 = 64;
/// Hidden data becomes visible after this time. Without a limit, a program that polls would wait for ever.
const HIDDEN_FOR: Duration = Duration::from_micros(20);
/// Hidden pieces of lines on a host. Further ones make the oldest visible.
const MAX_HIDDEN: usize = 1024;
/// Values that a host keeps for READs in progress.
const MAX_OVERWRITTEN: usize = 4096;
/// Values of a line among which a READ chooses.
const MAX_VALUES: usize = 8;
/// Choices of a run that an exploration varies.
const MAX_CHOICES: usize = 10_000;
/// Unusual choices of a run that a failure lists.
const MAX_DESCRIBED: usize = 32;

/// The choices of a run that differ from those of a device in order: their number and what they choose. It prints as
/// `12:1,40:2`, and `none` if there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Interleaving(pub BTreeMap<u32, u8>);

impl fmt::Display for Interleaving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        let choices: Vec<String> = self.0.iter().map(|(number, value)| format!("{number}:{value}")).collect();
        f.write_str(&choices.join(","))
    }
}

impl std::str::FromStr for Interleaving {
    type Err = String;

    fn from_str(text: &str) -> Result<Interleaving, String> {
        if text == "none" {
            return Ok(Interleaving::default());
        }
        let choice = |part: &str| {
            let (number, value) = part.split_once(':')?;
            Some((number.parse().ok()?, value.parse().ok()?))
        };
        let parsed: Option<_> = text.split(',').map(choice).collect();
        parsed
            .map(Interleaving)
            .ok_or_else(|| format!("{text:?} is not an interleaving such as 12:1,40:2 or none"))
    }
}

/// The source of the choices of a run: the seed, or an interleaving.
pub(crate) struct Choices {
    seed: Seed,
    interleaving: Option<Interleaving>,
    made: u32,
    /// How many alternatives each choice had, in a run with an interleaving.
    pub alternatives: Vec<u8>,
    /// More choices were made than an exploration varies.
    pub overflowed: bool,
    /// What readers saw that a device in order would not have shown.
    pub described: Vec<String>,
}

impl Choices {
    pub fn by_seed(seed: u64) -> Choices {
        Choices {
            seed: Seed(seed),
            interleaving: None,
            made: 0,
            alternatives: Vec::new(),
            overflowed: false,
            described: Vec::new(),
        }
    }

    pub fn follow(&mut self, interleaving: Interleaving) {
        self.interleaving = Some(interleaving);
    }

    /// Chooses one of several alternatives; 0 is what a device in order does.
    fn choose(
        &mut self,
        alternatives: u8,
        by_seed: impl FnOnce(Seed) -> u8,
        describe: impl FnOnce(u8) -> String,
    ) -> u8 {
        let number = self.made;
        self.made += 1;
        let choice = match &self.interleaving {
            Some(interleaving) => {
                match self.alternatives.len() < MAX_CHOICES {
                    true => self.alternatives.push(alternatives),
                    false => self.overflowed = true,
                }
                interleaving.0.get(&number).copied().unwrap_or(0).min(alternatives - 1)
            }
            None => by_seed(self.seed),
        };
        if choice > 0 && self.described.len() < MAX_DESCRIBED {
            self.described.push(describe(choice));
        }
        choice
    }
}

/// Data that a card has received, within one line, and that is not visible yet.
struct Hidden {
    serial: u64,
    block: u64,
    offset: u64,
    line: [u8; LINE as usize],
    length: usize,
    qp: Qpn,
    role: WriterRole,
    first_psn: Psn,
    is_atomic: bool,
    deadline: Instant,
    /// How often a reader has not seen it.
    missed: u64,
}

impl Hidden {
    fn bytes(&self) -> &[u8] {
        &self.line[..self.length]
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.length as u64
    }

    /// Whether this data becomes visible before `later`, in a device with this placement.
    fn precedes(&self, later: &Hidden, placement: Placement) -> bool {
        let is_same_pair = (self.qp, self.role) == (later.qp, later.role);
        let overlaps = self.block == later.block && overlap(&self.range(), &later.range()).is_some();
        let is_earlier_message = placement == Placement::OutOfOrder && self.first_psn != later.first_psn;
        self.serial < later.serial && is_same_pair && (overlaps || is_earlier_message)
    }
}

/// The bytes that a change of visible memory replaced.
struct Overwritten {
    change: u64,
    block: u64,
    offset: u64,
    bytes: Vec<u8>,
}

/// The kinds of readers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    Program,
    Read,
    Atomic,
}

impl Reader {
    const fn name(self) -> &'static str {
        match self {
            Reader::Program => "a local read",
            Reader::Read => "a READ",
            Reader::Atomic => "an atomic",
        }
    }
}

fn overlap(first: &Range<u64>, second: &Range<u64>) -> Option<Range<u64>> {
    let common = first.start.max(second.start)..first.end.min(second.end);
    (common.start < common.end).then_some(common)
}

/// The lines of a range, and the part of each that the range has.
fn lines(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = ((at / LINE + 1) * LINE).min(range.end);
        let line = at..end;
        at = end;
        (!line.is_empty()).then_some(line)
    })
}

struct State {
    placement: Placement,
    host: u32,
    host_name: String,
    now: Instant,
    blocks: BTreeMap<u64, Arc<MemoryBlock>>,
    next_block: u64,
    /// In the order of arrival.
    hidden: VecDeque<Hidden>,
    next_serial: u64,
    /// Changes of visible memory since the first READ.
    changes: u64,
    has_reads: bool,
    overwritten: VecDeque<Overwritten>,
}

impl State {
    fn visible(&self, block: u64, range: &Range<u64>) -> Result<Vec<u8>, MemoryFault> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.blocks.get(&block).ok_or(MemoryFault)?.read(range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Changes visible memory, and keeps the replaced bytes for READs in progress.
    fn change(&mut self, block: u64, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        let has_reads = self.has_reads;
        for line in lines(offset..offset + from.len() as u64).take_while(|_| has_reads) {
            let bytes = self.visible(block, &line)?;
            self.changes += 1;
            self.overwritten.push_back(Overwritten {
                change: self.changes,
                block,
                offset: line.start,
                bytes,
            });
            if self.overwritten.len() > MAX_OVERWRITTEN {
                self.overwritten.pop_front();
            }
        }
        self.blocks.get(&block).ok_or(MemoryFault)?.write(offset, from)
    }

    fn hide(&mut self, block: u64, offset: u64, from: &[u8], origin: &WriteOrigin, is_atomic: bool) {
        self.now = self.now.max(Instant::from_nanos(origin.now_ns));
        for line in lines(offset..offset + from.len() as u64) {
            let bytes = &from[(line.start - offset) as usize..(line.end - offset) as usize];
            let mut stored = [0; LINE as usize];
            stored[..bytes.len()].copy_from_slice(bytes);
            let WriteOrigin { qp, role, first_psn, .. } = *origin;
            let (serial, deadline) = (self.next_serial, self.now.plus(HIDDEN_FOR));
            self.next_serial += 1;
            let offset = line.start;
            self.hidden.push_back(Hidden {
                serial,
                block,
                offset,
                line: stored,
                length: bytes.len(),
                qp,
                role,
                first_psn,
                is_atomic,
                deadline,
                missed: 0,
            });
        }
        let excess = self.hidden.len().saturating_sub(MAX_HIDDEN);
        self.show_oldest(excess);
    }

    /// Makes the oldest pieces visible.
    fn show_oldest(&mut self, count: usize) {
        for _ in 0..count {
            let Some(hidden) = self.hidden.pop_front() else { return };
            // A block that is gone has no readers.
            let _ = self.change(hidden.block, hidden.offset, hidden.bytes());
        }
    }

    /// Makes data visible, in the order of arrival. `is_chosen` chooses with a piece all that precede it.
    fn show(&mut self, is_chosen: impl Fn(&Hidden) -> bool) {
        let Some(first) = self.hidden.iter().position(&is_chosen) else { return };
        let later = self.hidden.split_off(first);
        for hidden in later {
            if is_chosen(&hidden) {
                let _ = self.change(hidden.block, hidden.offset, hidden.bytes());
            } else {
                self.hidden.push_back(hidden);
            }
        }
    }

    /// Makes a piece visible, and what precedes it.
    fn show_piece(&mut self, index: usize) {
        let mut chosen = BTreeSet::from([self.hidden[index].serial]);
        for later in (1..=index).rev() {
            let later = &self.hidden[later];
            if chosen.contains(&later.serial) {
                let earlier = self.hidden.iter().filter(|hidden| hidden.precedes(later, self.placement));
                chosen.extend(earlier.map(|hidden| hidden.serial));
            }
        }
        self.show(|hidden| chosen.contains(&hidden.serial));
    }

    /// Chooses which of the hidden data of a range a reader sees. What one has seen, all see from then on.
    fn observe(
        &mut self,
        choices: &Mutex<Choices>,
        block: u64,
        range: &Range<u64>,
        reader: Reader,
    ) -> Result<(), MemoryFault> {
        let now = Executor::current().map_or(self.now, |executor| executor.now().max(self.now));
        let mut index = 0;
        while let Some(hidden) = self.hidden.get(index) {
            index += 1;
            // An atomic sees the results of all atomics of its card.
            if hidden.block != block || (reader == Reader::Atomic && hidden.is_atomic) {
                continue;
            }
            let Some(common) = overlap(&hidden.range(), range) else { continue };
            let from = (common.start - hidden.offset) as usize;
            let new = &hidden.bytes()[from..from + (common.end - common.start) as usize];
            if self.visible(block, &common)? == new {
                continue;
            }
            let sees = match (self.placement, reader) {
                (Placement::OutOfOrder, Reader::Read | Reader::Atomic) => true,
                _ => {
                    let by_seed = |seed: Seed| {
                        let words =
                            [0x706c_6163, self.host.into(), hidden.qp.value().into(), block, hidden.serial];
                        // Some data is always late, some never, some at times.
                        let late = [0, 4, 7, 8][seed.below(4, &words) as usize];
                        let again = [words.as_slice(), &[hidden.missed]].concat();
                        u8::from(seed.below(8, &again) < late)
                    };
                    let describe = |_| {
                        format!(
                            "{} µs: on {}, {} of region {block} +{:#x}, {} B, does not see {} B at +{:#x} of queue \
                             pair {:#x}, {}",
                            now.nanos() as f64 / 1000.0,
                            self.host_name,
                            reader.name(),
                            range.start,
                            range.end - range.start,
                            hidden.length,
                            hidden.offset,
                            hidden.qp.value(),
                            if hidden.is_atomic { "an atomic" } else { "a message" },
                        )
                    };
                    choices.lock().choose(2, by_seed, describe) == 0
                }
            };
            match sees {
                true => {
                    // It disappears, with others before it.
                    let before = self.hidden.len();
                    self.show_piece(index - 1);
                    index -= before - self.hidden.len();
                }
                false => self.hidden[index - 1].missed += 1,
            }
        }
        Ok(())
    }

    /// The values that the bytes of a line had since a change, the present one first.
    fn values(&self, block: u64, line: &Range<u64>, since: u64) -> Result<Vec<Vec<u8>>, MemoryFault> {
        let mut value = self.visible(block, line)?;
        let mut values = vec![value.clone()];
        for old in self.overwritten.iter().rev().take_while(|old| old.change > since) {
            let range = old.offset..old.offset + old.bytes.len() as u64;
            let common = overlap(&range, line).filter(|_| old.block == block);
            let Some(common) = common else { continue };
            let (to, from) = ((common.start - line.start) as usize, (common.start - old.offset) as usize);
            let length = (common.end - common.start) as usize;
            value[to..to + length].copy_from_slice(&old.bytes[from..from + length]);
            if !values.contains(&value) {
                values.push(value.clone());
            }
            if values.len() == MAX_VALUES {
                break;
            }
        }
        Ok(values)
    }
}

/// The hidden data of a host.
pub(crate) struct HostPlacement {
    state: Mutex<State>,
    choices: Arc<Mutex<Choices>>,
}

impl HostPlacement {
    pub fn new(
        placement: Placement,
        host: u32,
        host_name: &str,
        choices: Arc<Mutex<Choices>>,
    ) -> Arc<HostPlacement> {
        let state = Mutex::new(State {
            placement,
            host,
            host_name: host_name.into(),
            now: Instant::ZERO,
            blocks: BTreeMap::new(),
            next_block: 0,
            hidden: VecDeque::new(),
            next_serial: 0,
            changes: 0,
            has_reads: false,
            overwritten: VecDeque::new(),
        });
        Arc::new(HostPlacement { state, choices })
    }

    /// Memory of this host that stores its bytes in `block`.
    pub fn wrap(self: &Arc<Self>, block: Arc<MemoryBlock>) -> Arc<MemoryBlock> {
        let mut state = self.state.lock();
        let number = state.next_block;
        state.next_block += 1;
        let length = block.len();
        state.blocks.insert(number, block);
        let memory = PlacedMemory { number, length: length as u64, host: self.clone() };
        Arc::new(MemoryBlock::external(length, Box::new(memory)))
    }
}

impl PlacementOrder for HostPlacement {
    fn order(&self, qp: Qpn, role: WriterRole) {
        self.state.lock().show(|hidden| (hidden.qp, hidden.role) == (qp, role));
    }

    fn start_read(&self, now: Instant) -> u64 {
        let mut state = self.state.lock();
        state.now = state.now.max(now);
        state.has_reads = true;
        state.changes
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.state.lock().hidden.front().map(|hidden| hidden.deadline)
    }

    fn expire(&self, now: Instant) {
        let mut state = self.state.lock();
        state.now = state.now.max(now);
        let due = state.hidden.iter().take_while(|hidden| hidden.deadline <= now).count();
        state.show_oldest(due);
    }
}

/// Memory in which data becomes visible when a [`HostPlacement`] says so.
struct PlacedMemory {
    number: u64,
    length: u64,
    host: Arc<HostPlacement>,
}

impl PlacedMemory {
    fn range(&self, offset: u64, length: usize) -> Result<Range<u64>, MemoryFault> {
        let end = offset.checked_add(length as u64).filter(|end| *end <= self.length);
        end.map(|end| offset..end).ok_or(MemoryFault)
    }

    fn word(&self, offset: u64) -> Result<Range<u64>, MemoryFault> {
        if offset.is_multiple_of(8) { self.range(offset, 8) } else { Err(MemoryFault) }
    }
}

impl ExternalMemory for PlacedMemory {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        let range = self.range(offset, into.len())?;
        let mut state = self.host.state.lock();
        state.observe(&self.host.choices, self.number, &range, Reader::Program)?;
        state.blocks.get(&self.number).ok_or(MemoryFault)?.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.range(offset, from.len())?;
        self.host.state.lock().change(self.number, offset, from)
    }

    fn atomic(&self, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        let range = self.word(offset)?;
        let mut state = self.host.state.lock();
        let old = as_word(&state.visible(self.number, &range)?);
        state.change(self.number, offset, &apply(operation, old).to_ne_bytes())?;
        Ok(old)
    }

    fn load(&self, offset: u64) -> Result<u64, MemoryFault> {
        self.word(offset)?;
        let mut bytes = [0; 8];
        self.read(offset, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn place(&self, offset: u64, from: &[u8], origin: &WriteOrigin) -> Result<(), MemoryFault> {
        self.range(offset, from.len())?;
        self.host.state.lock().hide(self.number, offset, from, origin, false);
        Ok(())
    }

    /// Atomics exclude each other on a card. The program, and WRITEs, may come between the load and the store of one:
    /// its result is then hidden, and replaces what they store.
    fn place_atomic(
        &self,
        offset: u64,
        operation: AtomicOperation,
        origin: &WriteOrigin,
    ) -> Result<u64, MemoryFault> {
        let range = self.word(offset)?;
        let mut state = self.host.state.lock();
        state.observe(&self.host.choices, self.number, &range, Reader::Atomic)?;
        let number = self.number;
        let is_here = |hidden: &Hidden| hidden.is_atomic && (hidden.block, hidden.offset) == (number, offset);
        while let Some(index) = state.hidden.iter().position(is_here) {
            state.show_piece(index);
        }
        let old = as_word(&state.visible(number, &range)?);
        let new = apply(operation, old);
        match state.placement {
            _ if new == old => {}
            Placement::Adversarial => state.hide(number, offset, &new.to_ne_bytes(), origin, true),
            _ => state.change(number, offset, &new.to_ne_bytes())?,
        }
        Ok(old)
    }

    fn sample(&self, offset: u64, into: &mut [u8], since: u64) -> Result<(), MemoryFault> {
        let range = self.range(offset, into.len())?;
        let mut state = self.host.state.lock();
        state.observe(&self.host.choices, self.number, &range, Reader::Read)?;
        for line in lines(range) {
            let mut values = state.values(self.number, &line, since)?;
            let chosen = match values.len() {
                1 => 0,
                count => {
                    let words =
                        [0x7361_6d70, state.host.into(), self.number, line.start, since, state.changes];
                    let by_seed = |seed: Seed| seed.below(count as u64, &words) as u8;
                    let describe = |value| {
                        format!(
                            "{} µs: on {}, a READ of region {} +{:#x}, {} B, returns what was there {value} changes \
                             before",
                            state.now.nanos() as f64 / 1000.0,
                            state.host_name,
                            self.number,
                            line.start,
                            line.end - line.start,
                        )
                    };
                    self.host.choices.lock().choose(count as u8, by_seed, describe)
                }
            };
            let at = (line.start - offset) as usize;
            into[at..at + (line.end - line.start) as usize]
                .copy_from_slice(&values.swap_remove(chosen.into()));
        }
        Ok(())
    }
}

impl Drop for PlacedMemory {
    fn drop(&mut self) {
        let mut state = self.host.state.lock();
        state.blocks.remove(&self.number);
        state.hidden.retain(|hidden| hidden.block != self.number);
        state.overwritten.retain(|old| old.block != self.number);
    }
}

fn as_word(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes.try_into().expect("a word has eight bytes"))
}

fn apply(operation: AtomicOperation, old: u64) -> u64 {
    match operation {
        AtomicOperation::CompareSwap { compare, swap } if old == compare => swap,
        AtomicOperation::CompareSwap { .. } => old,
        AtomicOperation::FetchAdd { add } => old.wrapping_add(add),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Host {
        host: Arc<HostPlacement>,
        memory: Arc<MemoryBlock>,
    }

    impl Host {
        /// A host with a region of 1 MiB, and the choices of an interleaving.
        fn new(placement: Placement, interleaving: &str) -> Host {
            let mut choices = Choices::by_seed(1);
            choices.follow(interleaving.parse().unwrap());
            let host = HostPlacement::new(placement, 0, "server", Arc::new(Mutex::new(choices)));
            let memory = host.wrap(Arc::new(MemoryBlock::new(1 << 20)));
            Host { host, memory }
        }

        /// The first message of a queue pair with this PSN stores a byte at each offset.
        fn place(&self, qp: u32, psn: u32, offset: u64, byte: u8) {
            let (qp, first_psn) = (Qpn::new(qp), Psn::new(psn));
            let origin = WriteOrigin { qp, role: WriterRole::Responder, first_psn, now_ns: 0 };
            self.memory.place(offset, &[byte], &origin).unwrap();
        }

        fn read(&self, offset: u64) -> u8 {
            let mut byte = [0];
            self.memory.read(offset, &mut byte).unwrap();
            byte[0]
        }

        fn choices(&self) -> Vec<u8> {
            self.host.choices.lock().alternatives.clone()
        }
    }

    #[test]
    fn an_interleaving_has_a_text() {
        for text in ["none", "12:1", "0:1,40:7"] {
            assert_eq!(text.parse::<Interleaving>().unwrap().to_string(), text);
        }
        for text in ["", "1", "1:", "1:2,", "1:300", "a:b"] {
            let expected = format!("{text:?} is not an interleaving such as 12:1,40:2 or none");
            assert_eq!(text.parse::<Interleaving>(), Err(expected));
        }
    }

    #[test]
    fn data_is_hidden_until_its_queue_pair_orders_it_or_time_passes() {
        let order: [fn(&Host); 2] = [
            |host| host.host.order(Qpn::new(5), WriterRole::Responder),
            |host| host.host.expire(Instant::ZERO.plus(HIDDEN_FOR)),
        ];
        for order in order {
            let host = Host::new(Placement::Adversarial, "0:1,1:1,2:1");
            host.place(5, 1, 0, 7);
            assert_eq!(host.host.next_deadline(), Some(Instant::ZERO.plus(HIDDEN_FOR)));
            host.host.order(Qpn::new(6), WriterRole::Responder);
            host.host.order(Qpn::new(5), WriterRole::Requester);
            assert_eq!((host.read(0), host.choices().len()), (0, 1));
            order(&host);
            assert_eq!((host.read(0), host.choices().len()), (7, 1), "visible without a choice");
            assert_eq!(host.host.next_deadline(), None);
        }
    }

    #[test]
    fn a_device_out_of_order_keeps_the_order_of_messages() {
        for (placement, expected) in [(Placement::OutOfOrder, [9, 7]), (Placement::Adversarial, [9, 0])] {
            let host = Host::new(placement, "1:1");
            host.place(5, 1, 0, 7);
            host.place(5, 2, 64, 9);
            assert_eq!([host.read(64), host.read(0)], expected, "{placement:?}");
        }
        // Lines of one message have no order.
        let host = Host::new(Placement::OutOfOrder, "1:1");
        host.place(5, 1, 0, 7);
        host.place(5, 1, 64, 9);
        assert_eq!([host.read(64), host.read(0)], [9, 0]);
    }

    #[test]
    fn writes_of_a_queue_pair_to_the_same_byte_keep_their_order() {
        // The reader does not see the first, and then sees the second.
        let host = Host::new(Placement::Adversarial, "0:1");
        host.place(5, 1, 0, 7);
        host.place(5, 2, 0, 9);
        assert_eq!(host.read(0), 9);
        host.host.expire(Instant::ZERO.plus(HIDDEN_FOR));
        assert_eq!(host.read(0), 9);
    }

    #[test]
    fn a_reader_that_cannot_notice_makes_no_choice() {
        let host = Host::new(Placement::Adversarial, "none");
        host.place(5, 1, 0, 0);
        host.place(5, 1, 64, 7);
        assert_eq!((host.read(0), host.read(1), host.read(128)), (0, 0, 0));
        assert!(host.choices().is_empty());
    }

    #[test]
    fn hidden_data_is_bounded() {
        let host = Host::new(Placement::Adversarial, "none");
        let origin =
            WriteOrigin { qp: Qpn::new(5), role: WriterRole::Responder, first_psn: Psn::new(1), now_ns: 0 };
        host.memory.place(0, &[7; 1 << 20], &origin).unwrap();
        let since = host.host.start_read(Instant::ZERO);
        host.memory.place(1, &[8; (1 << 20) - 1], &origin).unwrap();
        host.host.order(Qpn::new(5), WriterRole::Responder);
        let state = host.host.state.lock();
        assert_eq!((state.hidden.len(), state.overwritten.len()), (0, MAX_OVERWRITTEN));
        assert_eq!((state.blocks.len(), since), (1, 0));
        drop(state);
        assert_eq!((host.read(0), host.read(1), host.choices().len()), (7, 8, 0));
        assert_eq!(host.memory.place((1 << 20) - 3, &[1; 4], &origin), Err(MemoryFault));
        assert_eq!(host.memory.place(u64::MAX, &[1; 4], &origin), Err(MemoryFault));
        drop(host.memory);
        assert!(host.host.state.lock().blocks.is_empty());
    }

    #[test]
    fn a_read_returns_each_line_as_it_was_at_some_moment_since_it_began() {
        let sample = |interleaving| {
            let host = Host::new(Placement::OutOfOrder, interleaving);
            host.memory.write(0, &[1; 128]).unwrap();
            let since = host.host.start_read(Instant::ZERO);
            host.memory.write(0, &[2; 128]).unwrap();
            let mut bytes = [0; 128];
            host.memory.sample(0, &mut bytes, since).unwrap();
            let later = host.host.start_read(Instant::ZERO);
            let mut again = [0; 128];
            host.memory.sample(0, &mut again, later).unwrap();
            assert_eq!(again, [2; 128]);
            assert_eq!(host.choices(), [2, 2]);
            [bytes[0], bytes[64]]
        };
        assert_eq!(["none", "0:1", "1:1", "0:1,1:1"].map(sample), [[2, 2], [1, 2], [2, 1], [1, 1]]);
    }

    #[test]
    fn atomics_exclude_each_other_and_no_store_of_the_host() {
        let host = Host::new(Placement::Adversarial, "0:1");
        let origin = |qp| WriteOrigin {
            qp: Qpn::new(qp),
            role: WriterRole::Responder,
            first_psn: Psn::new(1),
            now_ns: 0,
        };
        let add = AtomicOperation::FetchAdd { add: 1 };
        assert_eq!(host.memory.place_atomic(8, add, &origin(5)), Ok(0));
        assert_eq!(host.memory.load(8), Ok(0), "not visible to the host yet");
        host.memory.write(8, &100u64.to_ne_bytes()).unwrap();
        assert_eq!(host.memory.place_atomic(8, add, &origin(6)), Ok(1), "the store of the host is lost");
        host.host.order(Qpn::new(6), WriterRole::Responder);
        assert_eq!(host.memory.load(8), Ok(2));
        assert_eq!(host.memory.place_atomic(9, add, &origin(5)), Err(MemoryFault));
    }
}
