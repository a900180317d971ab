//! Histories of an object that clients use at the same time, and whether an order of the operations explains them.
//!
//! A lock, a log or a store that programs build on RDMA is correct if it behaves as the plain object does when one client
//! uses it at a time. Clients record each operation when they begin it and when they have its result. A [`Model`] is the
//! plain object. [`History::check`] searches for an order of the operations that the model permits.
//!
//! ```
//! use softhca::history::{Consistency, History, Word, WordOperation::{FetchAdd, Read}};
//!
//! let history = History::<Word>::default();
//! let alice = history.invoke("alice", FetchAdd { add: 1 });
//! let bob = history.invoke("bob", FetchAdd { add: 1 });
//! history.respond(alice, Some(0));
//! history.respond(bob, Some(0)); // It was 1 by then, or alice's result is wrong.
//! let error = history.check(&Word(0), Consistency::Linearizable).unwrap_err().to_string();
//! assert!(error.starts_with("not linearizable: no order of these 2 operations explains their results"), "{error}");
//! ```
//!
//! In a [`World`](crate::sim::World), [`World::check`](crate::sim::World::check) does so at the end of each run.

mod counterexample;
mod models;
mod search;

pub use counterexample::{Counterexample, RecordedOperation};
pub use models::{Log, LogOperation, Register, RegisterOperation, Word, WordOperation};

use crate::Instant;
use counterexample::minimize;
use parking_lot::Mutex;
use search::{Outcome, Search};
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::{self, Debug};
use std::hash::Hash;
use std::sync::Arc;

/// A plain object, which one client uses at a time.
pub trait Model {
    /// The value of the object.
    type State: Clone + Eq + Hash + Debug;
    /// An operation with its arguments.
    type Operation: Clone + Debug;
    /// The result of an operation.
    type Result: Clone + Debug;

    /// The value at the beginning.
    fn initial(&self) -> Self::State;

    /// The value after an operation, or `None` if the operation cannot have this result. An operation whose client never
    /// saw a result has none; it may have any.
    fn step(
        &self,
        state: &Self::State,
        operation: &Self::Operation,
        result: Option<&Self::Result>,
    ) -> Option<Self::State>;

    /// Whether the operation can change the value. Counterexamples omit other operations where they can.
    fn changes_state(&self, operation: &Self::Operation) -> bool {
        let _ = operation;
        true
    }

    /// The number of the object that the operation uses, if a model has several that are independent, such as the keys of
    /// a store. Linearizability is checked for each.
    fn object(&self, operation: &Self::Operation) -> u64 {
        let _ = operation;
        0
    }
}

/// What the order of the operations has to respect, besides the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    /// An operation that ended before another one began comes before it.
    Linearizable,
    /// The operations of each client come in their order. Other clients may see them later.
    Sequential,
}

impl fmt::Display for Consistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Consistency::Linearizable => "linearizable",
            Consistency::Sequential => "sequentially consistent",
        })
    }
}

/// How long a check searches. The search is exponential in the number of operations that overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The most operations.
    pub operations: usize,
    /// The most operations that the search tries. A million take seconds, and each may keep a copy of the value.
    pub steps: u64,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { operations: 10_000, steps: 1_000_000 }
    }
}

/// Why a history is not known to be consistent.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HistoryError {
    /// No order explains the results.
    Inconsistent(Box<Counterexample>),
    /// A bound was reached before the search ended.
    Undecided {
        /// What was checked.
        consistency: Consistency,
        /// The number of operations.
        operations: usize,
        /// The bounds.
        bounds: Bounds,
    },
}

impl fmt::Display for HistoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HistoryError::Inconsistent(counterexample) => write!(f, "{counterexample}"),
            HistoryError::Undecided { consistency, operations, bounds }
                if *operations > bounds.operations =>
            {
                write!(
                    f,
                    "undecided: the history has {operations} operations, and a check whether it is {consistency} takes at \
                 most {}: record fewer, or raise Bounds::operations",
                    bounds.operations
                )
            }
            HistoryError::Undecided { consistency, operations, bounds } => write!(
                f,
                "undecided: {} steps do not suffice to decide whether the history of {operations} operations is \
                 {consistency}: let fewer operations overlap, or raise Bounds::steps",
                bounds.steps
            ),
        }
    }
}

/// As its display, so that `unwrap` shows the ladder.
impl Debug for HistoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error for HistoryError {}

/// An operation of a history. `call` and `end` are places in the order of all invocations and responses.
pub(crate) struct Entry<M: Model> {
    client: String,
    operation: M::Operation,
    result: Option<M::Result>,
    call: u64,
    end: Option<u64>,
    called_at: Instant,
    ended_at: Option<Instant>,
}

// Derived, it would require the model to be `Clone`.
impl<M: Model> Clone for Entry<M> {
    fn clone(&self) -> Entry<M> {
        Entry {
            client: self.client.clone(),
            operation: self.operation.clone(),
            result: self.result.clone(),
            ..*self
        }
    }
}

struct Record<M: Model> {
    entries: Vec<Entry<M>>,
    events: u64,
    /// The operation in progress of each client.
    in_progress: BTreeMap<String, usize>,
}

/// An operation that has begun. [`History::respond`] ends it; one that is dropped stays without a result.
#[derive(Debug)]
#[must_use = "the operation ends with `History::respond`"]
pub struct Invocation {
    index: usize,
}

/// The operations of clients on an object. Clones are handles of one history.
pub struct History<M: Model> {
    record: Arc<Mutex<Record<M>>>,
}

impl<M: Model> Clone for History<M> {
    fn clone(&self) -> History<M> {
        History { record: self.record.clone() }
    }
}

impl<M: Model> Default for History<M> {
    fn default() -> History<M> {
        let record = Record { entries: Vec::new(), events: 0, in_progress: BTreeMap::new() };
        History { record: Arc::new(Mutex::new(record)) }
    }
}

impl<M: Model> History<M> {
    /// A client begins an operation, now.
    ///
    /// # Panics
    /// If an operation of the client is in progress: a client is sequential. Name each task of a host as a client.
    pub fn invoke(&self, client: &str, operation: M::Operation) -> Invocation {
        let called_at = crate::now();
        let mut record = self.record.lock();
        let index = record.entries.len();
        let earlier = record.in_progress.insert(client.into(), index);
        assert!(earlier.is_none(), "client {client:?} begins an operation while another one has no result");
        let call = record.events;
        record.events += 1;
        let client = client.into();
        record.entries.push(Entry {
            client,
            operation,
            result: None,
            call,
            end: None,
            called_at,
            ended_at: None,
        });
        Invocation { index }
    }

    /// The client has the result, now.
    pub fn respond(&self, invocation: Invocation, result: M::Result) {
        let ended_at = crate::now();
        let mut record = self.record.lock();
        let end = record.events;
        record.events += 1;
        let Record { entries, in_progress, .. } = &mut *record;
        let entry = &mut entries[invocation.index];
        (entry.end, entry.ended_at, entry.result) = (Some(end), Some(ended_at), Some(result));
        in_progress.remove(&entry.client);
    }

    /// Records an operation from its beginning to its end.
    ///
    /// # Errors
    /// Those of the operation, which then has no result.
    pub async fn record<E>(
        &self,
        client: &str,
        operation: M::Operation,
        run: impl Future<Output = Result<M::Result, E>>,
    ) -> Result<M::Result, E> {
        let invocation = self.invoke(client, operation);
        let result = run.await?;
        self.respond(invocation, result.clone());
        Ok(result)
    }

    /// The number of operations.
    pub fn len(&self) -> usize {
        self.record.lock().entries.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Searches for an order of the operations that the model permits, within the default [`Bounds`].
    ///
    /// # Errors
    /// A counterexample, or that the bounds were reached.
    pub fn check(&self, model: &M, consistency: Consistency) -> Result<(), HistoryError> {
        self.check_within(model, consistency, Bounds::default())
    }

    /// As [`History::check`], with other bounds.
    ///
    /// # Errors
    /// A counterexample, or that the bounds were reached.
    pub fn check_within(
        &self,
        model: &M,
        consistency: Consistency,
        bounds: Bounds,
    ) -> Result<(), HistoryError> {
        let entries = self.record.lock().entries.clone();
        let undecided = HistoryError::Undecided { consistency, operations: entries.len(), bounds };
        if entries.len() > bounds.operations {
            return Err(undecided);
        }
        let mut objects: BTreeMap<u64, Vec<Entry<M>>> = BTreeMap::new();
        for entry in entries {
            let object = match consistency {
                Consistency::Linearizable => model.object(&entry.operation),
                // An order of the operations of each object need not fit together to one of all.
                Consistency::Sequential => 0,
            };
            objects.entry(object).or_default().push(entry);
        }
        let mut is_decided = true;
        for entries in objects.into_values() {
            let search = Search { model, consistency, steps: bounds.steps };
            match search.run(&entries, &[model.initial()]) {
                Outcome::Explained => {}
                Outcome::Unexplained(_) => {
                    return Err(HistoryError::Inconsistent(Box::new(minimize(&search, entries))));
                }
                Outcome::Undecided => is_decided = false,
            }
        }
        if is_decided { Ok(()) } else { Err(undecided) }
    }
}
