//! The search for an order of operations, after Wing and Gong, with Lowe's memory of configurations.

use super::{Consistency, Entry, Model};
use std::collections::{BTreeMap, HashSet};

/// The result of a search.
pub(super) enum Outcome<S> {
    /// An order explains all results.
    Explained,
    /// No order does. The longest one that explains the results of its operations, and the value after it.
    Unexplained(Partial<S>),
    /// The bound was reached.
    Undecided,
}

/// An order of some operations, and the value after them.
#[derive(Clone)]
pub(super) struct Partial<S> {
    pub order: Vec<usize>,
    pub state: S,
}

/// Operations that an order has, as a set of bits.
struct Done(Vec<u64>);

/// A [`Done`] without the words at its ends that say nothing, and the number of those at its beginning.
type DoneKey = (usize, Vec<u64>);

impl Done {
    fn contains(&self, index: usize) -> bool {
        self.0[index / 64] >> (index % 64) & 1 == 1
    }

    fn toggle(&mut self, index: usize) {
        self.0[index / 64] ^= 1 << (index % 64);
    }

    /// The number of words at the beginning that have all operations.
    fn full_words(&self) -> usize {
        self.0.iter().take_while(|word| **word == u64::MAX).count()
    }

    /// The words between those with all operations and those with none: long histories take little memory.
    fn key(&self) -> DoneKey {
        let first = self.full_words();
        let last = self.0.iter().rposition(|word| *word != 0).map_or(first, |last| last + 1);
        (first, self.0[first..last.max(first)].to_vec())
    }
}

pub(super) struct Search<'a, M: Model> {
    pub model: &'a M,
    pub consistency: Consistency,
    pub steps: u64,
}

/// An order that the search extends, operation by operation.
struct Level<S> {
    state: S,
    candidates: Vec<usize>,
    next: usize,
    /// The operation that led to this level.
    chosen: Option<usize>,
}

impl<M: Model> Search<'_, M> {
    /// Searches for an order that begins with one of the values.
    pub fn run(&self, entries: &[Entry<M>], initial: &[M::State]) -> Outcome<M::State> {
        let mut longest: Option<Partial<M::State>> = None;
        let mut found = false;
        let is_within = self.visit(entries, initial, |order, state, is_complete| {
            if longest.as_ref().is_none_or(|longest| order.len() > longest.order.len()) {
                longest = Some(Partial { order: order.to_vec(), state: state.clone() });
            }
            found = is_complete;
            !found
        });
        match longest {
            _ if found => Outcome::Explained,
            Some(longest) if is_within => Outcome::Unexplained(longest),
            _ => Outcome::Undecided,
        }
    }

    /// The values that the object may have after all operations; `None` if a bound was reached.
    pub fn final_states(&self, entries: &[Entry<M>], initial: &[M::State]) -> Option<Vec<M::State>> {
        let mut states: Vec<M::State> = Vec::new();
        let is_within = self.visit(entries, initial, |_, state, is_complete| {
            if is_complete && !states.contains(state) {
                states.push(state.clone());
            }
            true
        });
        is_within.then_some(states)
    }

    /// Visits each set of operations with each value that an order of them leads to, with one such order. `visit` returns
    /// whether to continue. Returns false if the bound was reached.
    fn visit(
        &self,
        entries: &[Entry<M>],
        initial: &[M::State],
        mut visit: impl FnMut(&[usize], &M::State, bool) -> bool,
    ) -> bool {
        let required = entries.iter().filter(|entry| entry.end.is_some()).count();
        let mut known: HashSet<(DoneKey, M::State)> = HashSet::new();
        let mut steps = 0;
        for state in initial {
            let mut done = Done(vec![0; entries.len().div_ceil(64)]);
            let (mut order, mut completed) = (Vec::new(), 0);
            if !visit(&order, state, required == 0) {
                return true;
            }
            let candidates = self.candidates(entries, &done);
            let mut levels = vec![Level { state: state.clone(), candidates, next: 0, chosen: None }];
            while let Some(level) = levels.last_mut() {
                let Some(index) = level.candidates.get(level.next).copied() else {
                    if let Some(chosen) = level.chosen {
                        done.toggle(chosen);
                        completed -= usize::from(entries[chosen].end.is_some());
                        order.pop();
                    }
                    levels.pop();
                    continue;
                };
                level.next += 1;
                if steps == self.steps {
                    return false;
                }
                steps += 1;
                let entry = &entries[index];
                let Some(state) = self.model.step(&level.state, &entry.operation, entry.result.as_ref())
                else {
                    continue;
                };
                done.toggle(index);
                if !known.insert((done.key(), state.clone())) {
                    done.toggle(index);
                    continue;
                }
                order.push(index);
                completed += usize::from(entry.end.is_some());
                if !visit(&order, &state, completed == required) {
                    return true;
                }
                let candidates = self.candidates(entries, &done);
                levels.push(Level { state, candidates, next: 0, chosen: Some(index) });
            }
        }
        true
    }

    /// The operations that may come next. Entries are in the order of their calls.
    fn candidates(&self, entries: &[Entry<M>], done: &Done) -> Vec<usize> {
        let waiting = entries.iter().enumerate().skip(64 * done.full_words());
        let waiting = waiting.filter(|(index, _)| !done.contains(*index));
        match self.consistency {
            Consistency::Linearizable => {
                let mut earliest_end = u64::MAX;
                let mut candidates = Vec::new();
                for (index, entry) in waiting {
                    if entry.call > earliest_end {
                        break;
                    }
                    candidates.push(index);
                    earliest_end = earliest_end.min(entry.end.unwrap_or(u64::MAX));
                }
                candidates
            }
            Consistency::Sequential => {
                let mut first: BTreeMap<&str, usize> = BTreeMap::new();
                for (index, entry) in waiting {
                    first.entry(&entry.client).or_insert(index);
                }
                first.into_values().collect()
            }
        }
    }
}
